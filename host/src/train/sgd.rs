//! [`Sgd`]: stochastic gradient descent with momentum, as a maker of steps.
//!
//! It never writes a weight.

use super::blocks::{check_operands, for_blocks, new_state};
use super::delta::DeltaOptimizer;
use crate::buffer::GradientBuffer;
use crate::error::{Error, Result};

const OPERATION: &str = "sgd";

/// The numbers of [`Sgd`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdOptions {
    /// The learning rate.
    pub rate: f64,
    /// How much of the last velocity stays; 0 for none.
    pub momentum: f64,
}

/// A rate of 0.01 without momentum.
impl Default for SgdOptions {
    fn default() -> Self {
        Self { rate: 0.01, momentum: 0.0 }
    }
}

/// `velocity = momentum × velocity + gradient`, `delta = -rate × velocity`; in `f64`, each rounded once where it is
/// kept.
///
/// The velocity is kept in `f32`, or in `f64` if one of the operands of the first step is `f64`; without momentum there
/// is none.
#[derive(Debug)]
pub struct Sgd {
    /// May be changed between steps.
    pub options: SgdOptions,
    velocity: Option<GradientBuffer>,
}

impl Sgd {
    /// At rest.
    pub fn new(options: SgdOptions) -> Self {
        Self { options, velocity: None }
    }

    /// As it was saved.
    pub fn with_velocity(options: SgdOptions, velocity: GradientBuffer) -> Self {
        Self { options, velocity: Some(velocity) }
    }

    /// The velocity, to be saved; none before the first step, or without momentum.
    pub fn velocity(&self) -> Option<&GradientBuffer> {
        self.velocity.as_ref()
    }
}

impl DeltaOptimizer for Sgd {
    /// As the trait has it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming an option that is not finite; [`Error::LengthMismatch`],
    /// [`Error::InvalidArgument`] or [`Error::ShapeMismatch`] for buffers of other tensors than one another's or the
    /// velocity's. Nothing is written then.
    fn deltas(
        &mut self,
        gradients: &GradientBuffer,
        weights: &GradientBuffer,
        deltas: &mut GradientBuffer,
    ) -> Result<()> {
        let SgdOptions { rate, momentum } = self.options;
        if !rate.is_finite() || !momentum.is_finite() {
            let reason = format!("the rate is {rate} and the momentum {momentum}, and both must be finite");
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        check_operands(OPERATION, gradients, &[("weights", weights), ("deltas", deltas)])?;
        if let Some(velocity) = &self.velocity {
            check_operands(OPERATION, gradients, &[("velocities", velocity)])?;
        }
        if momentum == 0.0 {
            // What it was does not count any more, not even after a change back.
            self.velocity = None;
            return for_blocks(gradients, weights, [], deltas, |block| {
                block.deltas.iter_mut().zip(block.gradients).for_each(|(delta, gradient)| *delta = -(rate * gradient));
            });
        }
        let velocity = match &mut self.velocity {
            Some(velocity) => velocity,
            none => none.insert(new_state([gradients, weights, deltas])?),
        };
        for_blocks(gradients, weights, [velocity], deltas, |block| {
            let [velocity] = block.states;
            for ((delta, gradient), velocity) in block.deltas.iter_mut().zip(block.gradients).zip(velocity) {
                *velocity = momentum * *velocity + gradient;
                *delta = -(rate * *velocity);
            }
        })
    }
}
