//! Inner products per segment: `squared_norms`, `dots`, `gram` tiles; `fold_sums` adds the rows of segments in several shards.
//!
//! Products and sums are `f64`. Each input is read once per launch; `gram` over more than eight vectors is launched tile by tile, and
//! `gram_cross` multiplies the vectors of two different tiles.

use super::{for_each_dtype, kernel};
use crate::abi::{ChunkedSpan, DType, GRAM_CROSS_WIDTH, LaunchBounds, THREADS, vector_len};
use crate::half::*;
use crate::math::adasum::{product_index, products};
use crate::math::product_part::triangle;
use crate::math::{Element, elementwise};
use crate::reduce::{self, Reduction};
#[cfg(feature = "sm_80")]
use crate::shared::Staging;
use crate::{memory, thread};

/// Vectors `first..first + W` of the table; those beyond `count` repeat the first, which costs no memory traffic.
#[inline(always)]
unsafe fn pick<T, const W: usize>(table: *const *const T, first: u64, count: u64) -> [*const T; W] {
    // SAFETY: the launch provides `count ≥ 1` pointers from `first` on.
    core::array::from_fn(|index| unsafe { *table.add(first as usize + if (index as u64) < count { index } else { 0 }) })
}

/// The vectors that a launch of `gram` multiplies with each other: `first..first + count` of `world_size`.
#[derive(Clone, Copy)]
struct Tile {
    first: u64,
    count: u64,
    world_size: u64,
}

impl Tile {
    /// The index of the product that is sum `sum` of the `K` sums of `W` vectors, if there are as many vectors.
    #[inline(always)]
    fn product<const W: usize, const K: usize>(self, sum: usize) -> Option<usize> {
        let (row, column) = const { triangle::<W, K>() }[sum];
        let first = self.first as usize;
        let product = product_index(first + row, first + column, self.world_size as usize);
        ((column as u64) < self.count).then_some(product)
    }
}

/// The number of elements a thread loads at once from each of `width` vectors: 16 bytes, or 8 where eight vectors fill the registers.
pub(super) const fn gram_vector_len(dtype: DType, width: usize) -> usize {
    let len = vector_len(dtype, DType::F16);
    if width == 8 && len > 4 { 4 } else { len }
}

/// Adds all products of the `W` values with each other.
#[inline(always)]
pub(super) fn add_triangle<T: Element, const W: usize, const K: usize>(totals: &mut [f64; K], values: [T; W]) {
    add_products(totals, values, const { triangle::<W, K>() });
}

/// Adds the products of the values at these places.
#[inline(always)]
pub(super) fn add_products<T: Element, const W: usize, const K: usize>(
    totals: &mut [f64; K],
    values: [T; W],
    places: [(usize, usize); K],
) {
    let values: [f64; W] = values.map(Element::to_f64);
    let mut product = 0;
    while product < K {
        let (i, j) = places[product];
        totals[product] = elementwise::add_product(totals[product], values[i], values[j]);
        product += 1;
    }
}

/// The products of `W` vectors with each other over a chunk.
#[inline(always)]
unsafe fn multiply<T: Element, const W: usize, const N: usize, const K: usize, const STEPS: usize>(
    vectors: [*const T; W],
    chunk: reduce::ElementRange,
) -> [f64; K] {
    // SAFETY: the launch provides the vectors.
    unsafe { reduce::accumulate::<T, W, N, K, STEPS, 1>(vectors, chunk, add_triangle::<T, W, K>) }
}

