//! OrderedAllReduce of gradient buffers that the kernels of all ranks access, where they can: the same bits as over NCCL.

use gradsync::comm::{Communicator, ReduceOp};
use gradsync::driver::Queue;
use gradsync::memory::Cuda;
use gradsync::ops::OrderedAllReduce;
use gradsync::{Error, GradientBuffer};
use gradsync_tests::array::{dtype, patterns_of, write};
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::Checks;

use super::World;
use super::ordered::{inputs, oracle};
use crate::report::Report;

/// Layouts of one to three tensors; the last layout has shards without elements.
const SHAPES: [&[usize]; 5] = [&[1], &[4097], &[33, 0, 1000], &[100_003, 7], &[3]];

pub(super) fn run(world: &World<'_>, report: &mut Report) {
    for format in Format::ALL {
        for op in [ReduceOp::Sum, ReduceOp::Mean] {
            report
                .case(&format!("ordered_all_reduce by peers, {op} of {}", format.name()), || shapes(world, format, op));
        }
    }
    report.case("ordered_all_reduce by peers, ten runs under way", || again(world));
    report.case("ordered_all_reduce by peers, on two queues", || two_queues(world));
    report.case("ordered_all_reduce by peers, refused", || refused(world));
}

fn tensors(lens: &[usize]) -> Vec<(String, Vec<usize>)> {
    lens.iter().enumerate().map(|(index, &len)| (format!("tensor {index}"), vec![len])).collect()
}

/// This rank's numbers in a host buffer.
fn host(world: &World<'_>, format: Format, lens: &[usize], ranks: &[Vec<f64>]) -> GradientBuffer {
    let mut host = GradientBuffer::new(dtype(format), world.size(), tensors(lens)).unwrap();
    let mut rest = &ranks[world.rank()][..];
    for segment in host.segments().to_vec() {
        let (own, others) = rest.split_at(segment.len());
        write(host.as_mut_slice(), segment.start, own);
        rest = others;
    }
    host
}

/// The bits of the tensors without the gaps; panics if a gap is not zero.
fn tensors_of(host: &GradientBuffer) -> Vec<u64> {
    let all = patterns_of(host.as_slice());
    let inside = |place: usize| host.segments().iter().any(|segment| segment.contains(&place));
    assert!(all.iter().enumerate().all(|(place, &bits)| bits == 0 || inside(place)), "a gap is not zero any more");
    host.segments().iter().flat_map(|segment| all[segment.clone()].to_vec()).collect()
}

/// A buffer on the device and its reduction.
fn connect<'c>(
    world: &World<'c>,
    queue: &Queue,
    host: &GradientBuffer,
    lens: &[usize],
    op: ReduceOp,
) -> (GradientBuffer<Cuda>, OrderedAllReduce<'c>) {
    let mut buffer = GradientBuffer::on_queue(queue, host.dtype(), world.size(), tensors(lens)).unwrap();
    buffer.copy_from_host(host).unwrap();
    let ordered = OrderedAllReduce::new(world.comm, &buffer, op).unwrap();
    let can = world.size() > 1 && world.context.layout.reaches_peers();
    assert_eq!(ordered.uses_peers(), can, "GPUs of one machine reach each other, and others do not");
    (buffer, ordered)
}

fn shapes(world: &World<'_>, format: Format, op: ReduceOp) {
    let queue = &world.context.queue;
    let mut checks = Checks::new(world.comm);
    for lens in SHAPES {
        let ranks = inputs(world, (format, format), lens.iter().sum());
        let mut host = host(world, format, lens, &ranks);
        let (mut buffer, mut ordered) = connect(world, queue, &host, lens, op);
        ordered.all_reduce(&mut buffer).unwrap();
        world.comm.synchronize(queue).unwrap();
        buffer.copy_to_host(&mut host).unwrap();
        let expected = oracle((format, format), op, &ranks).patterns();
        checks.same_list(format!("tensors of {lens:?}"), tensors_of(&host), expected);
    }
    checks.finish();
}

