//! The plan of the study: the remaining runs in the order of their importance, given the finished runs.
//!
//! **Protocol.** Every run sees the same number of samples, whatever the number of ranks. A rate is chosen by runs on
//! [`search_seeds`](Scale::search_seeds) scored on validation samples; figures are runs on other seeds, scored on test samples, and never
//! affect a choice. Mean and Adasum get the same list of rates at every number of ranks; other ways get the best rate of Adasum and its
//! neighbours.

use std::collections::HashSet;

use crate::plan::{Arm, Method, Purpose, Reduction, Spec, Task};
use crate::results::{Record, Results};

/// A task and its optimizer, which together have a list of rates and a best rate for one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Family {
    pub(crate) task: Task,
    pub(crate) method: Method,
}

impl Family {
    pub(crate) const IMAGES_SGD: Self = Self { task: Task::Images, method: Method::Sgd };
    pub(crate) const IMAGES_MOMENTUM: Self = Self { task: Task::Images, method: Method::Momentum };
    pub(crate) const TEXT_ADAM: Self = Self { task: Task::Text, method: Method::Adam };

    pub(crate) fn arm(self, reduction: Reduction, ranks: usize) -> Arm {
        Arm { task: self.task, method: self.method, reduction, ranks }
    }

    /// The variant that reduces the optimizers' steps instead of gradients; `None` if the optimizer has no state, because both are then
    /// equal.
    pub(crate) fn deltas(self) -> Option<Self> {
        let method = match self.method {
            Method::Momentum => Method::MomentumDeltas,
            Method::Adam => Method::AdamDeltas,
            _ => return None,
        };
        Some(Self { method, ..self })
    }

    /// The lowest rate of the list; the others are its doublings.
    fn lowest_rate(self) -> f64 {
        match self.method {
            Method::Sgd => 0.025,
            Method::Momentum | Method::MomentumDeltas => 0.005,
            Method::Adam | Method::AdamDeltas => 0.00025,
        }
    }
}

/// The size of a study.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Scale {
    /// The numbers of ranks besides 1, the most important first.
    pub(crate) ranks: Vec<usize>,
    /// Numbers of ranks at which all other reductions are tried.
    pub(crate) extra_ranks: Vec<usize>,
    pub(crate) rates: usize,
    pub(crate) search_seeds: Vec<u64>,
    pub(crate) figure_seeds: Vec<u64>,
    /// The divisor of the numbers of samples.
    divisor: usize,
}

/// The length of the longest list of rates.
const RATES: usize = 8;

impl Scale {
    pub(crate) fn full() -> Self {
        Self {
            ranks: vec![16, 64, 4, 32, 8],
            extra_ranks: vec![16, 64],
            rates: RATES,
            search_seeds: vec![11, 12, 13],
            figure_seeds: vec![1, 2, 3, 4, 5],
            divisor: 1,
        }
    }

    /// A minute or two on two cores, to check that everything runs.
    pub(crate) fn quick() -> Self {
        let figure_seeds = vec![1, 2, 3];
        Self { ranks: vec![16, 4], extra_ranks: vec![16], rates: 4, search_seeds: vec![11], figure_seeds, divisor: 40 }
    }

    /// A few minutes on two cores, with rates from the published study.
    pub(crate) fn demo(quick: bool) -> Self {
        let (ranks, divisor) = if quick { (vec![4], 40) } else { (vec![4, 16, 64], 1) };
        Self { ranks, divisor, figure_seeds: vec![1, 2, 3], ..Self::full() }
    }

    /// Replaces the numbers of ranks and the seeds, if any are given. `extra_ranks` keeps only the given ones of its numbers, because the
    /// reductions that are tried there need whole nodes.
    pub(crate) fn with(mut self, ranks: &[usize], seeds: &[u64]) -> Self {
        if !ranks.is_empty() {
            self.ranks = ranks.to_vec();
            self.extra_ranks.retain(|extra| ranks.contains(extra));
        }
        if !seeds.is_empty() {
            self.figure_seeds = seeds.to_vec();
        }
        self
    }

    /// Two passes over the training images without momentum, four with momentum.
    pub(crate) fn samples(&self, family: Family) -> usize {
        let samples = match (family.task, family.method) {
            (Task::Images, Method::Sgd) => 110_000,
            (Task::Images, _) => 220_000,
            (Task::Text, _) => 65_536,
        };
        samples / self.divisor
    }

    /// The list of rates for mean and Adasum.
    pub(crate) fn rates(&self, family: Family) -> Vec<f64> {
        // A shorter list is the middle of the longest one.
        let first = (RATES - self.rates) / 2 + usize::from(self.rates < RATES);
        (first..first + self.rates).map(|index| rate(family.lowest_rate() * f64::from(1u32 << index))).collect()
    }
}

