//! Ownership of memory that kernels reach, arenas and mailboxes: memory that a rank has dropped is not reused while a peer or a graph may
//! write to it, and is released when all of them have let go. Also launches that wait for their peers, of two and of three communicators on
//! the same GPUs, in another order on each rank.

use std::time::{Duration, Instant};

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Collectives, CommError, Communicator, Ranks, ReduceOp};
use gradsync::driver::{DeviceBuffer, Queue};
use gradsync::memory::Cuda;
use gradsync::ops::{Adasum, AdasumOptions, OrderedAllReduce};
use gradsync::{DType, Error, GradientBuffer};

use crate::context::Context;
use crate::report::Report;

/// The number of elements of a gradient buffer, which gives shards of several tiles for every number of ranks.
const LEN: usize = 1 << 20;

pub(crate) fn run(context: &Context, report: &mut Report) {
    for (generation, by) in [(0, By::Arenas), (20, By::Packets)] {
        report.case(&format!("a peer that goes on writes to nobody else's memory, {by:?}"), || {
            peer_goes_on(context, generation, by)
        });
        report.case(&format!("memory comes back when every rank has let go, {by:?}"), || {
            comes_back(context, generation + 2, by)
        });
        report.case(&format!("a graph outlives all that it was recorded with, {by:?}"), || {
            graph_outlives(context, generation + 3, by)
        });
    }
    report.case("two communicators, in another order on each rank", || other_order(context, [4, 5]));
    report.case("an Adasum between sums, in another order on each rank", || adasum_between_sums(context, [11, 12, 13]));
    report.case("an object on one queue, its buffer on another's thread", || dropped_first(context, 6));
    report.case("an object that is dropped while work is recorded", || dropped_in_a_recording(context, 7));
    report.case("a recorded graph keeps its part of the GPU", || keeps_its_part(context, [8, 9]));
    report.case("kernels of one communicator in two branches of a recording", || branches(context, 10));
    report.case("a graph with calls of NCCL by threads of one process", || launched_by_the_communicator(context, 14));
}

fn buffer(queue: &Queue, world_size: usize) -> GradientBuffer<Cuda> {
    GradientBuffer::on_queue(queue, DType::F32, world_size, [("tensor", [LEN])]).unwrap()
}

/// The memory of other ranks that kernels of Adasum write to.
#[derive(Clone, Copy, Debug)]
enum By {
    /// Buffers, and mailboxes for sums.
    Arenas,
    /// Mailboxes for packets.
    Packets,
}

fn adasum<'c>(comm: &'c NcclCommunicator, buffer: &GradientBuffer<Cuda>, by: By) -> Adasum<'c, Cuda> {
    let low_latency_bytes = match by {
        By::Arenas => 0,
        By::Packets => usize::MAX,
    };
    let options = AdasumOptions::default();
    let adasum = Adasum::with_low_latency(comm, buffer, options, Some(low_latency_bytes), Some(0)).unwrap();
    assert!(adasum.uses_peers() || comm.world_size() == 1, "kernels reach all buffers");
    adasum
}

/// Buffers of the sizes of a dropped Adasum object's memory, filled with ones.
fn successors(queue: &Queue, world_size: usize) -> Vec<DeviceBuffer> {
    let shard = LEN / world_size;
    // Mailboxes for packets hold an arena several times.
    let lens = [LEN, shard * (world_size - 1), LEN + 4096, shard * (world_size - 1) + 4096, 2 * LEN, 3 * LEN, 4 * LEN];
    let filled = |len: usize| DeviceBuffer::from_host(queue, (&vec![1.0f32; len][..]).into()).unwrap();
    lens.iter().cycle().take(28).map(|&len| filled(len)).collect()
}

fn assert_ones(buffers: &[DeviceBuffer]) {
    for buffer in buffers {
        let mut numbers = vec![0.0f32; buffer.as_slice().len()];
        buffer.as_slice().copy_to_host((&mut numbers[..]).into()).unwrap();
        let wrong = numbers.iter().filter(|&&number| number != 1.0).count();
        assert_eq!(wrong, 0, "of {} elements of an unrelated buffer", numbers.len());
    }
}

