//! The figures of a study: means over seeds, paired differences over equal seeds, and their charts.
//!
//! Every comparison has [`LEAST`] seeds or more, and runs that diverged are counted separately, never averaged.

use crate::charts::{self, Axis, Chart, Line, Point};
use crate::plan::{Arm, Purpose, Reduction, Task};
use crate::results::Record;
use crate::statistics::{Interval, LEAST};
use crate::study::{Family, LARGEST_FACTOR, Searched, Study, scaled, score};
use crate::table::{NONE, Table};
use crate::train::MARKS;

use plotters::prelude::{RGBColor, SeriesLabelPosition};

/// The accuracy of a random guess.
const CHANCE: f64 = 1.0 / crate::images::CLASSES as f64;

/// The result of a figure's runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Figure {
    Score(Interval),
    Diverged { runs: usize, of: usize },
    Missing,
}

/// An arm with its learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Place {
    pub(crate) arm: Arm,
    pub(crate) rate: f64,
}

/// A reduction and a choice of its rate, over numbers of ranks: a row of a table, a line of a chart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Way {
    pub(crate) name: &'static str,
    pub(crate) reduction: Reduction,
    pub(crate) choice: Choice,
    colour: RGBColor,
    is_dashed: bool,
}

/// The choice of a rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Choice {
    /// The rate of one rank, multiplied by this factor.
    Transferred(f64),
    /// The best rate of the list at this number of ranks.
    Tuned,
}

impl Way {
    const fn new(name: &'static str, reduction: Reduction, choice: Choice, colour: RGBColor, is_dashed: bool) -> Self {
        Self { name, reduction, choice, colour, is_dashed }
    }
}

use Choice::{Transferred, Tuned};

pub(crate) const ADASUM: Way =
    Way::new("Adasum, one rank's rate", Reduction::Adasum, Transferred(1.0), charts::GREEN, false);
pub(crate) const MEAN: Way = Way::new("mean, one rank's rate", Reduction::Mean, Transferred(1.0), charts::BLUE, false);
pub(crate) const SUM: Way =
    Way::new("sum, one rank's rate", Reduction::Sum, Transferred(1.0), charts::VERMILION, false);
pub(crate) const MEAN_TUNED: Way =
    Way::new("mean, tuned again at each number of ranks", Reduction::Mean, Tuned, charts::SKY, true);
pub(crate) const ADASUM_TUNED: Way =
    Way::new("Adasum, tuned again at each number of ranks", Reduction::Adasum, Tuned, charts::ORANGE, true);
const ADASUM_LARGER: Way =
    Way::new("Adasum, one rank's rate × 2.5", Reduction::Adasum, Transferred(LARGEST_FACTOR), charts::PINK, true);
pub(crate) const TREE: Way =
    Way::new("Adasum by the tree, one rank's rate", Reduction::AdasumTree, Transferred(1.0), charts::GREEN, true);
const TREE_LARGER: Way = Way::new(
    "Adasum by the tree, one rank's rate × 2.5",
    Reduction::AdasumTree,
    Transferred(LARGEST_FACTOR),
    charts::PINK,
    true,
);

/// The rows of the large tables.
pub(crate) const WAYS: [Way; 8] = [ADASUM, ADASUM_TUNED, MEAN, MEAN_TUNED, SUM, ADASUM_LARGER, TREE, TREE_LARGER];
/// The lines of the charts.
pub(crate) const LINES: [Way; 4] = [ADASUM, MEAN_TUNED, MEAN, SUM];

