//! The reports of a launch's processes, collected into cases with one outcome each.
//!
//! The module is pure: it receives lines and ends, starts nothing and prints nothing. A missing report is never a success: a process that
//! does not report a case has failed it.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use super::{launch::End, suites::Who};

/// The exit code of compute-sanitizer after it has found an error; no rank program exits with it.
pub(crate) const SANITIZER_CODE: i32 = 86;

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outcome {
    Passed,
    Failed,
    NotRun,
}

/// A case of a launch, over all its processes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    /// The notes of the processes that have one.
    pub(crate) notes: Vec<String>,
}

/// The result of a launch.
#[derive(Debug)]
pub(crate) struct Verdict {
    /// In the order of their first report. Errors outside of cases are collected in the last one, [`Verdict::LAUNCH`].
    pub(crate) cases: Vec<Case>,
}

impl Verdict {
    /// The name of the case for errors of the launch itself.
    pub(crate) const LAUNCH: &str = "the launch itself";

    pub(crate) fn count(&self, outcome: Outcome) -> usize {
        self.cases.iter().filter(|case| case.outcome == outcome).count()
    }
}

/// One process's report of one case.
#[derive(Debug, Deserialize)]
struct Said {
    case: String,
    outcome: Outcome,
    #[serde(default)]
    note: String,
    /// The number of reports of the case; two cases of one name would hide each other.
    #[serde(skip)]
    times: usize,
}

impl Said {
    fn with_note(&self, description: &str) -> String {
        if self.note.is_empty() { description.to_owned() } else { format!("{description}: {}", self.note) }
    }
}

/// The reports of one process so far.
struct Heard {
    who: Who,
    victim: bool,
    said: BTreeMap<String, Said>,
    last: Option<String>,
    unreadable: Vec<String>,
}

/// Collects the results of one launch.
pub(crate) struct Ledger {
    heard: Vec<Heard>,
    cases: Vec<String>,
}

impl Ledger {
    /// A ledger for these processes, each with a flag whether it is a victim.
    pub(crate) fn new(processes: impl IntoIterator<Item = (Who, bool)>) -> Self {
        let heard = processes.into_iter().map(|(who, victim)| Heard {
            who,
            victim,
            said: BTreeMap::new(),
            last: None,
            unreadable: Vec::new(),
        });
        Self { heard: heard.collect(), cases: Vec::new() }
    }

    /// Processes a line from the standard output of the process at `index`. Returns the text to show at once: other text unchanged, and of
    /// results only failures and cases that were not run.
    pub(crate) fn line(&mut self, index: usize, line: &str) -> Option<String> {
        let Some(json) = line.strip_prefix('@') else { return Some(line.to_owned()) };
        match self.result(index, json) {
            Ok(shown) => shown,
            Err(error) => {
                // A victim may have been killed in the middle of a line, which is no error.
                if !self.heard[index].victim {
                    let unreadable = format!("printed a result that cannot be read: {line} ({error:#})");
                    self.heard[index].unreadable.push(unreadable);
                }
                Some(line.to_owned())
            }
        }
    }

    fn result(&mut self, index: usize, json: &str) -> Result<Option<String>> {
        let value: Value = serde_json::from_str(json).context("not JSON")?;
        let heard = &mut self.heard[index];
        if value.get("case").is_none() {
            bail!("names no case");
        }
        let mut said: Said = serde_json::from_value(value).context("not a case")?;
        let shown = match said.outcome {
            Outcome::Passed => None,
            Outcome::Failed => Some(said.with_note(&format!("FAILED {}", said.case))),
            Outcome::NotRun => Some(said.with_note(&format!("not run {}", said.case))),
        };
        if !self.cases.contains(&said.case) {
            self.cases.push(said.case.clone());
        }
        heard.last = Some(said.case.clone());
        said.times = 1 + heard.said.get(&said.case).map_or(0, |before| before.times);
        heard.said.insert(said.case.clone(), said);
        Ok(shown)
    }

    /// Decides the outcomes after every process has ended.
    pub(crate) fn close(self, ends: &[End]) -> Verdict {
        let mut cases: Vec<Case> = self.cases.iter().map(|name| self.case(name)).collect();
        let notes = self.beyond_cases(ends);
        if !notes.is_empty() {
            cases.push(Case { name: Verdict::LAUNCH.to_owned(), outcome: Outcome::Failed, notes });
        }
        Verdict { cases }
    }

