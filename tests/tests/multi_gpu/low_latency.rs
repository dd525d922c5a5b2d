//! LowLatency: the bits of a sum in rank order, by both numbers of shots, at any address, over many calls and in graphs.

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Collectives, Communicator, ReduceOp, Scaling};
use gradsync::driver::{DeviceBuffer, Graph, Queue};
use gradsync::kernels::cuda::zero;
use gradsync::ops::LowLatency;
use gradsync::{DType, Error};
use gradsync_tests::array::Array;
use gradsync_tests::inputs::Random;
use gradsync_tests::oracle::Format;

use crate::bundles::ordered;
use crate::checks::{Checks, assert_same};
use crate::context::Context;
use crate::placed::Placed;
use crate::report::Report;

/// The largest tensor here, in bytes.
const MOST_BYTES: usize = 1 << 20;
/// From one element to all that the mailboxes hold; with few elements some ranks have no window.
const LENS: [usize; 8] = [1, 2, 3, 7, 1000, 4097, 30_001, 131_072];

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = communicator(context, report, 0) else { return };
    for format in Format::ALL {
        for op in [ReduceOp::Sum, ReduceOp::Mean] {
            report.case(&format!("{op} of {}", format.name()), || lens(context, &comm, format, op));
        }
    }
    report.case("calls at random sizes", || many(context, &comm, 2_000));
    report.case("calls at random sizes, in a graph", || graph(context, &comm));
    report.case("two objects on two queues", || two_queues(context, &comm));
    report.case("refused", || refused(context, &comm));
}

/// So many calls that each slot of the mailboxes is used again often.
pub(crate) fn run_many(context: &Context, report: &mut Report) {
    let Some(comm) = communicator(context, report, 0) else { return };
    report.case("100000 calls at random sizes", || many(context, &comm, 100_000));
}

fn communicator(context: &Context, report: &mut Report, generation: u64) -> Option<NcclCommunicator> {
    let mut comm = None;
    let options = context.options().with_checks(false);
    report.case("communicator", || comm = Some(context.communicator(generation, &options)));
    comm
}

/// The largest tensor that is sent in one shot where both ways take turns, in bytes.
const IN_TURNS: usize = 8 << 10;

/// A communicator over `comm` on `queue`; `None` in a world of one.
fn connect<'c>(
    context: &Context,
    comm: &'c NcclCommunicator,
    queue: &Queue,
    one_shot_bytes: usize,
) -> Option<LowLatency<'c>> {
    let sums = LowLatency::with_one_shot_bytes(comm, queue, MOST_BYTES, one_shot_bytes).unwrap();
    assert_eq!(sums.is_mapped(), context.world_size > 1, "GPUs of one machine reach each other");
    sums.is_mapped().then_some(sums)
}

