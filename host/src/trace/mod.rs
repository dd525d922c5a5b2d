//! Traces: the record of each rank's last calls, written to a file on a failure or on request, to find out why a job hangs.
//!
//! Every communicator keeps its last 32 calls while the variable `GRADSYNC_TRACE_DIR` names a folder. A rank writes them to `rank-N.json`
//! there
//!
//! * when a call or a join fails, for example by a deadline, and once more when a further failure occurs;
//! * when its process receives SIGUSR1 (on Unix). The handler is installed with the first communicator, or by [`start`], and only if the
//!   variable is set; handlers that were there before are still called;
//! * when `gradsync launch` asks for them, which it does without a signal, so that no handler of the program runs.
//!
//! The files are written under another name and renamed, so that no reader sees a partial one; only their owner can read them. A process
//! writes one file, named by its rank; if ranks are threads of a process without a rank of its own, it writes one file for each of them.
//! `gradsync trace DIR` compares the files of all ranks; `gradsync launch` sets the variable and runs the comparison itself. It also numbers the
//! job, and its ranks write to `rank-N.JOB.json`, so that jobs which share a folder do not mix.
//!
//! ```json
//! {"version": "0.1.0", "job": null, "rank": 1, "host": "node-0", "pid": 4711, "written": 1764021290.4, "reason": "SIGUSR1", "groups": [
//!   {"group": "channel 0", "rank": 1, "members": [0, 1, 2, 3], "in_process": false, "failure": null, "blamed": [], "departure": null,
//!    "has_left": false, "calls": [
//!     {"sequence": 17, "state": "posted", "posted": 1764021278.1, "changed": 1764021278.1, "operation": "all_reduce(sum)",
//!      "to": null, "from": null, "len": 1000, "bytes": 4000, "dtype": "f32", "within": "adasum_all_reduce(Auto, per tensor)", "tensors": 12}]}],
//!  "device_waits": [{"device": 0, "since": 1764021278.2}]}
//! ```
//!
//! Times are seconds since the Unix epoch, by the clock of the rank's machine when the file was written: a clock that was set in between
//! does not change the time between two of them.

mod current;
mod file;
mod process;
mod recorder;
#[cfg(target_os = "linux")]
mod requests;
#[cfg(feature = "cuda")]
mod waits;

use serde::{Deserialize, Serialize};

use crate::error::Departure;

pub(crate) use self::current::CurrentCall;
// The launcher names the files and reads them; the types below are hidden for the same reason.
#[doc(hidden)]
pub use self::file::file_name;
pub use self::process::start;
#[doc(hidden)]
pub use self::process::{DIRECTORY, JOB, LAUNCHER, RANK_VARIABLES};
pub(crate) use self::recorder::{RankKind, Recorded, Recorder};
#[cfg(feature = "cuda")]
pub(crate) use self::waits::waiting_for_device;

/// The content of a rank's trace file.
#[doc(hidden)]
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
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceWait {
    /// The number of the GPU.
    pub device: u32,
    /// When the thread began to wait, in seconds since the Unix epoch.
    pub since: f64,
}

/// A rank's calls in one communicator.
#[doc(hidden)]
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
#[doc(hidden)]
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
#[doc(hidden)]
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