/// The largest factor for one worker's rate that Adasum's guide names.
pub(crate) const LARGEST_FACTOR: f64 = 2.5;

/// A multiple of one rank's rate.
pub(crate) fn scaled(of_one: f64, factor: f64) -> f64 {
    rate(of_one * factor)
}

/// Rounding removes the last digits of 3 × 0.1, so that a rate is unchanged by writing it to a file and reading it.
fn rate(value: f64) -> f64 {
    format!("{value:.6}").parse().expect("a number was written")
}

/// The study, given its finished runs.
#[derive(Clone, Copy)]
pub(crate) struct Study<'a> {
    pub(crate) scale: &'a Scale,
    pub(crate) results: &'a Results,
}

/// The reductions besides mean and Adasum per tensor, tried at [`Scale::extra_ranks`].
pub(crate) const EXTRAS: [Reduction; 3] = [Reduction::AdasumWhole, Reduction::AdasumOfSums, Reduction::AdasumOfMeans];
/// The reductions that get one rank's rate, with its factor.
pub(crate) const TRANSFERRED: [(Reduction, f64); 6] = [
    (Reduction::Adasum, 1.0),
    (Reduction::Mean, 1.0),
    (Reduction::Sum, 1.0),
    (Reduction::AdasumTree, 1.0),
    (Reduction::Adasum, LARGEST_FACTOR),
    (Reduction::AdasumTree, LARGEST_FACTOR),
];
/// The reductions whose rate is tuned again at every number of ranks.
pub(crate) const TUNED: [Reduction; 2] = [Reduction::Mean, Reduction::Adasum];

