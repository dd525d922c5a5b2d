//! Inner products per segment: `squared_norms`, `dots`, `gram` tiles, and the second stage of them all, `sum_partials`.
//!
//! Products and sums are `f64`. Each input is read once a launch; `gram` over more than eight vectors is launched tile by
//! tile, where `gram_cross` multiplies the members of two different tiles.

use super::{for_each_dtype, kernel};
use crate::abi::{DType, GRAM_CROSS_WIDTH, LaunchBounds, SUM_THREADS, Span, THREADS, vector_len};
use crate::half::{BF16, F16};
use crate::math::adasum::{product_index, products};
use crate::math::{Element, elementwise};
#[cfg(gradsync_sm = "80")]
use crate::shared::Staging;
use crate::{memory, reduce, thread};

/// Where the partial of one product over a chunk lies, for whoever adds them up.
#[inline(always)]
pub(super) fn partial_place(product: usize, chunks: u64, chunk: u64) -> usize {
    product * chunks as usize + chunk as usize
}

/// As [`partial_place`], for the chunk of this block.
#[inline(always)]
pub(super) fn partial_slot(product: usize, chunks: u64) -> usize {
    partial_place(product, chunks, thread::block_idx_x() as u64)
}

/// Vectors `first..first + W` of the table; those past `count` repeat the first, which costs no memory traffic.
#[inline(always)]
unsafe fn pick<T, const W: usize>(table: *const *const T, first: u64, count: u64) -> [*const T; W] {
    // SAFETY: the launch provides `count ≥ 1` pointers from `first` on.
    core::array::from_fn(|index| unsafe { *table.add(first as usize + if (index as u64) < count { index } else { 0 }) })
}

/// Which vectors a launch of `gram` multiplies with each other: `first..first + count` of `world_size`.
#[derive(Clone, Copy)]
struct Tile {
    first: u64,
    count: u64,
    world_size: u64,
}

/// Row and column of each of the `K` products of `W` vectors: one flat loop unrolls where two nested ones do not.
pub(super) const fn triangle<const W: usize, const K: usize>() -> [(usize, usize); K] {
    let mut places = [(0, 0); K];
    let mut i = 0;
    while i < W {
        let mut j = i;
        while j < W {
            places[product_index(i, j, W)] = (i, j);
            j += 1;
        }
        i += 1;
    }
    places
}

/// Elements a thread loads at once from each of `width` vectors: 16 bytes, or 8 where eight vectors fill the registers.
pub(super) const fn gram_vector_len(dtype: DType, width: usize) -> usize {
    let len = vector_len(dtype, DType::F16);
    if width == 8 && len > 4 { 4 } else { len }
}

/// All products of the `W` values with each other.
#[inline(always)]
pub(super) fn add_triangle<T: Element, const W: usize, const K: usize>(totals: &mut [f64; K], values: [T; W]) {
    let values: [f64; W] = values.map(Element::to_f64);
    let places = const { triangle::<W, K>() };
    let mut product = 0;
    while product < K {
        let (i, j) = places[product];
        totals[product] = elementwise::add_product(totals[product], values[i], values[j]);
        product += 1;
    }
}

/// A tile of the Gram matrix, `K` being the number of products of `W` vectors.
#[inline(always)]
unsafe fn gram<T: Element, const W: usize, const N: usize, const K: usize, const STEPS: usize>(
    partials: *mut f64,
    vectors: [*const T; W],
    tile: Tile,
    chunk: reduce::Chunk,
    chunks: u64,
) {
    // SAFETY: the launch provides the vectors, and room for every product of every chunk.
    unsafe {
        let totals = reduce::accumulate::<T, W, N, K, STEPS, THREADS>(vectors, chunk, add_triangle::<T, W, K>);
        write_tile::<W, K>(partials, totals, tile, chunks);
    }
}

/// Adds a tile's sums up over the block and writes them as the chunk's partials.
#[inline(always)]
unsafe fn write_tile<const W: usize, const K: usize>(partials: *mut f64, totals: [f64; K], tile: Tile, chunks: u64) {
    // SAFETY: the launch provides room for every product of every chunk.
    unsafe {
        reduce::block_sum::<K, THREADS>(totals, |product, sum| {
            let (row, column) = const { triangle::<W, K>() }[product];
            if (column as u64) < tile.count {
                let first = tile.first as usize;
                let index = product_index(first + row, first + column, tile.world_size as usize);
                partials.add(partial_slot(index, chunks)).write(sum);
            }
        });
    }
}

