//! Streams: several communicators and queues on one GPU, and memory that is reused while collectives are in progress.
//!
//! All numbers are small integers, so that every sum is exact in f32 and each result identifies its call.

use gradsync::DType;
use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::comm::{Collectives, Communicator, ReduceOp, Scaling};
use gradsync::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use gradsync::internal::kernels::cuda;
use gradsync_tests::suite::checks::Checks;

use crate::ballast::Ballast;
use crate::context::{Context, DEADLINE};
use crate::raw_stream;
use crate::report::Report;

const LEN: usize = 100_003;
const SUM: ReduceOp = ReduceOp::Sum;

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = context.first(report) else { return };
    let streams = Streams { context, comm: &comm };
    report.case("two communicators in turn", || streams.in_turn());
    report.case("two communicators on two queues", || streams.side_by_side());
    report.case("produced and consumed on another queue", || streams.two_queues());
    report.case("an input overwritten after the call", || streams.overwritten());
    report.case("an input dropped after the call", || streams.dropped());
    report.case("a communicator dropped with 100 operations queued", || streams.communicator_dropped());
    report.case("a queue on another's stream", || streams.wrapped());
    report.case("the example raw_stream", || streams.example());
}

/// A rank's numbers: element `index` times `factor`.
fn number(rank: usize, index: usize, factor: usize) -> usize {
    (index % 97 + 1 + rank) * factor
}

/// The sum of all ranks' numbers.
fn total(world_size: usize, factor: usize) -> Vec<f32> {
    (0..LEN).map(|index| (0..world_size).map(|rank| number(rank, index, factor)).sum::<usize>() as f32).collect()
}

/// The elements of one of the results in a buffer.
fn slot(index: usize) -> std::ops::Range<usize> {
    index * LEN..(index + 1) * LEN
}

struct Streams<'c> {
    context: &'c Context,
    comm: &'c NcclCommunicator,
}

