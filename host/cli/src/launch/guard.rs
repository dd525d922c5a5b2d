//! A process that outlives a launcher that was killed by a moment: it ends the remaining processes of the ranks' process groups, and those in
//! other groups that have the number of the job in their environment, and removes the launcher's private folder.
//!
//! The kernel ends the ranks themselves with the launcher, but not the processes that the ranks have started.

use std::collections::HashSet;
use std::fmt;
use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;

use clap::Args;
use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::descendants;

/// The prefix of the names of private folders.
pub(super) const FOLDER_PREFIX: &str = "gradsync-trace-";
/// The name of the hidden command.
const COMMAND: &str = "launch-guard";

/// The arguments of the hidden command that is the guard.
#[derive(Args)]
pub(crate) struct Guard {
    /// The number of the job.
    job: String,
    /// The folder to remove at the end.
    folder: Option<PathBuf>,
}

impl Guard {
    /// Reads lines `+PID` and `-PID` until the launcher ends, which is in good order after the line `.`.
    pub(crate) fn run(self) -> Result<(), String> {
        // A signal that is sent to several processes to end the launcher must not end the guard.
        for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::default()).map_err(|error| error.to_string())?;
        }
        let mut groups = HashSet::new();
        for line in io::stdin().lock().lines() {
            let line = line.map_err(|error| error.to_string())?;
            if line == "." {
                return Ok(());
            }
            let Some((sign, number)) = line.split_at_checked(1) else { continue };
            let Some(group) = number.parse().ok().and_then(Pid::from_raw) else { continue };
            if sign == "+" {
                groups.insert(group)
            } else {
                groups.remove(&group)
            };
        }
        // A group that does not exist any more has already ended.
        groups.into_iter().for_each(|group| _ = kill_process_group(group, Signal::KILL));
        descendants::kill_all_of(&self.job);
        let is_private = |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(FOLDER_PREFIX.as_bytes());
        if let Some(folder) = self.folder.filter(|folder| folder.file_name().is_some_and(is_private)) {
            // The launcher has removed the folder unless it was killed.
            let _ = std::fs::remove_dir_all(folder);
        }
        Ok(())
    }
}

/// The launcher's handle of the guard.
#[derive(Debug)]
pub(super) struct Guarded {
    process: Child,
    /// The pipe to the guard, which the end of the launcher closes.
    lines: Option<ChildStdin>,
}

impl Guarded {
    pub(super) fn start(job: &str, folder: Option<&Path>) -> io::Result<Self> {
        // This very program, even if another file has its name by now.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("gradsync").arg(COMMAND).arg(job).args(folder).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut process = command.spawn()?;
        Ok(Guarded { lines: process.stdin.take(), process })
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// Adds a process group that must end with the launcher.
    pub(super) fn add(&mut self, group: Pid) {
        self.say(format_args!("+{}", group.as_raw_nonzero()));
    }

    /// Removes a process group that has ended.
    pub(super) fn remove(&mut self, group: Pid) {
        self.say(format_args!("-{}", group.as_raw_nonzero()));
    }

    /// Sends a line to the guard. Without a guard, the kernel still ends the ranks with the launcher.
    fn say(&mut self, line: fmt::Arguments<'_>) {
        let Some(lines) = &mut self.lines else { return };
        if let Err(error) = lines.write_all(format!("{line}\n").as_bytes()) {
            tracing::warn!(%error, "the guard of the launcher has ended");
            self.lines = None;
        }
    }
}

impl Drop for Guarded {
    /// Nothing is left of the ranks when the launcher drops its handle.
    fn drop(&mut self) {
        self.say(format_args!("."));
        self.lines = None;
        // The guard ends at once, and its status has no meaning.
        let _ = self.process.wait();
    }
}
