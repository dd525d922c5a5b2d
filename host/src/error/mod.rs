//! The errors of this crate, by kind; each message names the operation and the offending values. `Debug` of an error is its message too.
//!
//! This module only defines errors: the operations detect them, before they write anything.

mod bootstrap;
#[cfg(feature = "mpi")]
mod mpi;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::bootstrap::{BootstrapError, Strangers};
#[cfg(feature = "mpi")]
pub use self::mpi::MpiError;
pub use crate::call::{Call, Operation, Pass};
use crate::call::{scope, two_calls};
use crate::dtype::DType;
#[cfg(feature = "cuda")]
pub use crate::sys::CudaError;
#[cfg(feature = "cuda")]
pub use crate::sys::nccl::{NcclError, Version};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why an operation was refused or failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two operands that must have the same number of elements do not.
    #[error("{operation}: {left_name} has {left} elements and {right_name} has {right}")]
    LengthMismatch {
        /// The operation that was refused.
        operation: &'static str,
        /// The name of the first operand.
        left_name: String,
        /// Elements of the first operand.
        left: usize,
        /// The name of the second operand.
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
        /// The names of the operands.
        what: String,
        /// The dtype expected.
        left: DType,
        /// The dtype found.
        right: DType,
    },
    /// An argument is invalid for this operation.
    #[error("{operation}: {reason}")]
    InvalidArgument {
        /// The operation that was refused.
        operation: &'static str,
        /// The reason, with the value.
        reason: String,
    },
    /// Gradients, or their reduction, have NaN or infinities. The same on every rank.
    #[error("{operation}: {}", not_finite(*step, *rank, parameter))]
    NotFinite {
        /// The operation that found them.
        operation: &'static str,
        /// The number of the step in which they occurred.
        step: u64,
        /// The first rank whose own gradient has them; `None` if all ranks' gradients are finite and only their reduction is not.
        rank: Option<usize>,
        /// The name of the first such parameter of that rank.
        parameter: String,
    },
    /// The system gave no memory for a buffer.
    #[error("{operation}: no memory for {bytes} bytes")]
    OutOfMemory {
        /// The operation that was refused.
        operation: &'static str,
        /// The bytes asked for.
        bytes: usize,
    },
    /// The system gave no memory that other processes can map.
    #[error("{operation}: no memory of {bytes} bytes that other processes can map: {source}")]
    MemoryFile {
        /// The operation that was refused.
        operation: &'static str,
        /// The bytes asked for.
        bytes: usize,
        /// The system's error.
        source: std::io::Error,
    },
    /// This system lacks what the transport needs.
    #[error("{operation}: {} {lacks}", std::env::consts::OS)]
    UnsupportedSystem {
        /// The operation that was refused.
        operation: &'static str,
        /// What is missing, and what to use instead.
        lacks: &'static str,
    },
    /// The requested algorithm does not support this number of ranks or nodes.
    #[error("{operation}: the {algorithm} algorithm needs {needs}, and there are {world_size}")]
    UnsupportedWorldSize {
        /// The operation that was refused.
        operation: &'static str,
        /// The requested algorithm.
        algorithm: &'static str,
        /// The condition on the number of ranks or nodes, for example "a power of two of ranks".
        needs: &'static str,
        /// The number found.
        world_size: usize,
    },
    /// Ranks called different operations, or one operation with arguments that must be equal and are not. The group can still be used.
    #[error(transparent)]
    Disagreement(#[from] Box<Disagreement>),
    /// A collective or a transfer between ranks failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The ranks did not find each other.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// MPI cannot be used as this crate needs it, or it refused a call outside a collective.
    #[cfg(feature = "mpi")]
    #[error(transparent)]
    Mpi(#[from] MpiError),
    /// The CUDA driver is missing or refused a call.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::sys::CudaError),
    /// NCCL is missing, too old, or refused a call.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Nccl(#[from] crate::sys::nccl::NcclError),
}

debug_as_text!(Error, Disagreement, CommError, BootstrapError);

fn not_finite(step: u64, rank: Option<usize>, parameter: &str) -> String {
    match rank {
        Some(rank) => format!("in step {step} the gradient of {parameter:?} on rank {rank} has NaN or infinities"),
        None => format!(
            "in step {step} the reduced gradient of {parameter:?} has NaN or infinities, although every rank's own is finite: \
             the reduction leaves the range of its dtype"
        ),
    }
}

/// Refuses operands of different lengths.
pub(crate) fn same_len(operation: &'static str, left: (&str, usize), right: (&str, usize)) -> Result<()> {
    if left.1 == right.1 {
        return Ok(());
    }
    Err(Error::LengthMismatch {
        operation,
        left_name: left.0.into(),
        left: left.1,
        right_name: right.0.into(),
        right: right.1,
    })
}

/// Refuses elements that are not floating-point numbers.
pub(crate) fn check_float(operation: &'static str, dtype: DType) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    let floats = DType::FLOATS.map(DType::name).join(", ");
    Err(Error::InvalidArgument {
        operation,
        reason: format!("elements of {dtype}: only those of {floats} are supported"),
    })
}

/// The first difference between the calls of two ranks; equal on every rank.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Disagreement {
    /// The left rank's call, with the arguments that are part of its name.
    pub operation: String,
    /// The lower of the two ranks.
    pub left_rank: usize,
    /// The higher of the two ranks.
    pub right_rank: usize,
    /// The property that differs: `operation`, or something like `dtype` or `tensor 3 "layer.weight"`.
    pub label: String,
    /// The left rank's value.
    pub left: String,
    /// The right rank's value.
    pub right: String,
}

