//! Programs that are ended while they write: no unfinished file stays, an older output stays, and the error says so.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::program::{Finished, binary, heed_signals};

/// A reduction of sparse files that takes long enough to be interrupted.
pub(crate) struct Long {
    pub(crate) folder: TempDir,
}

impl Long {
    pub(crate) fn new() -> Self {
        const BYTES: usize = 1 << 30;
        let folder = TempDir::new().unwrap();
        let header = crate::files::entry("weight", "F32", &[BYTES / 4], 0, BYTES);
        for rank in 0..4 {
            let path = folder.path().join(format!("in{rank}"));
            crate::files::save_raw(&path, &format!("{{{header}}}"), &[]);
            let len = fs::metadata(&path).unwrap().len() + BYTES as u64;
            File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
        }
        fs::write(folder.path().join("out"), b"an older result").unwrap();
        Self { folder }
    }

    pub(crate) fn parts(&self) -> Vec<PathBuf> {
        parts(self.folder.path())
    }

    /// Starts the reduction from a shell that has run `before`, and waits until it has begun its output.
    pub(crate) fn started(&self, before: &str) -> Child {
        let known = self.parts();
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{before} exec \"$@\""), "sh"]).arg(binary());
        command.args(["reduce", "--op", "adasum", "-o", "out", "in0", "in1", "in2", "in3"]);
        heed_signals(&mut command);
        let child =
            command.current_dir(self.folder.path()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let start = Instant::now();
        while self.parts().iter().all(|part| known.contains(part)) {
            assert!(start.elapsed() < Duration::from_secs(60), "no output was begun");
            std::thread::sleep(Duration::from_millis(2));
        }
        child
    }

    /// Runs a short reduction with the same output.
    fn run_another(&self) {
        let short = self.folder.path().join("short");
        crate::files::save_raw(&short, &format!("{{{}}}", crate::files::entry("a", "F32", &[1], 0, 4)), &[0; 4]);
        let mut command = Command::new(binary());
        command.current_dir(self.folder.path()).args(["reduce", "--op", "sum", "-o", "out", "short"]);
        Finished::of(&mut command).succeeded("a short run");
    }
}

fn parts(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.to_string_lossy().ends_with(".part")).collect()
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn a_signal_leaves_nothing_unfinished_and_is_the_exit_status() {
    let ending =
        [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM"), (Signal::HUP, "SIGHUP"), (Signal::QUIT, "SIGQUIT")];
    for (signal, name) in ending {
        let long = Long::new();
        let child = long.started("");
        send(&child, signal);
        let ended = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.signal(), Some(signal.as_raw()), "{name}: {stderr}");
        assert!(stderr.contains(name) && stderr.contains("out"), "{name}: {stderr}");
        assert_eq!(long.parts(), [] as [PathBuf; 0], "{name}");
        assert_eq!(fs::read(long.folder.path().join("out")).unwrap(), b"an older result", "{name}");
    }
}

/// Signals are ignored under `nohup`, and in processes that shells start in the background.
#[test]
fn a_signal_that_is_ignored_stays_ignored() {
    let long = Long::new();
    let mut child = long.started("trap '' HUP;");
    send(&child, Signal::HUP);
    std::thread::sleep(Duration::from_millis(200));
    assert!(child.try_wait().unwrap().is_none_or(|status| status.success()), "it was ended");
    send(&child, Signal::TERM);
    child.wait().unwrap();
}

#[test]
fn the_next_run_removes_the_rest_of_a_killed_one_alone() {
    let long = Long::new();
    let mut killed = long.started("");
    send(&killed, Signal::KILL);
    killed.wait().unwrap();
    assert_eq!(long.parts().len(), 1, "a killed program cannot tidy up");
    let running = long.started("");
    assert_eq!(long.parts().len(), 1, "what was left is gone, and the new one is there");
    // The program leaves the part files of other outputs alone, and the part file of a living process.
    let other = long.folder.path().join(".gradsync-0123456789abcdef-000000.part");
    fs::write(&other, b"").unwrap();
    long.run_another();
    assert_eq!(long.parts().len(), 2);
    send(&running, Signal::TERM);
    running.wait_with_output().unwrap();
    assert_eq!(long.parts(), [other]);
}
