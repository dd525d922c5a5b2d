//! Ranks as processes that join by their launcher's variables.

use std::sync::OnceLock;
use std::time::Duration;

use gradsync::bootstrap::{Launch, Member};
use gradsync::comm::process::ProcessCommunicator;
use gradsync_tests::suite::processes::Processes;
use gradsync_tests::suite::{DEADLINE, Transport};

/// The time that a rank waits for others that are busy with a case.
const PATIENCE: Duration = Duration::from_secs(60);

/// The group from which all other groups are split; no case runs on it.
static ROOT: OnceLock<Member> = OnceLock::new();

/// Ranks as processes.
pub(crate) struct Launched;

impl Launched {
    /// Joins the ranks of the launcher.
    pub(crate) fn join() -> Self {
        let member = Launch::from_env().and_then(|launch| launch.join()).expect("ranks that find each other");
        ROOT.set(member).expect("it starts once");
        Self
    }

    /// Creates a control channel of all ranks.
    pub(crate) fn member(&self) -> Member {
        let root = ROOT.get().expect("it has started");
        let member = root.split(Some(0), root.rank() as i64, PATIENCE).expect("another control channel");
        member.expect("it has a colour")
    }
}

impl Transport for Launched {
    type Comm = ProcessCommunicator;

    fn fresh(&self, deadline: Duration) -> ProcessCommunicator {
        let comm = ProcessCommunicator::new_within(self.member(), DEADLINE);
        comm.expect("another communicator of all ranks").with_deadline(deadline)
    }
}

impl Processes for Launched {
    const MESSAGES_ONLY: &'static str = "GRADSYNC_PROCESS_MESSAGES_ONLY";
    const NEEDS_DESCRIPTORS: bool = true;
}
