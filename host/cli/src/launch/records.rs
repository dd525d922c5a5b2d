//! The records of calls of the ranks of one start: the folders, requests, and reading.
//!
//! Folders may be slow, or full of other users' files. So all access but the creation is on other threads than the one that serves signals, which
//! waits for them for a bounded time.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use std::{env, thread};

use gradsync::internal::trace::{DIRECTORY, JOB, LAUNCHER, RankTrace};
use gradsync_cli::messages::say;
use gradsync_cli::text::shown;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Pid;
use tempfile::TempDir;

use super::guard::FOLDER_PREFIX;
use super::signals::Event;
use super::timing::{LOOK_FOR_TRACES, READING, TRACES};
use crate::regular;
use crate::trace::{JobFiles, Version};

/// The pipe in the private folder through which ranks report records that they cannot write.
const REPORTS: &str = "reports";

/// The records of one start.
#[derive(Debug)]
pub(super) struct Records {
    job: String,
    /// The launcher's private folder: the pipes of ranks, and the records unless the user has named a folder for them.
    private: Option<Arc<TempDir>>,
    files: Option<JobFiles>,
    /// The other end of the pipe for reports, which ends its reader.
    reports: Option<File>,
    /// Ends the thread that looks for failures when it is dropped.
    _looking: Option<Sender<()>>,
    /// Whether reading has taken too long once.
    is_stuck: Cell<bool>,
}

/// A rank that was asked for its record, and has not written it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LateRank {
    pub(super) rank: usize,
    /// The process that was asked.
    pub(super) process: Option<Pid>,
}

impl Records {
    /// Makes the folders, and looks for failures that the ranks report.
    ///
    /// # Errors
    /// If the folder that the user has named cannot be used. Without a temporary folder there are no records, which is a warning.
    pub(super) fn start(
        job: &str,
        generation: u32,
        ranks: std::ops::Range<usize>,
        events: &Sender<Event>,
    ) -> Result<Self, String> {
        let given = given(generation)?;
        let private = private().map_err(|reason| {
            let without = if given.is_some() {
                "ranks cannot be asked for records of calls"
            } else {
                "there are no records of calls"
            };
            say("warning", format_args!("{reason}; {without}"));
        });
        let private = private.ok().map(Arc::new);
        let folder = given.or_else(|| private.as_ref().map(|folder| folder.path().to_owned()));
        let files = folder.map(|folder| JobFiles { folder, job: job.to_owned() });
        let reports = private.as_ref().and_then(|folder| {
            let started = receive_reports(folder.path(), generation, events.clone());
            started
                .inspect_err(|error| tracing::warn!(%error, "ranks cannot report records that they cannot write"))
                .ok()
        });
        let look = |files: &JobFiles| look_for_failures(files.clone(), ranks, generation, events.clone());
        let looking = files.as_ref().map(look).transpose().map_err(|error| format!("no thread: {error}"))?;
        Ok(Records { job: job.to_owned(), private, files, reports, _looking: looking, is_stuck: Cell::new(false) })
    }

    pub(super) fn private(&self) -> Option<&Path> {
        self.private.as_ref().map(|folder| folder.path())
    }

    pub(super) fn folder(&self) -> Option<&Path> {
        self.files.as_ref().map(|files| &*files.folder)
    }

    /// Sets the variables of a rank. The number of the job also marks all processes that ranks start.
    pub(super) fn set(&self, command: &mut Command) {
        let mut set = |name: &str, value: Option<&OsStr>| match value {
            Some(value) => _ = command.env(name, value),
            None => _ = command.env_remove(name),
        };
        set(JOB, Some(self.job.as_ref()));
        set(DIRECTORY, self.folder().map(Path::as_os_str));
        set(LAUNCHER, self.private().map(Path::as_os_str));
    }

    /// Asks all ranks that use gradsync for their records, and waits a moment for them. Returns the ranks that have not written theirs.
    pub(super) fn request(&self) -> Vec<LateRank> {
        let (Some(private), Some(files)) = (self.private.clone(), self.files.clone()) else { return Vec::new() };
        self.within(TRACES, move || {
            let mut asked = ask(private.path(), &files);
            let end = Instant::now() + TRACES;
            loop {
                asked.retain(|(late, before)| files.version(late.rank) == *before);
                if asked.is_empty() || Instant::now() >= end {
                    return asked.into_iter().map(|(late, _)| late).collect();
                }
                thread::sleep(Duration::from_millis(5));
            }
        })
        .unwrap_or_default()
    }

    /// The records of these ranks, as far as they have written one.
    pub(super) fn read(&self, ranks: impl IntoIterator<Item = usize>) -> BTreeMap<usize, RankTrace> {
        let Some(files) = self.files.clone() else { return BTreeMap::new() };
        let ranks: Vec<usize> = ranks.into_iter().collect();
        let read = move || ranks.into_iter().filter_map(|rank| Some((rank, files.read(rank)?))).collect();
        self.within(Duration::ZERO, read).unwrap_or_default()
    }

