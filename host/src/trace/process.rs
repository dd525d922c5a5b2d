//! The recorders of this process, and their files.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::RankTrace;
use super::file::save;
use super::recorder::{Now, RankKind, Recorder};

/// The variable that names the folder of the files.
pub const DIRECTORY: &str = "GRADSYNC_TRACE_DIR";
/// The variable by which `gradsync launch` numbers each start of a job: traces have the number in their names and contents.
pub const JOB: &str = "GRADSYNC_JOB";
/// The variable that names the private folder of `gradsync launch`, by which it asks for traces.
pub const LAUNCHER: &str = "GRADSYNC_LAUNCHER";
/// The variables by which launchers number the processes of a job.
pub const RANK_VARIABLES: [&str; 4] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];
/// The most recorders to keep; beyond this number, the oldest group that a rank has left is dropped.
const MOST_GROUPS: usize = 64;

/// Where this process writes its traces.
#[derive(Debug)]
pub(super) struct Process {
    directory: PathBuf,
    /// The number of the job.
    job: Option<String>,
    /// The launcher's private folder.
    #[cfg(target_os = "linux")]
    launcher: Option<PathBuf>,
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
        let folder = |name| std::env::var_os(name).filter(|folder| !folder.is_empty()).map(PathBuf::from);
        let directory = folder(DIRECTORY)?;
        // The number is part of a file's name.
        let is_number = |job: &String| !job.is_empty() && job.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let job = std::env::var(JOB).ok().filter(is_number);
        let number = |name: &&str| std::env::var(name).ok()?.parse().ok();
        let rank = RANK_VARIABLES.iter().find_map(number);
        let (recorders, groups, writing) = Default::default();
        Some(Process {
            directory,
            job,
            #[cfg(target_os = "linux")]
            launcher: folder(LAUNCHER),
            rank,
            recorders,
            groups,
            writing,
        })
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

/// Starts a thread that writes all traces at every SIGUSR1, and one that writes them at every request of the launcher.
#[cfg(unix)]
fn listen(process: &'static Process) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    if let (Some(launcher), Some(rank)) = (&process.launcher, process.rank)
        && let Err(error) = super::requests::listen(launcher, rank, || process.write("a request of the launcher"))
    {
        tracing::warn!(%error, launcher = %launcher.display(), "the launcher cannot ask for traces");
    }
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
        let of_process = || recorders.iter().find(|recorder| recorder.kind() == RankKind::Processes);
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
        let now = Now::new();
        for rank in ranks {
            let of_rank = recorders.iter().filter(|recorder| file_of(recorder) == rank);
            let groups = of_rank.map(|recorder| recorder.trace(now));
            let trace = RankTrace {
                version: env!("CARGO_PKG_VERSION").into(),
                job: self.job.clone(),
                rank,
                host: gethostname::gethostname().to_string_lossy().into_owned(),
                pid: std::process::id(),
                written: now.seconds,
                reason: reason.to_owned(),
                groups: groups.collect(),
                #[cfg(feature = "cuda")]
                device_waits: super::waits::waits(now),
                #[cfg(not(feature = "cuda"))]
                device_waits: Vec::new(),
            };
            if let Err(error) = save(&self.directory, &trace) {
                tracing::warn!(%error, directory = %self.directory.display(), rank, "the trace is not written");
                self.report(rank, &error);
            }
        }
    }

    /// Tells a launcher, which would otherwise blame a rank without its trace, or else its user, that a trace is not written.
    fn report(&self, rank: usize, error: &io::Error) {
        static ONCE: std::sync::Once = std::sync::Once::new();
        #[cfg(target_os = "linux")]
        if self.launcher.as_ref().is_some_and(|launcher| super::requests::report(launcher, rank, error).is_ok()) {
            return;
        }
        if self.job.is_some() {
            let directory = self.directory.display();
            ONCE.call_once(|| {
                eprintln!("gradsync: rank {rank}: no record of calls is written to {directory}: {error}")
            });
        }
    }
}