/// In place and into another tensor, in one shot as far as the mailboxes allow and in two.
fn lens(context: &Context, comm: &NcclCommunicator, format: Format, op: ReduceOp) {
    let (queue, rank) = (&context.queue, context.rank);
    let mut checks = Checks::new(comm);
    for one_shot_bytes in [0, usize::MAX] {
        let Some(sums) = connect(context, comm, queue, one_shot_bytes) else { return };
        for len in LENS {
            let ranks = ordered::inputs_of(context.world_size, (format, format), len);
            let expected = ordered::oracle((format, format), op, &ranks).patterns();
            for begin in [0, 1, 3] {
                let own = Array::new(format, &ranks[rank]);
                let (mut place, input) = (Placed::new(queue, &own, begin), Placed::new(queue, &own, begin));
                sums.all_reduce(place.slice_mut(), op).unwrap();
                checks.same_list(format!("{len} in place at {begin}"), place.read(comm).patterns(), expected.clone());
                // The output is aligned otherwise than the input.
                let mut output = Placed::unwritten(queue, format, len, begin / 2);
                sums.all_reduce_into(input.slice(), output.slice_mut(), op, Scaling::NONE).unwrap();
                checks.same_list(format!("{len} from {begin}"), output.read(comm).patterns(), expected.clone());
                assert_same("the input", &input.read(comm).patterns(), &own.patterns());
            }
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
    let Some(sums) = connect(context, comm, queue, IN_TURNS) else { return };
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
            sums.all_reduce_into(input, place, ReduceOp::Sum, Scaling::NONE).unwrap();
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
    let Some(sums) = connect(context, comm, queue, IN_TURNS) else { return };
    let (sources, expected) = sources(context);
    let mut random = Random::new(6);
    let drawn: Vec<_> = (0..CALLS).map(|_| draw(&mut random)).collect();
    let mut outputs: Vec<DeviceBuffer> =
        drawn.iter().map(|(_, range)| DeviceBuffer::zeroed(queue, DType::F32, range.len()).unwrap()).collect();
    let graph: Graph = queue
        .capture(|| {
            for ((source, range), output) in drawn.iter().zip(&mut outputs) {
                let input = sources[*source].as_slice().range(range.clone());
                sums.all_reduce_into(input, output.as_mut_slice(), ReduceOp::Sum, Scaling::NONE)?;
            }
            Ok::<_, Error>(())
        })
        .unwrap();
    let mut plain = DeviceBuffer::zeroed(queue, DType::F32, 3).unwrap();
    for launch in 0..500 {
        comm.launch(&graph).unwrap();
        let input = sources[0].as_slice().range(0..3);
        sums.all_reduce_into(input, plain.as_mut_slice(), ReduceOp::Sum, Scaling::NONE).unwrap();
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

/// Two objects of one communicator on two queues, in turn.
fn two_queues(context: &Context, comm: &NcclCommunicator) {
    const LEN: usize = 10_000;
    let queues = [context.queue.clone(), Queue::new(context.queue.ordinal()).unwrap()];
    let mut objects = Vec::new();
    for queue in &queues {
        let Some(sums) = connect(context, comm, queue, IN_TURNS) else { return };
        let values = vec![(context.rank + 1) as f32; LEN];
        objects.push((sums, DeviceBuffer::from_host(queue, (&values[..]).into()).unwrap()));
    }
    for _ in 0..30 {
        for (sums, data) in &mut objects {
            sums.all_reduce(data.as_mut_slice(), ReduceOp::Mean).unwrap();
        }
    }
    let mean = (context.world_size + 1) as f32 / 2.0;
    for ((_, data), queue) in objects.iter().zip(&queues) {
        comm.synchronize(queue).unwrap();
        let found = read(data);
        // Each result is rounded once, and so are the terms; thirty times.
        let bound = 30.0 * 2.0 * f32::EPSILON * mean;
        assert!(found.iter().all(|value| (value - mean).abs() <= bound && *value == found[0]), "{:?}", &found[..4]);
    }
}

fn refused(context: &Context, comm: &NcclCommunicator) {
    let queue = &context.queue;
    for bytes in [0, 65 << 20] {
        let outcome = LowLatency::new(comm, queue, bytes);
        let named = |reason: &str| reason.contains(&format!("{bytes} bytes"));
        assert!(matches!(&outcome, Err(Error::InvalidArgument { reason, .. }) if named(reason)), "{outcome:?}");
    }
    // Ranks that differ in the threshold would wait for packets that nobody sends.
    if context.world_size > 1 {
        let outcome = LowLatency::with_one_shot_bytes(comm, queue, MOST_BYTES, 100 + context.rank);
        assert!(matches!(outcome, Err(Error::Disagreement { .. })), "{outcome:?}");
    }
    let Some(sums) = connect(context, comm, queue, IN_TURNS) else { return };
    let own = DeviceBuffer::from_host(queue, (&vec![1.0f32; MOST_BYTES / 4 + 1][..]).into()).unwrap();
    let mut short = DeviceBuffer::zeroed(queue, DType::F32, 3).unwrap();
    // Calls that are not small go to the communicator below: another reduction, another queue, too many elements, factors.
    let elsewhere = Queue::new(queue.ordinal()).unwrap();
    let mut other = DeviceBuffer::from_host(&elsewhere, (&[2.0f32; 3][..]).into()).unwrap();
    let mut large = DeviceBuffer::zeroed(queue, DType::F32, MOST_BYTES / 4 + 1).unwrap();
    sums.all_reduce(other.as_mut_slice(), ReduceOp::Max).unwrap();
    sums.all_reduce(other.as_mut_slice(), ReduceOp::Sum).unwrap();
    sums.all_reduce_into(own.as_slice(), large.as_mut_slice(), ReduceOp::Sum, Scaling::NONE).unwrap();
    sums.all_reduce_scaled(large.as_mut_slice(), ReduceOp::Mean, Scaling { before: 0.5, after: 4.0 }).unwrap();
    // No elements are no launch.
    sums.all_reduce(short.as_mut_slice().range_mut(0..0), ReduceOp::Sum).unwrap();
    sums.all_reduce(short.as_mut_slice(), ReduceOp::Sum).unwrap();
    sums.synchronize(&elsewhere).unwrap();
    sums.synchronize(queue).unwrap();
    let world_size = context.world_size as f32;
    assert_eq!(read(&other), [2.0 * world_size; 3]);
    assert!(read(&large).into_iter().all(|value| value == 2.0 * world_size));
    assert_eq!(read(&short), [0.0; 3]);

    // The communicator below refuses operands that do not fit each other, which ends it.
    let outcome = sums.all_reduce_into(own.as_slice().range(0..4), short.as_mut_slice(), ReduceOp::Sum, Scaling::NONE);
    assert!(matches!(outcome, Err(Error::LengthMismatch { .. })), "{outcome:?}");
}
