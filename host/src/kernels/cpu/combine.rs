//! [`combine`]: the weighted sum of any number of vectors, per segment.

use std::ops::Range;

use gradsync_device::math::Element as Formula;

use super::elementwise::cast_chunk;
use super::products::{add_weighted_block, check_vectors};
use super::{BLOCK_LEN, CHUNK_LEN, for_each};
use crate::dtype::{Element, storage, storage_mut};
use crate::error::Result;
use crate::kernels::same_len;
use crate::plan::segments;
use crate::slice::{Slice, SliceMut, with_typed};

/// Rounds a block's sums, of which `dst` may take fewer than a whole block.
pub(super) fn narrow_block<T: Formula>(dst: &mut [T], block: &[f64; BLOCK_LEN]) {
    cast_chunk(dst, block, false);
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
