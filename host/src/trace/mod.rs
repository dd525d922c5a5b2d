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
pub(crate) mod file;
pub(crate) mod format;
pub(crate) mod process;
mod recorder;
#[cfg(target_os = "linux")]
mod requests;
#[cfg(feature = "cuda")]
mod waits;

pub(crate) use self::current::CurrentCall;
#[cfg(feature = "cuda")]
pub(crate) use self::format::DeviceWait;
pub(crate) use self::format::{CallState, GroupTrace, RankTrace, TracedCall};
pub use self::process::start;
pub(crate) use self::recorder::{RankKind, Recorded, Recorder};
#[cfg(feature = "cuda")]
pub(crate) use self::waits::waiting_for_device;
