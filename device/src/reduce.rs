//! Reductions over segments: the part of the arena that a block reduces, and the addition of the blocks' sums.
//!
//! One launch, two kinds of blocks, no atomic additions: each of the first adds a few chunks of one segment in sequence, and leaves one
//! partial per chunk and product; each of the last takes a layer's partials of one product, as they are written, and adds them in a fixed
//! order, or, for a layer with chunks in other shards too, leaves them as rows for [`fold`]. A chunk's borders depend on its tensor alone,
//! an element's thread on its offset in the chunk, and a partial's position in the sum on the chunk's number. So results do not depend on
//! the grid, on shards or on other work. Blocks become resident in order, so no block waits for one that is not resident.
//!
//! [`THREADS`] threads work on a chunk: a team. Blocks of the kernels over peers' memory have two teams.

mod fold;

use core::sync::atomic::Ordering;

use crate::abi::{ChunkedSpan, EMPTY, Span, THREADS, WARP};
use crate::dialect::atomic::{atomic_load_64_device, atomic_store_64_device};
use crate::dialect::warp::lane_id;
use crate::shared::{self, SHARED_SLOTS};
use crate::{arch, lanes, memory, thread};

pub(crate) use fold::{FoldingLanes, fold};

/// The range of elements that a block, or a team of it, works on.
#[derive(Clone, Copy)]
pub(crate) struct ElementRange {
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
/// `first_block(row)` must be callable for every row, ascending, and at most `block` for the first.
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

/// Like [`row_of_block`], by all lanes of a warp together, which compare 32 rows at a time.
///
/// # Safety
/// The condition of that function; all lanes of the warp must execute this together.
#[inline(always)]
pub(crate) unsafe fn row_by_warp(count: u64, block: u64, first_block: impl Fn(u64) -> u64) -> u64 {
    let (mut low, mut len) = (0, count as u32);
    while len > 1 {
        let stride = len.div_ceil(WARP);
        let offset = lane_id() * stride;
        let is_before = offset < len && first_block((low + offset) as u64) <= block;
        // SAFETY: the caller's promise. The lanes whose rows are at or before the block are the first ones, and lane 0 is one of them.
        let last = (WARP - 1 - unsafe { arch::ballot(is_before) }.leading_zeros()) * stride;
        low += last;
        len = if len - last < stride { len - last } else { stride };
    }
    low as u64
}

/// The elements of this block.
///
/// # Safety
/// `spans` must hold `count ≥ 1` rows that were laid out for blocks of `block_len` elements and a grid of this size.
#[inline(always)]
pub(crate) unsafe fn range_of_this_block(spans: *const Span, count: u64, block_len: u64) -> ElementRange {
    // SAFETY: the caller's promise.
    unsafe { range_of_block(thread::block_idx_x() as u64, spans, count, block_len) }
}

/// The elements of the block with this number, counted over all segments.
///
/// # Safety
/// The conditions of [`range_of_this_block`], for a grid that includes `block`.
#[inline(always)]
pub(crate) unsafe fn range_of_block(block: u64, spans: *const Span, count: u64, block_len: u64) -> ElementRange {
    // SAFETY: the caller's promise.
    unsafe {
        let row = row_of_block(count, block, |row| (*spans.add(row as usize)).first_block);
        range_in(row, *spans.add(row as usize), block, block_len)
    }
}

/// The elements of the block with this number, which is one of this row's.
#[inline(always)]
pub(crate) fn range_in(row: u64, span: Span, block: u64, block_len: u64) -> ElementRange {
    let offset = (block - span.first_block) * block_len;
    let len = if span.len - offset < block_len { span.len - offset } else { block_len };
    ElementRange { span: row, begin: span.begin + offset, end: span.begin + offset + len }
}

/// The consecutive chunks of one segment that a block processes, by their numbers in the segment. Its methods take the segment's row of the
/// table, which kernels with few registers read again for each chunk.
#[derive(Clone, Copy)]
pub(crate) struct Stretch {
    /// Index of the segment.
    span: u32,
    next: u32,
    end: u32,
}

impl Stretch {
    /// The stretch of block number `block`.
    ///
    /// # Safety
    /// `spans` must hold `count ≥ 1` rows, laid out for more than `block` blocks.
    #[inline(always)]
    pub(crate) unsafe fn of_block(block: u64, spans: *const ChunkedSpan, count: u64) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let row = row_of_block(count, block, |row| (*spans.add(row as usize)).first_block);
            let span = spans.add(row as usize);
            let chunks = (*span).chunks_of_block as u32;
            let next = (block - (*span).first_block) as u32 * chunks;
            Stretch { span: row as u32, next, end: next + chunks }
        }
    }

    /// Index of the segment. Values derived from it are not kept in registers.
    #[inline(always)]
    pub(crate) fn span(self) -> u64 {
        arch::forget(self.span as u64)
    }

    /// The row of the segment.
    ///
    /// # Safety
    /// The same `spans`.
    #[inline(always)]
    pub(crate) unsafe fn row(self, spans: *const ChunkedSpan) -> ChunkedSpan {
        // SAFETY: the caller's promise.
        unsafe { *spans.add(self.span as usize) }
    }

    /// Like [`row`](Self::row), and read again: the compiler keeps nothing of it in registers until then.
    ///
    /// # Safety
    /// The same `spans`.
    #[inline(always)]
    pub(crate) unsafe fn row_again(self, spans: *const ChunkedSpan) -> ChunkedSpan {
        // SAFETY: the caller's promise.
        unsafe { self.row(arch::forget(spans as u64) as *const ChunkedSpan) }
    }

    /// The range of elements of the remaining chunks.
    #[inline(always)]
    pub(crate) fn rest(self, span: ChunkedSpan) -> (u64, u64) {
        let place = |chunk: u32| {
            let offset = chunk as u64 * span.chunk_len;
            span.begin + if offset < span.len { offset } else { span.len }
        };
        (place(self.next), place(self.end))
    }

    /// Takes the next `TEAMS` chunks, one for each team, if there are any: returns the chunk of this thread's team, which is empty if there
    /// are too few. Except for the range, the result is the same for the whole block.
    #[inline(always)]
    pub(crate) fn next<const TEAMS: u32>(&mut self, span: ChunkedSpan) -> Option<ElementRange> {
        let (chunk_len, (begin, end)) = (span.chunk_len, self.rest(span));
        if begin >= end {
            return None;
        }
        self.next += TEAMS;
        let least = |place: u64| if place < end { place } else { end };
        let begin = least(begin + team::<TEAMS>() as u64 * chunk_len);
        Some(ElementRange { span: self.span as u64, begin, end: least(begin + chunk_len) })
    }

    /// The number, counted over all segments, of the chunk that this thread's team has taken last, if there was one for it.
    #[inline(always)]
    pub(crate) fn number<const TEAMS: u32>(self, span: ChunkedSpan) -> Option<u64> {
        let chunk = self.next - TEAMS + team::<TEAMS>();
        let is_there = TEAMS == 1 || chunk < self.end && chunk as u64 * span.chunk_len < span.len;
        is_there.then_some(span.first_chunk + chunk as u64)
    }
}

