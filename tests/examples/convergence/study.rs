//! The plan of the study: all runs that are determined by the finished ones.
//!
//! **Protocol.** Every run sees the same number of images, whatever the number of ranks. A rate is chosen by the accuracy on validation
//! images, which are split off the training images. Each candidate is tried with [`Scale::first`] as seeds; the two candidates with the best
//! means and the rate of one rank are tried with [`Scale::further`] as well. For one rank, the best mean of all seeds wins. For more ranks
//! one rank's rate is kept, unless another one is better beyond the noise: the 95 % interval of its differences to one rank's rate, over
//! all seeds, is above 0. Figures are runs with other seeds, scored on the test images, and never affect a choice.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::images::CLASSES;
use crate::results::{Record, Runs};
use crate::table::Interval;

/// The optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Method {
    Sgd,
    Momentum,
    Adam,
}

/// The reduction of the ranks' vectors, which are gradients unless stated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Reduction {
    Mean,
    Sum,
    /// Tensor by tensor.
    Adasum,
    /// All tensors as one vector.
    AdasumWhole,
    /// The mean inside nodes of 8 ranks, then Adasum across nodes.
    AdasumOfMeans,
    /// Adasum of the steps of the ranks' optimizers (deltas).
    AdasumOfSteps,
}

/// The purpose of a run: the choice of a learning rate, or a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Purpose {
    /// Scored on the validation images.
    Search,
    /// Scored on the test images.
    Figure,
}

/// The unit of comparison, for which a learning rate is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Arm {
    pub(crate) method: Method,
    pub(crate) reduction: Reduction,
    pub(crate) ranks: usize,
}

/// One run: everything that its result depends on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) purpose: Purpose,
    #[serde(flatten)]
    pub(crate) arm: Arm,
    /// The highest learning rate, after the warm-up.
    pub(crate) rate: f64,
    /// Determines initial weights and the order of images, identically for all arms.
    pub(crate) seed: u64,
    /// The number of images for all ranks together.
    pub(crate) samples: usize,
}

/// A reduction and a choice of its rate: a row of a table, a line of a chart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Way {
    pub(crate) name: &'static str,
    pub(crate) reduction: Reduction,
    pub(crate) rate: Rate,
    pub(crate) colour: &'static str,
    pub(crate) is_dashed: bool,
}

/// The choice of a rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rate {
    /// The rate that is best for one rank.
    OfOne,
    /// The rate that is best for this reduction on this number of ranks.
    Tuned,
}

impl Way {
    const fn new(name: &'static str, reduction: Reduction, rate: Rate, colour: &'static str) -> Self {
        Self { name, reduction, rate, colour, is_dashed: matches!(rate, Rate::Tuned) }
    }
}

pub(crate) const ADASUM: Way = Way::new("Adasum, one rank's rate", Reduction::Adasum, Rate::OfOne, "#009e73");
pub(crate) const ADASUM_TUNED: Way = Way::new("Adasum, tuned rate", Reduction::Adasum, Rate::Tuned, "#e69f00");
pub(crate) const MEAN: Way = Way::new("mean, one rank's rate", Reduction::Mean, Rate::OfOne, "#1f83c8");
pub(crate) const MEAN_TUNED: Way = Way::new("mean, tuned rate", Reduction::Mean, Rate::Tuned, "#56b4e9");
pub(crate) const SUM: Way = Way::new("sum, one rank's rate", Reduction::Sum, Rate::OfOne, "#d55e00");
const WHOLE: Way = Way::new("Adasum, all tensors as one vector", Reduction::AdasumWhole, Rate::Tuned, "#e69f00");
const NODES: Way = Way::new("mean in nodes of 8, Adasum across", Reduction::AdasumOfMeans, Rate::Tuned, "#cc79a7");
const STEPS: Way = Way::new("Adasum of the optimizers' steps", Reduction::AdasumOfSteps, Rate::Tuned, "#d55e00");

