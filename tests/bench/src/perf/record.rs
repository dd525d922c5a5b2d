//! The record of a run: the rows that `--json` writes.

use gradsync::ops::Algorithm;
use gradsync_cli::output::OutputFile;
use gradsync_cli::text;
use serde::{Deserialize, Serialize};

use super::PerfError;
use super::operation::{Redop, Row};
use super::plan::Section;
use super::statistics::Times;
use super::subject::{Found, Side};

/// The version of this format.
pub(crate) const SCHEMA: u32 = 1;

/// The times of one side of a row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Timing {
    /// The median in microseconds.
    pub(crate) time_us: f64,
    pub(crate) p99_us: f64,
    /// The median bandwidth in GB/s.
    pub(crate) algbw: f64,
    pub(crate) busbw: f64,
    /// The number of wrong elements; null if results were not checked.
    pub(crate) wrong: Option<u64>,
}

/// The names of a baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BaselineName {
    /// The title of the table's column: at most seventeen characters.
    pub(crate) column: &'static str,
    /// The name in the heading and in the JSON.
    pub(crate) full: &'static str,
}

/// The baseline of a row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Baseline {
    pub(crate) name: String,
    pub(crate) time_us: f64,
    pub(crate) p99_us: f64,
    /// GB/s, with the factor of the row.
    pub(crate) busbw: f64,
    /// The baseline's time over the row's: above 1 where the row is faster.
    pub(crate) ratio: f64,
    /// The smallest and the largest of the ratios, if `ratio` is a median of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ratio_range: Option<[f64; 2]>,
}

/// One row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measurement {
    pub(crate) operation: String,
    pub(crate) backend: String,
    /// Null for kernels.
    pub(crate) transport: Option<String>,
    pub(crate) ranks: usize,
    pub(crate) dtype: String,
    /// The dtype of the input values, which may differ for casts, scalings and sums.
    pub(crate) from_dtype: String,
    pub(crate) redop: String,
    pub(crate) size_bytes: usize,
    pub(crate) count: usize,
    /// The number of tensors of an Adasum.
    pub(crate) layers: usize,
    /// The number of ranks per node of an Adasum in nodes; null for others.
    #[serde(default)]
    pub(crate) ranks_per_node: Option<usize>,
    /// Whether the vectors of processes were in memory that all of them map.
    #[serde(default)]
    pub(crate) shared_buffers: bool,
    pub(crate) out_of_place: Option<Timing>,
    pub(crate) in_place: Option<Timing>,
    pub(crate) baseline: Option<Baseline>,
    /// The hardware's limit, in GB/s of busbw.
    pub(crate) limit_busbw: Option<f64>,
}

/// The load of a kernel onto a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Load {
    /// The entry point.
    pub(crate) kernel: String,
    /// `cubin`, or `ptx`, which the driver compiles unless it has the result in its cache.
    pub(crate) source: String,
    /// The longest load time of the kernel.
    pub(crate) load_ms: f64,
}

/// A whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Document<M> {
    pub(crate) schema: u32,
    pub(crate) program: String,
    pub(crate) machine: M,
    pub(crate) warm_ups: usize,
    pub(crate) iterations: usize,
    /// Calls per CUDA graph, by which its time was divided; 0 if no graphs were recorded.
    #[serde(default)]
    pub(crate) graph_calls: usize,
    pub(crate) measurements: Vec<Measurement>,
    /// The kernels that rank 0 has loaded, by name.
    #[serde(default)]
    pub(crate) loads: Vec<Load>,
    /// Requested measurements that were left out, with the reasons.
    pub(crate) left_out: Vec<String>,
    /// The error that ended the run early, if any.
    #[serde(default)]
    pub(crate) failure: Option<String>,
    /// The number of wrong elements in all rows.
    pub(crate) wrong: u64,
}

impl<M: Serialize> Document<M> {
    /// Writes the JSON, whose strings a terminal may show.
    pub(crate) fn write(&self, mut file: OutputFile) -> Result<(), PerfError> {
        let json = serde_json::to_string_pretty(self).map_err(std::io::Error::from)? + "\n";
        file.write(text::printable_json(&json).as_bytes())?;
        Ok(file.finish()?)
    }
}

impl Measurement {
    /// A row from the ranks' results; `limit` is in GB/s of busbw.
    pub(crate) fn new(section: &Section, row: &Row, found: &Found, baseline: BaselineName, limit: Option<f64>) -> Self {
        let times = |side: Side| Times::of(&found.seconds[side as usize]);
        let gigabytes = |times: Times| if times.median > 0.0 { row.bytes() as f64 / times.median / 1e9 } else { 0.0 };
        let timing = |side: Side| {
            let times = times(side)?;
            let algbw = gigabytes(times);
            Some(Timing {
                time_us: times.median * 1e6,
                p99_us: times.p99 * 1e6,
                algbw,
                busbw: algbw * row.bus_factor(),
                wrong: found.wrong[side as usize],
            })
        };
        let (out_of_place, in_place) = (timing(Side::OutOfPlace), timing(Side::InPlace));
        let own = in_place.as_ref().or(out_of_place.as_ref()).map(|timing| timing.time_us);
        let baseline = times(Side::Baseline).zip(own).map(|(times, own)| Baseline {
            name: baseline.full.to_owned(),
            time_us: times.median * 1e6,
            p99_us: times.p99 * 1e6,
            busbw: gigabytes(times) * row.bus_factor(),
            ratio: if own > 0.0 { times.median * 1e6 / own } else { 0.0 },
            ratio_range: None,
        });
        Self {
            operation: row.operation.name().into(),
            backend: section.place.backend().into(),
            transport: section.place.transport().map(Into::into),
            ranks: row.ranks,
            dtype: row.types.to.name().into(),
            from_dtype: row.types.from.name().into(),
            redop: row.redop.name().into(),
            size_bytes: row.bytes(),
            count: row.count(),
            layers: if row.operation.has_tensors() { row.layers.count() } else { 1 },
            ranks_per_node: row.nodes().map(|nodes| nodes.per_node),
            shared_buffers: false,
            out_of_place,
            in_place,
            baseline,
            limit_busbw: limit,
        }
    }

    /// The side that is compared with the baseline.
    pub(crate) fn timing(&self) -> Option<&Timing> {
        self.in_place.as_ref().or(self.out_of_place.as_ref())
    }

    pub(crate) fn wrong(&self) -> u64 {
        [&self.out_of_place, &self.in_place].into_iter().flatten().filter_map(|timing| timing.wrong).sum()
    }

    /// The type column.
    pub(crate) fn types(&self) -> String {
        if self.dtype == self.from_dtype { self.dtype.clone() } else { format!("{}:{}", self.dtype, self.from_dtype) }
    }
}

/// The reduction with the algorithm that ran, if the library chose it.
pub(crate) fn resolved(redop: Redop, ran: Algorithm) -> Redop {
    if redop == Redop::Adasum(Algorithm::Auto) { Redop::Adasum(ran) } else { redop }
}
