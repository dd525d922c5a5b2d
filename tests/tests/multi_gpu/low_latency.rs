//! Small sums by one launch: the bits of a sum in rank order, by both numbers of shots, at any address, over many calls, in graphs and on
//! several queues.

use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::comm::{Collectives, Communicator, ReduceOp, Scaling};
use gradsync::driver::{DeviceBuffer, Graph, Queue};
use gradsync::internal::kernels::cuda::zero;
use gradsync::{DType, Error};
use gradsync_tests::array::{Array, dtype};
use gradsync_tests::inputs::Random;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::{Checks, assert_same};

use crate::bundles::ordered;
use crate::context::Context;
use crate::placed::Placed;
use crate::report::Report;

/// The largest tensor here, in bytes.
const MOST_BYTES: usize = 1 << 20;
/// From one element to all that the mailboxes hold; with few elements some ranks have no window.
const LENS: [usize; 8] = [1, 2, 3, 7, 1000, 4097, 30_001, 131_072];

pub(crate) fn run(context: &Context, report: &mut Report) {
    for (generation, (shots, one_shot_bytes)) in [("two shots", 0), ("one shot", usize::MAX)].into_iter().enumerate() {
        let Some(comm) = communicator(context, report, generation as u64, one_shot_bytes) else { return };
        for format in Format::ALL {
            for op in [ReduceOp::Sum, ReduceOp::Mean] {
                report.case(&format!("{op} of {} in {shots}", format.name()), || lens(context, &comm, format, op));
            }
        }
        report.case(&format!("elements with all bits set, in {shots}"), || all_bits_set(context, &comm));
    }
    let Some(comm) = communicator(context, report, 2, IN_TURNS) else { return };
    report.case("calls at random sizes", || many(context, &comm, 2_000));
    report.case("calls at random sizes, in a graph", || graph(context, &comm));
    report.case("two queues in turn, and a graph", || two_queues(context, &comm));
    report.case("two communicators", || two_communicators(context, &comm));
    report.case("left to NCCL", || left_to_nccl(context, &comm));
    report.case("refused", || refused(context, comm));
}

/// So many calls that each slot of the mailboxes is used again often.
pub(crate) fn run_many(context: &Context, report: &mut Report) {
    let Some(comm) = communicator(context, report, 0, IN_TURNS) else { return };
    report.case("100000 calls at random sizes", || many(context, &comm, 100_000));
}

/// The largest tensor that is sent in one shot where both ways take turns, in bytes.
const IN_TURNS: usize = 8 << 10;

fn communicator(
    context: &Context,
    report: &mut Report,
    generation: u64,
    one_shot_bytes: usize,
) -> Option<NcclCommunicator> {
    let mut comm = None;
    report.case(&format!("communicator {generation}"), || {
        let options = context.options().with_checks(false);
        let options = options.with_low_latency_bytes(Some(MOST_BYTES)).with_one_shot_bytes(Some(one_shot_bytes));
        let made = context.communicator(generation, &options);
        let expected = if context.world_size > 1 { MOST_BYTES } else { 0 };
        assert_eq!(made.low_latency_bytes(), expected, "GPUs of one machine reach each other");
        comm = Some(made);
    });
    comm
}

/// In place and into another tensor.
fn lens(context: &Context, comm: &NcclCommunicator, format: Format, op: ReduceOp) {
    let (queue, rank) = (&context.queue, context.rank);
    let mut checks = Checks::new(comm);
    for len in LENS {
        let ranks = ordered::inputs_of(context.world_size, (format, format), len);
        let expected = ordered::oracle((format, format), op, &ranks).patterns();
        for begin in [0, 1, 3] {
            let own = Array::new(format, &ranks[rank]);
            let (mut place, input) = (Placed::new(queue, &own, begin), Placed::new(queue, &own, begin));
            comm.all_reduce(place.slice_mut(), op).unwrap();
            checks.same_list(format!("{len} in place at {begin}"), place.read(comm).patterns(), expected.clone());
            // The output is aligned otherwise than the input.
            let mut output = Placed::unwritten(queue, format, len, begin / 2);
            comm.all_reduce_into(input.slice(), output.slice_mut(), op, Scaling::NONE).unwrap();
            checks.same_list(format!("{len} from {begin}"), output.read(comm).patterns(), expected.clone());
            assert_same("the input", &input.read(comm).patterns(), &own.patterns());
        }
    }
    checks.finish();
}

