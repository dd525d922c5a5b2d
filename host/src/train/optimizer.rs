//! [`DeltaOptimizer`], which is all that a step knows of an optimizer, and the ranges of the optimizers' options.

use crate::buffer::GradientBuffer;
use crate::error::{Error, Result};

/// An optimizer that says where it would go, and lets others decide: [`Sgd`](super::Sgd), [`Adam`](super::Adam), or the
/// caller's own.
pub trait DeltaOptimizer {
    /// Writes the step that this optimizer would add to the weights, and takes the gradients into its own state.
    ///
    /// The three buffers hold the same tensors, each in a dtype of its own; `deltas` comes as zeros. Not called in
    /// steps whose gradients are not finite.
    ///
    /// # Errors
    /// Any error of the optimizer, with its state unchanged: the other ranks' step fails too.
    fn deltas(
        &mut self,
        gradients: &GradientBuffer,
        weights: &GradientBuffer,
        deltas: &mut GradientBuffer,
    ) -> Result<()>;
}

/// The numbers that an option may be.
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
