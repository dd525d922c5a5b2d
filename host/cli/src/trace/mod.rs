//! `gradsync trace`: compares the last calls of all ranks, which [`gradsync::trace`] writes, and reports where they differ.

mod analysis;
mod files;
#[cfg(test)]
mod tests;
mod text;

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use gradsync::internal::trace::RankTrace;
use gradsync_cli::messages::Listener;
use gradsync_cli::text::{printable_json, shown};
use serde::{Deserialize, Serialize};

use self::analysis::Analysis;
pub(crate) use self::files::{JobFiles, MOST_RANKS, Version};

/// The arguments of `gradsync trace`.
#[derive(Args)]
pub(crate) struct Trace {
    /// The folder that GRADSYNC_TRACE_DIR named.
    folder: PathBuf,

    /// How many ranks there were, if more than the record tells.
    #[arg(short = 'n', long, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=MOST_RANKS as i64))]
    ranks: Option<u32>,

    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// The knowledge of a launcher about a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum End {
    /// It has ended by itself, in these words.
    Ended(String),
    /// It runs, or was ended by its launcher.
    Runs,
    /// It was asked for its record, and has not written it yet.
    IsLate,
    /// It is stopped, as by SIGSTOP.
    IsStopped,
}

/// The ranks that launchers have started.
pub(crate) type Ends = BTreeMap<usize, End>;

/// The rank that a launcher blames for the end of its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Blamed {
    pub(crate) rank: usize,
    /// The exit status of a launcher for it.
    pub(crate) code: u8,
    /// Whether the rank has failed because of another one, as its record says.
    pub(crate) is_follower: bool,
}

/// The last calls of ranks, and how ranks have ended, as far as their launchers know.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) traces: BTreeMap<usize, RankTrace>,
    pub(crate) ends: Ends,
    pub(crate) blamed: Option<Blamed>,
}

impl Record {
    /// Says where ranks part, if any of them has written its last calls.
    pub(crate) fn explanation(&self, world_size: usize) -> Option<String> {
        (!self.traces.is_empty()).then(|| Analysis::of(&self.traces, world_size, &self.ends).to_string())
    }
}

/// The record of several machines.
impl FromIterator<Record> for Record {
    fn from_iter<I: IntoIterator<Item = Record>>(records: I) -> Self {
        records.into_iter().fold(Record::default(), |mut all, record| {
            all.traces.extend(record.traces);
            all.ends.extend(record.ends);
            let is_cause = |blamed: &Option<Blamed>| blamed.as_ref().map(|blamed| !blamed.is_follower);
            if is_cause(&record.blamed) > is_cause(&all.blamed) {
                all.blamed = record.blamed;
            }
            all
        })
    }
}

impl Trace {
    pub(crate) fn run(&self) -> Result<(), String> {
        let read = files::read(&self.folder).map_err(|error| format!("{}: {error}", shown(&self.folder)))?;
        read.unreadable.iter().for_each(|reason| gradsync_cli::messages::say("warning", reason));
        if read.traces.is_empty() {
            return Err(format!(
                "{}: there is no record, rank-N.json or rank-N.JOB.json; ranks write one when a call fails, and on SIGUSR1, into the folder that {} names",
                shown(&self.folder),
                gradsync::internal::trace::DIRECTORY
            ));
        }
        let analysis = Analysis::of(&read.traces, self.ranks.unwrap_or(0) as usize, &BTreeMap::new());
        let output = if self.json {
            let json = serde_json::to_string(&analysis).map_err(|error| error.to_string())?;
            printable_json(&json).into_owned() + "\n"
        } else {
            analysis.to_string()
        };
        Listener::Stdout.print(&output).map_err(|error| error.to_string())
    }
}
