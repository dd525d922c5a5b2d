//! [`Reduced`]: the outcome of a step, parameter by parameter.

/// The state of a parameter's gradient after a step. The same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GradientState {
    /// Reduced over ranks. The gradient is in the reducer.
    Reduced,
    /// There is one rank, and the gradient that was passed is the result. It is in the caller's memory.
    Unchanged,
    /// No rank had a gradient of it in this step. The optimizer must not change the parameter and its state, not even by weight decay.
    Skipped,
    /// The parameter is not trained, and the optimizer never changes it.
    NotTrained,
}

impl GradientState {
    /// Whether there is a gradient.
    pub fn has_gradient(self) -> bool {
        matches!(self, GradientState::Reduced | GradientState::Unchanged)
    }
}

/// A gradient with NaN or infinities. The same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct NonFiniteGradient {
    /// The number of its step ([`Reducer::at`](super::Reducer::at)).
    pub step: u64,
    /// The first rank whose own gradient has them; `None` if every rank's own gradient is finite and only their reduction is not.
    pub rank: Option<usize>,
    /// The number of the parameter: the first one of that rank.
    pub parameter: usize,
}

/// The outcome of a step. The same on every rank.
#[must_use = "the optimizer must leave skipped parameters unchanged: see `Reduced::skipped`"]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reduced {
    pub(super) owners: Vec<usize>,
    pub(super) states: Vec<GradientState>,
    pub(super) examples: Option<usize>,
    pub(super) non_finite: Option<NonFiniteGradient>,
}

impl Reduced {
    /// The state of a parameter's gradient; for a tied parameter, its owner's. Panics beyond the last.
    pub fn state(&self, parameter: usize) -> GradientState {
        self.states[self.owners[parameter]]
    }

    /// The numbers of the trained parameters without a gradient in this step.
    pub fn skipped(&self) -> impl Iterator<Item = usize> {
        (0..self.owners.len()).filter(|&parameter| self.state(parameter) == GradientState::Skipped)
    }

    /// The reason why the step was skipped on every rank, with [`NonFinite::Skip`](super::NonFinite::Skip): the state of every trained
    /// parameter is then [`GradientState::Skipped`].
    pub fn non_finite(&self) -> Option<NonFiniteGradient> {
        self.non_finite
    }

    /// The number of examples of all ranks in this step, if it was counted ([`Reducer::step_of`](super::Reducer::step_of)).
    pub fn examples(&self) -> Option<usize> {
        self.examples
    }
}
