//! Ranks of an MPI job.

use std::time::Duration;

use gradsync::comm::mpi::MpiCommunicator;
use gradsync_tests::suite::Transport;
use gradsync_tests::suite::processes::Processes;

/// Ranks that `mpirun` has started.
pub(crate) struct Job;

impl Transport for Job {
    type Comm = MpiCommunicator;

    const TELLS_OF_LEAVING: bool = false;

    fn fresh(&self, deadline: Duration) -> MpiCommunicator {
        MpiCommunicator::world().expect("another communicator of all ranks").with_deadline(deadline)
    }
}

impl Processes for Job {
    const MESSAGES_ONLY: &'static str = "GRADSYNC_MPI_MESSAGES_ONLY";
    const NEEDS_DESCRIPTORS: bool = false;
}
