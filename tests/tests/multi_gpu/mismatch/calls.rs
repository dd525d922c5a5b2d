//! Collectives that differ: one rank makes another call than all others.

use std::time::Instant;

use gradsync::comm::{Call, Collectives, Communicator, Operation, Ranks, ReduceOp, Scaling};
use gradsync::driver::DeviceBuffer;
use gradsync::{CommError, DType};

use super::{Groups, QUICK, SUM, Step, comm_error, f32s};
use crate::report::Report;

/// The call of one rank and the call of all others, each with the text that errors quote.
struct Disagreement {
    name: &'static str,
    odd: (Step, Call),
    common: (Step, Call),
}

impl Disagreement {
    fn new(name: &'static str, odd: (Step, Call), common: (Step, Call)) -> Self {
        Disagreement { name, odd, common }
    }

    /// Whether an error quotes the odd rank's call and the call of another rank.
    fn is_quoted_in(&self, error: &CommError, odd: usize) -> bool {
        match error {
            CommError::Mismatch { left_rank, left, right_rank, right } if left_rank < right_rank => {
                let (left, right) = ((*left_rank, **left), (*right_rank, **right));
                let (own, other) = if left.0 == odd { (left, right) } else { (right, left) };
                own == (odd, self.odd.1) && other.1 == self.common.1
            }
            _ => false,
        }
    }
}

pub(super) fn run(groups: &mut Groups<'_>, report: &mut Report) {
    for (index, disagreement) in disagreements(groups.world_size()).iter().enumerate() {
        // Odd ranks alternate, as rank 0 has the coordinator of the control channel.
        let odd = if index % 2 == 0 { groups.world_size() - 1 } else { 0 };
        let (step, _) = if groups.rank() == odd { disagreement.odd } else { disagreement.common };
        report.case(disagreement.name, || {
            let queue = groups.queue().clone();
            groups.fail(|comm| {
                let begun = Instant::now();
                // NCCL gets the call before it is compared, so the error may come only at the synchronisation.
                let outcome = step(comm, &queue).and_then(|()| comm.synchronize(&queue));
                let error = comm_error(outcome.expect_err("the calls differ"));
                let took = begun.elapsed();
                assert!(disagreement.is_quoted_in(&error, odd), "{error}, where rank {odd} differs");
                assert!(took < QUICK, "{error}: only after {took:?}");
                let again = comm_error(step(comm, &queue).expect_err("it has failed"));
                assert_eq!(again, error);
            });
        });
    }
}

const fn scaling(before: f64, after: f64) -> Scaling {
    Scaling { before, after }
}