/// Rank 0 drops its object and its buffer after a step, and the others begin another step: their kernels send before they wait.
fn peer_goes_on(context: &Context, generation: u64, by: By) {
    let queue = &context.queue;
    // A comparison of calls would keep ranks that are threads of one process from launching.
    let comm = context.communicator(generation, &context.options().with_checks(false));
    let mut gradients = buffer(queue, context.world_size);
    let mut adasum = adasum(&comm, &gradients, by);
    adasum.all_reduce(&mut gradients).unwrap();
    comm.synchronize(queue).unwrap();
    if context.rank == 0 {
        drop((adasum, gradients));
        let others = successors(queue, context.world_size);
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(50));
            assert_ones(&others);
        }
        comm.abort();
        assert_ones(&others);
    } else {
        let host = vec![2.0f32; LEN];
        gradients.tensor_mut(0).copy_from_slice(&host[..]).unwrap();
        adasum.all_reduce(&mut gradients).unwrap();
        let error = comm.synchronize(queue).expect_err("rank 0 has not called it");
        assert!(matches!(error, Error::Comm(CommError::Transport { rank: 0, .. })), "{error}");
    }
    let _next = context.communicator(generation + 1, &context.options());
}

/// After all ranks have dropped their objects, the memory is used again.
fn comes_back(context: &Context, generation: u64, by: By) {
    let queue = &context.queue;
    let comm = context.communicator(generation, &context.options());
    let mut addresses = Vec::new();
    for _ in 0..3 {
        let mut gradients = buffer(queue, context.world_size);
        addresses.push(gradients.as_slice().address());
        let mut adasum = adasum(&comm, &gradients, by);
        adasum.all_reduce(&mut gradients).unwrap();
        comm.synchronize(queue).unwrap();
        drop((gradients, adasum));
    }
    await_memory(context, &addresses);
}