impl Study<'_> {
    /// 1 and all other numbers of ranks of the plan, in increasing order.
    pub(crate) fn all_ranks(&self) -> Vec<usize> {
        let mut ranks = [&[1], self.scale.ranks.as_slice()].concat();
        ranks.sort_unstable();
        ranks
    }

    /// The arm and the rate of a way; for one rank, all ways are equal.
    pub(crate) fn place(&self, family: Family, way: Way, ranks: usize) -> Option<Place> {
        let of_one = self.rate_of_one(family)?;
        if ranks == 1 {
            return Some(Place { arm: family.arm(Reduction::Mean, 1), rate: of_one });
        }
        let arm = family.arm(way.reduction, ranks);
        let rate = match way.choice {
            Transferred(factor) => scaled(of_one, factor),
            Tuned => self.best(arm, &self.rates_of(family, arm)?)?,
        };
        Some(Place { arm, rate })
    }

    /// The list of candidate rates of an arm.
    pub(crate) fn rates_of(&self, family: Family, arm: Arm) -> Option<Vec<f64>> {
        let has_grid = family.task == Task::Images
            && arm.method == family.method
            && matches!(arm.reduction, Reduction::Mean | Reduction::Adasum);
        if has_grid || arm.ranks == 1 { Some(self.scale.rates(family)) } else { self.neighbours(family, arm.ranks) }
    }

    fn records(&self, Place { arm, rate }: Place) -> Vec<&Record> {
        let runs = self.results.of(arm, Purpose::Figure, self.samples(arm));
        runs.filter(|record| record.spec.rate == rate).collect()
    }

    pub(crate) fn figure(&self, place: Option<Place>) -> Figure {
        let records = place.map(|place| self.records(place)).unwrap_or_default();
        if records.len() < LEAST {
            return Figure::Missing;
        }
        let scores: Vec<f64> = records.iter().filter_map(|record| score(record)).collect();
        match Interval::of(&scores) {
            Some(interval) if scores.len() == records.len() => Figure::Score(interval),
            _ => Figure::Diverged { runs: records.len() - scores.len(), of: records.len() },
        }
    }

    /// The mean difference of two places over the seeds that both have; `None` if a run diverged.
    pub(crate) fn difference(&self, left: Option<Place>, right: Option<Place>) -> Option<Interval> {
        let (left, right) = (self.records(left?), self.records(right?));
        let mut differences = Vec::new();
        for record in left {
            let Some(other) = right.iter().find(|other| other.spec.seed == record.spec.seed) else { continue };
            differences.push(score(record)? - score(other)?);
        }
        Interval::of(&differences)
    }

    /// A table of ways by numbers of ranks.
    pub(crate) fn table(&self, family: Family, ways: &[Way]) -> Table {
        let ranks = self.all_ranks();
        let mut table = Table::new(std::iter::once("ranks".to_owned()).chain(ranks.iter().map(ToString::to_string)));
        for &way in ways {
            let cells = ranks.iter().map(|&ranks| cell(family.task, self.figure(self.place(family, way, ranks))));
            table.rows.push(std::iter::once(way.name.to_owned()).chain(cells).collect());
        }
        table
    }

    /// A table of pairs of ways by numbers of ranks: the first way's figure minus the second's.
    pub(crate) fn differences(&self, family: Family, pairs: &[(Way, Way)]) -> Table {
        let ranks: Vec<usize> = self.all_ranks().into_iter().filter(|&ranks| ranks > 1).collect();
        let mut table = Table::new(std::iter::once("ranks".to_owned()).chain(ranks.iter().map(ToString::to_string)));
        for &(left, right) in pairs {
            let place = |way, ranks| self.place(family, way, ranks);
            let of = |&ranks: &usize| self.difference(place(left, ranks), place(right, ranks));
            let cells = ranks.iter().map(of).map(|difference| signed(family.task, difference));
            table.rows.push(std::iter::once(format!("{} − {}", left.name, right.name)).chain(cells).collect());
        }
        table
    }

    /// The best rate of the search, and the rates with a score within one point of the best score.
    pub(crate) fn rates_table(&self, family: Family) -> Table {
        let mut table = Table::new(["way", "ranks", "best rate", "within one point of it"]);
        let arms = self.all_ranks().into_iter().flat_map(|ranks| {
            let reductions: &[Reduction] =
                if ranks == 1 { &[Reduction::Mean] } else { &[Reduction::Adasum, Reduction::Mean] };
            reductions.iter().map(move |&reduction| family.arm(reduction, ranks))
        });
        for arm in arms {
            let rates = self.scale.rates(family);
            let Some(best) = self.best(arm, &rates) else { continue };
            let scores: Vec<(f64, f64)> = rates
                .iter()
                .filter_map(|&rate| match self.searched(arm, rate) {
                    Searched::Score(score) => Some((rate, score)),
                    _ => None,
                })
                .collect();
            let most = scores.iter().map(|(_, score)| *score).fold(f64::NEG_INFINITY, f64::max);
            let near: Vec<f64> =
                scores.into_iter().filter(|(_, score)| *score >= most - 0.01).map(|(rate, _)| rate).collect();
            let edge = if best == rates[0] || best == rates[rates.len() - 1] { ", the end of the list" } else { "" };
            let name = match (arm.ranks, arm.reduction) {
                (1, _) => "one rank",
                (_, Reduction::Mean) => "mean",
                _ => "Adasum",
            };
            let range = match near[..] {
                [only] => only.to_string(),
                [first, .., last] => format!("{first} to {last}"),
                [] => continue,
            };
            table.rows.push(vec![name.into(), arm.ranks.to_string(), format!("{best}{edge}"), range]);
        }
        table
    }

    /// A table of all ways at [`Scale::extra_ranks`], each with the best rate of its list.
    pub(crate) fn variants_table(&self, family: Family) -> Table {
        let ranks = &self.scale.extra_ranks;
        let mut headings = vec!["way".to_owned()];
        headings.extend(ranks.iter().map(|ranks| format!("{ranks} ranks")));
        let mut table = Table::new(headings);
        let one = family.arm(Reduction::Mean, 1);
        let of_one = self.figure(self.rate_of_one(family).map(|rate| Place { arm: one, rate }));
        if of_one != Figure::Missing {
            let cells = ranks.iter().map(|_| cell(family.task, of_one));
            table.rows.push(std::iter::once("one rank, for comparison".to_owned()).chain(cells).collect());
        }
        let deltas = family.deltas();
        let variants = [
            (family, Reduction::Adasum, "Adasum of gradients, tensor by tensor"),
            (family, Reduction::AdasumWhole, "Adasum of gradients, all tensors as one"),
            (family, Reduction::AdasumOfSums, "sum in nodes of 8, Adasum across"),
            (family, Reduction::AdasumOfMeans, "mean in nodes of 8, Adasum across"),
            (deltas.unwrap_or(family), Reduction::Adasum, "Adasum of the ranks' optimizer steps (deltas)"),
            (family, Reduction::Mean, "mean"),
        ];
        for (index, (variant, reduction, name)) in variants.into_iter().enumerate() {
            if index == 4 && deltas.is_none() {
                continue;
            }
            let mut row = vec![name.to_owned()];
            for &ranks in ranks {
                let arm = variant.arm(reduction, ranks);
                let rates = self.rates_of(family, arm);
                let best = rates.as_ref().and_then(|rates| self.best(arm, rates));
                let figure = self.figure(best.map(|rate| Place { arm, rate }));
                let edge = best.zip(rates).is_some_and(|(best, rates)| best == rates[0] || Some(&best) == rates.last());
                let mark = if edge { ", at the end of its list" } else { "" };
                row.push(match (figure, best) {
                    (Figure::Missing, _) | (_, None) => NONE.into(),
                    (figure, Some(best)) => format!("{} (rate {best}{mark})", cell(family.task, figure)),
                });
            }
            if row[1..].iter().any(|cell| cell != NONE) {
                table.rows.push(row);
            }
        }
        table
    }

    /// The number of steps until `target` of the validation samples are classified correctly, by ways and ranks.
    pub(crate) fn steps_table(&self, family: Family, ways: &[Way], target: f64) -> Table {
        let ranks = self.all_ranks();
        let mut table = Table::new(std::iter::once("ranks".to_owned()).chain(ranks.iter().map(ToString::to_string)));
        for &way in ways {
            let cells = ranks.iter().map(|&ranks| {
                let Some(place) = self.place(family, way, ranks) else { return NONE.into() };
                let records = self.records(place);
                let reached = |record: &&Record| {
                    let mark = record.outcome.curve.iter().position(|(_, accuracy)| *accuracy >= target)?;
                    Some(((mark + 1) * record.outcome.steps).div_ceil(MARKS))
                };
                let mut steps: Vec<Option<usize>> = records.iter().map(reached).collect();
                if steps.len() < LEAST {
                    return NONE.into();
                }
                steps.sort_by_key(|steps| steps.unwrap_or(usize::MAX));
                let total = records[0].outcome.steps;
                steps[steps.len() / 2].map_or("not reached".into(), |steps| format!("{steps} of {total}"))
            });
            table.rows.push(std::iter::once(way.name.to_owned()).chain(cells).collect());
        }
        table
    }

    /// A chart of accuracy against ranks. Runs that diverged count with the accuracy of a random guess.
    pub(crate) fn ranks_chart(&self, family: Family, ways: &[Way]) -> Chart {
        let line = |&way: &Way| {
            let point = |ranks: usize| {
                let records = self.place(family, way, ranks).map(|place| self.records(place)).unwrap_or_default();
                let scores: Vec<f64> = records.iter().map(|record| score(record).unwrap_or(CHANCE)).collect();
                // If some runs diverged and others did not, an interval around their mean is meaningless.
                let is_mixed = records.iter().any(|record| record.outcome.diverged);
                let half = |half| if is_mixed { 0.0 } else { half };
                let interval = Interval::of(&scores)?;
                Some(Point { x: ranks as f64, y: interval.mean, half: half(interval.half) })
            };
            let points = self.all_ranks().into_iter().filter_map(point).collect();
            Line { name: way.name.into(), colour: way.colour, is_dashed: way.is_dashed, points }
        };
        let ranks = self.all_ranks();
        let range = 1.0..*ranks.last().expect("there is 1") as f64;
        Chart {
            title: "Accuracy against ranks".into(),
            x: Axis {
                title: "ranks, each with its own batch of 32".into(),
                scale: charts::Scale::Log2,
                range,
                percent: false,
            },
            y: Axis {
                title: "accuracy on test images".into(),
                scale: charts::Scale::Linear,
                range: 0.0..1.0,
                percent: true,
            },
            lines: ways.iter().map(line).collect(),
            legend: SeriesLabelPosition::LowerLeft,
        }
    }

    /// The position of Adasum between mean and sum, layer by layer, over the course of a run.
    pub(crate) fn mass_chart(&self, family: Family, ranks: usize) -> Option<Chart> {
        const COLOURS: [RGBColor; 5] = [charts::PINK, charts::ORANGE, charts::GREEN, charts::BLUE, charts::VERMILION];
        let records = self.records(self.place(family, ADASUM, ranks)?);
        if records.len() < LEAST || records.iter().any(|record| record.outcome.mass.len() < MARKS) {
            return None;
        }
        let line = |(layer, colour): (usize, RGBColor)| {
            let point = |mark: usize| {
                // The index selects the weights, which come before the bias of their layer.
                let masses: Vec<f64> = records.iter().map(|record| record.outcome.mass[mark][2 * layer]).collect();
                let Interval { mean, half } = Interval::of(&masses)?;
                Some(Point { x: (mark as f64 + 0.5) / MARKS as f64, y: mean, half })
            };
            let points = (0..MARKS).filter_map(point).collect();
            let (name, _) = crate::lenet::LeNet::tensors().swap_remove(2 * layer);
            Line { name, colour, is_dashed: false, points }
        };
        let percent =
            |title: &str| Axis { title: title.into(), scale: charts::Scale::Linear, range: 0.0..1.0, percent: true };
        let range = 0.0..ranks as f64;
        Some(Chart {
            title: format!("Sum of Adasum's weights over a run, {ranks} ranks"),
            x: percent("part of the run"),
            y: Axis { title: format!("1: mean, {ranks}: sum"), scale: charts::Scale::Linear, range, percent: false },
            lines: COLOURS.into_iter().enumerate().map(line).collect(),
            legend: SeriesLabelPosition::UpperMiddle,
        })
    }
}

