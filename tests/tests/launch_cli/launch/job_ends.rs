//! How jobs end: failures, signals, and launchers that are killed.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::job::{PLENTY, Running, assert_gone, launch, run};
use crate::program::heed_signals;

#[test]
fn first_failure_ends_the_job_with_its_status_and_lines() {
    let start = Instant::now();
    let job = run(&["-n", "3"], &["exit", "1", "42"]);
    job.ended(42, &["rank 1 ended with exit code 42, first of all", "its last lines:\n    this rank ends with 42"]);
    assert!(start.elapsed() < PLENTY / 3, "the other ranks do not wait for the grace period");
}

#[test]
fn a_rank_that_a_signal_ends_gives_128_and_the_signal() {
    let job = run(&["-n", "2"], &["abort", "0"]);
    job.ended(128 + 6, &["rank 0 was ended by SIGABRT"]);
}

#[test]
fn signals_reach_the_ranks_and_the_exit_status() {
    for (signal, name) in [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM"), (Signal::HUP, "SIGHUP")] {
        let mut command = launch(&["-n", "2"], &["wait"]);
        heed_signals(&mut command);
        let mut job = Running::start(command);
        job.lines(2);
        job.signal(signal);
        job.end().ended(128 + signal.as_raw(), &[name]);
    }
}

/// Processes that ranks have started end with the job, however it ends.
#[test]
fn nothing_is_left_of_a_job() {
    let processes = |job: &mut Running| -> Vec<i32> {
        let lines = job.lines(2);
        let numbers = lines.iter().flat_map(|line| line.split_whitespace().skip(2)).map(|word| word.parse().unwrap());
        numbers.collect()
    };
    for signal in [Signal::KILL, Signal::TERM] {
        let mut job = Running::start(launch(&["-n", "2"], &["grandchild", "1000"]));
        let processes = processes(&mut job);
        assert_eq!(processes.len(), 4);
        job.signal(signal);
        job.end();
        assert_gone(&processes);
    }
}

/// A launcher that is killed cannot remove its private folder; the guard process does.
#[test]
fn the_private_folder_goes_with_the_launcher() {
    for signal in [Signal::KILL, Signal::TERM] {
        let folder = tempfile::TempDir::new().unwrap();
        let mut command = launch(&["-n", "1"], &["wait"]);
        command.env("TMPDIR", folder.path());
        let mut job = Running::start(command);
        job.lines(1);
        let count = || std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(count(), 1);
        job.signal(signal);
        job.end();
        let start = Instant::now();
        while count() > 0 {
            assert!(start.elapsed() < PLENTY, "the folder stays");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn a_rank_that_does_not_end_is_killed_after_the_grace_period() {
    let mut command = crate::job::gradsync(&["launch", "-n", "2", "--grace", "0.2", "--"]);
    command.args(["sh", "-c", "if [ $RANK = 0 ]; then sleep 0.2; exit 3; fi; trap '' TERM; sleep 1000"]);
    let start = Instant::now();
    let job = gradsync_tests::programs::Finished::of(&mut command);
    job.ended(3, &["rank 1 has not ended within 0.2 s"]);
    assert!(start.elapsed() < PLENTY);
}

#[test]
fn no_line_tells_of_a_grace_that_no_rank_was_given() {
    let mut command = crate::job::gradsync(&["launch", "-n", "2", "--grace", "0", "--"]);
    command.args(["sh", "-c", "if [ $RANK = 0 ]; then sleep 0.2; exit 3; fi; sleep 1000"]);
    let job = gradsync_tests::programs::Finished::of(&mut command);
    job.ended(3, &[]);
    assert!(!job.stderr.contains("warning"), "{}", job.stderr);
}
