//! [`Call`]: one call of a communicator, as ranks compare it and as errors quote it.

mod arguments;
mod compared;
pub(crate) mod scope;

use std::fmt;

use serde::{Deserialize, Serialize};

pub(crate) use self::arguments::setters;
pub use self::arguments::{AdasumOptions, Algorithm, Granularity, GroupKind, Pass, ReduceOp, WithinNode};
pub(crate) use self::compared::{Digest, LineBytes, Value, Visit};
use crate::dtype::DType;

/// A rank's call of a communicator, as the other ranks' errors quote it.
///
/// A call made inside an operation of this crate is a step of that operation, and errors name the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Call {
    /// The operation that the rank's caller called, if this call is a step of it.
    pub within: Option<Operation>,
    /// The operation with its reduction, e.g. `all_reduce(sum)`.
    pub operation: Operation,
    /// The number of elements, on which all ranks must agree.
    pub len: usize,
    /// Float type, where the operation has data.
    pub dtype: Option<DType>,
}

impl Call {
    /// A call with data.
    pub fn new(operation: Operation, len: usize, dtype: DType) -> Self {
        Self::of(operation, len, Some(dtype))
    }

    /// A call without data, such as a barrier.
    pub fn without_data(operation: Operation) -> Self {
        Self::of(operation, 0, None)
    }

    /// A call on internal data; `len` distinguishes it from others of the same operation.
    pub(crate) fn of(operation: Operation, len: usize, dtype: Option<DType>) -> Self {
        Self { within: scope::operation(), operation: scope::step(operation), len, dtype }
    }

    /// The bytes of its elements.
    pub(crate) fn bytes(&self) -> usize {
        self.len * self.dtype.map_or(0, DType::size_bytes)
    }

    /// The operation that the rank's caller called.
    pub fn called(&self) -> Operation {
        self.within.unwrap_or(self.operation)
    }

    /// Whether these calls of a collective on two ranks match. The operations that the calls are steps of are not compared here: each
    /// operation compares its own arguments, and can then return an error and still be used afterwards. Steps of a reducer are the
    /// exception: with buckets of one length, only the number of the step tells a bucket from the same bucket of another step.
    pub(crate) fn fits(&self, other: &Self) -> bool {
        let compared = |call: &Self| (call.operation, call.len, call.dtype, call.reducer_step());
        compared(self) == compared(other)
    }

    /// The number of the reducer's step that this call belongs to.
    fn reducer_step(&self) -> Option<u64> {
        match self.within {
            Some(Operation::ReducerStep { number }) => Some(number),
            _ => None,
        }
    }

    fn is_step(&self) -> bool {
        self.within.is_some_and(|operation| operation != self.operation)
    }

    fn is_transfer(&self) -> bool {
        matches!(self.operation, Operation::Send { .. } | Operation::Recv { .. } | Operation::SendRecv { .. })
    }
}

/// The text of two calls that do not match. It names the operations that the ranks' callers called, or their steps if both called the
/// same operation or two transfers do not match.
pub(crate) fn two_calls((left_rank, left): (usize, &Call), (right_rank, right): (usize, &Call)) -> String {
    let are_steps = left.called() == right.called() || (left.is_transfer() && right.is_transfer());
    let quoted = |call: &Call| if call.is_step() && !are_steps { call.called().to_string() } else { call.to_string() };
    format!("rank {left_rank} called {}, rank {right_rank} called {}", quoted(left), quoted(right))
}

/// A factor, which ranks compare by its bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Factor(u64);

impl From<f64> for Factor {
    fn from(value: f64) -> Self {
        Factor(value.to_bits())
    }
}

impl fmt::Debug for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", f64::from_bits(self.0))
    }
}

