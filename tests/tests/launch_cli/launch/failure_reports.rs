//! Jobs that hang or fail, explained by the record of their calls.

use std::fs;

use gradsync_tests::programs::Finished;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::job::{PLENTY, Running, gradsync, launch, run};

fn contains(text: &str, words: &[&str]) {
    words.iter().for_each(|word| assert!(text.contains(word), "{word}: {text}"));
}

#[test]
fn a_mismatch_is_explained_by_the_first_calls_that_differ() {
    let job = run(&["-n", "4"], &["mismatch", "2"]);
    let words = [
        "The first calls that differ are number 3 of channel 0:",
        "ranks 0, 1, 3: all_reduce(sum) of 500 × f32",
        "rank 2: all_gather of 500 × f32",
    ];
    job.ended(7, &words);
}

#[test]
fn a_rank_that_never_calls_is_named_after_the_deadline() {
    let job = run(&["-n", "4"], &["hang", "1", "300"]);
    let words = [
        "Rank 1 holds up others: it is in no call: the last one, call 2 of channel 0, all_reduce(sum) of 1000 × f32, was over",
        "Ranks 0, 2, 3 waited in vain for rank 1, for ",
        " s, in call 3 of channel 0: all_reduce(max) of 7 × f32.",
    ];
    job.ended(7, &words);
}

#[test]
fn a_rank_that_was_killed_is_named_with_the_signal() {
    let mut job = Running::start(launch(&["-n", "3"], &["is killed", "2"]));
    let lines = job.lines(3);
    let line = lines.iter().find_map(|line| line.strip_prefix("[2] process ")).unwrap();
    let process = rustix::process::Pid::from_raw(line.parse().unwrap()).unwrap();
    rustix::process::kill_process(process, Signal::KILL).unwrap();
    job.end().ended(128 + 9, &["rank 2 was ended by SIGKILL", "; rank 2 has written none"]);
}

/// A user who sees no progress asks the launcher by a signal.
#[test]
fn a_job_that_hangs_is_explained_on_request_and_goes_on() {
    let mut job = Running::start(launch(&["-n", "3"], &["hang", "0", "60000"]));
    job.lines(3);
    // The pause lets the other ranks reach their call.
    std::thread::sleep(std::time::Duration::from_millis(200));
    job.signal(Signal::USR1);
    let mut stderr = std::io::BufReader::new(job.launcher.stderr.take().unwrap());
    let mut said = String::new();
    let start = std::time::Instant::now();
    while !said.contains("Ranks 1, 2 wait for rank 0") {
        assert!(start.elapsed() < PLENTY, "{said}");
        std::io::BufRead::read_line(&mut stderr, &mut said).unwrap();
    }
    contains(&said, &["Rank 0 holds up others", "all_reduce(max) of 7 × f32"]);
    assert_eq!(job.launcher.try_wait().unwrap(), None, "it goes on");
}

/// The trace folder is the user's, and `gradsync trace` reads it without the launcher's own explanation.
#[test]
fn trace_reads_the_folder_of_a_failed_job() {
    let folder = TempDir::new().unwrap();
    let mut command = launch(&["-n", "3"], &["mismatch", "0"]);
    command.env("GRADSYNC_TRACE_DIR", folder.path());
    assert_eq!(Finished::of(&mut command).code, Some(7));
    let read = |options: &[&str]| {
        Finished::of(gradsync(&["trace"]).args(options).arg(folder.path())).succeeded("a comparison").stdout
    };
    contains(&read(&[]), &["ranks 1, 2: all_reduce(sum)", "rank 0: all_gather"]);
    let json: Value = serde_json::from_str(&read(&["--json"])).unwrap();
    assert_eq!(json["differences"][0]["sequence"], 3);
    assert_eq!(json["differences"][0]["calls"][1], serde_json::json!(["all_gather of 500 × f32", [0]]));
    // The file of one rank is removed, and one more rank is expected.
    let files = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let of_rank_2 = |path: &std::path::PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("rank-2.");
    fs::remove_file(files.into_iter().find(of_rank_2).unwrap()).unwrap();
    contains(&read(&["-n", "4"]), &["the last calls of 4 ranks; ranks 2, 3 have written none"]);
    for entry in fs::read_dir(folder.path()).unwrap() {
        let mode = std::os::unix::fs::PermissionsExt::mode(&entry.unwrap().metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
    }
}

/// Gradients travel over a communicator of their own; the call that hangs is one step of an operation on several tensors.
#[test]
fn an_operation_on_several_tensors_is_named_with_its_step() {
    let job = run(&["-n", "3"], &["communicator", "2"]);
    let words = [
        "Rank 2 holds up others: it is in no call: the last one, call ",
        "of processes 0, all_reduce(sum) of 100000 × f32, was over",
        "Ranks 0, 1 waited in vain for rank 2, for ",
        "of processes 0: comparison",
        "(a step of adasum_all_reduce(Auto, per tensor), 2 tensors)",
    ];
    job.ended(7, &words);
}

/// Ranks run without a launcher: one process writes the files of all of its ranks.
#[test]
fn ranks_that_are_threads_are_explained_too() {
    let folder = TempDir::new().unwrap();
    let mut command = std::process::Command::new(crate::job::RANK);
    command.arg("threads").env("GRADSYNC_TRACE_DIR", folder.path());
    gradsync::bootstrap::Launch::variables().for_each(|name| _ = command.env_remove(name));
    Finished::of(&mut command).succeeded("three threads");
    let text = Finished::of(gradsync(&["trace"]).arg(folder.path())).succeeded("a comparison").stdout;
    let words = [
        "Rank 2 holds up others: it is in no call: the last one, call 1 of threads 0 of process ",
        "all_reduce(sum) of 5 × f32, was over",
        "Ranks 0, 1 waited in vain for rank 2, for ",
        " s, in call 2 of threads 0 of process ",
        "did not arrive within 200ms",
    ];
    contains(&text, &words);
}

#[test]
fn trace_refuses_a_folder_without_records() {
    let folder = TempDir::new().unwrap();
    let trace = |path: &std::path::Path| Finished::of(gradsync(&["trace"]).arg(path));
    trace(folder.path()).refused("an empty folder", &["rank-N.json", "GRADSYNC_TRACE_DIR"]);
    trace(&folder.path().join("missing")).refused("no folder", &["missing"]);
}
