//! [`DeltaOptimizer`], the interface between a step and its optimizer, and the ranges of the optimizers' options.

use super::blocks::new_state;
use crate::buffer::GradientBuffer;
use crate::error::{Error, Result};
use crate::kernels::cpu;

/// An optimizer that computes steps without applying them: [`Sgd`](super::Sgd), [`Adam`](super::Adam), or the caller's own.
pub trait DeltaOptimizer {
    /// Writes the step that this optimizer would add to the weights to `deltas`, and updates its own state with the gradients.
    ///
    /// The three buffers have the same tensors, each in a dtype of its own; `deltas` is zero at the call. Not called in steps whose
    /// gradients are not finite.
    ///
    /// # Errors
    /// Any error of the optimizer, with its state unchanged: the step fails on the other ranks too.
    fn deltas(
        &mut self,
        gradients: &GradientBuffer,
        weights: &GradientBuffer,
        deltas: &mut GradientBuffer,
    ) -> Result<()>;

    /// Adds the step of this optimizer to the weights of this rank alone; [`Stepper`](super::Stepper) makes common steps of all ranks. The
    /// sum is rounded once to the dtype of the weights.
    ///
    /// ```
    /// use gradsync::prelude::*;
    ///
    /// let mut weights = GradientBuffer::new(DType::F32, 1, [("weight", [2])])?;
    /// let mut gradients = GradientBuffer::new(DType::BF16, 1, [("weight", [2])])?;
    /// gradients.tensor_mut(0).copy_from_slice(&[gradsync::bf16::ONE; 2])?;
    /// let mut sgd = Sgd::new(0.5)?;
    /// sgd.step(&mut weights, &gradients)?;
    /// assert_eq!(weights.tensor(0).to_vec::<f32>()?, [-0.5; 2]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`deltas`](Self::deltas), and [`Error::OutOfMemory`] for the step; the weights are unchanged then.
    fn step(&mut self, weights: &mut GradientBuffer, gradients: &GradientBuffer) -> Result<()> {
        let mut deltas = new_state([gradients, weights, weights])?;
        self.deltas(gradients, weights, &mut deltas)?;
        let steps: Vec<_> = deltas.tensors().map(|(_, step)| step.data()).collect();
        let mut tensors: Vec<_> = weights.tensors_mut().map(|(_, tensor)| tensor.into_data()).collect();
        cpu::accumulate_all(&mut tensors, &steps)
    }
}

/// The range of an option's values.
#[derive(Clone, Copy)]
pub(super) enum Range {
    NotNegative,
    Positive,
    /// From 0 to below 1.
    Part,
}

impl Range {
    fn contains(self, value: f64) -> bool {
        match self {
            Range::NotNegative => value.is_finite() && value >= 0.0,
            Range::Positive => value.is_finite() && value > 0.0,
            Range::Part => (0.0..1.0).contains(&value),
        }
    }
}

/// Refuses the first option that is not in its range.
///
/// # Errors
/// [`Error::InvalidArgument`] naming the option and its value.
pub(super) fn check_options(operation: &'static str, options: &[(&str, f64, Range)]) -> Result<()> {
    let Some((name, value, range)) = options.iter().find(|(_, value, range)| !range.contains(*value)) else {
        return Ok(());
    };
    let range = match range {
        Range::NotNegative => "finite and not negative",
        Range::Positive => "finite and above 0",
        Range::Part => "from 0 to below 1",
    };
    Err(Error::InvalidArgument { operation, reason: format!("{name} is {value}, and must be {range}") })
}
