//! [`combine`]: the weighted sum of any number of vectors, per segment.

use std::ops::Range;

use gradsync_device::math::Element as Formula;
use gradsync_device::math::rounding::f64_to_f32_odd;

use super::isa::vectorized;
use super::products::{add_weighted_block, check_vectors};
use super::{BLOCK_LEN, CHUNK_LEN, f16c, for_each};
use crate::dtype::{Element, storage, storage_mut};
use crate::error::Result;
use crate::kernels::same_len;
use crate::plan::segments;
use crate::slice::{Slice, SliceMut, with_typed};

/// Rounds a block's sums, of which `dst` may take fewer than a whole block.
pub(super) fn narrow_block<T: Formula>(dst: &mut [T], block: &[f64; BLOCK_LEN]) {
    let block = &block[..dst.len()];
    match f16c::view_mut(dst) {
        Some(dst) => f16c::narrowed(dst, block, round_odd_loop),
        None => narrow_loop(dst, block),
    }
}

vectorized! {
    fn narrow_loop<T: Formula>(dst: &mut [T], src: &[f64]) {
        for (to, &from) in dst.iter_mut().zip(src) {
            *to = T::from_f64(from);
        }
    }

    // Rounded to odd, so that the second rounding, to f16, gives what a single one would.
    fn round_odd_loop<>(dst: &mut [f32], src: &[f64]) {
        for (to, &from) in dst.iter_mut().zip(src) {
            *to = f64_to_f32_odd(from);
        }
    }
}

/// `dst[i] = D(Σ w[s][p] × x[p][i])` for every element `i` of every segment `s`: added in `f64` in the order of the vectors,
/// rounded once. `weights` are `segments × P`; elements outside the segments are left alone. Dtypes may all differ.
///
/// # Errors
/// [`Error::LengthMismatch`](crate::Error::LengthMismatch) for vectors, destination or weights of other lengths;
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for no vectors or bad segments. Nothing is written then.
pub fn combine(dst: SliceMut<'_>, vectors: &[Slice<'_>], weights: &[f64], segments: &[Range<usize>]) -> Result<()> {
    check_vectors("combine", vectors, segments)?;
    same_len("combine", ("destination", dst.len()), ("each vector", vectors[0].len()))?;
    same_len("combine", ("weights", weights.len()), ("segments × vectors", segments.len() * vectors.len()))?;
    with_typed!(SliceMut, dst, dst => {
        for_each(parts(dst, segments), |(segment, range, part)| {
            combine_chunk(storage_mut(part), vectors, &weights[segment * vectors.len()..][..vectors.len()], range);
        });
    });
    Ok(())
}

/// The chunks of the segments, each with its piece of the destination.
pub(super) fn parts<'a, T: Element>(
    dst: &'a mut [T],
    segments: &[Range<usize>],
) -> Vec<(usize, Range<usize>, &'a mut [T])> {
    let (mut rest, mut at) = (dst, 0);
    let mut parts = Vec::new();
    for (segment, range) in segments::chunks(segments, CHUNK_LEN) {
        let (part, tail) = std::mem::take(&mut rest)[range.start - at..].split_at_mut(range.len());
        (rest, at) = (tail, range.end);
        parts.push((segment, range, part));
    }
    parts
}

fn combine_chunk<D: Formula>(dst: &mut [D], vectors: &[Slice<'_>], weights: &[f64], range: Range<usize>) {
    for (block, dst) in dst.chunks_mut(BLOCK_LEN).enumerate() {
        let begin = range.start + block * BLOCK_LEN;
        let mut sum = [-0.0; BLOCK_LEN]; // the zero that keeps the sign of a zero added to it
        for (vector, &weight) in vectors.iter().zip(weights) {
            with_typed!(Slice, vector.range(begin..begin + dst.len()), data => {
                add_weighted_block(&mut sum, storage(data), weight);
            });
        }
        narrow_block(dst, &sum);
    }
}
