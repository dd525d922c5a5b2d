//! The binary under test, and runs of it.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

pub(crate) use gradsync_tests::programs::{Finished, built, fifo};

/// Restores the default action of the signals that end programs, as whoever started the tests may ignore them, like `nohup`.
pub(crate) fn heed_signals(command: &mut Command) {
    // SAFETY: Between fork and exec, this only makes a call that signal handlers may make too.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        });
    }
}

/// The path of the program.
pub(crate) fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let features: &[&str] = if cfg!(feature = "mpi") { &["--features", "mpi"] } else { &[] };
        built("gradsync-cli", "--bin", "gradsync", features)
    })
}

/// Runs `gradsync reduce` with these arguments in `folder`.
pub(crate) fn reduce(folder: &Path, arguments: &[&dyn AsRef<OsStr>]) -> Finished {
    let mut command = Command::new(binary());
    // The program may have the feature `cuda`: without a GPU it computes on the CPU on every machine.
    command.env("CUDA_VISIBLE_DEVICES", "");
    command.current_dir(folder).arg("reduce").args(arguments.iter().map(|argument| argument.as_ref()));
    Finished::of(&mut command)
}
