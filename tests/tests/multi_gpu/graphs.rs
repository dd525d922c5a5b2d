//! Reductions that are recorded once and launched as CUDA graphs: each launch gives the bits of the plain call.

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Collectives, Communicator, Ranks, ReduceOp, Split};
use gradsync::driver::{DeviceBuffer, Graph, Queue};
use gradsync::memory::Cuda;
use gradsync::ops::{Adasum, AdasumOptions, Algorithm, Nodes, OrderedAllReduce, WithinNode};
use gradsync::{CommError, DType, Error, GradientBuffer, Result};
use gradsync_tests::array::{patterns_of, write};
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::Checks;

use crate::context::Context;
use crate::report::Report;

const LENS: [usize; 5] = [1, 70_001, 0, 513, 4096];

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = context.first(report) else { return };
    let queue = &context.queue;
    for (name, algorithm, sizes) in [
        ("gram", Algorithm::Gram, Some([0, 0])),
        ("gram in one shot", Algorithm::Gram, Some([usize::MAX, usize::MAX])),
        ("gram in two shots", Algorithm::Gram, Some([usize::MAX, 0])),
        ("gram over nccl", Algorithm::Gram, None),
        ("tree over nccl", Algorithm::Tree, None),
    ] {
        if algorithm == Algorithm::Tree && !comm.world_size().is_power_of_two() {
            continue;
        }
        report.case(&format!("adasum, {name}"), || {
            let options = AdasumOptions::default().with_algorithm(algorithm);
            let make = |buffer: &GradientBuffer<Cuda>| match sizes {
                Some([low_latency, one_shot]) => {
                    Adasum::with_low_latency(&comm, buffer, options, Some(low_latency), Some(one_shot))
                }
                None => Adasum::over_transport(&comm, buffer, options),
            };
            let mut adasum = None;
            check(queue, &comm, name, |buffer| {
                let adasum = match &mut adasum {
                    Some(adasum) => adasum,
                    none => none.insert(make(buffer)?),
                };
                adasum.all_reduce(buffer)
            });
        });
    }
    for (name, within_node, algorithm) in [
        ("sum then gram", WithinNode::Reduce(ReduceOp::Sum), Algorithm::Gram),
        ("gram then tree", WithinNode::Adasum, Algorithm::Tree),
    ] {
        for per_node in (1..=comm.world_size()).filter(|per_node| comm.world_size() % per_node == 0) {
            if algorithm == Algorithm::Tree && !(comm.world_size() / per_node).is_power_of_two() {
                continue;
            }
            report.case(&format!("adasum in nodes of {per_node}, {name}"), || {
                let split = |color: usize| comm.split(Some(color as u64), 0).unwrap().expect("a colour");
                let (node, across) = (split(comm.rank() / per_node), split(comm.rank() % per_node));
                let nodes = Nodes::<Cuda> { all: &comm, node: &node, across: &across };
                let options = AdasumOptions::default().with_algorithm(algorithm);
                let mut adasum = None;
                check(queue, &comm, name, |buffer| {
                    let adasum = match &mut adasum {
                        Some(adasum) => adasum,
                        none => none.insert(Adasum::on_nodes(nodes, buffer, within_node, options)?),
                    };
                    adasum.all_reduce(buffer)
                });
            });
        }
    }
    report.case("all_reduce", || {
        check(queue, &comm, "all_reduce", |buffer| comm.all_reduce(buffer.as_mut_slice(), ReduceOp::Sum));
    });
    report.case("ordered_all_reduce", || {
        let mut ordered = None;
        check(queue, &comm, "ordered", |buffer| {
            let ordered = match &mut ordered {
                Some(ordered) => ordered,
                none => {
                    let (wire, op) = (buffer.dtype(), ReduceOp::Mean);
                    none.insert(OrderedAllReduce::over_transport(&comm, buffer, wire, op)?)
                }
            };
            ordered.all_reduce(buffer)
        });
    });
    if comm.world_size() > 1 && context.layout.reaches_peers() {
        report.case("ordered_all_reduce by peers", || {
            let mut peers = None;
            check(queue, &comm, "by peers", |buffer| {
                let peers = match &mut peers {
                    Some(peers) => peers,
                    none => none.insert(OrderedAllReduce::new(&comm, buffer, ReduceOp::Mean)?),
                };
                assert!(peers.uses_peers(), "GPUs of one machine");
                peers.all_reduce(buffer)
            });
        });
    }
    report.case("what cannot be recorded", || refusals(queue));
    drop(comm);
    for (index, has_checks) in [true, false].into_iter().enumerate() {
        let (generation, options) = (1 + 2 * index as u64, context.options().with_checks(has_checks));
        // All calls are NCCL's.
        let options = &options.with_low_latency_bytes(Some(0));
        let suffix = if has_checks { "" } else { ", without checks" };
        report.case(&format!("ranks that record calls of different lengths{suffix}"), || {
            recorded_lengths(context, &context.communicator(generation, options));
        });
        report.case(&format!("ranks that launch different recordings{suffix}"), || {
            launched_recordings(context, &context.communicator(generation + 1, options));
        });
    }
}

#[track_caller]
fn assert_mismatch(outcome: Result<()>, texts: [&str; 2]) {
    let error = outcome.expect_err("the ranks differ");
    let is_named = matches!(&error, Error::Comm(CommError::Mismatch { .. }))
        && texts.iter().all(|text| error.to_string().contains(text));
    assert!(is_named, "{error}");
}

