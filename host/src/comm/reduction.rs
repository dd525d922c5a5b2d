//! The arithmetic of a reduction over ranks, on one machine's memory. Every transport that has all inputs available uses it, so their
//! results have the same bits.
//!
//! This module does not move data between ranks.

use gradsync_device::math::Element as Formula;
use rayon::prelude::*;

use super::ReduceOp;
use crate::dtype::DType;
use crate::kernels::cpu::isa::vectorized;
use crate::kernels::cpu::{CHUNK_LEN, accumulate_chunk, cast_chunk};
use crate::plan::segments;
use crate::slice::SliceMut;

/// Elements reduced at a time, small enough for the first-level cache.
const BLOCK_LEN: usize = 512;

/// Replaces windows of the same length and dtype, given in rank order, by their reduction, with all threads.
pub(crate) fn reduce_windows(windows: Vec<SliceMut<'_>>, op: ReduceOp) {
    let Some(first) = windows.first() else { return };
    let (dtype, len) = (first.dtype(), first.len());
    let chunks: Vec<_> = segments::pieces(0..len, CHUNK_LEN).collect();
    let mut pieces: Vec<_> = windows.into_iter().map(|window| window.ranges_mut(chunks.clone()).into_iter()).collect();
    let of_chunk = |_| pieces.iter_mut().map(|pieces| pieces.next().expect("one for each chunk")).collect();
    let of_chunks: Vec<Vec<SliceMut<'_>>> = chunks.iter().map(of_chunk).collect();
    of_chunks.into_par_iter().zip(&chunks).for_each(|(pieces, chunk)| {
        let outputs: Vec<*mut u8> = pieces.into_iter().map(|piece| piece.as_bytes_mut().as_mut_ptr()).collect();
        let inputs: Vec<*const u8> = outputs.iter().map(|output| output.cast_const()).collect();
        // SAFETY: the same chunk of every window, each borrowed for this alone, as input and output at one place.
        unsafe { Reduction::new(dtype, op).run(&inputs, &outputs, chunk.len()) };
    });
}

/// The reduction to compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reduction {
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    /// The factor of every element after its conversion to `f64`; 1 leaves it unchanged.
    pub(super) before: f64,
    /// The factor of the reduction before its only rounding.
    pub(super) after: f64,
}

impl Reduction {
    /// A reduction without factors.
    pub(super) fn new(dtype: DType, op: ReduceOp) -> Self {
        Reduction { dtype, op, before: 1.0, after: 1.0 }
    }

    /// Reduces `len` elements of all `inputs`, which are in rank order, and writes the results to each of `outputs`.
    ///
    /// # Safety
    /// Every pointer is aligned for the dtype and has `len` elements, which the outputs allow writing; during the call, nothing else
    /// writes to this memory or reads the outputs. An output may be identical to an input; otherwise the two do not overlap.
    pub(super) unsafe fn run(self, inputs: &[*const u8], outputs: &[*mut u8], len: usize) {
        // SAFETY: as the caller promises; the formulas' types have the layout of the dtypes.
        unsafe {
            match self.dtype {
                DType::F64 => self.run_typed::<f64>(inputs, outputs, len),
                DType::F32 => self.run_typed::<f32>(inputs, outputs, len),
                DType::F16 => self.run_typed::<gradsync_device::F16>(inputs, outputs, len),
                DType::BF16 => self.run_typed::<gradsync_device::BF16>(inputs, outputs, len),
            }
        }
    }

    unsafe fn run_typed<T: Formula>(self, inputs: &[*const u8], outputs: &[*mut u8], len: usize) {
        for begin in (0..len).step_by(BLOCK_LEN) {
            let len = (len - begin).min(BLOCK_LEN);
            let mut totals = [0.0; BLOCK_LEN];
            let totals = &mut totals[..len];
            for (rank, input) in inputs.iter().enumerate() {
                // SAFETY: the block lies within every input, and it is written only after all of them have been read.
                let values = unsafe { std::slice::from_raw_parts(input.cast::<T>().add(begin), len) };
                if self.before == 1.0 {
                    join_block(totals, values, rank, self.op);
                } else {
                    let mut scaled = [0.0; BLOCK_LEN];
                    let scaled = &mut scaled[..len];
                    cast_chunk(scaled, values, false);
                    scale_block(scaled, self.before);
                    join_block(totals, scaled, rank, self.op);
                }
            }
            if self.op == ReduceOp::Mean {
                let world_size = inputs.len() as f64;
                // For powers of two, multiplying gives the same bits in a fraction of the time.
                if inputs.len().is_power_of_two() {
                    scale_block(totals, 1.0 / world_size);
                } else {
                    divide_block(totals, world_size);
                }
            }
            if self.after != 1.0 {
                scale_block(totals, self.after);
            }
            for output in outputs {
                // SAFETY: as above; the slices of the inputs are gone.
                let values = unsafe { std::slice::from_raw_parts_mut(output.cast::<T>().add(begin), len) };
                cast_chunk(values, totals, false);
            }
        }
    }
}

fn join_block<T: Formula>(totals: &mut [f64], values: &[T], rank: usize, op: ReduceOp) {
    match op {
        _ if rank == 0 => cast_chunk(totals, values, false),
        ReduceOp::Sum | ReduceOp::Mean => accumulate_chunk(totals, values),
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