impl Streams<'_> {
    fn queue(&self) -> &Queue {
        &self.context.queue
    }

    /// Options under which calls return before the other ranks have made them.
    fn unchecked(&self) -> NcclOptions {
        self.context.options().with_checks(false)
    }

    /// This rank's numbers with factor 1.
    fn base(&self, queue: &Queue) -> DeviceBuffer {
        let values: Vec<f32> = (0..LEN).map(|index| number(self.context.rank, index, 1) as f32).collect();
        DeviceBuffer::from_host(queue, (&values).into()).unwrap()
    }

    /// A buffer for `count` results.
    fn results(&self, queue: &Queue, count: usize) -> DeviceBuffer {
        DeviceBuffer::zeroed(queue, DType::F32, count * LEN).unwrap()
    }

    /// Checks that result `index` is the sum with factor `factor(index)`, once the queue has completed all its work.
    fn check(&self, results: &DeviceBuffer, factor: impl Fn(usize) -> usize) {
        let view = results.as_slice();
        let mut values = vec![0f32; view.len()];
        view.copy_to_host((&mut values).into()).unwrap();
        let mut checks = Checks::new(self.comm);
        for (index, result) in values.chunks(LEN).enumerate() {
            let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|value| value.to_bits()).collect() };
            let expected = total(self.context.world_size, factor(index));
            checks.same_list(format!("result {index}"), bits(result), bits(&expected));
        }
        checks.finish();
    }

    /// All ranks use the communicators in the same order, on one queue, without waiting in between.
    fn in_turn(&self) {
        const ROUNDS: usize = 20;
        let queue = self.queue();
        let other = self.context.communicator(1, &self.unchecked());
        let base = self.base(queue);
        let mut results = self.results(queue, ROUNDS);
        for round in 0..ROUNDS {
            let comm = if round % 2 == 0 { self.comm } else { &other };
            let mut place = results.as_mut_slice().range_mut(slot(round));
            cuda::scale(place.reborrow(), base.as_slice(), (round + 1) as f64).unwrap();
            comm.all_reduce(place, SUM).unwrap();
        }
        self.comm.synchronize(queue).unwrap();
        other.synchronize(queue).unwrap();
        self.check(&results, |round| round + 1);
    }

    /// All ranks use the communicators in the same order, each on a queue of its own, so that their collectives run at the same time.
    fn side_by_side(&self) {
        const ROUNDS: usize = 20;
        let queues = [self.queue().clone(), Queue::new(self.queue().ordinal()).unwrap()];
        let others = [2, 3].map(|generation| self.context.communicator(generation, &self.unchecked()));
        let bases = [0, 1].map(|index: usize| self.base(&queues[index]));
        let mut results = [0, 1].map(|index: usize| self.results(&queues[index], ROUNDS));
        for round in 0..ROUNDS {
            for (index, comm) in others.iter().enumerate() {
                let mut place = results[index].as_mut_slice().range_mut(slot(round));
                cuda::scale(place.reborrow(), bases[index].as_slice(), (2 * round + index + 1) as f64).unwrap();
                comm.all_reduce(place, SUM).unwrap();
            }
        }
        for (comm, queue) in others.iter().zip(&queues) {
            comm.synchronize(queue).unwrap();
        }
        for (index, results) in results.iter().enumerate() {
            self.check(results, |round| 2 * round + index + 1);
        }
    }

    /// Queue A writes the input late and reads the result; the collective is on queue B, and only events order the two.
    fn two_queues(&self) {
        const ROUNDS: usize = 10;
        let (a, b) = (self.queue(), Queue::new(self.queue().ordinal()).unwrap());
        let comm = self.context.communicator(4, &self.unchecked());
        let base = self.base(a);
        let mut data = self.results(a, 1);
        let mut results = self.results(a, ROUNDS + 1);
        let mut ballast = Ballast::new(a);
        for round in 0..ROUNDS {
            ballast.put(100);
            cuda::scale(data.as_mut_slice(), base.as_slice(), (round + 1) as f64).unwrap();
            b.wait_for(&a.record().unwrap()).unwrap();
            // SAFETY: The memory outlives the wait below. B waits for A's earlier work on the memory, and A's later work on it waits for B.
            let on_b = unsafe { DeviceSliceMut::from_raw_parts(&b, data.as_slice().address(), DType::F32, LEN) };
            comm.all_reduce(on_b, SUM).unwrap();
            a.wait_for(&b.record().unwrap()).unwrap();
            results.as_mut_slice().range_mut(slot(round)).copy_from_device(data.as_slice()).unwrap();
            cuda::accumulate(results.as_mut_slice().range_mut(slot(ROUNDS)), data.as_slice()).unwrap();
        }
        comm.synchronize(a).unwrap();
        comm.synchronize(&b).unwrap();
        // The last result is the sum of all others.
        self.check(&results, |round| if round == ROUNDS { ROUNDS * (ROUNDS + 1) / 2 } else { round + 1 });
    }

    /// The input of each call is overwritten right after it, 50 times, before any of the work has started.
    fn overwritten(&self) {
        const ROUNDS: usize = 50;
        let queue = self.queue();
        let comm = self.context.communicator(5, &self.unchecked());
        let base = self.base(queue);
        let (mut input, mut results) = (self.results(queue, 1), self.results(queue, ROUNDS));
        let mut ballast = Ballast::new(queue);
        ballast.put(100);
        for round in 0..ROUNDS {
            cuda::scale(input.as_mut_slice(), base.as_slice(), (round + 1) as f64).unwrap();
            let output = results.as_mut_slice().range_mut(slot(round));
            comm.all_reduce_into(input.as_slice(), output, SUM, Scaling::NONE).unwrap();
            cuda::zero(input.as_mut_slice()).unwrap();
        }
        drop(input);
        comm.synchronize(queue).unwrap();
        self.check(&results, |round| round + 1);
    }

    /// The input of each call is dropped right after it; a new buffer of the same size takes over its memory and is written.
    fn dropped(&self) {
        const ROUNDS: usize = 50;
        let queue = self.queue();
        let comm = self.context.communicator(6, &self.unchecked());
        let base = self.base(queue);
        let mut results = self.results(queue, ROUNDS);
        let mut ballast = Ballast::new(queue);
        ballast.put(100);
        for round in 0..ROUNDS {
            let mut input = self.results(queue, 1);
            cuda::scale(input.as_mut_slice(), base.as_slice(), (round + 1) as f64).unwrap();
            let output = results.as_mut_slice().range_mut(slot(round));
            comm.all_reduce_into(input.as_slice(), output, SUM, Scaling::NONE).unwrap();
            let address = input.as_slice().address();
            drop(input);
            let mut next = self.results(queue, 1);
            assert_eq!(next.as_slice().address(), address, "memory was not used again, so that nothing was tried");
            cuda::scale(next.as_mut_slice(), base.as_slice(), -1.0).unwrap();
        }
        comm.synchronize(queue).unwrap();
        self.check(&results, |round| round + 1);
    }

    /// Dropping a communicator waits for its calls.
    fn communicator_dropped(&self) {
        const ROUNDS: usize = 100;
        let queue = self.queue();
        let comm = self.context.communicator(7, &self.unchecked());
        let base = self.base(queue);
        let mut results = self.results(queue, ROUNDS);
        let mut ballast = Ballast::new(queue);
        // The first call connects the ranks, during which the host may wait; so it precedes the ballast and the other calls.
        comm.all_reduce(results.as_mut_slice().range_mut(slot(0)), SUM).unwrap();
        ballast.put(100);
        for round in 0..ROUNDS {
            let mut place = results.as_mut_slice().range_mut(slot(round));
            cuda::scale(place.reborrow(), base.as_slice(), (round + 1) as f64).unwrap();
            comm.all_reduce(place, SUM).unwrap();
        }
        drop(comm);
        self.check(&results, |round| round + 1);
    }

    /// A queue made from the stream of another is ordered with it, without events: the other writes the input late, and
    /// reads the result.
    fn wrapped(&self) {
        const ROUNDS: usize = 10;
        let queue = self.queue();
        // SAFETY: the stream is of the device's primary context, as all streams of queues are, and its queue outlives
        // this one.
        let wrapper = unsafe { Queue::from_raw_stream(queue.ordinal(), queue.stream()) }.unwrap();
        assert_eq!(wrapper.stream(), queue.stream());
        let comm = self.context.communicator(8, &self.unchecked());
        let base = self.base(queue);
        let (mut data, mut results) = (self.results(queue, 1), self.results(queue, ROUNDS));
        let mut own = self.results(&wrapper, 1);
        let mut ballast = Ballast::new(queue);
        for round in 0..ROUNDS {
            ballast.put(100);
            cuda::scale(data.as_mut_slice(), base.as_slice(), (round + 1) as f64).unwrap();
            // SAFETY: the memory outlives the wait below, and both queues' work on it is in one stream.
            let input = unsafe { DeviceSlice::from_raw_parts(&wrapper, data.as_slice().address(), DType::F32, LEN) };
            comm.all_reduce_into(input, own.as_mut_slice(), SUM, Scaling::NONE).unwrap();
            // SAFETY: as above.
            let output = unsafe { DeviceSlice::from_raw_parts(queue, own.as_slice().address(), DType::F32, LEN) };
            results.as_mut_slice().range_mut(slot(round)).copy_from_device(output).unwrap();
        }
        comm.synchronize(&wrapper).unwrap();
        self.check(&results, |round| round + 1);
    }

    /// Gradients of another library, in its stream: rank `r` has `r + 1` and ten times that.
    fn example(&self) {
        let (rank, world_size) = (self.context.rank, self.context.world_size);
        let connect = |queue: &Queue| {
            let member = self.context.join(rank, world_size, 9, DEADLINE)?;
            NcclCommunicator::new(member, queue, &self.context.options())
        };
        let means = raw_stream::run(self.queue().ordinal(), connect).unwrap();
        let mean = (world_size + 1) as f32 / 2.0;
        assert_eq!(means, [vec![mean; 1000], vec![10.0 * mean; 3]]);
    }
}
