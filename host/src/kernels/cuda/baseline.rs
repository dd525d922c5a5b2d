//! Baselines of kernel benchmarks: [`empty`] measures the cost of a launch, [`sweep`] the cost of reading memory.
//!
//! No operation uses them.

use gradsync_device::abi::{SWEEP_TILE_BYTES, THREADS, WARP};

use super::{pointer, pointer_mut};
use crate::driver::{DeviceSlice, DeviceSliceMut, Queue};
use crate::error::{Error, Result};

/// Enqueues a launch of one block whose threads do nothing.
///
/// # Errors
/// [`Error::Cuda`].
pub fn empty(queue: &Queue) -> Result<()> {
    // SAFETY: the kernel has no parameters and accesses no memory.
    Ok(unsafe { queue.launch("empty", 1, &[]) }?)
}

/// The number of sums that [`sweep`] writes for a source of `bytes` bytes: 4 bytes for every 4 KiB.
pub fn sweep_sums(bytes: usize) -> usize {
    bytes.div_ceil(SWEEP_TILE_BYTES) * (THREADS / WARP) as usize
}

/// Enqueues a kernel that reads `src` once, 16 bytes at a time where it is aligned to 16, and writes the exclusive or of the 32-bit words
/// that each warp has read, as the bits of an `f32`.
///
/// # Errors
/// [`Error::InvalidArgument`] unless `sums` has [`sweep_sums`] elements of `f32` on the same queue, and both the length of the source in
/// bytes and its address are multiples of 4; [`Error::Cuda`].
pub fn sweep(sums: DeviceSliceMut<'_>, src: DeviceSlice<'_>) -> Result<()> {
    let bytes = src.len() * src.dtype().size_bytes();
    let (found, wanted) = (sums.as_slice(), sweep_sums(bytes));
    let refused = |reason| Err(Error::InvalidArgument { operation: "sweep", reason });
    found.queue().check_same("sweep", src.queue())?;
    if (found.dtype(), found.len()) != (crate::dtype::DType::F32, wanted) {
        return refused(format!("sums are {} {}, and {wanted} f32 are needed", found.len(), found.dtype()));
    }
    if bytes % 4 != 0 || src.address() % 4 != 0 {
        return refused(format!("{bytes} bytes at {:#x} are not whole aligned words of 4 bytes", src.address()));
    }
    let arguments = [pointer_mut(&sums), pointer(src), bytes.into()];
    // SAFETY: the sums have an element for every warp; both slices are borrowed and belong to this queue.
    Ok(unsafe { src.queue().launch("sweep", bytes.div_ceil(SWEEP_TILE_BYTES) as u64, &arguments) }?)
}
