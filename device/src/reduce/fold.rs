//! The addition of the sums over chunks of a layer, in one order: by a block, or by the lanes of a warp.

use super::{WARPS, block_sum, thread_of_block};
use crate::abi::{ChunkedSpan, THREADS, WARP};
use crate::{arch, lanes, thread};

/// Adds the rows of one product of a divided layer to its total: in the order in which [`Reduction`](super::Reduction) adds the partials of
/// an undivided layer.
///
/// # Safety
/// `totals[row][product]` has `products` in each row, with the rows of `span`, which is the layer's first. All threads of a block of one
/// team call this, once.
#[inline(always)]
pub(crate) unsafe fn fold(totals: *mut f64, products: usize, span: ChunkedSpan, layer: u64, product: usize) {
    /// The number of rows that are loaded at once.
    const STEPS: usize = 8;
    let place = |row: u64| totals.wrapping_add(row as usize * products + product);
    let mut sum = 0.0;
    let mut first = thread::thread_idx_x() as u64;
    // SAFETY: the caller's promise.
    unsafe {
        while first < span.rows {
            let row = |step: usize| first + step as u64 * THREADS as u64;
            // Zeros behind the end change nothing.
            let found: [f64; STEPS] = core::array::from_fn(|step| {
                if row(step) < span.rows { place(span.first_row + row(step)).read() } else { 0.0 }
            });
            let mut step = 0;
            while step < STEPS {
                sum += found[step];
                step += 1;
            }
            first += STEPS as u64 * THREADS as u64;
        }
        block_sum::<1, 1>(0, [sum], |_, total| place(layer).write(total));
    }
}

/// The sum of the numbers `begin..end` of a row, on each of eight neighbouring lanes that compute it together: the additions are those of a
/// team in [`Reduction`](super::Reduction) and [`fold`]. Each lane computes the sums of 16 threads of that team.
///
/// # Safety
/// All lanes of the warp must execute this together. The numbers are readable, and are not written meanwhile.
#[inline(always)]
pub(crate) unsafe fn fold_by_lanes(row: *const f64, begin: u64, end: u64) -> f64 {
    const LANES: u32 = 8;
    let lane = (thread_of_block() % LANES) as u64;
    let mut total = 0.0;
    let mut warp = 0;
    // A loop that must not be unrolled.
    while warp < arch::opaque(WARPS as u32) as u64 {
        let part = |place: u64| {
            let mut sum = 0.0;
            let mut index = begin + warp * WARP as u64 + place * LANES as u64 + lane;
            while index < end {
                // SAFETY: the caller's promise.
                sum += unsafe { *row.add(index as usize) };
                index += THREADS as u64;
            }
            sum
        };
        // A warp first exchanges with the lanes at distances 16 and 8.
        let sum = (part(0) + part(2)) + (part(1) + part(3));
        // SAFETY: the caller's promise.
        total += unsafe { lanes::sum_of::<LANES>(sum) };
        warp += 1;
    }
    total
}

/// Like [`fold_by_lanes`], for numbers that `load` returns for four indices at a time: those behind the end are not used, and count as
/// zero.
///
/// # Safety
/// All lanes of the warp must execute this together.
#[inline(always)]
pub(crate) unsafe fn fold_of_lanes(begin: u32, end: u32, load: impl Fn([u32; 4]) -> [f64; 4]) -> f64 {
    const LANES: u32 = 8;
    let (mut total, mut first) = (0.0, 0);
    // One warp of a team at a time, in a loop that must not be unrolled.
    while first < arch::opaque(THREADS) {
        let mut sums = [0.0; 4];
        let mut index = begin + first + thread_of_block() % LANES;
        while index < end {
            let found = load(core::array::from_fn(|place| index + place as u32 * LANES));
            let mut place = 0;
            while place < 4 {
                sums[place] += found[place];
                place += 1;
            }
            index += THREADS;
        }
        // A warp first exchanges with the lanes at distances 16 and 8.
        let sum = (sums[0] + sums[2]) + (sums[1] + sums[3]);
        // SAFETY: the caller's promise.
        total += unsafe { lanes::sum_of::<LANES>(sum) };
        first += WARP;
    }
    total
}
