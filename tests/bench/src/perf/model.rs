//! `--model`: the cost of Adasum on 2 to 4096 ranks by `plan::cost`, and the numbers of ranks at which the automatic choice changes.
//!
//! With `--fit`, parameters are fitted to files that `--json` wrote; otherwise they are the model's defaults. The choice uses the formulas;
//! its time is also shown from a simulation of the individual messages.

mod fit;
mod points;
mod simulation;
#[cfg(test)]
mod tests;
mod worlds;

use std::path::PathBuf;

use gradsync::plan::cost::{self, Alternatives, Choice, GAIN, PART_NAMES, Parameters, Scheme, Workload, World};
use serde::Serialize;

use self::fit::Fit;
use self::points::FitReport;
use self::simulation::simulate;
use self::worlds::{doublings, products_share, switches};
use super::PerfError;
use super::arguments::Settings;
use super::record::SCHEMA;
use super::sizes;

const MOST_RANKS: usize = 4096;
/// From this share of the time on, products are considered expensive.
const DEAR: f64 = 0.1;

/// The model as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct ModelDocument {
    schema: u32,
    program: &'static str,
    ranks_per_node: usize,
    layers: usize,
    parameters: Vec<Parameter>,
    /// Null without `--fit`.
    fit: Option<FitReport>,
    sizes: Vec<Size>,
}

#[derive(Debug, Serialize)]
struct Parameter {
    of: &'static str,
    /// Seconds per unit.
    seconds: f64,
    is_fitted: bool,
}

