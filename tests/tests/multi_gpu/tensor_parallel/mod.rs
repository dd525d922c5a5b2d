//! Tensor-parallel operations on device memory over NCCL, with and without checks of later calls, and the effects of the ranks' memory of
//! agreed calls.
//!
//! The module `cases` holds the cases for any transport.

pub(crate) mod cases;

use std::time::Duration;

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Communicator, Ranks};
use gradsync::memory::Cuda;
use gradsync::ops::tensor_parallel::{AllGather, AllReduce, OwnedTensor, Pipeline, ReduceScatter, TensorOp};
use gradsync::{CommError, Error, Result};
use gradsync_tests::oracle::Format;

use crate::context::Context;
use crate::report::Report;
use cases::RankContext;

pub(crate) fn run(context: &Context, report: &mut Report) {
    // Small sums are left to NCCL, or are launches of this crate's kernels.
    let ways = [("checked", true, Some(0)), ("compared once", false, Some(0)), ("low latency", true, None)];
    for (generation, (how, checks, low_latency_bytes)) in ways.into_iter().enumerate() {
        let mut comm = None;
        report.case(&format!("communicator, {how}"), || {
            let options = context.options().with_checks(checks).with_low_latency_bytes(low_latency_bytes);
            let made = context.communicator(generation as u64, &options);
            let has_peers = context.layout.reaches_peers() && context.world_size > 1;
            assert_eq!(made.low_latency_bytes() > 0, low_latency_bytes.is_none() && has_peers);
            comm = Some(made);
        });
        let Some(comm) = comm else { return };
        let ranks = RankContext { comm: &comm, queue: &context.queue };
        for case in cases::of(context.world_size) {
            report.case(&format!("{}, {how}", case.name), || (case.run)(&ranks));
        }
    }
}

/// The cases for a communicator that remembers agreed calls.
pub(crate) fn run_remembered(context: &Context, report: &mut Report) {
    let mut comm = None;
    report.case("communicator", || comm = Some(remembering(context, 0, context.options().deadline)));
    let Some(comm) = comm else { return };
    report.case("the host waits for nobody once the ranks have agreed", || ahead_of_the_others(context, &comm));
    report.case("a call that is new to one rank", || new_to_one(context));
    report.case("calls that are known, in another order", || in_another_order(context));
}

/// A communicator without checks. With checks a rank may run ahead too, but then exchanges between hosts have a fixed position among the
/// calls.
fn remembering(context: &Context, generation: u64, deadline: Duration) -> NcclCommunicator {
    context.communicator(generation, &context.options().with_deadline(deadline).with_checks(false))
}

/// Rank 0 runs a whole step before it meets the others on the control channel, and the others meet it there before their step. If rank 0's
/// host waited in the step, it would wait for calls that the others cannot make yet.
fn ahead_of_the_others(context: &Context, comm: &NcclCommunicator) {
    let ranks = RankContext { comm, queue: &context.queue };
    let rows = context.world_size;
    let mut pipeline = Pipeline::new().then(AllGather).then(AllReduce).then(ReduceScatter).then(AllReduce);
    let mut step = |input: OwnedTensor<Cuda>| -> Result<OwnedTensor<Cuda>> {
        let output = pipeline.forward(input, comm)?;
        pipeline.backward(output, comm)
    };
    let ones = || ranks.tensor(Format::F32, &vec![1.0; rows * 5], &[rows, 5]);
    // The first step is for the agreement, and for NCCL's connections.
    let expected = ranks.seen(&step(ones()).unwrap());
    let input = ones();
    if context.rank != 0 {
        comm.gather_words(&[7]).unwrap();
    }
    let output = step(input).unwrap();
    if context.rank == 0 {
        assert_eq!(comm.gather_words(&[7]).unwrap(), vec![7; rows]);
    }
    assert_eq!(ranks.seen(&output), expected);
}

/// The last rank waits for an agreement, and the others wait in a collective: all of them get an error at the deadline.
fn new_to_one(context: &Context) {
    let comm = remembering(context, 1, Duration::from_secs(3));
    let ranks = RankContext { comm: &comm, queue: &context.queue };
    let sum = |shape: &[usize]| {
        let input = ranks.tensor(Format::F32, &[1.0; 12], shape);
        AllReduce.forward(input, &comm).and_then(|output| comm.synchronize(output.queue()))
    };
    sum(&[6, 2]).unwrap();
    let is_odd = context.rank == context.world_size - 1;
    let error = sum(if is_odd { &[12] } else { &[6, 2] }).expect_err("another shape on one rank");
    assert!(matches!(error, Error::Comm(_)), "{error}");
    assert!(comm.failure().is_some(), "{error}, which does not stick");
}

/// Shapes with equal numbers of elements, all of them agreed on before: only the information beside the collective reveals the difference.
fn in_another_order(context: &Context) {
    let comm = context.communicator(2, &context.options());
    let ranks = RankContext { comm: &comm, queue: &context.queue };
    let sum = |shape: &[usize]| {
        let input = ranks.tensor(Format::F32, &[1.0; 12], shape);
        AllReduce.forward(input, &comm).and_then(|output| comm.synchronize(output.queue()))
    };
    let shapes: [&[usize]; 2] = [&[6, 2], &[12]];
    shapes.iter().for_each(|shape| sum(shape).unwrap());
    let is_odd = context.rank == context.world_size - 1;
    // The failure of the last call can overtake the answers to the agreed calls.
    let known_then_odd = shapes.iter().try_for_each(|shape| sum(shape)).and_then(|()| sum(shapes[usize::from(is_odd)]));
    let error = known_then_odd.expect_err("another shape on one rank");
    assert!(matches!(&error, Error::Comm(CommError::Mismatch { .. })), "{error}");
}
