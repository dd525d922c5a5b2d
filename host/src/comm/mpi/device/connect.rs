//! [`connect`]: NCCL where every rank has it, MPI otherwise.

use super::{MpiDeviceCommunicator, MpiDeviceOptions};
use crate::comm::message_passing::SetUp;
use crate::comm::mpi::MpiCommunicator;
use crate::comm::nccl::{NcclCommunicator, NcclOptions};
use crate::comm::{Communicator, Ranks};
use crate::driver::Queue;
use crate::error::Result;
use crate::memory::Cuda;

/// The communicator of an MPI job for device memory: NCCL's where all ranks can make one, else MPI's. Every rank decides alike, and
/// logs why. All ranks have to call it.
///
/// Ranks that share a GPU without [what NCCL needs for it](crate::comm::nccl#many-ranks-on-one-gpu), have no NCCL or other versions of it, or cannot reach each other by TCP for its control channel, get MPI's.
/// With NCCL, `comm` is freed.
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
