//! `gradsync-bench tables`: writes the tables of the performance page and of the testing page from the runs in `tests/measured`.
//!
//! A table stands in a page between `<!-- table NAME -->` and `<!-- end -->`. Each file of a run is the JSON of `perf` or `compare`, or the
//! report of `cargo xtask test-multi-gpu`; its folder names the machine and the date.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
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
    /// The folder of the pages
    #[arg(long, value_name = "FOLDER", default_value = "host/docs")]
    pages: PathBuf,
}

/// The pages with tables.
const PAGES: [&str; 2] = ["performance.md", "testing.md"];

impl Tables {
    pub(crate) fn run(self) -> Result<()> {
        for page in PAGES.map(|name| self.pages.join(name)) {
            let before = read(&page)?;
            let after = filled(&before, &self.measured)?;
            if before != after {
                fs::write(&page, after).with_context(|| format!("cannot write {}", page.display()))?;
                Listener::Stdout.print(&format!("wrote {}\n", page.display()))?;
            }
        }
        Ok(())
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
    count: usize,
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
    /// The order of the table's column, and its title.
    column: (usize, String),
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
        files: &[("one-h200-2026-11-29/kernels", ""), ("one-h200-2026-11-29/kernels-of-two-dtypes", "")],
        cells: |row, _| {
            only(row.ranks != 4 && (row.operation != "cast" || row.dtype != row.from_dtype), || {
                vec![cell_of(row, (0, kernel(row)), by_bytes(row), rate)]
            })
        },
    },
    Table {
        name: "tensors",
        first: "call",
        files: &[
            ("one-h200-2026-11-29/tensors-resnet50", "the driver's copy"),
            ("one-h200-2026-11-29/tensors-bert-large", "the driver's copy"),
            ("one-h200-2026-11-29/pytorch", "PyTorch 2.11"),
        ],
        cells: |row, peer| {
            let model = if row.count < 100_000_000 { "ResNet-50, 161 tensors" } else { "BERT-large, 398 tensors" };
            only(row.operation != "zero", || beside(row, (0, format!("{model}, {}", kernel(row))), peer))
        },
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
        cells: |row, machine| only(is_shown(row), || by_size(row, machine)),
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
            vec![cell_of(row, (0, title), by_bytes(row), time)]
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
        cells: |row, machine| only(is_shown(row) && row.layers == 32, || by_size(row, machine)),
    },
    Table {
        name: "gloo",
        first: "bytes",
        files: &[("two-epyc-cores-2026-11-25/gloo", "processes")],
        cells: |row, ranks| by_size(row, &format!("{} {ranks}", row.ranks)),
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
                (0, format!("{}, {memory} memory", row.dtype)),
                time,
            )]
        },
    },
    Table {
        name: "cpu-kernels",
        first: "kernel",
        files: &[("xeon-32-threads-2026-11-29/kernels", "")],
        cells: |row, _| vec![cell_of(row, (0, kernel(row)), by_bytes(row), rate)],
    },
];

fn only(is_shown: bool, cells: impl FnOnce() -> Vec<Cell>) -> Vec<Cell> {
    if is_shown { cells() } else { Vec::new() }
}

fn by_size(row: &Row, column: &str) -> Vec<Cell> {
    vec![cell_of(row, (row.size_bytes, size(row)), (0, column.into()), time)]
}

fn cell_of(row: &Row, title: (usize, String), column: (usize, String), shown: fn(&Row) -> String) -> Cell {
    Cell { row: title, column, text: shown(row) }
}

/// The time of a call, and of its peer.
fn beside(row: &Row, title: (usize, String), peer: &str) -> Vec<Cell> {
    let Some(baseline) = &row.baseline else { return Vec::new() };
    vec![
        Cell {
            row: title.clone(),
            column: (0, "gradsync".into()),
            text: microseconds(own(row).map_or(0.0, |time| time.time_us)),
        },
        Cell { row: title, column: (0, peer.into()), text: microseconds(baseline.time_us) },
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
    let shown = |ratio: f64| if ratio < 10.0 { format!(" ({ratio:.2})") } else { format!(" ({ratio:.0})") };
    row.baseline.as_ref().map_or(String::new(), |baseline| shown(baseline.ratio))
}

fn microseconds(time: f64) -> String {
    match time {
        time if time < 9.95 => format!("{time:.1} µs"),
        time if time < 999.5 => format!("{time:.0} µs"),
        time if time < 9_950.0 => format!("{:.1} ms", time / 1e3),
        time => format!("{:.0} ms", time / 1e3),
    }
}

fn by_bytes(row: &Row) -> (usize, String) {
    (row.size_bytes, size(row))
}

/// Whether a table of many sizes shows this one: each is four times the last, up to the largest one that kernels take.
fn is_shown(row: &Row) -> bool {
    row.dtype == "f32" && (row.size_bytes.trailing_zeros() % 2 == 0 || row.size_bytes == 8 << 20)
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
        "adamw_step" => format!("a step of AdamW, {from_dtype} and {dtype}"),
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
                cells.entry((cell.row.1, cell.column.1)).or_insert(cell.text);
            }
        }
        ensure!(!rows.is_empty(), "the table {} has no rows", self.name);
        rows.sort_by_key(|(order, _)| *order);
        columns.sort_by_key(|(order, _)| *order);
        let columns: Vec<String> = columns.into_iter().map(|(_, title)| title).collect();
        let row = |(_, title): (usize, String)| {
            let cell = |column: &String| cells.get(&(title.clone(), column.clone())).cloned().unwrap_or_default();
            (title.clone(), columns.iter().map(cell).collect())
        };
        let rows: Vec<_> = rows.into_iter().map(row).collect();
        Ok(markdown(self.first, &columns, &rows))
    }
}

