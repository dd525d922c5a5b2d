//! Reductions over segments: which part of the arena a block adds up, and how the blocks' sums become one.
//!
//! One launch, two kinds of blocks, no atomic additions: each of the first adds up one chunk of one segment and leaves one partial a product; each
//! of the last takes a layer's partials of one product, as they come, and adds them in a fixed order. A chunk's borders depend on the segment
//! and the chunk length alone, and an element's thread on its place in the chunk alone, so that results depend neither on the grid nor on what
//! else runs. Devices give blocks their places in order, so that nobody waits for a block that has none.

use core::sync::atomic::Ordering;

use crate::abi::{EMPTY_BYTE, Span, THREADS, WARP};
use crate::dialect::atomic::{atomic_load_64_device, atomic_store_64_device};
use crate::shared::{self, SHARED_SLOTS};
use crate::{arch, lanes, memory, thread};

/// The range of elements that this block adds up.
#[derive(Clone, Copy)]
pub(crate) struct Chunk {
    /// Index of the segment.
    pub(crate) span: u64,
    /// First element, counted from the start of the arena.
    pub(crate) begin: u64,
    /// One past the last element.
    pub(crate) end: u64,
}

/// The index of the last of `count` table rows whose first block is at or before `block`.
///
/// # Safety
/// `first_block(row)` must be callable for every row, ascending, and 0 for the first.
#[inline(always)]
pub(crate) unsafe fn row_of_block(count: u64, block: u64, first_block: impl Fn(u64) -> u64) -> u64 {
    let (mut low, mut high) = (0, count);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if first_block(middle) <= block {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

/// The chunk of this block.
///
/// # Safety
/// `spans` must hold `count ≥ 1` rows that were laid out for chunks of `chunk_len` elements and a grid of this size.
#[inline(always)]
pub(crate) unsafe fn chunk_of_block(spans: *const Span, count: u64, chunk_len: u64) -> Chunk {
    // SAFETY: the caller's promise.
    unsafe { chunk(thread::block_idx_x() as u64, spans, count, chunk_len) }
}

/// The chunk of that number, counted over all segments.
///
/// # Safety
/// As for [`chunk_of_block`], for a grid of which `block` is one.
#[inline(always)]
pub(crate) unsafe fn chunk(block: u64, spans: *const Span, count: u64, chunk_len: u64) -> Chunk {
    // SAFETY: the caller's promise.
    unsafe {
        let row = row_of_block(count, block, |row| (*spans.add(row as usize)).first_block);
        chunk_in(row, *spans.add(row as usize), block, chunk_len)
    }
}

/// The chunk of that number, which is one of this row's.
#[inline(always)]
pub(crate) fn chunk_in(row: u64, span: Span, block: u64, chunk_len: u64) -> Chunk {
    let offset = (block - span.first_block) * chunk_len;
    let len = if span.len - offset < chunk_len { span.len - offset } else { chunk_len };
    Chunk { span: row, begin: span.begin + offset, end: span.begin + offset + len }
}

/// Walks a chunk: `visit(index, N)` for whole vectors of `N` elements, `visit(index, 1)` for single ones at the end. Each
/// thread's indices ascend. Blocks have `BLOCK` threads.
#[inline(always)]
pub(crate) fn walk<const N: usize, const BLOCK: u32>(chunk: Chunk, mut visit: impl FnMut(u64, usize)) {
    let stride = BLOCK as u64 * N as u64;
    let mut index = chunk.begin + thread::thread_idx_x() as u64 * N as u64;
    while index + N as u64 <= chunk.end {
        visit(index, N);
        index += stride;
    }
    while N > 1 && index < chunk.end {
        visit(index, 1);
        index += 1;
    }
}

/// Adds up, over `W` vectors of one arena layout, the terms that `add(totals, values)` forms of the `W` values at each
/// element of the chunk. A thread loads `STEPS` of its steps at once: of few vectors, that much has to be under way to keep the memory busy.
/// Blocks have `BLOCK` threads.
///
/// # Safety
/// Each of `vectors` must be readable over the whole chunk.
#[inline(always)]
pub(crate) unsafe fn accumulate<
    T: Copy,
    const W: usize,
    const N: usize,
    const K: usize,
    const STEPS: usize,
    const BLOCK: u32,
>(
    vectors: [*const T; W],
    chunk: Chunk,
    add: impl Fn(&mut [f64; K], [T; W]),
) -> [f64; K] {
    let start = chunk.begin as usize;
    // A thread's vectors lie a multiple of N elements behind the chunk's first element, which so decides for all.
    if vectors.iter().all(|vector| memory::is_aligned::<T, N>(vector.wrapping_add(start))) {
        // SAFETY: as checked.
        return unsafe { accumulate_aligned::<T, W, N, K, STEPS, BLOCK>(vectors, chunk, add) };
    }
    let mut totals = [0.0; K];
    walk::<N, BLOCK>(chunk, |index, count| {
        for element in index..index + count as u64 {
            // SAFETY: one element of the chunk.
            add(&mut totals, core::array::from_fn(|vector| unsafe { vectors[vector].add(element as usize).read() }));
        }
    });
    totals
}

/// As [`accumulate`], of vectors that can be read `N` elements at a time.
///
/// # Safety
/// As there; each vector is aligned for `N` elements at the chunk's first.
#[inline(always)]
pub(crate) unsafe fn accumulate_aligned<
    T: Copy,
    const W: usize,
    const N: usize,
    const K: usize,
    const STEPS: usize,
    const BLOCK: u32,
>(
    vectors: [*const T; W],
    mut chunk: Chunk,
    add: impl Fn(&mut [f64; K], [T; W]),
) -> [f64; K] {
    let mut totals = [0.0; K];
    // SAFETY: elements of the chunk only, by the bounds below and those of `walk`.
    let at = |vector: usize, index: u64| unsafe { vectors[vector].add(index as usize) };
    let load = |index: u64| -> [[T; N]; W] {
        // SAFETY: N elements of the chunk, aligned by the caller's promise.
        core::array::from_fn(|vector| unsafe { memory::load(at(vector, index)) })
    };
    let take = |totals: &mut [f64; K], loaded: [[T; N]; W]| {
        let mut lane = 0;
        while lane < N {
            add(totals, core::array::from_fn(|vector| loaded[vector][lane]));
            lane += 1;
        }
    };
    let stride = BLOCK as u64 * N as u64;
    while STEPS > 1 && chunk.begin + STEPS as u64 * stride <= chunk.end {
        let index = chunk.begin + thread::thread_idx_x() as u64 * N as u64;
        let loaded: [_; STEPS] = core::array::from_fn(|step| load(index + step as u64 * stride));
        let mut step = 0;
        while step < STEPS {
            take(&mut totals, loaded[step]);
            step += 1;
        }
        chunk.begin += STEPS as u64 * stride;
    }
    walk::<N, BLOCK>(chunk, |index, count| {
        if count == N {
            take(&mut totals, load(index));
        } else {
            // SAFETY: one element of the chunk.
            add(&mut totals, core::array::from_fn(|vector| unsafe { at(vector, index).read() }));
        }
    });
    totals
}

/// Warps of a block of so many threads.
const fn warps(block: u32) -> usize {
    (block / WARP) as usize
}

/// Adds `totals` over the block; `write(product, sum)` is called by one thread for each product.
///
/// # Safety
/// All threads of a block of `BLOCK` must call this together: once, or again behind a barrier.
#[inline(always)]
pub(crate) unsafe fn block_sum<const K: usize, const BLOCK: u32>(totals: [f64; K], write: impl Fn(usize, f64)) {
    const { assert!(K * warps(BLOCK) <= SHARED_SLOTS) };
    // As in `lanes::sums`.
    let (shared, thread) = (shared::partials(), arch::forget(thread::thread_idx_x() as u64) as usize);
    let warp_index = thread / WARP as usize;
    // SAFETY: slots are below K × warps, as checked; each is written by one lane and read after the barrier.
    unsafe {
        lanes::sums(totals, |product, sum| shared.write(product * warps(BLOCK) + warp_index, sum));
        thread::sync_threads();
        if thread < K {
            let mut sum = 0.0;
            for slot in 0..warps(BLOCK) {
                sum += shared.read(thread * warps(BLOCK) + slot);
            }
            write(thread, sum);
        }
    }
}

/// The bits of a partial that has not come yet: those of a NaN, which no partial is left as.
const EMPTY: u64 = u64::from_ne_bytes([EMPTY_BYTE; 8]);

/// Where the partial of one sum over a chunk lies, for whoever adds them up.
#[inline(always)]
pub(crate) fn partial_place(sum: usize, chunks: u64, chunk: u64) -> usize {
    sum * chunks as usize + chunk as usize
}

/// A reduction as its blocks see it, all of [`THREADS`].
#[derive(Clone, Copy)]
pub(crate) struct Reduction {
    /// `[sum][chunk]`, empty before the launch and after it.
    pub(crate) partials: *mut f64,
    /// `[layer][product]`.
    pub(crate) totals: *mut f64,
    pub(crate) spans: *const Span,
    pub(crate) span_count: u64,
    /// As many as spans, or one for all of them together.
    pub(crate) layers: u64,
    pub(crate) chunks: u64,
    pub(crate) chunk_len: u64,
}

impl Reduction {
    /// What this block has to do: leave the `K` sums that `sums_of` makes of a chunk, or add up what was left of one of them for one layer.
    /// `place` says which of the `products` of a layer a sum is, if it is one; layers that are not `wanted` have neither partials nor totals.
    ///
    /// # Safety
    /// The launch provides `K` partials for every chunk, totals, spans that were laid out for these chunks, and one block for each
    /// chunk and, behind those, for each layer and sum. All threads of a block come here.
    #[inline(always)]
    pub(crate) unsafe fn run<const K: usize>(
        self,
        products: usize,
        place: impl Fn(usize) -> Option<usize>,
        wanted: impl Fn(u64) -> bool,
        sums_of: impl FnOnce(Chunk) -> [f64; K],
    ) {
        let block = thread::block_idx_x() as u64;
        let row = |sum: usize| self.partials.wrapping_add(partial_place(sum, self.chunks, 0)) as u64;
        // SAFETY: the caller's promise; the branches are the same for the whole block.
        unsafe {
            if block < self.chunks {
                let chunk = chunk(block, self.spans, self.span_count, self.chunk_len);
                if wanted(chunk.span) {
                    block_sum::<K, THREADS>(sums_of(chunk), |sum, value| {
                        if place(sum).is_some() {
                            let bits = if value.to_bits() == EMPTY { f64::NAN } else { value }.to_bits();
                            atomic_store_64_device((row(sum) + block * 8) as *mut u64, Ordering::Relaxed, bits);
                        }
                    });
                }
                return;
            }
            let item = block - self.chunks;
            let (layer, sum) = (item / K as u64, (item % K as u64) as usize);
            let Some(product) = place(sum) else { return };
            if wanted(layer) {
                let sum = self.take(layer, row(sum));
                block_sum::<1, THREADS>([sum], |_, total| {
                    self.totals.add(layer as usize * products + product).write(total);
                });
            }
        }
    }

    /// The sum of this thread's share of a layer's partials, in their order, each of which is waited for and left empty.
    #[inline(always)]
    unsafe fn take(self, layer: u64, row: u64) -> f64 {
        /// Partials that are asked for at once: one after the other, of a large layer, they would take as long as the products of a small one.
        const STEPS: usize = 8;
        // SAFETY: rows are below `layers`.
        let (begin, end) = unsafe {
            let first_block = |layer: u64| (*self.spans.add(layer as usize)).first_block;
            (first_block(layer), if layer + 1 < self.layers { first_block(layer + 1) } else { self.chunks })
        };
        let mut sum = 0.0;
        let mut first = begin + thread::thread_idx_x() as u64;
        while first < end {
            let address = |step: usize| (row + first * 8 + step as u64 * THREADS as u64 * 8) as *mut u64;
            let is_inside = |step: usize| first + step as u64 * (THREADS as u64) < end;
            // What lies behind the end is known, and zero.
            let mut found: [u64; STEPS] = core::array::from_fn(|step| if is_inside(step) { EMPTY } else { 0 });
            let mut missing = true;
            while missing {
                let mut step = 0;
                while step < STEPS {
                    if found[step] == EMPTY {
                        // SAFETY: a partial of this row.
                        found[step] = unsafe { atomic_load_64_device(address(step), Ordering::Relaxed) };
                    }
                    step += 1;
                }
                // Looked at only now, so that the loads do not wait for each other.
                missing = false;
                step = 0;
                while step < STEPS {
                    missing |= found[step] == EMPTY;
                    step += 1;
                }
            }
            let mut step = 0;
            while step < STEPS {
                if is_inside(step) {
                    // SAFETY: as above; nobody else uses it in this launch.
                    unsafe { atomic_store_64_device(address(step), Ordering::Relaxed, EMPTY) };
                }
                sum += f64::from_bits(found[step]);
                step += 1;
            }
            first += STEPS as u64 * THREADS as u64;
        }
        sum
    }
}