/// Like [`multiply`], for eight vectors, whose sums leave no registers for loads in flight: if the GPU supports it, loads pass through
/// shared memory. A thread only reads what it has loaded itself, so that it need not wait for other threads.
///
/// The tensor cores' `mma.m8n8k4`, with two sums per lane, would need neither; on an H200 it reaches 0.97 of a read-only sweep in f32 where
/// this reaches 0.98, and in bf16 0.77 where this reaches 0.96.
#[inline(always)]
unsafe fn multiply_eight<T: Element, const N: usize, const K: usize>(
    vectors: [*const T; 8],
    chunk: reduce::ElementRange,
) -> [f64; K] {
    let stride = THREADS * N as u32;
    // Offsets count from the chunk's first element, in 32 bits, which saves registers.
    let (mut totals, len) = ([0.0; K], (chunk.end - chunk.begin) as u32);
    // SAFETY: the launch provides the vectors over the chunk.
    unsafe {
        let vectors = vectors.map(|vector| vector.add(chunk.begin as usize));
        let at = |vector: usize, place: u32| vectors[vector].add(place as usize);
        let mut done = 0;
        if vectors.iter().all(|&vector| memory::is_aligned::<T, N>(vector)) {
            let steps = len / stride;
            let own = |step: u32| step * stride + thread::thread_idx_x() * N as u32;
            #[cfg(feature = "sm_80")]
            let staging = Staging::of_thread();
            #[cfg(feature = "sm_80")]
            let fetch = |step: u32| {
                let mut vector = 0;
                while vector < 8 && step < steps {
                    staging.fetch::<T, N>(step, vector, at(vector, own(step)));
                    vector += 1;
                }
                staging.commit();
            };
            #[cfg(feature = "sm_80")]
            fetch(0);
            for step in 0..steps {
                #[cfg(feature = "sm_80")]
                let loaded: [[T; N]; 8] = {
                    fetch(step + 1);
                    staging.wait_for_all_but_last();
                    core::array::from_fn(|vector| staging.read(step, vector))
                };
                #[cfg(not(feature = "sm_80"))]
                let loaded: [[T; N]; 8] = core::array::from_fn(|vector| memory::load(at(vector, own(step))));
                let mut lane = 0;
                while lane < N {
                    add_triangle::<T, 8, K>(&mut totals, core::array::from_fn(|vector| loaded[vector][lane]));
                    lane += 1;
                }
            }
            done = steps * stride;
        }
        // Also for unaligned vectors: as in `reduce::walk`, the thread of an element is the same. Written out, to use fewer registers.
        let mut place = done + thread::thread_idx_x() * N as u32;
        while place < len {
            let end = if len - place < N as u32 { len } else { place + N as u32 };
            while place < end {
                add_triangle::<T, 8, K>(&mut totals, core::array::from_fn(|vector| at(vector, place).read()));
                place += 1;
            }
            place += stride - N as u32;
        }
    }
    totals
}

macro_rules! gram {
    ($name:literal $T:ident $width:literal $suffix:literal, $bounds:expr, $multiply:expr) => {
        kernel!(["gram_" $name $suffix], $bounds, fn (
            partials: *mut f64, totals: *mut f64, table: *const *const $T, first: u64, count: u64, world_size: u64,
            spans: *const ChunkedSpan, span_count: u64, layers: u64, blocks: u64, chunks: u64,
        ) {
            const K: usize = products($width);
            let reduction = Reduction { partials, totals, spans, span_count, layers, blocks, chunks };
            let tile = Tile { first, count, world_size };
            let product = |sum| tile.product::<$width, K>(sum);
            reduction.run(products(world_size as usize), product, |_| true, |chunk| {
                $multiply(pick::<$T, $width>(table, first, count), chunk)
            })
        });
    };
}