/// The chunk with this number, counted over all segments, which belongs to one of these.
///
/// # Safety
/// `spans` must hold `count ≥ 1` rows, one of which has the chunk.
#[inline(always)]
pub(crate) unsafe fn chunk_of_number(number: u64, spans: *const ChunkedSpan, count: u64) -> ElementRange {
    // SAFETY: the caller's promise.
    let (row, span) = unsafe {
        let row = row_of_block(count, number, |row| (*spans.add(row as usize)).first_chunk);
        (row, *spans.add(row as usize))
    };
    let offset = (number - span.first_chunk) * span.chunk_len;
    let len = if span.len - offset < span.chunk_len { span.len - offset } else { span.chunk_len };
    ElementRange { span: row, begin: span.begin + offset, end: span.begin + offset + len }
}

/// The number of this thread's team, in a block of `TEAMS` of them.
#[inline(always)]
pub(crate) fn team<const TEAMS: u32>() -> u32 {
    if TEAMS == 1 { 0 } else { thread_of_block() / THREADS }
}

/// The number of this thread in its team.
#[inline(always)]
fn thread_of_team<const TEAMS: u32>() -> u32 {
    if TEAMS == 1 { thread::thread_idx_x() } else { thread_of_block() % THREADS }
}

/// The number of this thread, for kernels with several jobs: values derived from it are not kept in registers from job to job.
#[inline(always)]
pub(crate) fn thread_of_block() -> u32 {
    arch::forget(thread::thread_idx_x() as u64) as u32
}