    /// The outcome of work on the folders, unless it takes much longer than `time`.
    fn within<T: Send + 'static>(&self, time: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        if self.is_stuck.get() {
            return None;
        }
        let (sender, outcome) = channel();
        // The receiver is gone if the work has taken too long.
        let worker = thread::Builder::new().name("records".into()).spawn(move || _ = sender.send(work()));
        let reason = match worker.map(|_| outcome.recv_timeout(time + READING)) {
            Ok(Ok(outcome)) => return Some(outcome),
            Ok(Err(_)) => format!("it was not read within {:.1} s", (time + READING).as_secs_f64()),
            Err(error) => error.to_string(),
        };
        self.is_stuck.set(true);
        let folder = self.folder().map(|folder| shown(folder).to_string()).unwrap_or_default();
        say("warning", format_args!("{folder}: the record of calls is incomplete: {reason}"));
        None
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        // The private folder is removed as a whole.
        if let Some(files) = self.files.clone().filter(|files| Some(&*files.folder) != self.private()) {
            self.within(Duration::ZERO, move || files.remove_unfinished());
        }
        // An empty report ends the reader.
        self.reports.iter_mut().for_each(|reports| _ = reports.write_all(b"\n"));
    }
}

/// The folder that the user has named, as a path that stays right when a rank changes its folder.
fn given(generation: u32) -> Result<Option<PathBuf>, String> {
    let Some(folder) = env::var_os(DIRECTORY).filter(|folder| !folder.is_empty()).map(PathBuf::from) else {
        return Ok(None);
    };
    let refusal = |reason| format!("{DIRECTORY} ({}): no folder for the record of calls: {reason}", shown(&folder));
    let absolute = std::path::absolute(&folder).map_err(|error| refusal(error.to_string()))?;
    let absolute = if generation == 0 { absolute } else { absolute.join(format!("restart-{generation}")) };
    regular::make_folder(&absolute).map_err(refusal)?;
    Ok(Some(absolute))
}

/// A new folder that only this user can enter, whatever the umask is.
fn private() -> Result<TempDir, String> {
    let temporary = env::temp_dir();
    let make = || {
        let mut builder = tempfile::Builder::new();
        builder.prefix(FOLDER_PREFIX).permissions(Permissions::from_mode(0o700));
        let folder = builder.tempdir_in(std::path::absolute(&temporary)?)?;
        fs::set_permissions(folder.path(), Permissions::from_mode(0o700))?;
        Ok(folder)
    };
    make().map_err(|error: io::Error| format!("no temporary folder in {} (TMPDIR): {error}", shown(&temporary)))
}

/// Turns reports of ranks into events, until an empty one. Returns the pipe.
fn receive_reports(folder: &Path, generation: u32, events: Sender<Event>) -> io::Result<File> {
    let path = folder.join(REPORTS);
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    // Opened for both directions, the pipe has no end while no rank has it open.
    let pipe = OpenOptions::new().read(true).write(true).open(path)?;
    let lines = BufReader::new(pipe.try_clone()?).lines();
    let receive = move || {
        for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
            let Some((rank, reason)) = line.split_once(' ') else { continue };
            // Nobody listens only if the launcher ends.
            let _ = events.send(Event::Unwritten(generation, format!("rank {rank}: {reason}")));
        }
    };
    thread::Builder::new().name("reports".into()).spawn(receive)?;
    Ok(pipe)
}

/// Looks for a failure that a rank reports while it runs on, until the sender that it returns is dropped.
fn look_for_failures(
    files: JobFiles,
    ranks: std::ops::Range<usize>,
    generation: u32,
    events: Sender<Event>,
) -> io::Result<Sender<()>> {
    let (looking, stop) = channel();
    let look = move || {
        let mut seen = BTreeMap::new();
        while stop.recv_timeout(LOOK_FOR_TRACES) == Err(RecvTimeoutError::Timeout) {
            let versions = ranks.clone().filter_map(|rank| Some((rank, files.version(rank)?)));
            let written = versions.filter(|&(rank, version)| seen.insert(rank, version) != Some(version));
            let written: Vec<usize> = written.map(|(rank, _)| rank).collect();
            let failed = written.into_iter().filter_map(|rank| files.read(rank)).filter(has_failure);
            if let Some(first) = failed.min_by(|left, right| left.written.total_cmp(&right.written)) {
                // Nobody listens only if the launcher ends.
                let _ = events.send(Event::Reported(generation, first.rank, first.reason));
                return;
            }
        }
    };
    thread::Builder::new().name("failures".into()).spawn(look)?;
    Ok(looking)
}

/// Whether a rank has written its record because of a failure.
pub(super) fn has_failure(trace: &RankTrace) -> bool {
    trace.groups.iter().any(|group| group.failure.is_some())
}

/// Writes a request into the pipe of each process that reads one. Returns the ranks, and the versions of their files before.
fn ask(private: &Path, files: &JobFiles) -> Vec<(LateRank, Option<Version>)> {
    let entries = fs::read_dir(private).into_iter().flatten().flatten();
    let pipe = |name: &OsStr| {
        let (rank, process) = name.to_str()?.strip_prefix("rank-")?.split_once('.')?;
        let late = LateRank { rank: rank.parse().ok()?, process: Pid::from_raw(process.parse().ok()?) };
        let before = files.version(late.rank);
        // A pipe that nobody reads belonged to a process that has ended.
        let mut options = OpenOptions::new();
        options.write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW);
        let mut pipe = options.open(private.join(name)).ok()?;
        let is_pipe = pipe.metadata().ok()?.file_type().is_fifo();
        (is_pipe && pipe.write_all(b"?").is_ok()).then_some((late, before))
    };
    entries.filter_map(|entry| pipe(&entry.file_name())).collect()
}
