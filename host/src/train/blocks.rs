//! Float-wise work on several buffers at once: blocks are widened to `f64`, processed on all threads, and rounded once when they are
//! stored.
//!
//! For the optimizers, whose operands may all have different dtypes. This module knows no formula.

use std::ops::RangeInclusive;

use gradsync_device::math::Element as Formula;
use rayon::prelude::*;

use super::{same_tensors, zeros_like};
use crate::buffer::GradientBuffer;
use crate::dtype::{DType, Float, storage, with_float};
use crate::error::{Error, Result};
use crate::kernels::cpu;
use crate::slice::{Slice, SliceMut, with_typed};

/// The number of elements that are widened at a time: the blocks of five operands fit into the first-level cache.
const BLOCK_LEN: usize = 512;
/// The least number of blocks that a thread takes.
const BLOCKS: usize = 64;

/// The operands of one block, widened.
pub(super) struct OperandBlock<'a, const STATES: usize> {
    pub(super) gradients: &'a [f64],
    pub(super) weights: &'a [f64],
    pub(super) states: [&'a mut [f64]; STATES],
    pub(super) deltas: &'a mut [f64],
}

/// Runs `formula`, which writes the deltas and updates the states, on every block of every tensor.
///
/// # Errors
/// None, for buffers with the same tensors.
pub(super) fn for_blocks<const STATES: usize>(
    gradients: &GradientBuffer,
    weights: &GradientBuffer,
    mut states: [&mut GradientBuffer; STATES],
    deltas: &mut GradientBuffer,
    formula: impl Fn(OperandBlock<'_, STATES>) + Sync,
) -> Result<()> {
    for index in 0..gradients.tensor_count() {
        let (gradient, weight) = (gradients.tensor(index).data(), weights.tensor(index).data());
        let mut rows: Vec<OutputBlock<'_>> =
            blocks_mut(deltas.tensor_mut(index).into_data()).into_iter().map(OutputBlock::new).collect();
        for state in &mut states {
            let blocks = blocks_mut(state.tensor_mut(index).into_data());
            rows.iter_mut().zip(blocks).for_each(|(row, block)| row.states.push(block));
        }
        rows.into_par_iter().with_min_len(BLOCKS).enumerate().try_for_each(|(block, row)| {
            let range = block * BLOCK_LEN..block * BLOCK_LEN + row.delta.len();
            row.run::<STATES>(gradient.range(range.clone()), weight.range(range), &formula)
        })?;
    }
    Ok(())
}

/// One block of all outputs.
struct OutputBlock<'a> {
    delta: SliceMut<'a>,
    states: Vec<SliceMut<'a>>,
}

impl<'a> OutputBlock<'a> {
    fn new(delta: SliceMut<'a>) -> Self {
        Self { delta, states: Vec::new() }
    }

    fn run<const STATES: usize>(
        mut self,
        gradient: Slice<'_>,
        weight: Slice<'_>,
        formula: &impl Fn(OperandBlock<'_, STATES>),
    ) -> Result<()> {
        let len = self.delta.len();
        let mut wide_states = [[0.0; BLOCK_LEN]; STATES];
        let [mut wide_gradient, mut wide_weight, mut wide_delta] = [[0.0; BLOCK_LEN]; 3];
        widen(&mut wide_gradient[..len], gradient)?;
        widen(&mut wide_weight[..len], weight)?;
        for (wide, state) in wide_states.iter_mut().zip(&self.states) {
            widen(&mut wide[..len], state.as_slice())?;
        }
        formula(OperandBlock {
            gradients: &wide_gradient[..len],
            weights: &wide_weight[..len],
            states: wide_states.each_mut().map(|wide| &mut wide[..len]),
            deltas: &mut wide_delta[..len],
        });
        for (wide, state) in wide_states.iter().zip(&mut self.states) {
            cpu::cast(state.reborrow(), wide[..len].into())?;
        }
        cpu::cast(self.delta, wide_delta[..len].into())
    }
}

fn widen(wide: &mut [f64], data: Slice<'_>) -> Result<()> {
    cpu::cast(wide.into(), data)
}

fn blocks_mut(data: SliceMut<'_>) -> Vec<SliceMut<'_>> {
    with_typed!(data, data => data.chunks_mut(BLOCK_LEN).map(SliceMut::from).collect())
}

/// The dtype of a new state: `f64` if one of the operands is `f64`, otherwise `f32`.
pub(super) fn state_dtype(operands: [&GradientBuffer; 3]) -> DType {
    let is_wide = operands.iter().any(|operand| operand.dtype() == DType::F64);
    if is_wide { DType::F64 } else { DType::F32 }
}

/// The advice for gradients that a state cannot take.
pub(super) const BAD_GRADIENTS: &str = "the optimizer's state would keep such a number in all later steps. Skip this step, as `Stepper` \
     does for NaN and infinities, or make the loss smaller";
/// The advice for a restored state that no optimizer has saved.
pub(super) const BAD_STATE: &str = "restore the state of an earlier checkpoint, or begin with a new optimizer";

/// Allocates a state of zeros.
pub(super) fn new_state(operands: [&GradientBuffer; 3]) -> Result<GradientBuffer> {
    zeros_like(operands[0].table(), state_dtype(operands), 1)
}

/// A bound of numbers that a state of this dtype can average, step by step, without overflow.
pub(super) fn state_limit(dtype: DType) -> f64 {
    // Half of the largest number is a margin for roundings.
    with_float!(dtype, T => T::LARGEST / 2.0)
}

/// Refuses a buffer with a number that is not in `range`, or NaN, since a state would keep it for ever. The error ends with `advice`.
///
/// # Errors
/// [`Error::InvalidArgument`] naming the number and its tensor.
pub(super) fn check_numbers(
    operation: &'static str,
    (name, advice): (&str, &str),
    buffer: &GradientBuffer,
    range: RangeInclusive<f64>,
) -> Result<()> {
    let (least, most) = range.into_inner();
    for index in 0..buffer.tensor_count() {
        let fits = |value: f64| (value >= least) & (value <= most);
        let wrong = with_typed!(buffer.tensor(index).data(), data => {
            let chunks = storage(data).par_chunks(BLOCKS * BLOCK_LEN);
            // Whole chunks are checked first, without a branch for each number.
            let chunk = chunks.find_first(|chunk| !chunk.iter().fold(true, |all, value| all & fits(Formula::to_f64(*value))));
            chunk.and_then(|chunk| chunk.iter().map(|value| Formula::to_f64(*value)).find(|&value| !fits(value)))
        });
        if let Some(value) = wrong {
            let tensor = buffer.name(index);
            let reason =
                format!("{name} of {tensor:?} have {value:e}, and must be from {least:e} to {most:e}: {advice}");
            return Err(Error::InvalidArgument { operation, reason });
        }
    }
    Ok(())
}

/// Refuses operands and states with different tensors.
pub(super) fn check_operands(
    operation: &'static str,
    gradients: &GradientBuffer,
    others: &[(&str, &GradientBuffer)],
) -> Result<()> {
    others
        .iter()
        .try_for_each(|(name, other)| same_tensors(operation, ("gradients", gradients.table()), (name, other.table())))
}