/// The lines of charts.
pub(crate) const LINES: [Way; 4] = [ADASUM, MEAN_TUNED, MEAN, SUM];

/// A table: ways by numbers of ranks.
#[derive(Clone, Debug)]
pub(crate) struct Family {
    pub(crate) name: &'static str,
    pub(crate) method: Method,
    /// The numbers of ranks besides 1.
    pub(crate) ranks: Vec<usize>,
    pub(crate) ways: Vec<Way>,
}

/// The size of a study.
#[derive(Clone, Debug)]
pub(crate) struct Scale {
    pub(crate) families: Vec<Family>,
    /// The candidates among [`rates`].
    pub(crate) rates: Range<usize>,
    /// Seeds with which every candidate is tried.
    pub(crate) first: Range<u64>,
    /// Further seeds for the best candidates.
    pub(crate) further: Range<u64>,
    /// Seeds of figures.
    pub(crate) figures: Vec<u64>,
    pub(crate) samples: usize,
}

/// Two passes over the training images.
const SAMPLES: usize = 110_000;
/// The accuracy of a guess, with which runs that diverged count in choices and charts.
pub(crate) const CHANCE: f64 = 1.0 / CLASSES as f64;

impl Scale {
    pub(crate) fn full() -> Self {
        let family = |name, method, ranks: &[usize], ways: &[Way]| Family {
            name,
            method,
            ranks: ranks.to_vec(),
            ways: ways.to_vec(),
        };
        // The most important family is first, because its runs are made first.
        let families = vec![
            family("sgd", Method::Sgd, &[4, 16, 64], &[ADASUM, ADASUM_TUNED, MEAN, MEAN_TUNED, SUM]),
            family("momentum", Method::Momentum, &[64], &[ADASUM, ADASUM_TUNED, MEAN, MEAN_TUNED]),
            family("adam", Method::Adam, &[64], &[ADASUM, ADASUM_TUNED, STEPS, MEAN, MEAN_TUNED]),
            family("variants", Method::Sgd, &[64], &[ADASUM_TUNED, WHOLE, NODES, MEAN_TUNED]),
        ];
        Self { families, rates: 0..5, first: 101..103, further: 103..107, figures: (1..9).collect(), samples: SAMPLES }
    }

    /// A few minutes on two cores.
    pub(crate) fn demo() -> Self {
        let families = vec![Family { name: "sgd", method: Method::Sgd, ranks: vec![4, 16, 64], ways: LINES.into() }];
        Self { families, rates: 0..4, first: 101..103, further: 103..106, figures: vec![1, 2, 3, 4], samples: SAMPLES }
    }

    /// Seconds, to check that everything runs.
    pub(crate) fn quick(mut self) -> Self {
        for family in &mut self.families {
            family.ranks.iter_mut().for_each(|ranks| *ranks = (*ranks).min(16));
            family.ranks.dedup();
        }
        Self { rates: 0..3, first: 101..102, further: 102..103, figures: vec![1, 2, 3], samples: SAMPLES / 40, ..self }
    }

    /// Replaces the numbers of ranks and the seeds of figures, if any are given. Variants keep only the given ones of their numbers, because
    /// they need whole nodes.
    pub(crate) fn with(mut self, ranks: &[usize], seeds: &[u64]) -> Self {
        for family in self.families.iter_mut().filter(|_| !ranks.is_empty()) {
            match family.ways.contains(&NODES) {
                true => family.ranks.retain(|own| ranks.contains(own)),
                false => family.ranks = ranks.to_vec(),
            }
        }
        if !seeds.is_empty() {
            self.figures = seeds.to_vec();
        }
        self
    }

    pub(crate) fn family(&self, name: &str) -> &Family {
        self.families.iter().find(|family| family.name == name).expect("names are constants")
    }
}

/// All candidates for a rate, each twice the last.
fn rates(method: Method) -> [f64; 5] {
    let lowest = match method {
        Method::Sgd => 0.1,
        Method::Momentum => 0.01,
        Method::Adam => 0.001,
    };
    [1.0, 2.0, 4.0, 8.0, 16.0].map(|factor| factor * lowest)
}

