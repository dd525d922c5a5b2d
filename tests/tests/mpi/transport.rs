//! Ranks of an MPI job, for the cases of every transport between processes.

use gradsync::Result;
use gradsync::comm::mpi::MpiCommunicator;

use crate::message_passing::cases::DEADLINE;

pub(crate) type Comm = MpiCommunicator;
/// The variable that has ranks send messages where they could share memory.
#[cfg(target_os = "linux")]
pub(crate) const MESSAGES_ONLY: &str = "GRADSYNC_MPI_MESSAGES_ONLY";
/// Whether a communicator of all ranks can be made without a descriptor.
#[cfg(target_os = "linux")]
pub(crate) const NEEDS_DESCRIPTORS: bool = false;

/// The first communicator of all ranks.
pub(crate) fn start() -> Result<Comm> {
    Ok(Comm::world()?.with_deadline(DEADLINE))
}

/// A communicator of all ranks that nothing has happened on.
pub(crate) fn fresh() -> Comm {
    Comm::world().expect("another communicator of all ranks").with_deadline(DEADLINE)
}
