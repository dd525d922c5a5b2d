//! Float-wise kernels: [`zero`], [`cast`], [`accumulate`], [`scale`], [`all_finite`].
//!
//! They support every pair of dtypes. The working precision is `f64` if one of the two is `f64`, else `f32`; results are rounded once, to
//! nearest with ties to even. NaN and infinities propagate as in IEEE 754, and subnormals are kept.

use std::sync::atomic::{AtomicBool, Ordering};

use gradsync_device::math::{Element as Formula, elementwise};
use rayon::prelude::*;

use super::isa::{return_on_lanes, vectorized};
use super::{PIECE_LEN, for_each, has_one_thread};
use crate::dtype::{storage, storage_mut};
use crate::error::{Result, same_len};
use crate::plan::segments::pieces;
use crate::slice::{Slice, SliceMut, check_floats, with_typed};

/// Refuses operands with which nothing can be computed.
pub(super) fn check_pair(operation: &'static str, dst: Slice<'_>, src: Slice<'_>) -> Result<()> {
    check_floats(operation, dst)?;
    check_floats(operation, src)
}

/// Runs `work` on the pieces of both operands, which have one length.
fn zip_pieces(dst: SliceMut<'_>, src: Slice<'_>, work: impl Fn(SliceMut<'_>, Slice<'_>) + Sync) {
    let len = dst.len();
    if len <= PIECE_LEN || has_one_thread() {
        return work(dst, src);
    }
    let ranges: Vec<_> = pieces(0..len, piece_len(len)).collect();
    let work_on = dst.ranges_mut(ranges.clone()).into_iter().zip(ranges).collect();
    for_each(work_on, len, |(dst, range)| work(dst, src.range(range)));
}

/// The piece length of a kernel whose results do not depend on it: small enough to give each thread a piece, where there are enough
/// elements.
fn piece_len(len: usize) -> usize {
    /// For smaller pieces, waking a thread takes longer than the work. Multiples keep the alignment.
    const LEAST: usize = 1 << 13;
    len.div_ceil(rayon::current_num_threads()).next_multiple_of(LEAST).min(PIECE_LEN)
}

/// Whether a destination is written with non-temporal stores: it is larger than the threads' own caches and their shared cache.
fn streams(dst: Slice<'_>) -> bool {
    const SHARED_BYTES: usize = 32 << 20;
    const OWN_BYTES: usize = 2 << 20;
    dst.as_bytes().len() >= SHARED_BYTES.max(OWN_BYTES * rayon::current_num_threads())
}

/// Sets every element to zero. Any dtype and length.
pub fn zero(dst: SliceMut<'_>) {
    let bytes = dst.as_bytes_mut();
    match part_bytes(bytes.len()) {
        Some(part) => bytes.par_chunks_mut(part).for_each(|part| part.fill(0)),
        None => bytes.fill(0),
    }
}

/// Copies bytes on all threads.
fn copy(dst: &mut [u8], src: &[u8]) {
    match part_bytes(dst.len()) {
        Some(part) => {
            dst.par_chunks_mut(part).zip(src.par_chunks(part)).for_each(|(dst, src)| dst.copy_from_slice(src))
        }
        None => dst.copy_from_slice(src),
    }
}

/// The size of one thread's part in a copy or fill by the C library: one large part each, because the library uses non-temporal stores only
/// where a single call exceeds the caches. `None` if one thread finishes before others wake up.
fn part_bytes(bytes: usize) -> Option<usize> {
    const ALONE: usize = 1 << 20;
    const LEAST: usize = 1 << 16;
    let part = bytes.div_ceil(rayon::current_num_threads()).next_multiple_of(4096).max(LEAST);
    (bytes > ALONE && !has_one_thread()).then_some(part)
}

/// Casts one piece; `stream` selects non-temporal stores.
pub(crate) fn cast_piece<S: Formula, D: Formula>(dst: &mut [D], src: &[S], stream: bool) {
    return_on_lanes!(cast(dst, src, stream));
    cast_each(dst, src);
}

