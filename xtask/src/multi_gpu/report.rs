//! The report of a whole run: the table, the lists below it, the counts and the exit code.
//!
//! The module is pure: it uses the verdicts of `results`, and prints nothing.

use std::fmt::Write;

use super::{
    results::{Case, Outcome, Verdict},
    suites::Suite,
};

/// One suite with one number of ranks.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) suite: String,
    pub(crate) world: usize,
    pub(crate) ran: Ran,
}

#[derive(Debug)]
pub(crate) enum Ran {
    Launched {
        verdict: Verdict,
        seconds: f64,
    },
    /// The launch was not run, for this reason.
    Not(String),
}

impl Ran {
    /// Whether processes may have been killed in it, either on purpose or because of a failure.
    pub(crate) fn may_have_killed(&self, suite: &Suite) -> bool {
        match self {
            Self::Launched { verdict, .. } => !suite.victims.is_empty() || verdict.count(Outcome::Failed) > 0,
            Self::Not(_) => false,
        }
    }
}

/// The numbers of cases that passed, failed and were not run; a launch that was not started counts as not run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) not_run: usize,
}

/// A number of ranks with its unit.
pub(crate) fn ranks(world: usize) -> String {
    format!("{world} rank{}", if world == 1 { "" } else { "s" })
}

impl Row {
    pub(crate) fn counts(&self) -> Counts {
        match &self.ran {
            Ran::Launched { verdict, .. } => Counts {
                passed: verdict.count(Outcome::Passed),
                failed: verdict.count(Outcome::Failed),
                not_run: verdict.count(Outcome::NotRun),
            },
            Ran::Not(_) => Counts { not_run: 1, ..Counts::default() },
        }
    }

    fn result(&self) -> &'static str {
        match self.counts() {
            Counts { failed: 1.., .. } => "FAILED",
            Counts { passed: 0, .. } => "not run",
            _ => "passed",
        }
    }

    fn title(&self) -> String {
        format!("{}, {}", self.suite, ranks(self.world))
    }

    fn cases(&self, outcome: Outcome) -> impl Iterator<Item = &Case> {
        let cases = match &self.ran {
            Ran::Launched { verdict, .. } => verdict.cases.as_slice(),
            Ran::Not(_) => &[],
        };
        cases.iter().filter(move |case| case.outcome == outcome)
    }
}

/// The counts of all rows.
pub(crate) fn total(rows: &[Row]) -> Counts {
    rows.iter().map(Row::counts).fold(Counts::default(), |sum, row| Counts {
        passed: sum.passed + row.passed,
        failed: sum.failed + row.failed,
        not_run: sum.not_run + row.not_run,
    })
}

/// The report after its headline, if it has one, with the counts on the last line.
pub(crate) fn render(headline: Option<&str>, rows: &[Row]) -> String {
    let mut text = headline.map(|line| format!("\n{line}\n")).unwrap_or_default();
    text.push_str(&launches(rows));
    text.push_str(&failed(rows));
    text.push_str(&not_run(rows));
    let Counts { passed, failed, not_run } = total(rows);
    text.push_str(&format!("\n{passed} passed, {failed} failed, {not_run} not run\n"));
    text
}

fn launches(rows: &[Row]) -> String {
    let mut table = vec![["suite", "ranks", "passed", "failed", "not run", "seconds", "result"].map(str::to_owned)];
    for row in rows {
        let start = [row.suite.clone(), row.world.to_string()];
        let middle = match &row.ran {
            Ran::Launched { seconds, .. } => {
                let Counts { passed, failed, not_run } = row.counts();
                [passed.to_string(), failed.to_string(), not_run.to_string(), format!("{seconds:.1}")]
            }
            Ran::Not(_) => ["-"; 4].map(str::to_owned),
        };
        let [suite, world] = start;
        let [passed, failed, not_run, seconds] = middle;
        table.push([suite, world, passed, failed, not_run, seconds, row.result().to_owned()]);
    }
    format!("\n{}", columns(&table, &[1, 2, 3, 4, 5]))
}

fn failed(rows: &[Row]) -> String {
    let mut text = String::new();
    for row in rows {
        for case in row.cases(Outcome::Failed) {
            let _ = writeln!(text, "  {}: {}", row.title(), case.name);
            for note in &case.notes {
                let _ = writeln!(text, "    {}", note.replace('\n', "\n      "));
            }
        }
    }
    section("failed", &text)
}

fn not_run(rows: &[Row]) -> String {
    let mut text = String::new();
    for row in rows {
        if let Ran::Not(why) = &row.ran {
            let _ = writeln!(text, "  {}: {why}", row.title());
        }
        for case in row.cases(Outcome::NotRun) {
            let _ = writeln!(text, "  {}: {}: {}", row.title(), case.name, case.notes.join("; "));
        }
    }
    section("not run", &text)
}

fn section(title: &str, text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("\n{title}:\n{text}") }
}

/// Lines of columns two spaces apart; the columns in `right` are aligned on the right.
fn columns<const N: usize>(table: &[[String; N]], right: &[usize]) -> String {
    let width = |column: usize| table.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for line in table {
        let cells = line.iter().zip(widths).enumerate().map(|(column, (cell, width))| {
            if right.contains(&column) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        let cells: Vec<String> = cells.collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(suite: &str, world: usize, cases: Vec<(&str, Outcome, &str)>) -> Row {
        let cases = cases.into_iter().map(|(name, outcome, note)| Case {
            name: name.to_owned(),
            outcome,
            notes: note.lines().map(str::to_owned).collect(),
        });
        let verdict = Verdict { cases: cases.collect() };
        Row { suite: suite.to_owned(), world, ran: Ran::Launched { verdict, seconds: 1.5 } }
    }

    #[test]
    fn render_shows_everything_with_the_counts_last() {
        let rows = [
            row("sums", 1, vec![("f32", Outcome::Passed, ""), ("f16", Outcome::NotRun, "old")]),
            row("sums", 2, vec![("f32", Outcome::Failed, "rank 0 failed: off by 3\nrank 1 did not report it")]),
            Row { suite: "sums".to_owned(), world: 4, ran: Ran::Not("it needs 4 GPUs, and here are 2".to_owned()) },
            row("old", 1, vec![("f16", Outcome::NotRun, "no reason given")]),
        ];
        let expected = "
suite  ranks  passed  failed  not run  seconds  result
sums       1       1       0        1      1.5  passed
sums       2       0       1        0      1.5  FAILED
sums       4       -       -        -        -  not run
old        1       0       0        1      1.5  not run

failed:
  sums, 2 ranks: f32
    rank 0 failed: off by 3
    rank 1 did not report it

not run:
  sums, 1 rank: f16: old
  sums, 4 ranks: it needs 4 GPUs, and here are 2
  old, 1 rank: f16: no reason given

1 passed, 1 failed, 3 not run
";
        assert_eq!(render(None, &rows), expected);
        assert_eq!(render(Some("1 GPU"), &rows), format!("\n1 GPU\n{expected}"));
        assert_eq!(total(&rows), Counts { passed: 1, failed: 1, not_run: 3 });
    }

    #[test]
    fn columns_are_aligned() {
        let table = [["a", "b", "c"], ["long", "1", "x"]].map(|line| line.map(str::to_owned));
        assert_eq!(columns(&table, &[1]), "a     b  c\nlong  1  x\n");
        let table = [["a", "wide"], ["bc", "1"]].map(|line| line.map(str::to_owned));
        assert_eq!(columns(&table, &[0, 1]), " a  wide\nbc     1\n");
    }
}
