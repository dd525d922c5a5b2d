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
#[path = "results_tests.rs"]
mod tests;
