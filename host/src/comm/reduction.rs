//! The arithmetic of a reduction over ranks, on one machine's memory. Every transport that has all inputs available uses it, so their
//! results have the same bits.
//!
//! Joined elements and products are `f64`s. Where one of them leaves the range of `f64`, the element is reduced again by [`Unbounded`]
//! numbers, so that the result is right whenever it is within the range of the dtype itself.
//!
//! This module does not move data between ranks.

mod unbounded;

use gradsync_device::math::Element as Formula;
use rayon::prelude::*;

use self::unbounded::Unbounded;
use super::{ReduceOp, Scaling};
use crate::dtype::{DType, Float, with_float};
use crate::kernels::cpu::isa::vectorized;
use crate::kernels::cpu::{PIECE_LEN, accumulate_piece, cast_piece};
use crate::plan::segments;
use crate::slice::SliceMut;

/// Elements reduced at a time, small enough for the first-level cache.
const BLOCK_LEN: usize = 512;

/// Replaces windows of the same length and dtype, given in rank order, by their reduction, with all threads: a mean with these weights, if
/// there are any.
pub(crate) fn reduce_windows(windows: Vec<SliceMut<'_>>, op: ReduceOp, weights: &[f64]) {
    let Some(first) = windows.first() else { return };
    let (dtype, len) = (first.dtype(), first.len());
    let ranges: Vec<_> = segments::pieces(0..len, PIECE_LEN).collect();
    let mut pieces: Vec<_> = windows.into_iter().map(|window| window.ranges_mut(ranges.clone()).into_iter()).collect();
    let of_range = |_| pieces.iter_mut().map(|pieces| pieces.next().expect("one for each range")).collect();
    let of_ranges: Vec<Vec<SliceMut<'_>>> = ranges.iter().map(of_range).collect();
    let reduction = Reduction { weights, ..Reduction::new(dtype, op) };
    of_ranges.into_par_iter().zip(&ranges).for_each(|(pieces, range)| {
        let outputs: Vec<*mut u8> = pieces.into_iter().map(|piece| piece.as_bytes_mut().as_mut_ptr()).collect();
        let inputs: Vec<*const u8> = outputs.iter().map(|output| output.cast_const()).collect();
        // SAFETY: the same range of every window, each borrowed for this alone, as input and output at one place.
        unsafe { reduction.run(&inputs, &outputs, range.len()) };
    });
}

/// The reduction to compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reduction<'w> {
    dtype: DType,
    op: ReduceOp,
    /// The factor of every element after its conversion to `f64`; 1 leaves it unchanged.
    before: f64,
    /// The factor of the reduction before its only rounding.
    after: f64,
    /// The weight of every rank in a mean; empty for equal weights.
    weights: &'w [f64],
}

impl<'w> Reduction<'w> {
    /// A reduction without factors.
    pub(super) fn new(dtype: DType, op: ReduceOp) -> Self {
        Self::scaled(dtype, op, Scaling::NONE)
    }

    /// A reduction with factors.
    pub(super) fn scaled(dtype: DType, op: ReduceOp, Scaling { before, after }: Scaling) -> Self {
        Reduction { dtype, op, before, after, weights: &[] }
    }

    /// A mean with a weight for every rank.
    pub(super) fn weighted(dtype: DType, weights: &'w [f64]) -> Self {
        Reduction { weights, ..Self::new(dtype, ReduceOp::Mean) }
    }

    /// The bytes of an element.
    pub(super) fn size_bytes(self) -> usize {
        self.dtype.size_bytes()
    }

    /// Whether one rank's data are the reduction over that rank.
    pub(super) fn keeps_one_rank(self) -> bool {
        (self.before, self.after) == (1.0, 1.0)
    }

