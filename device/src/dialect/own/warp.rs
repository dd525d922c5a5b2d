//! `cuda_std::warp`, as far as kernels use it: `lane_id`, and `warp_shuffle_xor`, which upstream added after its last release.

use super::thread;
use crate::abi::WARP;
use crate::arch::asm;

/// Index of this thread in its warp.
#[inline(always)]
pub(crate) fn lane_id() -> u32 {
    thread::thread_idx_x() % WARP
}

/// A value that lanes exchange.
pub(crate) trait WarpShuffleValue: Sized {
    /// The value of the lane whose index differs by `lane_mask`.
    ///
    /// # Safety
    /// All lanes of the warp must execute this together.
    unsafe fn of_lane_xor(self, lane_mask: u32) -> Self;
}

impl WarpShuffleValue for u32 {
    #[inline(always)]
    unsafe fn of_lane_xor(self, lane_mask: u32) -> Self {
        let other: u32;
        // SAFETY: the caller promises a full warp, which the member mask names; no memory is touched.
        unsafe {
            asm!("shfl.sync.bfly.b32 {0}, {1}, {2}, 31, -1;", out(reg32) other, in(reg32) self, in(reg32) lane_mask,
                options(nomem, nostack))
        };
        other
    }
}

impl WarpShuffleValue for f64 {
    #[inline(always)]
    unsafe fn of_lane_xor(self, lane_mask: u32) -> Self {
        let bits = self.to_bits();
        // SAFETY: the caller's promise.
        let (low, high) =
            unsafe { ((bits as u32).of_lane_xor(lane_mask), ((bits >> 32) as u32).of_lane_xor(lane_mask)) };
        f64::from_bits((high as u64) << 32 | low as u64)
    }
}

/// The value of the lane whose index differs by `lane_mask`, and whether that lane exists: always, among all lanes.
///
/// # Panics
/// Unless `mask` names all 32 lanes and `width` is 32, as in all kernels. Both are compile-time constants, so kernels contain no check.
///
/// # Safety
/// All lanes that `mask` names must execute this together.
#[inline(always)]
pub(crate) unsafe fn warp_shuffle_xor<T: WarpShuffleValue>(
    mask: u32,
    value: T,
    lane_mask: u32,
    width: u32,
) -> (T, bool) {
    assert!(mask == u32::MAX && width == WARP);
    // SAFETY: the caller's promise, of all lanes.
    (unsafe { value.of_lane_xor(lane_mask) }, true)
}