/// Elements all of whose bits are set, as those of a mailbox before a packet arrives, and signalling ones, whose quiet form has all bits set.
/// They are not a number, and neither are their sums.
fn all_bits_set(context: &Context, comm: &NcclCommunicator) {
    const LEN: usize = 4097;
    // Whole packets of every format, and parts of them.
    let (is_set, is_signalling) = (|index: usize| index % 64 < 35, |index: usize| (35..51).contains(&(index % 64)));
    let sum = context.world_size as f64;
    let mut checks = Checks::new(comm);
    for format in Format::ALL {
        let bits = |value: &f64| if value.is_nan() { f64::NAN.to_bits() } else { value.to_bits() };
        let expected: Vec<u64> =
            (0..LEN).map(|index| bits(&if is_set(index) || is_signalling(index) { f64::NAN } else { sum })).collect();
        for sender in 0..context.world_size {
            let set = u64::MAX >> (64 - 8 * dtype(format).size_bytes());
            let signalling = set & !(1 << (format.precision() - 2));
            let one = Array::new(format, &[1.0]).patterns()[0];
            let own = (0..LEN).map(|index| match context.rank == sender {
                true if is_set(index) => set,
                true if is_signalling(index) => signalling,
                _ => one,
            });
            let mut place = Placed::new(&context.queue, &Array::from_patterns(format, own), 0);
            comm.all_reduce(place.slice_mut(), ReduceOp::Sum).unwrap();
            let found = place.read(comm).values().iter().map(bits).collect();
            checks.same_list(format!("{} from rank {sender}", format.name()), found, expected.clone());
        }
    }
    checks.finish();
}

/// The numbers of a buffer of f32.
fn read(buffer: &DeviceBuffer) -> Vec<f32> {
    let mut found = vec![0f32; buffer.as_slice().len()];
    buffer.as_slice().copy_to_host((&mut found[..]).into()).unwrap();
    found
}

/// The number of elements of a source of random calls.
const SOURCE: usize = 20_000;
/// The number of sources, each with other numbers, so that data of an earlier call are noticed.
const SOURCES: usize = 5;

/// Small integers, whose sums are exact.
fn number(rank: usize, source: usize, index: usize) -> f64 {
    ((rank + 1) * (index % 13 + 1) + source * 7) as f64
}

/// Sources on the device, and the sums of all ranks.
fn sources(context: &Context) -> (Vec<DeviceBuffer>, Vec<Vec<f32>>) {
    let all = |of: &dyn Fn(usize, usize) -> f64| -> Vec<Vec<f32>> {
        (0..SOURCES).map(|source| (0..SOURCE).map(|index| of(source, index) as f32).collect()).collect()
    };
    let own = all(&|source, index| number(context.rank, source, index));
    let sums = all(&|source, index| (0..context.world_size).map(|rank| number(rank, source, index)).sum());
    let place = |values: &Vec<f32>| DeviceBuffer::from_host(&context.queue, (&values[..]).into()).unwrap();
    (own.iter().map(place).collect(), sums)
}

/// A random call: its source, and the range of its elements. All ranks draw the same.
fn draw(random: &mut Random) -> (usize, std::ops::Range<usize>) {
    // All orders of magnitude are equally frequent, so that one and two shots alternate.
    let most = 1usize << random.below(15);
    let len = 1 + random.below(most as u64) as usize;
    let begin = random.below((SOURCE - len + 1) as u64) as usize;
    (random.below(SOURCES as u64) as usize, begin..begin + len)
}

