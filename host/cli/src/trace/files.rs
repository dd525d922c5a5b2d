//! The files of a folder of traces.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use gradsync::trace::RankTrace;
use gradsync_cli::text::shown;

/// The largest lag of a file system's clock behind the system's.
const COARSE: Duration = Duration::from_millis(20);

/// The result of reading a folder.
pub(super) struct Read {
    pub(super) traces: BTreeMap<usize, RankTrace>,
    /// The reasons why other files could not be read.
    pub(super) unreadable: Vec<String>,
}

fn path(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}.json"))
}

/// The rank in the name of a file, if it is a trace.
fn rank(path: &Path) -> Option<usize> {
    path.file_name()?.to_str()?.strip_prefix("rank-")?.strip_suffix(".json")?.parse().ok()
}

/// All files of traces in a folder.
pub(crate) fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let paths = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
    Ok(paths.into_iter().filter(|path| rank(path).is_some()).collect())
}

/// Whether the rank has written its file since `since`.
pub(crate) fn has_file(folder: &Path, rank: usize, since: SystemTime) -> bool {
    let written = fs::metadata(path(folder, rank)).and_then(|metadata| metadata.modified());
    written.is_ok_and(|written| written + COARSE >= since)
}

pub(super) fn read(folder: &Path) -> io::Result<Read> {
    let (mut traces, mut unreadable) = (BTreeMap::new(), Vec::new());
    for path in files(folder)? {
        let parse = |bytes: Vec<u8>| serde_json::from_slice::<RankTrace>(&bytes).map_err(io::Error::from);
        match fs::read(&path).and_then(parse) {
            Ok(trace) => _ = traces.insert(trace.rank, trace),
            Err(error) => unreadable.push(format!("{}: {error}", shown(&path))),
        }
    }
    Ok(Read { traces, unreadable })
}

/// Whether the rank has written its file because of a failure.
pub(crate) fn has_failure(folder: &Path, rank: usize) -> bool {
    let trace = fs::read(path(folder, rank)).ok().and_then(|bytes| serde_json::from_slice::<RankTrace>(&bytes).ok());
    trace.is_some_and(|trace| trace.groups.iter().any(|group| group.failure.is_some()))
}

/// The first rank that has written a file because of a failure, and the failure.
pub(crate) fn reported_failure(folder: &Path) -> Option<(usize, String)> {
    // This check runs several times a second: it reads nothing if no file exists.
    if files(folder).ok()?.is_empty() {
        return None;
    }
    let traces = read(folder).ok()?.traces;
    let failed = traces.into_values().filter(|trace| trace.groups.iter().any(|group| group.failure.is_some()));
    let first = failed.min_by(|left, right| left.written.total_cmp(&right.written))?;
    Some((first.rank, first.reason))
}
