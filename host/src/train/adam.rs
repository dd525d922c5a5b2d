//! [`Adam`]: the optimizer Adam, with optional bias correction and decoupled weight decay.
//!
//! It computes steps, and never writes a weight.

use super::blocks::{
    BAD_GRADIENTS, BAD_STATE, check_numbers, check_operands, for_blocks, new_state, state_dtype, state_limit,
};
use super::optimizer::{DeltaOptimizer, Range, check_options};
use super::same_tensors;
use crate::buffer::GradientBuffer;
use crate::call::setters;
use crate::error::{Error, Result};

const OPERATION: &str = "adam";

/// The largest moment. The bias correction divides moments by 1 - βᵗ, which is at least 2⁻⁵³, and the quotient must stay finite: an
/// infinite second moment would make steps of 0. Only moments in `f64` can be larger.
const LARGEST_MOMENT: f64 = f64::MAX / (1_u64 << 54) as f64;

/// The options of [`Adam`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AdamOptions {
    /// The learning rate; finite and not negative.
    pub rate: f64,
    /// The decay rate of the first moment; from 0 to below 1.
    pub beta1: f64,
    /// The decay rate of the second moment; from 0 to below 1.
    pub beta2: f64,
    /// The number that is added to the root of the second moment; finite and above 0.
    pub epsilon: f64,
    /// The fraction of each weight, times the rate, that a step subtracts (AdamW's decoupled decay); finite and not negative, 0 for none.
    pub weight_decay: f64,
    /// Whether moments are corrected for their initial value 0 (bias correction).
    pub bias_correction: bool,
}

/// The values of the paper: a rate of 0.001, 0.9 and 0.999, 1e-8, with bias correction and without decay.
impl Default for AdamOptions {
    fn default() -> Self {
        Self { rate: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0, bias_correction: true }
    }
}

/// Options with this learning rate and the defaults of the others.
impl From<f64> for AdamOptions {
    fn from(rate: f64) -> Self {
        Self { rate, ..Self::default() }
    }
}

impl AdamOptions {
    setters! {
        with_rate(rate: f64),
        with_beta1(beta1: f64),
        with_beta2(beta2: f64),
        with_epsilon(epsilon: f64),
        with_weight_decay(weight_decay: f64),
        with_bias_correction(bias_correction: bool),
    }

    fn check(self) -> Result<()> {
        let Self { rate, beta1, beta2, epsilon, weight_decay, bias_correction: _ } = self;
        check_options(
            OPERATION,
            &[
                ("rate", rate, Range::NotNegative),
                ("beta1", beta1, Range::Part),
                ("beta2", beta2, Range::Part),
                ("epsilon", epsilon, Range::Positive),
                ("weight_decay", weight_decay, Range::NotNegative),
            ],
        )
    }
}

/// The optimizer Adam: `first = β₁ first + (1 - β₁) gradient`, `second = β₂ second + (1 - β₂) gradient²`, `delta = -rate × (first / c₁ /
/// (√(second / c₂) + ε) + decay × weight)`, where `c = 1 - βᵗ` in step `t`, or 1 without bias correction; computed in `f64`, and each
/// stored number is rounded once.
///
/// Moments are stored in `f32`, or in `f64` if one of the operands of the first step is `f64`.
#[derive(Debug)]
pub struct Adam {
    options: AdamOptions,
    moments: Option<[GradientBuffer; 2]>,
    steps: u64,
}

impl Adam {
    /// Creates an optimizer before its first step, from a learning rate, as in `Adam::new(0.001)`, or from [`AdamOptions`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming an option out of its range.
    pub fn new(options: impl Into<AdamOptions>) -> Result<Self> {
        let options = options.into();
        options.check()?;
        Ok(Self { options, moments: None, steps: 0 })
    }

