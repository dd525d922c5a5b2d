//! The rank that the launcher blames for a failure, and the exit status, which is this rank's.

use std::fs;

use gradsync_tests::programs::Finished;
use tempfile::TempDir;

use crate::job::{RANK, gradsync, launch, run};

/// The ranks are shells, which know nothing of gradsync and write no record.
#[test]
fn launch_blames_the_rank_that_ended_first() {
    for cause in 0..4 {
        let script = format!("[ $RANK = {cause} ] && {{ echo cause; exit 7; }}; sleep 0.05; exit 1");
        let job = Finished::of(gradsync(&["launch", "-n", "4", "--", "sh", "-c"]).arg(script));
        let first = format!("rank {cause} ended with exit code 7, first of all");
        let last = format!("rank {cause} (process ");
        job.ended(7, &[&*first, &*last, "its last lines:\n    cause"]);
    }
}

/// The other ranks return errors and end at once, while the rank that has panicked drops what it has.
#[test]
fn launch_blames_the_rank_that_panicked() {
    for panicked in ["1", "0"] {
        let job = Finished::of(launch(&["-n", "4"], &["panics", panicked]).env("RUST_BACKTRACE", "1"));
        job.ended(101, &[]);
        let words = format!("rank {panicked} panicked and ended with exit code 101, first of all");
        assert!(job.stderr.contains(&words), "{}", job.stderr);
        assert!(job.stderr.contains(&format!("a bug of rank {panicked}")), "{}", job.stderr);
    }
}

/// A rank that is killed between others that notice it is blamed even where no record can be written.
#[test]
fn launch_blames_the_first_rank_without_records() {
    let folder = TempDir::new().unwrap();
    let mut command = launch(&["-n", "3"], &["exit", "2", "6"]);
    let job = Finished::of(command.env("TMPDIR", folder.path().join("missing")));
    job.ended(
        6,
        &["gradsync: warning: no temporary folder in ", "missing (TMPDIR): ", "there are no records of calls"],
    );
    assert!(job.stderr.contains("rank 2 ended with exit code 6, first of all"), "{}", job.stderr);
}

/// SIGXFSZ would end the ranks before their own error branch.
#[test]
fn records_that_cannot_be_written_are_said_once_and_end_no_rank() {
    let folder = TempDir::new().unwrap();
    let mut command = gradsync(&["launch", "-n", "3", "--", "sh", "-c", "ulimit -f 0; exec \"$0\" mismatch 1", RANK]);
    let job = Finished::of(command.env("GRADSYNC_TRACE_DIR", folder.path()));
    job.ended(7, &[]);
    let said = format!("records of calls are not written to {}: rank ", folder.path().display());
    assert_eq!(job.stderr.matches(&said).count(), 1, "{}", job.stderr);
    assert!(job.stderr.contains("`ulimit -f`"), "{}", job.stderr);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn records_are_found_when_ranks_change_their_folder() {
    let (folder, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let script = format!("cd {} && exec \"$0\" mismatch 1", other.path().display());
    let mut command = gradsync(&["launch", "-n", "3", "--", "sh", "-c", &script, RANK]);
    let job = Finished::of(command.env("GRADSYNC_TRACE_DIR", "traces").current_dir(folder.path()));
    job.ended(7, &["The first calls that differ are number 3"]);
    assert_eq!(fs::read_dir(folder.path().join("traces")).unwrap().count(), 3);
    assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
}

#[test]
fn last_lines_are_shown_as_they_were_written() {
    let print = "printf 'say \"hi\" it'\"'\"'s \\\\\\\\\\t\\033[31mred\\n'; exit 4";
    let job = Finished::of(gradsync(&["launch", "-n", "1", "--", "sh", "-c"]).arg(print));
    job.ended(4, &[]);
    let expected = "its last lines:\n    say \"hi\" it's \\\\\t\\u{1b}[31mred\n";
    assert!(job.stderr.contains(expected), "{}", job.stderr);
}

/// The ranks run the program of the launcher's own signal as the user's: only a signal of the user reaches it.
#[test]
fn requests_for_records_run_no_handler_of_the_program() {
    let job = run(&["-n", "3"], &["requeues", "1"]);
    job.ended(3, &[]);
    assert!(!job.stdout.contains("requeued"), "{}", job.stdout);
    assert!(job.stderr.contains("rank 1 ended with exit code 3, first of all"), "{}", job.stderr);
}