/// Accuracy in per cent, or loss.
pub(crate) fn cell(task: Task, figure: Figure) -> String {
    match (figure, task) {
        (Figure::Score(Interval { mean, half }), Task::Images) => format!("{:.1} ± {:.1}", 100.0 * mean, 100.0 * half),
        (Figure::Score(Interval { mean, half }), Task::Text) => format!("{:.3} ± {half:.3}", -mean),
        (Figure::Diverged { runs, of }, _) if runs == of => "diverged".into(),
        (Figure::Diverged { runs, of }, _) => format!("{runs} of {of} diverged"),
        (Figure::Missing, _) => NONE.into(),
    }
}

/// A difference, with a mark if it may be zero.
fn signed(task: Task, difference: Option<Interval>) -> String {
    let Some(interval) = difference else { return NONE.into() };
    let Interval { mean, half } = interval;
    let text = match task {
        Task::Images => format!("{:+.1} ± {:.1}", 100.0 * mean, 100.0 * half),
        Task::Text => format!("{:+.3} ± {half:.3}", -mean),
    };
    let text = text.replace('-', "−");
    if interval.has_zero() { format!("({text})") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Spec;
    use crate::results::Results;
    use crate::study::Scale;
    use crate::study::tests::{record, simulated};

    #[test]
    fn runs_that_diverged_are_counted_and_two_seeds_are_no_figure() {
        let (scale, arm) = (Scale::full(), Family::IMAGES_SGD.arm(Reduction::Sum, 16));
        let mut results = Results::default();
        let mut add = |rate, scores: &[Option<f64>]| {
            for (seed, &score) in (1..).zip(scores) {
                let spec = Spec { purpose: Purpose::Figure, arm, rate, seed, samples: 110_000 };
                results.records.push(record(spec, score));
            }
        };
        add(0.1, &[Some(0.8), Some(0.9), Some(0.7)]);
        add(0.2, &[Some(0.8), None, Some(0.7)]);
        add(0.4, &[None; 3]);
        add(0.8, &[Some(0.8), Some(0.9)]);
        let study = Study { scale: &scale, results: &results };
        let text = |rate| cell(Task::Images, study.figure(Some(Place { arm, rate })));
        assert_eq!([0.1, 0.2, 0.4, 0.8, 1.6].map(text), ["80.0 ± 24.8", "1 of 3 diverged", "diverged", "–", "–"]);
        let difference =
            |left, right| study.difference(Some(Place { arm, rate: left }), Some(Place { arm, rate: right }));
        assert_eq!(difference(0.1, 0.1), Some(Interval { mean: 0.0, half: 0.0 }));
        assert_eq!([difference(0.1, 0.2), difference(0.1, 0.8)], [None, None]);
    }

    #[test]
    fn tables_and_charts_have_every_way() {
        let scale = Scale::full();
        let results = simulated(&scale, 0.1);
        let study = Study { scale: &scale, results: &results };
        let table = study.table(Family::IMAGES_SGD, &WAYS);
        assert_eq!((table.headings.len(), table.rows.len()), (7, WAYS.len()));
        assert!(table.rows.iter().flatten().all(|cell| cell != NONE), "{}", table.text());
        let chart = study.ranks_chart(Family::IMAGES_SGD, &LINES);
        assert!(chart.lines.iter().all(|line| line.points.len() == 6));
        let variants = study.variants_table(Family::IMAGES_MOMENTUM);
        assert_eq!(variants.rows.len(), 7, "{}", variants.text());
        let rates = study.rates_table(Family::IMAGES_SGD);
        assert_eq!(rates.rows[0], ["one rank", "1", "0.1", "0.05 to 0.2"]);
    }
}