impl Disagreement {
    /// The label if ranks called two operations, or one operation with different arguments.
    pub(crate) const OPERATION: &str = "operation";
}

impl std::fmt::Display for Disagreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Disagreement { operation, left_rank, right_rank, label, left, right } = self;
        if label == Self::OPERATION {
            return write!(f, "ranks disagree: rank {left_rank} called {left}, rank {right_rank} called {right}");
        }
        write!(f, "{operation}: ranks disagree on {label}: rank {left_rank} has {left}, rank {right_rank} has {right}")
    }
}

impl std::error::Error for Disagreement {}

/// The way in which a rank has left its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
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

/// The reason why ranks could not complete a call together.
///
/// The first failure is permanent: every rank's call in progress and every later call return it, with the operation that the rank's
/// caller called, which is not necessarily the step that failed. Drop the communicator and make a new group to continue. Only
/// [`InvalidPeer`](Self::InvalidPeer) of a transfer leaves the group usable.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CommError {
    /// Two ranks made calls that do not match. Every rank gets the same pair if all are in collectives.
    #[error("ranks disagree: {}", two_calls((*left_rank, left), (*right_rank, right)))]
    Mismatch {
        /// The lower of the two ranks.
        left_rank: usize,
        /// Its call.
        left: Box<Call>,
        /// The higher of the two ranks.
        right_rank: usize,
        /// Its call.
        right: Box<Call>,
    },
    /// A rank is gone, and the call cannot complete without it.
    #[error("{operation}: rank {rank} {departure}")]
    PeerGone {
        /// The operation of this rank.
        operation: Operation,
        /// The rank that is gone.
        rank: usize,
        /// How it has left.
        departure: Departure,
    },
    /// Some ranks did not make the call within the deadline.
    #[error("{operation}: {}", lateness(missing, *deadline))]
    Timeout {
        /// The operation of this rank.
        operation: Operation,
        /// The missing ranks; empty if all ranks had started the operation but it did not complete.
        missing: Vec<usize>,
        /// The communicator's deadline.
        deadline: Duration,
    },
    /// A rank's own call was refused before it reached the other ranks, which cannot complete their calls.
    #[error("{operation}: rank {rank} made an invalid call: {reason}")]
    InvalidCall {
        /// The operation of this rank.
        operation: Operation,
        /// The rank whose call was refused.
        rank: usize,
        /// The message of that rank's own error.
        reason: String,
    },
    /// The transport failed on a rank.
    #[error("{operation}: rank {rank} failed: {reason}")]
    Transport {
        /// The operation of this rank.
        operation: Operation,
        /// The rank on which it failed.
        rank: usize,
        /// The reason that the rank reported.
        reason: String,
    },
    /// The peer of a call does not exist, or is this rank itself where another rank is needed.
    #[error(
        "{operation}: rank {rank} cannot exchange with rank {peer}: that must be another one of the {world_size} ranks"
    )]
    InvalidPeer {
        /// The operation.
        operation: Operation,
        /// The offending rank number.
        peer: usize,
        /// The rank that made the call.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
    },
}

