//! The end of one start: the comparison of the ranks' last calls, and the exit status.

use std::time::Duration;

use gradsync_cli::messages::{complain, say};
use gradsync_cli::text::{one_line, shown};

use super::generation::Generation;
use super::machines::Machines;
use super::rank::Rank;
use super::signals::Event;
use super::status::Status;
use super::timing::RECORDS;
use crate::trace::{Blamed, End, Record};

/// The outcome of one start of all ranks.
pub(super) enum Outcome {
    Succeeded,
    /// The exit status of the first failure.
    Failed(u8),
    /// A signal to the launcher ended the ranks; the exit status for it.
    Stopped(u8),
}

/// The reason why ranks are being ended.
#[derive(Debug)]
pub(super) enum Cause {
    /// This rank on this machine failed first.
    Rank(usize),
    Signal(i32),
    OtherMachine,
}

impl Generation<'_> {
    /// Says once that records of calls cannot be written.
    pub(super) fn unwritten(&mut self, reason: &str) {
        if !std::mem::replace(&mut self.is_unwritten, true) && !self.launch.is_plain {
            let folder = self.records.folder().map(|folder| shown(folder).to_string()).unwrap_or_default();
            say("warning", format_args!("records of calls are not written to {folder}: {reason}"));
        }
    }

    /// Shows where ranks part, by the last calls that the ranks of this machine have written.
    pub(super) fn explain(&mut self) {
        if !std::mem::replace(&mut self.is_explained, true) {
            show(&self.record(), self.world_size);
        }
    }

    /// The same at the end, for the ranks of all machines. Returns the rank that is blamed among all.
    fn explain_end(&mut self) -> Option<Blamed> {
        let Some(machines) = &self.machines else {
            self.explain();
            return self.blamed.clone();
        };
        let record = self.exchange_records(machines);
        show(&record, self.world_size);
        record.blamed
    }

    /// Gives other machines the record of this one, and takes theirs; if they do not come, this machine's alone.
    fn exchange_records(&self, machines: &Machines) -> Record {
        let own = self.record();
        let deadline = Duration::from_secs_f64(self.launch.grace) + RECORDS;
        let exchanged = serde_json::to_vec(&own).map_err(|error| error.to_string()).and_then(|bytes| {
            let all = machines.exchange(&bytes, deadline).map_err(|error| error.to_string())?;
            let parsed = all.iter().map(|bytes| serde_json::from_slice(bytes));
            parsed.collect::<Result<Vec<Record>, _>>().map_err(|error| error.to_string())
        });
        match exchanged {
            Ok(records) => records.into_iter().collect(),
            Err(reason) => {
                say("warning", format_args!("the record of calls has this machine's ranks only: {reason}"));
                own
            }
        }
    }

    fn record(&self) -> Record {
        let describe = |rank: &Rank| {
            let is_by_itself = self.ended_before.as_ref().is_none_or(|ended| ended.contains(&rank.number));
            let end = match rank.status.filter(|_| is_by_itself) {
                Some(status) => End::Ended(status.to_string()),
                None if self.stopped.contains(&rank.number) => End::IsStopped,
                None if self.late.iter().any(|late| late.rank == rank.number) => End::IsLate,
                None => End::Runs,
            };
            (rank.number, end)
        };
        Record {
            traces: self.records.read(self.ranks.iter().map(|rank| rank.number)),
            ends: self.ranks.iter().map(describe).collect(),
            blamed: self.blamed.clone(),
        }
    }

    /// Reports records that ranks could not write while they ended.
    fn report_unwritten(&mut self) {
        for event in std::iter::from_fn(|| self.events.next(Duration::ZERO)).collect::<Vec<_>>() {
            match event {
                Event::Unwritten(generation, reason) if generation == self.number => self.unwritten(&reason),
                other => self.events.repeat(other),
            }
        }
    }

    pub(super) fn outcome(&mut self) -> Outcome {
        let Some((cause, _)) = self.ending.take() else { return Outcome::Succeeded };
        self.report_unwritten();
        match cause {
            Cause::Rank(index) => {
                let status = self.ranks[index].status.unwrap_or(Status::Code(1));
                if self.launch.is_plain {
                    return Outcome::Failed(status.code());
                }
                let blamed = self.explain_end();
                let rank = &self.ranks[index];
                let lines = rank.output.last_lines();
                let failed = format!("rank {} (process {}) {status}", rank.number, rank.pid.as_raw_nonzero());
                if lines.is_empty() {
                    complain(format_args!("{failed}, and had printed nothing"));
                } else {
                    let lines: String = lines.iter().map(|line| format!("\n    {}", one_line(line))).collect();
                    complain(format_args!("{failed}; its last lines:{lines}"));
                }
                Outcome::Failed(blamed.map_or(status.code(), |blamed| blamed.code))
            }
            Cause::OtherMachine => Outcome::Failed(self.explain_end().map_or(1, |blamed| blamed.code)),
            Cause::Signal(signal) => {
                // The other machines explain why their ranks end.
                self.machines.iter().for_each(|machines| _ = self.exchange_records(machines));
                let is_success = |rank: &Rank| rank.status.is_some_and(Status::is_success);
                let is_success = self.ranks.iter().all(is_success);
                Outcome::Stopped(if is_success { 0 } else { Status::Signal { number: signal, has_core: false }.code() })
            }
        }
    }
}

/// Prints the comparison of the last calls of ranks, if there are any.
fn show(record: &Record, world_size: usize) {
    if let Some(text) = record.explanation(world_size) {
        say("record of calls", text);
    }
}
