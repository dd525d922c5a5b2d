//! Reductions over segments: which part of the arena a block adds up, and how a block's sums become one.
//!
//! Two stages, no atomics: each block adds one chunk of one segment and writes one partial a product; `sum_partials` adds a
//! segment's partials in a fixed order. A chunk's borders depend on the segment and the chunk length alone, and an element's
//! thread on its place in the chunk alone, so that results depend neither on the grid nor on what else runs.

use crate::abi::{Span, WARP};
use crate::shared::{Partials, SHARED_SLOTS};
use crate::{memory, thread, warp};

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
    // SAFETY: rows are below `count`.
    unsafe {
        let row = row_of_block(count, block, |row| (*spans.add(row as usize)).first_block);
        let span = *spans.add(row as usize);
        let offset = (block - span.first_block) * chunk_len;
        let len = if span.len - offset < chunk_len { span.len - offset } else { chunk_len };
        Chunk { span: row, begin: span.begin + offset, end: span.begin + offset + len }
    }
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
    let mut totals = [0.0; K];
    let start = chunk.begin as usize;
    // A thread's vectors lie a multiple of N elements behind the chunk's first element, which so decides for all.
    let aligned = vectors.iter().all(|vector| memory::is_aligned::<T, N>(vector.wrapping_add(start)));
    // SAFETY: `walk` yields elements of the chunk only.
    let at = |vector: usize, index: u64| unsafe { vectors[vector].add(index as usize) };
    if aligned {
        // SAFETY: N elements of the chunk, aligned as checked above.
        let load =
            |index: u64| -> [[T; N]; W] { core::array::from_fn(|vector| unsafe { memory::load(at(vector, index)) }) };
        let take = |totals: &mut [f64; K], loaded: [[T; N]; W]| {
            let mut lane = 0;
            while lane < N {
                add(totals, core::array::from_fn(|vector| loaded[vector][lane]));
                lane += 1;
            }
        };
        let (mut chunk, stride) = (chunk, BLOCK as u64 * N as u64);
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
    } else {
        walk::<N, BLOCK>(chunk, |index, count| {
            for element in index..index + count as u64 {
                // SAFETY: one element of the chunk.
                add(&mut totals, core::array::from_fn(|vector| unsafe { at(vector, element).read() }));
            }
        });
    }
    totals
}

/// Warps of a block of so many threads.
const fn warps(block: u32) -> usize {
    (block / WARP) as usize
}

/// Adds `totals` over the block; `write(product, sum)` is called by one thread for each product.
///
/// # Safety
/// All threads of a block of `BLOCK` must call this together, once.
#[inline(always)]
pub(crate) unsafe fn block_sum<const K: usize, const BLOCK: u32>(totals: [f64; K], write: impl Fn(usize, f64)) {
    const { assert!(K * warps(BLOCK) <= SHARED_SLOTS) };
    let (shared, thread) = (Partials::of_block(), thread::thread_idx_x() as usize);
    let warp_index = thread / WARP as usize;
    // SAFETY: slots are below K × warps, as checked; each is written by one lane and read after the barrier.
    unsafe {
        warp::sums(totals, |product, sum| shared.write(product * warps(BLOCK) + warp_index, sum));
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
