//! Element by element: [`zero`], [`cast`], [`accumulate`], [`scale`], [`all_finite`].
//!
//! Every pair of dtypes. The working precision is `f32`, or `f64` as soon as one of the two is `f64`; results are rounded
//! once, to nearest with ties to even. NaN and infinities propagate as IEEE 754 says, subnormals are kept.

use gradsync_device::math::{Element as Formula, elementwise};
use rayon::prelude::*;

use super::isa::{return_on_avx2, return_on_avx512, vectorized};
use super::{CHUNK_LEN, has_one_thread};
use crate::error::{Result, same_len};
use crate::slice::{Slice, SliceMut, with_typed};
use crate::slice::{storage, storage_mut};

/// Runs `work` on the chunks of both operands.
fn zip_chunks<D: Formula, S: Formula>(dst: &mut [D], src: &[S], work: impl Fn(&mut [D], &[S]) + Sync) {
    if dst.len() <= CHUNK_LEN || has_one_thread() {
        work(dst, src);
    } else {
        let chunk = chunk_len(dst.len());
        dst.par_chunks_mut(chunk).zip(src.par_chunks(chunk)).for_each(|(dst, src)| work(dst, src));
    }
}

/// Elements of a chunk where results do not depend on it: so few that each of many threads gets one, if there is enough.
fn chunk_len(len: usize) -> usize {
    /// Below, finding a thread for a chunk takes longer than the chunk. Its multiples keep alignment.
    const LEAST: usize = 1 << 13;
    len.div_ceil(rayon::current_num_threads()).next_multiple_of(LEAST).min(CHUNK_LEN)
}

/// Whether a destination is written around the caches, which would not keep it: neither the threads' own ones nor the one that they share.
fn streams(dst: Slice<'_>) -> bool {
    const SHARED_BYTES: usize = 32 << 20;
    const OWN_BYTES: usize = 2 << 20;
    dst.as_bytes().len() >= SHARED_BYTES.max(OWN_BYTES * rayon::current_num_threads())
}

/// Sets every element to zero.
pub fn zero(dst: SliceMut<'_>) {
    let bytes = dst.as_bytes_mut();
    match part_bytes(bytes.len()) {
        Some(part) => bytes.par_chunks_mut(part).for_each(|part| part.fill(0)),
        None => bytes.fill(0),
    }
}

/// Copies bytes with every thread.
fn copy(dst: &mut [u8], src: &[u8]) {
    match part_bytes(dst.len()) {
        Some(part) => {
            dst.par_chunks_mut(part).zip(src.par_chunks(part)).for_each(|(dst, src)| dst.copy_from_slice(src))
        }
        None => dst.copy_from_slice(src),
    }
}

/// Bytes of one thread's part in moves that the C library does: one large part each, because it goes around the caches only
/// where a single call is larger than they are. `None` if one thread has done it before others wake up.
fn part_bytes(bytes: usize) -> Option<usize> {
    const ALONE: usize = 1 << 20;
    const LEAST: usize = 1 << 16;
    let part = bytes.div_ceil(rayon::current_num_threads()).next_multiple_of(4096).max(LEAST);
    (bytes > ALONE && !has_one_thread()).then_some(part)
}

/// Casts one chunk; `stream` says to go around the caches.
pub(crate) fn cast_chunk<S: Formula, D: Formula>(dst: &mut [D], src: &[S], stream: bool) {
    if size_of::<D>() == 2 {
        return_on_avx512!(cast(dst, src, stream));
    }
    return_on_avx2!(cast(dst, src, stream));
    cast_each(dst, src);
}

/// Casts elements that are in the cache, without prefetching.
pub(crate) fn cast_near<S: Formula, D: Formula>(dst: &mut [D], src: &[S]) {
    if size_of::<D>() == 2 {
        return_on_avx512!(cast_near(dst, src));
    }
    return_on_avx2!(cast_near(dst, src));
    cast_each(dst, src);
}

fn cast_each<S: Formula, D: Formula>(dst: &mut [D], src: &[S]) {
    for (to, &from) in dst.iter_mut().zip(src) {
        *to = elementwise::cast(from);
    }
}

/// Accumulates one chunk.
pub(crate) fn accumulate_chunk<T: Formula, G: Formula>(sum: &mut [T], value: &[G]) {
    if size_of::<T>() == 2 {
        return_on_avx512!(accumulate(sum, value));
    }
    return_on_avx2!(accumulate(sum, value));
    for (to, &from) in sum.iter_mut().zip(value) {
        *to = elementwise::accumulate(*to, from);
    }
}

/// Scales one chunk; `stream` says to go around the caches.
fn scale_chunk<S: Formula, D: Formula>(dst: &mut [D], src: &[S], factor: f64, stream: bool) {
    return_on_avx2!(scale(dst, src, factor, stream));
    for (to, &from) in dst.iter_mut().zip(src) {
        *to = elementwise::scale(from, factor);
    }
}

