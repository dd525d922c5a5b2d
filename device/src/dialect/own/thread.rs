//! `cuda_std::thread`: the indices of a thread. Launches here are one-dimensional.

use crate::arch::intrinsics;

/// Index of this thread in its block.
#[inline(always)]
pub(crate) fn thread_idx_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { intrinsics::_thread_idx_x() as u32 }
}

/// Index of this block in the grid.
#[inline(always)]
pub(crate) fn block_idx_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { intrinsics::_block_idx_x() as u32 }
}

/// Threads of a block.
#[inline(always)]
pub(crate) fn block_dim_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { intrinsics::_block_dim_x() as u32 }
}

/// Waits for every thread of the block, and makes their writes to memory visible. If some threads of a block do not call it, the others
/// wait for ever, or for another barrier; that alone is no memory unsafety.
#[inline(always)]
pub(crate) fn sync_threads() {
    // SAFETY: accesses no memory.
    unsafe { intrinsics::_syncthreads() }
}