    fn case(&self, name: &str) -> Case {
        let mut notes = Vec::new();
        let (mut passed, mut not_run, mut failed) = (false, false, false);
        for heard in &self.heard {
            let Some(said) = heard.said.get(name) else {
                if !heard.victim {
                    failed = true;
                    notes.push(format!("{} did not report it", heard.who));
                }
                continue;
            };
            let report = match said.outcome {
                Outcome::Passed => "passed",
                Outcome::Failed => "failed",
                Outcome::NotRun => "did not run it",
            };
            if said.outcome != Outcome::Passed || !said.note.is_empty() {
                notes.push(said.with_note(&format!("{} {report}", heard.who)));
            }
            if said.times > 1 {
                notes.push(format!("{} reported it {} times", heard.who, said.times));
            }
            // A victim's report does not count, because the victim may have been killed before it could report a failure.
            if !heard.victim {
                passed |= said.outcome == Outcome::Passed;
                not_run |= said.outcome == Outcome::NotRun;
                failed |= said.outcome == Outcome::Failed || said.times > 1;
            }
        }
        let outcome = match (failed, passed, not_run) {
            (true, ..) => Outcome::Failed,
            (false, true, true) => {
                notes.push("some ran it and others did not".to_owned());
                Outcome::Failed
            }
            (false, true, false) => Outcome::Passed,
            (false, false, _) => Outcome::NotRun,
        };
        let mut said = self.heard.iter().filter_map(|heard| heard.said.get(name));
        if let (Outcome::NotRun, Some(first)) = (outcome, said.next()) {
            // Usually all processes have the same reason.
            if said.all(|other| other.note == first.note) {
                notes = vec![if first.note.is_empty() { "no reason given".to_owned() } else { first.note.clone() }];
            }
        }
        Case { name: name.to_owned(), outcome, notes }
    }

    /// The errors that no case reports.
    fn beyond_cases(&self, ends: &[End]) -> Vec<String> {
        let mut notes = Vec::new();
        for (heard, end) in self.heard.iter().zip(ends) {
            notes.extend(heard.unreadable.iter().map(|unreadable| format!("{} {unreadable}", heard.who)));
            if let Some(how) = heard.ended_wrongly(end) {
                let last = match &heard.last {
                    Some(case) => format!("the last case that it reported is {case}"),
                    None => "it reported no case".to_owned(),
                };
                notes.push(format!("{} {how}; {last}", heard.who));
            }
        }
        if self.cases.is_empty() && notes.is_empty() {
            notes.push("no case was reported".to_owned());
        }
        notes
    }
}

