//! The processes of one launch: starts them, hands on their lines as they come, and ends every one, whatever happens.
//!
//! Each process leads a group of its own, and a group is killed whole: what a test starts, or wraps a rank in, goes with
//! it, stopped or not. Lines come out whole and one at a time. Nothing here knows what a line means or which launch
//! passes.

use std::{
    fmt,
    io::{BufRead, BufReader, Read, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::mpsc::{self, RecvTimeoutError, SyncSender},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// How often the ends of processes are looked for.
const POLL: Duration = Duration::from_millis(10);
/// How many lines wait to be printed before their writers have to.
const BACKLOG: usize = 1024;
/// How long lines are awaited after the last process: only one that left its group can hold a stream open then.
const DRAIN: Duration = Duration::from_secs(2);
/// How long a killed process may take to die; a driver that hangs can keep it for ever.
const DYING: Duration = Duration::from_secs(30);

/// One process to start.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) command: Command,
    /// Whether it is expected to end badly, so that the others are to live on.
    pub(crate) victim: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// For the whole launch.
    pub(crate) deadline: Duration,
    /// For the processes that still run when one has failed, and for victims when all others have ended.
    pub(crate) grace: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Out,
    Err,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Exited(i32),
    /// By a signal that we did not send: its number and name.
    Signal(String),
    /// By us.
    Killed(Cause),
    /// Not even by being killed.
    Stuck,
}

/// Why we kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    Deadline,
    /// A process that was to survive has failed, and the grace is over.
    OtherFailed,
    /// A victim that still ran, or was stopped, when the grace after the end of all others was over.
    Outlived,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exited with code {code}"),
            Self::Signal(signal) => write!(f, "was ended by signal {signal}"),
            Self::Killed(Cause::Deadline) => f.write_str("still ran at the deadline, and was killed"),
            Self::Killed(Cause::OtherFailed) => f.write_str("still ran after another had failed, and was killed"),
            Self::Killed(Cause::Outlived) => f.write_str("still ran after the others had ended, and was killed"),
            Self::Stuck => write!(f, "still ran {} s after it was killed", DYING.as_secs()),
        }
    }
}

impl From<ExitStatus> for End {
    fn from(status: ExitStatus) -> Self {
        match status.code() {
            Some(code) => Self::Exited(code),
            // The standard library knows the names: "signal: 11 (SIGSEGV) (core dumped)".
            None => Self::Signal(status.to_string().trim_start_matches("signal: ").to_owned()),
        }
    }
}

/// Runs the processes to their ends, and calls `on_line` with each line and the position of the process that wrote it.
/// If that fails, or a process cannot be started, all are killed.
pub(crate) fn run(
    processes: Vec<Process>,
    limits: Limits,
    mut on_line: impl FnMut(usize, Stream, &str) -> Result<()>,
) -> Result<Vec<End>> {
    let start = Instant::now();
    let (sender, lines) = mpsc::sync_channel(BACKLOG);
    let mut guard = Guard::start()?;
    let mut running = Vec::new();
    for (index, process) in processes.into_iter().enumerate() {
        let started = Running::start(index, process, &sender)?;
        guard.add(started.group)?;
        running.push(started);
    }
    drop(sender);

    // When the grace began, and for whom.
    let mut grace: Option<(Instant, Cause)> = None;
    let mut killed: Option<Instant> = None;
    loop {
        match lines.recv_timeout(POLL) {
            Ok(Line { index, stream, text }) => on_line(index, stream, &text)?,
            Err(RecvTimeoutError::Timeout) => {}
            // All streams are closed, which says nothing of their writers.
            Err(RecvTimeoutError::Disconnected) => thread::sleep(POLL),
        }
        // A flood of lines must not keep us from looking at the clock.
        for Line { index, stream, text } in lines.try_iter().take(BACKLOG) {
            on_line(index, stream, &text)?;
        }
        for process in &mut running {
            process.poll()?;
        }
        if running.iter().all(|process| process.end.is_some()) {
            break;
        }
        if let Some(killed) = killed {
            if killed.elapsed() >= DYING {
                running.iter_mut().for_each(Running::give_up);
                break;
            }
            continue;
        }
        grace = grace.or_else(|| cause(&running).map(|cause| (Instant::now(), cause)));
        let why = match grace {
            Some((since, cause)) if since.elapsed() >= limits.grace => Some(cause),
            _ if start.elapsed() >= limits.deadline => Some(Cause::Deadline),
            _ => None,
        };
        if let Some(why) = why {
            running.iter_mut().for_each(|process| process.kill(why));
            killed = Some(Instant::now());
        }
    }
    let until = Instant::now() + DRAIN;
    while let Ok(Line { index, stream, text }) = lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
        on_line(index, stream, &text)?;
    }
    Ok(running.iter_mut().map(|process| process.end.take().unwrap_or(End::Stuck)).collect())
}