/// An operation of a communicator or of this crate, with the arguments that must agree between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are those of methods and functions
pub enum Operation {
    AllReduce(ReduceOp),
    ScaledAllReduce {
        op: ReduceOp,
        before: Factor,
        after: Factor,
    },
    /// A weighted mean, with the hash of the weights.
    WeightedAllReduce {
        weights: u64,
    },
    ReduceScatter(ReduceOp),
    AllGather,
    AllToAll,
    Broadcast {
        root: usize,
    },
    Send {
        peer: usize,
    },
    Recv {
        peer: usize,
    },
    SendRecv {
        to: usize,
        from: usize,
    },
    Barrier,
    /// Adasum by kernels that reach into the peers' memory.
    Adasum,
    /// A reduction in rank order by such kernels.
    OrderedAllReduce(ReduceOp),
    /// The beginning of a communicator's collectives in a recording (a CUDA graph).
    Recording {
        /// The number of the recording among those with collectives of the communicator, from 1.
        recording: u64,
    },
    /// The launch of recorded work, with the collectives in it.
    Graph {
        /// The number of the recording; 0 for one without collectives of the communicator.
        recording: u64,
    },
    /// An agreement from an earlier call, identified by its number: all ranks make their agreements in the same order.
    Agreed {
        agreement: u64,
    },
    /// The making of a communicator.
    SetUp,
    /// An exchange of messages outside collectives, over the [control channel](crate::bootstrap).
    Exchange,
    /// The exposure of windows of vectors in shared memory, for one exposure epoch.
    SharedWindows,
    /// The comparison of the ranks' calls before an operation of several steps.
    Comparison,
    AdasumAllReduce(AdasumOptions),
    HierarchicalAdasumAllReduce(WithinNode, AdasumOptions),
    /// [`Stepper::step`](crate::train::Stepper::step).
    TrainingStep,
    /// The making of a [`Reducer`](crate::train::Reducer), and the preparation of its buckets.
    Reducer,
    /// A step of a [`Reducer`](crate::train::Reducer), with the number that ranks compare ([`Reducer::at`](crate::train::Reducer::at)).
    ReducerStep {
        number: u64,
    },
    /// [`broadcast_parameters`](crate::train::broadcast_parameters).
    BroadcastParameters,
    /// [`compare_parameters`](crate::train::compare_parameters).
    CompareParameters,
    /// [`ShardedIndices::position`](crate::train::ShardedIndices::position).
    Position,
    /// [`mean_over_ranks`](crate::train::mean_over_ranks).
    MeanOverRanks,
    /// The making of a [`ZeroPartition`](crate::ops::ZeroPartition).
    ZeroPartition,
    AllReduceTensors(ReduceOp),
    AllGatherTensors,
    ReduceScatterTensors(ReduceOp),
    /// Bundles of tensors to and from any number of peers.
    ExchangeBundles,
    RunSchedule,
    RunStage,
    TensorParallel(Pass),
    Split,
    /// [`Groups::new`](crate::groups::Groups::new).
    Groups,
    /// [`Groups::get`](crate::groups::Groups::get).
    Group(GroupKind),
    GatherWords,
    Share,
    /// The control channel of an MPI job.
    Member,
}

impl Operation {
    /// The peers that the operation sends to and receives from; none for a collective.
    pub(crate) fn peers(self) -> (Option<usize>, Option<usize>) {
        match self {
            Operation::Send { peer } => (Some(peer), None),
            Operation::Recv { peer } => (None, Some(peer)),
            Operation::SendRecv { to, from } => (Some(to), Some(from)),
            _ => (None, None),
        }
    }

