//! The processes of one launch: starts them, forwards their lines as they are printed, and ends every process in all cases.
//!
//! Each process leads its own process group, and a group is killed as a whole, including processes that a test starts or that wrap a rank,
//! even if they are stopped. Lines are forwarded whole and one at a time. This module knows neither the meaning of a line nor the criteria
//! of a launch.

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

/// The interval of checks whether processes have ended.
const POLL: Duration = Duration::from_millis(10);
/// The number of lines in the queue, above which their writers must wait.
const BACKLOG: usize = 1024;
/// The time to wait for lines after the last process has ended: only a process that left its group can still hold a stream open.
const DRAIN: Duration = Duration::from_secs(2);
/// The time that a killed process may take to end; a hanging driver can keep it forever.
const DYING: Duration = Duration::from_secs(30);

/// One process to start.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) command: Command,
    /// Whether it is expected to fail, so that the other processes must continue.
    pub(crate) victim: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The limit of the whole launch.
    pub(crate) deadline: Duration,
    /// The limit of the remaining processes after one has failed, and of victims after all others have ended.
    pub(crate) grace: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Out,
    Err,
}

/// The end of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Exited(i32),
    /// By a signal that xtask did not send: its number and name.
    Signal(String),
    /// Killed by xtask.
    Killed(Cause),
    /// It did not end even after being killed.
    Stuck,
}

/// The reason why xtask kills a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    Deadline,
    /// Another process that must not fail has failed, and the grace period is over.
    OtherFailed,
    /// A victim still ran, or was stopped, when the grace period after the end of all others was over.
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
            // The standard library formats the name: "signal: 11 (SIGSEGV) (core dumped)".
            None => Self::Signal(status.to_string().trim_start_matches("signal: ").to_owned()),
        }
    }
}

/// Runs the processes to their ends, and calls `on_line` with each line and the index of the process that wrote it. If this call fails, or
/// a process cannot be started, all processes are killed.
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

    // The start of the grace period, and its reason.
    let mut grace: Option<(Instant, Cause)> = None;
    let mut killed: Option<Instant> = None;
    loop {
        match lines.recv_timeout(POLL) {
            Ok(Line { index, stream, text }) => on_line(index, stream, &text)?,
            Err(RecvTimeoutError::Timeout) => {}
            // All streams are closed, but their writers may still run.
            Err(RecvTimeoutError::Disconnected) => thread::sleep(POLL),
        }
        // Many lines must not delay the check of the deadlines.
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

/// The reason for a grace period of the remaining processes, if there is one.
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

/// Reads one stream to its end in a thread of its own; a last line without a newline is included.
fn read(index: usize, stream: Stream, from: impl Read + Send + 'static, to: SyncSender<Line>) {
    thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut bytes = Vec::new();
        while from.read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
            let text = String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_owned();
            bytes.clear();
            // The receiver is gone if the launch was aborted.
            if to.send(Line { index, stream, text }).is_err() {
                break;
            }
        }
    });
}

/// A started process, which is killed on drop if it still runs.
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
            // The process has not been waited for yet, so the group's number is still its own: remaining members of the group are killed
            // now.
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
            // The call can only fail if the group no longer exists, which is the goal.
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