/// Calls that follow each other without a wait, each with an output of its own, so that no wrong element stays unnoticed.
fn many(context: &Context, comm: &NcclCommunicator, calls: usize) {
    const TOGETHER: usize = 50;
    let queue = &context.queue;
    let (sources, expected) = sources(context);
    let mut output = DeviceBuffer::zeroed(queue, DType::F32, TOGETHER * SOURCE).unwrap();
    let mut random = Random::new(5);
    let mut found = vec![0f32; TOGETHER * SOURCE];
    for round in 0..calls / TOGETHER {
        let drawn: Vec<_> = (0..TOGETHER).map(|_| draw(&mut random)).collect();
        let mut begin = 0;
        for (source, range) in &drawn {
            let place = output.as_mut_slice().range_mut(begin..begin + range.len());
            let input = sources[*source].as_slice().range(range.clone());
            comm.all_reduce_into(input, place, ReduceOp::Sum, Scaling::NONE).unwrap();
            begin += range.len();
        }
        comm.synchronize(queue).unwrap();
        output.as_slice().range(0..begin).copy_to_host((&mut found[..begin]).into()).unwrap();
        let mut rest = &found[..begin];
        for (call, (source, range)) in drawn.into_iter().enumerate() {
            let (of_call, others) = rest.split_at(range.len());
            assert!(of_call == &expected[source][range.clone()], "call {call} of round {round}: {range:?} of {source}");
            rest = others;
        }
    }
}

/// Twenty calls in a graph that is launched 500 times, with plain calls in between.
fn graph(context: &Context, comm: &NcclCommunicator) {
    const CALLS: usize = 20;
    let queue = &context.queue;
    let (sources, expected) = sources(context);
    let mut random = Random::new(6);
    let drawn: Vec<_> = (0..CALLS).map(|_| draw(&mut random)).collect();
    let mut outputs: Vec<DeviceBuffer> =
        drawn.iter().map(|(_, range)| DeviceBuffer::zeroed(queue, DType::F32, range.len()).unwrap()).collect();
    let graph: Graph = queue
        .capture(|| {
            for ((source, range), output) in drawn.iter().zip(&mut outputs) {
                let input = sources[*source].as_slice().range(range.clone());
                comm.all_reduce_into(input, output.as_mut_slice(), ReduceOp::Sum, Scaling::NONE)?;
            }
            Ok::<_, Error>(())
        })
        .unwrap();
    let mut plain = DeviceBuffer::zeroed(queue, DType::F32, 3).unwrap();
    for launch in 0..500 {
        comm.launch(&graph).unwrap();
        let input = sources[0].as_slice().range(0..3);
        comm.all_reduce_into(input, plain.as_mut_slice(), ReduceOp::Sum, Scaling::NONE).unwrap();
        if launch % 100 == 0 {
            comm.synchronize(queue).unwrap();
            for output in &mut outputs {
                zero(output.as_mut_slice()).unwrap();
            }
        }
    }
    comm.synchronize(queue).unwrap();
    for ((source, range), output) in drawn.into_iter().zip(&outputs) {
        assert!(read(output) == expected[source][range.clone()], "{range:?} of {source}");
    }
    assert_eq!(read(&plain), expected[0][..3]);
}

/// Sums on two queues in turn, and in a graph of a third one that is launched without the communicator: each waits for the one before.
fn two_queues(context: &Context, comm: &NcclCommunicator) {
    const LEN: usize = 10_000;
    let queue = || Queue::new(context.queue.ordinal()).unwrap();
    let queues = [context.queue.clone(), queue(), queue()];
    let mut data = queues.each_ref().map(|queue| {
        let values = vec![(context.rank + 1) as f32; LEN];
        DeviceBuffer::from_host(queue, (&values[..]).into()).unwrap()
    });
    let [first, second, recorded] = &mut data;
    let graph = queues[2].capture(|| comm.all_reduce(recorded.as_mut_slice(), ReduceOp::Mean)).unwrap();
    for _ in 0..30 {
        comm.all_reduce(first.as_mut_slice(), ReduceOp::Mean).unwrap();
        comm.all_reduce(second.as_mut_slice(), ReduceOp::Mean).unwrap();
        graph.launch().unwrap();
    }
    let mean = (context.world_size + 1) as f32 / 2.0;
    for (data, queue) in data.iter().zip(&queues) {
        comm.synchronize(queue).unwrap();
        let found = read(data);
        // Each result is rounded once, and so are the terms; thirty times.
        let bound = 30.0 * 2.0 * f32::EPSILON * mean;
        assert!(found.iter().all(|value| (value - mean).abs() <= bound && *value == found[0]), "{:?}", &found[..4]);
    }
}