vectorized! {
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
    let stream = streams(dst.as_slice());
    with_typed!(SliceMut, dst, dst => with_typed!(Slice, src, src => {
        zip_chunks(storage_mut(dst), storage(src), |dst, src| cast_chunk(dst, src, stream));
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
    let stream = streams(dst.as_slice());
    with_typed!(SliceMut, dst, dst => with_typed!(Slice, src, src => {
        zip_chunks(storage_mut(dst), storage(src), |dst, src| scale_chunk(dst, src, factor, stream));
    }));
    Ok(())
}

/// `data[i] = D(data[i] × factor)`, as [`scale`].
pub(crate) fn scale_in_place(data: SliceMut<'_>, factor: f64) {
    with_typed!(SliceMut, data, data => {
        let data = storage_mut(data);
        let scale = |data: &mut [_]| data.iter_mut().for_each(|value| *value = elementwise::scale(*value, factor));
        let is_alone = data.len() <= CHUNK_LEN || has_one_thread();
        if is_alone { scale(data) } else { data.par_chunks_mut(CHUNK_LEN).for_each(scale) }
    });
}

/// Whether no element is NaN or infinite.
pub fn all_finite(src: Slice<'_>) -> bool {
    with_typed!(Slice, src, src => {
        let src = storage(src);
        let is_alone = src.len() <= CHUNK_LEN || has_one_thread();
        if is_alone { all_finite_chunk(src) } else { src.par_chunks(CHUNK_LEN).all(all_finite_chunk) }
    })
}

#[cfg(test)]
mod tests {
    use gradsync_device::{BF16, F16};

    use super::*;
    use crate::kernels::cpu::isa;

    /// Numbers of every size down to subnormals of each dtype, exact ones, ties and their neighbours; infinities and NaN.
    fn values() -> Vec<f64> {
        let mut state = 1_u64;
        let mut numbers: Vec<f64> = (0..6000)
            .map(|index| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let exponent = 1023 + (state >> 33) % 300 - 155;
                let fraction = state >> 12 & !0 << [0, 28, 29, 44, 45, 52][index % 6];
                f64::from_bits(state & 1 << 63 | exponent << 52 | fraction)
            })
            .collect();
        let special = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, f64::MAX, 65520.0, 1e-46, 5e-324];
        numbers.extend(special);
        numbers
    }

    fn same<T: Formula>(found: &[T], expected: impl Iterator<Item = T>) -> bool {
        let number = |value: T| (!value.to_f64().is_nan()).then(|| value.to_f64().to_bits());
        found.iter().copied().map(number).eq(expected.map(number))
    }

    fn check<S: Formula, D: Formula>() {
        let src: Vec<S> = values().into_iter().map(S::from_f64).collect();
        let old: Vec<D> = values().into_iter().rev().map(D::from_f64).collect();
        for (begin, end) in [(0, src.len()), (1, src.len() - 3), (5, 6), (3, 300), (7, 71)] {
            let (src, old) = (&src[begin..end], &old[begin..end]);
            let what = format!("{} to {}, {begin}..{end}", S::DTYPE, D::DTYPE);
            for stream in [false, true] {
                // The destination lies at every place relative to what stores need.
                for shift in 0..9 {
                    let mut dst = old[..1].repeat(shift + src.len());
                    cast_chunk(&mut dst[shift..], src, stream);
                    assert!(same(&dst[shift..], src.iter().map(|&value| elementwise::cast(value))), "cast {what}");
                    scale_chunk(&mut dst[shift..], src, 1.0 / 3.0, stream);
                    let scaled = src.iter().map(|&value| elementwise::scale(value, 1.0 / 3.0));
                    assert!(same(&dst[shift..], scaled), "scale {what}");
                    assert!(same(&dst[..shift], old[..1].repeat(shift).into_iter()), "before {what}");
                }
            }
            let mut sum = old.to_vec();
            accumulate_chunk(&mut sum, src);
            let sums = old.iter().zip(src).map(|(&sum, &value)| elementwise::accumulate(sum, value));
            assert!(same(&sum, sums), "accumulate {what}");
        }
    }

    /// Whatever instructions this machine has, each pair of dtypes gives the bits of the formula.
    #[test]
    fn chunks_are_what_the_formulas_say() {
        fn to_every<S: Formula>() {
            check::<S, f64>();
            check::<S, f32>();
            check::<S, F16>();
            check::<S, BF16>();
        }
        isa::on_each(|| {
            to_every::<f64>();
            to_every::<f32>();
            to_every::<F16>();
            to_every::<BF16>();
        });
    }
}