#[derive(Debug, Serialize)]
struct Size {
    size_bytes: usize,
    worlds: Vec<Estimate>,
    /// The numbers of ranks at which the choice changes, as the world size doubles.
    switches: Vec<Switch>,
    /// The changes among the schemes for GPUs without known nodes: the number of ranks, and the scheme chosen from it on.
    on_gpus: Vec<(usize, &'static str)>,
    /// The changes among the schemes within known nodes: first for the Adasum of all ranks, then for the Adasum of the nodes' sums.
    within_nodes: Vec<(usize, &'static str)>,
    of_sums: Vec<(usize, &'static str)>,
    /// The number of ranks from which products take a tenth of the time of one Gram matrix.
    products_cost_from: Option<usize>,
}

#[derive(Debug, Serialize)]
struct Switch {
    ranks: usize,
    scheme: &'static str,
    reason: String,
}

#[derive(Debug, Serialize)]
struct Estimate {
    ranks: usize,
    nodes: usize,
    /// Milliseconds of each scheme; null if the scheme does not support the world.
    milliseconds: Vec<(&'static str, Option<f64>)>,
    /// Simulated times of the choice and of one Gram matrix; null if a node is not full.
    simulated_milliseconds: Option<f64>,
    simulated_gram_milliseconds: Option<f64>,
    /// The share of a Gram matrix's time that products, their sums and weights take.
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
    let (fit, report) = points::fit(files, ranks_per_node)?;
    let layers = settings.layers.count();
    let sizes = settings.sizes.iter().map(|&bytes| size(&fit.parameters, bytes, ranks_per_node, layers));
    let document = ModelDocument {
        schema: SCHEMA,
        program: "cargo xtask perf --model",
        ranks_per_node,
        layers,
        parameters: parameters(&fit),
        fit: report,
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
            let choice = cost::choose_with(parameters, Alternatives::OF_ALL, world, load);
            let simulated = |scheme| simulate(parameters, scheme, world, load).map(|seconds| 1e3 * seconds);
            let simulated_gram = simulated(Scheme::Gram);
            Estimate {
                ranks,
                nodes: world.nodes(),
                milliseconds: Scheme::ALL.into_iter().map(|scheme| (scheme.name(), time(scheme))).collect(),
                simulated_milliseconds: match choice.scheme {
                    Scheme::Gram => simulated_gram,
                    other => simulated(other),
                },
                simulated_gram_milliseconds: simulated_gram,
                products_share: products_share(parameters, world, load),
                choice: choice.scheme.name(),
                reason: choice.to_string(),
            }
        })
        .collect();
    let switches = |among| switches(among, parameters, ranks_per_node, load, MOST_RANKS).into_iter();
    let named = |among| switches(among).map(|(ranks, scheme)| (ranks, scheme.name())).collect();
    let of_all = switches(Alternatives::OF_ALL).map(|(ranks, scheme)| {
        let choice = cost::choose_with(parameters, Alternatives::OF_ALL, World::new(ranks, ranks_per_node), load);
        Switch { ranks, scheme: scheme.name(), reason: why(&choice) }
    });
    Size {
        size_bytes: bytes,
        products_cost_from: worlds.iter().find(|world| world.products_share > DEAR).map(|world| world.ranks),
        switches: of_all.collect(),
        on_gpus: named(Alternatives::OF_ONE_LEVEL),
        within_nodes: named(Alternatives::OF_NODES),
        of_sums: named(Alternatives::OF_SUMS),
        worlds,
    }
}

impl ModelDocument {
    fn lines(&self) -> String {
        let Self { ranks_per_node, layers, .. } = self;
        let mut text =
            format!("# cost of Adasum by the model: nodes of {ranks_per_node} ranks, {layers} tensors of f32\n");
        text += &match &self.fit {
            Some(fit) => format!(
                "# fitted to {} measured rows, {:.0} % off (root mean square), {:.0} % off rows that were left out\n",
                fit.points(),
                100.0 * fit.error,
                100.0 * fit.left_out_error
            ),
            None => "# measured on four H200 of one machine; between nodes, and serial arithmetic: assumed\n".into(),
        };
        for Parameter { of, seconds, is_fitted } in &self.parameters {
            let from = if *is_fitted { "fitted" } else { "as given" };
            let value = if of.starts_with("bytes") {
                format!("{:.1} GB/s", 1e-9 / seconds)
            } else if *of == "products" {
                format!("{:.2e} a second", 1.0 / seconds)
            } else {
                format!("{:.3} us each", 1e6 * seconds)
            };
            text += &format!("#   {of:<24} {value:>20}  {from}\n");
        }
        text += &self.fit.as_ref().map_or(String::new(), FitReport::lines);
        text += &format!(
            "# a scheme is chosen where it takes less than {GAIN} of the time of those that round less: one Gram matrix, two, then trees\n"
        );
        self.sizes.iter().for_each(|size| text += &size.lines());
        text
    }
}

impl Size {
    fn lines(&self) -> String {
        let mut text =
            format!("\n# {} a rank, times in ms\n#{:>6} {:>6}", sizes::shown(self.size_bytes), "ranks", "nodes");
        Scheme::ALL.into_iter().for_each(|scheme| text += &format!(" {scheme:>10}"));
        text += &format!(" {:>9} {:>10} {:>10}  choice\n", "products", "sim. gram", "simulated");
        for world in &self.worlds {
            text += &format!(" {:>6} {:>6}", world.ranks, world.nodes);
            for (_, time) in &world.milliseconds {
                text += &time.map_or(format!(" {:>10}", "N/A"), |time| format!(" {time:>10.3}"));
            }
            text += &format!(" {:>7.1} %", 100.0 * world.products_share);
            for time in [world.simulated_gram_milliseconds, world.simulated_milliseconds] {
                text += &time.map_or(format!(" {:>10}", "N/A"), |time| format!(" {time:>10.3}"));
            }
            text += &format!("  {}\n", world.reason);
        }
        let listed = |parts: &[(usize, &str)]| {
            let part = |(ranks, scheme): &(usize, &str)| format!("{scheme} from {ranks} ranks");
            match parts {
                [] => "there are no whole nodes".to_owned(),
                _ => parts.iter().map(part).collect::<Vec<_>>().join(", "),
            }
        };
        let of_all: Vec<_> = self.switches.iter().map(|switch| (switch.ranks, switch.scheme)).collect();
        text += &format!("# automatic choice: {}\n", listed(&of_all));
        text += &format!("#   without nodes, as `Algorithm::Auto` on GPUs: {}\n", listed(&self.on_gpus));
        text += &format!("#   with nodes, as `WithinNode::Adasum`: {}\n", listed(&self.within_nodes));
        text += &format!("#   with nodes that sum, as `WithinNode::Reduce`: {}\n", listed(&self.of_sums));
        for Switch { ranks, scheme, reason } in self.switches.iter().skip(1) {
            text += &format!("#   {scheme} from {ranks} ranks: {reason}\n");
        }
        text + &match self.products_cost_from {
            Some(ranks) => {
                format!("# the products of one Gram matrix take more than a tenth of its time from {ranks} ranks\n")
            }
            None => "# the products of one Gram matrix never take a tenth of its time\n".into(),
        }
    }
}

/// The reason for a choice, compared with one Gram matrix over all ranks.
fn why(choice: &Choice) -> String {
    let (part, share) = choice.usual_spends;
    let (gram, percent) = (1e3 * choice.usual_seconds, 100.0 * share);
    let spent = format!("one Gram matrix of all ranks takes {gram:.3} ms, {percent:.0} % of it {}", PART_NAMES[part]);
    match choice.scheme {
        Scheme::Gram => format!("{spent}, and nothing else takes {GAIN} of that or less"),
        other => format!("{spent}; {other} takes {:.3} ms", 1e3 * choice.seconds),
    }
}
