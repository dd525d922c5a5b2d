//! `--model`: what Adasum costs on 2 to 4096 ranks by `plan::cost`, and where the automatic choice switches.
//!
//! With `--fit`, parameters come from what `--json` wrote; otherwise they are the model's own.

use std::fs;
use std::path::{Path, PathBuf};

use gradsync::plan::cost::{
    self, Fit, PART_NAMES, Parameters, Point, Scheme, Work, Workload, World, doublings, products_share, switches,
};
use serde::Serialize;
use serde::de::IgnoredAny;

use super::PerfError;
use super::arguments::Settings;
use super::record::{Document, Measurement, SCHEMA};
use super::sizes;

const MOST_RANKS: usize = 4096;
/// From this part of the time on, products are not free.
const DEAR: f64 = 0.1;

/// The model as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct ModelDocument {
    schema: u32,
    program: &'static str,
    ranks_per_node: usize,
    layers: usize,
    parameters: Vec<Parameter>,
    /// The root of the mean squared relative error of the fit; null without one.
    fit_error: Option<f64>,
    points: usize,
    sizes: Vec<Size>,
}

#[derive(Debug, Serialize)]
struct Parameter {
    of: &'static str,
    /// Seconds a unit.
    seconds: f64,
    is_fitted: bool,
}

#[derive(Debug, Serialize)]
struct Size {
    size_bytes: usize,
    worlds: Vec<Estimate>,
    /// Where the choice changes as the world doubles.
    switches: Vec<Switch>,
    /// The number of ranks from which the products of one Gram matrix take a tenth of its time.
    products_cost_from: Option<usize>,
}

#[derive(Debug, Serialize)]
struct Switch {
    ranks: usize,
    scheme: &'static str,
}