/// The study, given its finished runs.
#[derive(Clone, Copy)]
pub(crate) struct Study<'a> {
    pub(crate) scale: &'a Scale,
    pub(crate) runs: &'a Runs,
}

/// The search for an arm's rate: its runs that are determined so far, and the choice once they have all finished.
pub(crate) struct Search {
    runs: Vec<Spec>,
    pub(crate) best: Option<f64>,
    /// Whether the best rate is the lowest or the highest candidate.
    pub(crate) is_edge: bool,
}

/// An arm with its rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ArmAndRate {
    pub(crate) arm: Arm,
    pub(crate) rate: f64,
}

/// The result of a figure's runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Figure {
    Score(Interval),
    Diverged { runs: usize, of: usize },
    Missing,
}

impl Study<'_> {
    /// All runs that are determined so far.
    pub(crate) fn plan(&self) -> Vec<Spec> {
        let mut plan = Vec::new();
        for family in &self.scale.families {
            plan.extend(self.search(one(family.method)).runs);
            for ranks in family.all_ranks() {
                for way in &family.ways {
                    if ranks > 1 && way.rate == Rate::Tuned {
                        plan.extend(self.search(family.arm(way, ranks)).runs);
                    }
                    let figures = &self.scale.figures;
                    let place = self.place(family, way, ranks);
                    plan.extend(place.into_iter().flat_map(|place| self.specs(Purpose::Figure, place, figures)));
                }
            }
        }
        let mut unique: Vec<Spec> = Vec::new();
        plan.into_iter().for_each(|spec| {
            if !unique.contains(&spec) {
                unique.push(spec)
            }
        });
        unique
    }

    fn specs(&self, purpose: Purpose, ArmAndRate { arm, rate }: ArmAndRate, seeds: &[u64]) -> Vec<Spec> {
        let samples = self.scale.samples;
        seeds.iter().map(|&seed| Spec { purpose, arm, rate, seed, samples }).collect()
    }

    pub(crate) fn search(&self, arm: Arm) -> Search {
        let rates = &rates(arm.method)[self.scale.rates.clone()];
        let first: Vec<u64> = self.scale.first.clone().collect();
        let all: Vec<u64> = first.iter().copied().chain(self.scale.further.clone()).collect();
        let specs = |rate, seeds: &[u64]| self.specs(Purpose::Search, ArmAndRate { arm, rate }, seeds);
        let mut search =
            Search { runs: rates.iter().flat_map(|&rate| specs(rate, &first)).collect(), best: None, is_edge: false };
        let of_one = if arm.ranks == 1 { None } else { self.search(one(arm.method)).best };
        let mut finalists = self.ordered(rates, |rate| specs(rate, &first));
        if finalists.is_empty() || (arm.ranks > 1 && of_one.is_none()) {
            return search;
        }
        finalists.truncate(2);
        finalists.extend(of_one.filter(|rate| !finalists.contains(rate)));
        search.runs.extend(finalists.iter().flat_map(|&rate| specs(rate, &all[first.len()..])));
        let mut ordered = self.ordered(&finalists, |rate| specs(rate, &all)).into_iter();
        search.best = match of_one {
            None => ordered.next(),
            Some(of_one) => {
                ordered.find(|&rate| rate == of_one || self.is_better(&specs(rate, &all), &specs(of_one, &all)))
            }
        };
        search.is_edge = search.best.is_some_and(|best| best == rates[0] || best == rates[rates.len() - 1]);
        search
    }

    /// Whether runs are better than others with the same seeds beyond the noise of the seeds.
    fn is_better(&self, left: &[Spec], right: &[Spec]) -> bool {
        let pairs = self.scores(left).into_iter().flatten().zip(self.scores(right).into_iter().flatten());
        let differences: Vec<f64> = pairs.map(|(left, right)| left - right).collect();
        Interval::of(&differences).is_some_and(|interval| interval.mean > interval.half)
    }

    /// The rates by their mean scores, the best first, the lowest first of equal ones; none while a run is missing.
    fn ordered(&self, rates: &[f64], specs: impl Fn(f64) -> Vec<Spec>) -> Vec<f64> {
        let mean = |rate| {
            let scores = self.scores(&specs(rate))?;
            Some((scores.iter().sum::<f64>() / scores.len() as f64, rate))
        };
        let Some(mut means) = rates.iter().map(|&rate| mean(rate)).collect::<Option<Vec<_>>>() else {
            return Vec::new();
        };
        means.sort_by(|left, right| right.0.total_cmp(&left.0).then(left.1.total_cmp(&right.1)));
        means.into_iter().map(|(_, rate)| rate).collect()
    }

    /// The runs of these specifications, if all have finished.
    fn records(&self, specs: &[Spec]) -> Option<Vec<&Record>> {
        specs.iter().map(|spec| self.runs.get(spec)).collect()
    }

    /// The runs' accuracies, of which one that diverged has the accuracy of a guess; `None` while a run is missing.
    fn scores(&self, specs: &[Spec]) -> Option<Vec<f64>> {
        Some(self.records(specs)?.into_iter().map(|run| run.score().unwrap_or(CHANCE)).collect())
    }

    /// The runs of a place's figure, if all have finished.
    pub(crate) fn figure_runs(&self, place: Option<ArmAndRate>) -> Option<Vec<&Record>> {
        self.records(&self.specs(Purpose::Figure, place?, &self.scale.figures))
    }

    /// The arm and the rate of a way, once the rate is known; for one rank, all ways are equal.
    pub(crate) fn place(&self, family: &Family, way: &Way, ranks: usize) -> Option<ArmAndRate> {
        let of_one = self.search(one(family.method)).best?;
        if ranks == 1 {
            return Some(ArmAndRate { arm: one(family.method), rate: of_one });
        }
        let arm = family.arm(way, ranks);
        let rate = match way.rate {
            Rate::OfOne => of_one,
            Rate::Tuned => self.search(arm).best?,
        };
        Some(ArmAndRate { arm, rate })
    }

    pub(crate) fn figure(&self, family: &Family, way: &Way, ranks: usize) -> Figure {
        let Some(runs) = self.figure_runs(self.place(family, way, ranks)) else { return Figure::Missing };
        let scores: Vec<f64> = runs.iter().filter_map(|run| run.score()).collect();
        match Interval::of(&scores) {
            Some(interval) if scores.len() == runs.len() => Figure::Score(interval),
            _ => Figure::Diverged { runs: runs.len() - scores.len(), of: runs.len() },
        }
    }

    /// The mean difference of two ways over equal seeds; `None` if a run diverged or is missing.
    pub(crate) fn difference(&self, family: &Family, [left, right]: [&Way; 2], ranks: usize) -> Option<Interval> {
        let runs = |way| self.figure_runs(self.place(family, way, ranks));
        let pairs = runs(left)?.into_iter().zip(runs(right)?);
        let differences: Option<Vec<f64>> = pairs.map(|(left, right)| Some(left.score()? - right.score()?)).collect();
        Interval::of(&differences?)
    }
}

