//! [`Reduced`]: the outcome of a step, parameter by parameter.

/// What has become of the gradient of a parameter in a step. The same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GradientState {
    /// Reduced over ranks. It lies in the reducer.
    Reduced,
    /// There is one rank, and the gradient that was handed in is the result. It lies where it was.
    Unchanged,
    /// No rank had a gradient of it in this step. The optimizer has to leave the parameter and its state alone, weight decay included.
    Skipped,
    /// It is not trained, and the optimizer leaves it alone in every step.
    NotTrained,
}

impl GradientState {
    /// Whether there is a gradient.
    pub fn has_gradient(self) -> bool {
        matches!(self, GradientState::Reduced | GradientState::Unchanged)
    }
}

/// The outcome of a step. The same on every rank.
#[must_use = "a parameter that was skipped is to be left alone by the optimizer, which is said only here"]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reduced {
    pub(super) owners: Vec<usize>,
    pub(super) states: Vec<GradientState>,
    pub(super) examples: Option<usize>,
}

impl Reduced {
    /// The state of a parameter's gradient; that of the parameter that it is tied to, if it is. Panics past the last.
    pub fn state(&self, parameter: usize) -> GradientState {
        self.states[self.owners[parameter]]
    }

    /// The numbers of the trained parameters that have no gradient in this step.
    pub fn skipped(&self) -> impl Iterator<Item = usize> {
        (0..self.owners.len()).filter(|&parameter| self.state(parameter) == GradientState::Skipped)
    }

    /// The examples of all ranks in this step, if the ranks have counted them ([`Reducer::step_of`](super::Reducer::step_of)).
    pub fn examples(&self) -> Option<usize> {
        self.examples
    }
}