/// Sums of two communicators on two queues, which run at the same time.
fn two_communicators(context: &Context, comm: &NcclCommunicator) {
    const LEN: usize = 50_000;
    let queue = Queue::new(context.queue.ordinal()).unwrap();
    let member = context.join(context.rank, context.world_size, 3, crate::context::DEADLINE).unwrap();
    let other = NcclCommunicator::new(member, &queue, &context.options().with_checks(false)).unwrap();
    let value = (context.rank + 1) as f32;
    let mut data =
        [&context.queue, &queue].map(|queue| DeviceBuffer::from_host(queue, (&vec![value; LEN][..]).into()).unwrap());
    let [first, second] = &mut data;
    for _ in 0..30 {
        comm.all_reduce(first.as_mut_slice(), ReduceOp::Max).unwrap();
        comm.all_reduce(first.as_mut_slice(), ReduceOp::Mean).unwrap();
        other.all_reduce(second.as_mut_slice(), ReduceOp::Mean).unwrap();
    }
    comm.synchronize(&context.queue).unwrap();
    other.synchronize(&queue).unwrap();
    let (largest, mean) = (context.world_size as f32, (context.world_size + 1) as f32 / 2.0);
    for (data, expected) in data.iter().zip([largest, mean]) {
        let bound = 30.0 * 2.0 * f32::EPSILON * expected;
        let found = read(data);
        assert!(found.iter().all(|value| (value - expected).abs() <= bound && *value == found[0]), "{:?}", &found[..4]);
    }
}

/// Another reduction, too many elements, a factor of zero; and sums of no elements, which are no launch.
fn left_to_nccl(context: &Context, comm: &NcclCommunicator) {
    let (queue, world_size) = (&context.queue, context.world_size as f32);
    let own = DeviceBuffer::from_host(queue, (&vec![2.0f32; MOST_BYTES / 4 + 1][..]).into()).unwrap();
    let mut large = DeviceBuffer::zeroed(queue, DType::F32, MOST_BYTES / 4 + 1).unwrap();
    let mut short = DeviceBuffer::from_host(queue, (&[2.0f32; 3][..]).into()).unwrap();
    comm.all_reduce(short.as_mut_slice().range_mut(0..0), ReduceOp::Sum).unwrap();
    comm.all_reduce(short.as_mut_slice(), ReduceOp::Max).unwrap();
    comm.all_reduce(short.as_mut_slice(), ReduceOp::Sum).unwrap();
    comm.all_reduce_into(own.as_slice(), large.as_mut_slice(), ReduceOp::Sum, Scaling::NONE).unwrap();
    comm.all_reduce_scaled(large.as_mut_slice(), ReduceOp::Sum, Scaling { before: 0.5, after: 4.0 }).unwrap();
    comm.synchronize(queue).unwrap();
    assert_eq!(read(&short), [2.0 * world_size; 3]);
    assert!(read(&large).into_iter().all(|value| value == 4.0 * world_size * world_size));
    let none = Scaling { before: 0.0, after: 4.0 };
    comm.all_reduce_scaled(short.as_mut_slice(), ReduceOp::Sum, none).unwrap();
    comm.synchronize(queue).unwrap();
    assert_eq!(read(&short), [0.0; 3]);
}

fn refused(context: &Context, comm: NcclCommunicator) {
    let attempt = |generation: u64, options: &NcclOptions| {
        let member = context.join(context.rank, context.world_size, generation, crate::context::DEADLINE).unwrap();
        match NcclCommunicator::new(member, &context.queue, options) {
            Err(Error::InvalidArgument { reason, .. }) => reason,
            other => panic!("in place of a refusal: {other:?}"),
        }
    };
    let reason = attempt(4, &context.options().with_low_latency_bytes(Some(65 << 20)));
    assert!(reason.contains("low_latency_bytes is 68157440"), "{reason}");
    // Ranks that differ would wait for packets that nobody sends.
    if context.world_size > 1 {
        let reason = attempt(5, &context.options().with_one_shot_bytes(Some(100 + context.rank)));
        assert!(reason.contains("Some(100)") && reason.contains("Some(101)"), "{reason}");
    }
    // Operands that do not fit each other are refused as NCCL's are, which ends the communicator.
    let own = DeviceBuffer::zeroed(&context.queue, DType::F32, 4).unwrap();
    let mut short = DeviceBuffer::zeroed(&context.queue, DType::F32, 3).unwrap();
    let outcome = comm.all_reduce_into(own.as_slice(), short.as_mut_slice(), ReduceOp::Sum, Scaling::NONE);
    assert!(matches!(outcome, Err(Error::LengthMismatch { .. })), "{outcome:?}");
}
