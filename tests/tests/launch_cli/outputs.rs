//! The output lines of ranks: unbroken, prefixed by the rank, and in files.

use std::fs;

use tempfile::TempDir;

use crate::job::{gradsync, run};

/// The expected lines of one stream of a rank.
fn expected(stream: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("line {number} of {stream}")).collect()
}

#[test]
fn lines_are_whole_and_carry_the_rank() {
    const LINES: usize = 200;
    let job = run(&["-n", "3"], &["lines", &LINES.to_string()]).succeeded("three ranks that print");
    for (text, stream, last) in [(&job.stdout, "stdout", Some("without an end")), (&job.stderr, "stderr", None)] {
        for rank in 0..3 {
            let prefix = format!("[{rank}] ");
            let of_rank: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
            let expected: Vec<String> = expected(stream, LINES).into_iter().chain(last.map(str::to_owned)).collect();
            assert_eq!(of_rank, expected, "rank {rank}");
        }
        assert!(text.lines().all(|line| line.starts_with('[')), "no other lines: {text}");
    }
}

#[test]
fn a_log_folder_has_the_output_of_each_rank() {
    let folder = TempDir::new().unwrap();
    let log = folder.path().join("new/log");
    let options = ["-n", "2", "--quiet", "--log-dir", log.to_str().unwrap()];
    let job = run(&options, &["lines", "3"]).succeeded("two ranks with logs");
    assert_eq!((job.stdout.as_str(), job.stderr.as_str()), ("", ""));
    for rank in 0..2 {
        let read = |kind: &str| fs::read_to_string(log.join(format!("rank-{rank}.{kind}"))).unwrap();
        assert_eq!(read("out"), expected("stdout", 3).join("\n") + "\nwithout an end\n");
        assert_eq!(read("err"), expected("stderr", 3).join("\n") + "\n");
    }
}

#[test]
fn a_program_that_does_not_start_is_named() {
    let mut command = gradsync(&["launch", "-n", "2", "--", "/nowhere/train"]);
    gradsync_tests::programs::Finished::of(&mut command).refused("no program", &["/nowhere/train", "rank 0"]);
}