macro_rules! of_dtype {
    ($name:literal $T:ident) => {
        kernel!(["squared_norms_" $name], LaunchBounds::REDUCE, fn (
            partials: *mut f64, totals: *mut f64, source: *const $T,
            spans: *const ChunkedSpan, span_count: u64, layers: u64, blocks: u64, chunks: u64,
        ) {
            const N: usize = vector_len(<$T>::DTYPE, DType::F16);
            let reduction = Reduction { partials, totals, spans, span_count, layers, blocks, chunks };
            reduction.run(1, Some, |_| true, |chunk| multiply::<$T, 1, N, 1, 8>([source], chunk))
        });
        kernel!(["dots_" $name], LaunchBounds::REDUCE, fn (
            partials: *mut f64, totals: *mut f64, a: *const $T, b: *const $T,
            spans: *const ChunkedSpan, span_count: u64, layers: u64, blocks: u64, chunks: u64,
        ) {
            const N: usize = vector_len(<$T>::DTYPE, DType::F16);
            let reduction = Reduction { partials, totals, spans, span_count, layers, blocks, chunks };
            reduction.run(3, Some, |_| true, |chunk| {
                reduce::accumulate::<$T, 2, N, 3, 4, 1>([a, b], chunk, |sums, [x, y]| {
                    *sums = add_dots(*sums, x.to_f64(), y.to_f64());
                })
            })
        });
        gram!($name $T 2 "_p2", LaunchBounds::REDUCE, multiply::<$T, 2, { gram_vector_len(<$T>::DTYPE, 2) }, { products(2) }, 4>);
        gram!($name $T 4 "_p4", LaunchBounds::GRAM_OF_FOUR, multiply::<$T, 4, { gram_vector_len(<$T>::DTYPE, 4) }, { products(4) }, 2>);
        gram!($name $T 8 "_p8", LaunchBounds::GRAM_OF_EIGHT, multiply_eight::<$T, { vector_len(<$T>::DTYPE, DType::F16) }, { products(8) }>);
        kernel!(["gram_cross_" $name], LaunchBounds::GRAM_CROSS, fn (
            partials: *mut f64, totals: *mut f64, table: *const *const $T, left: u64, left_count: u64, right: u64,
            right_count: u64, world_size: u64, spans: *const ChunkedSpan, span_count: u64, layers: u64, blocks: u64, chunks: u64,
        ) {
            const W: usize = GRAM_CROSS_WIDTH;
            const N: usize = gram_vector_len(<$T>::DTYPE, 2 * W);
            let place = |sum: usize| (sum / W, sum % W);
            let product = |sum| {
                let (row, column) = place(sum);
                let product = product_index(left as usize + row, right as usize + column, world_size as usize);
                ((row as u64) < left_count && (column as u64) < right_count).then_some(product)
            };
            let reduction = Reduction { partials, totals, spans, span_count, layers, blocks, chunks };
            reduction.run(products(world_size as usize), product, |_| true, |chunk| {
                let rows: [*const $T; W] = pick(table, left, left_count);
                let columns: [*const $T; W] = pick(table, right, right_count);
                let vectors: [*const $T; 2 * W] =
                    core::array::from_fn(|index| if index < W { rows[index] } else { columns[index - W] });
                reduce::accumulate_short::<$T, { 2 * W }, N, { W * W }>(vectors, chunk, |sums, values| {
                    let values = values.map(Element::to_f64);
                    let mut sum = 0;
                    while sum < W * W {
                        let (row, column) = place(sum);
                        sums[sum] = elementwise::add_product(sums[sum], values[row], values[W + column]);
                        sum += 1;
                    }
                })
            })
        });
    };
}
for_each_dtype!(of_dtype);

kernel!(["fold_sums"], LaunchBounds::REDUCE, fn (
    totals: *mut f64, spans: *const ChunkedSpan, divided: *const u64, products: u64,
) {
    // Never less than 1, which the compiler does not know: a check of divisions would compile a panic into the kernel.
    let (block, width) = (thread::block_idx_x(), (products as u32).max(1));
    let layer = *divided.add((block / width) as usize);
    reduce::fold(totals, products as usize, *spans.add(layer as usize), layer, (block % width) as usize);
});

/// `x·y`, `|x|²`, `|y|²`.
#[inline(always)]
pub(super) fn add_dots(totals: [f64; 3], x: f64, y: f64) -> [f64; 3] {
    [
        elementwise::add_product(totals[0], x, y),
        elementwise::add_product(totals[1], x, x),
        elementwise::add_product(totals[2], y, y),
    ]
}