/// Walks the chunk of this thread's team: `visit(index, N)` for whole vectors of `N` elements, `visit(index, 1)` for single ones at the
/// end. Each thread's indices ascend. Blocks have `TEAMS` teams.
#[inline(always)]
pub(crate) fn walk<const N: usize, const TEAMS: u32>(chunk: ElementRange, mut visit: impl FnMut(u64, usize)) {
    let stride = THREADS as u64 * N as u64;
    let mut index = chunk.begin + thread_of_team::<TEAMS>() as u64 * N as u64;
    while index + N as u64 <= chunk.end {
        visit(index, N);
        index += stride;
    }
    while N > 1 && index < chunk.end {
        visit(index, 1);
        index += 1;
    }
}

/// Adds, over `W` vectors of one arena layout, the terms that `add(totals, values)` computes from the `W` values at each element of the
/// chunk. A thread loads `STEPS` of its steps at once: with few vectors, that many loads must be in flight to use the memory's bandwidth.
/// Blocks have `TEAMS` teams.
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
    const TEAMS: u32,
>(
    vectors: [*const T; W],
    chunk: ElementRange,
    add: impl Fn(&mut [f64; K], [T; W]),
) -> [f64; K] {
    let start = chunk.begin as usize;
    // A thread's vectors lie a multiple of N elements behind the chunk's first element, so its alignment decides for all.
    if vectors.iter().all(|vector| memory::is_aligned::<T, N>(vector.wrapping_add(start))) {
        // SAFETY: as checked.
        return unsafe { accumulate_aligned::<T, W, N, K, STEPS, TEAMS>(vectors, chunk, add) };
    }
    let mut totals = [0.0; K];
    walk::<N, TEAMS>(chunk, |index, count| {
        for element in index..index + count as u64 {
            // SAFETY: one element of the chunk.
            add(&mut totals, core::array::from_fn(|vector| unsafe { vectors[vector].add(element as usize).read() }));
        }
    });
    totals
}

/// Like [`accumulate`], for vectors that can be read `N` elements at a time.
///
/// # Safety
/// The conditions of that function; each vector is aligned for `N` elements at the chunk's first.
#[inline(always)]
pub(crate) unsafe fn accumulate_aligned<
    T: Copy,
    const W: usize,
    const N: usize,
    const K: usize,
    const STEPS: usize,
    const TEAMS: u32,
