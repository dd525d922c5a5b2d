//! The files of a folder of traces.
//!
//! Other users may be able to write to the folder: only regular files of a bounded size are read, and contents that no rank writes are refused.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use gradsync::internal::trace::{GroupTrace, RankTrace, TracedCall, file_name};
use gradsync_cli::text::shown;

use crate::regular;

/// The limit of a file's size: some ten times as much as a rank writes among 10 000 ranks.
const MOST_BYTES: u64 = 64 << 20;
/// The limit of the number of ranks.
pub(crate) const MOST_RANKS: usize = 1 << 20;

/// The result of reading a folder.
pub(super) struct Read {
    /// The traces of the job that has written last.
    pub(super) traces: BTreeMap<usize, RankTrace>,
    /// The reasons why other files were not read.
    pub(super) unreadable: Vec<String>,
}

/// Whether a file has the name of a trace.
fn is_trace(path: &Path) -> bool {
    let numbers = || path.file_name()?.to_str()?.strip_prefix("rank-")?.strip_suffix(".json");
    numbers().is_some_and(|numbers| {
        let (rank, job) = numbers.split_once('.').map_or((numbers, None), |(rank, job)| (rank, Some(job)));
        rank.parse::<usize>().is_ok_and(|rank| path.ends_with(file_name(rank, job)))
    })
}

/// Reads the traces in a folder.
pub(super) fn read(folder: &Path) -> io::Result<Read> {
    let (mut jobs, mut unreadable) = (BTreeMap::<Option<String>, BTreeMap<usize, RankTrace>>::new(), Vec::new());
    let paths = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
    for path in paths.into_iter().filter(|path| is_trace(path)) {
        match read_file(&path) {
            Ok(trace) => _ = jobs.entry(trace.job.clone()).or_default().insert(trace.rank, trace),
            Err(error) => unreadable.push(format!("{}: {error}", shown(&path))),
        }
    }
    let written = |traces: &BTreeMap<usize, RankTrace>| traces.values().map(|trace| trace.written).fold(0.0, f64::max);
    let last = jobs.iter().max_by(|(_, left), (_, right)| written(left).total_cmp(&written(right)));
    let last = last.map(|(job, _)| job.clone());
    let traces = last.and_then(|job| jobs.remove(&job)).unwrap_or_default();
    let others: usize = jobs.values().map(BTreeMap::len).sum();
    if others > 0 {
        unreadable.push(format!("{}: {others} records of earlier jobs are left out", shown(folder)));
    }
    Ok(Read { traces, unreadable })
}

fn read_file(path: &Path) -> io::Result<RankTrace> {
    let trace: RankTrace = serde_json::from_slice(&regular::read(path, MOST_BYTES)?)?;
    check(&trace).map_err(|reason| io::Error::new(io::ErrorKind::InvalidData, reason))?;
    Ok(trace)
}

/// Refuses numbers of ranks that do not exist.
fn check(trace: &RankTrace) -> Result<(), String> {
    let possible = |rank: usize| match rank < MOST_RANKS {
        true => Ok(()),
        false => Err(format!("rank {rank} is beyond the limit of {MOST_RANKS} ranks")),
    };
    possible(trace.rank)?;
    for GroupTrace { group, rank, members, calls, .. } in &trace.groups {
        members.iter().try_for_each(|&member| possible(member))?;
        let mut seen = HashSet::new();
        if let Some(twice) = members.iter().find(|&member| !seen.insert(member)) {
            return Err(format!("rank {twice} is twice among the ranks of {group}"));
        }
        let peers = calls.iter().flat_map(|TracedCall { to, from, .. }| [*to, *from]).flatten();
        if let Some(rank) = [*rank].into_iter().chain(peers).find(|&rank| rank >= members.len()) {
            return Err(format!("rank {rank} is none of the {} ranks of {group}", members.len()));
        }
    }
    Ok(())
}

/// The traces that the ranks of a launcher's job write.
#[derive(Clone, Debug)]
pub(crate) struct JobFiles {
    pub(crate) folder: PathBuf,
    /// The number of the job, which is in the names of its files: no others are read.
    pub(crate) job: String,
}

/// One version of a file: each is a file of its own, which is renamed.
pub(crate) type Version = (u64, i64, i64);

impl JobFiles {
    fn path(&self, rank: usize) -> PathBuf {
        self.folder.join(file_name(rank, Some(&self.job)))
    }

    /// The version of a rank's file, if there is one.
    pub(crate) fn version(&self, rank: usize) -> Option<Version> {
        let metadata = fs::symlink_metadata(self.path(rank)).ok()?;
        Some((metadata.ino(), metadata.mtime(), metadata.mtime_nsec()))
    }

