//! `gradsync-bench tables`: writes the tables of the performance page from the rows of `perf` and `compare` in `tests/measured`.
//!
//! A table stands in the page between `<!-- table NAME -->` and `<!-- end -->`. Each file of measurements is the JSON of one run; its folder
//! names the machine and the date.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use gradsync_cli::messages::Listener;
use serde::Deserialize;

use crate::perf::sizes;

/// The arguments of `gradsync-bench tables`.
#[derive(Args)]
pub(crate) struct Tables {
    /// The folder of the measurements
    #[arg(long, value_name = "FOLDER", default_value = "tests/measured")]
    measured: PathBuf,
    /// The page
    #[arg(value_name = "FILE", default_value = "host/docs/performance.md")]
    page: PathBuf,
}

impl Tables {
    pub(crate) fn run(self) -> Result<()> {
        let before = read(&self.page)?;
        let after = filled(&before, &self.measured)?;
        let changed = if before == after { "unchanged" } else { "written" };
        if before != after {
            fs::write(&self.page, after).with_context(|| format!("cannot write {}", self.page.display()))?;
        }
        Ok(Listener::Stdout.print(&format!("{}: {changed}\n", self.page.display()))?)
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The fields of a measurement that tables show. Files may have been written by earlier versions of `perf`.
#[derive(Clone, Deserialize)]
struct Row {
    operation: String,
    ranks: usize,
    dtype: String,
    from_dtype: String,
    size_bytes: usize,
    layers: usize,
    #[serde(default)]
    shared_buffers: bool,
    out_of_place: Option<Time>,
    in_place: Option<Time>,
    baseline: Option<Baseline>,
}

#[derive(Clone, Deserialize)]
struct Time {
    time_us: f64,
    busbw: f64,
}

#[derive(Clone, Deserialize)]
struct Baseline {
    time_us: f64,
    ratio: f64,
}

#[derive(Deserialize)]
struct Run {
    measurements: Vec<Row>,
}

/// One entry of a table.
struct Cell {
    /// The order of the table's row, and its title.
    row: (usize, String),
    column: String,
    text: String,
}

/// A table of the page.
struct Table {
    name: &'static str,
    /// The title of the first column.
    first: &'static str,
    /// The files, each with the title that its rows are shown under.
    files: &'static [(&'static str, &'static str)],
    cells: fn(&Row, &str) -> Vec<Cell>,
}

const TABLES: [Table; 8] = [
    Table {
        name: "kernels",
        first: "kernel",
        files: &[("one-h200-2026-11-29/kernels", "")],
        cells: |row, _| vec![cell_of(row, (0, kernel(row)), size(row), rate)],
    },
    Table {
        name: "tensors",
        first: "tensors, call",
        files: &[("one-h200-2026-11-29/tensors", "the driver's copy"), ("one-h200-2026-11-29/pytorch", "PyTorch")],
        cells: |row, peer| beside(row, (0, format!("{} tensors, {}", row.layers, kernel(row))), peer),
    },
    Table {
        name: "small-sums",
        first: "bytes",
        files: &[
            ("two-h200-2026-11-29/sums-graphs", "2 H200"),
            ("four-h100-2026-11-28/sums-graphs", "4 H100"),
            ("one-h200-2026-11-29/sums-2-ranks-graphs", "2 ranks of one H200"),
            ("one-h200-2026-11-29/sums-4-ranks-graphs", "4 ranks of one H200"),
            ("one-h200-2026-11-29/sums-8-ranks-graphs", "8 ranks of one H200"),
        ],
        cells: |row, machine| only(row.dtype == "f32", || by_size(row, machine)),
    },
    Table {
        name: "large-sums",
        first: "operation",
        files: &[
            ("two-h200-2026-11-29/sums", "2 H200"),
            ("two-h200-2026-11-29/adasum", "2 H200"),
            ("four-h200-2026-11-28/adasum-bert-large", "4 H200"),
        ],
        cells: |row, machine| {
            let layers = if row.layers > 1 { format!(", {} tensors", row.layers) } else { String::new() };
            let title = format!("`{}` {}{layers}, {machine}", row.operation, row.dtype);
            vec![cell_of(row, (0, title), size(row), time)]
        },
    },
    Table {
        name: "small-adasum",
        first: "bytes",
        files: &[
            ("two-h200-2026-11-29/adasum-graphs", "2 H200"),
            ("four-h200-2026-11-28/adasum-graphs", "4 H200"),
            ("one-h200-2026-11-29/adasum-2-ranks-graphs", "2 ranks of one H200"),
            ("one-h200-2026-11-29/adasum-4-ranks-graphs", "4 ranks of one H200"),
            ("one-h200-2026-11-29/adasum-8-ranks-graphs", "8 ranks of one H200"),
        ],
        cells: |row, machine| {
            only(row.dtype == "f32" && (row.layers > 1 || row.size_bytes <= 1 << 10), || by_size(row, machine))
        },
    },
    Table {
        name: "gloo",
        first: "bytes",
        files: &[
            ("two-epyc-cores-2026-11-25/gloo", "processes beside Gloo"),
            ("two-epyc-cores-2026-11-25/mpi", "MPI processes beside MPI's own"),
        ],
        cells: |row, peer| by_size(row, &format!("{} {peer}", row.ranks)),
    },
    Table {
        name: "horovod",
        first: "processes × bytes",
        files: &[("two-xeon-cores-2026-11-29/horovod", "")],
        cells: |row, _| {
            let memory = if row.shared_buffers { "shared" } else { "own" };
            let order = row.ranks << 40 | row.size_bytes;
            vec![cell_of(
                row,
                (order, format!("{} × {}", row.ranks, size(row))),
                format!("{}, {memory} memory", row.dtype),
                time,
            )]
        },
    },
    Table {
        name: "cpu-kernels",
        first: "kernel",
        files: &[("sixteen-xeon-cores-2026-11-29/kernels", "")],
        cells: |row, _| vec![cell_of(row, (0, kernel(row)), size(row), rate)],
    },
];

fn only(is_shown: bool, cells: impl FnOnce() -> Vec<Cell>) -> Vec<Cell> {
    if is_shown { cells() } else { Vec::new() }
}

fn by_size(row: &Row, column: &str) -> Vec<Cell> {
    vec![cell_of(row, (row.size_bytes, size(row)), column.into(), time)]
}

fn cell_of(row: &Row, title: (usize, String), column: String, shown: fn(&Row) -> String) -> Cell {
    Cell { row: title, column, text: shown(row) }
}

/// The time of a call, and of its peer.
fn beside(row: &Row, title: (usize, String), peer: &str) -> Vec<Cell> {
    let Some(baseline) = &row.baseline else { return Vec::new() };
    vec![
        Cell {
            row: title.clone(),
            column: "gradsync".into(),
            text: microseconds(own(row).map_or(0.0, |time| time.time_us)),
        },
        Cell { row: title, column: peer.into(), text: microseconds(baseline.time_us) },
    ]
}

fn own(row: &Row) -> Option<&Time> {
    row.in_place.as_ref().or(row.out_of_place.as_ref())
}

/// The time, with the baseline's time over it.
fn time(row: &Row) -> String {
    own(row).map_or(String::new(), |time| format!("{}{}", microseconds(time.time_us), ratio(row)))
}

/// The bandwidth, with the baseline's time over the row's.
fn rate(row: &Row) -> String {
    own(row).map_or(String::new(), |time| format!("{:.0} GB/s{}", time.busbw, ratio(row)))
}

fn ratio(row: &Row) -> String {
    row.baseline.as_ref().map_or(String::new(), |baseline| format!(" ({:.2})", baseline.ratio))
}

fn microseconds(time: f64) -> String {
    match time {
        time if time < 9.95 => format!("{time:.1} µs"),
        time if time < 999.5 => format!("{time:.0} µs"),
        time if time < 9_950.0 => format!("{:.1} ms", time / 1e3),
        time => format!("{:.0} ms", time / 1e3),
    }
}

fn size(row: &Row) -> String {
    sizes::shown(row.size_bytes)
}

/// A kernel with its dtypes, and its vectors where it takes any number of them.
fn kernel(row: &Row) -> String {
    let Row { operation, dtype, from_dtype, ranks, .. } = row;
    match operation.as_str() {
        "accumulate" => format!("`accumulate` {dtype} += {from_dtype}"),
        "cast" => format!("`cast` {from_dtype} → {dtype}"),
        "gram" | "combine" => format!("`{operation}` {dtype}, {ranks} vectors"),
        operation => format!("`{operation}` {dtype}"),
    }
}

impl Table {
    /// The table in Markdown.
    fn markdown(&self, measured: &Path) -> Result<String> {
        let (mut columns, mut rows) = (Vec::new(), Vec::new());
        let mut cells = BTreeMap::new();
        for (file, title) in self.files {
            let path = measured.join(file).with_extension("json");
            let run: Run = serde_json::from_str(&read(&path)?)
                .with_context(|| format!("{} is no JSON of `perf`", path.display()))?;
            for cell in run.measurements.iter().flat_map(|row| (self.cells)(row, title)) {
                if !columns.contains(&cell.column) {
                    columns.push(cell.column.clone());
                }
                if !rows.contains(&cell.row) {
                    rows.push(cell.row.clone());
                }
                cells.entry((cell.row.1, cell.column)).or_insert(cell.text);
            }
        }
        ensure!(!rows.is_empty(), "the table {} has no rows", self.name);
        rows.sort_by_key(|(order, _)| *order);
        let mut text = format!("| {} | {} |\n|{}\n", self.first, columns.join(" | "), "---|".repeat(columns.len() + 1));
        for (_, title) in rows {
            let found =
                columns.iter().map(|column| cells.get(&(title.clone(), column.clone())).map_or("", String::as_str));
            text += &format!("| {title} | {} |\n", found.collect::<Vec<_>>().join(" | "));
        }
        Ok(text)
    }
}

/// The page with its tables from the measurements.
fn filled(page: &str, measured: &Path) -> Result<String> {
    let (mut text, mut rest) = (String::new(), page);
    for table in &TABLES {
        ensure!(page.contains(&begin(table.name)), "the page has no place for the table {}", table.name);
    }
    while let Some((before, after)) = rest.split_once("<!-- table ") {
        let (name, after) = after.split_once(" -->\n").context("a table's mark has no end")?;
        let table =
            TABLES.iter().find(|table| table.name == name).with_context(|| format!("no table is called {name}"))?;
        let (_, after) = after.split_once("<!-- end -->").with_context(|| format!("the table {name} has no end"))?;
        text += &format!("{before}{}\n{}<!-- end -->", begin(name), table.markdown(measured)?);
        rest = after;
    }
    Ok(text + rest)
}

fn begin(name: &str) -> String {
    format!("<!-- table {name} -->")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_the_tables_of_the_measurements() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let page = read(&root.join("host/docs/performance.md")).unwrap();
        let filled = filled(&page, &root.join("tests/measured")).unwrap();
        assert!(page == filled, "write them: cargo run -p gradsync-bench -- tables");
    }

    #[test]
    fn an_unknown_table_and_a_table_without_an_end_are_errors() {
        let marks: String = TABLES.iter().map(|table| begin(table.name) + "\n").collect();
        for (text, part) in [("", "no place for the table kernels"), ("<!-- table speed -->\n", "called speed")] {
            let page = if text.is_empty() { String::new() } else { format!("{text}{marks}") };
            let error = filled(&page, Path::new("nowhere")).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(filled(&marks, Path::new("nowhere")).unwrap_err().to_string().contains("kernels has no end"));
    }

    #[test]
    fn times_have_two_digits_or_more() {
        let shown = [2.11, 23.88, 999.6, 12_345.0].map(microseconds);
        assert_eq!(shown, ["2.1 µs", "24 µs", "1.0 ms", "12 ms"]);
    }
}
