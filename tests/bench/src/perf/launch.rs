//! `--launch`: the records of small launches, and their table.
//!
//! No kernel is faster than an empty kernel's time plus the time of its bytes at the rate of a large copy; the remaining time is the
//! kernel's own overhead.

use serde::{Deserialize, Serialize};

use super::sizes;

/// The times of one kind of launch, plain or recorded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Excess {
    pub(crate) time_us: f64,
    /// The time of an empty kernel that alternates with the kernel.
    pub(crate) empty_us: f64,
    /// The remaining time after subtracting the empty kernel's time and the time of the bytes.
    pub(crate) above_us: f64,
}

/// One kernel on one size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Launch {
    pub(crate) operation: String,
    pub(crate) ranks: usize,
    pub(crate) dtype: String,
    pub(crate) from_dtype: String,
    pub(crate) size_bytes: usize,
    /// The time from the first call to its completion; the first row of a kernel includes the kernel's compilation by the driver.
    pub(crate) first_call_ms: f64,
    /// The time of the bytes at the memory bandwidth.
    pub(crate) bytes_us: f64,
    pub(crate) plain: Excess,
    /// The time per call of many calls recorded in one graph.
    pub(crate) graph: Excess,
    /// Wrong elements; null where results were not checked.
    pub(crate) wrong: Option<u64>,
}

/// All launches of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Launches {
    /// The memory bandwidth in GB/s for the time of the bytes.
    pub(crate) memory_gbs: f64,
    /// Calls in a graph.
    pub(crate) graph_calls: usize,
    /// The size of all alternating buffers together; if it is smaller than one set of buffers, there is one set, which stays in the cache.
    pub(crate) working_set: usize,
    pub(crate) rows: Vec<Launch>,
}

impl Launches {
    /// The table.
    pub(crate) fn lines(&self) -> String {
        let Self { memory_gbs, graph_calls, .. } = self;
        let buffers = match self.working_set {
            ..=1 => "one set of buffers, which stays in the L2 cache".to_owned(),
            bytes => format!("buffers in turn, {} together", sizes::shown(bytes)),
        };
        let side = |name: &str| format!("{name:^29}");
        let columns = format!("{:>9} {:>9} {:>9}", "time", "empty", "above");
        let units = format!("{:>9} {:>9} {:>9}", "(us)", "(us)", "(us)");
        let left = |texts: [&str; 6]| {
            let [operation, vectors, kind, size, first, bytes] = texts;
            format!("#{operation:>14} {vectors:>7} {kind:>9} {size:>11} {first:>10} {bytes:>8}")
        };
        let lines = [
            format!(
                "\n# launches; bytes count at {memory_gbs:.0} GB/s, the rate of a copy of 1 GiB in this run, wherever they are;"
            ),
            format!(
                "# {buffers}; {graph_calls} calls in a graph; above: time without the empty kernel's and the bytes'"
            ),
            format!("{} {} {}", left([""; 6]), side("plain"), side("in a graph")),
            format!(
                "{} {columns} {columns} {:>6}",
                left(["operation", "vectors", "type", "size", "first call", "bytes"]),
                "#wrong"
            ),
            format!("{} {units} {units}", left(["", "", "", "(B)", "(ms)", "(us)"])),
        ];
        let rows = self.rows.iter().map(Launch::line);
        lines.into_iter().map(|line| line.trim_end().to_owned() + "\n").chain(rows).collect()
    }

    /// Wrong elements of all rows.
    pub(crate) fn wrong(&self) -> u64 {
        self.rows.iter().filter_map(|row| row.wrong).sum()
    }
}

impl Launch {
    fn line(&self) -> String {
        let Self { operation, ranks, dtype, from_dtype, size_bytes, first_call_ms, bytes_us, plain, graph, wrong } =
            self;
        let types = if dtype == from_dtype { dtype.clone() } else { format!("{dtype}:{from_dtype}") };
        let side =
            |Excess { time_us, empty_us, above_us }: &Excess| format!("{time_us:>9.2} {empty_us:>9.2} {above_us:>9.2}");
        let wrong = wrong.map_or("N/A".into(), |wrong| wrong.to_string());
        let (plain, graph) = (side(plain), side(graph));
        format!(
            " {operation:>14} {ranks:>7} {types:>9} {size_bytes:>11} {first_call_ms:>10.2} {bytes_us:>8.2} {plain} {graph} {wrong:>6}\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_above_their_numbers() {
        let excess = Excess { time_us: 4.5, empty_us: 2.25, above_us: 1.5 };
        let launch = Launch {
            operation: "cast".into(),
            ranks: 1,
            dtype: "bf16".into(),
            from_dtype: "f32".into(),
            size_bytes: 1 << 20,
            first_call_ms: 12.5,
            bytes_us: 0.75,
            plain: excess.clone(),
            graph: excess,
            wrong: Some(0),
        };
        let launches = Launches { memory_gbs: 4200.0, graph_calls: 20, working_set: 1, rows: vec![launch.clone()] };
        let heading = launches.lines();
        for words in ["4200 GB/s", "stays in the L2 cache", "20 calls", "in a graph"] {
            assert!(heading.contains(words), "{words}: {heading}");
        }
        let columns = heading.lines().find(|line| line.contains("operation")).expect("columns");
        assert_eq!(columns.trim_end().len(), launch.line().trim_end().len(), "{heading}");
        assert_eq!(launches.wrong(), 0);
    }
}
