//! The possible destinations of `--json` and `--plot`: files, targets of links, pipes, devices, the standard output.

use std::fs;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gradsync_tests::programs::{Finished, fifo};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::run::{BINARY, QUICK, alone, perf_in};

fn run(folder: &Path, files: &[&str]) -> Finished {
    perf_in(folder, &[&QUICK[..], &["zero", "-b", "1K"], files].concat())
}

fn is_document(text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_ok_and(|document| document["schema"] == 1)
}

fn is_link(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|facts| facts.is_symlink())
}

#[test]
fn links_stay_and_lead_to_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    symlink("second", at("first")).unwrap();
    symlink("real.json", at("second")).unwrap();
    symlink("real.svg", at("plot")).unwrap();
    fs::write(at("real.svg"), "older").unwrap();
    run(folder.path(), &["--json", "first", "--plot", "plot"]).succeeded("links");
    assert!(["first", "second", "plot"].iter().all(|name| is_link(&at(name))), "a link was replaced");
    assert!(is_document(&fs::read_to_string(at("real.json")).unwrap()));
    assert!(fs::read_to_string(at("real.svg")).unwrap().starts_with("<svg"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5);
    run(folder.path(), &["--json", "first", "--plot", "second"])
        .refused("one file by two names", &["--json", "--plot"]);
}

#[test]
fn a_pipe_is_written_to() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = fifo(folder.path());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::read_to_string(pipe).unwrap()
    });
    run(folder.path(), &["--json", "pipe"]).succeeded("pipe");
    // If the program had replaced the pipe, its reader would wait for a writer forever.
    assert!(pipe.symlink_metadata().unwrap().file_type().is_fifo(), "the pipe was replaced");
    assert!(is_document(&reader.join().unwrap()));
}

#[test]
fn the_standard_output_by_each_of_its_names() {
    let folder = tempfile::tempdir().unwrap();
    symlink("/dev/stdout", folder.path().join("link")).unwrap();
    for name in ["-", "/dev/stdout", "link"] {
        let finished = run(folder.path(), &["--json", name]).succeeded(name);
        assert!(is_document(&finished.stdout), "{name}: {}", finished.stdout);
        // The table goes to stderr instead.
        assert!(finished.stderr.contains("# zero on cpu"), "{name}: {}", finished.stderr);
        let finished = perf_in(folder.path(), &["--model", "-b", "64M", "--json", name]).succeeded(name);
        assert!(is_document(&finished.stdout), "{name}: {}", finished.stdout);
        assert!(is_link(&folder.path().join("link")), "{name}");
    }
    run(folder.path(), &["--json", "-", "--plot", "link"]).refused("both", &["--json", "--plot"]);
}

#[test]
fn a_device_is_written_to_and_a_full_one_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    // The destinations are links, because a program that replaces its output must not destroy the machine's own devices.
    for device in ["null", "full"] {
        symlink(Path::new("/dev").join(device), folder.path().join(device)).unwrap();
    }
    run(folder.path(), &["--json", "null"]).succeeded("null");
    for option in ["--json", "--plot"] {
        run(folder.path(), &[option, "full"]).refused("full", &["full", "No space"]);
    }
    assert!(["null", "full"].iter().all(|name| is_link(&folder.path().join(name))));
}

#[test]
fn a_signal_leaves_nothing_unfinished() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("out.json"), b"older").unwrap();
    let count = || fs::read_dir(folder.path()).unwrap().count();
    let mut command = Command::new(BINARY);
    let arguments =
        ["perf", "zero", "-b", "1M", "-n", "1000000", "--backend", "cpu", "--json", "out.json", "--plot", "p"];
    alone(&mut command).current_dir(folder.path()).args(arguments).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let start = Instant::now();
    while count() < 3 {
        assert!(start.elapsed() < Duration::from_secs(60), "files are not opened before the measurement");
        std::thread::sleep(Duration::from_millis(2));
    }
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let ended = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.signal(), Some(Signal::TERM.as_raw()), "{stderr}");
    assert!(stderr.contains("out.json") && stderr.contains("SIGTERM"), "{stderr}");
    assert_eq!((count(), fs::read(folder.path().join("out.json")).unwrap()), (1, b"older".to_vec()));
}

/// Text from a file is printed with its control characters escaped.
#[test]
fn names_in_a_file_cannot_steer_a_terminal() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), &["--json", "out.json"]).succeeded("a file");
    let text = fs::read_to_string(folder.path().join("out.json")).unwrap();
    let evil = text.replace("\"operation\": \"zero\"", "\"operation\": \"zero\\u001b]0;owned\\u0007\\nline\\u009b1m\"");
    assert_ne!(text, evil);
    let wrong = evil.replace("\"ranks\": 1", "\"ranks\": 0");
    for (name, text) in [("evil.json", &evil), ("wrong.json", &wrong)] {
        fs::write(folder.path().join(name), text).unwrap();
        let finished = perf_in(folder.path(), &["--model", "-b", "64M", "--fit", name]);
        for text in [&finished.stdout, &finished.stderr] {
            assert!(!text.contains(|character: char| character.is_control() && character != '\n'), "{name}: {text:?}");
            assert!(!text.lines().any(|line| line.starts_with("line")), "{name}: {text:?}");
        }
    }
}
