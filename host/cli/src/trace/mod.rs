//! `gradsync trace`: compares the last calls of all ranks, which [`gradsync::trace`] writes, and reports where they differ.

mod analysis;
mod files;
mod text;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use gradsync_cli::messages::Listener;
use gradsync_cli::text::{printable_json, shown};

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

/// Whether a rank has ended, as far as its launcher knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    No,
    /// The rank has ended, with this description.
    Yes(String),
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

/// Compares the traces in a folder and describes the result, if there are any. `ranks` has the ranks that the caller knows.
pub(crate) fn explanation(folder: &Path, world_size: usize, ranks: &BTreeMap<usize, Ended>) -> Option<String> {
    let traces = files::read(folder).ok()?.traces;
    (!traces.is_empty()).then(|| Analysis::of(&traces, world_size, ranks).to_string())
}
