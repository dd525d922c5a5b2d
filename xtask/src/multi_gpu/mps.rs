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
pub(super) mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::process::write_program;

    /// Logs its requests, and sleeps as a daemon until it is told to quit.
    pub(crate) const DAEMON: &str = r##"#!/bin/sh
log=$(dirname "$0")/mps.log
pid=$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
if [ "$1" = -d ]; then
    [ -z "${CUDA_VISIBLE_DEVICES+set}" ] && [ -d "$CUDA_MPS_LOG_DIRECTORY" ] || exit 9
    if [ -e "$(dirname "$0")/broken" ]; then
        echo 'no permission'
        exit 1
    fi
    # As a daemon, which is no child of ours for long.
    sh -c "sleep 600 & echo \$! >'$pid'"
    echo "started $(cat "$pid") $CUDA_MPS_PIPE_DIRECTORY" >>"$log"
else
    read -r command
    echo "$command" >>"$log"
    [ -e "$(dirname "$0")/stubborn" ] || kill "$(cat "$pid")"
fi
"##;

    /// A folder with the daemon and a rank program whose probe of a GPU succeeds at the third attempt.
    fn folder() -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let probe = "#!/bin/sh\n[ \"$1\" = probe ] && [ -d \"$CUDA_MPS_PIPE_DIRECTORY\" ] || exit 9\necho x >>\"$0.tries\"\n\
                     [ \"$(wc -l <\"$0.tries\")\" -ge 3 ]\n";
        for (name, text) in [(CONTROL, DAEMON), ("program", probe)] {
            write_program(&folder.path().join(name), text);
        }
        folder
    }

    fn log(folder: &TempDir) -> String {
        fs::read_to_string(folder.path().join("mps.log")).unwrap_or_default()
    }

    /// Whether the daemon runs, and its folder.
    fn daemon(folder: &TempDir) -> (bool, PathBuf) {
        let log = log(folder);
        let mut words = log.lines().next().unwrap().split(' ').skip(1);
        let pid = words.next().unwrap();
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let runs = stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'));
        (runs, Path::new(words.next().unwrap()).parent().unwrap().to_owned())
    }

    #[test]
    fn mps_has_its_own_folders_and_quits_when_dropped() {
        let folder = folder();
        let mps = Mps::start(&folder.path().join(CONTROL)).unwrap();
        let (runs, own) = daemon(&folder);
        assert!(runs && own.join("pipe").is_dir() && own.join("log").is_dir(), "{own:?}");
        assert_eq!(mps.variables()[0], ("CUDA_MPS_PIPE_DIRECTORY", own.join("pipe")));
        mps.settle(&folder.path().join("program")).unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("program.tries")).unwrap(), "x\nx\nx\n");
        drop(mps);
        assert!(log(&folder).ends_with("\nquit -t 10\n"), "{}", log(&folder));
        assert_eq!(daemon(&folder), (false, own.clone()));
        assert!(!own.exists(), "{own:?}");
    }

    #[test]
    fn mps_kills_a_daemon_that_does_not_quit() {
        let folder = folder();
        fs::write(folder.path().join("stubborn"), "").unwrap();
        drop(Mps::start(&folder.path().join(CONTROL)).unwrap());
        let (runs, own) = daemon(&folder);
        assert!(!runs && !own.exists() && log(&folder).ends_with("\nquit -t 10\n"), "{}", log(&folder));
    }

    #[test]
    fn mps_ends_with_its_starter_even_if_that_is_killed() {
        let folder = folder();
        let mut mps = Mps::start(&folder.path().join(CONTROL)).unwrap();
        // The pipe closes in this way when this process is killed.
        mps.lifeline = None;
        mps.guard.wait().unwrap();
        let (runs, own) = daemon(&folder);
        assert!(!runs && !own.exists());
    }

    #[test]
    fn mps_says_why_a_daemon_does_not_start_and_leaves_nothing() {
        let folder = folder();
        fs::write(folder.path().join("broken"), "").unwrap();
        let why = Mps::start(&folder.path().join(CONTROL)).unwrap_err();
        assert!(why.contains("nvidia-cuda-mps-control -d failed") && why.ends_with(": no permission"), "{why}");
        let missing = Mps::start(&folder.path().join("nothing")).unwrap_err();
        assert!(missing.contains("nothing") && missing.starts_with("cannot start"), "{missing}");
    }
}
