//! The order in which the squares of many tensors are added, on every target: so a norm, and each weight that it clips, has the same bits on
//! a CPU and on a GPU, whatever buckets, threads or blocks computed it.
//!
//! A tensor is divided into chunks of [`CHUNK_LEN`] elements. In a chunk, element `i` belongs to lane `i mod` [`lanes`]; each lane adds its
//! elements' squares, ascending. Lanes are added in groups of [`vector_len`] neighbours, ascending, which leaves one sum for each of 128
//! threads; [`tree_sum`] adds these. The sums of all chunks, numbered tensor after tensor, are added in the same way, with [`TOTAL_LANES`]
//! lanes of which thread `t` has every 128th from `t` on.

use super::Element;
use crate::abi::{DType, THREADS, VECTOR_BYTES, WARP};

/// The number of elements of a chunk; a tensor's last one may be shorter.
pub const CHUNK_LEN: usize = 1 << 15;
/// The number of threads whose sums [`tree_sum`] adds.
pub const SUM_THREADS: usize = THREADS as usize;
/// The number of lanes in which the sums of chunks are added.
pub const TOTAL_LANES: usize = 4 * SUM_THREADS;

/// The number of neighbouring elements of a chunk whose lanes belong to one thread.
pub const fn vector_len(dtype: DType) -> usize {
    VECTOR_BYTES / dtype.size_bytes()
}

/// The number of lanes of a chunk.
pub const fn lanes(dtype: DType) -> usize {
    SUM_THREADS * vector_len(dtype)
}

/// The number of chunks of a tensor.
pub const fn chunks(len: usize) -> usize {
    len.div_ceil(CHUNK_LEN)
}

/// `total + value²` in `f64`, rounded twice; the square of an `f32` or a narrower number is exact.
#[inline(always)]
pub fn add_square<T: Element>(total: f64, value: T) -> f64 {
    let value = value.to_f64();
    total + value * value
}

/// The sum of 128 threads' sums: a butterfly in each warp, then the warps in order.
pub fn tree_sum(mut sums: [f64; SUM_THREADS]) -> f64 {
    let mut total = 0.0;
    for warp in sums.chunks_exact_mut(WARP as usize) {
        let mut half = WARP as usize / 2;
        while half > 0 {
            for lane in 0..half {
                warp[lane] += warp[lane + half];
            }
            half /= 2;
        }
        total += warp[0];
    }
    total
}
