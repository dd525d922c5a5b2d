//! Restarts: all ranks start again, as a new generation.

use std::process::Command;

use gradsync_tests::programs::Finished;

use crate::job::run;
use crate::program::binary;

#[test]
fn all_ranks_start_again_as_a_new_generation() {
    let job = run(&["-n", "3", "--restarts", "2"], &["join", "once more"]).succeeded("a rank that fails once");
    assert!(job.stderr.contains("rank 1 ended with exit code 9"), "{}", job.stderr);
    assert!(job.stderr.contains("restart 1 of 2") && !job.stderr.contains("restart 2 of 2"), "{}", job.stderr);
}

#[test]
fn restarts_come_to_an_end() {
    let folder = tempfile::TempDir::new().unwrap();
    let options = ["-n", "2", "--restarts", "1", "--quiet", "--log-dir", folder.path().to_str().unwrap()];
    let job = run(&options, &["exit", "0", "4"]);
    job.ended(4, &["gave up after 1 of 1 restarts"]);
    for log in ["rank-0.err", "restart-1/rank-0.err"] {
        let text = std::fs::read_to_string(folder.path().join(log)).unwrap();
        assert_eq!(text, "this rank ends with 4\n", "{log}");
    }
}

/// An upgrade removes the program's file, and puts another one there, while the job runs.
#[test]
fn ranks_start_again_after_the_programs_file_was_replaced() {
    let folder = tempfile::TempDir::new().unwrap();
    let program = folder.path().join("gradsync");
    std::fs::copy(binary(), &program).unwrap();
    let script = "rm -f \"$0\"; echo 'an upgrade' > \"$0\"; test $GRADSYNC_GENERATION = 1";
    let mut command = Command::new(&program);
    command.args(["launch", "-n", "1", "--restarts", "1", "--", "sh", "-c", script]).arg(&program);
    let job = Finished::of(command.env_remove("GRADSYNC_TRACE_DIR")).succeeded("a start after the upgrade");
    assert!(job.stderr.contains("restart 1 of 1"), "{}", job.stderr);
}