/// Why those that still run have only the grace left, if that is so.
fn cause(running: &[Running]) -> Option<Cause> {
    let survivors = || running.iter().filter(|process| !process.victim);
    if survivors().any(|process| process.end.as_ref().is_some_and(|end| *end != End::Exited(0))) {
        return Some(Cause::OtherFailed);
    }
    survivors().all(|process| process.end.is_some()).then_some(Cause::Outlived)
}

struct Line {
    index: usize,
    stream: Stream,
    text: String,
}

/// Reads one stream to its end in a thread of its own; a last line without its newline counts.
fn read(index: usize, stream: Stream, from: impl Read + Send + 'static, to: SyncSender<Line>) {
    thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut bytes = Vec::new();
        while from.read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
            let text = String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_owned();
            bytes.clear();
            // Nobody listens any more if the launch was given up.
            if to.send(Line { index, stream, text }).is_err() {
                break;
            }
        }
    });
}

/// A process that was started, and is killed if it still runs when this goes.
struct Running {
    child: Child,
    group: Pid,
    victim: bool,
    killed: Option<Cause>,
    end: Option<End>,
}

impl Running {
    fn start(index: usize, process: Process, lines: &SyncSender<Line>) -> Result<Self> {
        let Process { mut command, victim } = process;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = command.spawn().with_context(|| format!("cannot start {program}"))?;
        if let Some(stdout) = child.stdout.take() {
            read(index, Stream::Out, stdout, lines.clone());
        }
        if let Some(stderr) = child.stderr.take() {
            read(index, Stream::Err, stderr, lines.clone());
        }
        let group = Pid::from_child(&child);
        Ok(Self { child, group, victim, killed: None, end: None })
    }

    fn poll(&mut self) -> Result<()> {
        if self.end.is_some() {
            return Ok(());
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let ended = waitid(WaitId::Pid(self.group), options).context("cannot ask for the end of a process")?;
        if ended.is_some() {
            // It is not waited for yet, hence the group's number is still its own: what it left behind goes now.
            let _ = kill_process_group(self.group, Signal::KILL);
            let status = self.child.wait().context("cannot wait for a process that has ended")?;
            self.end = Some(match self.killed {
                Some(cause) if status.signal() == Some(Signal::KILL.as_raw()) => End::Killed(cause),
                _ => status.into(),
            });
        }
        Ok(())
    }

    fn kill(&mut self, cause: Cause) {
        if self.end.is_none() {
            self.killed = Some(cause);
            // It can only fail if the group is gone, which is what is wanted.
            let _ = kill_process_group(self.group, Signal::KILL);
        }
    }

    fn give_up(&mut self) {
        self.end.get_or_insert(End::Stuck);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.end.is_none() {
            let _ = kill_process_group(self.group, Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

/// Kills all groups if this process ends without having done so, by Ctrl-C or any other signal, SIGKILL included. The
/// terminal's signals do not reach groups other than ours, and what was killed cannot clean up; so this is a process,
/// which waits for the end of a pipe that only we hold.
struct Guard {
    child: Child,
    groups: Option<ChildStdin>,
}

impl Guard {
    const SCRIPT: &str =
        r#"while read -r group; do groups="$groups -$group"; done; [ -z "$groups" ] || kill -s KILL -- $groups"#;

    fn start() -> Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", Self::SCRIPT]).env_remove("groups").process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().context("cannot start sh")?;
        let groups = child.stdin.take();
        Ok(Self { child, groups })
    }

    fn add(&mut self, group: Pid) -> Result<()> {
        let Some(groups) = &mut self.groups else { return Ok(()) };
        writeln!(groups, "{}", group.as_raw_nonzero()).context("the guard of the launch is gone")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // Before its pipe closes: the numbers that it knows may be others' by now.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
#[path = "launch_tests.rs"]
mod tests;