    /// Removes the files that ranks of the job had not finished when they were ended.
    pub(crate) fn remove_unfinished(&self) {
        let is_unfinished = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with(".rank-") && name.contains(&format!(".{}.json.", self.job)) && name.ends_with(".part")
        };
        let paths = fs::read_dir(&self.folder).into_iter().flatten().flatten().map(|entry| entry.path());
        // A file that cannot be removed does no harm: it is no record.
        paths.filter(is_unfinished).for_each(|path| _ = fs::remove_file(path));
    }

    /// The trace of a rank, if it has written one. A file that is no trace of this job counts as none.
    pub(crate) fn read(&self, rank: usize) -> Option<RankTrace> {
        let trace = read_file(&self.path(rank)).ok()?;
        (trace.rank == rank && trace.job.as_ref() == Some(&self.job)).then_some(trace)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A trace with one group and one call.
    fn trace(rank: usize, job: Option<&str>, written: f64) -> Value {
        let call = json!({"sequence": 1, "state": "posted", "posted": 1.0, "changed": 1.0, "operation": "send", "to": 0, "from": null,
                          "len": 1, "bytes": 4, "dtype": "f32", "within": null, "tensors": null});
        let group = json!({"group": "channel 0", "rank": 1, "members": [0, rank], "in_process": false, "failure": null, "has_left": false,
                           "calls": [call]});
        json!({"version": "0", "job": job, "rank": rank, "host": "h", "pid": 1, "written": written, "reason": "r", "groups": [group]})
    }

    fn write(folder: &Path, name: &str, trace: &Value) {
        fs::write(folder.join(name), trace.to_string()).unwrap();
    }

    #[test]
    fn read_takes_the_job_that_has_written_last() {
        let folder = tempfile::TempDir::new().unwrap();
        write(folder.path(), "rank-1.json", &trace(1, None, 5.0));
        write(folder.path(), "rank-1.a1.json", &trace(1, Some("a1"), 9.0));
        write(folder.path(), "rank-2.a1.json", &trace(2, Some("a1"), 7.0));
        write(folder.path(), "rank-2.b2.json", &trace(2, Some("b2"), 8.0));
        write(folder.path(), "rank-x.json", &trace(3, None, 99.0));
        let Read { traces, unreadable } = read(folder.path()).unwrap();
        assert_eq!(traces.keys().copied().collect::<Vec<_>>(), [1, 2]);
        assert!(traces.values().all(|trace| trace.job.as_deref() == Some("a1")));
        assert!(
            unreadable.len() == 1 && unreadable[0].ends_with("2 records of earlier jobs are left out"),
            "{unreadable:?}"
        );
        let files = JobFiles { folder: folder.path().into(), job: "b2".into() };
        assert_eq!([files.read(1).is_some(), files.read(2).is_some()], [false, true]);
        // A file of that name with another content is no record of the job.
        write(folder.path(), "rank-1.b2.json", &trace(1, Some("a1"), 9.0));
        assert!(files.read(1).is_none() && files.version(1).is_some());
        let unfinished = [".rank-1.b2.json.7.part", ".rank-1.a1.json.7.part", ".rank-1.json.7.part"];
        unfinished.iter().for_each(|name| fs::write(folder.path().join(name), "{").unwrap());
        files.remove_unfinished();
        assert_eq!(unfinished.map(|name| folder.path().join(name).exists()), [false, true, true]);
    }

    #[test]
    fn read_refuses_ranks_that_do_not_exist() {
        let refused = |change: &dyn Fn(&mut Value)| {
            let folder = tempfile::TempDir::new().unwrap();
            let mut trace = trace(1, None, 1.0);
            change(&mut trace);
            write(folder.path(), "rank-1.json", &trace);
            let read = read(folder.path()).unwrap();
            assert!(read.traces.is_empty());
            read.unreadable.concat()
        };
        let beyond = refused(&|trace| trace["rank"] = u64::MAX.into());
        assert!(beyond.contains("rank 18446744073709551615 is beyond the limit of 1048576 ranks"), "{beyond}");
        let member = refused(&|trace| trace["groups"][0]["members"][0] = (1u64 << 40).into());
        assert!(member.contains("rank 1099511627776 is beyond"), "{member}");
        for change in ["/groups/0/rank", "/groups/0/calls/0/to", "/groups/0/calls/0/from"] {
            let reason = refused(&|trace| *trace.pointer_mut(change).unwrap() = 2.into());
            assert!(reason.contains("rank 2 is none of the 2 ranks of channel 0"), "{change}: {reason}");
        }
        let twice = refused(&|trace| trace["groups"][0]["members"] = json!([1, 1]));
        assert!(twice.contains("rank 1 is twice among the ranks of channel 0"), "{twice}");
        let empty = refused(&|trace| trace["groups"][0]["members"] = json!([]));
        assert!(empty.contains("rank 1 is none of the 0 ranks"), "{empty}");
    }
}
