//! Streaming kernels: `cast`, `accumulate`, `scale` and `zero`, contiguous or over a table of spans, and `all_finite`. No operation of the
//! library uses the baselines of measurements: `empty`, which does nothing, and `sweep`, which reads memory with as little work as possible.
//!
//! One block handles one tile: every thread has one or two vectors of each operand in flight, then computes, then writes. The compiler
//! removes reads of a destination whose old value a formula ignores.

use super::{for_each_dtype, for_each_pair, kernel};
use crate::abi::{
    COPY_TILES, CopySpan, DType, LaunchBounds, SWEEP_TILE_BYTES, SWEEP_UNROLL, THREADS, VECTOR_BYTES, WARP,
    ZERO_TILE_BYTES, ZERO_UNROLL, finite_tile_len, stream_unroll, vector_len,
};
use crate::half::*;
use crate::math::{Element, elementwise};
use crate::{lanes, memory, reduce, thread, warp};

/// Replaces `destination[i]` by `formula(destination[i], source[i])` over tile number `tile` of `len` elements.
#[inline(always)]
unsafe fn update<D: Element, S: Element, const N: usize, const U: usize>(
    destination: *mut D,
    source: *const S,
    len: u64,
    tile: u64,
    formula: impl Fn(D, S) -> D,
) {
    let stride = THREADS as usize * N;
    let begin = tile as usize * (stride * U);
    let first = begin + thread::thread_idx_x() as usize * N;
    // SAFETY: the launch provides `len` elements on both sides; indices are checked against it.
    unsafe {
        let whole = (begin + stride * U) as u64 <= len
            && memory::is_aligned::<D, N>(destination)
            && memory::is_aligned::<S, N>(source);
        if whole {
            let old: [[D; N]; U] = core::array::from_fn(|step| memory::load(destination.add(first + step * stride)));
            let new: [[S; N]; U] = core::array::from_fn(|step| memory::load(source.add(first + step * stride)));
            let mut step = 0;
            while step < U {
                let values: [D; N] = core::array::from_fn(|lane| formula(old[step][lane], new[step][lane]));
                memory::store(destination.add(first + step * stride), values);
                step += 1;
            }
        } else {
            let end = (begin + stride * U).min(len as usize);
            let mut index = begin + thread::thread_idx_x() as usize;
            while index < end {
                let element = destination.add(index);
                element.write(formula(element.read(), source.add(index).read()));
                index += THREADS as usize;
            }
        }
    }
}

/// Applies [`update`] to this block's tensor and tiles in a table of spans.
#[inline(always)]
unsafe fn update_span<D: Element, S: Element, const N: usize, const U: usize>(
    spans: *const CopySpan,
    count: u64,
    formula: impl Fn(D, S) -> D,
) {
    let block = thread::block_idx_x() as u64;
    // SAFETY: the launch provides `count` rows, laid out for this grid.
    unsafe {
        let row = reduce::row_of_block(count, block, |row| (*spans.add(row as usize)).first_block);
        let span = *spans.add(row as usize);
        let (first, stride) = ((block - span.first_block) * COPY_TILES as u64, (THREADS as usize * N * U) as u64);
        // The number of tiles until the end of the tensor; unknown at compile time, so the compiler does not unroll the loop over tiles.
        let left = span.len.div_ceil(stride) - first;
        let tiles = if left < COPY_TILES as u64 { left } else { COPY_TILES as u64 };
        let mut tile = first;
        while tile < first + tiles {
            update::<D, S, N, U>(span.destination as *mut D, span.source as *const S, span.len, tile, &formula);
            tile += 1;
        }
    }
}

macro_rules! from_to {
    ($from:literal $S:ident $to:literal $D:ident) => {
        kernel!(["cast_" $from "_" $to], LaunchBounds::STREAM, fn (destination: *mut $D, source: *const $S, len: u64) {
            const N: usize = vector_len(<$D>::DTYPE, <$S>::DTYPE);
            const U: usize = stream_unroll(<$D>::DTYPE, <$S>::DTYPE);
            let formula = |_: $D, value: $S| elementwise::cast::<$S, $D>(value);
            update::<$D, $S, N, U>(destination, source, len, thread::block_idx_x() as u64, formula)
        });
        kernel!(["scale_" $from "_" $to], LaunchBounds::STREAM,
            fn (destination: *mut $D, source: *const $S, len: u64, factor: f64) {
            const N: usize = vector_len(<$D>::DTYPE, <$S>::DTYPE);
            const U: usize = stream_unroll(<$D>::DTYPE, <$S>::DTYPE);
            let formula = |_: $D, value: $S| elementwise::scale::<$S, $D>(value, factor);
            update::<$D, $S, N, U>(destination, source, len, thread::block_idx_x() as u64, formula)
        });
        kernel!(["cast_segments_" $from "_" $to], LaunchBounds::STREAM, fn (spans: *const CopySpan, count: u64) {
            const N: usize = vector_len(<$D>::DTYPE, <$S>::DTYPE);
            const U: usize = stream_unroll(<$D>::DTYPE, <$S>::DTYPE);
            let formula = |_: $D, value: $S| elementwise::cast::<$S, $D>(value);
            update_span::<$D, $S, N, U>(spans, count, formula)
        });
    };
}
for_each_pair!(from_to);

