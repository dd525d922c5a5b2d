//! Inner products per segment: `squared_norms`, `dots`, `gram` tiles, and the second stage of them all, `sum_partials`.
//!
//! Products and sums are `f64`. Each input is read once a launch; `gram` over more than eight vectors is launched tile by
//! tile, where `gram_cross` multiplies the members of two different tiles.

use super::{for_each_dtype, kernel};
use crate::abi::{DType, GRAM_CROSS_WIDTH, SUM_THREADS, Span, THREADS, vector_len};
use crate::half::{BF16, F16};
use crate::math::adasum::{product_index, products};
use crate::math::{Element, elementwise};
#[cfg(gradsync_sm = "80")]
use crate::{abi::WARP, memory, shared::Partials, warp};
use crate::{reduce, thread};

/// Where `sum_partials` finds the partial of this block for one product.
#[inline(always)]
pub(super) fn partial_slot(product: usize, chunks: u64) -> usize {
    product * chunks as usize + thread::block_idx_x() as usize
}

/// Vectors `first..first + W` of the table; those past `count` repeat the first, which costs no memory traffic.
#[inline(always)]
unsafe fn pick<T, const W: usize>(table: *const *const T, first: u64, count: u64) -> [*const T; W] {
    // SAFETY: the launch provides `count ≥ 1` pointers from `first` on.
    core::array::from_fn(|index| unsafe { *table.add(first as usize + if (index as u64) < count { index } else { 0 }) })
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

/// A tile of the Gram matrix: vectors `first..first + count` of `world_size` with each other, `K` being the products of `W`.
#[inline(always)]
unsafe fn gram<T: Element, const W: usize, const N: usize, const K: usize>(
    partials: *mut f64,
    vectors: [*const T; W],
    first: u64,
    count: u64,
    world_size: u64,
    chunk: reduce::Chunk,
    chunks: u64,
) {
    // SAFETY: the launch provides the vectors, and room for every product of every chunk.
    unsafe {
        let totals = reduce::accumulate::<T, W, N, K>(vectors, chunk, add_triangle::<T, W, K>);
        reduce::block_sum::<K, THREADS>(totals, |product, sum| {
            let (row, column) = const { triangle::<W, K>() }[product];
            if (column as u64) < count {
                let index = product_index(first as usize + row, first as usize + column, world_size as usize);
                partials.add(partial_slot(index, chunks)).write(sum);
            }
        });
    }
}

/// As [`gram`] with eight vectors, on the matrix units: a lane holds elements of one vector, so that each is widened once, and two
/// products, where a thread of `gram` holds all 36. The order of additions is another, as fixed.
#[cfg(gradsync_sm = "80")]
#[inline(always)]
unsafe fn gram_of_eight<T: Element, const N: usize>(
    partials: *mut f64,
    table: *const *const T,
    (first, count, world_size): (u64, u64, u64),
    chunk: reduce::Chunk,
    chunks: u64,
) {
    /// Loads that a lane has under way; a warp's lie side by side.
    const STEPS: usize = 4;
    const LANES: usize = 4;
    let (lane, warp_index) = (warp::lane_id() as usize, thread::thread_idx_x() / WARP);
    let (row, column) = (lane / LANES, lane % LANES);
    let tile = (STEPS * LANES * N) as u64;
    // SAFETY: the launch provides the vectors over the chunk, and room for every product of every chunk. All lanes of a warp take part
    // in every round: where it begins does not depend on the lane.
    unsafe {
        let of_row = |row: usize| *table.add(first as usize + if (row as u64) < count { row } else { 0 });
        let vector = of_row(row);
        let mut aligned = true;
        let mut other = 0;
        while other < 8 {
            aligned &= memory::is_aligned::<T, N>(of_row(other).add(chunk.begin as usize));
            other += 1;
        }
        let mut totals = [0.0; 2];
        let mut begin = chunk.begin + warp_index as u64 * tile;
        while begin < chunk.end {
            let place = |step: usize| begin as usize + (step * LANES + column) * N;
            let loaded: [[T; N]; STEPS] = if begin + tile <= chunk.end && aligned {
                core::array::from_fn(|step| memory::load(vector.add(place(step))))
            } else {
                core::array::from_fn(|step| {
                    core::array::from_fn(|index| {
                        let index = place(step) + index;
                        if (index as u64) < chunk.end { vector.add(index).read() } else { T::from_f32(0.0) }
                    })
                })
            };
            let mut step = 0;
            while step < STEPS {
                let mut index = 0;
                while index < N {
                    totals = warp::add_gram(loaded[step][index].to_f64(), totals);
                    index += 1;
                }
                step += 1;
            }
            begin += reduce::warps(THREADS) as u64 * tile;
        }
        let shared = Partials::of_block();
        let mut place = 0;
        while place < 2 {
            let other = 2 * column + place;
            if row <= other {
                shared
                    .write(product_index(row, other, 8) * reduce::warps(THREADS) + warp_index as usize, totals[place]);
            }
            place += 1;
        }
        reduce::sum_of_warps::<{ products(8) }, THREADS>(|product, sum| {
            let (row, column) = const { triangle::<8, { products(8) }>() }[product];
            if (column as u64) < count {
                let index = product_index(first as usize + row, first as usize + column, world_size as usize);
                partials.add(partial_slot(index, chunks)).write(sum);
            }
        });
    }
}

macro_rules! gram_width {
    ($name:literal $T:ident $width:literal $suffix:literal) => {
        kernel!(concat!("gram_", $name, $suffix), fn (
            partials: *mut f64, table: *const *const $T, first: u64, count: u64, world_size: u64,
            spans: *const Span, span_count: u64, chunks: u64, chunk_len: u64,
        ) {
            const N: usize = gram_vector_len(<$T>::DTYPE, $width);
            let chunk = reduce::chunk_of_block(spans, span_count, chunk_len);
            let vectors = pick(table, first, count);
            gram::<$T, $width, N, { products($width) }>(
                partials, vectors, first, count, world_size, chunk, chunks)
        });
    };
}

#[cfg(gradsync_sm = "80")]
macro_rules! gram_of_eight {
    ($name:literal $T:ident) => {
        kernel!(concat!("gram_", $name, "_p8"), fn (
            partials: *mut f64, table: *const *const $T, first: u64, count: u64, world_size: u64,
            spans: *const Span, span_count: u64, chunks: u64, chunk_len: u64,
        ) {
            const N: usize = vector_len(<$T>::DTYPE, DType::F16);
            let chunk = reduce::chunk_of_block(spans, span_count, chunk_len);
            gram_of_eight::<$T, N>(partials, table, (first, count, world_size), chunk, chunks)
        });
    };
}
#[cfg(not(gradsync_sm = "80"))]
macro_rules! gram_of_eight {
    ($name:literal $T:ident) => {
        gram_width!($name $T 8 "_p8");
    };
}

macro_rules! of_dtype {
    ($name:literal $T:ident) => {
        kernel!(concat!("squared_norms_", $name), fn (
            partials: *mut f64, source: *const $T, spans: *const Span, span_count: u64, chunks: u64, chunk_len: u64,
        ) {
            const N: usize = vector_len(<$T>::DTYPE, DType::F16);
            let chunk = reduce::chunk_of_block(spans, span_count, chunk_len);
            gram::<$T, 1, N, 1>(partials, [source], 0, 1, 1, chunk, chunks)
        });
        kernel!(concat!("dots_", $name), fn (
            partials: *mut f64, a: *const $T, b: *const $T,
            spans: *const Span, span_count: u64, chunks: u64, chunk_len: u64,
        ) {
            const N: usize = vector_len(<$T>::DTYPE, DType::F16);
            let chunk = reduce::chunk_of_block(spans, span_count, chunk_len);
            let totals = reduce::accumulate::<$T, 2, N, 3>([a, b], chunk, |totals, [x, y]| {
                let (x, y) = (x.to_f64(), y.to_f64());
                *totals = add_dots(*totals, x, y);
            });
            reduce::block_sum::<3, THREADS>(totals, |product, sum| partials.add(partial_slot(product, chunks)).write(sum))
        });
        gram_width!($name $T 2 "_p2");
        gram_width!($name $T 4 "_p4");
        gram_of_eight!($name $T);
        kernel!(concat!("gram_cross_", $name), fn (
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
            let totals = reduce::accumulate::<$T, { 2 * W }, N, { W * W }>(vectors, chunk, add);
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
kernel!("sum_partials", fn (
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
        // Many at once: one after the other, of a large segment, they would take as long as the products of a small one.
        let loaded: [f64; 16] = core::array::from_fn(|step| {
            let chunk = chunk + step as u64 * SUM_THREADS as u64;
            if chunk < end { *row.add(chunk as usize) } else { 0.0 }
        });
        for partial in loaded {
            sum += partial;
        }
        chunk += 16 * SUM_THREADS as u64;
    }
    reduce::block_sum::<1, SUM_THREADS>([sum], |_, sum| totals.add(block as usize).write(sum));
});
