//! The binary under test, and runs of it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

pub(crate) use gradsync_tests::programs::{Finished, built, fifo, heed_signals};

/// The path of the program.
pub(crate) fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let features: &[&str] = if cfg!(feature = "mpi") { &["--features", "mpi"] } else { &[] };
        built("gradsync-cli", "--bin", "gradsync", features)
    })
}

/// Runs `gradsync reduce` with these arguments in `folder`.
pub(crate) fn reduce(folder: &Path, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Finished {
    let mut command = Command::new(binary());
    // The program may have the feature `cuda`: without a GPU it computes on the CPU on every machine.
    command.env("CUDA_VISIBLE_DEVICES", "");
    command.current_dir(folder).arg("reduce").args(arguments);
    Finished::of(&mut command)
}