impl CommError {
    /// The failure of two calls that do not match.
    pub(crate) fn mismatch(one: (usize, Call), other: (usize, Call)) -> Self {
        let ((left_rank, left), (right_rank, right)) = if one.0 <= other.0 { (one, other) } else { (other, one) };
        CommError::Mismatch { left_rank, left: left.into(), right_rank, right: right.into() }
    }

    /// This failure with the operation that this rank was running: `own`, or the outer operation of the current scope.
    pub(crate) fn seen_in(self, own: Operation) -> Self {
        self.of(scope::called(own))
    }

    /// This failure with `own` as its operation.
    pub(crate) fn of(mut self, own: Operation) -> Self {
        match &mut self {
            CommError::PeerGone { operation, .. }
            | CommError::Timeout { operation, .. }
            | CommError::InvalidCall { operation, .. }
            | CommError::Transport { operation, .. } => *operation = own,
            CommError::Mismatch { .. } | CommError::InvalidPeer { .. } => {}
        }
        self
    }

    /// The ranks that caused this failure, as far as is known: leave them out of the next group.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// `Debug` in every form that programs use, with the plain text, which has to be in all of them.
    #[track_caller]
    fn shows_its_text(error: impl std::error::Error) {
        let text = error.to_string();
        assert_eq!(format!("{error:?}"), text);
        assert_eq!(format!("{error:#?}"), text);
        assert_eq!(format!("{:?}", Err::<(), _>(&error)), format!("Err({text})"));
    }

    #[test]
    fn error_debugs_as_its_text_with_the_remedy() {
        let own = BootstrapError::NoLauncher { looked_for: "RANK".into() };
        assert!(format!("{own:?}").contains("gradsync launch -n 2 -- PROGRAM"));
        shows_its_text(own.clone());
        shows_its_text(Error::from(own));
        let deadline = Duration::from_secs(2);
        let late = CommError::Timeout { operation: Operation::Barrier, missing: vec![1], deadline };
        shows_its_text(late.clone());
        shows_its_text(Error::from(late));
        let disagreement = Disagreement {
            operation: "a broadcast".into(),
            left_rank: 0,
            right_rank: 1,
            label: "dtype".into(),
            left: "f32".into(),
            right: "f16".into(),
        };
        shows_its_text(disagreement.clone());
        shows_its_text(Error::from(Box::new(disagreement)));
        shows_its_text(Error::InvalidArgument { operation: "sum", reason: "the factor NaN is not finite".into() });
        #[cfg(feature = "mpi")]
        shows_its_text(Error::from(MpiError::Finalised));
        #[cfg(feature = "cuda")]
        {
            shows_its_text(Error::from(CudaError { call: "cuInit".into(), code: 100, text: "no device".into() }));
            shows_its_text(Error::from(NcclError::NotFound { tried: Vec::new() }));
        }
    }

    #[test]
    fn error_fields_stay_open_to_matching() {
        let error =
            Error::from(CommError::PeerGone { operation: Operation::Barrier, rank: 3, departure: Departure::Lost });
        assert!(matches!(error, Error::Comm(CommError::PeerGone { rank: 3, departure: Departure::Lost, .. })));
    }
}
