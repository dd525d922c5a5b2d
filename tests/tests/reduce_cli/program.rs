//! The binary under test, and runs of it.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

pub(crate) use gradsync_tests::programs::{Finished, fifo};

/// Has the program be ended by the signals that end programs, also where whoever started the tests ignores them, as `nohup` does.
pub(crate) fn heed_signals(command: &mut Command) {
    // SAFETY: between fork and exec, a call that signal handlers may make too.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        });
    }
}

/// The path of the program: `GRADSYNC_BINARY` if set, otherwise the one that belongs to this build.
///
/// Cargo tells a test only about the binaries of its own package, so the program is built here; that is quick when
/// it is up to date, and a stale one is never tested.
pub(crate) fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| match std::env::var_os("GRADSYNC_BINARY") {
        Some(path) => {
            let path = PathBuf::from(path);
            assert!(path.is_file(), "GRADSYNC_BINARY is {}, which is no file", path.display());
            path
        }
        None => build(),
    })
}

fn build() -> PathBuf {
    // target/<profile>/deps/<this test>
    let test = std::env::current_exe().expect("a test knows its own path");
    let profile = test.parent().and_then(Path::parent).expect("tests lie in target/<profile>/deps");
    let target = profile.parent().expect("the profile's folder lies in the target folder");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", "gradsync-cli", "--bin", "gradsync", "--target-dir"]).arg(target);
    if cfg!(feature = "mpi") {
        cargo.args(["--features", "mpi"]);
    }
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    match profile.file_name().and_then(OsStr::to_str) {
        Some("debug") => {}
        Some(name) => {
            cargo.args(["--profile", name]);
        }
        None => panic!("{} is no build folder", profile.display()),
    }
    let status = cargo.status().expect("cargo starts");
    let binary = profile.join(format!("gradsync{}", std::env::consts::EXE_SUFFIX));
    assert!(
        status.success() && binary.is_file(),
        "the program is not at {} and `cargo build --package gradsync-cli --bin gradsync` ended with {status}; \
         build it, or set GRADSYNC_BINARY",
        binary.display()
    );
    binary
}

/// Runs `gradsync reduce` with these arguments in `folder`.
pub(crate) fn reduce(folder: &Path, arguments: &[&dyn AsRef<OsStr>]) -> Finished {
    let mut command = Command::new(binary());
    command.current_dir(folder).arg("reduce").args(arguments.iter().map(|argument| argument.as_ref()));
    Finished::of(&mut command)
}