/// Waits until a new buffer is allocated at one of the addresses that all ranks have dropped.
fn await_memory(context: &Context, addresses: &[u64]) {
    if context.world_size == 1 {
        return;
    }
    let begun = Instant::now();
    let mut held = Vec::new();
    loop {
        let next = buffer(&context.queue, context.world_size);
        if addresses.contains(&next.as_slice().address()) {
            break;
        }
        held.push(next);
        assert!(begun.elapsed() < Duration::from_secs(5), "no rank's memory has come back");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Communicator, object and buffer are dropped; the graph keeps the memory that it needs, and no other memory changes.
fn graph_outlives(context: &Context, generation: u64, by: By) {
    let queue = &context.queue;
    // A graph with calls of NCCL by threads of one process can only be launched by the communicator.
    let options = context.options().with_low_latency_bytes(Some(LEN * 4));
    let comm = context.communicator(generation, &options);
    let mut gradients = buffer(queue, context.world_size);
    let mut loose = DeviceBuffer::zeroed(queue, DType::F32, LEN).unwrap();
    let mut adasum = adasum(&comm, &gradients, by);
    let mut step = || {
        adasum.all_reduce(&mut gradients)?;
        comm.all_reduce(loose.as_mut_slice(), ReduceOp::Sum)
    };
    step().unwrap();
    comm.synchronize(queue).unwrap();
    let graph = queue.capture(step).unwrap();
    drop((adasum, gradients, loose));
    drop(comm);
    let others = successors(queue, context.world_size);
    for _ in 0..3 {
        graph.launch().unwrap();
    }
    queue.synchronize().unwrap();
    assert_ones(&others);
    drop(graph);
    assert_ones(&others);
}

/// Whether there are peers, whose memory all these sums access then: the suite runs on GPUs of one machine.
fn reaches_peers(context: &Context, sums: &[OrderedAllReduce<'_>]) -> bool {
    let has_peers = context.world_size > 1;
    assert!(!has_peers || sums.iter().all(OrderedAllReduce::uses_peers), "GPUs of one machine reach each other");
    has_peers
}

/// Each rank launches sums of two communicators on two queues; neighbours launch them in opposite order. Each communicator has its share of
/// the GPU's resident blocks, so neither waits for the other's end.
fn other_order(context: &Context, generations: [u64; 2]) {
    let queues = [context.queue.clone(), Queue::new(context.queue.ordinal()).unwrap()];
    // A comparison of calls would hold back ranks that are threads of one process until the others have made the same call.
    let options = context.options().with_checks(false);
    let comms = generations.map(|generation| context.communicator(generation, &options));
    let mut buffers = [0, 1].map(|index: usize| buffer(&queues[index], context.world_size));
    let mut sums = Vec::new();
    for (comm, buffer) in comms.iter().zip(&buffers) {
        sums.push(OrderedAllReduce::new(comm, buffer, ReduceOp::Mean).unwrap());
    }
    if !reaches_peers(context, &sums) {
        return;
    }
    let first = context.rank % 2;
    for _ in 0..20 {
        for index in [first, 1 - first] {
            sums[index].all_reduce(&mut buffers[index]).unwrap();
        }
    }
    for (comm, queue) in comms.iter().zip(&queues) {
        comm.synchronize(queue).unwrap();
    }
}

/// Each rank launches a sum, an Adasum over packets, and a sum, of three communicators, on three queues; neighbours launch them in opposite
/// order. All blocks of the Adasum have to be resident together, and on more than two ranks each fills a multiprocessor: the sums leave
/// enough multiprocessors free.
fn adasum_between_sums(context: &Context, generations: [u64; 3]) {
    let queues = [0; 3].map(|_| Queue::new(context.queue.ordinal()).unwrap());
    let options = context.options().with_checks(false).with_deadline(Duration::from_secs(20));
    let options = options.with_low_latency_bytes(Some(LEN * 4));
    let comms = generations.map(|generation| context.communicator(generation, &options));
    let ones = vec![1.0f32; LEN];
    let mut tensors = [0, 2].map(|index: usize| DeviceBuffer::from_host(&queues[index], (&ones[..]).into()).unwrap());
    let mut gradients = buffer(&queues[1], context.world_size);
    gradients.tensor_mut(0).copy_from_slice(&ones[..]).unwrap();
    let mut adasum = adasum(&comms[1], &gradients, By::Packets);
    let mut launch = |index: usize| match index {
        1 => adasum.all_reduce(&mut gradients).unwrap(),
        _ => comms[index].all_reduce(tensors[index / 2].as_mut_slice(), ReduceOp::Mean).unwrap(),
    };
    // The first calls exchange the addresses of mailboxes.
    let same_order = [0, 1, 2];
    let own_order = if context.rank % 2 == 0 { same_order } else { [2, 1, 0] };
    for order in std::iter::once(same_order).chain(std::iter::repeat_n(own_order, 20)) {
        order.into_iter().for_each(&mut launch);
    }
    for (comm, queue) in comms.iter().zip(&queues) {
        comm.synchronize(queue).unwrap();
    }
    assert_ones(&tensors);
    let mut numbers = vec![0.0f32; LEN];
    gradients.tensor(0).data().copy_to_host((&mut numbers[..]).into()).unwrap();
    assert_eq!(numbers, ones, "the Adasum of equal vectors");
}

/// The buffer is dropped before the object that was made for it: the object keeps its memory, and refuses another buffer at the same
/// address.
fn dropped_first(context: &Context, generation: u64) {
    let queue = &context.queue;
    let comm = context.communicator(generation, &context.options());
    let mut gradients = buffer(queue, context.world_size);
    let mut adasum = adasum(&comm, &gradients, By::Arenas);
    adasum.all_reduce(&mut gradients).unwrap();
    drop(gradients);
    let others = successors(queue, context.world_size);
    let mut other = buffer(queue, context.world_size);
    let outcome = adasum.all_reduce(&mut other);
    let is_refused = matches!(&outcome, Err(Error::InvalidArgument { reason, .. }) if reason.contains("mapped"));
    assert!(is_refused || context.world_size == 1, "{outcome:?}");
    comm.synchronize(queue).unwrap();
    assert_ones(&others);
}

/// Memory dropped during a recording takes no part in it, and the recording continues; the memory is released once the graph is gone.
fn dropped_in_a_recording(context: &Context, generation: u64) {
    let queue = &context.queue;
    let comm = context.communicator(generation, &context.options());
    let mut gradients = buffer(queue, context.world_size);
    let mut adasum = adasum(&comm, &gradients, By::Arenas);
    adasum.all_reduce(&mut gradients).unwrap();
    let mut ones = DeviceBuffer::from_host(queue, (&vec![1.0f32; LEN][..]).into()).unwrap();
    comm.all_reduce(ones.as_mut_slice(), ReduceOp::Max).unwrap();
    comm.synchronize(queue).unwrap();
    let address = gradients.as_slice().address();
    let graph = queue
        .capture(|| {
            drop((adasum, gradients));
            comm.all_reduce(ones.as_mut_slice(), ReduceOp::Max)
        })
        .unwrap();
    for _ in 0..3 {
        comm.launch(&graph).unwrap();
    }
    comm.synchronize(queue).unwrap();
    assert_ones(&[ones]);
    drop(graph);
    await_memory(context, &[address]);
}

/// A second communicator would need resident blocks on the GPU that each launch of the graph occupies.
fn keeps_its_part(context: &Context, generations: [u64; 2]) {
    let queue = &context.queue;
    let comms = generations.map(|generation| context.communicator(generation, &context.options()));
    let mut buffers = [0, 1].map(|_| buffer(queue, context.world_size));
    let mut first = OrderedAllReduce::new(&comms[0], &buffers[0], ReduceOp::Mean).unwrap();
    if !reaches_peers(context, std::slice::from_ref(&first)) {
        return;
    }
    first.all_reduce(&mut buffers[0]).unwrap();
    comms[0].synchronize(queue).unwrap();
    let graph = queue.capture(|| first.all_reduce(&mut buffers[0])).unwrap();
    let error = OrderedAllReduce::new(&comms[1], &buffers[1], ReduceOp::Mean).expect_err("the graph needs the places");
    assert!(matches!(&error, Error::Cuda(cuda) if cuda.code == 720), "{error}");
    drop(graph);
    // Ranks that are threads share the resident blocks: the graphs of all of them have to be gone.
    comms[0].barrier().unwrap();
    let mut second = OrderedAllReduce::new(&comms[1], &buffers[1], ReduceOp::Mean).unwrap();
    assert!(second.uses_peers(), "as the first");
    let graph = queue.capture(|| first.all_reduce(&mut buffers[0])).unwrap();
    for _ in 0..3 {
        graph.launch().unwrap();
        second.all_reduce(&mut buffers[1]).unwrap();
    }
    comms[1].synchronize(queue).unwrap();
}

/// Kernels of one communicator run one after another, even in a graph with branches that could run at the same time.
fn branches(context: &Context, generation: u64) {
    let queues = [context.queue.clone(), Queue::new(context.queue.ordinal()).unwrap()];
    let comm = context.communicator(generation, &context.options());
    let mut buffers = [0, 1].map(|index: usize| buffer(&queues[index], context.world_size));
    let mut sums = Vec::new();
    for buffer in &mut buffers {
        buffer.tensor_mut(0).copy_from_slice(&vec![1.0f32; LEN][..]).unwrap();
        let mut sum = OrderedAllReduce::new(&comm, buffer, ReduceOp::Mean).unwrap();
        sum.all_reduce(buffer).unwrap();
        sums.push(sum);
    }
    if !reaches_peers(context, &sums) {
        return;
    }
    let [main, branch] = &queues;
    let graph = main.capture(|| {
        branch.wait_for(&main.record()?)?;
        sums.iter_mut().zip(&mut buffers).try_for_each(|(sum, buffer)| sum.all_reduce(buffer))?;
        Ok(main.wait_for(&branch.record()?)?)
    });
    let graph = graph.unwrap();
    for _ in 0..20 {
        comm.launch(&graph).unwrap();
    }
    comm.synchronize(main).unwrap();
    for buffer in &buffers {
        let mut numbers = vec![0.0f32; LEN];
        buffer.tensor(0).data().copy_to_host((&mut numbers[..]).into()).unwrap();
        assert!(numbers.iter().all(|&number| number == 1.0), "the mean of ones");
    }
}

/// Where NCCL writes to the memory of another thread directly, only the communicator launches graphs with its calls: it compares them.
fn launched_by_the_communicator(context: &Context, generation: u64) {
    let queue = &context.queue;
    let comm = context.communicator(generation, &context.options().with_checks(false));
    let mut ones = DeviceBuffer::from_host(queue, (&vec![1.0f32; LEN][..]).into()).unwrap();
    comm.all_reduce(ones.as_mut_slice(), ReduceOp::Max).unwrap();
    let graph = queue.capture(|| comm.all_reduce(ones.as_mut_slice(), ReduceOp::Max)).unwrap();
    for _ in 0..3 {
        comm.launch(&graph).unwrap();
    }
    if context.in_threads && context.world_size > 1 {
        let error = graph.launch().expect_err("nothing compares the launch");
        assert!(error.code == 900 && error.text.contains("NcclCommunicator::launch"), "{error}");
    } else {
        graph.launch().unwrap();
    }
    comm.synchronize(queue).unwrap();
    assert_ones(&[ones]);
}
