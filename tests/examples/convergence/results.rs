//! Finished runs: one line of JSON each, appended as soon as a run has finished, so that an interrupted study continues from there.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::plan::{Arm, Purpose, Spec};
use crate::train::Outcome;

/// A run, its outcome, and its origin.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    #[serde(flatten)]
    pub(crate) spec: Spec,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
    /// The processor and its number of threads.
    pub(crate) machine: String,
    /// The commit of this repository.
    pub(crate) commit: String,
}

/// The reason why runs cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResultsError {
    #[error("{}: cannot be read or written", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("{}: line {line} is not a run: {source}", path.display())]
    Line { path: PathBuf, line: usize, source: serde_json::Error },
}

/// All known runs.
#[derive(Debug, Default)]
pub(crate) struct Results {
    pub(crate) records: Vec<Record>,
}

impl Results {
    /// Parses a file's text; `name` is for messages.
    pub(crate) fn parse(text: &str, name: &Path) -> Result<Self, ResultsError> {
        let record = |(index, line): (usize, &str)| {
            let path = name.to_owned();
            serde_json::from_str(line).map_err(|source| ResultsError::Line { path, line: index + 1, source })
        };
        Ok(Self { records: text.lines().enumerate().map(record).collect::<Result<_, _>>()? })
    }

    pub(crate) fn has(&self, spec: &Spec) -> bool {
        self.records.iter().any(|record| record.spec == *spec)
    }

    /// The runs of an arm for one purpose with this number of samples.
    pub(crate) fn of(&self, arm: Arm, purpose: Purpose, samples: usize) -> impl Iterator<Item = &Record> {
        let wanted = move |spec: &Spec| (spec.arm, spec.purpose, spec.samples) == (arm, purpose, samples);
        self.records.iter().filter(move |record| wanted(&record.spec))
    }
}

/// A file to which runs are appended.
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens or creates the file, and reads its runs. A last line that is incomplete because a study was killed is removed.
    pub(crate) fn open(path: &Path) -> Result<(Self, Results), ResultsError> {
        let failed = |source| ResultsError::File { path: path.to_owned(), source };
        let file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(failed)?;
        let text = std::fs::read_to_string(path).map_err(failed)?;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        file.set_len(whole as u64).map_err(failed)?;
        let results = Results::parse(&text[..whole], path)?;
        Ok((Self { path: path.to_owned(), file }, results))
    }

    pub(crate) fn append(&mut self, record: &Record) -> Result<(), ResultsError> {
        let line = serde_json::to_string(record).expect("a record is plain data") + "\n";
        let written = self.file.write_all(line.as_bytes());
        written.map_err(|source| ResultsError::File { path: self.path.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Method, Reduction, Task};

    pub(crate) fn record(rate: f64) -> Record {
        let arm = Arm { task: Task::Images, method: Method::Sgd, reduction: Reduction::AdasumTree, ranks: 16 };
        let spec = Spec { purpose: Purpose::Figure, arm, rate, seed: 3, samples: 110_000 };
        let outcome = Outcome {
            steps: 214,
            loss: Some(0.25),
            accuracy: Some(0.9),
            stopped: None,
            diverged: false,
            curve: vec![(None, 0.1), (Some(1.5), 0.5)],
            mass: Vec::new(),
        };
        Record { spec, outcome, machine: "a machine".into(), commit: "1f97cc5".into() }
    }

    #[test]
    fn a_study_that_was_killed_goes_on_with_whole_runs() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.jsonl");
        let (mut journal, results) = Journal::open(&path).unwrap();
        assert!(results.records.is_empty());
        journal.append(&record(0.2)).unwrap();
        journal.append(&record(0.4)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 5]).unwrap();
        let (mut journal, results) = Journal::open(&path).unwrap();
        assert_eq!(results.records, [record(0.2)]);
        assert!(results.has(&record(0.2).spec) && !results.has(&record(0.4).spec));
        journal.append(&record(0.1)).unwrap();
        assert_eq!(Journal::open(&path).unwrap().1.records, [record(0.2), record(0.1)]);
    }

    #[test]
    fn a_line_that_is_no_run_is_named() {
        let text = serde_json::to_string(&record(0.2)).unwrap() + "\n{\"purpose\": 7}\n";
        let error = Results::parse(&text, Path::new("some.jsonl")).unwrap_err();
        assert!(matches!(error, ResultsError::Line { line: 2, .. }), "{error}");
        assert!(error.to_string().contains("some.jsonl"), "{error}");
    }
}
