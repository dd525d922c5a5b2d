//! One rank prepares another operation than the others, or an invalid one: an error on every rank that names the rank and the reason,
//! immediately and not at the deadline. The communicator stays usable.

use std::time::{Duration, Instant};

use gradsync::comm::{Collectives, Communicator, ReduceOp, Split};
use gradsync::driver::DeviceBuffer;
use gradsync::memory::Cuda;
use gradsync::ops::{Adasum, AdasumOptions, Nodes, OrderedAllReduce, ZeroPartition};
use gradsync::{DType, Error, GradientBuffer, Result};

use super::World;
use crate::report::Report;

/// The longest time that counts as immediate on a busy machine.
const QUICK: Duration = Duration::from_secs(5);

/// The dtype and the length of the tensor, the dtype of the wire and the reduction of an [`OrderedAllReduce`] over a transport.
type Ordered = (DType, usize, DType, ReduceOp);

pub(super) fn run(world: &World<'_>, report: &mut Report) {
    if world.size() == 1 {
        return;
    }
    for odd in [0, world.size() - 1] {
        report.case(&format!("ordered_all_reduce, another one on rank {odd}"), || ordered(world, odd));
        report.case(&format!("ordered_all_reduce, one that cannot be on rank {odd}"), || ordered_alone(world, odd));
        report.case(&format!("peers, what cannot be on rank {odd}"), || peers(world, odd));
        report.case(&format!("a buffer for another world size on rank {odd}"), || other_world(world, odd));
    }
}

/// The reason in this rank's error, or the whole text where ranks disagree.
fn refused<T: std::fmt::Debug>(world: &World<'_>, prepare: impl FnOnce() -> Result<T>) -> String {
    let begun = Instant::now();
    let outcome = prepare();
    let took = begun.elapsed();
    assert!(took < QUICK, "only after {took:?}");
    let reason = match outcome {
        Err(Error::InvalidArgument { reason, .. }) => reason,
        Err(error @ Error::Disagreement(_)) => error.to_string(),
        other => panic!("in place of a refusal: {other:?}"),
    };
    // The ranks can still communicate.
    let queue = &world.context.queue;
    let mut ones = DeviceBuffer::from_host(queue, (&[1.0f32; 5][..]).into()).unwrap();
    world.comm.all_reduce(ones.as_mut_slice(), ReduceOp::Sum).unwrap();
    world.comm.synchronize(queue).unwrap();
    let mut sums = [0.0f32; 5];
    ones.as_slice().copy_to_host((&mut sums[..]).into()).unwrap();
    assert_eq!(sums, [world.size() as f32; 5]);
    reason
}

/// The odd rank's error gives the reason, and the others' errors name the odd rank.
fn assert_blames(world: &World<'_>, odd: usize, reason: &str, why: &str) {
    assert!(reason.contains(why), "\"{reason}\" does not say \"{why}\"");
    let named = format!("rank {odd} refuses");
    assert!(world.rank() == odd || reason.contains(&named), "\"{reason}\" does not say \"{named}\"");
}

fn ordered(world: &World<'_>, odd: usize) {
    let common: Ordered = (DType::F32, 33, DType::F32, ReduceOp::Sum);
    let of_sum = |label: &str| {
        format!("ordered all_reduce(sum): ranks disagree on {label}: rank {{}} has {{}}, rank {{}} has {{}}")
    };
    let of_all = String::from("ranks disagree: rank {} called {}, rank {} called {}");
    let others: [(Ordered, String, [&str; 2]); 4] = [
        ((DType::F32, 33, DType::F32, ReduceOp::Mean), of_all, ["ordered all_reduce(sum)", "ordered all_reduce(mean)"]),
        ((DType::F32, 34, DType::F32, ReduceOp::Sum), of_sum("tensor 0 \"a\""), ["shape [33]", "shape [34]"]),
        ((DType::F64, 33, DType::F32, ReduceOp::Sum), of_sum("dtype"), ["f32", "f64"]),
        ((DType::F32, 33, DType::BF16, ReduceOp::Sum), of_sum("wire"), ["f32", "bf16"]),
    ];
    for (other, text, values) in others {
        let (dtype, len, wire, op) = if world.rank() == odd { other } else { common };
        let buffer = GradientBuffer::on_queue(&world.context.queue, dtype, world.size(), [("a", [len])]).unwrap();
        let reason = refused(world, || OrderedAllReduce::over_transport(world.comm, &buffer, wire, op));
        let [common, differing] = values;
        let (left, right) = if odd == 0 { (differing, common) } else { (common, differing) };
        let parts = ["0", left, &odd.max(1).to_string(), right];
        let expected = parts.into_iter().fold(text, |text, part| text.replacen("{}", part, 1));
        assert_eq!(reason, expected);
    }

    // One rank would wait in an exchange for peers that write to its memory.
    let buffer = buffer(world, world.size());
    let reason = refused(world, || match world.rank() == odd {
        true => OrderedAllReduce::new(world.comm, &buffer, ReduceOp::Sum),
        false => OrderedAllReduce::over_transport(world.comm, &buffer, buffer.dtype(), ReduceOp::Sum),
    });
    assert!(reason.contains("disagree on ways"), "{reason}");
}

fn ordered_alone(world: &World<'_>, odd: usize) {
    let op = if world.rank() == odd { ReduceOp::Max } else { ReduceOp::Sum };
    let buffer = buffer(world, world.size());
    let reason = refused(world, || OrderedAllReduce::over_transport(world.comm, &buffer, DType::F32, op));
    assert_blames(world, odd, &reason, "max has no order of additions");
}

fn buffer(world: &World<'_>, planned: usize) -> GradientBuffer<Cuda> {
    GradientBuffer::on_queue(&world.context.queue, DType::F32, planned, [("a", [100])]).unwrap()
}

fn peers(world: &World<'_>, odd: usize) {
    let buffer = buffer(world, world.size());
    let op = if world.rank() == odd { ReduceOp::Min } else { ReduceOp::Sum };
    let reason = refused(world, || OrderedAllReduce::new(world.comm, &buffer, op));
    assert_blames(world, odd, &reason, "min has no order of additions");
    let op = if world.rank() == odd { ReduceOp::Mean } else { ReduceOp::Sum };
    let reason = refused(world, || OrderedAllReduce::new(world.comm, &buffer, op));
    let called =
        |rank: usize| format!("rank {rank} called ordered all_reduce({})", if rank == odd { "mean" } else { "sum" });
    assert_eq!(reason, format!("ranks disagree: {}, {}", called(0), called(odd.max(1))));
}

fn other_world(world: &World<'_>, odd: usize) {
    let planned = world.size() + usize::from(world.rank() == odd);
    let (buffer, why) = (buffer(world, planned), format!("a world size of {}", world.size() + 1));
    let comm: &dyn Communicator<Cuda> = world.comm;
    assert_blames(world, odd, &refused(world, || OrderedAllReduce::new(comm, &buffer, ReduceOp::Sum)), &why);
    assert_blames(world, odd, &refused(world, || ZeroPartition::new(comm, &buffer)), &why);
    let split = |color: usize| world.comm.split(Some(color as u64), 0).unwrap().expect("a colour");
    let (node, across) = (split(0), split(world.rank()));
    let nodes = Nodes::<Cuda> { all: comm, node: &node, across: &across };
    let prepare = || Adasum::on_nodes(nodes, &buffer, ReduceOp::Sum, AdasumOptions::default());
    assert_blames(world, odd, &refused(world, prepare), &why);
}
