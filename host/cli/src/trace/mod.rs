//! `gradsync trace`: compares the last calls of all ranks, which [`gradsync::trace`] writes, and reports where they differ.

mod analysis;
mod files;
mod text;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use gradsync::trace::RankTrace;
use gradsync_cli::messages::Listener;
use gradsync_cli::text::{printable_json, shown};
use serde::{Deserialize, Serialize};

use self::analysis::Analysis;
pub(crate) use self::files::{files, has_failure, has_file, reported_failure};

/// The arguments of `gradsync trace`.
#[derive(Args)]
pub(crate) struct Trace {
    /// The folder that GRADSYNC_TRACE_DIR named.
    folder: PathBuf,

    /// How many ranks there were, if more than the record tells.
    #[arg(short = 'n', long, value_name = "RANKS")]
    ranks: Option<usize>,

    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// How a rank has ended by itself, in words, or that it has not; of the ranks that a launcher has started.
pub(crate) type Ends = BTreeMap<usize, Option<String>>;

/// The last calls of ranks, and how ranks have ended, as far as their launcher knows.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Record {
    traces: BTreeMap<usize, RankTrace>,
    ends: Ends,
}

impl Record {
    /// The traces in a folder, of ranks with these ends.
    pub(crate) fn of(folder: &Path, ends: Ends) -> Self {
        // A folder that cannot be read has no traces for the user either.
        let traces = files::read(folder).map(|read| read.traces).unwrap_or_default();
        Self { traces, ends }
    }

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
                "{}: there is no file rank-N.json; ranks write one when a call fails, and on SIGUSR1, into the folder that {} names",
                shown(&self.folder),
                gradsync::trace::DIRECTORY
            ));
        }
        let analysis = Analysis::of(&read.traces, self.ranks.unwrap_or(0), &BTreeMap::new());
        let output = if self.json {
            let json = serde_json::to_string(&analysis).map_err(|error| error.to_string())?;
            printable_json(&json).into_owned() + "\n"
        } else {
            analysis.to_string()
        };
        Listener::Stdout.print(&output).map_err(|error| error.to_string())
    }
}