>(
    vectors: [*const T; W],
    mut chunk: ElementRange,
    add: impl Fn(&mut [f64; K], [T; W]),
) -> [f64; K] {
    let mut totals = [0.0; K];
    // SAFETY: elements of the chunk only, by the bounds below and the bounds of `walk`.
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
    let stride = THREADS as u64 * N as u64;
    while STEPS > 1 && chunk.begin + STEPS as u64 * stride <= chunk.end {
        let index = chunk.begin + thread_of_team::<TEAMS>() as u64 * N as u64;
        let loaded: [_; STEPS] = core::array::from_fn(|step| load(index + step as u64 * stride));
        let mut step = 0;
        while step < STEPS {
            take(&mut totals, loaded[step]);
            step += 1;
        }
        chunk.begin += STEPS as u64 * stride;
    }
    walk::<N, TEAMS>(chunk, |index, count| {
        if count == N {
            take(&mut totals, load(index));
        } else {
            // SAFETY: one element of the chunk.
            add(&mut totals, core::array::from_fn(|vector| unsafe { at(vector, index).read() }));
        }
    });
    totals
}

/// Like [`accumulate`], one step at a time, in blocks of one team: offsets are 32 bits from the chunk's start, to save registers.
///
/// # Safety
/// The condition of that function.
#[inline(always)]
pub(crate) unsafe fn accumulate_short<T: Copy, const W: usize, const N: usize, const K: usize>(
    vectors: [*const T; W],
    chunk: ElementRange,
    add: impl Fn(&mut [f64; K], [T; W]),
) -> [f64; K] {
    let (mut totals, len) = ([0.0; K], (chunk.end - chunk.begin) as u32);
    let vectors = vectors.map(|vector| vector.wrapping_add(chunk.begin as usize));
    let is_aligned = vectors.iter().all(|&vector| memory::is_aligned::<T, N>(vector));
    // SAFETY: elements of the chunk only, by the bounds below.
    let at = |vector: usize, place: u32| unsafe { vectors[vector].add(place as usize) };
    let mut place = thread::thread_idx_x() * N as u32;
    while place < len {
        if is_aligned && len - place >= N as u32 {
            // SAFETY: N elements of the chunk, at an aligned address.
            let loaded: [[T; N]; W] = core::array::from_fn(|vector| unsafe { memory::load(at(vector, place)) });
            let mut lane = 0;
            while lane < N {
                add(&mut totals, core::array::from_fn(|vector| loaded[vector][lane]));
                lane += 1;
            }
        } else {
            let end = if len - place < N as u32 { len } else { place + N as u32 };
            for element in place..end {
                // SAFETY: one element of the chunk.
                add(&mut totals, core::array::from_fn(|vector| unsafe { at(vector, element).read() }));
            }
        }
        place += THREADS * N as u32;
    }
    totals
}

/// The number of warps of a team.
const WARPS: usize = (THREADS / WARP) as usize;

/// Adds `totals` over each team of the block; one thread of the team calls `write(product, sum)` for each product.
///
/// # Safety
/// All threads of a block of `TEAMS` teams must call this together: once, or again behind a barrier. Blocks of one team need no such
/// barrier if `turn` alternates between 0 and 1: the barrier inside keeps the turns apart.
#[inline(always)]
pub(crate) unsafe fn block_sum<const K: usize, const TEAMS: u32>(
    turn: u32,
    totals: [f64; K],
    write: impl Fn(usize, f64),
) {
    // In a block of one team, each turn has half of the slots.
    const { assert!(K <= THREADS as usize && K * WARPS * if TEAMS == 1 { 2 } else { TEAMS as usize } <= SHARED_SLOTS) };
    // As in `lanes::sums`.
    let (shared, thread) = (shared::partials(), arch::forget(thread::thread_idx_x() as u64) as usize);
    let warps = WARPS * TEAMS as usize;
    let first = if TEAMS == 1 { turn as usize * (SHARED_SLOTS / 2) } else { 0 };
    let (warp_index, team) = (thread / WARP as usize, if TEAMS == 1 { 0 } else { thread / THREADS as usize });
    let product = if TEAMS == 1 { thread } else { thread % THREADS as usize };
    // SAFETY: slots are below the turn's limit, as checked; each is written by one lane and read after the barrier. A thread that reaches
    // the same turn again has passed the other turn's barrier, and so have all threads that read here.
    unsafe {
        lanes::sums(totals, |product, sum| shared.write(first + product * warps + warp_index, sum));
        thread::sync_threads();
        if product < K {
            let mut sum = 0.0;
            for slot in 0..WARPS {
                sum += shared.read(first + product * warps + team * WARPS + slot);
            }
            write(product, sum);
        }
    }
}

