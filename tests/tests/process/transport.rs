//! Ranks as processes that join by their launcher's variables, for the cases of every transport between processes.

use std::sync::OnceLock;
use std::time::Duration;

use gradsync::Result;
use gradsync::bootstrap::{Launch, Member};
use gradsync::comm::process::ProcessCommunicator;

use crate::message_passing::cases::DEADLINE;

pub(crate) type Comm = ProcessCommunicator;
/// The variable that makes ranks send messages where they could share memory.
#[cfg(target_os = "linux")]
pub(crate) const MESSAGES_ONLY: &str = "GRADSYNC_PROCESS_MESSAGES_ONLY";
/// Whether creating a communicator of all ranks needs a descriptor.
#[cfg(target_os = "linux")]
pub(crate) const NEEDS_DESCRIPTORS: bool = true;

/// The time that a rank waits for others that are busy with a case.
const PATIENCE: Duration = Duration::from_secs(60);

/// The group from which all other groups are split; no case runs on it.
static ROOT: OnceLock<Member> = OnceLock::new();

/// Joins, and creates the first communicator of all ranks.
pub(crate) fn start() -> Result<Comm> {
    let launch = Launch::from_env()?;
    let member = launch.join()?;
    ROOT.set(member).expect("it starts once");
    try_fresh(DEADLINE)
}

/// Creates a control channel of all ranks.
pub(crate) fn member() -> Result<Member> {
    let root = ROOT.get().expect("it has started");
    Ok(root.split(Some(0), root.rank() as i64, PATIENCE)?.expect("it has a colour"))
}

pub(crate) fn try_fresh(deadline: Duration) -> Result<Comm> {
    Comm::new_within(member()?, deadline)
}

/// Creates a communicator of all ranks that no call has used.
pub(crate) fn fresh() -> Comm {
    try_fresh(DEADLINE).expect("another communicator of all ranks")
}