/// The page with its tables from the measurements.
fn filled(page: &str, measured: &Path) -> Result<String> {
    let (mut text, mut rest) = (String::new(), page);
    while let Some((before, after)) = rest.split_once("<!-- table ") {
        let (name, after) = after.split_once(" -->\n").context("a table's mark has no end")?;
        let table = match TABLES.iter().find(|table| table.name == name) {
            Some(table) => table.markdown(measured),
            None if name == "suites" => suites(measured),
            None => bail!("no table is called {name}"),
        }?;
        let (_, after) = after.split_once("<!-- end -->").with_context(|| format!("the table {name} has no end"))?;
        text += &format!("{before}<!-- table {name} -->\n{table}<!-- end -->");
        rest = after;
    }
    Ok(text + rest)
}

/// The reports of the suites, with the way in which each was run.
const REPORTS: [(&str, &str); 4] = [
    ("one-h200-2026-11-29/suites", ""),
    ("one-h200-2026-11-29/suites-two-nodes", ", two nodes"),
    ("one-h200-2026-11-29/suites-memcheck", ", memcheck"),
    ("two-h200-2026-11-29/suites", ", two GPUs"),
];

/// The table of suites: the cases that passed, by the number of ranks. Suites with the same numbers share a row, and so do suites that were
/// run in one way only: that row has their sum.
fn suites(measured: &Path) -> Result<String> {
    let (mut columns, mut found) = (Vec::new(), BTreeMap::<String, BTreeMap<String, String>>::new());
    for (file, how) in REPORTS {
        for line in read(&measured.join(file).with_extension("txt"))?.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let &[suite, ranks, passed, failed, _, _, "passed" | "FAILED"] = words.as_slice() else { continue };
            let column = format!("{ranks} rank{}{how}", if ranks == "1" { "" } else { "s" });
            let shown = if failed == "0" { passed.to_owned() } else { format!("{passed}, {failed} failed") };
            if !columns.contains(&column) {
                columns.push(column.clone());
            }
            found.entry(suite.to_owned()).or_default().insert(column, shown);
        }
    }
    let mut rows = BTreeMap::<Vec<String>, Vec<String>>::new();
    let mut run_once = BTreeMap::<usize, (u64, Vec<String>)>::new();
    for (suite, cells) in found {
        let cells: Vec<_> = columns.iter().map(|column| cells.get(column).cloned().unwrap_or_default()).collect();
        let filled: Vec<_> = (0..cells.len()).filter(|&column| !cells[column].is_empty()).collect();
        match (filled.as_slice(), filled.first().and_then(|&column| cells[column].parse::<u64>().ok())) {
            (&[column], Some(passed)) => {
                let (sum, suites) = run_once.entry(column).or_default();
                *sum += passed;
                suites.push(format!("`{suite}` ({passed})"));
            }
            _ => rows.entry(cells).or_default().push(format!("`{suite}`")),
        }
    }
    for (column, (sum, suites)) in run_once {
        let cells = (0..columns.len()).map(|other| if other == column { sum.to_string() } else { String::new() });
        rows.insert(cells.collect(), suites);
    }
    let mut rows: Vec<_> = rows.into_iter().map(|(cells, suites)| (suites.join(", "), cells)).collect();
    rows.sort();
    Ok(markdown("suites", &columns, &rows))
}

fn markdown(first: &str, columns: &[String], rows: &[(String, Vec<String>)]) -> String {
    let mut text = format!("| {first} | {} |\n|{}\n", columns.join(" | "), "---|".repeat(columns.len() + 1));
    for (title, cells) in rows {
        text += &format!("| {title} | {} |\n", cells.join(" | "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filled_pages_have_the_tables_of_the_measurements() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut names = Vec::new();
        for page in PAGES.map(|name| root.join("host/docs").join(name)) {
            let text = read(&page).unwrap();
            let filled = filled(&text, &root.join("tests/measured")).unwrap();
            assert!(text == filled, "{}: write its tables by: cargo run -p gradsync-bench -- tables", page.display());
            names.extend(text.lines().filter_map(|line| line.strip_prefix("<!-- table ")).map(str::to_owned));
        }
        for Table { name, .. } in TABLES {
            assert!(names.contains(&format!("{name} -->")), "no page has the table {name}");
        }
    }

    #[test]
    fn filled_refuses_an_unknown_table_and_one_without_an_end() {
        let refused = |page: &str| filled(page, Path::new("nowhere")).unwrap_err().to_string();
        assert!(refused("<!-- table speed -->\n<!-- end -->").contains("no table is called speed"));
        assert!(refused("<!-- table suites").contains("has no end"));
        assert!(refused("<!-- table suites -->\n").contains("nowhere"));
    }

    #[test]
    fn time_has_two_digits_or_more() {
        let shown = [2.11, 23.88, 999.6, 12_345.0].map(microseconds);
        assert_eq!(shown, ["2.1 µs", "24 µs", "1.0 ms", "12 ms"]);
    }
}