#[derive(Debug, Serialize)]
struct Estimate {
    ranks: usize,
    nodes: usize,
    /// Milliseconds of each scheme; null where it does not fit the world.
    milliseconds: Vec<(&'static str, Option<f64>)>,
    /// The part of a Gram matrix' time that products and their sums take.
    products_share: f64,
    choice: &'static str,
    reason: String,
}

/// The model for the settings' sizes and tensors, as text and as JSON.
pub(crate) fn report(
    files: &[PathBuf],
    ranks_per_node: usize,
    settings: &Settings,
) -> Result<(String, ModelDocument), PerfError> {
    let mut measurements = Vec::new();
    for file in files {
        measurements.extend(read(file)?);
    }
    let points = points(&measurements, ranks_per_node);
    if !files.is_empty() && points.is_empty() {
        return Err(PerfError::Arguments("--fit: the files hold no row that the model knows".into()));
    }
    let fit = cost::fit(&points, Parameters::default());
    let sizes = settings.sizes.iter().map(|&bytes| size(&fit.parameters, bytes, ranks_per_node, settings.layers));
    let document = ModelDocument {
        schema: SCHEMA,
        program: "gradsync perf --model",
        ranks_per_node,
        layers: settings.layers,
        parameters: parameters(&fit),
        fit_error: (!points.is_empty()).then_some(fit.error),
        points: points.len(),
        sizes: sizes.collect(),
    };
    Ok((document.lines(), document))
}

fn parameters(fit: &Fit) -> Vec<Parameter> {
    let parts = PART_NAMES.into_iter().zip(fit.parameters.seconds).zip(fit.is_fitted);
    parts.map(|((of, seconds), is_fitted)| Parameter { of, seconds, is_fitted }).collect()
}

fn size(parameters: &Parameters, bytes: usize, ranks_per_node: usize, layers: usize) -> Size {
    let load = Workload { layers, ..Workload::of(bytes) };
    let worlds: Vec<Estimate> = doublings(MOST_RANKS)
        .map(|ranks| {
            let world = World::new(ranks, ranks_per_node);
            let time = |scheme| cost::work(scheme, world, load).map(|work| 1e3 * parameters.time(&work));
            let choice = cost::choose_with(parameters, world, load);
            Estimate {
                ranks,
                nodes: world.nodes(),
                milliseconds: Scheme::ALL.into_iter().map(|scheme| (scheme.name(), time(scheme))).collect(),
                products_share: products_share(parameters, Scheme::Gram, world, load).unwrap_or_default(),
                choice: choice.scheme.name(),
                reason: choice.to_string(),
            }
        })
        .collect();
    let switches = switches(parameters, ranks_per_node, load, MOST_RANKS);
    Size {
        size_bytes: bytes,
        products_cost_from: worlds.iter().find(|world| world.products_share > DEAR).map(|world| world.ranks),
        switches: switches.into_iter().map(|(ranks, scheme)| Switch { ranks, scheme: scheme.name() }).collect(),
        worlds,
    }
}

impl ModelDocument {
    fn lines(&self) -> String {
        let Self { ranks_per_node, layers, .. } = self;
        let mut text =
            format!("# cost of Adasum by the model: nodes of {ranks_per_node} ranks, {layers} tensors of f32\n");
        text += &match self.fit_error {
            Some(error) => {
                format!("# fitted to {} measured rows, {:.0} % off (root mean square)\n", self.points, 100.0 * error)
            }
            None => "# measured on four H200 of one machine; between nodes, and serial arithmetic: assumed\n".into(),
        };
        for Parameter { of, seconds, is_fitted } in &self.parameters {
            let from = if *is_fitted { "fitted" } else { "as given" };
            let value = if of.starts_with("bytes") {
                format!("{:.1} GB/s", 1e-9 / seconds)
            } else if *of == "products" {
                format!("{:.2}e12 a second", 1e-12 / seconds)
            } else {
                format!("{:.3} us each", 1e6 * seconds)
            };
            text += &format!("#   {of:<24} {value:>20}  {from}\n");
        }
        self.sizes.iter().for_each(|size| text += &size.lines());
        text
    }
}

impl Size {
    fn lines(&self) -> String {
        let mut text =
            format!("\n# {} a rank, times in ms\n#{:>6} {:>6}", sizes::shown(self.size_bytes), "ranks", "nodes");
        Scheme::ALL.into_iter().for_each(|scheme| text += &format!(" {scheme:>10}"));
        text += &format!(" {:>9}  choice\n", "products");
        for world in &self.worlds {
            text += &format!(" {:>6} {:>6}", world.ranks, world.nodes);
            for (_, time) in &world.milliseconds {
                text += &time.map_or(format!(" {:>10}", "N/A"), |time| format!(" {time:>10.3}"));
            }
            text += &format!(" {:>7.1} %  {}\n", 100.0 * world.products_share, world.reason);
        }
        let parts: Vec<String> =
            self.switches.iter().map(|switch| format!("{} from {} ranks", switch.scheme, switch.ranks)).collect();
        text += &format!("# automatic choice: {}\n", parts.join(", "));
        text + &match self.products_cost_from {
            Some(ranks) => {
                format!("# the products of one Gram matrix take more than a tenth of its time from {ranks} ranks\n")
            }
            None => "# the products of one Gram matrix never take a tenth of its time\n".into(),
        }
    }
}

fn read(path: &Path) -> Result<Vec<Measurement>, PerfError> {
    let refused = |reason: String| PerfError::File { path: path.into(), reason };
    let text = fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
    let document: Document<IgnoredAny> = serde_json::from_str(&text)
        .map_err(|error| refused(format!("not what `gradsync perf --json` writes: {error}")))?;
    if document.schema != SCHEMA {
        return Err(refused(format!("schema {}, and this program knows {SCHEMA}", document.schema)));
    }
    Ok(document.measurements)
}

/// The rows that the model has a formula for; those of GPUs alone, if there are any.
fn points(measurements: &[Measurement], ranks_per_node: usize) -> Vec<Point> {
    let has_gpus = measurements.iter().any(|row| row.backend == "cuda");
    let rows = measurements.iter().filter(|row| !has_gpus || row.backend == "cuda");
    rows.filter_map(|row| {
        let seconds = row.timing()?.time_us / 1e6;
        Some(Point { work: work(row, World::new(row.ranks, ranks_per_node))?, seconds })
    })
    .collect()
}

fn work(row: &Measurement, world: World) -> Option<Work> {
    let (bytes, ranks, len) = (row.size_bytes as f64, row.ranks as f64, row.count as f64);
    // Kernels that reach into peers' memory take other steps than those that the model counts.
    let is_peer = row.transport.as_deref() == Some("peer");
    let adasum = |scheme| {
        let element_bytes = (row.size_bytes / row.count.max(1)).max(1);
        cost::work(scheme, world, Workload { bytes: row.size_bytes, element_bytes, layers: row.layers })
    };
    match row.operation.as_str() {
        _ if is_peer => None,
        "zero" => Some(Work::kernel(bytes, 0.0)),
        "dots" => Some(Work::kernel(2.0 * bytes, 3.0 * len)),
        "gram" => Some(Work::kernel(ranks * bytes, ranks * (ranks + 1.0) / 2.0 * len)),
        "combine" => Some(Work::kernel((ranks + 1.0) * bytes, ranks * len)),
        "all_reduce" => Some(cost::all_reduce(world, bytes)),
        "all_gather" => Some(cost::all_gather(world, bytes)),
        "reduce_scatter" => Some(cost::reduce_scatter(world, bytes)),
        "all_to_all" => Some(cost::all_to_all(world, bytes)),
        "send_recv" => Some(cost::exchange(world, 1, bytes)),
        "adasum" if row.redop == "tree" => adasum(Scheme::Tree),
        "adasum" => adasum(Scheme::Gram),
        _ => None,
    }
}
