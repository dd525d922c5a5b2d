//! Element by element: [`zero`], [`cast`], [`accumulate`], [`scale`], [`all_finite`].
//!
//! Every pair of dtypes. The working precision is `f32`, or `f64` as soon as one of the two is `f64`; results are rounded
//! once, to nearest with ties to even. NaN and infinities propagate as IEEE 754 says, subnormals are kept.

use gradsync_device::math::{Element as Formula, elementwise};
use rayon::prelude::*;

use super::isa::vectorized;
use super::{CHUNK_LEN, f16c};
use crate::dtype::{DType, storage, storage_mut};
use crate::error::Result;
use crate::kernels::same_len;
use crate::slice::{Slice, SliceMut, with_typed};

/// Runs `work` on the chunks of both operands.
fn zip_chunks<D: Formula, S: Formula>(dst: &mut [D], src: &[S], work: impl Fn(&mut [D], &[S]) + Sync) {
    if dst.len() <= CHUNK_LEN {
        work(dst, src);
    } else {
        dst.par_chunks_mut(CHUNK_LEN).zip(src.par_chunks(CHUNK_LEN)).for_each(|(dst, src)| work(dst, src));
    }
}

/// Sets every element to zero.
pub fn zero(dst: SliceMut<'_>) {
    let bytes = dst.as_bytes_mut();
    bytes.par_chunks_mut(part_bytes(bytes.len())).for_each(|part| part.fill(0));
}

/// Copies bytes with every thread.
fn copy(dst: &mut [u8], src: &[u8]) {
    let part = part_bytes(dst.len());
    dst.par_chunks_mut(part).zip(src.par_chunks(part)).for_each(|(dst, src)| dst.copy_from_slice(src));
}

/// Bytes of one thread's part in moves that the C library does: one large part each, because it goes around the caches only
/// where a single call is larger than they are.
fn part_bytes(bytes: usize) -> usize {
    bytes.div_ceil(rayon::current_num_threads()).next_multiple_of(4096).max(CHUNK_LEN)
}

/// Casts one chunk, through hardware conversions where they pay.
fn cast_chunk<S: Formula, D: Formula>(dst: &mut [D], src: &[S]) {
    if let Some(src) = f16c::view(src) {
        f16c::widened(dst, src, cast_chunk::<f32, D>);
    } else if S::DTYPE == DType::F64 {
        cast_loop(dst, src);
    } else if let Some(dst) = f16c::view_mut(dst) {
        f16c::narrowed(dst, src, cast_loop::<S, f32>);
    } else {
        cast_loop(dst, src);
    }
}

/// Accumulates one chunk, through hardware conversions where they pay.
fn accumulate_chunk<T: Formula, G: Formula>(sum: &mut [T], value: &[G]) {
    if let Some(value) = f16c::view(value) {
        f16c::widened(sum, value, accumulate_chunk::<T, f32>);
    } else if G::DTYPE == DType::F64 {
        accumulate_loop(sum, value);
    } else if let Some(sum) = f16c::view_mut(sum) {
        f16c::updated(sum, value, accumulate_loop::<f32, G>);
    } else {
        accumulate_loop(sum, value);
    }
}

/// Scales one chunk, through hardware conversions where they pay.
fn scale_chunk<S: Formula, D: Formula>(dst: &mut [D], src: &[S], factor: f64) {
    if let Some(src) = f16c::view(src) {
        f16c::widened(dst, src, |dst, src| scale_chunk::<f32, D>(dst, src, factor));
    } else if S::DTYPE == DType::F64 {
        scale_loop(dst, src, factor);
    } else if let Some(dst) = f16c::view_mut(dst) {
        f16c::narrowed(dst, src, |dst, src| scale_loop::<S, f32>(dst, src, factor));
    } else {
        scale_loop(dst, src, factor);
    }
}

vectorized! {
    fn cast_loop<S: Formula, D: Formula>(dst: &mut [D], src: &[S]) {
        for (to, &from) in dst.iter_mut().zip(src) {
            *to = elementwise::cast(from);
        }
    }

    fn accumulate_loop<T: Formula, G: Formula>(sum: &mut [T], value: &[G]) {
        for (to, &from) in sum.iter_mut().zip(value) {
            *to = elementwise::accumulate(*to, from);
        }
    }

    fn scale_loop<S: Formula, D: Formula>(dst: &mut [D], src: &[S], factor: f64) {
        for (to, &from) in dst.iter_mut().zip(src) {
            *to = elementwise::scale(from, factor);
        }
    }

    fn all_finite_chunk<T: Formula>(src: &[T]) -> bool {
        // No early exit inside a block: a loop without one is vectorised.
        src.chunks(4096).all(|block| block.iter().fold(true, |finite, &value| finite & elementwise::is_finite(value)))
    }
}

/// `dst[i] = D(src[i])`: exact where `D` holds the value, otherwise rounded once.
///
/// # Errors
/// [`Error::LengthMismatch`](crate::Error::LengthMismatch) naming both lengths; nothing is written.
pub fn cast(dst: SliceMut<'_>, src: Slice<'_>) -> Result<()> {
    same_len("cast", ("destination", dst.len()), ("source", src.len()))?;
    if dst.dtype() == src.dtype() {
        copy(dst.as_bytes_mut(), src.as_bytes());
        return Ok(());
    }
    with_typed!(SliceMut, dst, dst => with_typed!(Slice, src, src => {
        zip_chunks(storage_mut(dst), storage(src), cast_chunk);
    }));
    Ok(())
}

/// `sum[i] = T(sum[i] + value[i])`: both widened to the working precision, added, rounded once.
///
/// # Errors
/// [`Error::LengthMismatch`](crate::Error::LengthMismatch) naming both lengths; nothing is written.
pub fn accumulate(sum: SliceMut<'_>, value: Slice<'_>) -> Result<()> {
    same_len("accumulate", ("sum", sum.len()), ("value", value.len()))?;
    with_typed!(SliceMut, sum, sum => with_typed!(Slice, value, value => {
        zip_chunks(storage_mut(sum), storage(value), accumulate_chunk);
    }));
    Ok(())
}

/// `dst[i] = D(src[i] × factor)`: both in the working precision, multiplied, rounded once. A factor is rounded to `f32` first
/// where that is the working precision.
///
/// # Errors
/// [`Error::LengthMismatch`](crate::Error::LengthMismatch) naming both lengths; nothing is written.
pub fn scale(dst: SliceMut<'_>, src: Slice<'_>, factor: f64) -> Result<()> {
    same_len("scale", ("destination", dst.len()), ("source", src.len()))?;
    with_typed!(SliceMut, dst, dst => with_typed!(Slice, src, src => {
        zip_chunks(storage_mut(dst), storage(src), |dst, src| scale_chunk(dst, src, factor));
    }));
    Ok(())
}

/// Whether no element is NaN or infinite.
pub fn all_finite(src: Slice<'_>) -> bool {
    with_typed!(Slice, src, src => {
        let src = storage(src);
        if src.len() <= CHUNK_LEN { all_finite_chunk(src) } else { src.par_chunks(CHUNK_LEN).all(all_finite_chunk) }
    })
}
