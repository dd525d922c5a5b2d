//! [`BootstrapError`]: why ranks did not find each other.
//!
//! What goes wrong once they have is a [`CommError`](crate::CommError).

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Why a process does not know its rank, or ranks did not come together.
///
/// Rank 0 tells the others what it refuses them for, so most of these name the same values on every rank.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum BootstrapError {
    /// No launcher that we know has started this process.
    #[error("no launcher's variables are set; looked for {looked_for}")]
    NoLauncher {
        /// The variables of all launchers.
        looked_for: String,
    },
    /// A variable that the others need beside them.
    #[error("the variable {variable} is not set: {reason}")]
    MissingVariable {
        /// Its name.
        variable: String,
        /// Its purpose, and what to do.
        reason: String,
    },
    /// A variable with a value that cannot be.
    #[error("the variable {variable} is {value:?}: {reason}")]
    InvalidVariable {
        /// Its name.
        variable: String,
        /// Its value.
        value: String,
        /// The form that is accepted.
        reason: String,
    },
    /// Two launchers' variables say different things about this process.
    #[error("the variables {left}={left_value} and {right}={right_value} disagree: {remedy}")]
    ConflictingVariables {
        /// A variable of one launcher.
        left: String,
        /// Its value.
        left_value: usize,
        /// The variable of another launcher for the same quantity.
        right: String,
        /// The value of that.
        right_value: usize,
        /// How to end the conflict.
        remedy: String,
    },
    /// A secret that was not generated, and could be guessed. It is not part of the error.
    #[error(
        "the secret is not a generated one: {reason}; make one with `gradsync secret` or `Secret::generate`, and give all \
         ranks the same"
    )]
    WeakSecret {
        /// The form of a generated one.
        reason: String,
    },
    /// The system gave no random bytes.
    #[error("the system gave no random bytes: {reason}")]
    NoRandomness {
        /// Its own words.
        reason: String,
    },
    /// A rank that a group of this size does not have.
    #[error("rank {rank} is out of range: the world size is {world_size}")]
    RankOutOfRange {
        /// The rank that asked to join.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// Two processes or threads claim the same rank; this one came second.
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
        /// The rank that came to it.
        right_rank: usize,
        /// Its world size.
        right: usize,
    },
    /// A rank of another generation of the group, such as a process left over from before a restart.
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
    /// The other side is another version of this library.
    #[error("{address} speaks version {theirs} of the protocol, and this rank version {ours}")]
    VersionMismatch {
        /// Where rank 0 was looked for.
        address: String,
        /// Its version.
        theirs: u32,
        /// Our version.
        ours: u32,
    },
    /// Rank 0 cannot listen, because somebody else does.
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
        /// The ranks that were waited for.
        missing: Vec<usize>,
        /// The deadline that passed first.
        deadline: Duration,
        /// Connections to rank 0 meanwhile that proved no secret.
        strangers: Strangers,
    },
    /// The rendezvous file cannot be written or removed.
    #[error("the rendezvous file {path}: {reason}")]
    File {
        /// Where it should be.
        path: String,
        /// The system's reason.
        reason: String,
    },
    /// Something else lies in the place of the rendezvous file, and rank 0 does not replace it.
    #[error("{path} cannot be a rendezvous file: it is {kind}, not a regular file")]
    NotAFile {
        /// Where the file should be.
        path: String,
        /// The kind of thing that lies there: a FIFO, a device, a folder, a socket or a symbolic link.
        kind: String,
    },
    /// The file in the place of the rendezvous file may be somebody else's, or known to others.
    #[error("{path} is not trusted as a rendezvous file: {reason} (owner {owner}, mode {mode:04o})")]
    UntrustedFile {
        /// The rendezvous file.
        path: String,
        /// The number of the user who owns it.
        owner: u32,
        /// Its permissions.
        mode: u32,
        /// The reason.
        reason: String,
    },
    /// Somebody else may put a file of their own in the place of the rendezvous file.
    #[error(
        "{path}, a folder on the way to the rendezvous file, is not trusted: {reason} (owner {owner}, mode {mode:04o})"
    )]
    UntrustedFolder {
        /// The folder.
        path: String,
        /// The number of the user who owns it.
        owner: u32,
        /// Its permissions.
        mode: u32,
        /// The reason.
        reason: String,
    },
}

/// Connections to rank 0 that proved no secret while ranks joined, and were closed: scanners of ports, attackers, and also
/// ranks with another secret or of another version, and those that were stopped at that moment. Empty text if there were
/// none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Strangers {
    /// How many.
    pub connections: u64,
    /// The address and port of the last one.
    pub last: String,
    /// Why that was closed.
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