    /// Restores a saved optimizer: first and second moments after a number of steps.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new); [`Error::LengthMismatch`] or [`Error::InvalidArgument`] if the moments have different tensors;
    /// [`Error::InvalidArgument`] naming a moment that is not finite or above 9.9e291, or a second moment below 0, which no mean of squares
    /// is.
    pub fn with_moments(
        options: AdamOptions,
        first: GradientBuffer,
        second: GradientBuffer,
        steps: u64,
    ) -> Result<Self> {
        same_tensors(OPERATION, ("first moments", first.table()), ("second moments", second.table()))?;
        check_numbers(OPERATION, ("the first moments", BAD_STATE), &first, -LARGEST_MOMENT..=LARGEST_MOMENT)?;
        check_numbers(OPERATION, ("the second moments", BAD_STATE), &second, 0.0..=LARGEST_MOMENT)?;
        Ok(Self { moments: Some([first, second]), steps, ..Self::new(options)? })
    }

    /// The first and the second moments, for saving; none before the first step.
    pub fn moments(&self) -> Option<[&GradientBuffer; 2]> {
        self.moments.as_ref().map(<[GradientBuffer; 2]>::each_ref)
    }

    /// The number of steps made.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The options.
    pub fn options(&self) -> AdamOptions {
        self.options
    }

    /// Changes the options from the next step on, as a schedule of the learning rate does.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), after which the options are unchanged.
    pub fn set_options(&mut self, options: AdamOptions) -> Result<()> {
        options.check()?;
        self.options = options;
        Ok(())
    }

    /// Adds one step to the weights ([`DeltaOptimizer::step`]).
    ///
    /// # Errors
    /// The errors of that method; the weights are unchanged then.
    pub fn step(&mut self, weights: &mut GradientBuffer, gradients: &GradientBuffer) -> Result<()> {
        DeltaOptimizer::step(self, weights, gradients)
    }
}

impl DeltaOptimizer for Adam {
    /// Computes the step; see the trait.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] or [`Error::InvalidArgument`] for buffers whose tensors differ from each other or from the moments;
    /// [`Error::InvalidArgument`] naming a gradient that is not finite, or whose square may overflow the moments (above 1.3e19 for moments
    /// in `f32`, 9.9e145 in `f64`), or after so many steps that they cannot be counted. Nothing is written then.
    fn deltas(
        &mut self,
        gradients: &GradientBuffer,
        weights: &GradientBuffer,
        deltas: &mut GradientBuffer,
    ) -> Result<()> {
        check_operands(OPERATION, gradients, &[("weights", weights), ("deltas", deltas)])?;
        if let Some([first, _]) = &self.moments {
            check_operands(OPERATION, gradients, &[("moments", first)])?;
        }
        let operands = [gradients, weights, &*deltas];
        let [first, second] = match &self.moments {
            Some(moments) => moments.each_ref().map(GradientBuffer::dtype),
            None => [state_dtype(operands); 2],
        };
        let limit = state_limit(first).min(state_limit(second).min(LARGEST_MOMENT).sqrt());
        check_numbers(OPERATION, ("the gradients", BAD_GRADIENTS), gradients, -limit..=limit)?;
        let Some(steps) = self.steps.checked_add(1) else {
            let reason = format!(
                "{} steps were made before, and no step can follow: the state was not saved by Adam",
                self.steps
            );
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        };
        let [first, second] = match &mut self.moments {
            Some(moments) => moments,
            none => none.insert([new_state(operands)?, new_state(operands)?]),
        };
        self.steps = steps;
        let AdamOptions { rate, beta1, beta2, epsilon, weight_decay, bias_correction } = self.options;
        let steps = steps as f64;
        let [lack1, lack2] = [beta1, beta2].map(|beta| if bias_correction { 1.0 - beta.powf(steps) } else { 1.0 });
        for_blocks(gradients, weights, [first, second], deltas, |block| {
            let [first, second] = block.states;
            let moments = first.iter_mut().zip(second);
            let operands = block.gradients.iter().zip(block.weights);
            for ((delta, (gradient, weight)), (first, second)) in block.deltas.iter_mut().zip(operands).zip(moments) {
                *first = beta1 * *first + (1.0 - beta1) * gradient;
                *second = beta2 * *second + (1.0 - beta2) * (gradient * gradient);
                let direction = *first / lack1 / ((*second / lack2).sqrt() + epsilon);
                *delta = -(rate * (direction + weight_decay * weight));
            }
        })
    }
}
