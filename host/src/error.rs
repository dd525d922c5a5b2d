//! Everything that can go wrong, by kind; each message names the operation and the offending values.
//!
//! Nothing here decides what is an error: the operations do, before anything is written.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::bootstrap::BootstrapError;
use crate::dtype::{DType, DataType};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation was refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two operands that must have the same number of elements do not.
    #[error("{operation}: {left_name} has {left} elements and {right_name} has {right}")]
    LengthMismatch {
        /// The operation that was refused.
        operation: &'static str,
        /// What the first operand is.
        left_name: String,
        /// Elements of the first operand.
        left: usize,
        /// What the second operand is.
        right_name: String,
        /// Elements of the second operand.
        right: usize,
    },
    /// Two tensors that must have the same shape do not; nothing is ever broadcast.
    #[error("{operation}: shapes {left:?} and {right:?} differ")]
    ShapeMismatch {
        /// The operation that was refused.
        operation: &'static str,
        /// Shape of the first tensor.
        left: Vec<usize>,
        /// Shape of the second tensor.
        right: Vec<usize>,
    },
    /// Two operands that must have the same dtype do not.
    #[error("{operation}: dtypes {left} and {right} differ ({what})")]
    DTypeMismatch {
        /// The operation that was refused.
        operation: &'static str,
        /// Which operands.
        what: String,
        /// The dtype expected.
        left: DType,
        /// The dtype found.
        right: DType,
    },
    /// An argument that no call of this operation accepts.
    #[error("{operation}: {reason}")]
    InvalidArgument {
        /// The operation that was refused.
        operation: &'static str,
        /// What is wrong, with the value.
        reason: String,
    },
    /// The system gave no memory for a buffer.
    #[error("{operation}: no memory for {bytes} bytes")]
    OutOfMemory {
        /// The operation that was refused.
        operation: &'static str,
        /// What it asked for.
        bytes: usize,
    },
    /// The system gave no memory that other processes can map.
    #[error("{operation}: no memory of {bytes} bytes that other processes can map: {source}")]
    MemoryFile {
        /// The operation that was refused.
        operation: &'static str,
        /// What it asked for.
        bytes: usize,
        /// What the system says.
        source: std::io::Error,
    },
    /// The algorithm asked for cannot run on this many ranks, or nodes.
    #[error("{operation}: the {algorithm} algorithm needs {needs}, and there are {world_size}")]
    UnsupportedWorldSize {
        /// The operation that was refused.
        operation: &'static str,
        /// The algorithm asked for.
        algorithm: &'static str,
        /// The condition on their number, and of what it is one.
        needs: &'static str,
        /// The number found.
        world_size: usize,
    },
    /// A collective or a transfer between ranks failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The ranks did not find each other.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// MPI cannot be used as this crate needs it, or refused a call outside of a collective.
    #[cfg(feature = "mpi")]
    #[error(transparent)]
    Mpi(#[from] crate::comm::mpi::MpiError),
    /// The CUDA driver is missing or refused a call.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::driver::CudaError),
    /// NCCL is missing, too old, or refused a call.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Nccl(#[from] crate::sys::nccl::NcclError),
}

/// What one rank asked of a communicator, as the other ranks' errors quote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Call {
    /// The operation with its reduction, e.g. `all_reduce(sum)`.
    pub operation: Operation,
    /// Elements of the operand that all ranks must agree on.
    pub len: usize,
    /// Element type, where the operation has data.
    pub dtype: Option<DataType>,
}

impl Call {
    /// A call with data.
    pub fn new(operation: Operation, len: usize, dtype: impl Into<DataType>) -> Self {
        Self { operation, len, dtype: Some(dtype.into()) }
    }

    /// A call without data, such as a barrier.
    pub fn without_data(operation: Operation) -> Self {
        Self { operation, len: 0, dtype: None }
    }
}

/// A factor as ranks compare it: by its bits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Factor(u64);

impl From<f64> for Factor {
    fn from(value: f64) -> Self {
        Factor(value.to_bits())
    }
}

impl std::fmt::Debug for Factor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", f64::from_bits(self.0))
    }
}

