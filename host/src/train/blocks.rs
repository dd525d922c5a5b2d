//! Element-wise work on several buffers at once: blocks widened to `f64`, on all threads, and rounded once on the way
//! back.
//!
//! For the optimizers, whose operands may all be of different dtypes. It knows no formula.

use rayon::prelude::*;

use super::{same_tensors, zeros_like};
use crate::buffer::GradientBuffer;
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::kernels::cpu;
use crate::slice::{Slice, SliceMut, with_typed};

/// Elements that are widened at a time: the blocks of five operands fit into the first-level cache.
const BLOCK_LEN: usize = 512;
/// Blocks that a thread takes at least.
const BLOCKS: usize = 64;

/// The operands of one block, widened.
pub(super) struct Block<'a, const STATES: usize> {
    pub(super) gradients: &'a [f64],
    pub(super) weights: &'a [f64],
    pub(super) states: [&'a mut [f64]; STATES],
    pub(super) deltas: &'a mut [f64],
}

/// Runs `formula` on every block of every tensor; it writes the deltas and updates the states.
///
/// # Errors
/// None, for buffers that hold the same tensors.
pub(super) fn for_blocks<const STATES: usize>(
    gradients: &GradientBuffer,
    weights: &GradientBuffer,
    mut states: [&mut GradientBuffer; STATES],
    deltas: &mut GradientBuffer,
    formula: impl Fn(Block<'_, STATES>) + Sync,
) -> Result<()> {
    for index in 0..gradients.tensor_count() {
        let (gradient, weight) = (gradients.tensor(index).data(), weights.tensor(index).data());
        let mut rows: Vec<Row<'_>> =
            blocks_mut(deltas.tensor_mut(index).into_data()).into_iter().map(Row::new).collect();
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

/// One block of everything that is written.
struct Row<'a> {
    delta: SliceMut<'a>,
    states: Vec<SliceMut<'a>>,
}

impl<'a> Row<'a> {
    fn new(delta: SliceMut<'a>) -> Self {
        Self { delta, states: Vec::new() }
    }

    fn run<const STATES: usize>(
        mut self,
        gradient: Slice<'_>,
        weight: Slice<'_>,
        formula: &impl Fn(Block<'_, STATES>),
    ) -> Result<()> {
        let len = self.delta.len();
        let mut wide_states = [[0.0; BLOCK_LEN]; STATES];
        let [mut wide_gradient, mut wide_weight, mut wide_delta] = [[0.0; BLOCK_LEN]; 3];
        widen(&mut wide_gradient[..len], gradient)?;
        widen(&mut wide_weight[..len], weight)?;
        for (wide, state) in wide_states.iter_mut().zip(&self.states) {
            widen(&mut wide[..len], state.as_slice())?;
        }
        formula(Block {
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
    with_typed!(SliceMut, data, data => data.chunks_mut(BLOCK_LEN).map(Element::slice_mut).collect())
}

/// A state of zeros that keeps up with the operands: `f64` if one of them is, otherwise `f32`.
pub(super) fn new_state(operands: [&GradientBuffer; 3]) -> Result<GradientBuffer> {
    let is_wide = operands.iter().any(|operand| operand.dtype() == DType::F64);
    zeros_like(operands[0].table(), if is_wide { DType::F64 } else { DType::F32 }, 1)
}

/// Refuses operands and states of other tensors.
pub(super) fn check_operands(
    operation: &'static str,
    gradients: &GradientBuffer,
    others: &[(&str, &GradientBuffer)],
) -> Result<()> {
    others
        .iter()
        .try_for_each(|(name, other)| same_tensors(operation, ("gradients", gradients.table()), (name, other.table())))
}