macro_rules! sum_value {
    ($sum:literal $T:ident $value:literal $G:ident) => {
        kernel!(["accumulate_" $sum "_" $value], LaunchBounds::STREAM,
            fn (sum: *mut $T, value: *const $G, len: u64) {
            const N: usize = vector_len(<$T>::DTYPE, <$G>::DTYPE);
            const U: usize = stream_unroll(<$T>::DTYPE, <$G>::DTYPE);
            update::<$T, $G, N, U>(sum, value, len, thread::block_idx_x() as u64, elementwise::accumulate::<$T, $G>)
        });
        kernel!(["accumulate_segments_" $sum "_" $value], LaunchBounds::STREAM, fn (spans: *const CopySpan, count: u64) {
            const N: usize = vector_len(<$T>::DTYPE, <$G>::DTYPE);
            const U: usize = stream_unroll(<$T>::DTYPE, <$G>::DTYPE);
            update_span::<$T, $G, N, U>(spans, count, elementwise::accumulate::<$T, $G>)
        });
    };
}
for_each_pair!(sum_value);

/// Clears `flag` if an element of this block's tile is not finite. Every writer writes the same value.
#[inline(always)]
unsafe fn check_finite<T: Element, const N: usize>(flag: *mut u32, source: *const T, len: u64) {
    let tile = finite_tile_len(T::DTYPE) as u64;
    let begin = thread::block_idx_x() as u64 * tile;
    let range = reduce::ElementRange { span: 0, begin, end: if len - begin < tile { len } else { begin + tile } };
    // SAFETY: the range lies within the `len` elements of the launch.
    unsafe {
        let count = |bad: &mut [f64; 1], [value]: [T; 1]| {
            if !elementwise::is_finite(value) {
                bad[0] = 1.0;
            }
        };
        if reduce::accumulate::<T, 1, N, 1, 8, 1>([source], range, count)[0] != 0.0 {
            flag.write(0);
        }
    }
}

macro_rules! finite {
    ($name:literal $T:ident) => {
        kernel!(["all_finite_" $name], LaunchBounds::REDUCE, fn (flag: *mut u32, source: *const $T, len: u64) {
            const N: usize = vector_len(<$T>::DTYPE, DType::F16);
            check_finite::<$T, N>(flag, source, len)
        });
    };
}
for_each_dtype!(finite);

/// Clears tile number `tile` of `bytes` bytes: all bits zero is the number zero in each dtype.
///
/// Tiles are counted from the aligned address at or before `destination`, so that all vectors except those at the borders are whole.
#[inline(always)]
unsafe fn clear(destination: u64, bytes: u64, tile: u64) {
    let end = destination + bytes;
    let base = destination / VECTOR_BYTES as u64 * VECTOR_BYTES as u64 + tile * ZERO_TILE_BYTES as u64;
    for step in 0..ZERO_UNROLL {
        let slot = step as u64 * THREADS as u64 + thread::thread_idx_x() as u64;
        let address = base + slot * VECTOR_BYTES as u64;
        // SAFETY: the launch provides `bytes` bytes; whole vectors and single bytes are checked against them.
        unsafe {
            if address >= destination && address + VECTOR_BYTES as u64 <= end {
                memory::store::<u32, 4>(address as *mut u32, [0; 4]);
            } else {
                for byte in address..address + VECTOR_BYTES as u64 {
                    if byte >= destination && byte < end {
                        (byte as *mut u8).write(0);
                    }
                }
            }
        }
    }
}

kernel!(["zero"], LaunchBounds::STREAM, fn (destination: u64, bytes: u64) {
    clear(destination, bytes, thread::block_idx_x() as u64)
});

kernel!(["zero_segments"], LaunchBounds::STREAM, fn (spans: *const CopySpan, count: u64) {
    let block = thread::block_idx_x() as u64;
    let row = reduce::row_of_block(count, block, |row| (*spans.add(row as usize)).first_block);
    let span = *spans.add(row as usize);
    for tile in 0..COPY_TILES as u64 {
        clear(span.destination, span.len, (block - span.first_block) * COPY_TILES as u64 + tile);
    }
});

kernel!(["empty"], LaunchBounds::STREAM, fn () {});

// The exclusive or of the 32-bit words that each warp reads goes to `sums[block][warp]`.
kernel!(["sweep"], LaunchBounds::STREAM, fn (sums: *mut u32, source: *const u32, bytes: u64) {
    const WORDS: usize = VECTOR_BYTES / size_of::<u32>();
    let block = thread::block_idx_x() as u64;
    let (begin, thread) = (block * SWEEP_TILE_BYTES as u64, thread::thread_idx_x() as usize);
    let first = source.add(begin as usize / size_of::<u32>() + thread * WORDS);
    let mut sum = 0;
    if begin + SWEEP_TILE_BYTES as u64 <= bytes && memory::is_aligned::<u32, WORDS>(source) {
        let loaded: [[u32; WORDS]; SWEEP_UNROLL] =
            core::array::from_fn(|step| memory::load(first.add(step * THREADS as usize * WORDS)));
        for word in loaded.as_flattened() {
            sum ^= word;
        }
    } else {
        let words = if bytes - begin < SWEEP_TILE_BYTES as u64 { bytes - begin } else { SWEEP_TILE_BYTES as u64 } / 4;
        let mut word = thread as u64;
        while word < words {
            sum ^= source.add((begin / 4 + word) as usize).read();
            word += THREADS as u64;
        }
    }
    let sum = lanes::exclusive_or(sum);
    if warp::lane_id() == 0 {
        sums.add((block * (THREADS / WARP) as u64) as usize + thread / WARP as usize).write(sum);
    }
});