impl Study<'_> {
    /// All runs that are determined so far, the most important first. Runs that depend on choices are added when these can be made.
    pub(crate) fn specs(&self, tasks: &[Task]) -> Vec<Spec> {
        let mut specs = Vec::new();
        for family in [Family::IMAGES_SGD, Family::IMAGES_MOMENTUM] {
            self.add_grid(family, &mut specs);
        }
        for family in [Family::IMAGES_MOMENTUM, Family::IMAGES_SGD] {
            let deltas = family.deltas().into_iter().map(|family| (family, Reduction::Adasum));
            for (variant, reduction) in deltas.chain(EXTRAS.map(|reduction| (family, reduction))) {
                self.add_neighbours(family, variant, reduction, &mut specs);
            }
        }
        let text = Family::TEXT_ADAM;
        self.add_search(text.arm(Reduction::Mean, 1), &self.scale.rates(text), &mut specs);
        self.add_figures(text.arm(Reduction::Mean, 1), self.rate_of_one(text), &mut specs);
        let deltas = text.deltas().into_iter().map(|family| (family, Reduction::Adasum));
        for (variant, reduction) in TUNED.map(|reduction| (text, reduction)).into_iter().chain(deltas) {
            self.add_neighbours(text, variant, reduction, &mut specs);
        }
        specs.retain(|spec| tasks.contains(&spec.arm.task));
        let mut seen = HashSet::new();
        specs.retain(|spec| seen.insert(format!("{spec:?}")));
        specs
    }

    /// Adds mean and Adasum with every rate, and the reductions with a transferred rate.
    fn add_grid(&self, family: Family, specs: &mut Vec<Spec>) {
        let rates = self.scale.rates(family);
        let one = family.arm(Reduction::Mean, 1);
        self.add_search(one, &rates, specs);
        let transferred = self.rate_of_one(family);
        self.add_figures(one, transferred, specs);
        for &ranks in &self.scale.ranks {
            for (reduction, factor) in TRANSFERRED {
                if reduction == Reduction::AdasumTree && !ranks.is_power_of_two() {
                    continue;
                }
                self.add_figures(family.arm(reduction, ranks), transferred.map(|of_one| scaled(of_one, factor)), specs);
            }
            for arm in TUNED.map(|reduction| family.arm(reduction, ranks)) {
                self.add_search(arm, &rates, specs);
                self.add_figures(arm, self.best(arm, &rates), specs);
            }
        }
    }

    /// Adds another reduction with a few rates: Adasum's best rate and its neighbours, or one rank's rate and its neighbours if there is no
    /// grid.
    fn add_neighbours(&self, family: Family, variant: Family, reduction: Reduction, specs: &mut Vec<Spec>) {
        for &ranks in &self.scale.extra_ranks {
            let Some(rates) = self.neighbours(family, ranks) else { continue };
            let arm = variant.arm(reduction, ranks);
            self.add_search(arm, &rates, specs);
            self.add_figures(arm, self.best(arm, &rates), specs);
        }
    }

    /// The few rates of a reduction other than mean and Adasum.
    pub(crate) fn neighbours(&self, family: Family, ranks: usize) -> Option<Vec<f64>> {
        let (centre, factors): (f64, &[f64]) = match family.task {
            Task::Images => {
                let arm = family.arm(Reduction::Adasum, ranks);
                (self.best(arm, &self.scale.rates(family))?, &[0.25, 0.5, 1.0, 2.0, 4.0])
            }
            Task::Text => (self.rate_of_one(family)?, &[0.5, 1.0, 2.0, 4.0]),
        };
        Some(factors.iter().map(|factor| rate(centre * factor)).collect())
    }

    /// The best rate of one rank, once it is known.
    pub(crate) fn rate_of_one(&self, family: Family) -> Option<f64> {
        self.best(family.arm(Reduction::Mean, 1), &self.scale.rates(family))
    }

    fn add_search(&self, arm: Arm, rates: &[f64], specs: &mut Vec<Spec>) {
        let samples = self.samples(arm);
        for &rate in rates {
            let seeds = self.scale.search_seeds.iter();
            specs.extend(seeds.map(|&seed| Spec { purpose: Purpose::Search, arm, rate, seed, samples }));
        }
    }

    fn add_figures(&self, arm: Arm, rate: Option<f64>, specs: &mut Vec<Spec>) {
        let Some(rate) = rate else { return };
        let samples = self.samples(arm);
        let seeds = self.scale.figure_seeds.iter();
        specs.extend(seeds.map(|&seed| Spec { purpose: Purpose::Figure, arm, rate, seed, samples }));
    }

    pub(crate) fn samples(&self, arm: Arm) -> usize {
        self.scale.samples(Family { task: arm.task, method: arm.method })
    }

    /// The mean score of an arm's search runs at a rate: missing until all runs have finished, and diverged if one of them did.
    pub(crate) fn searched(&self, arm: Arm, rate: f64) -> Searched {
        let runs = self.results.of(arm, Purpose::Search, self.samples(arm));
        let runs: Vec<&Record> = runs.filter(|record| record.spec.rate == rate).collect();
        if runs.len() < self.scale.search_seeds.len() {
            return Searched::Missing;
        }
        let scores: Option<Vec<f64>> = runs.iter().map(|record| score(record)).collect();
        match scores {
            Some(scores) => Searched::Score(scores.iter().sum::<f64>() / scores.len() as f64),
            None => Searched::Diverged,
        }
    }

    /// The rate with the best mean score, the lowest of equal ones; `None` while a run is missing, or if every rate diverged.
    pub(crate) fn best(&self, arm: Arm, rates: &[f64]) -> Option<f64> {
        let mut best: Option<(f64, f64)> = None;
        for &rate in rates {
            match self.searched(arm, rate) {
                Searched::Missing => return None,
                Searched::Score(score) if best.is_none_or(|(_, most)| score > most) => best = Some((rate, score)),
                _ => {}
            }
        }
        best.map(|(rate, _)| rate)
    }
}

/// The search's result for a rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Searched {
    Missing,
    Diverged,
    Score(f64),
}

