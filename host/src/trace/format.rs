//! [`RankTrace`]: the contents of a rank's file, which the program `gradsync` reads.

use serde::{Deserialize, Serialize};

use crate::error::Departure;

/// The content of a rank's trace file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankTrace {
    /// The version of this crate.
    pub version: String,
    /// The number of the job in the variable `GRADSYNC_JOB`, which `gradsync launch` sets.
    #[serde(default)]
    pub job: Option<String>,
    /// The launcher's number of this process; without a launcher, the rank in the group of all ranks.
    pub rank: usize,
    /// The name of the machine.
    pub host: String,
    /// The number of the process.
    pub pid: u32,
    /// When the file was written, in seconds since the Unix epoch.
    pub written: f64,
    /// The reason for writing: `SIGUSR1`, or the text of a failure.
    pub reason: String,
    /// The groups of ranks that this rank belongs to, in the order in which they were made.
    pub groups: Vec<GroupTrace>,
    /// The threads of the process that wait for work on a GPU, of this crate or of another library.
    #[serde(default)]
    pub device_waits: Vec<DeviceWait>,
}

/// The wait of a thread for enqueued work that has not completed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceWait {
    /// The number of the GPU.
    pub device: u32,
    /// When the thread began to wait, in seconds since the Unix epoch.
    pub since: f64,
}

/// A rank's calls in one communicator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GroupTrace {
    /// The transport, a number, and for groups that were split off the number of the split. Together with `members` it identifies the
    /// group on all ranks.
    pub group: String,
    /// The number of this rank in the group.
    pub rank: usize,
    /// The group's ranks, by their numbers in the original group of all ranks.
    pub members: Vec<usize>,
    /// Whether the ranks are threads of this process: another process may have a group of the same name.
    pub in_process: bool,
    /// The first failure of this rank in the group.
    pub failure: Option<String>,
    /// The ranks that this failure names as its cause, by their numbers in the original group of all ranks
    /// ([`CommError::blamed`](crate::comm::CommError::blamed)).
    #[serde(default)]
    pub blamed: Vec<usize>,
    /// How the blamed rank has left, if that is the failure.
    #[serde(default)]
    pub departure: Option<Departure>,
    /// Whether the rank has dropped its communicator.
    pub has_left: bool,
    /// The last calls, oldest first.
    pub calls: Vec<TracedCall>,
}

/// A recorded call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TracedCall {
    /// The number of collectives that the rank has called in this group, this one included. Ranks whose calls match have the same
    /// collective under the same number. A transfer between two ranks has the number of the collective before it.
    pub sequence: u64,
    /// The state of the call.
    pub state: CallState,
    /// When it was called, in seconds since the Unix epoch.
    pub posted: f64,
    /// When its state changed last.
    pub changed: f64,
    /// The operation with the arguments that must agree between ranks, such as `all_reduce(sum)`.
    pub operation: String,
    /// The rank that it sends to, if it is a transfer.
    pub to: Option<usize>,
    /// The rank that it receives from, if it is a transfer.
    pub from: Option<usize>,
    /// The number of elements, on which all ranks must agree.
    pub len: usize,
    /// The bytes of these elements.
    pub bytes: u64,
    /// Float type, where the call has data.
    pub dtype: Option<String>,
    /// The operation that the program called, where this call is a step of it.
    pub within: Option<String>,
    /// The number of tensors of that operation, where it has several.
    pub tensors: Option<usize>,
}

/// The state of a call on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum CallState {
    /// The rank has made the call and waits for the calls of other ranks; on devices, it has continued.
    Posted,
    /// All participating ranks have made the call, and data move.
    Matched,
    /// The rank's part is done.
    Finished,
    /// It ended with an error.
    Failed,
}

impl CallState {
    /// Whether the call has ended.
    pub fn is_over(self) -> bool {
        matches!(self, CallState::Finished | CallState::Failed)
    }
}
