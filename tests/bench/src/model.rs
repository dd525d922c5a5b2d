//! `gradsync-bench model`: the times of Adasum on 2 to 4096 ranks by [`plan::cost`](gradsync::internal::plan::cost), the automatic choices, and the numbers
//! of a kind of GPU, each of them the median of what the rows of `perf`'s JSON say about it.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use gradsync::internal::plan::cost::{Gpu, LAYERS, Scheme, World, product_kernels};
use gradsync_cli::messages::Listener;
use serde_json::Value;

use crate::perf::record::{Document, Measurement};
use crate::perf::sizes;
use crate::perf::statistics::Times;

/// The sizes of vectors in bytes.
const SIZES: [usize; 3] = [1 << 20, 64 << 20, 1 << 30];

/// The arguments of `gradsync-bench model`.
#[derive(Args)]
pub(crate) struct Model {
    /// JSON of `perf` on one kind of GPU: gram of up to 8 and of 16 or 32 vectors, combine, and all collectives over nccl in one machine
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Ranks of a node
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    ranks_per_node: u32,
    /// Tensors of a vector
    #[arg(long, value_name = "N", default_value_t = LAYERS)]
    layers: usize,
}

impl Model {
    pub(crate) fn run(self) -> Result<()> {
        let gpu = if self.files.is_empty() { Gpu::H200 } else { measured(&self.files)? };
        let Gpu { latency, launch, link, memory, network, hop, message, weight } = gpu;
        let mut text = format!(
            "# Gpu {{ latency: {:.1}e-6, launch: {:.1}e-6, link: {:.0}e9, memory: {:.0}e9, ..ASSUMED }}\n",
            1e6 * latency,
            1e6 * launch,
            link / 1e9,
            memory / 1e9
        );
        text += &format!(
            "# assumed: network {:.0} GB/s, hop {:.1} µs, message {:.1} µs, weight {:.0} ns\n",
            network / 1e9,
            1e6 * hop,
            1e6 * message,
            1e9 * weight
        );
        for bytes in SIZES {
            text += &self.table(&gpu, bytes)?;
        }
        Ok(Listener::Stdout.print(&text)?)
    }

    /// The milliseconds of every scheme, and the automatic choices, as the number of ranks doubles.
    fn table(&self, gpu: &Gpu, bytes: usize) -> Result<String> {
        let (layers, per_node) = (self.layers, self.ranks_per_node as usize);
        let mut text = format!(
            "\n# ms for {} on each rank, in {layers} tensors, {per_node} ranks a node\n#ranks",
            sizes::shown(bytes)
        );
        for scheme in Scheme::ALL {
            write!(text, " {scheme:>9}")?;
        }
        text += "  choice: of ranks, of nodes, of nodes' sums\n";
        for ranks in (1..=12).map(|power| 1 << power) {
            let world = World::new(ranks, per_node);
            write!(text, "{ranks:>6}")?;
            for scheme in Scheme::ALL {
                match gpu.seconds(scheme, world, bytes, layers) {
                    Some(seconds) => write!(text, " {:>9.3}", 1e3 * seconds)?,
                    None => write!(text, " {:>9}", "N/A")?,
                }
            }
            let among = [Scheme::OF_RANKS, Scheme::OF_NODES, Scheme::OF_SUMS];
            let chosen = among.map(|among| gpu.choose(among, world, bytes, layers).scheme.name());
            writeln!(text, "  {}", chosen.join(", "))?;
        }
        Ok(text)
    }
}

