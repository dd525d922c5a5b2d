//! A daemon made of shell scripts, from its start to its end.

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
fn a_daemon_has_its_own_folders_and_quits_when_it_goes() {
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
fn a_daemon_that_does_not_obey_is_killed() {
    let folder = folder();
    fs::write(folder.path().join("stubborn"), "").unwrap();
    drop(Mps::start(&folder.path().join(CONTROL)).unwrap());
    let (runs, own) = daemon(&folder);
    assert!(!runs && !own.exists() && log(&folder).ends_with("\nquit -t 10\n"), "{}", log(&folder));
}

#[test]
fn a_daemon_ends_with_us_even_if_we_are_killed() {
    let folder = folder();
    let mut mps = Mps::start(&folder.path().join(CONTROL)).unwrap();
    // The pipe closes in this way when this process is killed.
    mps.lifeline = None;
    mps.guard.wait().unwrap();
    let (runs, own) = daemon(&folder);
    assert!(!runs && !own.exists());
}

#[test]
fn a_daemon_that_does_not_start_says_why_and_leaves_nothing() {
    let folder = folder();
    fs::write(folder.path().join("broken"), "").unwrap();
    let why = Mps::start(&folder.path().join(CONTROL)).unwrap_err();
    assert!(why.contains("nvidia-cuda-mps-control -d failed") && why.ends_with(": no permission"), "{why}");
    let missing = Mps::start(&folder.path().join("nothing")).unwrap_err();
    assert!(missing.contains("nothing") && missing.starts_with("cannot start"), "{missing}");
}