    /// Reduces `len` elements of all `inputs`, which are in rank order, and writes the results to each of `outputs`.
    ///
    /// # Safety
    /// Every pointer is aligned for the dtype and has `len` elements, which the outputs allow writing; during the call, nothing else
    /// writes to this memory or reads the outputs. An output may be identical to an input; otherwise the two do not overlap.
    pub(super) unsafe fn run(self, inputs: &[*const u8], outputs: &[*mut u8], len: usize) {
        // SAFETY: as the caller promises; the formulas' types have the layout of the dtypes.
        unsafe {
            with_float!(self.dtype, T => self.run_typed::<<T as Float>::Storage>(inputs, outputs, len));
        }
    }

    unsafe fn run_typed<T: Formula>(self, inputs: &[*const u8], outputs: &[*mut u8], len: usize) {
        let (ranks, divisor) = (self.ranks(inputs.len()), self.divisor(inputs.len()));
        let least = self.least_total(ranks.clone().map(|(_, factor)| factor), divisor);
        for begin in (0..len).step_by(BLOCK_LEN) {
            let len = (len - begin).min(BLOCK_LEN);
            let mut totals = [0.0; BLOCK_LEN];
            let totals = &mut totals[..len];
            for (index, (rank, factor)) in ranks.clone().enumerate() {
                // SAFETY: the block lies within every input, and it is written only after all of them have been read.
                let values = unsafe { std::slice::from_raw_parts(inputs[rank].cast::<T>().add(begin), len) };
                if factor == 1.0 {
                    join_block(totals, values, index == 0, self.op);
                } else {
                    let mut scaled = [0.0; BLOCK_LEN];
                    let scaled = &mut scaled[..len];
                    cast_piece(scaled, values, false);
                    scale_block(scaled, factor);
                    join_block(totals, scaled, index == 0, self.op);
                }
            }
            let results = match least {
                Some(least) if !are_between(totals, least, f64::MAX) => {
                    // SAFETY: the element lies within every input, none of which has been written in this block.
                    let value =
                        |rank: usize, at: usize| unsafe { (*inputs[rank].cast::<T>().add(begin + at)).to_f64() };
                    let is_lost = |at: &usize| !are_between(&totals[*at..=*at], least, f64::MAX);
                    let result = |at| {
                        let values = ranks.clone().map(|(rank, factor)| (factor, value(rank, at)));
                        self.unbounded(values, divisor).map(|result| (at, result))
                    };
                    (0..len).filter(is_lost).filter_map(result).collect()
                }
                _ => Vec::new(),
            };
            // For powers of two, multiplying gives the same bits in a fraction of the time.
            if divisor.to_bits() << 12 == 0 && divisor.recip().is_normal() {
                if divisor != 1.0 {
                    scale_block(totals, divisor.recip());
                }
            } else {
                divide_block(totals, divisor);
            }
            if self.after != 1.0 {
                scale_block(totals, self.after);
            }
            results.into_iter().for_each(|(at, result)| totals[at] = result);
            for output in outputs {
                // SAFETY: as above; the slices of the inputs are gone.
                let values = unsafe { std::slice::from_raw_parts_mut(output.cast::<T>().add(begin), len) };
                cast_piece(values, totals, false);
            }
        }
    }

