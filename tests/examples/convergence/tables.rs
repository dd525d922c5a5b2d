//! The study's tables and charts.

use crate::chart::{Axis, Chart, Line, Point};
use crate::lenet::LeNet;
use crate::study::{ADASUM, CHANCE, Family, Figure, MEAN, MEAN_TUNED, Rate, SUM, Study, Way, one};
use crate::table::{Interval, NONE, Table};
use crate::train::MARKS;

impl Study<'_> {
    /// A table with a column for each number of ranks.
    fn by_ranks(ranks: &[usize], rows: Vec<(String, Vec<String>)>) -> Table {
        let headings = std::iter::once("ranks".to_owned()).chain(ranks.iter().map(usize::to_string)).collect();
        let rows = rows.into_iter().map(|(name, cells)| std::iter::once(name).chain(cells).collect());
        Table { headings, rows: rows.collect() }
    }

    /// The accuracies of ways by numbers of ranks.
    pub(crate) fn table(&self, family: &Family) -> Table {
        let ranks = family.all_ranks();
        let cells = |way| ranks.iter().map(|&ranks| self.figure(family, way, ranks).cell()).collect();
        Self::by_ranks(&ranks, family.ways.iter().map(|way| (way.name.to_owned(), cells(way))).collect())
    }

    /// The rates that the searches chose.
    pub(crate) fn rates_table(&self, family: &Family) -> Table {
        let ranks = family.all_ranks();
        let tuned = family.ways.iter().filter(|way| way.rate == Rate::Tuned);
        let cell = |way: &Way, ranks| {
            let search = self.search(if ranks == 1 { one(family.method) } else { family.arm(way, ranks) });
            let edge = if search.is_edge { ", the end of the list" } else { "" };
            search.best.map_or(NONE.into(), |best| format!("{best}{edge}"))
        };
        let row = |way: &Way| (way.name.to_owned(), ranks.iter().map(|&ranks| cell(way, ranks)).collect());
        Self::by_ranks(&ranks, tuned.map(row).collect())
    }

    /// Pairs of ways by numbers of ranks: the first way's accuracy minus the second's.
    pub(crate) fn differences(&self, family: &Family, pairs: &[[&Way; 2]]) -> Table {
        let row = |&pair: &[&Way; 2]| {
            let difference = |&ranks: &usize| self.difference(family, pair, ranks).map(Interval::difference);
            let cells = family.ranks.iter().map(|ranks| difference(ranks).unwrap_or(NONE.into())).collect();
            (format!("{} − {}", pair[0].name, pair[1].name), cells)
        };
        Self::by_ranks(&family.ranks, pairs.iter().map(row).collect())
    }

    /// Accuracy against ranks. Runs that diverged count as guesses.
    pub(crate) fn ranks_chart(&self, family: &Family, ways: &[Way]) -> Chart {
        let point = |way: &Way, ranks: usize| {
            let runs = self.figure_runs(self.place(family, way, ranks))?;
            let scores: Vec<f64> = runs.iter().map(|run| run.score().unwrap_or(CHANCE)).collect();
            let Interval { mean, half } = Interval::of(&scores)?;
            // If some runs diverged and others did not, an interval around their mean is meaningless.
            let is_mixed = runs.iter().any(|run| run.score().is_none());
            Some(Point { x: (ranks as f64).log2(), y: mean, half: if is_mixed { 0.0 } else { half } })
        };
        let ranks = family.all_ranks();
        let line = |way: &Way| {
            let points = ranks.iter().filter_map(|&ranks| point(way, ranks)).collect();
            Line { name: way.name.into(), colour: way.colour, is_dashed: way.is_dashed, points }
        };
        let x = ranks.iter().map(|&ranks| ((ranks as f64).log2(), ranks.to_string())).collect();
        let y = (0..=10).map(|tenth| (f64::from(tenth) / 10.0, format!("{} %", 10 * tenth)));
        Chart {
            title: "Accuracy against ranks".into(),
            x: Axis { title: "ranks, each with its own batch of 32", ticks: x },
            y: Axis { title: "accuracy on test images", ticks: y.collect() },
            lines: ways.iter().map(line).collect(),
            legend: [0.6, 0.17],
        }
    }

    /// The position of Adasum between mean and sum, layer by layer, over the course of a run; `None` while runs are missing.
    pub(crate) fn mass_chart(&self, family: &Family, ranks: usize) -> Option<Chart> {
        const COLOURS: [&str; 5] = ["#cc79a7", "#e69f00", "#009e73", "#1f83c8", "#d55e00"];
        let runs = self.figure_runs(self.place(family, &ADASUM, ranks))?;
        let point = |layer: usize, mark: usize| {
            // The index selects the weights, which come before the bias of their layer.
            let masses: Option<Vec<f64>> =
                runs.iter().map(|run| Some(run.outcome.mass.get(mark)?[2 * layer])).collect();
            let Interval { mean, half } = Interval::of(&masses?)?;
            Some(Point { x: (mark as f64 + 0.5) / MARKS as f64, y: mean, half })
        };
        let line = |(layer, colour)| {
            let (name, _) = LeNet::tensors().swap_remove(2 * layer);
            let points: Option<Vec<Point>> = (0..MARKS).map(|mark| point(layer, mark)).collect();
            Some(Line { name, colour, is_dashed: false, points: points? })
        };
        let part = |quarter: u32| (f64::from(quarter) / 4.0, format!("{} %", 25 * quarter));
        let y = |quarter: usize| ((quarter * ranks / 4) as f64, (quarter * ranks / 4).to_string());
        Some(Chart {
            title: format!("Sum of Adasum's weights over a run, {ranks} ranks"),
            x: Axis { title: "part of the run", ticks: (0..=4).map(part).collect() },
            y: Axis { title: "1: mean; number of ranks: sum", ticks: (0..=4).map(y).collect() },
            lines: COLOURS.into_iter().enumerate().map(line).collect::<Option<_>>()?,
            legend: [0.3, 0.65],
        })
    }

    /// The result at the largest number of ranks, in short lines; `None` while figures are missing.
    pub(crate) fn headline(&self, family: &Family) -> Option<String> {
        let most = *family.ranks.last()?;
        let text = |way, ranks| match self.figure(family, way, ranks) {
            Figure::Score(interval) => Some(format!("gets {} %", interval.percent())),
            Figure::Diverged { runs, of } if runs == of => Some("diverges".to_owned()),
            Figure::Diverged { runs, of } => Some(format!("diverges in {runs} of {of} runs")),
            Figure::Missing => None,
        };
        let is_kept = self.place(family, &MEAN_TUNED, most) == self.place(family, &MEAN, most);
        let mean = match is_kept {
            true => {
                format!("{} at the same rate, and a search for {most} ranks found no better one", text(&MEAN, most)?)
            }
            false => format!(
                "{} at the same rate, and {} at the best\nrate of a search for {most} ranks",
                text(&MEAN, most)?,
                text(&MEAN_TUNED, most)?
            ),
        };
        Some(format!(
            "One rank {} of the test images right, at the learning rate that is best for it.\n\
             On {most} ranks, with as many images seen, Adasum {} at the same rate. The mean\n\
             {mean}. The sum {}.",
            text(&ADASUM, 1)?,
            text(&ADASUM, most)?,
            text(&SUM, most)?,
        ))
    }
}

