//! The table: nccl-tests' columns, with the 99th percentile beside each time and the baseline at the end.

use super::layers::Layers;
use super::operation::{Operation, Row};
use super::plan::Section;
use super::record::{BaselineName, Load, Measurement, Timing};

/// The text above the rows of a section; `limit` is in GB/s of busbw.
pub(crate) fn heading(section: &Section, baseline: Option<BaselineName>, limit: Option<f64>) -> String {
    let mut title = format!("\n# {} on {}", section.operation.name(), section.place.backend());
    if let Some(transport) = section.place.transport() {
        title += &format!(" over {transport}, {} ranks", section.ranks);
    }
    title += &baseline.map_or(String::new(), |name| format!("; baseline: {}", name.full));
    title += &limit.map_or(String::new(), |limit| format!("; limit: {} GB/s of busbw", rate(limit)));
    title += &note(section).map_or(String::new(), |note| format!("; {note}"));
    let column = baseline.map_or("no baseline", |name| name.column);
    let side = |name: &str| format!("{name:^44}");
    let columns = format!("{:>9} {:>9} {:>8} {:>8} {:>6}", "time", "p99", "algbw", "busbw", "#wrong");
    let units = format!("{:>9} {:>9} {:>8} {:>8} {:>6}", "(us)", "(us)", "(GB/s)", "(GB/s)", "");
    let left = |size: &str, count: &str, kind: &str, redop: &str, root: &str| {
        format!("#{size:>12} {count:>13} {kind:>9} {redop:>9} {root:>5}")
    };
    let lines = [
        title,
        format!("{} {} {} {column:^17}", left("", "", "", "", ""), side("out-of-place"), side("in-place")),
        format!("{} {columns} {columns} {:>9} {:>7}", left("size", "count", "type", "redop", "root"), "time", "ratio"),
        format!("{} {units} {units} {:>9} {:>7}", left("(B)", "(elements)", "", "", ""), "(us)", ""),
    ];
    lines.map(|line| line.trim_end().to_owned() + "\n").concat()
}

/// One row. Missing sides and a disabled baseline are `N/A`.
pub(crate) fn row(measurement: &Measurement) -> String {
    let Measurement { size_bytes, count, redop, .. } = measurement;
    let side = |timing: &Option<Timing>| match timing {
        Some(Timing { time_us, p99_us, algbw, busbw, wrong }) => {
            let wrong = wrong.map_or("N/A".into(), |wrong| wrong.to_string());
            format!("{:>9} {:>9} {:>8} {:>8} {wrong:>6}", time(*time_us), time(*p99_us), rate(*algbw), rate(*busbw))
        }
        None => ["N/A"; 5]
            .into_iter()
            .zip([9, 9, 8, 8, 6])
            .map(|(text, width)| format!("{text:>width$}"))
            .collect::<Vec<_>>()
            .join(" "),
    };
    let baseline = match &measurement.baseline {
        Some(baseline) => format!("{:>9} {:>7.3}", time(baseline.time_us), baseline.ratio),
        None => format!("{:>9} {:>7}", "N/A", "N/A"),
    };
    let (out, own) = (side(&measurement.out_of_place), side(&measurement.in_place));
    let types = measurement.types();
    format!(" {size_bytes:>12} {count:>13} {types:>9} {redop:>9} {:>5} {out} {own} {baseline}\n", -1)
}

/// Microseconds in at most nine characters.
fn time(microseconds: f64) -> String {
    match microseconds {
        time if time < 1e3 => format!("{time:.2}"),
        time if time < 1e5 => format!("{time:.1}"),
        time => format!("{time:.0}"),
    }
}

/// GB/s in at most eight characters.
fn rate(rate: f64) -> String {
    if rate < 1e4 { format!("{rate:.2}") } else { format!("{rate:.0}") }
}

/// The text below all tables.
pub(crate) fn footer(
    measurements: &[Measurement],
    loads: &[Load],
    left_out: &[String],
    wrong: u64,
    is_checked: bool,
    failure: Option<&str>,
) -> String {
    let mut text = "\n".to_owned();
    for reason in left_out {
        text += &format!("# not measured: {reason}\n");
    }
    if let Some(reason) = failure {
        text += &format!("# FAILED before the end: {reason}\n");
    }
    if let Some(Load { kernel, source, load_ms }) = loads.iter().max_by(|a, b| a.load_ms.total_cmp(&b.load_ms)) {
        let number = loads.len();
        text += &format!(
            "# Kernels loaded       : {number}, the slowest in {load_ms:.1} ms: {kernel}, from its {source}\n"
        );
    }
    let verdict = if wrong == 0 { "OK" } else { "FAILED" };
    text += &match is_checked {
        true => format!("# Out of bounds values : {wrong} {verdict}\n"),
        false => "# Out of bounds values : not checked\n".into(),
    };
    let rates: Vec<f64> = measurements.iter().filter_map(|row| Some(row.timing()?.busbw)).collect();
    if !rates.is_empty() {
        text += &format!("# Avg bus bandwidth    : {:.4}\n", rates.iter().sum::<f64>() / rates.len() as f64);
    }
    text + "#\n"
}

/// The part of a section's heading that is specific to its operation.
fn note(section: &Section) -> Option<String> {
    match section.operation {
        Operation::Gram | Operation::Combine => Some(format!("{} vectors", section.ranks)),
        operation if operation.has_tensors() => {
            let most = section.rows.iter().map(|row| row.layers.count()).max().unwrap_or(0);
            let nodes = section.rows.iter().find_map(Row::nodes);
            let nodes = nodes
                .map_or(String::new(), |nodes| format!(", {} ranks a node in schemes of two levels", nodes.per_node));
            let cut = match section.rows.first().map(|row| row.layers) {
                Some(Layers::Of(model)) => format!(" in the proportions of {}'s", model.name()),
                _ => String::new(),
            };
            Some(format!("{most} tensors{cut}, fewer where there are fewer elements{nodes}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_and_time_keep_to_their_columns() {
        for microseconds in [0.01, 12.345, 999.99, 1e4, 99_999.9, 1e8] {
            assert!(time(microseconds).len() <= 9, "{}", time(microseconds));
        }
        assert_eq!((time(12.345), time(123_456.7), rate(0.126)), ("12.35".into(), "123457".into(), "0.13".into()));
    }

    #[test]
    fn footer_names_the_slowest_load() {
        let load = |kernel: &str, source: &str, load_ms| Load { kernel: kernel.into(), source: source.into(), load_ms };
        let loads = [load("gram_f32_p4", "ptx", 41.25), load("peer_adasum_f32_p4", "cubin", 1.5)];
        let line = "# Kernels loaded       : 2, the slowest in 41.2 ms: gram_f32_p4, from its ptx\n";
        let footer = |loads: &[Load]| footer(&[], loads, &[], 0, true, None);
        assert!(footer(&loads).contains(line), "{}", footer(&loads));
        assert!(!footer(&[]).contains("Kernels loaded"));
    }
}