/// Casts elements that are in the cache, without prefetching.
pub(crate) fn cast_near<S: Formula, D: Formula>(dst: &mut [D], src: &[S]) {
    return_on_lanes!(cast_near(dst, src));
    cast_each(dst, src);
}

fn cast_each<S: Formula, D: Formula>(dst: &mut [D], src: &[S]) {
    for (to, &from) in dst.iter_mut().zip(src) {
        *to = elementwise::cast(from);
    }
}

/// Accumulates one piece.
pub(crate) fn accumulate_piece<T: Formula, G: Formula>(sum: &mut [T], value: &[G]) {
    return_on_lanes!(accumulate(sum, value));
    for (to, &from) in sum.iter_mut().zip(value) {
        *to = elementwise::accumulate(*to, from);
    }
}

/// Scales one piece; `stream` selects non-temporal stores.
fn scale_piece<S: Formula, D: Formula>(dst: &mut [D], src: &[S], factor: f64, stream: bool) {
    return_on_lanes!(scale(dst, src, factor, stream));
    for (to, &from) in dst.iter_mut().zip(src) {
        *to = elementwise::scale(from, factor);
    }
}

vectorized! {
    fn all_finite_piece<T: Formula>(src: &[T]) -> bool {
        // No early exit inside a block: a loop without one is vectorised.
        src.chunks(4096).all(|block| block.iter().fold(true, |finite, &value| finite & elementwise::is_finite(value)))
    }
}

/// Computes `dst[i] = D(src[i])`: exact if `D` can represent the value, otherwise rounded once to nearest, ties to even.
///
/// # Errors
/// [`Error::LengthMismatch`](crate::Error::LengthMismatch) naming both lengths, and
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for elements that are no floating-point numbers or not aligned. Nothing is
/// written then.
pub fn cast(dst: SliceMut<'_>, src: Slice<'_>) -> Result<()> {
    same_len("cast", ("destination", dst.len()), ("source", src.len()))?;
    check_pair("cast", dst.as_slice(), src)?;
    if dst.dtype() == src.dtype() {
        copy(dst.as_bytes_mut(), src.as_bytes());
        return Ok(());
    }
    let stream = streams(dst.as_slice());
    zip_pieces(dst, src, |dst, src| {
        with_typed!(dst, dst => with_typed!(src, src => {
            cast_piece(storage_mut(dst), storage(src), stream);
        }));
    });
    Ok(())
}

/// Like [`cast`], and returns whether every element of `dst` is finite then. Elements are checked while they are in the cache.
///
/// # Errors
/// The errors of [`cast`].
pub(crate) fn cast_checked(dst: SliceMut<'_>, src: Slice<'_>) -> Result<bool> {
    /// Elements that are copied and then checked: few enough for the second-level cache.
    const NEAR: usize = 1 << 14;
    same_len("cast", ("destination", dst.len()), ("source", src.len()))?;
    check_pair("cast", dst.as_slice(), src)?;
    let is_finite = AtomicBool::new(true);
    zip_pieces(dst, src, |mut dst, src| {
        for near in pieces(0..src.len(), NEAR) {
            let mut copied = dst.reborrow().range_mut(near.clone());
            cast(copied.reborrow(), src.range(near)).expect("equal lengths");
            if !all_finite(copied.as_slice()) {
                is_finite.store(false, Ordering::Relaxed);
            }
        }
    });
    Ok(is_finite.into_inner())
}

/// Computes `sum[i] = T(sum[i] + value[i])`: both are widened to the working precision, added, and rounded once.
///
/// # Errors
/// [`Error::LengthMismatch`](crate::Error::LengthMismatch) naming both lengths, and
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for elements that are no floating-point numbers or not aligned. Nothing is
/// written then.
pub fn accumulate(sum: SliceMut<'_>, value: Slice<'_>) -> Result<()> {
    same_len("accumulate", ("sum", sum.len()), ("value", value.len()))?;
    check_pair("accumulate", sum.as_slice(), value)?;
    zip_pieces(sum, value, |sum, value| {
        with_typed!(sum, sum => with_typed!(value, value => {
            accumulate_piece(storage_mut(sum), storage(value));
        }));
    });
    Ok(())
}

