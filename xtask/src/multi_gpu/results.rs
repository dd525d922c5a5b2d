//! What the processes of one launch report, collected into cases with one outcome each.
//!
//! Pure: it is given lines and ends, starts nothing and prints nothing. Silence is never taken for success: a process
//! that does not report a case has failed it.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use super::{launch::End, suites::Who};

/// What compute-sanitizer is told to exit with when it has found something: no rank program exits with it.
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
    /// What each process has to say about it, if it has something to say.
    pub(crate) notes: Vec<String>,
}

/// What is said in a launch.
#[derive(Debug)]
pub(crate) struct Verdict {
    /// In the order of their first report. What went wrong outside of cases is the last one, [`Verdict::LAUNCH`].
    pub(crate) cases: Vec<Case>,
}

impl Verdict {
    /// The name of the case that stands for the launch.
    pub(crate) const LAUNCH: &str = "the launch itself";

    pub(crate) fn count(&self, outcome: Outcome) -> usize {
        self.cases.iter().filter(|case| case.outcome == outcome).count()
    }
}

/// One process's word on one case.
#[derive(Debug, Deserialize)]
struct Said {
    case: String,
    outcome: Outcome,
    #[serde(default)]
    note: String,
    /// How often it was said; two cases of one name would hide each other.
    #[serde(skip)]
    times: usize,
}

impl Said {
    fn with_note(&self, what: &str) -> String {
        if self.note.is_empty() { what.to_owned() } else { format!("{what}: {}", self.note) }
    }
}

/// What one process has said so far.
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
    /// For these processes, each with whether it is a victim.
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

    /// Takes a line from the standard output of the process at `index`. Gives back what to show of it at once: text as
    /// it is, of results only those that are no news to be glad of.
    pub(crate) fn line(&mut self, index: usize, line: &str) -> Option<String> {
        let Some(json) = line.strip_prefix('@') else { return Some(line.to_owned()) };
        match self.result(index, json) {
            Ok(shown) => shown,
            Err(error) => {
                // Where the line ended in mid-air there may be nothing else wrong than that a victim was killed.
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

    /// Decides, when every process has ended.
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
            let what = match said.outcome {
                Outcome::Passed => "passed",
                Outcome::Failed => "failed",
                Outcome::NotRun => "did not run it",
            };
            if said.outcome != Outcome::Passed || !said.note.is_empty() {
                notes.push(said.with_note(&format!("{} {what}", heard.who)));
            }
            if said.times > 1 {
                notes.push(format!("{} reported it {} times", heard.who, said.times));
            }
            // A victim's word does not count: it may be its last.
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
            // Usually all have the same reason.
            if said.all(|other| other.note == first.note) {
                notes = vec![if first.note.is_empty() { "no reason given".to_owned() } else { first.note.clone() }];
            }
        }
        Case { name: name.to_owned(), outcome, notes }
    }

    /// What went wrong and no case says.
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
    /// What is wrong with an end that the cases do not explain.
    fn ended_wrongly(&self, end: &End) -> Option<String> {
        let has_failed = || self.said.values().any(|said| said.outcome == Outcome::Failed);
        match (end, self.victim) {
            (End::Exited(0), true) => Some("was expected to end badly, and exited with code 0".to_owned()),
            (End::Exited(0), false) => None,
            // That is how a process says that a case failed.
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
