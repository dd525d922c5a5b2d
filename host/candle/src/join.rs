//! One line to join: the communicator and the device of a process that a launcher has started.

use candle_core::Device;
use gradsync::bootstrap::Launch;
#[cfg(feature = "cuda")]
use gradsync::comm::Ranks;

use crate::error::Result;

/// The communicator of [`join`]: for tensors on GPUs with the feature `cuda`, on CPUs without it.
#[cfg(feature = "cuda")]
pub type JoinedCommunicator = gradsync::comm::nccl::NcclCommunicator;
/// The communicator of [`join`]: for tensors on GPUs with the feature `cuda`, on CPUs without it.
#[cfg(not(feature = "cuda"))]
pub type JoinedCommunicator = gradsync::comm::HostCommunicator;

/// Joins the other ranks that the launcher of this process has started, and returns the communicator and the device for this rank's tensors.
///
/// | feature | device | ranks |
/// |---|---|---|
/// | `cuda` | the GPU of this rank's number on the machine; in turn where the machine has more ranks than GPUs | over NCCL: `Launch::join_gpu` |
/// | none | the CPU | processes, or with the feature `mpi` those of an MPI job: [`Launch::join_host`] |
///
/// Candle seeds the random numbers of every GPU alike, so that ranks would draw the same examples and masks: here each rank's GPU has a seed of
/// its own, the same in every run. `Device::set_seed` chooses another.
///
/// For other options than the default ones, such as a deadline, do the same by these methods.
///
/// # Errors
/// As [`Launch::from_env`], [`Launch::join_host`] or `Launch::join_gpu`, and candle's error if it cannot use the GPU. Without a launcher it
/// is [`BootstrapError::NoLauncher`](gradsync::bootstrap::BootstrapError::NoLauncher), since an unknown launcher would otherwise start a job
/// for each rank; [`join_or_alone`] takes such a process for the only rank.
pub fn join() -> Result<(JoinedCommunicator, Device)> {
    joined(&Launch::from_env()?)
}

/// Like [`join`], but a process that no launcher has started is the only rank of its group, so that `cargo run` runs a program.
///
/// # Errors
/// As [`Launch::from_env_or_alone`] and [`join`]. Where no launcher has set both a rank and a world size, any variable of a launcher is an
/// error, and never one rank.
pub fn join_or_alone() -> Result<(JoinedCommunicator, Device)> {
    joined(&Launch::from_env_or_alone()?)
}

/// Candle's own seed of the generator of a GPU.
#[cfg(feature = "cuda")]
const CANDLE_SEED: u64 = 299_792_458;

#[cfg(feature = "cuda")]
fn joined(launch: &Launch) -> Result<(JoinedCommunicator, Device)> {
    let (comm, queue) = launch.join_gpu(&Default::default())?;
    let device = Device::new_cuda_with_stream(queue.ordinal() as usize)?;
    device.set_seed(CANDLE_SEED + comm.rank() as u64)?;
    Ok((comm, device))
}

#[cfg(not(feature = "cuda"))]
fn joined(launch: &Launch) -> Result<(JoinedCommunicator, Device)> {
    Ok((launch.join_host()?, Device::Cpu))
}