/// The score of a run, for which larger is better: the accuracy of images, the negative loss of text. `None` if the run diverged.
pub(crate) fn score(record: &Record) -> Option<f64> {
    if record.outcome.diverged {
        return None;
    }
    match record.spec.arm.task {
        Task::Images => record.outcome.accuracy,
        Task::Text => record.outcome.loss.map(|loss| -loss),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::train::Outcome;

    /// A finished run with this accuracy or loss; `None` stands for a run that diverged.
    pub(crate) fn record(spec: Spec, score: Option<f64>) -> Record {
        let steps = spec.steps(32);
        let (stopped, diverged) = (score.is_none().then_some(3), score.is_none());
        let (curve, mass) = (Vec::new(), Vec::new());
        let outcome = Outcome { steps, loss: score, accuracy: score, stopped, diverged, curve, mass };
        Record { spec, outcome, machine: "a machine".into(), commit: "1f97cc5".into() }
    }

    /// The runs of a simulated study in which every arm has this best rate and high rates diverge, until the plan is complete.
    pub(crate) fn simulated(scale: &Scale, best: f64) -> Results {
        let mut results = Results::default();
        loop {
            let specs = Study { scale, results: &results }.specs(&[Task::Images, Task::Text]);
            let new: Vec<Spec> = specs.into_iter().filter(|spec| !results.has(spec)).collect();
            if new.is_empty() {
                return results;
            }
            results.records.extend(new.into_iter().map(|spec| {
                let score = 0.8 - (spec.rate / best).ln().abs() / 100.0 + spec.seed as f64 / 1000.0;
                record(spec, (spec.rate < 16.0 * best).then_some(score))
            }));
        }
    }

    #[test]
    fn the_whole_plan_is_made_once_and_every_arm_is_searched_alike() {
        let scale = Scale::full();
        let results = simulated(&scale, 0.1);
        let study = Study { scale: &scale, results: &results };
        let [sgd, momentum, text] = [Family::IMAGES_SGD, Family::IMAGES_MOMENTUM, Family::TEXT_ADAM];
        assert_eq!(study.rate_of_one(sgd), Some(0.1));
        assert_eq!(study.rate_of_one(momentum), Some(0.08));
        let count = |arm, purpose| results.of(arm, purpose, study.samples(arm)).count();
        for family in [sgd, momentum] {
            assert_eq!(count(family.arm(Reduction::Mean, 1), Purpose::Search), 8 * 3);
            for ranks in [4, 8, 16, 32, 64] {
                for reduction in TUNED {
                    assert_eq!(count(family.arm(reduction, ranks), Purpose::Search), 8 * 3, "{reduction:?}");
                }
                assert_eq!(count(family.arm(Reduction::AdasumTree, ranks), Purpose::Figure), 2 * 5);
            }
            for ranks in [16, 64] {
                for reduction in EXTRAS {
                    assert_eq!(count(family.arm(reduction, ranks), Purpose::Search), 5 * 3);
                    assert_eq!(count(family.arm(reduction, ranks), Purpose::Figure), 5);
                }
            }
        }
        for (family, reduction) in
            [(text, Reduction::Mean), (text, Reduction::Adasum), (text.deltas().unwrap(), Reduction::Adasum)]
        {
            assert_eq!(count(family.arm(reduction, 64), Purpose::Search), 4 * 3);
        }
        let specs: HashSet<String> = results.records.iter().map(|record| format!("{:?}", record.spec)).collect();
        assert_eq!(specs.len(), results.records.len());
        assert!(scale.search_seeds.iter().all(|seed| !scale.figure_seeds.contains(seed)));
    }

    #[test]
    fn one_rank_comes_first_and_nothing_is_compared_before_its_rate_is_known() {
        let scale = Scale::full();
        let results = Results::default();
        let specs = Study { scale: &scale, results: &results }.specs(&[Task::Images]);
        let first: Vec<usize> = specs[..24].iter().map(|spec| spec.arm.ranks).collect();
        assert_eq!(first, [1; 24]);
        assert!(specs.iter().all(|spec| spec.purpose == Purpose::Search));
    }

    #[test]
    fn a_rate_at_which_one_seed_diverged_is_not_chosen_and_a_missing_run_decides_nothing() {
        let scale = Scale::full();
        let arm = Family::IMAGES_SGD.arm(Reduction::Mean, 4);
        let spec = |rate, seed| Spec { purpose: Purpose::Search, arm, rate, seed, samples: 110_000 };
        let mut results = Results::default();
        for seed in [11, 12, 13] {
            results.records.push(record(spec(0.1, seed), Some(0.8)));
            results.records.push(record(spec(0.2, seed), (seed != 12).then_some(0.9)));
        }
        let best = |results: &Results, rates: &[f64]| Study { scale: &scale, results }.best(arm, rates);
        assert_eq!(best(&results, &[0.1, 0.2]), Some(0.1));
        assert_eq!(best(&results, &[0.2]), None);
        assert_eq!(best(&results, &[0.1, 0.2, 0.4]), None);
    }

    #[test]
    fn lists_double_and_are_written_as_people_write_them() {
        let rates = Scale::full().rates(Family::IMAGES_SGD);
        assert_eq!(rates, [0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2]);
        assert_eq!(Scale::quick().rates(Family::IMAGES_SGD), [0.2, 0.4, 0.8, 1.6]);
        assert_eq!([scaled(0.1, 2.5), scaled(0.2, 3.0)].map(|rate| rate.to_string()), ["0.25", "0.6"]);
    }

    #[test]
    fn other_ranks_that_make_no_tree_have_none() {
        let scale = Scale::full().with(&[24], &[21, 22, 23]);
        let results = simulated(&scale, 0.1);
        assert!(results.records.iter().all(|record| [1, 24].contains(&record.spec.arm.ranks)));
        assert!(results.records.iter().all(|record| record.spec.arm.reduction != Reduction::AdasumTree));
        let seeds: HashSet<u64> = results.records.iter().map(|record| record.spec.seed).collect();
        assert_eq!(seeds, HashSet::from([11, 12, 13, 21, 22, 23]));
    }
}