/// The numbers of a GPU from files; what they cannot tell is assumed as for [`Gpu::H200`].
fn measured(files: &[PathBuf]) -> Result<Gpu> {
    let rows: Vec<Measurement> = files.iter().map(|file| rows(file)).collect::<Result<Vec<_>>>()?.concat();
    let kernels = || rows.iter().filter(|row| row.backend == "cuda" && row.transport.is_none());
    let collectives = || {
        let over_nccl = rows.iter().filter(|row| row.transport.as_deref() == Some("nccl"));
        over_nccl.filter(|row| row.operation != "adasum")
    };
    let largest = |rows: &[&Measurement]| rows.iter().map(|row| row.size_bytes).max();
    let rate = |rows: Vec<&Measurement>, what: &str| {
        let large = rows.iter().filter(|row| Some(row.size_bytes) == largest(&rows));
        median(large.filter_map(|row| Some(1e9 * row.timing()?.busbw)), what)
    };
    let memory = rate(kernels().collect(), "a kernel on a GPU")?;
    let link = rate(collectives().collect(), "a collective over nccl")?;
    // Bytes take little of the smallest rows' time, and the rest is the latency.
    let smallest = collectives().map(|row| row.size_bytes).min();
    let latencies = collectives().filter(|row| Some(row.size_bytes) == smallest).filter_map(|row| {
        let timing = row.timing()?;
        Some(timing.time_us / 1e6 - row.size_bytes as f64 * timing.busbw / timing.algbw / link)
    });
    let latency = median(latencies, "a collective over nccl")?;
    // More than eight vectors take many kernels.
    let wide = || kernels().filter(|row| row.operation == "gram" && row.ranks > 8);
    let smallest = wide().map(|row| row.size_bytes).min();
    let launches = wide().filter(|row| Some(row.size_bytes) == smallest).filter_map(|row| {
        let (launches, reads) = product_kernels(row.ranks);
        Some((row.timing()?.time_us / 1e6 - reads * row.size_bytes as f64 / memory) / launches)
    });
    let launch = median(launches, "gram of more than 8 vectors on a GPU")?;
    Ok(Gpu { latency, launch, link, memory, ..Gpu::H200 })
}

fn rows(file: &Path) -> Result<Vec<Measurement>> {
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let document: Document<Value> =
        serde_json::from_str(&text).with_context(|| format!("{} is no JSON of `perf`", file.display()))?;
    Ok(document.measurements)
}

fn median(values: impl Iterator<Item = f64>, of: &str) -> Result<f64> {
    let values: Vec<f64> = values.collect();
    Ok(Times::of(&values).with_context(|| format!("the files have no row of {of}"))?.median)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(machine: &str) -> Vec<PathBuf> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../measured").join(machine);
        ["cuda-kernels", "cuda-wide", "nccl"].map(|name| folder.join(name).with_extension("json")).to_vec()
    }

    /// The numbers of the library are those of the rows that are kept: of four H100; of H200 the rows of two are kept, whose collectives have
    /// less latency than those of the four from which the numbers are.
    #[test]
    fn measured_rows_give_the_librarys_numbers() {
        for (machine, gpu, most) in [("four-h100-2026-11-27", Gpu::H100, 0.01), ("two-h200-2026-11-22", Gpu::H200, 0.3)]
        {
            let found = measured(&files(machine)).expect("rows of every kind");
            let numbers = |gpu: Gpu| [gpu.latency, gpu.launch, gpu.link, gpu.memory];
            for (found, own) in numbers(found).into_iter().zip(numbers(gpu)) {
                assert!((found / own - 1.0).abs() < most, "{machine}: {found} and not {own}");
            }
        }
    }

    #[test]
    fn rows_of_adasum_take_the_measured_time() {
        for (machine, gpu) in [("four-h100-2026-11-27", Gpu::H100), ("two-h200-2026-11-22", Gpu::H200)] {
            let rows = rows(&files(machine)[2].with_file_name("nccl-adasum.json")).expect("rows");
            for row in rows.iter().filter(|row| row.size_bytes >= 16 << 20) {
                let scheme = Scheme::ALL.into_iter().find(|scheme| scheme.name() == row.redop).expect("a scheme");
                let predicted =
                    gpu.seconds(scheme, World::new(row.ranks, 8), row.size_bytes, row.layers).expect("it fits");
                let ratio = 1e6 * predicted / row.timing().expect("a time").time_us;
                assert!((0.66..1.34).contains(&ratio), "{machine}, {scheme}, {} bytes: {ratio}", row.size_bytes);
            }
        }
    }

    #[test]
    fn measured_names_what_files_do_not_have() {
        let error = measured(&files("two-h200-2026-11-22")[..1]).expect_err("no collectives").to_string();
        assert!(error.contains("a collective over nccl"), "{error}");
    }

    #[test]
    fn table_has_every_scheme_and_choice() {
        let model = Model { files: Vec::new(), ranks_per_node: 8, layers: LAYERS };
        let table = model.table(&Gpu::H200, 64 << 20).expect("a table");
        let last = table.lines().last().expect("4096 ranks");
        assert_eq!(last.split_whitespace().next(), Some("4096"));
        assert!(last.ends_with("tree, gram+tree, sum+tree"), "{last}");
        assert!(table.contains("64 MiB") && table.contains("N/A"), "{table}");
    }
}