impl Figure {
    /// Accuracy in per cent.
    fn cell(self) -> String {
        match self {
            Self::Score(interval) => interval.percent(),
            Self::Diverged { runs, of } if runs == of => "diverged".into(),
            Self::Diverged { runs, of } => format!("{runs} of {of} diverged"),
            Self::Missing => NONE.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::tests::{best_at, simulated};
    use crate::study::{LINES, Scale};

    #[test]
    fn table_and_charts_have_every_way() {
        let scale = Scale::full();
        let runs = simulated(&scale, best_at(0.2));
        let study = Study { scale: &scale, runs: &runs };
        for family in &scale.families {
            let table = study.table(family);
            let size = (family.ranks.len() + 2, family.ways.len());
            assert_eq!((table.headings.len(), table.rows.len()), size);
            assert!(table.rows.iter().flatten().all(|cell| cell != NONE), "{}", table.text());
        }
        let sgd = scale.family("sgd");
        assert!(study.ranks_chart(sgd, &LINES).lines.iter().all(|line| line.points.len() == 4));
        assert!(study.mass_chart(sgd, 16).is_none(), "simulated runs have no weights");
        assert_eq!(study.rates_table(sgd).rows[1], ["mean, tuned rate", "0.2", "0.2", "0.2", "0.2"]);
        let differences = study.differences(sgd, &[[&ADASUM, &MEAN]]);
        assert_eq!(differences.rows[0][..2], ["Adasum, one rank's rate − mean, one rank's rate", "(+0.0 ± 0.0)"]);
        let headline = study.headline(sgd).unwrap();
        assert!(headline.contains("On 64 ranks") && headline.contains("One rank gets 80.9 ± 0.4 %"), "{headline}");
    }
}
