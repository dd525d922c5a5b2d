//! The whole text of the errors that every rank gets when the ranks' calls differ.
//!
//! The cases compare the text that users read; other cases check the origin of an error.

use gradsync::comm::{Communicator, ReduceOp, Split};
use gradsync::ops::tensor_parallel::{AllGather, AllReduce, OwnedTensor, TensorOp};
use gradsync::ops::{AdasumOptions, Granularity, adasum_all_reduce, all_reduce};
use gradsync::train::{Reduction, Sgd, SgdOptions, StepOptions, Stepper};
use gradsync::{DType, Error, GradientBuffer, Result};

use super::{Suite, Transport};

/// All cases, for at least two ranks.
pub fn run<T: Transport>(suite: &mut Suite<T>) {
    let rank = suite.rank();
    suite.check("every rank is told the first difference", |comm| disagreements(comm));
    suite.check("another call is told by its name, and so is the call in which a rank has left", |comm| {
        // Each case breaks a group of its own; the other ranks only take part in creating the groups.
        let pair = || comm.split((rank < 2).then_some(0), 0).unwrap();
        if rank < 2 {
            another_call(rank, || pair().expect("a colour"));
            if T::TELLS_OF_LEAVING {
                a_rank_left(rank, || pair().expect("a colour"));
            }
        } else {
            (0..(2 + usize::from(T::TELLS_OF_LEAVING)) * OPERATIONS).for_each(|_| assert!(pair().is_none()));
        }
    });
    suite.done("words");
}

/// A call of one rank.
type Call<'a> = &'a dyn Fn(&dyn Communicator) -> Result<()>;

fn buffer(dtype: DType, world_size: usize, tensors: &[(&str, &[usize])]) -> GradientBuffer {
    GradientBuffer::new(dtype, world_size, tensors.iter().map(|(name, shape)| (*name, shape.to_vec()))).unwrap()
}

fn plain(world_size: usize) -> GradientBuffer {
    buffer(DType::F32, world_size, &[("weight", &[2, 3]), ("bias", &[3])])
}

fn summed(comm: &dyn Communicator, mut buffer: GradientBuffer) -> Result<()> {
    all_reduce(comm, &mut buffer, ReduceOp::Sum)
}

fn mean(comm: &dyn Communicator) -> Result<()> {
    all_reduce(comm, &mut plain(comm.world_size()), ReduceOp::Mean)
}

fn adasum_with(comm: &dyn Communicator, granularity: Granularity) -> Result<()> {
    let options = AdasumOptions::default().with_granularity(granularity);
    adasum_all_reduce(comm, &mut plain(comm.world_size()), options).map(drop)
}

fn adasum(comm: &dyn Communicator) -> Result<()> {
    adasum_with(comm, Granularity::Tensor)
}

fn step(comm: &dyn Communicator, options: impl Into<StepOptions>) -> Result<()> {
    let (gradients, mut weights) = (plain(comm.world_size()), plain(comm.world_size()));
    Stepper::new(comm, options).step(&gradients, &mut weights, &mut Sgd::new(SgdOptions::default())?).map(drop)
}

fn tensor(shape: &[usize]) -> OwnedTensor {
    OwnedTensor::new(vec![1.0f32; shape.iter().product()], shape).unwrap()
}