/// Repeated sums, ten in a row, with no wait in between.
fn again(world: &World<'_>) {
    let (queue, format, lens) = (&world.context.queue, Format::F64, [4097, 5]);
    let ranks: Vec<Vec<f64>> = (0..world.size()).map(|rank| vec![rank as f64 + 1.0; 4102]).collect();
    let mut host = host(world, format, &lens, &ranks);
    let (mut buffer, mut ordered) = connect(world, queue, &host, &lens, ReduceOp::Sum);
    for _ in 0..10 {
        ordered.all_reduce(&mut buffer).unwrap();
    }
    world.comm.synchronize(queue).unwrap();
    buffer.copy_to_host(&mut host).unwrap();
    // The first sum is P (P + 1) / 2, and each further one multiplies it by P.
    let size = world.size() as f64;
    let expected = (size * (size + 1.0) / 2.0 * size.powi(9)).to_bits();
    let mut checks = Checks::new(world.comm);
    checks.same_list("ten sums", tensors_of(&host), vec![expected; 4102]);
    checks.finish();
}

/// Two buffers on two queues, reduced in turn: the launches are ordered, as they could otherwise fill the GPUs and wait for ever.
fn two_queues(world: &World<'_>) {
    let queues = [world.context.queue.clone(), Queue::new(world.context.queue.ordinal()).unwrap()];
    let lens = [1 << 20];
    let ranks: Vec<Vec<f64>> = (0..world.size()).map(|rank| vec![rank as f64; 1 << 20]).collect();
    let mut host = host(world, Format::F64, &lens, &ranks);
    let mut pairs: Vec<_> = queues.iter().map(|queue| connect(world, queue, &host, &lens, ReduceOp::Mean)).collect();
    for _ in 0..20 {
        for (buffer, ordered) in &mut pairs {
            ordered.all_reduce(buffer).unwrap();
        }
    }
    let mean = (world.size() - 1) as f64 / 2.0;
    let mut checks = Checks::new(world.comm);
    for ((buffer, _), queue) in pairs.iter().zip(&queues) {
        world.comm.synchronize(queue).unwrap();
        buffer.copy_to_host(&mut host).unwrap();
        let far: Vec<u64> = tensors_of(&host)
            .into_iter()
            // Each term of a mean and each partial sum is rounded once, in each of twenty reductions.
            .filter(|&bits| (f64::from_bits(bits) - mean).abs() > 20.0 * 8.0 * f64::EPSILON * mean)
            .collect();
        checks.same_list("elements that are not the mean", far, Vec::new());
    }
    checks.finish();
}

fn refused(world: &World<'_>) {
    let queue = &world.context.queue;
    let lens = [100];
    let ranks = inputs(world, (Format::F32, Format::F32), 100);
    let host = host(world, Format::F32, &lens, &ranks);
    let (mut buffer, mut ordered) = connect(world, queue, &host, &lens, ReduceOp::Sum);
    for op in [ReduceOp::Max, ReduceOp::Min] {
        let outcome = OrderedAllReduce::new(world.comm, &buffer, op);
        assert!(matches!(outcome, Err(Error::InvalidArgument { .. })), "{outcome:?}");
    }
    let mut other = GradientBuffer::on_queue(queue, dtype(Format::F32), world.size(), tensors(&lens)).unwrap();
    let outcome = ordered.all_reduce(&mut other);
    let is_refused = matches!(&outcome, Err(Error::InvalidArgument { reason, .. }) if reason.contains("mapped"));
    assert_eq!(is_refused, ordered.uses_peers(), "{outcome:?}");
    assert_eq!(outcome.is_ok(), !ordered.uses_peers(), "a transport takes any buffer with these tensors: {outcome:?}");
    // Nothing was communicated by a refused call, and the object still works.
    ordered.all_reduce(&mut buffer).unwrap();
    world.comm.synchronize(queue).unwrap();
}
