//! The table of results: its cells, and its form on a console.
//!
//! The report takes the same cells, so that the two cannot differ.

use crate::Outcome;
use crate::curve::steps_to;
use crate::search::Search;

/// The accuracy that is waited for.
pub(crate) const MARK: usize = 90;

/// One heading a column; numbers are right-aligned, the first column is text.
pub(crate) const HEADINGS: [&str; 9] = [
    "mode",
    "learning rate",
    "train loss",
    "test accuracy",
    "steps to 90 %",
    "steps",
    "seconds",
    "in reduction",
    "share",
];

/// The row of one mode, from the run with the chosen learning rate.
pub(crate) fn cells(search: &Search) -> [String; 9] {
    let run = search.best();
    let (steps, reduction) = (run.time.steps.as_secs_f64(), run.time.reduction.as_secs_f64());
    [
        search.mode.name().into(),
        rate(run.rate),
        loss(run.train.loss),
        percent(run.last().test.accuracy()),
        steps_to(&run.curve, MARK).map_or("not reached".into(), |step| step.to_string()),
        run.last().step.to_string(),
        format!("{steps:.2}"),
        format!("{reduction:.2}"),
        percent(reduction / steps),
    ]
}

/// For a console.
pub(crate) fn text(outcome: &Outcome) -> String {
    let rows: Vec<[String; 9]> = outcome.searches.iter().map(cells).collect();
    let mut lines = vec![String::new(); rows.len() + 1];
    for (column, heading) in HEADINGS.iter().enumerate() {
        let width = rows.iter().map(|row| row[column].chars().count()).chain([heading.len()]).max().unwrap_or(0);
        let texts = [*heading].into_iter().chain(rows.iter().map(|row| row[column].as_str()));
        for (line, text) in lines.iter_mut().zip(texts) {
            *line += &if column == 0 { format!("{text:<width$}") } else { format!("  {text:>width$}") };
        }
    }
    let rule = "-".repeat(lines[0].chars().count());
    lines.insert(1, rule);
    lines.join("\n")
}

/// Rates are powers of two, and read best as such.
pub(crate) fn rate(rate: f32) -> String {
    if rate < 1.0 && (1.0 / rate).fract() == 0.0 { format!("1/{}", 1.0 / rate) } else { rate.to_string() }
}

pub(crate) fn loss(loss: f64) -> String {
    format!("{loss:.4}")
}

pub(crate) fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

pub(crate) fn thousands(count: usize) -> String {
    let digits = count.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy);
    groups.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_people_write_them() {
        assert_eq!(rate(1.0 / 32.0), "1/32");
        assert_eq!(rate(1.0), "1");
        assert_eq!(rate(0.3), "0.3");
        assert_eq!(percent(0.9558), "95.6 %");
        assert_eq!([7, 317, 1797, 1_000_000].map(thousands).join(" "), "7 317 1,797 1,000,000");
        assert_eq!(loss(0.01239), "0.0124");
    }
}
