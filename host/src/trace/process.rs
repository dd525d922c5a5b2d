//! The recorders of this process, and their files.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use super::RankTrace;
use super::recorder::{Kind, Recorder, seconds};

/// The variable that names the folder of the files.
pub const DIRECTORY: &str = "GRADSYNC_TRACE_DIR";
/// The variables by which launchers number the processes of a job.
pub const RANK_VARIABLES: [&str; 4] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];
/// The most recorders to keep; beyond this number, the oldest group that a rank has left is dropped.
const MOST_GROUPS: usize = 64;

/// Where this process writes its traces.
#[derive(Debug)]
pub(super) struct Process {
    directory: PathBuf,
    /// The number that the launcher has given to this process.
    rank: Option<usize>,
    recorders: Mutex<Vec<Arc<Recorder>>>,
    /// The number of groups of all ranks that this process has joined, by transport and rank.
    groups: Mutex<HashMap<(&'static str, usize), usize>>,
    /// Held while a file is written.
    writing: Mutex<()>,
}

/// Begins to write traces on SIGUSR1, if `GRADSYNC_TRACE_DIR` is set; every communicator does so by itself. Until then, the signal keeps
/// its effect, which is to end the process unless the program handles it.
pub fn start() {
    start_tracing();
}

pub(super) fn start_tracing() -> Option<&'static Process> {
    static PROCESS: OnceLock<Option<Process>> = OnceLock::new();
    let process = PROCESS.get_or_init(|| {
        let directory = std::env::var_os(DIRECTORY).filter(|directory| !directory.is_empty())?;
        let number = |name: &&str| std::env::var(name).ok()?.parse().ok();
        let rank = RANK_VARIABLES.iter().find_map(number);
        let (recorders, groups, writing) = Default::default();
        Some(Process { directory: directory.into(), rank, recorders, groups, writing })
    });
    let process = process.as_ref()?;
    static LISTENING: std::sync::Once = std::sync::Once::new();
    LISTENING.call_once(|| {
        if let Err(error) = listen(process) {
            tracing::warn!(%error, "no trace is written on SIGUSR1");
        }
    });
    Some(process)
}

/// Starts a thread that writes all traces at every SIGUSR1.
#[cfg(unix)]
fn listen(process: &'static Process) -> io::Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGUSR1])?;
    let write = move || signals.forever().for_each(|_| process.write("SIGUSR1"));
    std::thread::Builder::new().name("gradsync-trace".into()).spawn(write).map(drop)
}

#[cfg(not(unix))]
fn listen(_: &'static Process) -> io::Result<()> {
    Ok(())
}

impl Process {
    /// Returns the number of a group of all ranks that `rank` joins now.
    pub(super) fn count_group(&self, transport: &'static str, rank: usize) -> usize {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let count = groups.entry((transport, rank)).or_default();
        *count += 1;
        *count - 1
    }

    pub(super) fn add(&self, recorder: Arc<Recorder>) {
        let mut recorders = self.recorders.lock().unwrap_or_else(PoisonError::into_inner);
        if recorders.len() >= MOST_GROUPS
            && let Some(oldest) = recorders.iter().position(|recorder| recorder.has_left())
        {
            recorders.remove(oldest);
        }
        recorders.push(recorder);
    }

    /// The number in the name of the file for this recorder's calls.
    fn file_of(&self, recorder: &Recorder, recorders: &[Arc<Recorder>]) -> usize {
        let of_process = || recorders.iter().find(|recorder| recorder.kind() == Kind::Processes);
        let rank = self.rank.or_else(|| of_process().map(|recorder| recorder.origin()));
        rank.unwrap_or_else(|| recorder.origin())
    }

    /// Writes the file of this process, or the files of all of its ranks.
    pub(super) fn write(&self, reason: &str) {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let recorders = self.recorders.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let file_of = |recorder: &Recorder| self.file_of(recorder, &recorders);
        let mut ranks: Vec<usize> = recorders.iter().map(|recorder| file_of(recorder)).chain(self.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        for rank in ranks {
            let groups = recorders.iter().filter(|recorder| file_of(recorder) == rank).map(|recorder| recorder.trace());
            let trace = RankTrace {
                version: env!("CARGO_PKG_VERSION").into(),
                rank,
                host: gethostname::gethostname().to_string_lossy().into_owned(),
                pid: std::process::id(),
                written: seconds(SystemTime::now()),
                reason: reason.to_owned(),
                groups: groups.collect(),
            };
            if let Err(error) = save(&self.directory, &trace) {
                tracing::warn!(%error, directory = %self.directory.display(), rank, "the trace is not written");
            }
        }
    }
}

/// Writes a file under another name, and renames it.
fn save(directory: &Path, trace: &RankTrace) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let text = serde_json::to_vec(trace)?;
    let unfinished = directory.join(format!(".rank-{}.{}.part", trace.rank, std::process::id()));
    // A killed process with the same id may have left such a file.
    match fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let written = options.open(&unfinished).and_then(|mut file| file.write_all(&text));
    let renamed = written.and_then(|()| fs::rename(&unfinished, directory.join(format!("rank-{}.json", trace.rank))));
    if renamed.is_err() {
        // The first error is reported.
        let _ = fs::remove_file(&unfinished);
    }
    renamed
}
