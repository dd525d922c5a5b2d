//! The learning rate of each mode: the same list of rates for all of them, the full number of steps for every rate, and
//! one rule for the choice.
//!
//! The rule looks at the validation images only. Nothing here ever sees the test scores.

use crate::data::{Digits, Split};
use crate::plan::{Mode, Plan};
use crate::train::{self, Run, TrainError};

/// Powers of two, so that *mean* at a rate and *sum* at an eighth of it (8 ranks) are the same computation to the last
/// bit, and wide enough that the best rate of each mode lies inside.
pub(crate) const RATES: [f32; 10] =
    [1.0 / 512.0, 1.0 / 256.0, 1.0 / 128.0, 1.0 / 64.0, 1.0 / 32.0, 1.0 / 16.0, 1.0 / 8.0, 1.0 / 4.0, 1.0 / 2.0, 1.0];

/// All runs of one mode.
pub(crate) struct Search {
    pub(crate) mode: Mode,
    /// One run a rate, in the order of the rates.
    pub(crate) runs: Vec<Run>,
    chosen: usize,
}

/// Why no rate was chosen.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SearchError {
    #[error("{mode}: every learning rate from {lowest} to {highest} diverged")]
    AllDiverged { mode: &'static str, lowest: f32, highest: f32 },
    #[error("{mode} at learning rate {rate}")]
    Train { mode: &'static str, rate: f32, source: TrainError },
}

impl Search {
    /// Tries every rate.
    pub(crate) fn run(
        plan: &Plan,
        mode: Mode,
        rates: &[f32],
        digits: &Digits,
        split: &Split,
        on_step: &(dyn Fn() + Sync),
    ) -> Result<Self, SearchError> {
        let mut runs = Vec::with_capacity(rates.len());
        for &rate in rates {
            let run = train::run(plan, mode, rate, digits, split, on_step).map_err(|source| SearchError::Train {
                mode: mode.name(),
                rate,
                source,
            })?;
            runs.push(run);
        }
        let losses: Vec<Option<f64>> = runs.iter().map(Run::validation_loss).collect();
        let chosen = choose(&losses).ok_or(SearchError::AllDiverged {
            mode: mode.name(),
            lowest: rates.iter().copied().fold(f32::INFINITY, f32::min),
            highest: rates.iter().copied().fold(0.0, f32::max),
        })?;
        Ok(Self { mode, runs, chosen })
    }

    /// The run whose rate was chosen.
    pub(crate) fn best(&self) -> &Run {
        &self.runs[self.chosen]
    }

    pub(crate) fn is_best(&self, index: usize) -> bool {
        index == self.chosen
    }

    /// Whether a better rate might lie outside the list.
    pub(crate) fn at_the_edge(&self) -> bool {
        self.chosen == 0 || self.chosen + 1 == self.runs.len()
    }
}

/// The smallest validation loss after the last step; the first of equals. None stands for a run that diverged.
fn choose(losses: &[Option<f64>]) -> Option<usize> {
    let mut best: Option<(usize, f64)> = None;
    for (index, loss) in losses.iter().enumerate() {
        let Some(loss) = *loss else { continue };
        if best.is_none_or(|(_, smallest)| loss < smallest) {
            best = Some((index, loss));
        }
    }
    best.map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_loss_wins_and_diverged_runs_do_not_count() {
        assert_eq!(choose(&[Some(0.5), Some(0.2), Some(0.3), None]), Some(1));
        assert_eq!(choose(&[None, Some(9.0)]), Some(1));
        assert_eq!(choose(&[Some(0.2), Some(0.2)]), Some(0));
        assert_eq!(choose(&[None, None]), None);
        assert_eq!(choose(&[]), None);
    }

    #[test]
    fn the_rates_double() {
        assert!(RATES.windows(2).all(|pair| pair[1] == 2.0 * pair[0]));
    }
}
