//! This process as one of the ranks that a launcher has started: its communicator and its device.

use candle_core::Device;
use gradsync::bootstrap::Launch;
use gradsync::comm::Communicator;
use gradsync_candle::Result;

/// Joins the other ranks, with tensors on the CPU.
#[cfg(not(feature = "cuda"))]
pub(crate) fn join() -> Result<(impl Communicator + Send, Device)> {
    Ok((gradsync::comm::process::ProcessCommunicator::new(Launch::from_env()?.join()?)?, Device::Cpu))
}

/// Joins the other ranks, with tensors on a GPU, which ranks share where the machine has more ranks than GPUs.
#[cfg(feature = "cuda")]
pub(crate) fn join() -> Result<(impl Communicator<gradsync::memory::Cuda> + Send, Device)> {
    use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
    use gradsync::driver;

    let (launch, gpus) = (Launch::from_env()?, driver::Device::count()?);
    let (gpu, ranks) = (launch.device() % gpus, launch.local_world_size.unwrap_or(launch.world_size));
    let options = NcclOptions::default().with_shared_gpu(ranks > gpus as usize);
    let comm = NcclCommunicator::new(launch.join()?, &driver::Queue::new(gpu)?, &options)?;
    Ok((comm, Device::new_cuda_with_stream(gpu as usize)?))
}
