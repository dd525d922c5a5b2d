//! Folders of records that other users or other jobs use too, and files that are none.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use gradsync_tests::programs::{Finished, fifo};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::job::{PLENTY, Running, gradsync, launch, run};
use crate::program::heed_signals;

/// A record of a failure which another job has left.
fn write_foreign_record(path: &Path, job: &str) {
    let record = format!(
        r#"{{"version":"0","job":{job},"rank":0,"host":"h","pid":1,"written":1.0,"reason":"an old failure","groups":[{{"group":"channel 0",
            "rank":0,"members":[0,1],"in_process":false,"failure":"an old failure","has_left":false,"calls":[]}}]}}"#
    );
    fs::write(path, record).unwrap();
}

#[test]
fn records_of_other_jobs_are_neither_removed_nor_reported() {
    let folder = TempDir::new().unwrap();
    let files = ["rank-0.json", "rank-0.00ff.json", "rank-9.json"].map(|name| folder.path().join(name));
    write_foreign_record(&files[0], "null");
    write_foreign_record(&files[1], "\"00ff\"");
    fs::write(&files[2], "{}").unwrap();
    let before = files.each_ref().map(|file| fs::read(file).unwrap());
    let mut command = gradsync(&["launch", "-n", "2", "--", "sleep", "0.5"]);
    let job = Finished::of(command.env("GRADSYNC_TRACE_DIR", folder.path())).succeeded("a job that is well");
    assert_eq!(job.stderr, "");
    let mut command = launch(&["-n", "2"], &["mismatch", "0"]);
    let job = Finished::of(command.env("GRADSYNC_TRACE_DIR", folder.path()));
    job.ended(7, &[]);
    assert!(!job.stderr.contains("an old failure"), "{}", job.stderr);
    assert_eq!(files.each_ref().map(|file| fs::read(file).unwrap()), before);
    let trace = Finished::of(gradsync(&["trace"]).arg(folder.path())).succeeded("the last job");
    assert!(trace.stdout.contains("The first calls that differ"), "{}", trace.stdout);
    assert!(trace.stderr.contains("2 records of earlier jobs are left out"), "{}", trace.stderr);
}

/// With the widest umask, another user could put a pipe into the folder.
#[test]
fn the_private_folder_is_the_users_alone() {
    let folder = TempDir::new().unwrap();
    let plain = launch(&["-n", "1"], &["wait"]);
    let mut command = Command::new("sh");
    command.args(["-c", "umask 000; exec \"$0\" \"$@\""]).arg(plain.get_program()).args(plain.get_args());
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.env("TMPDIR", folder.path());
    let mut job = Running::start(command);
    job.lines(1);
    let entry = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap();
    assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o7777, 0o700);
}

/// The pipes have the names of records of any job that could run.
#[test]
fn a_pipe_in_place_of_a_record_hangs_nobody() {
    let folder = TempDir::new().unwrap();
    let pipe = fifo(folder.path());
    fs::rename(&pipe, folder.path().join("rank-0.json")).unwrap();
    let start = Instant::now();
    let trace = Finished::of(gradsync(&["trace"]).arg(folder.path()));
    trace.refused("no record", &["rank-0.json: it is no regular file"]);
    let mut command = launch(&["-n", "2"], &["hang", "0", "60000"]);
    heed_signals(command.env("GRADSYNC_TRACE_DIR", folder.path()));
    let mut job = Running::start(command);
    job.lines(2);
    // A rank's own record is replaced by a pipe as soon as it is known: its name has the number of the job.
    job.signal(Signal::USR1);
    let named = |rank: &str| {
        let files = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        files.into_iter().find(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with(rank) && name.matches('.').count() == 2
        })
    };
    let path = loop {
        if let Some(path) = named("rank-1.") {
            break path;
        }
        assert!(start.elapsed() < PLENTY, "there is no record");
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    fs::remove_file(&path).unwrap();
    let pipe = fifo(folder.path());
    fs::rename(pipe, path).unwrap();
    job.signal(Signal::TERM);
    job.end().ended(128 + 15, &[]);
    assert!(start.elapsed() < PLENTY);
}

#[test]
fn a_log_file_that_is_no_regular_file_is_refused() {
    let folder = TempDir::new().unwrap();
    let pipe = fifo(folder.path());
    let log = folder.path().join("rank-1.out");
    fs::rename(pipe, &log).unwrap();
    let options = ["-n", "2", "--log-dir", folder.path().to_str().unwrap()];
    run(&options, &["lines", "1"]).refused("a pipe", &["--log-dir", "rank-1.out: it is no regular file"]);
    fs::remove_file(&log).unwrap();
    let precious = folder.path().join("precious");
    fs::write(&precious, "precious").unwrap();
    std::os::unix::fs::symlink(&precious, &log).unwrap();
    run(&options, &["lines", "1"]).refused("a link", &["rank-1.out: it is a link"]);
    assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
}

#[test]
fn an_unusable_folder_for_records_is_named_with_its_variable() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut command = launch(&["-n", "1"], &["join"]);
    let job = Finished::of(command.env("GRADSYNC_TRACE_DIR", file.path()));
    let path = file.path().to_str().unwrap();
    job.refused(
        "a file",
        &[&format!("GRADSYNC_TRACE_DIR ({path}): no folder for the record of calls: it is no folder")],
    );
}

/// The analysis of many calls takes a time that grows as they do.
#[test]
fn trace_reads_two_hundred_thousand_calls_in_seconds() {
    const CALLS: usize = 200_000;
    let folder = TempDir::new().unwrap();
    for rank in 0..2 {
        let call = |number: usize| {
            format!(
                r#"{{"sequence":{number},"state":"posted","posted":1.0,"changed":1.0,"operation":"barrier","to":null,"from":null,"len":0,
                    "bytes":0,"dtype":null,"within":null,"tensors":null}}"#
            )
        };
        let calls: Vec<String> = (1..=CALLS / (rank + 1)).map(call).collect();
        let record = format!(
            r#"{{"version":"0","rank":{rank},"host":"h","pid":1,"written":3.0,"reason":"r","groups":[{{"group":"channel 0","rank":{rank},
                "members":[0,1],"in_process":false,"failure":null,"has_left":false,"calls":[{}]}}]}}"#,
            calls.join(",")
        );
        fs::write(folder.path().join(format!("rank-{rank}.json")), record).unwrap();
    }
    let start = Instant::now();
    let trace = Finished::of(gradsync(&["trace"]).arg(folder.path())).succeeded("many calls");
    assert!(trace.stdout.contains("Rank 0 waits for rank 1, for 2.0 s, in call 200000 of channel 0: barrier."));
    assert!(start.elapsed() < PLENTY / 3, "{:?}", start.elapsed());
}

#[test]
fn trace_refuses_more_ranks_than_any_job_has() {
    let folder = TempDir::new().unwrap();
    let trace = Finished::of(gradsync(&["trace", "-n", "4000000000"]).arg(folder.path()));
    trace.ended(2, &["4000000000"]);
}
