//! [`connect`]: NCCL if every rank has it, otherwise MPI.

use super::{MpiDeviceCommunicator, MpiDeviceOptions};
use crate::comm::message_passing::SetUp;
use crate::comm::mpi::MpiCommunicator;
use crate::comm::nccl::{NcclCommunicator, NcclOptions};
use crate::comm::{Communicator, Ranks};
use crate::driver::Queue;
use crate::error::Result;
use crate::memory::Cuda;

/// Makes the communicator of an MPI job for device memory: NCCL's if all ranks can make one, otherwise MPI's. All ranks make the same
/// choice, and log the reason. All ranks have to call it.
///
/// The choice is MPI's if ranks share a GPU without [NCCL's requirements for it](crate::comm::nccl#many-ranks-on-one-gpu), have no NCCL
/// or different versions of it, or cannot reach each other by TCP for NCCL's control channel. With NCCL, `comm` is freed.
///
/// # Errors
/// The errors of a collective of `comm`, and of [`MpiDeviceCommunicator::new`].
pub fn connect(
    comm: MpiCommunicator,
    queue: &Queue,
    nccl: &NcclOptions,
    mpi: MpiDeviceOptions,
) -> Result<Box<dyn Communicator<Cuda>>> {
    let attempt = comm.member(nccl.deadline).and_then(|member| NcclCommunicator::new(member, queue, nccl));
    let has_nccl = comm.ranks.gather(SetUp::Connect.call(), &[u64::from(attempt.is_ok())])?;
    let lacking = has_nccl.iter().position(|&has_it| has_it == 0);
    let reason = match (lacking, attempt) {
        (None, attempt) => {
            tracing::info!(rank = comm.rank(), "device memory travels by NCCL: every rank has it");
            return Ok(Box::new(attempt?));
        }
        (Some(_), Ok(nccl)) => {
            nccl.abort();
            String::new()
        }
        (Some(_), Err(error)) => error.to_string(),
    };
    let lacking = lacking.unwrap_or(0);
    let reason = comm.ranks.tell(SetUp::Connect, lacking, reason.into_bytes())?;
    let reason = String::from_utf8_lossy(&reason);
    tracing::info!(rank = comm.rank(), "device memory travels by MPI: on rank {lacking}, NCCL gave: {reason}");
    Ok(Box::new(MpiDeviceCommunicator::new(comm, queue, mpi)?))
}