/// As [`gram`] with eight vectors, whose sums leave no registers for loads under way: those pass through shared memory. A thread reads back
/// what it has loaded itself, so that nothing waits for other threads.
#[cfg(gradsync_sm = "80")]
#[inline(always)]
unsafe fn gram_of_eight<T: Element, const N: usize>(
    partials: *mut f64,
    vectors: [*const T; 8],
    tile: Tile,
    chunk: reduce::Chunk,
    chunks: u64,
) {
    const K: usize = products(8);
    let stride = THREADS * N as u32;
    // Places count from the chunk's first element, in 32 bits, which saves registers.
    let (mut totals, len) = ([0.0; K], (chunk.end - chunk.begin) as u32);
    // SAFETY: the launch provides the vectors over the chunk, and room for every product of every chunk.
    unsafe {
        let vectors = vectors.map(|vector| vector.add(chunk.begin as usize));
        let at = |vector: usize, place: u32| vectors[vector].add(place as usize);
        let mut done = 0;
        if vectors.iter().all(|&vector| memory::is_aligned::<T, N>(vector)) {
            let staging = Staging::of_thread();
            let steps = len / stride;
            let fetch = |step: u32| {
                let mut vector = 0;
                while vector < 8 && step < steps {
                    let place = step * stride + thread::thread_idx_x() * N as u32;
                    staging.fetch::<T, N>(step, vector, at(vector, place));
                    vector += 1;
                }
                staging.commit();
            };
            fetch(0);
            for step in 0..steps {
                fetch(step + 1);
                staging.wait_for_all_but_last();
                let loaded: [[T; N]; 8] = core::array::from_fn(|vector| staging.read(step, vector));
                let mut lane = 0;
                while lane < N {
                    add_triangle::<T, 8, K>(&mut totals, core::array::from_fn(|vector| loaded[vector][lane]));
                    lane += 1;
                }
            }
            done = steps * stride;
        }
        // Unaligned vectors too: as in `reduce::walk`, an element belongs to the same thread. Written out, because that takes fewer registers.
        let mut place = done + thread::thread_idx_x() * N as u32;
        while place < len {
            let end = if len - place < N as u32 { len } else { place + N as u32 };
            while place < end {
                add_triangle::<T, 8, K>(&mut totals, core::array::from_fn(|vector| at(vector, place).read()));
                place += 1;
            }
            place += stride - N as u32;
        }
        write_tile::<8, K>(partials, totals, tile, chunks);
    }
}

macro_rules! gram_width {
    ($name:literal $T:ident $width:literal $steps:literal $suffix:literal $bounds:expr) => {
        kernel!(concat!("gram_", $name, $suffix), $bounds, fn (
            partials: *mut f64, table: *const *const $T, first: u64, count: u64, world_size: u64,
            spans: *const Span, span_count: u64, chunks: u64, chunk_len: u64,
        ) {
            const N: usize = gram_vector_len(<$T>::DTYPE, $width);
            let chunk = reduce::chunk_of_block(spans, span_count, chunk_len);
            let vectors = pick(table, first, count);
            gram::<$T, $width, N, { products($width) }, $steps>(partials, vectors, Tile { first, count, world_size }, chunk, chunks)
        });
    };
}

#[cfg(gradsync_sm = "80")]
macro_rules! gram_of_eight {
    ($name:literal $T:ident) => {
        kernel!(concat!("gram_", $name, "_p8"), LaunchBounds::GRAM_OF_EIGHT, fn (
            partials: *mut f64, table: *const *const $T, first: u64, count: u64, world_size: u64,
            spans: *const Span, span_count: u64, chunks: u64, chunk_len: u64,
        ) {
            const N: usize = vector_len(<$T>::DTYPE, DType::F16);
            let chunk = reduce::chunk_of_block(spans, span_count, chunk_len);
            gram_of_eight::<$T, N>(partials, pick(table, first, count), Tile { first, count, world_size }, chunk, chunks)
        });
    };
}
#[cfg(not(gradsync_sm = "80"))]
macro_rules! gram_of_eight {
    ($name:literal $T:ident) => {
        gram_width!($name $T 8 1 "_p8" LaunchBounds::GRAM_OF_EIGHT);
    };
}