    /// The name without arguments.
    pub fn name(self) -> &'static str {
        match self {
            Operation::AllReduce(_) | Operation::ScaledAllReduce { .. } | Operation::WeightedAllReduce { .. } => {
                "all_reduce"
            }
            Operation::ReduceScatter(_) => "reduce_scatter",
            Operation::AllGather => "all_gather",
            Operation::AllToAll => "all_to_all",
            Operation::Broadcast { .. } => "broadcast",
            Operation::Send { .. } => "send",
            Operation::Recv { .. } => "recv",
            Operation::SendRecv { .. } => "send_recv",
            Operation::Barrier => "barrier",
            Operation::Adasum => "adasum",
            Operation::OrderedAllReduce(_) => "ordered all_reduce",
            Operation::Recording { .. } => "recording of a graph",
            Operation::Graph { .. } => "graph",
            Operation::Agreed { .. } => "call agreed on before",
            Operation::SetUp => "set-up of a communicator",
            Operation::Exchange => "control exchange",
            Operation::SharedWindows => "with_windows",
            Operation::Comparison => "comparison of calls",
            Operation::AdasumAllReduce(_) => "adasum_all_reduce",
            Operation::HierarchicalAdasumAllReduce(..) => "hierarchical_adasum_all_reduce",
            Operation::TrainingStep => "training step",
            Operation::Reducer => "reducer",
            Operation::ReducerStep { .. } => "reducer step",
            Operation::BroadcastParameters => "broadcast_parameters",
            Operation::CompareParameters => "compare_parameters",
            Operation::Position => "position",
            Operation::MeanOverRanks => "mean_over_ranks",
            Operation::ZeroPartition => "ZeRO partition",
            Operation::AllReduceTensors(_) => "all_reduce_tensors",
            Operation::AllGatherTensors => "all_gather_tensors",
            Operation::ReduceScatterTensors(_) => "reduce_scatter_tensors",
            Operation::ExchangeBundles => "exchange",
            Operation::RunSchedule => "run_schedule",
            Operation::RunStage => "run_stage",
            Operation::TensorParallel(pass) => pass.name(),
            Operation::Split => "split",
            Operation::Groups | Operation::Group(_) => "groups",
            Operation::GatherWords => "gather_words",
            Operation::Share => "share",
            Operation::Member => "member",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Operation::AllReduce(op)
            | Operation::ReduceScatter(op)
            | Operation::OrderedAllReduce(op)
            | Operation::AllReduceTensors(op)
            | Operation::ReduceScatterTensors(op) => write!(f, "({op})"),
            Operation::ScaledAllReduce { op, before, after } => {
                write!(f, "({op}, scaled by {before:?} before and {after:?} after)")
            }
            Operation::WeightedAllReduce { weights } => write!(f, "(mean, weights with the hash {weights:016x})"),
            Operation::Broadcast { root } => write!(f, "(root {root})"),
            Operation::ReducerStep { number } => write!(f, " {number}"),
            Operation::Send { peer } => write!(f, "(to rank {peer})"),
            Operation::Recv { peer } => write!(f, "(from rank {peer})"),
            Operation::SendRecv { to, from } => write!(f, "(to rank {to}, from rank {from})"),
            Operation::Recording { recording } => write!(f, " (number {recording})"),
            Operation::Graph { recording: 0 } => f.write_str(" (without collectives of this communicator)"),
            Operation::Graph { recording } => write!(f, " (recording {recording})"),
            Operation::Agreed { agreement } => write!(f, " (number {agreement})"),
            Operation::AdasumAllReduce(options) => write!(f, "({})", Options(*options)),
            Operation::HierarchicalAdasumAllReduce(within_node, options) => match within_node {
                WithinNode::Reduce(op) => write!(f, "({op} within nodes, {})", Options(*options)),
                WithinNode::Adasum => write!(f, "(Adasum within nodes, {})", Options(*options)),
            },
            Operation::Group(kind) => write!(f, "({kind})"),
            _ => Ok(()),
        }
    }
}

/// The text of Adasum options.
struct Options(AdasumOptions);

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AdasumOptions { algorithm, granularity } = self.0;
        let layers = match granularity {
            Granularity::Tensor => "per tensor",
            Granularity::Whole => "all tensors as one",
        };
        write!(f, "{algorithm:?}, {layers}")
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_step() {
            write!(f, "{} (its step ", self.called())?;
        }
        match self.dtype {
            Some(dtype) => write!(f, "{} of {} × {dtype}", self.operation, self.len)?,
            None => write!(f, "{}", self.operation)?,
        }
        if self.is_step() { f.write_str(")") } else { Ok(()) }
    }
}
