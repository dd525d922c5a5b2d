//! The files of a run: `--json` and `--plot`, opened before anything is measured.

use std::io;
use std::path::PathBuf;

use serde::Serialize;

use super::record::Measurement;
use super::{Perf, PerfError, plot};
use gradsync_cli::messages::Listener;
use gradsync_cli::output::{Destination, OutputFile};
use gradsync_cli::text;

/// The files that rank 0 writes at the end, and the destination of the table.
pub(crate) struct Files {
    json: Option<OutputFile>,
    plot: Option<(PathBuf, OutputFile)>,
    pub(crate) listener: Listener,
}

impl Files {
    /// Opens the files; fails for files that could not be written at the end.
    pub(crate) fn open(perf: &Perf) -> Result<Self, PerfError> {
        let find = |path: &PathBuf| Destination::find(path, &[]);
        let json = perf.json().map(find).transpose()?;
        let plot = perf.plot().map(find).transpose()?;
        if let (Some(path), Some(json), Some(plot)) = (perf.json(), &json, &plot) {
            if json.is_same(plot) {
                let path = text::shown(path);
                return Err(PerfError::Arguments(format!("--json and --plot would both write {path}")));
            }
        }
        let listener = Listener::beside(json.iter().chain(&plot));
        let plot = perf.plot().cloned().zip(plot.map(Destination::open).transpose()?);
        Ok(Self { json: json.map(Destination::open).transpose()?, plot, listener })
    }

    /// Writes the requested files.
    pub(crate) fn write(self, document: &impl Serialize, rows: &[Measurement]) -> Result<(), PerfError> {
        if let Some(mut file) = self.json {
            let json = serde_json::to_string_pretty(document).map_err(io::Error::from)? + "\n";
            file.write(text::printable_json(&json).as_bytes())?;
            file.finish()?;
        }
        if let Some((path, mut file)) = self.plot {
            let svg = plot::svg(rows).map_err(|reason| PerfError::File { path, reason })?;
            file.write(svg.as_bytes())?;
            file.finish()?;
        }
        Ok(())
    }
}
