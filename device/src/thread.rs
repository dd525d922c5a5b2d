//! Where a thread stands, after `cuda_std::thread`. Launches here are one-dimensional; indices are 64-bit where a product of
//! block and thread could pass 2^32.

use crate::arch;

/// Index of this thread in its block.
#[inline(always)]
pub(crate) fn thread_idx_x() -> u32 {
    arch::thread_idx_x()
}

/// Index of this block in the grid.
#[inline(always)]
pub(crate) fn block_idx_x() -> u32 {
    arch::block_idx_x()
}

/// Index of this thread in the whole grid.
#[inline(always)]
pub(crate) fn index_1d() -> u64 {
    arch::block_idx_x() as u64 * arch::block_dim_x() as u64 + arch::thread_idx_x() as u64
}

/// Has the entry point that this is part of assembled for blocks of `THREADS` threads, of which a multiprocessor is to hold `BLOCKS`, with
/// loops as they are where `UNROLL` is 0.
#[inline(always)]
pub(crate) fn launch_bounds<const THREADS: u32, const BLOCKS: u32, const UNROLL: u32>() {
    arch::launch_bounds::<THREADS, BLOCKS, UNROLL>()
}

/// Waits for every thread of the block, and makes their writes to shared memory visible.
///
/// # Safety
/// Every thread of the block must get here, or none.
#[inline(always)]
pub(crate) unsafe fn sync_threads() {
    // SAFETY: the caller's promise.
    unsafe { arch::sync_threads() }
}