/// Adds `totals` over each team of a block of at most `all_warps` warps, in the order of [`block_sum`]; one thread of the team calls
/// `write(product, sum)` for each product. Teams have two to the power of `team_log2` threads, at least as many as there are products. A
/// smaller team has the sums of a team of [`THREADS`] threads whose other threads have zeros.
///
/// # Safety
/// All threads of a block must call this together: once, or again behind a barrier. Teams have a warp or more, and at most [`THREADS`]
/// threads. There is a slot for each of the `K` sums of every warp.
#[inline(always)]
pub(crate) unsafe fn team_sum<const K: usize>(
    (all_warps, team_log2): (usize, u32),
    totals: [f64; K],
    write: impl Fn(usize, f64),
) {
    let (shared, thread) = (shared::partials(), thread_of_block() as usize);
    let (warps, first_warp) = (1 << team_log2 >> WARP.ilog2(), thread >> team_log2 << team_log2 >> WARP.ilog2());
    let product = thread & ((1 << team_log2) - 1);
    // SAFETY: the caller's promise; each slot is written by one lane and read after the barrier.
    unsafe {
        lanes::sums(totals, |product, sum| shared.write(product * all_warps + thread / WARP as usize, sum));
        thread::sync_threads();
        if product < K {
            let mut sum = 0.0;
            for slot in 0..WARPS {
                if slot < warps {
                    sum += shared.read(product * all_warps + first_warp + slot);
                }
            }
            write(product, sum);
        }
    }
}

/// The index of the partial of one sum over a chunk.
#[inline(always)]
pub(crate) fn partial_place(sum: usize, chunks: u64, chunk: u64) -> usize {
    sum * chunks as usize + chunk as usize
}

/// A reduction from the view of its blocks, all of [`THREADS`] threads.
#[derive(Clone, Copy)]
pub(crate) struct Reduction {
    /// `[sum][chunk]`, empty before the launch and after it.
    pub(crate) partials: *mut f64,
    /// `[row][product]`: a row for each layer, and the rows of divided layers.
    pub(crate) totals: *mut f64,
    pub(crate) spans: *const ChunkedSpan,
    pub(crate) span_count: u64,
    /// The number of spans, or one if all spans are one layer.
    pub(crate) layers: u64,
    /// The number of blocks that take chunks.
    pub(crate) blocks: u64,
    pub(crate) chunks: u64,
}

