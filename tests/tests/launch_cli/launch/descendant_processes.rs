//! Processes that ranks start and leave behind, and wrappers of programs.

use std::time::Instant;

use gradsync_tests::programs::Finished;
use rustix::process::Signal;

use crate::job::{PLENTY, Running, assert_gone, gradsync, launch};
use crate::program::{binary, heed_signals};

/// Starts two ranks that are shells.
fn shells(script: &str) -> Running {
    let mut command = gradsync(&["launch", "-n", "2", "--grace", "20", "--", "sh", "-c", script]);
    heed_signals(&mut command);
    Running::start(command)
}

/// The numbers of processes that ranks have printed.
fn processes(lines: &[String]) -> Vec<i32> {
    lines.iter().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
}

/// Helpers in sessions of their own are in no process group of a rank.
#[test]
fn processes_in_sessions_of_their_own_end_with_the_job() {
    let start = Instant::now();
    let helper = "setsid sleep 1000 & echo helper $!";
    for (end, code) in [("exit 0", 0), ("sleep 0.2; exit $RANK", 1)] {
        let mut job = shells(&format!("{helper}; {end}"));
        let helpers = processes(&job.lines(2));
        job.end().ended(code, &[]);
        assert_gone(&helpers);
    }
    for signal in [Signal::TERM, Signal::INT, Signal::KILL] {
        let mut job = shells(&format!("{helper}; exec sleep 1000"));
        let helpers = processes(&job.lines(2));
        job.signal(signal);
        job.end();
        assert_gone(&helpers);
    }
    assert!(start.elapsed() < PLENTY, "SIGTERM ends them");
}

/// Without the number of the job in its environment, a helper is found as a child of the launcher.
#[test]
fn processes_without_an_environment_end_with_the_job() {
    let helper = "env -i setsid sleep 1000 & echo helper $!";
    for end in ["exit 0", "exit 3"] {
        let mut job = shells(&format!("{helper}; {end}"));
        let helpers = processes(&job.lines(2));
        job.end();
        assert_gone(&helpers);
    }
}

#[test]
fn a_process_that_ignores_sigterm_is_killed_after_the_grace() {
    let script = "setsid sh -c 'trap \"\" TERM; echo helper $$; sleep 1000' & sleep 0.3; exit 0";
    let mut job = Running::start(gradsync_grace(script, "0.2"));
    let helpers = processes(&job.lines(1));
    job.end().ended(0, &["has not ended within 0.2 s, and is killed"]);
    assert_gone(&helpers);
}

fn gradsync_grace(script: &str, grace: &str) -> std::process::Command {
    gradsync(&["launch", "-n", "1", "--grace", grace, "--", "sh", "-c", script])
}

/// The shell ends at SIGTERM at once; its program has the rest of the grace period.
#[test]
fn a_program_in_a_wrapper_script_gets_sigterm() {
    // The pause is for the shell's copy that becomes `sleep`: until then it has the shell's trap.
    let program = "trap 'sleep 0.3; echo saved; exit 0' TERM; sleep 1000 & sleep 0.2; echo ready; wait";
    let mut command = gradsync(&["launch", "-n", "1", "--", "sh", "-c", "sh -c \"$0\"; true", program]);
    heed_signals(&mut command);
    let mut job = Running::start(command);
    assert_eq!(job.lines(1), ["[0] ready"]);
    job.signal(Signal::TERM);
    assert_eq!(job.lines(1), ["[0] saved"]);
    job.end().ended(128 + 15, &[]);
}

/// The same where the program ignores SIGTERM: it is killed after the grace period.
#[test]
fn a_program_in_a_wrapper_script_is_killed_after_the_grace() {
    let start = Instant::now();
    let program = "trap '' TERM; echo process $$; while :; do sleep 1; done";
    let mut command = gradsync_grace("sh -c \"$0\"; true", "0.5");
    heed_signals(command.arg(program));
    let mut job = Running::start(command);
    let programs = processes(&job.lines(1));
    job.signal(Signal::TERM);
    job.end().ended(128 + 15, &["of rank 0, has not ended within 0.5 s, and is killed"]);
    assert_gone(&programs);
    assert!(start.elapsed() < PLENTY / 3, "{:?}", start.elapsed());
}

#[test]
fn a_second_signal_kills_at_once() {
    let start = Instant::now();
    let script = "trap '' TERM; setsid sleep 1000 & echo helper $!; while :; do sleep 1; done";
    let mut job = shells(script);
    let helpers = processes(&job.lines(2));
    job.signal(Signal::TERM);
    std::thread::sleep(std::time::Duration::from_millis(200));
    job.signal(Signal::TERM);
    let job = job.end();
    job.ended(128 + 15, &["SIGTERM again: the ranks are killed"]);
    assert!(!job.stderr.contains("has not ended within"), "{}", job.stderr);
    assert_gone(&helpers);
    assert!(start.elapsed() < PLENTY / 3, "{:?}", start.elapsed());
}

/// As process 1 of a container, or of a process whose parent has ended.
#[test]
fn launch_reaps_orphans() {
    let script = "orphan=$(sh -c 'sleep 0.1 > /dev/null & echo $!'); sleep 0.8; test ! -e /proc/$orphan && echo reaped";
    let job = Finished::of(&mut gradsync_grace(script, "10")).succeeded("an orphan that ends");
    assert_eq!(job.stdout, "[0] reaped\n");
}

/// The copy of the rank keeps its connections open, so that the other ranks do not notice its end by themselves.
#[test]
fn a_rank_that_forks_and_dies_is_noticed_at_once() {
    let start = Instant::now();
    let mut job = Running::start(launch(&["-n", "3"], &["forks and dies", "1"]));
    let copies = processes(&job.lines(1));
    job.end().ended(5, &["rank 1 ended with exit code 5, first of all"]);
    assert_gone(&copies);
    assert!(start.elapsed() < PLENTY / 3, "no deadline has to pass");
}

/// A shell starts a daemon and becomes the launcher: the daemon is no process of the job.
#[test]
fn earlier_children_of_the_process_stay() {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "sleep 1000 > /dev/null 2>&1 & echo $!; exec \"$0\" launch -n 1 -- true"]).arg(binary());
    let job = Finished::of(&mut command).succeeded("a launcher with a child");
    let process = rustix::process::Pid::from_raw(job.stdout.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(process, Signal::KILL).expect("it runs");
}