    /// The ranks whose elements are joined, of so many, each with the factor of its elements.
    fn ranks(self, count: usize) -> impl Iterator<Item = (usize, f64)> + Clone + use<'w> {
        let factor = move |rank: usize| (rank, self.weights.get(rank).copied().unwrap_or(self.before));
        (0..count).map(factor).filter(move |(_, factor)| *factor != 0.0 || self.weights.is_empty())
    }

    /// The number by which the joined elements of so many ranks are divided.
    fn divisor(self, count: usize) -> f64 {
        match (self.op, self.weights) {
            (ReduceOp::Mean, []) => count as f64,
            (ReduceOp::Mean, weights) => weights.iter().sum(),
            _ => 1.0,
        }
    }

    /// The least absolute value of a total that has certainly kept its digits, if a total can have lost them to the range of `f64` while
    /// the result is within the range of the dtype.
    fn least_total(self, mut factors: impl Iterator<Item = f64> + Clone, divisor: f64) -> Option<f64> {
        // Products of four such numbers and an element of any dtype but `f64` are normal numbers.
        let is_ordinary = |factor: f64| factor == 0.0 || (2f64.powi(-200)..=2f64.powi(200)).contains(&factor.abs());
        if self.dtype != DType::F64 && factors.clone().chain([divisor, self.after]).all(is_ordinary) {
            return None;
        }
        let grows = self.after.abs() > 1.0 || divisor < 1.0;
        let shrinks = divisor > 1.0 || factors.any(|factor| factor.abs() < 1.0);
        Some(if shrinks && grows { 2f64.powi(-900) } else { 0.0 })
    }

    /// The result of one element, given every rank's factor and value, computed as if the exponent of an `f64` had no bounds. `None` if it
    /// is not finite because the values are not, so that the totals are right.
    fn unbounded(self, values: impl Iterator<Item = (f64, f64)> + Clone, divisor: f64) -> Option<f64> {
        let is_sum = matches!(self.op, ReduceOp::Sum | ReduceOp::Mean);
        let others = values.clone().filter(|(_, value)| !value.is_finite()).map(|(factor, value)| factor * value);
        if let Some(total) = others.reduce(|total, product| total + product) {
            // Finite values that overflow must not turn an infinity of the other sign into NaN.
            return is_sum.then_some(total / divisor * self.after);
        }
        let join = |total: Unbounded, product: Unbounded| match self.op {
            ReduceOp::Sum | ReduceOp::Mean => total + product,
            ReduceOp::Max => {
                if total.is_at_least(product) {
                    total
                } else {
                    product
                }
            }
            ReduceOp::Min => {
                if product.is_at_least(total) {
                    total
                } else {
                    product
                }
            }
        };
        let total = values.map(|(factor, value)| Unbounded::from(factor) * value.into()).reduce(join)?;
        let result = (total / divisor.into() * self.after.into()).to_f64();
        // A mean of finite values is finite; only its roundings can be beyond the largest number.
        let is_mean = self.op == ReduceOp::Mean && (self.before, self.after) == (1.0, 1.0);
        Some(if is_mean { result.clamp(f64::MIN, f64::MAX) } else { result })
    }
}

fn join_block<T: Formula>(totals: &mut [f64], values: &[T], is_first: bool, op: ReduceOp) {
    match op {
        _ if is_first => cast_piece(totals, values, false),
        ReduceOp::Sum | ReduceOp::Mean => accumulate_piece(totals, values),
        ReduceOp::Max => max_block(totals, values),
        ReduceOp::Min => min_block(totals, values),
    }
}

vectorized! {
    fn scale_block<>(totals: &mut [f64], factor: f64) {
        totals.iter_mut().for_each(|total| *total *= factor);
    }

    fn divide_block<>(totals: &mut [f64], divisor: f64) {
        totals.iter_mut().for_each(|total| *total /= divisor);
    }

    fn are_between<>(totals: &[f64], least: f64, most: f64) -> bool {
        totals.iter().fold(true, |all, total| all & (least..=most).contains(&total.abs()))
    }

    fn max_block<T: Formula>(totals: &mut [f64], values: &[T]) {
        let pairs = totals.iter_mut().zip(values.iter().map(|value| value.to_f64()));
        pairs.for_each(|(total, value)| *total = first_if(*total, value, *total >= value));
    }

    fn min_block<T: Formula>(totals: &mut [f64], values: &[T]) {
        let pairs = totals.iter_mut().zip(values.iter().map(|value| value.to_f64()));
        pairs.for_each(|(total, value)| *total = first_if(*total, value, *total <= value));
    }
}

/// Returns the chosen value, or NaN if either is NaN: a comparison with a NaN `second` is false, so `second` is returned.
#[inline(always)]
fn first_if(first: f64, second: f64, is_first: bool) -> f64 {
    if first.is_nan() || is_first { first } else { second }
}