/// Computes `dst[i] = D(src[i] × factor)`: both in the working precision, multiplied, and rounded once. `factor` is first rounded to `f32`
/// if that is the working precision.
///
/// # Errors
/// [`Error::LengthMismatch`](crate::Error::LengthMismatch) naming both lengths, and
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for elements that are no floating-point numbers or not aligned. Nothing is
/// written then.
pub fn scale(dst: SliceMut<'_>, src: Slice<'_>, factor: f64) -> Result<()> {
    same_len("scale", ("destination", dst.len()), ("source", src.len()))?;
    check_pair("scale", dst.as_slice(), src)?;
    let stream = streams(dst.as_slice());
    zip_pieces(dst, src, |dst, src| {
        with_typed!(dst, dst => with_typed!(src, src => {
            scale_piece(storage_mut(dst), storage(src), factor, stream);
        }));
    });
    Ok(())
}

/// Computes `data[i] = D(data[i] × factor)` like [`scale`]. Panics for elements that [`scale`] refuses.
pub fn scale_in_place(data: SliceMut<'_>, factor: f64) {
    let len = data.len();
    for_each(data.ranges_mut(pieces(0..len, PIECE_LEN)), len, |piece| {
        with_typed!(piece, piece => {
            storage_mut(piece).iter_mut().for_each(|value| *value = elementwise::scale(*value, factor));
        });
    });
}

/// Returns whether no element is NaN or infinite; true for no elements and for integers. Panics for floating-point numbers that are not
/// aligned.
pub fn all_finite(src: Slice<'_>) -> bool {
    if !src.dtype().is_float() {
        return true;
    }
    let is_finite = |piece| with_typed!(src.range(piece), piece => all_finite_piece(storage(piece)));
    if src.len() <= PIECE_LEN || has_one_thread() {
        return is_finite(0..src.len());
    }
    let ranges: Vec<_> = pieces(0..src.len(), PIECE_LEN).collect();
    ranges.into_par_iter().all(is_finite)
}

#[cfg(test)]
mod tests {
    use gradsync_device::{BF16, F16};

    use super::*;
    use crate::kernels::cpu::isa;

    /// Numbers of every magnitude down to the subnormals of each dtype, exact ones, ties and their neighbours; infinities and NaN.
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
            let pair = format!("{} to {}, {begin}..{end}", S::DTYPE, D::DTYPE);
            for stream in [false, true] {
                // The destination has every offset relative to the alignment of stores.
                for shift in 0..9 {
                    let mut dst = old[..1].repeat(shift + src.len());
                    cast_piece(&mut dst[shift..], src, stream);
                    assert!(same(&dst[shift..], src.iter().map(|&value| elementwise::cast(value))), "cast {pair}");
                    scale_piece(&mut dst[shift..], src, 1.0 / 3.0, stream);
                    let scaled = src.iter().map(|&value| elementwise::scale(value, 1.0 / 3.0));
                    assert!(same(&dst[shift..], scaled), "scale {pair}");
                    assert!(same(&dst[..shift], old[..1].repeat(shift).into_iter()), "before {pair}");
                }
            }
            for shift in 0..9 {
                let mut sum = [&old[..1].repeat(shift)[..], old].concat();
                accumulate_piece(&mut sum[shift..], src);
                let sums = old.iter().zip(src).map(|(&sum, &value)| elementwise::accumulate(sum, value));
                assert!(same(&sum[shift..], sums), "accumulate {pair}");
                assert!(same(&sum[..shift], old[..1].repeat(shift).into_iter()), "before {pair}");
            }
        }
    }

    /// With every instruction set of this machine, each pair of dtypes gives the bits of the formula.
    #[test]
    fn cast_scale_and_accumulate_follow_the_formulas() {
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
