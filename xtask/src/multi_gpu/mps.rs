//! CUDA's Multi-Process Service, by which processes use one GPU at the same time instead of by time-slicing: a private daemon with private
//! folders, which ends with xtask.
//!
//! Another daemon on the machine is neither used nor disturbed, and the GPU's compute mode is not changed.

use std::{
    env, fs,
    os::unix::{fs::DirBuilderExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::launch::{self, End, Limits, Process};

const CONTROL: &str = "nvidia-cuda-mps-control";
/// The folder of the driver's programs in containers.
const FOLDER: &str = "/usr/local/nvidia/bin";
/// The time that a server may need to accept clients, or to accept them again after one of them was killed.
const SETTLING: Duration = Duration::from_secs(60);
/// The time limit of one attempt.
const ATTEMPT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(500);

/// A running daemon.
#[derive(Debug)]
pub(crate) struct Mps {
    control: PathBuf,
    folder: PathBuf,
    guard: Child,
    /// The guard ends the daemon when this pipe closes.
    lifeline: Option<ChildStdin>,
}

/// The daemon's program; if there is none, the places that were searched.
pub(crate) fn find() -> Result<PathBuf, String> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain([PathBuf::from(FOLDER)]);
    let found = folders.map(|folder| folder.join(CONTROL)).find(|program| program.is_file());
    found.ok_or_else(|| format!("there is no {CONTROL} in PATH or {FOLDER}"))
}

impl Mps {
    /// Ends the daemon however xtask ends, including by Ctrl-C and SIGKILL: the guard waits for the end of a pipe whose only writer is
    /// xtask. A daemon that does not quit is killed.
    const GUARD: &str = r#"
cat >/dev/null
pid=$(cat "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid")
echo quit -t 10 | timeout 30 "$1"
tries=0
while [ -n "$pid" ] && kill -0 "$pid" && [ $tries -lt 50 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
[ -z "$pid" ] || kill -s KILL "$pid"
rm -rf "$2"
"#;

    /// Starts a daemon; if it does not start, the error is its output.
    pub(crate) fn start(control: &Path) -> Result<Self, String> {
        let name = format!("gradsync-mps-{}-{:08x}", std::process::id(), random());
        let folder = env::temp_dir().join(name);
        let made = fs::DirBuilder::new().mode(0o700).create(&folder);
        made.and_then(|()| fs::create_dir(folder.join("pipe")))
            .and_then(|()| fs::create_dir(folder.join("log")))
            .map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
        let mut command = Command::new("sh");
        command.args(["-c", Self::GUARD, "sh"]).arg(control).arg(&folder).envs(variables(&folder)).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut guard = command.spawn().map_err(|error| {
            let _ = fs::remove_dir_all(&folder);
            format!("cannot start sh: {error}")
        })?;
        let lifeline = guard.stdin.take();
        let mps = Self { control: control.to_owned(), folder, guard, lifeline };
        mps.daemon()?;
        Ok(mps)
    }

    fn daemon(&self) -> Result<(), String> {
        // The output goes to a file, because the daemon would hold a pipe open.
        let log = self.folder.join("start");
        let file = || fs::File::options().create(true).append(true).open(&log);
        let mut command = Command::new(&self.control);
        // Clients choose among the daemon's GPUs: the daemon has all of them, so that clients use the usual numbers.
        command.arg("-d").envs(self.variables()).env_remove("CUDA_VISIBLE_DEVICES").process_group(0);
        let status = file().and_then(|out| {
            let err = out.try_clone()?;
            command.stdin(Stdio::null()).stdout(out).stderr(err).status()
        });
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => {
                let text = fs::read_to_string(&log).unwrap_or_default();
                Err(format!("{} -d failed ({status}): {}", self.control.display(), text.trim()))
            }
            Err(error) => Err(format!("cannot start {}: {error}", self.control.display())),
        }
    }

    /// The environment variables that make a process a client.
    pub(crate) fn variables(&self) -> [(&'static str, PathBuf); 2] {
        variables(&self.folder)
    }

    /// Waits until a new process can use a GPU; if that takes too long, the error is the process's last output.
    pub(crate) fn settle(&self, program: &Path) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let mut command = Command::new(program);
            command.arg("probe").envs(self.variables());
            let mut said = String::new();
            let limits = Limits { deadline: ATTEMPT, grace: ATTEMPT };
            let ends = launch::run(vec![Process { command, victim: false }], limits, |_, _, line| {
                line.clone_into(&mut said);
                Ok(())
            });
            match ends.as_deref() {
                Ok([End::Exited(0)]) => return Ok(()),
                Ok([end]) if begun.elapsed() >= SETTLING => return Err(format!("a probe {end}: {said}")),
                Ok(_) => thread::sleep(PAUSE),
                Err(error) => return Err(format!("{error:#}")),
            }
        }
    }
}

impl Drop for Mps {
    fn drop(&mut self) {
        self.lifeline = None;
        let _ = self.guard.wait();
    }
}

fn variables(folder: &Path) -> [(&'static str, PathBuf); 2] {
    [("CUDA_MPS_PIPE_DIRECTORY", folder.join("pipe")), ("CUDA_MPS_LOG_DIRECTORY", folder.join("log"))]
}

/// A number for a unique name: a hash of nothing with a random key.
fn random() -> u32 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish() as u32
}

#[cfg(test)]
#[path = "mps_tests.rs"]
pub(super) mod tests;
