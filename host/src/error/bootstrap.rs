//! [`BootstrapError`]: the errors of finding a rank's number and of joining a group.
//!
//! Later failures are a [`CommError`](crate::CommError).

use std::fmt;
use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The reason why a process does not know its rank, or why ranks did not form a group.
///
/// Rank 0 sends the reason of a refusal to the ranks concerned, so most of these errors have the same values on every rank.
#[derive(Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum BootstrapError {
    /// No known launcher has started this process.
    #[error(
        "no launcher has started this process: start it with `gradsync launch -n 2 -- PROGRAM`, torchrun, srun or mpirun, which set variables \
         (looked for {looked_for})"
    )]
    NoLauncher {
        /// The variables of all launchers.
        looked_for: String,
    },
    /// A variable that is required together with others is not set.
    #[error("the variable {variable} is not set: {reason}")]
    MissingVariable {
        /// Its name.
        variable: String,
        /// Its purpose, and what to do.
        reason: String,
    },
    /// A variable has an invalid value.
    #[error("the variable {variable} is {value:?}: {reason}")]
    InvalidVariable {
        /// Its name.
        variable: String,
        /// Its value.
        value: String,
        /// The form that is accepted.
        reason: String,
    },
    /// The variables of two launchers disagree about this process.
    #[error("the variables {left}={left_value} and {right}={right_value} disagree: {remedy}")]
    ConflictingVariables {
        /// A variable of one launcher.
        left: String,
        /// Its value.
        left_value: usize,
        /// The variable of another launcher for the same quantity.
        right: String,
        /// Its value.
        right_value: usize,
        /// How to resolve the conflict.
        remedy: String,
    },
    /// A secret was not generated, and could be guessed. The error does not contain the secret.
    #[error(
        "the secret is not a generated one: {reason}; make one with `gradsync secret` or `Secret::generate`, and give all \
         ranks the same"
    )]
    WeakSecret {
        /// The difference from a generated secret.
        reason: String,
    },
    /// The system gave no random bytes.
    #[error("the system gave no random bytes: {reason}")]
    NoRandomness {
        /// The system's reason.
        reason: String,
    },
    /// A rank is not less than the world size.
    #[error("rank {rank} is out of range: the world size is {world_size}")]
    RankOutOfRange {
        /// The rank that wanted to join.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// Two processes or threads claim the same rank; this one was second.
    #[error("rank {rank} has joined already")]
    DuplicateRank {
        /// The rank that both claim.
        rank: usize,
    },
    /// Ranks were told different world sizes.
    #[error("rank {left_rank} was told a world size of {left}, rank {right_rank} one of {right}")]
    WorldSizeMismatch {
        /// A rank that had joined.
        left_rank: usize,
        /// Its world size.
        left: usize,
        /// A rank with another world size.
        right_rank: usize,
        /// Its world size.
        right: usize,
    },
    /// A rank of another generation of the group, such as a process left over from before a restart, was refused.
    #[error("rank {rank} is of generation {generation}, and the group is of generation {expected}")]
    GenerationMismatch {
        /// The rank that was refused.
        rank: usize,
        /// Its generation.
        generation: u64,
        /// The generation of the group.
        expected: u64,
    },
    /// The other side does not have the same secret.
    #[error("{address} does not have the same secret as this rank")]
    WrongSecret {
        /// Where rank 0 was looked for.
        address: String,
    },
    /// The other side uses another version of the protocol.
    #[error("{address} speaks version {theirs} of the protocol, and this rank version {ours}")]
    VersionMismatch {
        /// Where rank 0 was looked for.
        address: String,
        /// Its version.
        theirs: u32,
        /// Our version.
        ours: u32,
    },
    /// Rank 0 cannot listen, because another process uses the port.
    #[error("rank 0 cannot listen on {address}: the port is in use")]
    PortBusy {
        /// Where it wanted to listen.
        address: String,
    },
    /// Rank 0 cannot listen, for any other reason.
    #[error("rank 0 cannot listen on {address}: {reason}")]
    CannotListen {
        /// Where it wanted to listen.
        address: String,
        /// The system's reason.
        reason: String,
    },
    /// Rank 0 was not reached within the deadline.
    #[error("rank 0 was not reached at {address} within {deadline:?}: {reason}")]
    Unreachable {
        /// Where it was looked for.
        address: String,
        /// The deadline of the join.
        deadline: Duration,
        /// The last failure.
        reason: String,
    },
    /// Some ranks did not join within the deadline.
    #[error("ranks {missing:?} did not join within {deadline:?}{strangers}")]
    Missing {
        /// The missing ranks.
        missing: Vec<usize>,
        /// The deadline that passed first.
        deadline: Duration,
        /// Unauthenticated connections to rank 0 in the meantime.
        strangers: Strangers,
    },
    /// The host of a rendezvous can be neither the name nor the address of a machine.
    #[error("{address:?} is no address of rank 0: {reason}")]
    InvalidAddress {
        /// The host.
        address: String,
        /// The form that is accepted.
        reason: String,
    },
    /// A group of so many ranks is not supported.
    #[error("a world size of {world_size} is out of range: a group has at most {most} ranks")]
    WorldSizeOutOfRange {
        /// Number of ranks.
        world_size: usize,
        /// The most ranks.
        most: usize,
    },
    /// The system refused a rank something that it needs to join.
    #[error("rank {rank} cannot join: it has no {resource} left ({reason}); raise {limit}")]
    OutOfResources {
        /// The rank that lacks it.
        rank: usize,
        /// The resource: descriptors or threads.
        resource: String,
        /// The system's reason.
        reason: String,
        /// The limit to raise.
        limit: String,
    },
}

impl BootstrapError {
    /// The error for a lack of descriptors on `rank`, if this is the system's error for it.
    pub(crate) fn out_of_descriptors(rank: usize, error: &io::Error) -> Option<Self> {
        #[cfg(unix)]
        let codes = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE].map(rustix::io::Errno::raw_os_error);
        #[cfg(not(unix))]
        let codes: [i32; 0] = [];
        let is_lack = error.raw_os_error().is_some_and(|code| codes.contains(&code));
        is_lack.then(|| BootstrapError::out_of(rank, "descriptors", error, "`ulimit -n`"))
    }

    /// The error for a thread that the system has refused `rank`.
    pub(crate) fn out_of_threads(rank: usize, error: &io::Error) -> Self {
        BootstrapError::out_of(rank, "threads", error, "`ulimit -u`, or the limit of processes of the container or job")
    }

    fn out_of(rank: usize, resource: &str, error: &io::Error, limit: &str) -> Self {
        let (resource, reason, limit) = (resource.to_owned(), error.to_string(), limit.to_owned());
        BootstrapError::OutOfResources { rank, resource, reason, limit }
    }
}

/// Unauthenticated connections to rank 0 that were closed while ranks joined: port scanners, attackers, but also ranks with another
/// secret or of another version, and ranks that were stopped at that moment. The text is empty if there were none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Strangers {
    /// The number of connections.
    pub connections: u64,
    /// The address and port of the last one.
    pub last: String,
    /// The reason why the last one was closed.
    pub reason: String,
}

impl fmt::Display for Strangers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Strangers { connections, last, reason } = self;
        match connections {
            0 => Ok(()),
            1 => write!(f, "; 1 connection proved no secret, from {last}: {reason}"),
            _ => write!(f, "; {connections} connections proved no secret, the last from {last}: {reason}"),
        }
    }
}