/// An operation of a communicator with the arguments that must agree between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are the communicator's methods
pub enum Operation {
    AllReduce(crate::comm::ReduceOp),
    ScaledAllReduce {
        op: crate::comm::ReduceOp,
        before: Factor,
        after: Factor,
    },
    ReduceScatter(crate::comm::ReduceOp),
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
    /// A sum in rank order by such kernels.
    OrderedAllReduce(crate::comm::ReduceOp),
    /// Recorded work, with whatever collectives are in it.
    Graph,
    /// A call that all ranks have agreed on before, with its hash.
    Agreed {
        agreement: u64,
    },
    /// The making of a communicator.
    SetUp,
    /// What ranks tell each other outside their collectives, over the [control channel](crate::bootstrap).
    Exchange,
    /// Memory of ranks in one address space, lent to each other.
    LendWindows,
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Operation::AllReduce(op) => write!(f, "all_reduce({op})"),
            Operation::ScaledAllReduce { op, before, after } => {
                write!(f, "all_reduce({op}, scaled by {before:?} before and {after:?} after)")
            }
            Operation::ReduceScatter(op) => write!(f, "reduce_scatter({op})"),
            Operation::AllGather => write!(f, "all_gather"),
            Operation::AllToAll => write!(f, "all_to_all"),
            Operation::Broadcast { root } => write!(f, "broadcast(root {root})"),
            Operation::Send { peer } => write!(f, "send(to rank {peer})"),
            Operation::Recv { peer } => write!(f, "recv(from rank {peer})"),
            Operation::SendRecv { to, from } => write!(f, "send_recv(to rank {to}, from rank {from})"),
            Operation::Barrier => write!(f, "barrier"),
            Operation::Adasum => write!(f, "adasum"),
            Operation::OrderedAllReduce(op) => write!(f, "ordered all_reduce({op})"),
            Operation::Graph => write!(f, "graph"),
            Operation::Agreed { agreement } => write!(f, "call agreed on before (hash {agreement:016x})"),
            Operation::SetUp => write!(f, "set-up"),
            Operation::Exchange => write!(f, "control exchange"),
            Operation::LendWindows => write!(f, "lend_windows"),
        }
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.dtype {
            Some(dtype) => write!(f, "{} of {} × {dtype}", self.operation, self.len),
            None => write!(f, "{}", self.operation),
        }
    }
}

/// How a rank came to be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Departure {
    /// It dropped its communicator, by returning early for example.
    Left,
    /// Its thread panicked.
    Panicked,
    /// Its process ended or its machine cannot be reached: the connection to it broke.
    Lost,
}

impl std::fmt::Display for Departure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Departure::Left => "left",
            Departure::Panicked => "panicked",
            Departure::Lost => "is gone (its connection broke)",
        })
    }
}

/// Why ranks could not complete a call together.
///
/// The first failure sticks: every rank's call in progress and every later one returns it, with the operation that this rank
/// asked for. Drop the communicator and make a new group to go on. A transfer's
/// [`InvalidPeer`](Self::InvalidPeer) alone breaks nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CommError {
    /// Two ranks made calls that do not belong together. Every rank gets the same pair.
    #[error("ranks disagree: rank {left_rank} called {left}, rank {right_rank} called {right}")]
    Mismatch {
        /// The lower of the two ranks.
        left_rank: usize,
        /// What it called.
        left: Call,
        /// The higher of the two ranks.
        right_rank: usize,
        /// What it called.
        right: Call,
    },
    /// A rank is gone, and the call cannot complete without it.
    #[error("{operation}: rank {rank} {departure}")]
    PeerGone {
        /// What this rank was doing.
        operation: Operation,
        /// The rank that is gone.
        rank: usize,
        /// How it went.
        departure: Departure,
    },
    /// Some ranks did not make the call within the deadline.
    #[error("{operation}: {}", lateness(missing, *deadline))]
    Timeout {
        /// What this rank was doing.
        operation: Operation,
        /// The ranks that were waited for; empty if all had begun, and the operation did not end.
        missing: Vec<usize>,
        /// The communicator's deadline.
        deadline: Duration,
    },
    /// A rank's own call was refused before it reached the others, which cannot complete theirs.
    #[error("{operation}: rank {rank} made an invalid call: {reason}")]
    InvalidCall {
        /// What this rank was doing.
        operation: Operation,
        /// The rank whose call was refused.
        rank: usize,
        /// Why, as that rank's own error says it.
        reason: String,
    },
    /// What carries the data failed on a rank, and its part of the call with it.
    #[error("{operation}: rank {rank} failed: {reason}")]
    Transport {
        /// What this rank was doing.
        operation: Operation,
        /// The rank on which it failed.
        rank: usize,
        /// Why, as that rank says it.
        reason: String,
    },
    /// A rank that this communicator does not have, or this rank itself where another is needed.
    #[error("{operation}: rank {peer} is not a peer of rank {rank} in a world of {world_size}")]
    InvalidPeer {
        /// What was asked for.
        operation: Operation,
        /// The offending rank number.
        peer: usize,
        /// The rank that asked.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
    },
}

impl CommError {
    /// The same failure as a rank sees it that was doing `own`.
    pub(crate) fn seen_in(mut self, own: Operation) -> Self {
        match &mut self {
            CommError::PeerGone { operation, .. }
            | CommError::Timeout { operation, .. }
            | CommError::InvalidCall { operation, .. }
            | CommError::Transport { operation, .. } => *operation = own,
            CommError::Mismatch { .. } | CommError::InvalidPeer { .. } => {}
        }
        self
    }

    /// The ranks that this failure is due to, as far as is known: those to leave out of the next group.
    pub fn blamed(&self) -> Vec<usize> {
        match self {
            CommError::PeerGone { rank, .. }
            | CommError::InvalidCall { rank, .. }
            | CommError::Transport { rank, .. }
            | CommError::InvalidPeer { rank, .. } => vec![*rank],
            CommError::Timeout { missing, .. } => missing.clone(),
            CommError::Mismatch { left_rank, right_rank, .. } => vec![*left_rank, *right_rank],
        }
    }
}

fn lateness(missing: &[usize], deadline: Duration) -> String {
    if missing.is_empty() {
        return format!("did not complete within {deadline:?} although every rank has started it");
    }
    format!("ranks {missing:?} did not arrive within {deadline:?}")
}