impl Heard {
    /// The error in a process's end, unless a failed case explains it.
    fn ended_wrongly(&self, end: &End) -> Option<String> {
        let has_failed = || self.said.values().any(|said| said.outcome == Outcome::Failed);
        match (end, self.victim) {
            (End::Exited(0), true) => Some("was expected to end badly, and exited with code 0".to_owned()),
            (End::Exited(0), false) => None,
            // The exit code 1 reports a failed case.
            (End::Exited(1), false) if has_failed() => None,
            (End::Exited(SANITIZER_CODE), _) => Some(format!("{end}, compute-sanitizer's for an error that it found")),
            (End::Stuck, _) | (_, false) => Some(end.to_string()),
            (_, true) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::multi_gpu::launch::Cause;

    /// Two ranks; the second may be a victim.
    fn two(victim: bool) -> Ledger {
        Ledger::new([(Who::Rank(0), false), (Who::Rank(1), victim)])
    }

    fn case(name: &str, outcome: &str, note: &str) -> String {
        format!(r#"@{{"case":"{name}","outcome":"{outcome}","seconds":0.5,"note":"{note}"}}"#)
    }

    fn feed<const N: usize>(mut ledger: Ledger, lines: [(usize, String); N]) -> Ledger {
        for (index, line) in lines {
            ledger.line(index, &line);
        }
        ledger
    }

    /// Each case as "name: outcome", followed by its notes.
    fn shown(verdict: &Verdict) -> Vec<String> {
        let show = |case: &Case| format!("{}: {:?}; {}", case.name, case.outcome, case.notes.join("; "));
        verdict.cases.iter().map(show).collect()
    }

    const FINE: [End; 2] = [End::Exited(0), End::Exited(0)];

    #[test]
    fn ledger_passes_a_case_when_every_process_reports_it() {
        let lines = [(0, case("f32", "passed", "")), (1, case("f32", "passed", "slow"))];
        let verdict = feed(two(false), lines).close(&FINE);
        assert_eq!(shown(&verdict), ["f32: Passed; rank 1 passed: slow"]);

        let one = Ledger::new([(Who::AllRanks, false)]);
        let verdict = feed(one, [(0, case("f32", "passed", ""))]).close(&[End::Exited(0)]);
        assert_eq!(shown(&verdict), ["f32: Passed; "]);
    }

    #[test]
    fn ledger_fails_a_case_that_one_process_does_not_report() {
        let verdict = feed(two(false), [(0, case("f32", "passed", ""))]).close(&FINE);
        assert_eq!(shown(&verdict), ["f32: Failed; rank 1 did not report it"]);
    }

    #[test]
    fn ledger_names_the_ranks_and_exit_code_of_a_failed_case() {
        let lines = [(0, case("f32", "passed", "")), (1, case("f32", "failed", "off by 3"))];
        let verdict = feed(two(false), lines).close(&[End::Exited(0), End::Exited(1)]);
        assert_eq!(shown(&verdict), ["f32: Failed; rank 1 failed: off by 3"]);
    }

    #[test]
    fn ledger_counts_an_unexplained_bad_end_as_a_failure() {
        let lines = || [(0, case("f32", "passed", "")), (1, case("f32", "passed", ""))];
        let launch = |ends: [End; 2]| shown(&feed(two(false), lines()).close(&ends)).swap_remove(1);
        let expected = "the launch itself: Failed; rank 1 exited with code 1; the last case that it reported is f32";
        assert_eq!(launch([End::Exited(0), End::Exited(1)]), expected);
        let expected = "the launch itself: Failed; \
            rank 0 still ran after another had failed, and was killed; the last case that it reported is f32; \
            rank 1 was ended by signal 6 (SIGABRT); the last case that it reported is f32";
        assert_eq!(launch([End::Killed(Cause::OtherFailed), End::Signal("6 (SIGABRT)".into())]), expected);
        assert!(launch([End::Exited(0), End::Exited(SANITIZER_CODE)]).contains("compute-sanitizer's for an error"));

        let verdict = two(false).close(&[End::Exited(0), End::Killed(Cause::Deadline)]);
        let expected =
            "the launch itself: Failed; rank 1 still ran at the deadline, and was killed; it reported no case";
        assert_eq!(shown(&verdict), [expected]);
    }

    #[test]
    fn ledger_fails_a_launch_without_a_case() {
        assert_eq!(shown(&two(false).close(&FINE)), ["the launch itself: Failed; no case was reported"]);
    }

    #[test]
    fn ledger_wants_a_victim_to_end_badly_and_not_to_report() {
        let lines = || [(0, case("f32", "passed", "")), (1, case("f32", "failed", "on purpose"))];
        for end in [End::Exited(7), End::Signal("9 (SIGKILL)".into()), End::Killed(Cause::Outlived)] {
            let verdict = feed(two(true), lines()).close(&[End::Exited(0), end.clone()]);
            assert_eq!(shown(&verdict), ["f32: Passed; rank 1 failed: on purpose"]);
            let verdict = feed(two(true), [(0, case("f32", "passed", ""))]).close(&[End::Exited(0), end]);
            assert_eq!(shown(&verdict), ["f32: Passed; "]);
        }
        let verdict = feed(two(true), [(0, case("f32", "passed", ""))]).close(&FINE);
        assert!(shown(&verdict)[1].contains("rank 1 was expected to end badly, and exited with code 0"));
        // The other ranks have missed a case that only the victim reported.
        let verdict = feed(two(true), [(1, case("f32", "passed", ""))]).close(&[End::Exited(0), End::Exited(7)]);
        assert_eq!(shown(&verdict), ["f32: Failed; rank 0 did not report it"]);
    }

    #[test]
    fn ledger_takes_a_case_as_not_run_when_all_agree() {
        let lines = [(0, case("f8", "not-run", "too old")), (1, case("f8", "not-run", "too old"))];
        assert_eq!(shown(&feed(two(false), lines).close(&FINE)), ["f8: NotRun; too old"]);
        let lines = [(0, case("f8", "not-run", "")), (1, case("f8", "not-run", "too old"))];
        let expected = "f8: NotRun; rank 0 did not run it; rank 1 did not run it: too old";
        assert_eq!(shown(&feed(two(false), lines).close(&FINE)), [expected]);
        let lines = [(0, case("f8", "passed", "")), (1, case("f8", "not-run", "too old"))];
        let expected = "f8: Failed; rank 1 did not run it: too old; some ran it and others did not";
        assert_eq!(shown(&feed(two(false), lines).close(&FINE)), [expected]);
    }

    #[test]
    fn ledger_keeps_two_cases_of_one_name_apart() {
        let passed = || case("f32", "passed", "");
        let verdict = feed(two(false), [(0, passed()), (1, passed()), (0, passed())]).close(&FINE);
        assert_eq!(shown(&verdict), ["f32: Failed; rank 0 reported it 2 times"]);
    }

    #[test]
    fn ledger_fails_on_an_unreadable_result_and_names_the_line() {
        let bad = ["@{oops", "@{\"cas\":\"f32\"}", "@[]", "@{\"case\":\"f32\",\"outcome\":\"fine\"}"];
        for line in bad {
            let good = [(0, case("f32", "passed", "")), (1, case("f32", "passed", ""))];
            let mut ledger = feed(two(false), good);
            assert_eq!(ledger.line(1, line).as_deref(), Some(line));
            let shown = shown(&ledger.close(&FINE));
            let expected = format!("the launch itself: Failed; rank 1 printed a result that cannot be read: {line} (");
            assert!(shown[1].starts_with(&expected), "{shown:?}");
        }
        // A victim's line may be incomplete.
        let mut ledger = feed(two(true), [(0, case("f32", "passed", ""))]);
        assert_eq!(ledger.line(1, "@{oops").as_deref(), Some("@{oops"));
        assert_eq!(shown(&ledger.close(&[End::Exited(0), End::Exited(9)])), ["f32: Passed; "]);
    }

    #[test]
    fn ledger_shows_failures_alone_at_once() {
        let mut ledger = two(false);
        assert_eq!(ledger.line(0, "plain @{text}").as_deref(), Some("plain @{text}"));
        assert_eq!(ledger.line(0, &case("f32", "passed", "")), None);
        assert_eq!(ledger.line(1, &case("f32", "failed", "off")).as_deref(), Some("FAILED f32: off"));
    }
}