fn disagreements(world_size: usize) -> Vec<Disagreement> {
    let call = |operation, len| Call::new(operation, len, DType::F32);
    let reduce = |op, len| call(Operation::AllReduce(op), len);
    let scaled = |before: f64, after: f64| {
        let (before, after) = (before.into(), after.into());
        call(Operation::ScaledAllReduce { op: ReduceOp::Sum, before, after }, 5)
    };
    let sum = (SUM, reduce(ReduceOp::Sum, 5));
    vec![
        Disagreement::new("count", (|comm, queue| all_reduce(comm, queue, 1011), reduce(ReduceOp::Sum, 1011)), sum),
        Disagreement::new("no elements", (|comm, queue| all_reduce(comm, queue, 0), reduce(ReduceOp::Sum, 0)), sum),
        Disagreement::new(
            "dtype",
            (|comm, queue| all_reduce_of(comm, queue, DType::BF16), Call::new(SUM_OF_5, 5, DType::BF16)),
            // An equal number of bytes does not make the dtypes match.
            (|comm, queue| all_reduce_of(comm, queue, DType::F16), Call::new(SUM_OF_5, 5, DType::F16)),
        ),
        Disagreement::new(
            "operation",
            (|comm, queue| comm.broadcast(f32s(queue, 5).as_mut_slice(), 0), call(Operation::Broadcast { root: 0 }, 5)),
            sum,
        ),
        Disagreement::new(
            "operation on shards",
            (
                |comm, queue| {
                    let len = comm.world_size();
                    comm.all_to_all(f32s(queue, len).as_slice(), f32s(queue, len).as_mut_slice())
                },
                call(Operation::AllToAll, world_size),
            ),
            (
                |comm, queue| {
                    let len = comm.world_size();
                    comm.reduce_scatter(f32s(queue, len).as_slice(), f32s(queue, 1).as_mut_slice(), ReduceOp::Sum)
                },
                call(Operation::ReduceScatter(ReduceOp::Sum), 1),
            ),
        ),
        Disagreement::new(
            "order",
            (
                |comm, queue| all_reduce(comm, queue, 16).and_then(|()| all_reduce(comm, queue, 8)),
                reduce(ReduceOp::Sum, 16),
            ),
            (
                |comm, queue| all_reduce(comm, queue, 8).and_then(|()| all_reduce(comm, queue, 16)),
                reduce(ReduceOp::Sum, 8),
            ),
        ),
        Disagreement::new(
            "root",
            (|comm, queue| comm.broadcast(f32s(queue, 5).as_mut_slice(), 0), call(Operation::Broadcast { root: 0 }, 5)),
            (|comm, queue| comm.broadcast(f32s(queue, 5).as_mut_slice(), 1), call(Operation::Broadcast { root: 1 }, 5)),
        ),
        Disagreement::new(
            "reduction",
            (|comm, queue| comm.all_reduce(f32s(queue, 5).as_mut_slice(), ReduceOp::Max), reduce(ReduceOp::Max, 5)),
            sum,
        ),
        Disagreement::new(
            "factor before",
            (
                |comm, queue| comm.all_reduce_scaled(f32s(queue, 5).as_mut_slice(), ReduceOp::Sum, scaling(0.5, 2.0)),
                scaled(0.5, 2.0),
            ),
            (
                |comm, queue| comm.all_reduce_scaled(f32s(queue, 5).as_mut_slice(), ReduceOp::Sum, scaling(0.25, 2.0)),
                scaled(0.25, 2.0),
            ),
        ),
        Disagreement::new(
            "factor after",
            (
                |comm, queue| comm.all_reduce_scaled(f32s(queue, 5).as_mut_slice(), ReduceOp::Sum, scaling(1.0, 0.5)),
                scaled(1.0, 0.5),
            ),
            sum,
        ),
        // Where one list of calls ends early, its last call is quoted.
        Disagreement::new(
            "shorter group",
            (|comm, queue| group(comm, queue, &[Part::Reduce]), reduce(ReduceOp::Sum, 4)),
            (|comm, queue| group(comm, queue, &[Part::Reduce, Part::Gather]), call(Operation::AllGather, 3)),
        ),
        Disagreement::new(
            "order in a group",
            (|comm, queue| group(comm, queue, &[Part::Gather, Part::Reduce]), call(Operation::AllGather, 3)),
            (|comm, queue| group(comm, queue, &[Part::Reduce, Part::Gather]), reduce(ReduceOp::Sum, 4)),
        ),
    ]
}

const SUM_OF_5: Operation = Operation::AllReduce(ReduceOp::Sum);

type Comm = gradsync::comm::nccl::NcclCommunicator;
type Queue = gradsync::driver::Queue;

fn all_reduce(comm: &Comm, queue: &Queue, len: usize) -> gradsync::Result<()> {
    comm.all_reduce(f32s(queue, len).as_mut_slice(), ReduceOp::Sum)
}

fn all_reduce_of(comm: &Comm, queue: &Queue, dtype: DType) -> gradsync::Result<()> {
    let mut data = DeviceBuffer::zeroed(queue, dtype, 5).unwrap();
    comm.all_reduce(data.as_mut_slice(), ReduceOp::Sum)
}

/// The operations that a group may hold here.
#[derive(Clone, Copy)]
enum Part {
    /// An all-reduce of 4 elements.
    Reduce,
    /// An all-gather of 3 elements.
    Gather,
}

fn group(comm: &Comm, queue: &Queue, parts: &[Part]) -> gradsync::Result<()> {
    let (mut reduced, own) = (f32s(queue, 4), f32s(queue, 3));
    let mut gathered = f32s(queue, 3 * comm.world_size());
    let (mut reduced, mut gathered) = (Some(reduced.as_mut_slice()), Some(gathered.as_mut_slice()));
    let mut group = gradsync::internal::nccl_group(comm);
    for part in parts {
        match part {
            Part::Reduce => group.all_reduce(reduced.take().expect("one of them"), ReduceOp::Sum)?,
            Part::Gather => group.all_gather(own.as_slice(), gathered.take().expect("one of them"))?,
        }
    }
    group.submit()
}
