//! What is kept of a run: the rows as `--json` writes them, and as `--model --fit` reads them.

use gradsync::ops::Algorithm;
use serde::{Deserialize, Serialize};

use super::launch::Launches;
use super::operation::{Operation, Redop, Row};
use super::plan::Section;
use super::statistics::Times;
use super::subject::{Found, Side};

/// The version of this format.
pub(crate) const SCHEMA: u32 = 1;

/// One way that an operation ran.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Timing {
    /// Microseconds at the median.
    pub(crate) time_us: f64,
    pub(crate) p99_us: f64,
    /// GB/s at the median.
    pub(crate) algbw: f64,
    pub(crate) busbw: f64,
    /// Wrong elements; null where results were not checked.
    pub(crate) wrong: Option<u64>,
}

/// What baselines are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BaselineName {
    /// Above the table's column: at most seventeen letters.
    pub(crate) column: &'static str,
    /// In the heading and in the JSON.
    pub(crate) full: &'static str,
}

/// What a row is held against.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Baseline {
    pub(crate) name: String,
    pub(crate) time_us: f64,
    pub(crate) p99_us: f64,
    /// GB/s, with the row's own factor.
    pub(crate) busbw: f64,
    /// The baseline's time over the row's: above 1 where the row is faster.
    pub(crate) ratio: f64,
    /// The least and the most of the ratios whose median that is, where it is such a median.
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
    /// The dtype of the values, which is another for some casts and sums.
    pub(crate) from_dtype: String,
    pub(crate) redop: String,
    pub(crate) size_bytes: usize,
    pub(crate) count: usize,
    /// Tensors of an Adasum.
    pub(crate) layers: usize,
    /// Of an Adasum in nodes; null for others.
    #[serde(default)]
    pub(crate) ranks_per_node: Option<usize>,
    pub(crate) out_of_place: Option<Timing>,
    pub(crate) in_place: Option<Timing>,
    pub(crate) baseline: Option<Baseline>,
    /// What the hardware can do, in GB/s of busbw.
    pub(crate) limit_busbw: Option<f64>,
}

/// How a kernel got onto a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Load {
    /// The entry point.
    pub(crate) kernel: String,
    /// `cubin`, or `ptx`, which the driver compiles unless it has the result in its cache.
    pub(crate) source: String,
    /// The longest of all times that it was loaded in.
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
    /// Calls in the CUDA graphs whose times were divided by that; 0 where none were recorded.
    #[serde(default)]
    pub(crate) graph_calls: usize,
    /// Whether gradients that processes could share lay in memory of each process's own.
    #[serde(default)]
    pub(crate) ordinary_buffers: bool,
    /// Whether the vectors of all-reduces between processes lay in memory that all of them map.
    #[serde(default)]
    pub(crate) shared_buffers: bool,
    pub(crate) measurements: Vec<Measurement>,
    /// Those of `--launch`.
    #[serde(default)]
    pub(crate) launches: Option<Launches>,
    /// Kernels that the rank that speaks has loaded, by name.
    #[serde(default)]
    pub(crate) loads: Vec<Load>,
    /// What was asked for and left out, with the reasons.
    pub(crate) left_out: Vec<String>,
    /// Why there are no more rows, if the run failed.
    #[serde(default)]
    pub(crate) failure: Option<String>,
    /// Wrong elements of all rows.
    pub(crate) wrong: u64,
}

impl Measurement {
    /// From what the ranks found; `limit` in GB/s of busbw.
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
            layers: if row.operation == Operation::Adasum { row.layers.count() } else { 1 },
            ranks_per_node: row.nodes().map(|nodes| nodes.per_node),
            out_of_place,
            in_place,
            baseline,
            limit_busbw: limit,
        }
    }

    /// The side that is drawn, and held against the baseline.
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

/// The algorithm that ran, where the library chose.
pub(crate) fn resolved(redop: Redop, ran: Algorithm) -> Redop {
    if redop == Redop::Adasum(Algorithm::Auto) { Redop::Adasum(ran) } else { redop }
}
