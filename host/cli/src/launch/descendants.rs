//! Processes that ranks have started and left behind: in the rank's process group, or in a session of their own (`setsid`).
//!
//! The launcher is a subreaper: a process whose parent has ended becomes a child of the launcher, which ends it or, if it has ended, reaps it.
//! As process 1 of a container the launcher is that anyway. The guard of a launcher that was killed finds such processes by the number of the job
//! in their environment.

use std::collections::HashSet;
use std::fs;
use std::str::FromStr;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_child_subreaper, waitpid};

use super::signals;

/// The children of this process that are neither ranks nor the guard.
#[derive(Debug)]
pub(super) struct Descendants {
    /// The children of an earlier program in this process, as after `daemon & exec gradsync launch`.
    earlier: HashSet<Pid>,
}

/// A process that a rank has left behind.
#[derive(Clone, Copy, Debug)]
pub(super) struct Orphan {
    pid: Pid,
    group: Option<Pid>,
    /// The rank that its environment names, if it is of this job.
    rank: Option<usize>,
}

impl Descendants {
    /// From now on, this process adopts the orphans among its descendants.
    pub(super) fn adopt() -> Self {
        if let Err(error) = set_child_subreaper(Some(rustix::process::getpid())) {
            tracing::warn!(%error, "processes that ranks leave behind in sessions of their own may stay");
        }
        Descendants { earlier: children().into_iter().collect() }
    }

    /// Reaps the orphans that have ended, and returns the others; `known` are the ranks and the guard, and `job` is the number of the job.
    pub(super) fn orphans(&self, known: &HashSet<Pid>, job: &str) -> Vec<Orphan> {
        let unknown = children().into_iter().filter(|pid| !known.contains(pid));
        // An error means that the process is no child any more.
        let running = unknown.filter(|&pid| matches!(waitpid(Some(pid), WaitOptions::NOHANG), Ok(None)));
        let orphan = |pid| Orphan { pid, group: group(pid), rank: rank_of(pid, job) };
        let orphans = running.filter(|pid| !self.earlier.contains(pid)).map(orphan);
        // The descendants of an earlier program's children are not this job's.
        orphans.filter(|orphan| self.earlier.is_empty() || orphan.rank.is_some()).collect()
    }
}

impl Orphan {
    /// Whether the rank of this number, which is or was this process, has left it behind.
    pub(super) fn is_of(&self, rank: usize, process: Pid) -> bool {
        self.group == Some(process) || self.rank == Some(rank)
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    pub(super) fn group(&self) -> Option<Pid> {
        self.group
    }

    /// Sends it a signal, and to its process group if it has one of its own.
    pub(super) fn signal(&self, signal: i32) {
        signals::send(self.pid, signal, self.group == Some(self.pid));
    }
}

/// Ends all processes whose environment has the number of the job.
pub(super) fn kill_all_of(job: &str) {
    /// Processes may start others until they are ended themselves.
    const TIMES: usize = 100;
    for _ in 0..TIMES {
        let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = numbers.filter_map(|entry| Pid::from_raw(i32::from_str(entry.file_name().to_str()?).ok()?));
        let found: Vec<Pid> =
            pids.filter(|&pid| variable(pid, gradsync::internal::trace::JOB).as_deref() == Some(job)).collect();
        if found.is_empty() {
            return;
        }
        // A process that has ended in the meantime is what is wanted.
        found.into_iter().for_each(|pid| _ = kill_process(pid, Signal::KILL));
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// The children of this process.
fn children() -> Vec<Pid> {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let of_threads: Option<Vec<String>> =
        threads.map(|thread| fs::read_to_string(thread.path().join("children")).ok()).collect();
    let pid = |word: &str| word.parse().ok().and_then(Pid::from_raw);
    match of_threads.filter(|texts| !texts.is_empty()) {
        Some(texts) => texts.iter().flat_map(|text| text.split_whitespace()).filter_map(pid).collect(),
        // The kernel may be built without these files, and a thread may have ended while they were read.
        None => {
            let own = Some(rustix::process::getpid().as_raw_nonzero().get());
            let numbers = fs::read_dir("/proc").into_iter().flatten().flatten();
            let pids = numbers.filter_map(|entry| pid(entry.file_name().to_str()?));
            pids.filter(|&pid| stat(pid, 1) == own).collect()
        }
    }
}

/// A number in `/proc/PID/stat` behind the name and the state of the process: 1 is the parent, 2 the process group.
fn stat(pid: Pid, field: usize) -> Option<i32> {
    state_and_numbers(pid)?.split_whitespace().nth(field)?.parse().ok()
}

fn state_and_numbers(pid: Pid) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    stat.rsplit_once(") ").map(|(_, rest)| rest.to_owned())
}

fn group(pid: Pid) -> Option<Pid> {
    stat(pid, 2).and_then(Pid::from_raw)
}

/// Whether a process is stopped, as by SIGSTOP or a debugger.
pub(super) fn is_stopped(pid: Pid) -> bool {
    state_and_numbers(pid).is_some_and(|rest| rest.starts_with(['T', 't']))
}

/// The value of a variable in the environment with which a process was started.
fn variable(pid: Pid, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).ok()?;
    let value = |entry: &[u8]| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=").map(<[u8]>::to_vec);
    String::from_utf8(environment.split(|byte| *byte == 0).find_map(value)?).ok()
}

/// The rank of this job that has started a process, by the environment of the process.
pub(super) fn rank_of(pid: Pid, job: &str) -> Option<usize> {
    let is_of_job = variable(pid, gradsync::internal::trace::JOB).as_deref() == Some(job);
    variable(pid, "RANK").filter(|_| is_of_job)?.parse().ok()
}
