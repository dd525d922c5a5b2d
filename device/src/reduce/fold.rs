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

/// The neighbouring lanes that add the numbers of the chunks of a layer, with the additions of a team in [`Reduction`](super::Reduction) and
/// [`fold`]: eight lanes for each sum, or a warp. Eight lanes add the numbers of one warp of that team. If there are more numbers than lanes in
/// a warp, all warps of the team have some: either each eight lanes of a warp add those of another one, or the same eight lanes add those of
/// all in several passes.
#[derive(Clone, Copy)]
pub(crate) struct FoldingLanes {
    is_warp: bool,
    /// The number of passes.
    pub(crate) passes: u32,
}

impl FoldingLanes {
    /// The lanes of a group.
    const GROUP: u32 = 8;

    /// The lanes that add in one pass, for layers of at most `most` chunks.
    #[inline(always)]
    pub(crate) fn of(most: u64) -> Self {
        Self { is_warp: most > WARP as u64, passes: 1 }
    }

    /// Eight lanes for each sum, for layers of at most `most` chunks.
    #[inline(always)]
    pub(crate) fn groups(most: u64) -> Self {
        let passes = most.div_ceil(WARP as u64) as u32;
        Self { is_warp: false, passes: if passes < WARPS as u32 { passes } else { WARPS as u32 } }
    }

    /// The binary logarithm of the number of lanes for each sum.
    #[inline(always)]
    fn log2(self) -> u32 {
        if self.is_warp { WARP.ilog2() } else { Self::GROUP.ilog2() }
    }

    /// The number of sums that so many threads compute at a time.
    #[inline(always)]
    pub(crate) fn sums_of(self, threads: u32) -> u32 {
        threads >> self.log2()
    }

    /// The number of this thread's sum among the sums that the block computes at a time.
    #[inline(always)]
    pub(crate) fn sum_of_thread(self) -> u32 {
        thread_of_block() >> self.log2()
    }

    /// The number of this thread among the lanes of its sum.
    #[inline(always)]
    pub(crate) fn lane(self) -> u32 {
        thread_of_block() & ((1 << self.log2()) - 1)
    }

    /// The sum of numbers of chunks `begin..end` in one pass, on the first eight lanes of the sum, and unspecified on the others. `load`
    /// returns the numbers of four chunks at a time: those behind the end are not used, and count as zero.
    ///
    /// # Safety
    /// All lanes of the warp must execute this together. No layer has more chunks than the lanes were chosen for.
    #[inline(always)]
    pub(crate) unsafe fn sum(self, begin: u32, end: u32, load: impl Fn([u32; 4]) -> [f64; 4]) -> f64 {
        // SAFETY: the caller's promise.
        unsafe { self.sums(0, [(begin, end)], |[chunks]| [load(chunks)])[0] }
    }

    /// Like [`sum`](Self::sum), for `M` sums at a time, none of which waits for the numbers of another. The sums of several passes have to be
    /// added in their order.
    ///
    /// # Safety
    /// The conditions of [`sum`](Self::sum).
    #[inline(always)]
    pub(crate) unsafe fn sums<const M: usize>(
        self,
        pass: u32,
        chunks: [(u32, u32); M],
        load: impl Fn([[u32; 4]; M]) -> [[f64; 4]; M],
    ) -> [f64; M] {
        const { assert!(WARPS as u32 * FoldingLanes::GROUP == WARP) };
        // The compiler must not know which layers have no chunks: it would give lanes without chunks a copy of the exchanges below.
        let chunks = chunks.map(|(begin, end)| (begin, begin + arch::forget((end - begin) as u64) as u32));
        let (mut sums, lane) = ([[0.0; 4]; M], self.lane());
        let mut index = (pass + lane / Self::GROUP) * WARP + lane % Self::GROUP;
        let longest = chunks.iter().fold(0, |most, (begin, end)| if end - begin > most { end - begin } else { most });
        while index < longest {
            let places: [u32; 4] = core::array::from_fn(|place| index + place as u32 * Self::GROUP);
            let found = load(core::array::from_fn(|sum| places.map(|place| chunks[sum].0 + place)));
            let mut sum = 0;
            while sum < M {
                let mut place = 0;
                while place < 4 {
                    sums[sum][place] += found[sum][place];
                    place += 1;
                }
                sum += 1;
            }
            index += THREADS;
        }
        // A warp first exchanges with the lanes at distances 16 and 8.
        sums.map(|[first, second, third, fourth]| {
            let sum = (first + third) + (second + fourth);
            // SAFETY: the caller's promise; the number of lanes is the same for the whole block.
            unsafe {
                let sum = lanes::sum_of::<{ Self::GROUP }>(sum);
                let (mut total, mut distance) = (sum, Self::GROUP);
                // A loop that must not be unrolled.
                while distance < arch::opaque(1 << self.log2()) {
                    total += lanes::exchange(sum, distance);
                    distance += Self::GROUP;
                }
                total
            }
        })
    }
}
