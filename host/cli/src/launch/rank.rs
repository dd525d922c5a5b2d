//! One rank: a process in a process group of its own, which ends with the launcher.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Instant;

use gradsync_cli::text::shown;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, getpid, getppid, set_parent_process_death_signal, waitid};
use rustix::thread::sched_setaffinity;

use super::Launch;
use super::affinity;
use super::environment::NodeRanks;
use super::output::{Output, OutputTargets, RankOutput};
use super::records::Records;
use super::signals::{self, Event};
use super::status::Status;

/// A started rank.
#[derive(Debug)]
pub(super) struct Rank {
    /// Its number in the job.
    pub(super) number: usize,
    pub(super) pid: Pid,
    process: Child,
    pub(super) output: Output,
    /// The status, once the process has ended.
    pub(super) status: Option<Status>,
    /// When the process has ended.
    pub(super) ended: Option<Instant>,
    /// Whether nothing is left of it: the process, and the processes that it has started.
    pub(super) is_over: bool,
}

/// The common arguments of the ranks of one start.
pub(super) struct Common<'a> {
    pub(super) launch: &'a Launch,
    pub(super) node: &'a NodeRanks,
    pub(super) targets: &'a OutputTargets,
    pub(super) records: &'a Records,
    /// The logical processors of each rank, if ranks are bound to cores.
    pub(super) processors: Option<&'a [Vec<usize>]>,
    pub(super) events: Sender<Event>,
}

/// The reason why there is no further process or thread, with a remedy where a limit is the reason.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock => {
            format!("{error}; raise the limit of processes: `ulimit -u`, or the limit of the container or job")
        }
        _ => error.to_string(),
    }
}

impl Rank {
    /// Starts a rank. Its end becomes an event.
    ///
    /// The thread that calls this lives as long as the launcher: the kernel ends the rank when that thread ends.
    pub(super) fn start(common: &Common<'_>, local_rank: usize) -> Result<Self, String> {
        let number = common.node.first_rank + local_rank;
        let output = RankOutput::new(common.targets, number)?;
        let [program, arguments @ ..] = &common.launch.program[..] else {
            return Err("there is no program to start".into());
        };
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Signals of a terminal reach the launcher alone, which passes them on.
        command.process_group(0);
        common.node.set(&mut command, local_rank);
        common.records.set(&mut command);
        let processors = common.processors.map(|processors| affinity::set(&processors[local_rank]));
        let launcher = getpid();
        let prepare = move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The launcher may have ended before that call.
            if getppid() != Some(launcher) {
                return Err(io::ErrorKind::NotFound.into());
            }
            Ok(processors.as_ref().map_or(Ok(()), |processors| sched_setaffinity(None, processors))?)
        };
        // SAFETY: three system calls between fork and exec, which use neither the heap nor locks.
        unsafe { command.pre_exec(prepare) };
        let mut process = command
            .spawn()
            .map_err(|error| format!("rank {number}: cannot start {}: {}", shown(program), reason(&error)))?;
        let pid = Pid::from_child(&process);
        let (Some(out), Some(err)) = (process.stdout.take(), process.stderr.take()) else {
            return Err(format!("rank {number} was started without pipes"));
        };
        let output = output
            .start(out, err)
            .map_err(|error| format!("rank {number}: no thread for its output: {}", reason(&error)))?;
        let (events, generation) = (common.events.clone(), common.node.generation);
        let wait = move || {
            // The rank is not reaped here, so that its process group keeps its number until the whole group has been ended.
            let ended = loop {
                match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
                    Err(rustix::io::Errno::INTR) | Ok(None) => {}
                    Ok(Some(status)) => break Status::from(status),
                    Err(_) => break Status::Code(1),
                }
            };
            // The receiver is gone only if the launcher ends.
            let _ = events.send(Event::Ended(generation, local_rank, ended));
        };
        thread::Builder::new()
            .name("rank".into())
            .spawn(wait)
            .map_err(|error| format!("rank {number}: no thread to wait for its end: {}", reason(&error)))?;
        Ok(Rank { number, pid, process, output, status: None, ended: None, is_over: false })
    }

    pub(super) fn is_running(&self) -> bool {
        self.status.is_none()
    }

    pub(super) fn has_failed(&self) -> bool {
        self.status.is_some_and(|status| !status.is_success())
    }

    /// Sends a signal if the rank runs: SIGINT, SIGSTOP, SIGCONT and SIGKILL go to the processes that it has started as well.
    pub(super) fn signal(&self, signal: i32) {
        if self.is_running() {
            let to_group = [libc::SIGINT, libc::SIGSTOP, libc::SIGCONT, libc::SIGKILL].contains(&signal);
            signals::send(self.pid, signal, to_group);
        }
    }

    /// Sends a signal to what is left of its process group. Until the rank is over, no other group has the number.
    pub(super) fn signal_group(&self, signal: i32) {
        if !self.is_over {
            signals::send(self.pid, signal, true);
        }
    }

    /// Whether the rank handles a signal, so that the signal does not end it.
    pub(super) fn handles(&self, signal: i32) -> bool {
        self.is_running() && signals::is_handled(self.pid, signal)
    }

    /// Called when the process has ended.
    pub(super) fn has_ended(&mut self, status: Status) {
        self.status = Some(status);
        self.ended = Some(Instant::now());
    }

    /// Called when the process has ended and nothing that it is known to have started is left.
    pub(super) fn reap(&mut self) -> io::Result<()> {
        self.signal_group(libc::SIGKILL);
        self.is_over = true;
        self.process.wait().map(drop)
    }
}