impl Family {
    /// 1 and all other numbers of ranks.
    pub(crate) fn all_ranks(&self) -> Vec<usize> {
        [&[1], self.ranks.as_slice()].concat()
    }

    pub(crate) fn arm(&self, way: &Way, ranks: usize) -> Arm {
        Arm { method: self.method, reduction: way.reduction, ranks }
    }
}

/// One rank, where all reductions are equal.
pub(crate) fn one(method: Method) -> Arm {
    Arm { method, reduction: Reduction::Mean, ranks: 1 }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::train::Outcome;

    /// A finished run with this accuracy; `None` stands for a run that diverged.
    pub(crate) fn record(spec: Spec, accuracy: Option<f64>) -> Record {
        let outcome = Outcome { steps: 1, loss: accuracy, accuracy, diverged: accuracy.is_none(), mass: Vec::new() };
        Record { spec, outcome, machine: "a machine".into(), commit: "1f97cc5".into() }
    }

    /// The runs of a simulated study, until its plan is complete.
    pub(crate) fn simulated(scale: &Scale, accuracy: impl Fn(&Spec) -> Option<f64>) -> Runs {
        let mut runs = Runs::default();
        loop {
            let mut new = Study { scale, runs: &runs }.plan();
            new.retain(|spec| runs.get(spec).is_none());
            if new.is_empty() {
                return runs;
            }
            runs.records.extend(new.into_iter().map(|spec| record(spec, accuracy(&spec))));
        }
    }

    /// The accuracy in a study in which every arm has this best rate, and high rates diverge.
    pub(crate) fn best_at(best: f64) -> impl Fn(&Spec) -> Option<f64> {
        move |spec| {
            let accuracy = 0.8 - (spec.rate / best).ln().abs() / 100.0 + spec.seed as f64 / 500.0;
            (spec.rate < 8.0 * best).then_some(accuracy)
        }
    }

    #[test]
    fn study_searches_every_arm_alike_with_seeds_of_no_figure() {
        let scale = Scale::full();
        let runs = simulated(&scale, best_at(0.2));
        let study = Study { scale: &scale, runs: &runs };
        let count =
            |arm, purpose| runs.records.iter().filter(|run| (run.spec.arm, run.spec.purpose) == (arm, purpose)).count();
        for family in &scale.families {
            for &ranks in &family.ranks {
                for way in family.ways.iter().filter(|way| way.rate == Rate::Tuned) {
                    let arm = family.arm(way, ranks);
                    assert_eq!(count(arm, Purpose::Search), 5 * 2 + 2 * 4, "{arm:?}");
                    let rates = [Some(0.2), Some(0.16), Some(0.016)];
                    assert!(rates.contains(&study.search(arm).best), "{arm:?}");
                }
            }
        }
        assert!(scale.first.clone().chain(scale.further.clone()).all(|seed| !scale.figures.contains(&seed)));
        let plan = study.plan();
        assert_eq!(plan.len(), runs.records.len());
    }

    /// The whole study must fit into some ten minutes of a machine with 16 processors.
    #[test]
    fn study_has_some_five_hundred_runs() {
        let scale = Scale::full();
        let runs = |index: usize| {
            let best = |arm: Arm| rates(arm.method)[if arm.ranks == 1 { 0 } else { index }];
            simulated(&scale, |spec| best_at(best(spec.arm))(spec)).records.len()
        };
        // From one rank's rate for every arm to another rate for every arm.
        let (fewest, most) = (runs(0), runs(4));
        assert!(fewest > 400 && most < 580, "{fewest} to {most} runs");
    }

    /// If time runs out, the first family's runs are there.
    #[test]
    fn plan_follows_the_order_of_the_families() {
        let scale = Scale::full();
        let runs = simulated(&scale, best_at(0.2));
        let plan = Study { scale: &scale, runs: &runs }.plan();
        let methods: Vec<Method> = plan.iter().map(|spec| spec.arm.method).collect();
        let is_sgd = |method: &&Method| **method == Method::Sgd;
        let first = methods.iter().take_while(is_sgd).count();
        let alone = Scale { families: vec![scale.family("sgd").clone()], ..scale.clone() };
        assert_eq!(Study { scale: &alone, runs: &runs }.plan(), plan[..first]);
        assert!(methods[first..].iter().skip_while(|method| !is_sgd(method)).all(|method| is_sgd(&method)));
    }

    #[test]
    fn plan_compares_nothing_before_the_rate_of_one_rank() {
        let scale = Scale::full();
        let plan = Study { scale: &scale, runs: &Runs::default() }.plan();
        assert!(plan.iter().all(|spec| spec.purpose == Purpose::Search));
        assert_eq!(plan.iter().filter(|spec| spec.arm.ranks == 1).count(), 3 * 5 * 2);
    }

    /// A tuned rate must not be worse than the rate of one rank because the search had a lucky run.
    #[test]
    fn search_chooses_no_rate_by_one_lucky_run() {
        let scale = Scale::demo();
        let lucky = |spec: &Spec| match (spec.arm.ranks, spec.rate, spec.seed) {
            (1, 0.2, _) => Some(0.88),
            (4, 0.2, _) => Some(0.80),
            // One rank's rate is only third by the first seeds.
            (4, 0.1 | 0.4, 101) => Some(0.99),
            (4, 0.8, _) => (spec.seed != 104).then_some(0.84),
            _ => Some(0.70),
        };
        let runs = simulated(&scale, lucky);
        let study = Study { scale: &scale, runs: &runs };
        let family = scale.family("sgd");
        assert_eq!(study.search(one(Method::Sgd)).best, Some(0.2));
        assert_eq!(study.search(family.arm(&MEAN_TUNED, 4)).best, Some(0.2));
        assert!(runs.records.iter().any(|run| (run.spec.arm.ranks, run.spec.rate, run.spec.seed) == (4, 0.2, 105)));
    }

    /// A rate whose mean is better only by the noise of the seeds does not replace one rank's, whose own choice needs no such proof.
    #[test]
    fn search_keeps_one_ranks_rate_within_the_noise() {
        let scale = Scale::demo();
        let chosen = |gain: f64| {
            let noise = |spec: &Spec| if spec.seed % 2 == 0 { 0.02 } else { -0.02 };
            let runs = simulated(&scale, |spec| match (spec.arm.ranks, spec.rate) {
                (1, 0.2) => Some(0.805 + noise(spec)),
                (_, 0.2) | (1, 0.4) => Some(0.80),
                (_, 0.4) => Some(0.80 + noise(spec) + gain),
                _ => Some(0.70),
            });
            let study = Study { scale: &scale, runs: &runs };
            [one(Method::Sgd), scale.family("sgd").arm(&MEAN_TUNED, 4)].map(|arm| study.search(arm).best)
        };
        // The five differences on 4 ranks have the mean `gain` − 0.4 points, ± 2.7.
        assert_eq!(chosen(0.03), [Some(0.2), Some(0.2)]);
        assert_eq!(chosen(0.033), [Some(0.2), Some(0.4)]);
    }

    #[test]
    fn figure_counts_diverged_runs_and_never_averages_them() {
        let scale = Scale::demo();
        let runs = simulated(&scale, |spec| match (spec.purpose, spec.arm.reduction, spec.arm.ranks) {
            (Purpose::Figure, Reduction::Sum, 4) => (spec.seed != 2).then_some(0.8),
            (Purpose::Figure, Reduction::Sum, _) => None,
            _ => best_at(0.2)(spec),
        });
        let (study, family) = (Study { scale: &scale, runs: &runs }, scale.family("sgd"));
        assert_eq!(study.figure(family, &SUM, 4), Figure::Diverged { runs: 1, of: 4 });
        assert_eq!(study.figure(family, &SUM, 16), Figure::Diverged { runs: 4, of: 4 });
        assert_eq!(study.figure(family, &SUM, 8), Figure::Missing);
        assert!(matches!(study.figure(family, &MEAN, 4), Figure::Score(_)));
        assert_eq!(study.difference(family, [&MEAN, &MEAN], 4), Some(Interval { mean: 0.0, half: 0.0 }));
        assert_eq!(study.difference(family, [&MEAN, &SUM], 4), None);
    }

    #[test]
    fn rates_are_written_as_people_write_them() {
        assert_eq!(rates(Method::Sgd), [0.1, 0.2, 0.4, 0.8, 1.6]);
        assert_eq!(rates(Method::Momentum), [0.01, 0.02, 0.04, 0.08, 0.16]);
        assert_eq!(rates(Method::Adam), [0.001, 0.002, 0.004, 0.008, 0.016]);
    }
}
