//! The report's four charts: which numbers they show, and between which bounds.
//!
//! Never draws: `charts.rs` does.

use crate::Outcome;
use crate::charts::{Axis, Chart, Line, Scale};
use crate::curve::Point;
use crate::search::Search;
use crate::table::MARK;
use crate::train::Run;

/// One line a mode, from its chosen run.
fn lines(outcome: &Outcome, value: impl Fn(&Point) -> Option<f64>) -> Vec<Line> {
    let line = |search: &Search| {
        let points = search.best().curve.iter();
        let points = points.filter_map(|point| Some((point.step as f64, value(point)?))).collect();
        Line { mode: search.mode, points }
    };
    outcome.searches.iter().map(line).collect()
}

fn steps_axis(outcome: &Outcome) -> Axis<'static> {
    Axis { title: "step", scale: Scale::Linear, range: 0.0..outcome.plan.steps as f64, percent: false }
}

fn smallest(lines: &[Line]) -> f64 {
    lines.iter().flat_map(|line| &line.points).map(|point| point.1).fold(f64::INFINITY, f64::min)
}

fn largest(lines: &[Line]) -> f64 {
    lines.iter().flat_map(|line| &line.points).map(|point| point.1).fold(f64::NEG_INFINITY, f64::max)
}

/// Training loss over the steps.
pub(crate) fn loss_chart(outcome: &Outcome) -> Chart<'static> {
    let lines = lines(outcome, |point| point.batch_loss);
    // Never narrower than a decade, and never down to a loss of zero, which has no logarithm.
    let bottom = smallest(&lines).clamp(1e-6, 0.5) * 0.8;
    let range = bottom..(largest(&lines) * 1.25).max(10.0 * bottom);
    let y = Axis { title: "training loss", scale: Scale::Log10, range, percent: false };
    let title = "Training loss over the steps, by mode";
    Chart { title, x: steps_axis(outcome), y, marks: Vec::new(), dots: false, lines }
}

/// Test accuracy over the steps.
pub(crate) fn accuracy_chart(outcome: &Outcome) -> Chart<'static> {
    let lines = lines(outcome, |point| Some(point.test.accuracy()));
    let y = Axis { title: "test accuracy", scale: Scale::Linear, range: 0.0..1.0, percent: true };
    let title = "Test accuracy over the steps, by mode";
    Chart { title, x: steps_axis(outcome), y, marks: vec![MARK as f64 / 100.0], dots: false, lines }
}

/// Validation loss over the learning rates.
pub(crate) fn rate_chart(outcome: &Outcome) -> Chart<'static> {
    const TOP: f64 = 3.0;
    let loss = |run: &Run| (f64::from(run.rate), run.validation_loss().unwrap_or(TOP).min(TOP));
    let line = |search: &Search| Line { mode: search.mode, points: search.runs.iter().map(loss).collect() };
    let lines: Vec<Line> = outcome.searches.iter().map(line).collect();
    let rates = || outcome.searches.iter().flat_map(|search| &search.runs).map(|run| f64::from(run.rate));
    let range = rates().fold(f64::INFINITY, f64::min) / 1.2..rates().fold(0.0, f64::max) * 1.2;
    let x = Axis { title: "learning rate", scale: Scale::Log2, range, percent: false };
    let bottom = (smallest(&lines) * 0.8).clamp(1e-6, 0.1);
    let y = Axis { title: "validation loss", scale: Scale::Log10, range: bottom..TOP, percent: false };
    Chart { title: "Validation loss by learning rate and mode", x, y, marks: Vec::new(), dots: true, lines }
}

/// How far from a mean Adasum was, over the steps. None where no run has weights to show.
pub(crate) fn scale_chart(outcome: &Outcome) -> Option<Chart<'static>> {
    let mut lines = lines(outcome, |point| point.adasum_scale);
    lines.retain(|line| !line.points.is_empty());
    if lines.is_empty() {
        return None;
    }
    let range = smallest(&lines).min(0.0)..(outcome.plan.ranks as f64).max(largest(&lines)) * 1.05;
    let y = Axis { title: "between mean and sum", scale: Scale::Linear, range, percent: false };
    let title = "Adasum between mean and sum, over the steps";
    Some(Chart { title, x: steps_axis(outcome), y, marks: vec![1.0, outcome.plan.ranks as f64], dots: false, lines })
}
