//! The output lines of ranks: unbroken, prefixed by the rank, and in files.

use std::fs;
use std::process::Command;

use gradsync_tests::programs::Finished;
use tempfile::TempDir;

use crate::job::{RANK, gradsync, run, sorted};
use crate::program::binary;

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
    Finished::of(&mut command).refused("no program", &["/nowhere/train", "rank 0"]);
}

#[test]
fn launch_takes_the_program_without_dashes_too() {
    for arguments in [&["echo", "-n", "hi", "--", "--x"][..], &["--", "echo", "-n", "hi", "--", "--x"]] {
        let mut command = gradsync(&["launch", "-n", "2", "--grace", "3"]);
        let job = Finished::of(command.args(arguments)).succeeded("a program with options");
        assert_eq!(sorted(&job.stdout), ["[0] hi -- --x", "[1] hi -- --x"], "{arguments:?}");
    }
    let wrong = Finished::of(&mut gradsync(&["launch", "-n", "2", "--restart", "3", "echo", "hi"]));
    assert_eq!(wrong.code, Some(2), "{}", wrong.stderr);
    assert!(wrong.stderr.contains("--restart"), "{}", wrong.stderr);
}

/// SIGXFSZ would end the launcher.
#[test]
fn a_log_file_at_its_limit_is_named_and_ends_no_job() {
    let folder = TempDir::new().unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 1; exec \"$0\" \"$@\""]).arg(binary()).args([
        "launch",
        "-n",
        "2",
        "--quiet",
        "--log-dir",
    ]);
    command.arg(folder.path()).args([RANK, "lines", "100"]).env_remove("GRADSYNC_TRACE_DIR");
    let job = Finished::of(&mut command).succeeded("ranks that print more than their logs hold");
    for name in ["rank-0.out", "rank-0.err", "rank-1.out", "rank-1.err"] {
        let path = folder.path().join(name);
        let said = format!("the log file {} ends here: File too large", path.display());
        assert_eq!(job.stderr.matches(&said).count(), 1, "{said}: {}", job.stderr);
    }
}

#[test]
fn few_descriptors_are_refused_with_the_number_that_is_needed() {
    let launch = |limit: u64, ranks: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {limit}; exec \"$0\" \"$@\"")]).arg(binary());
        Finished::of(command.args(["launch", "-n", ranks, "--", "true"]))
    };
    let refused = launch(60, "40");
    assert_eq!(refused.code, Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains("-n 40: the launcher of so many ranks needs "), "{}", refused.stderr);
    let needed = refused.stderr.split("`ulimit -n ").nth(1).unwrap().split('`').next().unwrap().parse().unwrap();
    launch(needed, "40").succeeded("as many as are needed");
    launch(60, "65536").refused("as many ranks as a group has at most", &["-n 65536", "needs 131"]);
    launch(60, "4000000000").refused("ranks beyond any limit", &["4000000000 is not in 1..=65536"]);
}
