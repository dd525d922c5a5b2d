//! Ranks of an MPI job, for the cases of every transport between processes.

use gradsync::Result;
use gradsync::comm::mpi::MpiCommunicator;

use crate::message_passing::cases::DEADLINE;

pub(crate) type Comm = MpiCommunicator;
/// The variable that makes ranks send messages where they could share memory.
#[cfg(target_os = "linux")]
pub(crate) const MESSAGES_ONLY: &str = "GRADSYNC_MPI_MESSAGES_ONLY";
/// Whether creating a communicator of all ranks needs a descriptor.
#[cfg(target_os = "linux")]
pub(crate) const NEEDS_DESCRIPTORS: bool = false;

/// Creates the first communicator of all ranks.
pub(crate) fn start() -> Result<Comm> {
    Ok(Comm::world()?.with_deadline(DEADLINE))
}

/// Creates a communicator of all ranks that no call has used.
pub(crate) fn fresh() -> Comm {
    Comm::world().expect("another communicator of all ranks").with_deadline(DEADLINE)
}
