//! Jobs that the launcher runs: the ranks' program, and the output and processes of a job.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use gradsync_tests::programs::Finished;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::program::binary;

/// Longer than any step takes on a busy machine.
pub(crate) const PLENTY: Duration = Duration::from_secs(30);

/// The path of the ranks' program.
pub(crate) const RANK: &str = env!("CARGO_BIN_EXE_launched_rank");

/// A command of the program, without rank variables from the environment of the tests.
pub(crate) fn gradsync(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary());
    for name in ["RANK", "WORLD_SIZE", "GRADSYNC_SECRET", "GRADSYNC_TRACE_DIR", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"]
    {
        command.env_remove(name);
    }
    command.args(arguments);
    command
}

/// A launch of ranks with these arguments, with these options of the launcher.
pub(crate) fn launch(options: &[&str], arguments: &[&str]) -> Command {
    let mut command = gradsync(&["launch"]);
    command.args(options).args(["--", RANK]).args(arguments);
    command
}

/// Runs a launch to its end.
pub(crate) fn run(options: &[&str], arguments: &[&str]) -> Finished {
    Finished::of(&mut launch(options, arguments))
}

/// A job that runs beside the test, and is ended when it is dropped.
pub(crate) struct Running {
    pub(crate) launcher: Child,
    pub(crate) stdout: BufReader<ChildStdout>,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the launcher starts");
        let stdout = BufReader::new(launcher.stdout.take().expect("a pipe"));
        Running { launcher, stdout }
    }

    /// The next lines of the ranks' output.
    pub(crate) fn lines(&mut self, count: usize) -> Vec<String> {
        let mut line = || {
            let mut line = String::new();
            self.stdout.read_line(&mut line).expect("the output of the launcher");
            assert!(line.ends_with('\n'), "the launcher has ended");
            line.trim_end().to_owned()
        };
        (0..count).map(|_| line()).collect()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.launcher), signal).expect("the launcher runs");
    }

    /// Waits for the end. The output that no [`lines`](Self::lines) have taken stays in the pipe.
    pub(crate) fn end(mut self) -> Finished {
        let mut stderr = String::new();
        let mut pipe = self.launcher.stderr.take().expect("a pipe");
        std::io::Read::read_to_string(&mut pipe, &mut stderr).expect("the output of the launcher");
        Finished { code: self.launcher.wait().expect("the launcher").code(), stdout: String::new(), stderr }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The ranks end with the launcher, which may have ended long ago.
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

/// Asserts that all these processes end soon. A process that is not reaped yet has ended too.
pub(crate) fn assert_gone(processes: &[i32]) {
    let start = Instant::now();
    for &process in processes {
        while is_alive(process) {
            assert!(start.elapsed() < PLENTY, "process {process} of {processes:?} has not ended");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn is_alive(process: i32) -> bool {
    let exists = test_kill_process(Pid::from_raw(process).expect("a process")).is_ok();
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    exists && stat.rsplit(") ").next().is_some_and(|state| !state.is_empty() && !state.starts_with('Z'))
}

/// The lines of the ranks, sorted, for outputs with one line per rank.
pub(crate) fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}