/// Kills all groups if this process ends without having done so, by Ctrl-C or any other signal, SIGKILL included. The terminal's signals do
/// not reach other process groups, and a killed process cannot clean up. So the guard is a process, which waits for the end of a pipe whose
/// only writer is this process.
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
        // The guard ends before its pipe closes, because the numbers of its groups may belong to other processes by now.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    /// Enough time for a script to start, even on a busy machine.
    const SHORT: Duration = Duration::from_secs(1);
    /// More time than any test here takes, unless it waits for a process that should have been killed.
    const PATIENCE: Duration = Duration::from_secs(20);

    fn survivor(script: &str) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Process { command, victim: false }
    }

    fn victim(script: &str) -> Process {
        Process { victim: true, ..survivor(script) }
    }

    struct Launched {
        ends: Vec<End>,
        lines: Vec<(usize, Stream, String)>,
        time: Duration,
    }

    impl Launched {
        fn lines_of(&self, index: usize, stream: Stream) -> Vec<&str> {
            let of = |line: &&(usize, Stream, String)| (line.0, line.1) == (index, stream);
            self.lines.iter().filter(of).map(|line| line.2.as_str()).collect()
        }
    }

    fn launch<const N: usize>(processes: [Process; N], deadline: Duration, grace: Duration) -> Launched {
        let start = Instant::now();
        let mut lines = Vec::new();
        let ends = run(processes.into(), Limits { deadline, grace }, |index, stream, line| {
            lines.push((index, stream, line.to_owned()));
            Ok(())
        });
        let time = start.elapsed();
        assert!(time < PATIENCE, "took {time:?}");
        Launched { ends: ends.unwrap(), lines, time }
    }

    /// Whether a process is running; zombies are not.
    fn runs(pid: &str) -> bool {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
    }

    fn wait_until_gone(pid: &str) {
        let start = Instant::now();
        while runs(pid) {
            assert!(start.elapsed() < PATIENCE, "process {pid} still runs");
            thread::sleep(POLL);
        }
    }

    #[test]
    fn run_gives_back_the_lines_of_a_launch_that_passes() {
        let launched = launch([survivor("echo out; echo err >&2"), survivor("printf 'a\\r\\nb'")], LONG, LONG);
        assert_eq!(launched.ends, [End::Exited(0), End::Exited(0)]);
        assert_eq!(launched.lines_of(0, Stream::Out), ["out"]);
        assert_eq!(launched.lines_of(0, Stream::Err), ["err"]);
        assert_eq!(launched.lines_of(1, Stream::Out), ["a", "b"]);
    }

    #[test]
    fn run_keeps_lines_whole_and_in_order() {
        let script = "i=0; while [ $i -lt 300 ]; do printf 'line '; printf $i; echo; echo error >&2; i=$((i+1)); done";
        let launched = launch([survivor(script), survivor(script), survivor(script)], LONG, LONG);
        let expected: Vec<String> = (0..300).map(|line| format!("line {line}")).collect();
        for index in 0..3 {
            assert_eq!(launched.lines_of(index, Stream::Out), expected);
            assert_eq!(launched.lines_of(index, Stream::Err), vec!["error"; 300]);
        }
    }

    #[test]
    fn run_kills_the_others_after_the_grace_when_one_fails() {
        let launched = launch([survivor("exit 3"), survivor("sleep 60"), survivor("sleep 0.1; exit 1")], LONG, SHORT);
        assert_eq!(launched.ends, [End::Exited(3), End::Killed(Cause::OtherFailed), End::Exited(1)]);
        assert!(launched.time >= SHORT);
    }

    #[test]
    fn run_names_a_signal_as_a_failure() {
        let launched = launch([survivor("kill -SEGV $$"), survivor("sleep 60")], LONG, SHORT);
        let End::Signal(signal) = &launched.ends[0] else { panic!("{:?}", launched.ends) };
        assert!(signal.starts_with("11 (SIGSEGV)"), "{signal}");
        assert_eq!(launched.ends[1], End::Killed(Cause::OtherFailed));
    }

    #[test]
    fn run_kills_processes_of_any_state_at_the_deadline() {
        let stubborn = "trap '' TERM INT HUP; while :; do sleep 1; done";
        let launched = launch([survivor("kill -STOP $$"), survivor(stubborn), victim("sleep 60")], SHORT, LONG);
        assert_eq!(launched.ends, vec![End::Killed(Cause::Deadline); 3]);
    }

    #[test]
    fn run_keeps_the_deadline_in_a_flood_of_lines() {
        let launched = launch([survivor("while :; do echo line; done")], SHORT, LONG);
        assert_eq!(launched.ends, [End::Killed(Cause::Deadline)]);
        assert!(launched.lines.iter().all(|line| "line".starts_with(&line.2)));
    }

    #[test]
    fn run_kills_what_a_process_started() {
        // The first process leaves a child behind, and the second is killed together with its child; both children hold the streams open.
        let launched = launch([survivor("sleep 61 & echo $!"), survivor("sleep 61 & echo $!; wait")], SHORT, LONG);
        assert_eq!(launched.ends, [End::Exited(0), End::Killed(Cause::Deadline)]);
        for index in 0..2 {
            wait_until_gone(launched.lines_of(index, Stream::Out)[0]);
        }
    }

    #[test]
    fn run_lets_a_victim_die_without_harm_to_the_others() {
        let launched = launch([survivor("sleep 1; echo done"), victim("kill -KILL $$")], LONG, SHORT / 20);
        assert_eq!(launched.ends, [End::Exited(0), End::Signal("9 (SIGKILL)".to_owned())]);
        assert_eq!(launched.lines_of(0, Stream::Out), ["done"]);
    }

    #[test]
    fn run_kills_a_stopped_victim_when_the_others_have_ended() {
        let launched = launch([survivor("exit 0"), victim("kill -STOP $$")], LONG, SHORT);
        assert_eq!(launched.ends, [End::Exited(0), End::Killed(Cause::Outlived)]);
    }

    #[test]
    fn run_ends_all_when_one_cannot_be_started_or_printed() {
        let missing = Process { command: Command::new("./no-such-program"), victim: false };
        let limits = Limits { deadline: LONG, grace: LONG };
        let start = Instant::now();
        let error = run(vec![survivor("sleep 60"), missing], limits, |_, _, _| Ok(())).unwrap_err();
        assert!(error.to_string().contains("./no-such-program"), "{error:#}");

        let mut pid = String::new();
        let error = run(vec![survivor("echo $$; sleep 60")], limits, |_, _, line| {
            pid = line.to_owned();
            Err(anyhow::anyhow!("nobody reads"))
        });
        assert_eq!(error.unwrap_err().to_string(), "nobody reads");
        assert!(!runs(&pid));
        assert!(start.elapsed() < PATIENCE);
    }

    #[test]
    fn guard_kills_all_groups_when_its_pipe_closes() {
        let (lines, _kept) = mpsc::sync_channel(BACKLOG);
        let start = |script| Running::start(0, survivor(script), &lines).unwrap();
        let mut running = [start("sleep 60"), start("kill -STOP $$")];
        let mut guard = Guard::start().unwrap();
        for process in &running {
            guard.add(process.group).unwrap();
        }
        // The pipe closes in this way when this process is killed.
        guard.groups = None;
        guard.child.wait().unwrap();
        for process in &mut running {
            while process.end.is_none() {
                process.poll().unwrap();
            }
            assert_eq!(process.end, Some(End::Signal("9 (SIGKILL)".to_owned())));
        }
    }
}
