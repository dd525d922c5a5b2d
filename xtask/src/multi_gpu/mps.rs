//! CUDA's Multi-Process Service, by which processes are on one GPU at once and not by turns: a daemon of our own, with folders of its
//! own, which ends when we do.
//!
//! Another daemon of the machine's is neither used nor disturbed, and the GPU's compute mode stays what it is.

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
/// Where containers have what belongs to the driver.
const FOLDER: &str = "/usr/local/nvidia/bin";
/// How long a server may need to take clients, or to take them again after one of them was killed.
const SETTLING: Duration = Duration::from_secs(60);
/// How long one attempt may take.
const ATTEMPT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(500);

/// A daemon that runs.
#[derive(Debug)]
pub(crate) struct Mps {
    control: PathBuf,
    folder: PathBuf,
    guard: Child,
    /// The guard ends the daemon when this closes.
    lifeline: Option<ChildStdin>,
}

/// The daemon's program; if there is none, where it was looked for.
pub(crate) fn find() -> Result<PathBuf, String> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain([PathBuf::from(FOLDER)]);
    let found = folders.map(|folder| folder.join(CONTROL)).find(|program| program.is_file());
    found.ok_or_else(|| format!("there is no {CONTROL} in PATH or {FOLDER}"))
}

impl Mps {
    /// Ends the daemon however we end, by Ctrl-C and SIGKILL included: it waits for the end of a pipe that only we hold. A daemon that does
    /// not obey is killed.
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

    /// Starts one; if it does not start, what it says.
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
        // Not a pipe: the daemon would hold it open.
        let log = self.folder.join("start");
        let file = || fs::File::options().create(true).append(true).open(&log);
        let mut command = Command::new(&self.control);
        // Its clients choose among the GPUs that it has: it has all, so that they choose by the same numbers.
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

    /// What makes a process a client.
    pub(crate) fn variables(&self) -> [(&'static str, PathBuf); 2] {
        variables(&self.folder)
    }

    /// Waits until a new process can use a GPU; if that takes too long, its last words.
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

/// For a name that nobody else has: a hash of nothing with a random key.
fn random() -> u32 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish() as u32
}

#[cfg(test)]
#[path = "mps_tests.rs"]
pub(super) mod tests;
