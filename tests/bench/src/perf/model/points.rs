//! The input of `--fit`: rows of `--json` files as points of the cost model, with the error of the fit at each of them.

use std::fs;
use std::path::Path;

use gradsync::plan::cost::{self, Parameters, Scheme, Work, Workload, World};
use serde::Serialize;
use serde::de::IgnoredAny;

use super::fit::{self, Fit, Point};
use crate::perf::PerfError;
use crate::perf::record::{Document, Measurement, SCHEMA};
use crate::perf::sizes;
use gradsync_cli::text;

/// A measured row, and the fit's prediction for it.
#[derive(Debug, Serialize)]
pub(super) struct Residual {
    /// Operation, place, dtype and reduction.
    row: String,
    size_bytes: usize,
    measured_us: f64,
    model_us: f64,
    /// The relative error of the prediction.
    error: f64,
    /// The relative error of the model that is fitted to all other rows.
    left_out_error: Option<f64>,
}

/// The fit to the rows of some files.
#[derive(Debug, Serialize)]
pub(super) struct FitReport {
    /// The root mean square of the relative errors.
    pub(super) error: f64,
    pub(super) left_out_error: f64,
    /// The median of the absolute relative errors.
    median_error: f64,
    /// The number of rows for which the model has no formula.
    pub(super) unknown_rows: usize,
    residuals: Vec<Residual>,
}

/// Fits the model to the files; without files, the result is the default model.
pub(super) fn fit(files: &[impl AsRef<Path>], ranks_per_node: usize) -> Result<(Fit, Option<FitReport>), PerfError> {
    let mut measurements = Vec::new();
    for file in files {
        measurements.extend(read(file.as_ref())?);
    }
    if files.is_empty() {
        return Ok((fit::fit(&[], Parameters::default()), None));
    }
    // GPUs and CPUs are different machines: if there are rows of GPUs, only those are used.
    let has_gpus = measurements.iter().any(|row| row.backend == "cuda");
    measurements.retain(|row| !has_gpus || row.backend == "cuda");
    let known = if has_gpus { Parameters::default() } else { fit::PROCESSORS };
    let rows: Vec<(&Measurement, Point)> =
        measurements.iter().filter_map(|row| Some((row, point(row, ranks_per_node)?))).collect();
    if rows.is_empty() {
        return Err(PerfError::Arguments("--fit: the files hold no row that the model knows".into()));
    }
    let points: Vec<Point> = rows.iter().map(|(_, point)| *point).collect();
    let fit = fit::fit(&points, known);
    let left_out = fit::leave_one_out(&points, known);
    let squares = left_out.iter().flatten().map(|error| error * error);
    let left_out_error = (squares.sum::<f64>() / left_out.iter().flatten().count().max(1) as f64).sqrt();
    let residual = |((row, point), left_out_error): (&(&Measurement, Point), Option<f64>)| Residual {
        row: label(row),
        size_bytes: row.size_bytes,
        measured_us: point.seconds * 1e6,
        model_us: fit.parameters.time(&point.work) * 1e6,
        error: point.error(&fit.parameters),
        left_out_error,
    };
    let mut errors: Vec<f64> = points.iter().map(|point| point.error(&fit.parameters).abs()).collect();
    errors.sort_by(f64::total_cmp);
    let report = FitReport {
        error: fit.error,
        left_out_error,
        median_error: errors[(errors.len() - 1) / 2],
        unknown_rows: measurements.len() - rows.len(),
        residuals: rows.iter().zip(left_out).map(residual).collect(),
    };
    Ok((fit, Some(report)))
}

impl FitReport {
    pub(super) fn points(&self) -> usize {
        self.residuals.len()
    }

    /// Each row with the model's prediction.
    pub(super) fn lines(&self) -> String {
        let mut text = format!(
            "\n# the fit; each row beside the model of all rows, and of all rows but itself\n#{:>44} {:>10} {:>12} {:>12} {:>8} {:>10}\n",
            "row", "size", "measured us", "model us", "off", "left out"
        );
        for Residual { row, size_bytes, measured_us, model_us, error, left_out_error } in &self.residuals {
            let percent = |error: f64| format!("{:+.1} %", 100.0 * error);
            let left_out = left_out_error.map_or("N/A".into(), percent);
            text += &format!(
                " {row:>44} {:>10} {measured_us:>12.2} {model_us:>12.2} {:>8} {left_out:>10}\n",
                sizes::shown(*size_bytes),
                percent(*error),
            );
        }
        let (off, left_out) = (100.0 * self.error, 100.0 * self.left_out_error);
        let half = 100.0 * self.median_error;
        text += &format!(
            "# root mean square: {off:.1} % off, {left_out:.1} % off rows that were left out; half of the rows: {half:.1} % at most\n"
        );
        if self.unknown_rows > 0 {
            text += &format!("# rows that the model has no formula for: {}\n", self.unknown_rows);
        }
        text
    }
}

