//! Sums over the lanes of a warp. Always the whole warp takes part: no kernel here lets single lanes return early.

use crate::abi::WARP;
use crate::arch;
use crate::dialect::warp::{WarpShuffleValue, lane_id, warp_shuffle_xor};

/// The value of the lane whose index differs by `lane_mask`.
///
/// # Safety
/// All lanes of the warp must execute this together.
#[inline(always)]
pub(crate) unsafe fn exchange<T: WarpShuffleValue>(value: T, lane_mask: u32) -> T {
    // SAFETY: the caller's promise.
    unsafe { warp_shuffle_xor(u32::MAX, value, lane_mask, WARP).0 }
}

/// The sum over each group of `LANES` neighbouring lanes, on every lane of the group: a butterfly, so that all lanes add in the same tree
/// and get the same bits.
///
/// # Safety
/// All lanes of the warp must execute this together; `LANES` is a power of two, at most a warp.
#[inline(always)]
pub(crate) unsafe fn sum_of<const LANES: u32>(value: f64) -> f64 {
    let mut total = value;
    let mut lane_mask = LANES / 2;
    while lane_mask > 0 {
        // SAFETY: the caller's promise.
        total += unsafe { exchange(total, lane_mask) };
        lane_mask /= 2;
    }
    total
}

/// The sums over the warp of `K` values per lane; one lane gets each sum, as `write(index, sum)`. The additions are those of [`sum_of`],
/// but at each level half of the lanes continue with half of the sums, which takes about `K` exchanges instead of `5 K`.
///
/// # Safety
/// All lanes of the warp must execute this together.
#[inline(always)]
pub(crate) unsafe fn sums<const K: usize>(mut values: [f64; K], mut write: impl FnMut(usize, f64)) {
    // In a kernel with several jobs, values derived from the lane should not be kept in registers from job to job.
    let lane = arch::forget(lane_id() as u64) as u32;
    // The sums with which this lane continues are `begin..end`, at most `count`.
    let (mut begin, mut end, mut count) = (0, K, K);
    let mut lane_mask = WARP / 2;
    while lane_mask > 0 {
        let (half, upper) = (count.div_ceil(2), lane & lane_mask != 0);
        let mut place = 0;
        while place < half {
            let low = values[place];
            let high = if half + place < count { values[half + place] } else { 0.0 };
            let (kept, sent) = if upper { (high, low) } else { (low, high) };
            // SAFETY: the caller's promise.
            values[place] = kept + unsafe { exchange(sent, lane_mask) };
            place += 1;
        }
        if upper {
            begin += half;
        } else if begin + half < end {
            end = begin + half;
        }
        count = half;
        lane_mask /= 2;
    }
    let mut place = 0;
    while place < count {
        if begin + place < end {
            write(begin + place, values[place]);
        }
        place += 1;
    }
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
        all ^= unsafe { exchange(all, lane_mask) };
        lane_mask /= 2;
    }
    all
}