macro_rules! of_dtype {
    ($name:literal $T:ident) => {
        kernel!(concat!("squared_norms_", $name), LaunchBounds::REDUCE, fn (
            partials: *mut f64, source: *const $T, spans: *const Span, span_count: u64, chunks: u64, chunk_len: u64,
        ) {
            const N: usize = vector_len(<$T>::DTYPE, DType::F16);
            let chunk = reduce::chunk_of_block(spans, span_count, chunk_len);
            gram::<$T, 1, N, 1, 8>(partials, [source], Tile { first: 0, count: 1, world_size: 1 }, chunk, chunks)
        });
        kernel!(concat!("dots_", $name), LaunchBounds::REDUCE, fn (
            partials: *mut f64, a: *const $T, b: *const $T,
            spans: *const Span, span_count: u64, chunks: u64, chunk_len: u64,
        ) {
            const N: usize = vector_len(<$T>::DTYPE, DType::F16);
            let chunk = reduce::chunk_of_block(spans, span_count, chunk_len);
            let totals = reduce::accumulate::<$T, 2, N, 3, 4, THREADS>([a, b], chunk, |totals, [x, y]| {
                let (x, y) = (x.to_f64(), y.to_f64());
                *totals = add_dots(*totals, x, y);
            });
            reduce::block_sum::<3, THREADS>(totals, |product, sum| partials.add(partial_slot(product, chunks)).write(sum))
        });
        gram_width!($name $T 2 4 "_p2" LaunchBounds::REDUCE);
        gram_width!($name $T 4 2 "_p4" LaunchBounds::GRAM_OF_FOUR);
        gram_of_eight!($name $T);
        kernel!(concat!("gram_cross_", $name), LaunchBounds::GRAM_CROSS, fn (
            partials: *mut f64, table: *const *const $T, left: u64, left_count: u64, right: u64, right_count: u64,
            world_size: u64, spans: *const Span, span_count: u64, chunks: u64, chunk_len: u64,
        ) {
            const W: usize = GRAM_CROSS_WIDTH;
            const N: usize = gram_vector_len(<$T>::DTYPE, 2 * W);
            let chunk = reduce::chunk_of_block(spans, span_count, chunk_len);
            let rows: [*const $T; W] = pick(table, left, left_count);
            let columns: [*const $T; W] = pick(table, right, right_count);
            let vectors: [*const $T; 2 * W] =
                core::array::from_fn(|index| if index < W { rows[index] } else { columns[index - W] });
            let add = |totals: &mut [f64; W * W], values: [$T; 2 * W]| {
                let values = values.map(Element::to_f64);
                let mut product = 0;
                while product < W * W {
                    let (row, column) = (product / W, W + product % W);
                    totals[product] = elementwise::add_product(totals[product], values[row], values[column]);
                    product += 1;
                }
            };
            let totals = reduce::accumulate::<$T, { 2 * W }, N, { W * W }, 1, THREADS>(vectors, chunk, add);
            reduce::block_sum::<{ W * W }, THREADS>(totals, |product, sum| {
                let (row, column) = ((product / W) as u64, (product % W) as u64);
                if row < left_count && column < right_count {
                    let (i, j) = ((left + row) as usize, (right + column) as usize);
                    let index = product_index(i, j, world_size as usize);
                    partials.add(partial_slot(index, chunks)).write(sum);
                }
            })
        });
    };
}
for_each_dtype!(of_dtype);

/// `x·y`, `|x|²`, `|y|²`.
#[inline(always)]
pub(super) fn add_dots(totals: [f64; 3], x: f64, y: f64) -> [f64; 3] {
    [
        elementwise::add_product(totals[0], x, y),
        elementwise::add_product(totals[1], x, x),
        elementwise::add_product(totals[2], y, y),
    ]
}

// One block for each segment and product: threads take turns over the segment's partials, then add as a block does.
kernel!("sum_partials", LaunchBounds::SUM, fn (
    totals: *mut f64, partials: *const f64, spans: *const Span, span_count: u64, products: u64, chunks: u64,
) {
    let block = thread::block_idx_x() as u64;
    if products == 0 {
        return;
    }
    let (span, product) = (block / products, block % products);
    let begin = (*spans.add(span as usize)).first_block;
    let end = if span + 1 < span_count { (*spans.add(span as usize + 1)).first_block } else { chunks };
    let row = partials.add((product * chunks) as usize);
    let mut sum = 0.0;
    let mut chunk = begin + thread::thread_idx_x() as u64;
    while chunk < end {
        // Many at once: one after the other, of a large segment, they would take as long as the products of a small one. What lies behind
        // the end is read elsewhere and not added, because a branch would make the loads wait for each other.
        let loaded: [f64; 16] = core::array::from_fn(|step| {
            let place = chunk + step as u64 * SUM_THREADS as u64;
            let inside = place < end;
            let [partial] = memory::load(row.add(if inside { place } else { chunk } as usize));
            if inside { partial } else { 0.0 }
        });
        for partial in loaded {
            sum += partial;
        }
        chunk += 16 * SUM_THREADS as u64;
    }
    reduce::block_sum::<1, SUM_THREADS>([sum], |_, sum| totals.add(block as usize).write(sum));
});
