//! Finished runs, and the file that keeps them, one per line: a study that was interrupted continues.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::study::Spec;
use crate::train::Outcome;

/// A finished run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    #[serde(flatten)]
    pub(crate) spec: Spec,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
    /// The machine that made the run.
    pub(crate) machine: String,
    /// The commit of the program.
    pub(crate) commit: String,
}

impl Record {
    /// The accuracy; `None` if the run diverged.
    pub(crate) fn score(&self) -> Option<f64> {
        self.outcome.accuracy.filter(|_| !self.outcome.diverged)
    }
}

/// All known runs.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    pub(crate) records: Vec<Record>,
    /// The file to which new runs are appended, if they are kept.
    file: Option<File>,
}

impl Runs {
    /// Opens or creates a file, and reads its runs. An incomplete last line, of a study that was killed, is removed.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let opened = OpenOptions::new().read(true).append(true).create(true).open(path);
        let file = opened.with_context(|| format!("{}: cannot be opened", path.display()))?;
        let text = std::fs::read_to_string(path).with_context(|| format!("{}: cannot be read", path.display()))?;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        file.set_len(whole as u64).with_context(|| format!("{}: cannot be written", path.display()))?;
        Ok(Self { file: Some(file), ..Self::parse(&text[..whole], path)? })
    }

    /// Parses a file's text; `path` is for errors.
    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self> {
        let record = |(index, line)| {
            serde_json::from_str(line).with_context(|| format!("{}: line {} is not a run", path.display(), index + 1))
        };
        Ok(Self { records: text.lines().enumerate().map(record).collect::<Result<_>>()?, file: None })
    }

    pub(crate) fn get(&self, spec: &Spec) -> Option<&Record> {
        self.records.iter().find(|record| record.spec == *spec)
    }

    pub(crate) fn add(&mut self, record: Record) -> Result<()> {
        if let Some(file) = &mut self.file {
            let line = serde_json::to_string(&record)? + "\n";
            file.write_all(line.as_bytes()).context("the run cannot be written to the file of runs")?;
        }
        self.records.push(record);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::Scale;
    use crate::study::tests::simulated;

    #[test]
    fn runs_go_on_with_whole_runs_after_a_kill() {
        let records = simulated(&Scale::demo().quick(), |spec| Some(spec.seed as f64 / 200.0)).records;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runs.jsonl");
        let mut runs = Runs::open(&path).unwrap();
        assert!(runs.records.is_empty());
        runs.add(records[0].clone()).unwrap();
        runs.add(records[1].clone()).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 5]).unwrap();
        let mut runs = Runs::open(&path).unwrap();
        assert_eq!(runs.records, records[..1]);
        assert!(runs.get(&records[0].spec).is_some() && runs.get(&records[1].spec).is_none());
        runs.add(records[2].clone()).unwrap();
        assert_eq!(Runs::open(&path).unwrap().records, [records[0].clone(), records[2].clone()]);
    }

    #[test]
    fn runs_name_a_line_that_is_no_run() {
        let error = Runs::parse("{\"purpose\": 7}\n", Path::new("some.jsonl")).unwrap_err();
        assert_eq!(error.to_string(), "some.jsonl: line 1 is not a run");
    }
}
