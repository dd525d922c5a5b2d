//! [`UpdateReport`]: the outcome of a step of an optimizer.

use gradsync_device::math::step::{self, StepState};

/// The outcome of a step of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UpdateOutcome {
    /// The weights have changed.
    Applied,
    /// Gradients had NaN or infinities: nothing has changed but the scale of the loss.
    NotFinite,
    /// Gradients were so large that the optimizer's state could have left the range of its dtype: nothing has changed but the scale.
    TooLarge,
}

/// The report of a step of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct UpdateReport {
    /// The outcome of the step.
    pub outcome: UpdateOutcome,
    /// The number of steps that were applied, this one included.
    pub applied: u64,
    /// The number of steps that were skipped, this one included.
    pub skipped: u64,
    /// The Euclidean norm of all gradients, divided by the scale of the loss and not clipped.
    pub norm: f64,
    /// The learning rate of the last step that was applied, before the factors of groups.
    pub rate: f64,
    /// The scale of the loss in the next step.
    pub scale: f64,
}

impl From<StepState> for UpdateReport {
    fn from(state: StepState) -> Self {
        let outcome = match state.refusal {
            0.0 => UpdateOutcome::Applied,
            step::NOT_FINITE => UpdateOutcome::NotFinite,
            _ => UpdateOutcome::TooLarge,
        };
        let StepState { applied, skipped, norm, rate, scale, .. } = state;
        Self { outcome, applied: applied as u64, skipped: skipped as u64, norm, rate, scale }
    }
}