impl Reduction {
    /// Does this block's work: leaves the `K` sums that `sums_of` computes for each of its chunks, or adds one sum's partials for a layer.
    /// `place` returns a sum's index among a layer's `products`, if used; layers that are not `wanted` have no partials and no totals.
    ///
    /// # Safety
    /// The launch provides `K` partials for every chunk, totals of every row, spans that were laid out for these blocks and chunks, and one
    /// block for each layer and sum behind them. All threads of a block call this.
    #[inline(always)]
    pub(crate) unsafe fn run<const K: usize>(
        self,
        products: usize,
        place: impl Fn(usize) -> Option<usize>,
        wanted: impl Fn(u64) -> bool,
        sums_of: impl Fn(ElementRange) -> [f64; K],
    ) {
        /// The most sums of a thread beside which it keeps the row of its segment.
        const MOST_SUMS: usize = 16;
        let block = thread::block_idx_x() as u64;
        let row = |sum: usize| self.partials.wrapping_add(partial_place(sum, self.chunks, 0)) as u64;
        // SAFETY: the caller's promise; the branches and the loop are the same for the whole block.
        unsafe {
            if block < self.blocks {
                let mut stretch = Stretch::of_block(block, self.spans, self.span_count);
                if !wanted(stretch.span()) {
                    return;
                }
                // Loaded at once, since a chunk takes less time than loads that wait for each other; the sums of eight vectors leave no
                // registers for it, and the sums of four none for the number of the first chunk.
                let loaded = stretch.row(self.spans);
                let span = |stretch: Stretch| if K > MOST_SUMS { stretch.row_again(self.spans) } else { loaded };
                while let Some(chunk) = stretch.next::<1>(span(stretch)) {
                    let sums = sums_of(chunk);
                    block_sum::<K, 1>(stretch.next % 2, sums, |sum, value| {
                        if let (Some(_), Some(number)) =
                            (place(sum), stretch.number::<1>(stretch.row_again(self.spans)))
                        {
                            let bits = if value.to_bits() == EMPTY { f64::NAN } else { value }.to_bits();
                            atomic_store_64_device((row(sum) + number * 8) as *mut u64, Ordering::Relaxed, bits);
                        }
                    });
                }
                return;
            }
            let item = block - self.blocks;
            let (layer, sum) = (item / K as u64, (item % K as u64) as usize);
            let Some(product) = place(sum) else { return };
            if !wanted(layer) {
                return;
            }
            let total = |row: u64| self.totals.wrapping_add(row as usize * products + product);
            let (chunks, own) = (self.chunks_of(layer), *self.spans.add(layer as usize));
            let is_divided = own.first_row != 0;
            let (partials, mut sum) = (row(sum), 0.0);
            self.take(chunks, partials, |index, partial| {
                if is_divided {
                    total(own.first_row + own.rows_before + index).write(partial);
                } else {
                    sum += partial;
                }
            });
            if is_divided {
                // Rows of other shards' chunks become zero, for the addition of all shards' tables.
                let mut index = thread::thread_idx_x() as u64;
                while index < own.rows {
                    if index < own.rows_before || index >= own.rows_before + (chunks.1 - chunks.0) {
                        total(own.first_row + index).write(0.0);
                    }
                    index += THREADS as u64;
                }
            } else {
                block_sum::<1, 1>(0, [sum], |_, sum| total(layer).write(sum));
            }
        }
    }

    /// The numbers of a layer's first chunk in this shard, and of the one behind its last.
    #[inline(always)]
    unsafe fn chunks_of(self, layer: u64) -> (u64, u64) {
        // SAFETY: there is a span for each layer.
        unsafe {
            let first_chunk = |layer: u64| (*self.spans.add(layer as usize)).first_chunk;
            (first_chunk(layer), if layer + 1 < self.layers { first_chunk(layer + 1) } else { self.chunks })
        }
    }

    /// Visits this thread's share of a layer's partials, in their order; waits for each and leaves it empty: `visit(index, partial)`, where
    /// the first partial of the layer has index 0.
    #[inline(always)]
    unsafe fn take(self, (begin, end): (u64, u64), row: u64, mut visit: impl FnMut(u64, f64)) {
        /// The number of partials loaded at once: one by one, a large layer's would take as long as the products of a small one.
        const STEPS: usize = 8;
        let mut first = begin + thread::thread_idx_x() as u64;
        while first < end {
            let address = |step: usize| (row + first * 8 + step as u64 * THREADS as u64 * 8) as *mut u64;
            let is_inside = |step: usize| first + step as u64 * (THREADS as u64) < end;
            // Partials behind the end count as known, and are not visited.
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
                // Checked only now, so that the loads do not wait for each other.
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
                    // SAFETY: as above; no other thread uses it in this launch.
                    unsafe { atomic_store_64_device(address(step), Ordering::Relaxed, EMPTY) };
                    visit(first - begin + step as u64 * THREADS as u64, f64::from_bits(found[step]));
                }
                step += 1;
            }
            first += STEPS as u64 * THREADS as u64;
        }
    }
}