fn label(row: &Measurement) -> String {
    let place = row.transport.as_ref().map_or(row.backend.clone(), |name| format!("{} over {name}", row.backend));
    let redop = if row.redop == "none" { String::new() } else { format!(" {}", row.redop) };
    let nodes = row.ranks_per_node.map_or(String::new(), |per_node| format!(", {per_node} a node"));
    // Names in a file are arbitrary text, which must be escaped.
    text::shown(&format!("{} {}{redop}, {place}, {} ranks{nodes}", row.operation, row.types(), row.ranks)).to_string()
}

fn read(path: &Path) -> Result<Vec<Measurement>, PerfError> {
    let refused = |reason: String| PerfError::File { path: path.into(), reason };
    let text = fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
    let document: Document<IgnoredAny> = serde_json::from_str(&text)
        .map_err(|error| refused(format!("not what `cargo xtask perf --json` writes: {error}")))?;
    if document.schema != SCHEMA {
        return Err(refused(format!("schema {}, and this program knows {SCHEMA}", document.schema)));
    }
    for row in &document.measurements {
        let wrong = row.wrong();
        let time = row.timing().map_or(1.0, |timing| timing.time_us);
        let reason = match () {
            () if row.ranks == 0 => "0 ranks".to_owned(),
            () if !(time > 0.0 && time.is_finite()) => format!("a time of {time} us"),
            () if wrong > 0 => format!("{wrong} wrong elements"),
            () => continue,
        };
        return Err(refused(format!("{} of {} bytes: {reason}", label(row), row.size_bytes)));
    }
    Ok(document.measurements)
}

/// A row as a point, if the model has a formula for it.
fn point(row: &Measurement, ranks_per_node: usize) -> Option<Point> {
    let timing = row.timing()?;
    let seconds = timing.time_us / 1e6;
    // Nodes that the user defined within one machine do not measure links between machines.
    if row.ranks_per_node.is_some_and(|per_node| per_node != ranks_per_node) {
        return None;
    }
    let world = World::new(row.ranks, ranks_per_node);
    let (bytes, ranks, len) = (row.size_bytes as f64, row.ranks as f64, row.count as f64);
    // For kernels, `busbw` counts the memory traffic.
    let traffic = if timing.algbw > 0.0 { bytes * timing.busbw / timing.algbw } else { bytes };
    let reduction = |products: f64| Work::kernel(traffic, products * len);
    let element_bytes = (row.size_bytes / row.count.max(1)).max(1);
    let adasum =
        |scheme| cost::work(scheme, world, Workload { bytes: row.size_bytes, element_bytes, layers: row.layers });
    let work = match (row.operation.as_str(), row.redop.as_str()) {
        // Kernels that access the peers' memory take steps for which the model has no formula.
        _ if row.transport.as_deref() == Some("peer") => None,
        ("zero" | "cast" | "scale" | "accumulate", _) => Some(Work::kernel(traffic, 0.0)),
        ("squared_norms", _) => Some(reduction(1.0)),
        ("dots", _) => Some(reduction(3.0)),
        ("gram", _) if row.backend == "cuda" => Some(cost::gram_kernels(row.ranks, bytes, element_bytes, row.layers)),
        ("gram", _) => Some(reduction(ranks * (ranks + 1.0) / 2.0)),
        ("combine", _) => Some(Work::kernel(traffic, ranks * len)),
        ("all_reduce", _) => Some(cost::all_reduce(world, bytes)),
        ("all_gather", _) => Some(cost::all_gather(world, bytes)),
        ("reduce_scatter", _) => Some(cost::reduce_scatter(world, bytes)),
        ("all_to_all", _) => Some(cost::all_to_all(world, bytes)),
        ("send_recv", _) => Some(cost::exchange(world, 1, bytes)),
        ("adasum", name) => Scheme::ALL.into_iter().find(|scheme| scheme.name() == name).and_then(adasum),
        _ => None,
    };
    Some(Point { work: work?, seconds })
}