/// NCCL never gets calls of different lengths where it could write to registered buffers of peers.
fn recorded_lengths(context: &Context, comm: &NcclCommunicator) {
    if context.world_size == 1 {
        return;
    }
    let (queue, is_last) = (&context.queue, context.rank + 1 == context.world_size);
    let mut data = DeviceBuffer::zeroed(queue, DType::F32, 1 << 20).unwrap();
    let len = if is_last { 1 << 20 } else { 1 << 10 };
    // The first call connects the ranks. A rank that is slow learns of the mismatch while it still waits for that call.
    let connected = comm.all_reduce(data.as_mut_slice(), ReduceOp::Max).and_then(|()| comm.synchronize(queue));
    let recorded = connected
        .and_then(|()| queue.capture(|| comm.all_reduce(data.as_mut_slice().range_mut(0..len), ReduceOp::Max)));
    assert_mismatch(recorded.map(drop), ["of 1024 × f32", "of 1048576 × f32"]);
}

/// Two recordings of equal calls: launches in the same order give the right numbers, and another order on one rank is an error.
fn launched_recordings(context: &Context, comm: &NcclCommunicator) {
    let (queue, is_last) = (&context.queue, context.rank + 1 == context.world_size);
    let values = vec![context.rank as f32; 5000];
    let mut buffers = [0; 2].map(|_| DeviceBuffer::from_host(queue, (&values[..]).into()).unwrap());
    comm.all_reduce(buffers[0].as_mut_slice(), ReduceOp::Max).unwrap();
    let [one, other] = buffers
        .each_mut()
        .map(|buffer| queue.capture(|| comm.all_reduce(buffer.as_mut_slice(), ReduceOp::Max)).unwrap());
    let mut rounds = [&one, &other, &one].into_iter();
    let agreed = rounds.try_for_each(|graph| comm.launch(graph)).and_then(|()| comm.synchronize(queue));
    // A rank that is slow learns of the mismatch while it still waits for the launches that agree.
    if agreed.is_ok() {
        for buffer in &buffers {
            let mut host = vec![0.0f32; values.len()];
            buffer.as_slice().copy_to_host((&mut host[..]).into()).unwrap();
            assert_eq!(host, vec![(context.world_size - 1) as f32; values.len()]);
        }
    }
    if context.world_size == 1 {
        return agreed.unwrap();
    }
    let launched = agreed.and_then(|()| comm.launch(if is_last { &other } else { &one }));
    let launched = launched.and_then(|()| comm.synchronize(queue));
    assert_mismatch(launched, ["graph (recording 1)", "graph (recording 2)"]);
}

/// This rank's buffer, with other numbers in each round.
fn filled(comm: &NcclCommunicator, round: usize) -> GradientBuffer {
    let tensors = LENS.iter().enumerate().map(|(index, &len)| (format!("tensor {index}"), vec![len]));
    let mut host = GradientBuffer::new(DType::F32, comm.world_size(), tensors).unwrap();
    for (index, segment) in host.segments().to_vec().into_iter().enumerate() {
        let seed = (round * 100 + comm.rank() * 10 + index) as u64;
        write(host.as_mut_slice(), segment.start, &vector(Format::F32, segment.len(), seed));
    }
    host
}

/// Reduces three rounds of numbers by plain calls, and again by launches of one recording.
fn check(
    queue: &Queue,
    comm: &NcclCommunicator,
    what: &str,
    mut reduce: impl FnMut(&mut GradientBuffer<Cuda>) -> Result<()>,
) {
    let tensors = LENS.iter().enumerate().map(|(index, &len)| (format!("tensor {index}"), vec![len]));
    let mut buffer = GradientBuffer::on_queue(queue, DType::F32, comm.world_size(), tensors).unwrap();
    let mut rounds = |step: &mut dyn FnMut(&mut GradientBuffer<Cuda>)| -> Vec<u64> {
        let round = |round| {
            buffer.copy_from_host(&filled(comm, round)).unwrap();
            step(&mut buffer);
            comm.synchronize(queue).unwrap();
            let mut host = filled(comm, round);
            buffer.copy_to_host(&mut host).unwrap();
            patterns_of(host.as_slice())
        };
        (0..3).flat_map(round).collect()
    };
    let plain = rounds(&mut |buffer| reduce(buffer).unwrap());
    let mut graph: Option<Graph> = None;
    let recorded = rounds(&mut |buffer| {
        let graph = graph.get_or_insert_with(|| queue.capture(|| reduce(buffer)).unwrap());
        comm.launch(graph).unwrap();
    });
    let mut checks = Checks::new(comm);
    checks.same_list(format!("{what}, recorded"), recorded, plain);
    checks.finish();
}

fn refusals(queue: &Queue) {
    let error = queue.capture(|| DeviceBuffer::zeroed(queue, DType::F32, 100).map(drop)).unwrap_err();
    assert!(matches!(&error, Error::Cuda(cuda) if cuda.code == 900 && cuda.call.contains("allocation")), "{error}");
    let data = DeviceBuffer::zeroed(queue, DType::F32, 100).unwrap();
    let mut host = [0.0f32; 100];
    let error = queue.capture(|| data.as_slice().copy_to_host((&mut host[..]).into())).unwrap_err();
    assert!(matches!(&error, Error::Cuda(cuda) if cuda.code >= 900), "{error}");
    // The queue stays usable.
    data.as_slice().copy_to_host((&mut host[..]).into()).unwrap();
}
