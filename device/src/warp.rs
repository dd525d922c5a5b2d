//! Exchange inside a warp, after `cuda_std::warp`. Always the whole warp: no kernel here lets single lanes leave early.

use crate::abi::WARP;
use crate::{arch, thread};

/// Index of this thread in its warp.
#[inline(always)]
pub(crate) fn lane_id() -> u32 {
    thread::thread_idx_x() % WARP
}

/// The value of the lane whose index differs by `lane_mask`.
///
/// # Safety
/// All lanes of the warp must execute this together.
#[inline(always)]
pub(crate) unsafe fn warp_shuffle_xor(value: f64, lane_mask: u32) -> f64 {
    let bits = value.to_bits();
    // SAFETY: the caller's promise.
    let (low, high) =
        unsafe { (arch::shuffle_xor(bits as u32, lane_mask), arch::shuffle_xor((bits >> 32) as u32, lane_mask)) };
    f64::from_bits((high as u64) << 32 | low as u64)
}

/// The sum over the warp, on every lane: a butterfly, so that all lanes add in the same tree and get the same bits.
///
/// # Safety
/// All lanes of the warp must execute this together.
#[inline(always)]
pub(crate) unsafe fn sum(value: f64) -> f64 {
    // SAFETY: the caller's promise.
    unsafe { sum_of::<{ WARP }>(value) }
}

/// The sum over each group of `LANES` neighbouring lanes, on every lane of the group.
///
/// # Safety
/// All lanes of the warp must execute this together; `LANES` is a power of two, at most a warp.
#[inline(always)]
pub(crate) unsafe fn sum_of<const LANES: u32>(value: f64) -> f64 {
    let mut total = value;
    let mut lane_mask = LANES / 2;
    while lane_mask > 0 {
        // SAFETY: the caller's promise.
        total += unsafe { warp_shuffle_xor(total, lane_mask) };
        lane_mask /= 2;
    }
    total
}

/// The exclusive or over the warp, on every lane.
///
/// # Safety
/// All lanes of the warp must execute this together.
#[inline(always)]
pub(crate) unsafe fn exclusive_or(value: u32) -> u32 {
    let mut all = value;
    let mut lane_mask = WARP / 2;
    while lane_mask > 0 {
        // SAFETY: the caller's promise.
        all ^= unsafe { arch::shuffle_xor(all, lane_mask) };
        lane_mask /= 2;
    }
    all
}

/// Adds the products of eight columns with each other to `totals`, on the matrix units: lane `l` brings element `l % 4` of column
/// `l / 4`, and has the products of that column with columns `2 (l % 4)` and the one after.
///
/// # Safety
/// All lanes of the warp must execute this together.
#[cfg(gradsync_sm = "80")]
#[inline(always)]
pub(crate) unsafe fn add_gram(value: f64, totals: [f64; 2]) -> [f64; 2] {
    // The second matrix is the first one's transpose, whose elements lie with the same lanes.
    // SAFETY: the caller's promise.
    unsafe { arch::matrix_multiply_add(value, value, totals) }
}
