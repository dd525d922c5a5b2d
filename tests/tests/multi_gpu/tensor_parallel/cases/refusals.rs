//! Calls that are invalid, alone or in combination: an error on every rank, which names the calls, before any data move.
//!
//! A communicator that remembers agreed calls compares a call only once. Calls that only some ranks make must therefore occur nowhere else,
//! and their shapes have a last dimension of their own.

use super::RankContext;
use gradsync::memory::Cuda;
use gradsync::ops::tensor_parallel::{AllGather, AllReduce, OwnedTensor, Pipeline, ReduceScatter, TensorOp};
use gradsync::{Error, Result};
use gradsync_tests::oracle::Format;

use super::{GATHERS, SCATTERS, SUMS, bits};

fn ones(ranks: &RankContext<'_>, format: Format, shape: &[usize]) -> OwnedTensor<Cuda> {
    ranks.tensor(format, &vec![1.0; shape.iter().product()], shape)
}

fn is_odd(ranks: &RankContext<'_>) -> bool {
    ranks.rank() == ranks.world_size() - 1
}

/// The error text for the first difference between rank 0 and the odd rank.
fn on(ranks: &RankContext<'_>, label: &str, [left, right]: [&str; 2]) -> String {
    format!("ranks disagree on {label}: rank 0 has {left}, rank {} has {right}", ranks.world_size() - 1)
}

/// The error text for two different operations.
fn called(ranks: &RankContext<'_>, [left, right]: [&str; 2]) -> String {
    format!("ranks disagree: rank 0 called {left}, rank {} called {right}", ranks.world_size() - 1)
}

/// Asserts that the error, equal on all ranks, holds all words, which `/` separates, and that the group stays usable.
#[track_caller]
fn refused(ranks: &RankContext<'_>, outcome: Result<OwnedTensor<Cuda>>, words: &str) {
    let text = match outcome {
        Err(
            error @ (Error::InvalidArgument { .. }
            | Error::Disagreement(_)
            | Error::ShapeMismatch { .. }
            | Error::DTypeMismatch { .. }),
        ) => error.to_string(),
        other => panic!("in place of a refusal: {other:?}"),
    };
    for word in words.split('/') {
        assert!(text.contains(word), "\"{text}\" does not say \"{word}\"");
    }
    // The text before the reason names this rank's own call.
    let reason = text.split_once(": ").map_or(text.as_str(), |(_, reason)| reason);
    ranks.assert_same_everywhere("the error", &(Vec::new(), reason.bytes().map(u64::from).collect()));
    let sum = AllReduce.forward(ones(ranks, Format::F32, &[3]), ranks.comm).unwrap();
    assert_eq!(ranks.seen(&sum), (vec![3], bits(Format::F32, &[ranks.world_size() as f64; 3])));
}

pub(super) fn dimension_0(ranks: &RankContext<'_>) {
    let world_size = ranks.world_size();
    let rows = world_size + 1;
    for pass in SCATTERS {
        for shape in [&[rows, 3][..], &[rows], &[]] {
            let outcome = pass(ones(ranks, Format::F32, shape), ranks.comm);
            refused(ranks, outcome, &format!("shape {shape:?}/{world_size} ranks"));
        }
    }
    for pass in GATHERS {
        for shape in [&[][..], &[usize::MAX, 0]] {
            let outcome = pass(ones(ranks, Format::F32, shape), ranks.comm);
            refused(ranks, outcome, &format!("shape {shape:?}/{world_size} tensors"));
        }
    }
}

pub(super) fn shape(ranks: &RankContext<'_>) {
    let rows = 2 * ranks.world_size();
    for pass in [SUMS, GATHERS, SCATTERS].concat() {
        // The numbers of elements are equal, so a comparison of counts alone would not detect the difference.
        let (common, odd) = ([rows, 101], [rows * 101]);
        let shape: &[usize] = if is_odd(ranks) { &odd } else { &common };
        let outcome = pass(ones(ranks, Format::F32, shape), ranks.comm);
        refused(ranks, outcome, &on(ranks, "shape", [&format!("shape {common:?}"), &format!("shape {odd:?}")]));
        // Only one of the calls would have been refused alone.
        let (common, odd) = ([rows, 103], [rows + 1, 103]);
        let shape = if is_odd(ranks) { odd } else { common };
        let outcome = pass(ones(ranks, Format::F32, &shape), ranks.comm);
        refused(ranks, outcome, &on(ranks, "shape", [&format!("shape {common:?}"), &format!("shape {odd:?}")]));
    }
}

pub(super) fn dtype(ranks: &RankContext<'_>) {
    let shape = [ranks.world_size(), 107];
    for pass in [SUMS, GATHERS, SCATTERS].concat() {
        let format = if is_odd(ranks) { Format::BF16 } else { Format::F16 };
        let outcome = pass(ones(ranks, format, &shape), ranks.comm);
        refused(ranks, outcome, &on(ranks, "dtype", ["f16", "bf16"]));
    }
}

pub(super) fn operation(ranks: &RankContext<'_>) {
    let tensor = || ones(ranks, Format::F32, &[ranks.world_size(), 109]);
    let outcome =
        if is_odd(ranks) { AllGather.backward(tensor(), ranks.comm) } else { AllReduce.forward(tensor(), ranks.comm) };
    refused(ranks, outcome, &called(ranks, ["AllReduce forward", "AllGather backward"]));
    let outcome = if is_odd(ranks) {
        Pipeline::new().then(AllReduce).then(AllGather).forward(tensor(), ranks.comm)
    } else {
        AllReduce.forward(tensor(), ranks.comm)
    };
    refused(ranks, outcome, &called(ranks, ["AllReduce forward", "Pipeline forward"]));
}

pub(super) fn pipeline(ranks: &RankContext<'_>) {
    let (comm, world_size) = (ranks.comm, ranks.world_size());
    let of = |rows: usize, last: usize| ones(ranks, Format::F32, &[rows, last]);
    let new = || Pipeline::new().then(AllGather).then(AllReduce);

    refused(ranks, new().backward(of(world_size, 113), comm), "no pass forward");

    // The call is made on one rank alone.
    let (mut went, mut other) = (new(), new());
    let output = went.forward(of(1, 127), comm).unwrap();
    let outcome = if is_odd(ranks) { other.backward(output, comm) } else { went.backward(output, comm) };
    refused(ranks, outcome, &on(ranks, "pass forward", ["one", "none"]));

    // The backward pass is made twice.
    let output = went.forward(of(1, 131), comm).unwrap();
    let again = output.try_clone().unwrap();
    assert_eq!(went.backward(output, comm).unwrap().shape(), [1, 131]);
    refused(ranks, went.backward(again, comm), "no pass forward");

    // The gradient has the wrong shape; the forward pass is still recorded.
    went.forward(of(1, 137), comm).unwrap();
    let outcome = went.backward(of(2 * world_size, 137), comm);
    refused(ranks, outcome, &format!("[{world_size}, 137]/[{}, 137]", 2 * world_size));
    let halves = ones(ranks, Format::BF16, &[world_size, 137]);
    refused(ranks, went.backward(halves, comm), "f32/bf16");
    assert_eq!(went.backward(of(world_size, 137), comm).unwrap().shape(), [1, 137]);

    // A failed forward pass does not count.
    let mut scatters = Pipeline::new().then(ReduceScatter);
    let output = scatters.forward(of(world_size, 139), comm).unwrap();
    refused(ranks, scatters.forward(of(world_size + 1, 139), comm), &format!("[{}, 139]", world_size + 1));
    refused(ranks, scatters.backward(output, comm), "no pass forward");
}
