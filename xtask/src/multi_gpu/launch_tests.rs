//! Launches of small shell scripts that print, fail, hang, stop and kill themselves.

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
fn a_launch_that_passes_gives_back_its_lines() {
    let launched = launch([survivor("echo out; echo err >&2"), survivor("printf 'a\\r\\nb'")], LONG, LONG);
    assert_eq!(launched.ends, [End::Exited(0), End::Exited(0)]);
    assert_eq!(launched.lines_of(0, Stream::Out), ["out"]);
    assert_eq!(launched.lines_of(0, Stream::Err), ["err"]);
    assert_eq!(launched.lines_of(1, Stream::Out), ["a", "b"]);
}

#[test]
fn lines_are_whole_and_in_order_whoever_writes_meanwhile() {
    let script = "i=0; while [ $i -lt 300 ]; do printf 'line '; printf $i; echo; echo error >&2; i=$((i+1)); done";
    let launched = launch([survivor(script), survivor(script), survivor(script)], LONG, LONG);
    let expected: Vec<String> = (0..300).map(|line| format!("line {line}")).collect();
    for index in 0..3 {
        assert_eq!(launched.lines_of(index, Stream::Out), expected);
        assert_eq!(launched.lines_of(index, Stream::Err), vec!["error"; 300]);
    }
}

#[test]
fn one_that_fails_has_the_others_killed_after_the_grace() {
    let launched = launch([survivor("exit 3"), survivor("sleep 60"), survivor("sleep 0.1; exit 1")], LONG, SHORT);
    assert_eq!(launched.ends, [End::Exited(3), End::Killed(Cause::OtherFailed), End::Exited(1)]);
    assert!(launched.time >= SHORT);
}

#[test]
fn a_signal_is_a_failure_and_has_a_name() {
    let launched = launch([survivor("kill -SEGV $$"), survivor("sleep 60")], LONG, SHORT);
    let End::Signal(signal) = &launched.ends[0] else { panic!("{:?}", launched.ends) };
    assert!(signal.starts_with("11 (SIGSEGV)"), "{signal}");
    assert_eq!(launched.ends[1], End::Killed(Cause::OtherFailed));
}

#[test]
fn the_deadline_kills_whatever_state_a_process_is_in() {
    let stubborn = "trap '' TERM INT HUP; while :; do sleep 1; done";
    let launched = launch([survivor("kill -STOP $$"), survivor(stubborn), victim("sleep 60")], SHORT, LONG);
    assert_eq!(launched.ends, vec![End::Killed(Cause::Deadline); 3]);
}

#[test]
fn the_deadline_comes_in_a_flood_of_lines_too() {
    let launched = launch([survivor("while :; do echo line; done")], SHORT, LONG);
    assert_eq!(launched.ends, [End::Killed(Cause::Deadline)]);
    assert!(launched.lines.iter().all(|line| "line".starts_with(&line.2)));
}

#[test]
fn what_a_process_started_is_killed_with_it() {
    // The first process leaves a child behind, and the second is killed together with its child; both children hold the streams open.
    let launched = launch([survivor("sleep 61 & echo $!"), survivor("sleep 61 & echo $!; wait")], SHORT, LONG);
    assert_eq!(launched.ends, [End::Exited(0), End::Killed(Cause::Deadline)]);
    for index in 0..2 {
        wait_until_gone(launched.lines_of(index, Stream::Out)[0]);
    }
}

#[test]
fn a_victim_may_die_without_harm_to_the_others() {
    let launched = launch([survivor("sleep 1; echo done"), victim("kill -KILL $$")], LONG, SHORT / 20);
    assert_eq!(launched.ends, [End::Exited(0), End::Signal("9 (SIGKILL)".to_owned())]);
    assert_eq!(launched.lines_of(0, Stream::Out), ["done"]);
}

#[test]
fn a_victim_that_was_stopped_is_killed_when_the_others_have_ended() {
    let launched = launch([survivor("exit 0"), victim("kill -STOP $$")], LONG, SHORT);
    assert_eq!(launched.ends, [End::Exited(0), End::Killed(Cause::Outlived)]);
}

#[test]
fn what_cannot_be_started_or_printed_ends_all() {
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
fn the_guard_kills_all_groups_when_its_pipe_closes() {
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