/// Calls in which the last rank differs from the others, one after the other: all ranks get equal texts, and the group stays usable. The
/// case needs at least two ranks.
fn disagreements(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let last = world_size - 1;
    let check = |expected: &str, usual: Call<'_>, odd: Call<'_>| {
        let error = if rank == last { odd } else { usual }(comm).expect_err(expected);
        assert!(matches!(error, Error::Disagreement(_)), "{error:?}");
        assert_eq!(error.to_string(), expected, "on rank {rank}");
    };
    let of_buffers = |expected: &str, odd: &dyn Fn() -> GradientBuffer| {
        check(expected, &|comm| summed(comm, plain(world_size)), &|comm| summed(comm, odd()));
    };
    check(
        &format!(
            "ranks disagree: rank 0 called adasum_all_reduce(Auto, per tensor), rank {last} called all_reduce(mean)"
        ),
        &adasum,
        &mean,
    );
    check(
        &format!(
            "ranks disagree: rank 0 called adasum_all_reduce(Auto, per tensor), rank {last} called adasum_all_reduce(Auto, all \
             tensors as one)"
        ),
        &adasum,
        &|comm| adasum_with(comm, Granularity::Whole),
    );
    check(
        &format!("ranks disagree: rank 0 called all_reduce(mean), rank {last} called training step"),
        &mean,
        &|comm| step(comm, Reduction::Mean),
    );
    check(
        &format!(
            "training step: ranks disagree on reduction: rank 0 has adasum_all_reduce(Auto, per tensor), rank {last} has \
             all_reduce(mean)"
        ),
        &|comm| step(comm, Reduction::Adasum(AdasumOptions::default())),
        &|comm| step(comm, Reduction::Mean),
    );
    check(
        &format!("training step: ranks disagree on accumulation_steps: rank 0 has 1, rank {last} has 4"),
        &|comm| step(comm, Reduction::Sum),
        &|comm| step(comm, StepOptions::from(Reduction::Sum).with_accumulation_steps(4)),
    );
    of_buffers(
        &format!("all_reduce(sum): ranks disagree on tensor 1: rank 0 has \"bias\", rank {last} has \"scale\""),
        &|| buffer(DType::F32, world_size, &[("weight", &[2, 3]), ("scale", &[3])]),
    );
    of_buffers(
        &format!(
            "all_reduce(sum): ranks disagree on tensor 0 \"weight\": rank 0 has shape [2, 3], rank {last} has shape [3, 2]"
        ),
        &|| buffer(DType::F32, world_size, &[("weight", &[3, 2]), ("bias", &[3])]),
    );
    of_buffers(
        &format!("all_reduce(sum): ranks disagree on tensor 2: rank 0 has none, rank {last} has \"more\""),
        &|| buffer(DType::F32, world_size, &[("weight", &[2, 3]), ("bias", &[3]), ("more", &[1])]),
    );
    of_buffers(
        &format!("all_reduce(sum): ranks disagree on tensor 1: rank 0 has \"bias\", rank {last} has none"),
        &|| buffer(DType::F32, world_size, &[("weight", &[2, 3])]),
    );
    of_buffers(&format!("all_reduce(sum): ranks disagree on dtype: rank 0 has f32, rank {last} has f64"), &|| {
        buffer(DType::F64, world_size, &[("weight", &[2, 3]), ("bias", &[3])])
    });
    of_buffers(
        &format!(
            "all_reduce(sum): ranks disagree on memory: rank 0 has memory of its own, rank {last} has shared memory"
        ),
        &|| GradientBuffer::new_shared(DType::F32, world_size, [("weight", vec![2, 3]), ("bias", vec![3])]).unwrap(),
    );
    // One of many tensors differs, and its name contains a control character that must not break the line.
    let many = |odd: usize| {
        let names = (0..1000).map(|index| if index == odd { "\u{1b}]0;x\n".into() } else { format!("t{index}") });
        GradientBuffer::new(DType::BF16, world_size, names.map(|name| (name, [1]))).unwrap()
    };
    check(
        &format!(
            "all_reduce(sum): ranks disagree on tensor 617: rank 0 has \"t617\", rank {last} has \"\\u{{1b}}]0;x\\n\""
        ),
        &|comm| summed(comm, many(1000)),
        &|comm| summed(comm, many(617)),
    );
    check(
        &format!("AllReduce forward: ranks disagree on shape: rank 0 has shape [2, 2], rank {last} has shape [4]"),
        &|comm| AllReduce.forward(tensor(&[2, 2]), comm).map(drop),
        &|comm| AllReduce.forward(tensor(&[4]), comm).map(drop),
    );
    check(
        &format!("ranks disagree: rank 0 called AllReduce forward, rank {last} called AllGather forward"),
        &|comm| AllReduce.forward(tensor(&[4]), comm).map(drop),
        &|comm| AllGather.forward(tensor(&[4]), comm).map(drop),
    );
    // One rank refuses its own arguments.
    let planned = world_size + usize::from(rank == last);
    let reason =
        format!("the buffer was made for a world size of {}, and the world size is {world_size}", world_size + 1);
    let own = format!("all_reduce: {reason}");
    let expected = if rank == last { own } else { format!("all_reduce: rank {last} refuses: {own}") };
    assert_eq!(summed(comm, plain(planned)).expect_err("another world").to_string(), expected, "on rank {rank}");
}

/// The number of operations in these cases.
const OPERATIONS: usize = 5;

/// The operation's name in error messages, and the operation.
type Named<C> = (&'static str, fn(&C) -> Result<()>);

/// Operations that consist of several steps.
fn operations<C: Communicator + Split>() -> [Named<C>; OPERATIONS] {
    [
        ("all_reduce(mean)", |comm| mean(comm)),
        ("adasum_all_reduce(Auto, per tensor)", |comm| adasum(comm)),
        ("training step", |comm| step(comm, Reduction::Mean)),
        ("AllGather forward", |comm| AllGather.forward(tensor(&[4]), comm).map(drop)),
        ("split", |comm| comm.split(Some(0), 0).map(drop)),
    ]
}

/// One rank makes another call on the communicator itself while the other rank is in a step of an operation: each error names the two
/// calls, and no step. `group` creates a group of two that may fail.
fn another_call<C: Communicator + Split>(rank: usize, group: impl Fn() -> C) {
    for (name, call) in operations::<C>() {
        for deviant in [0, 1] {
            let comm = group();
            let outcome = if rank == deviant { comm.barrier() } else { call(&comm) };
            let called = |rank: usize| if rank == deviant { "barrier" } else { name };
            let expected = format!("ranks disagree: rank 0 called {}, rank 1 called {}", called(0), called(1));
            assert_eq!(outcome.expect_err("the calls differ").to_string(), expected, "on rank {rank}");
        }
    }
}

/// Rank 1 of a group of two leaves before the other rank calls an operation.
fn a_rank_left<C: Communicator + Split>(rank: usize, group: impl Fn() -> C) {
    for (name, call) in operations::<C>() {
        let comm = group();
        if rank == 0 {
            let error = call(&comm).expect_err("rank 1 has left");
            assert_eq!(error.to_string(), format!("{name}: rank 1 left"));
        }
    }
}
