//! Gradients that another library has computed on a GPU, reduced in place by its stream and its addresses.
//!
//! ```sh
//! cargo build --release --features cuda --example raw_stream
//! gradsync launch -n 2 -- target/release/examples/raw_stream # one GPU a rank
//! ```
//!
//! prints on two GPUs
//!
//! ```text
//! [0] the means over 2 ranks: 1.5 and 15
//! ```
//!
//! The crate `cust` is that library here. Others have the same two things:
//!
//! | library | stream | address |
//! |---|---|---|
//! | tch | null, the default stream | `tensor.data_ptr()` of a contiguous tensor |
//! | cudarc | `stream.cu_stream()`, not the per-thread default stream | `slice.device_ptr_mut(&stream)`, whose guard lives until the call has returned |
//!
//! Work of both libraries is in one stream, so neither waits for the other, and the host waits once, before it reads
//! results. Under candle this is what gradsync-candle does.

use cust::context::Context;
use cust::memory::{AsyncCopyDestination, DeviceBuffer};
use cust::stream::{Stream, StreamFlags};
use gradsync::bootstrap::Launch;
use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::comm::{Communicator, Ranks, ReduceOp, Scaling};
use gradsync::driver::{DeviceSliceMut, Queue};
use gradsync::memory::Cuda;
use gradsync::{DType, Error, ops};

/// Replaces gradients, which are `f32`s at these addresses, by their means over all ranks.
///
/// # Safety
/// The gradients are on the device of `queue`, and only work of its stream uses them until it has passed the reduction.
unsafe fn mean_over_ranks(
    comm: &dyn Communicator<Cuda>,
    queue: &Queue,
    gradients: &[(u64, usize)],
) -> Result<(), Error> {
    let tensor = |&(address, len)| {
        // SAFETY: the caller's promise.
        unsafe { DeviceSliceMut::from_raw_parts(queue, address, DType::F32, len) }
    };
    let mut tensors: Vec<DeviceSliceMut<'_>> = gradients.iter().map(tensor).collect();
    // One collective for all tensors. `train::Reducer` reduces them in buckets.
    ops::all_reduce_tensors(comm, &mut tensors, ReduceOp::Mean, Scaling::NONE)
}

/// Computes gradients by another library, and returns their means. `connect` makes the communicator of a queue.
pub(crate) fn run(
    device: u32,
    connect: impl FnOnce(&Queue) -> Result<NcclCommunicator, Error>,
) -> Result<[Vec<f32>; 2], Box<dyn std::error::Error>> {
    // The other library, in the device's primary context, with a stream of its own.
    cust::init(cust::CudaFlags::empty())?;
    let _context = Context::new(cust::device::Device::get_device(device)?)?;
    let stream = Stream::new(StreamFlags::NON_BLOCKING, None)?;

    // SAFETY: the stream is of the primary context, and is dropped after the queue and the communicator.
    let queue = unsafe { Queue::from_raw_stream(device, stream.as_inner().cast()) }?;
    let comm = connect(&queue)?;

    // The other library computes. Here it copies numbers.
    let one = comm.rank() as f32 + 1.0;
    let mut means = [vec![one; 1000], vec![10.0 * one; 3]];
    let gradient = |values: &Vec<f32>| {
        // SAFETY: the copy writes all elements before they are read. The vector is not pinned, so the driver has read
        // it when the call returns.
        unsafe {
            let mut tensor = DeviceBuffer::uninitialized(values.len())?;
            tensor.async_copy_from(values, &stream)?;
            Ok::<DeviceBuffer<f32>, cust::error::CudaError>(tensor)
        }
    };
    let (weight, bias) = (gradient(&means[0])?, gradient(&means[1])?);

    let gradients = [&weight, &bias].map(|tensor| (tensor.as_device_ptr().as_raw(), tensor.len()));
    // SAFETY: the buffers are of this device and used in the stream alone, and freeing them waits for the device.
    unsafe { mean_over_ranks(&comm, &queue, &gradients) }?;

    for (tensor, mean) in [&weight, &bias].into_iter().zip(&mut means) {
        // SAFETY: the vector is not pinned, so the driver has written it when the call returns.
        unsafe { tensor.async_copy_to(mean, &stream) }?;
    }
    comm.synchronize(&queue)?; // waits for the stream, and reports what went wrong on any rank
    Ok(means)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let launch = Launch::from_env()?;
    let connect = |queue: &Queue| NcclCommunicator::new(launch.join()?, queue, &NcclOptions::default());
    let [weight, bias] = run(launch.device(), connect)?;
    if launch.rank == 0 {
        println!("the means over {} ranks: {} and {}", launch.world_size, weight[0], bias[0]);
    }
    Ok(())
}
