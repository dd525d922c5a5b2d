//! [`Sgd`]: the optimizer SGD (stochastic gradient descent) with momentum.
//!
//! It computes steps, and never writes a weight.

use super::blocks::{
    BAD_GRADIENTS, BAD_STATE, check_numbers, check_operands, for_blocks, new_state, state_dtype, state_limit,
};
use super::optimizer::{DeltaOptimizer, Range, check_options};
use crate::buffer::GradientBuffer;
use crate::call::setters;
use crate::error::Result;

const OPERATION: &str = "sgd";

/// The options of [`Sgd`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct SgdOptions {
    /// The learning rate; finite and not negative.
    pub rate: f64,
    /// The factor of the last velocity, from 0 to below 1; 0 for none.
    pub momentum: f64,
}

/// A rate of 0.01 without momentum.
impl Default for SgdOptions {
    fn default() -> Self {
        Self { rate: 0.01, momentum: 0.0 }
    }
}

/// Options with this learning rate and the defaults of the others.
impl From<f64> for SgdOptions {
    fn from(rate: f64) -> Self {
        Self { rate, ..Self::default() }
    }
}

impl SgdOptions {
    setters! { with_rate(rate: f64), with_momentum(momentum: f64) }

    fn check(self) -> Result<()> {
        let Self { rate, momentum } = self;
        check_options(OPERATION, &[("rate", rate, Range::NotNegative), ("momentum", momentum, Range::Part)])
    }
}

/// The optimizer SGD: `velocity = momentum × velocity + gradient`, `delta = -rate × velocity`; computed in `f64`, and each stored number is
/// rounded once.
///
/// The velocity is stored in `f32`, or in `f64` if one of the operands of the first step is `f64`; without momentum there is none.
#[derive(Debug)]
pub struct Sgd {
    options: SgdOptions,
    velocity: Option<GradientBuffer>,
}

impl Sgd {
    /// Creates an optimizer without a velocity, from a learning rate, as in `Sgd::new(0.1)`, or from [`SgdOptions`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming an option out of its range.
    pub fn new(options: impl Into<SgdOptions>) -> Result<Self> {
        let options = options.into();
        options.check()?;
        Ok(Self { options, velocity: None })
    }

    /// Restores a saved optimizer.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming a velocity that is not
    /// finite.
    pub fn with_velocity(options: SgdOptions, velocity: GradientBuffer) -> Result<Self> {
        check_numbers(OPERATION, ("the velocities", BAD_STATE), &velocity, -f64::MAX..=f64::MAX)?;
        Ok(Self { velocity: Some(velocity), ..Self::new(options)? })
    }

    /// The options.
    pub fn options(&self) -> SgdOptions {
        self.options
    }

    /// Changes the options from the next step on, as a schedule of the learning rate does.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), after which the options are unchanged.
    pub fn set_options(&mut self, options: SgdOptions) -> Result<()> {
        options.check()?;
        self.options = options;
        Ok(())
    }

    /// The velocity, for saving; none before the first step, or without momentum.
    pub fn velocity(&self) -> Option<&GradientBuffer> {
        self.velocity.as_ref()
    }

    /// Adds one step to the weights ([`DeltaOptimizer::step`]).
    ///
    /// # Errors
    /// The errors of that method; the weights are unchanged then.
    pub fn step(&mut self, weights: &mut GradientBuffer, gradients: &GradientBuffer) -> Result<()> {
        DeltaOptimizer::step(self, weights, gradients)
    }
}

impl DeltaOptimizer for Sgd {
    /// Computes the step; see the trait.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) or [`Error::InvalidArgument`](crate::Error::InvalidArgument) for buffers
    /// whose tensors differ from each other or from the velocity; with momentum, [`Error::InvalidArgument`](crate::Error::InvalidArgument)
    /// naming a gradient that is not finite, or so large that a sum of such gradients may overflow the velocity. Nothing is written then.
    fn deltas(
        &mut self,
        gradients: &GradientBuffer,
        weights: &GradientBuffer,
        deltas: &mut GradientBuffer,
    ) -> Result<()> {
        let SgdOptions { rate, momentum } = self.options;
        check_operands(OPERATION, gradients, &[("weights", weights), ("deltas", deltas)])?;
        if let Some(velocity) = &self.velocity {
            check_operands(OPERATION, gradients, &[("velocities", velocity)])?;
        }
        if momentum == 0.0 {
            // Without momentum the velocity is dropped; if momentum is set again, it starts from zero.
            self.velocity = None;
            return for_blocks(gradients, weights, [], deltas, |block| {
                block.deltas.iter_mut().zip(block.gradients).for_each(|(delta, gradient)| *delta = -(rate * gradient));
            });
        }
        let operands = [gradients, weights, &*deltas];
        let dtype = self.velocity.as_ref().map_or(state_dtype(operands), GradientBuffer::dtype);
        let limit = (1.0 - momentum) * state_limit(dtype);
        check_numbers(OPERATION, ("the gradients", BAD_GRADIENTS), gradients, -limit..=limit)?;
        let velocity = match &mut self.velocity {
            Some(velocity) => velocity,
            none => none.insert(new_state(operands)?),
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
