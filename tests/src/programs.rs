//! Programs that tests start: the C compiler, for shared libraries that replace real ones; the test program itself, for cases that need a
//! process of their own; and the outcome of a run of any program.

use std::ffi::OsStr;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use gradsync::bootstrap::{Launch, Secret};

/// Compiles a C source into a shared library; `arguments` are added to the strict compiler flags.
///
/// # Panics
/// If there is no C compiler, or it reports any error or warning.
pub fn shared_library(library: &Path, source: &Path, arguments: &[String]) {
    let compiled = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"])
        .args(arguments)
        .arg("-o")
        .args([library, source])
        .output()
        .unwrap_or_else(|error| panic!("`cc`, a C compiler, is needed: {error}"));
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

/// The standard output of one test of this program, run in a separate process; `prepare` sets the environment of that process.
///
/// # Panics
/// If the test fails in the process.
pub fn printed_by(test: &str, prepare: impl FnOnce(&mut Command)) -> String {
    let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
    command.args([test, "--exact", "--nocapture"]);
    prepare(&mut command);
    let output = command.output().expect("this program starts");
    let (printed, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{printed}{errors}");
    printed.into_owned()
}

/// The path of a program of this workspace, a `--bin` or an `--example`, in the profile of this test.
///
/// `cargo xtask test` builds programs together with the tests, and passes the folder of this profile in `GRADSYNC_PROGRAMS`. Without the
/// variable, the program is built here, because cargo tells a test only about the binaries of its own package: so a stale program is never
/// tested.
///
/// # Panics
/// If the build fails, or the folder has no such program.
pub fn built(package: &str, kind: &str, name: &str, features: &[&str]) -> PathBuf {
    let in_profile = |profile: &Path| {
        let folder = if kind == "--example" { profile.join("examples") } else { profile.to_owned() };
        folder.join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
    };
    if let Some(folder) = std::env::var_os("GRADSYNC_PROGRAMS") {
        let program = in_profile(Path::new(&folder));
        assert!(program.is_file(), "GRADSYNC_PROGRAMS has no {}", program.display());
        return program;
    }
    // target/<profile>/deps/<this test>
    let test = std::env::current_exe().expect("a test knows its own path");
    let profile = test.parent().and_then(Path::parent).expect("tests lie in target/<profile>/deps");
    let target = profile.parent().expect("the profile's folder lies in the target folder");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo.args(["build", "--quiet", "--package", package, kind, name]).args(features).arg("--target-dir").arg(target);
    match profile.file_name().and_then(OsStr::to_str) {
        Some("debug") => {}
        Some(name) => _ = cargo.args(["--profile", name]),
        None => panic!("{} is no build folder", profile.display()),
    }
    let status = cargo.status().expect("cargo starts");
    let program = in_profile(profile);
    assert!(
        status.success() && program.is_file(),
        "{name} is not at {}, and `cargo build --package {package} {kind} {name}` ended with {status}",
        program.display()
    );
    program
}

/// Commands that start a test of this program as `world_size` processes, with the launcher's environment variables that identify each rank.
///
/// # Panics
/// If there is no free port.
pub fn started_as_ranks(test: &str, world_size: usize) -> Vec<Command> {
    let program = std::env::current_exe().expect("the path of this program");
    as_ranks(&program, world_size, &[test, "--exact", "--nocapture", "--test-threads=1"])
}

/// Commands that start a program as `world_size` processes, with the launcher's environment variables.
///
/// # Panics
/// If there is no free port.
pub fn as_ranks(program: &Path, world_size: usize, arguments: &[&str]) -> Vec<Command> {
    // The port was free a moment ago; another process takes it in the meantime only by coincidence.
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|free| free.local_addr()).expect("a free port").port();
    let secret = Secret::generate().expect("random bytes").reveal();
    let start = |rank: usize| {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        for other in Launch::variables() {
            command.env_remove(other);
        }
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", world_size.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()).env("GRADSYNC_SECRET", &secret);
        command
    };
    (0..world_size).map(start).collect()
}

/// Restores the default action of the signals that end programs, as whoever started the tests may ignore them, like `nohup`.
#[cfg(unix)]
#[allow(unsafe_code, reason = "a step between fork and exec")]
pub fn heed_signals(command: &mut Command) {
    use std::os::unix::process::CommandExt as _;

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

/// Creates a named pipe called `pipe` in a folder.
///
/// # Panics
/// If the pipe cannot be created.
pub fn fifo(folder: &Path) -> PathBuf {
    let path = folder.join("pipe");
    let made = Command::new("mkfifo").arg(&path).status().expect("`mkfifo` starts");
    assert!(made.success(), "`mkfifo {}` ended with {made}", path.display());
    path
}

/// The outcome of one run of a program.
#[derive(Debug)]
pub struct Finished {
    /// The exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// The standard output.
    pub stdout: String,
    /// The standard error stream.
    pub stderr: String,
}

impl Finished {
    /// Runs a command to its end.
    ///
    /// # Panics
    /// If it does not start.
    pub fn of(command: &mut Command) -> Finished {
        let Output { status, stdout, stderr } = command.output().expect("the program starts");
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Finished { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
    }

    /// Panics with the program's standard error, unless the program succeeded.
    ///
    /// # Panics
    /// If the exit code is not 0.
    #[track_caller]
    pub fn succeeded(self, label: &str) -> Finished {
        assert_eq!(self.code, Some(0), "{label}: {}", self.stderr);
        self
    }

    /// Panics with the program's standard error, unless the program ended with this exit code and with all of `words` there.
    ///
    /// # Panics
    /// If the code is another, or a word is missing.
    #[track_caller]
    pub fn ended(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        words.iter().for_each(|word| assert!(self.stderr.contains(word), "{word}: {}", self.stderr));
    }

    /// Panics unless the program ended with an error that contains all of `words`; a panic or a signal does not count as such an error.
    ///
    /// # Panics
    /// If the program succeeded, panicked or was killed, or a word is missing.
    #[track_caller]
    pub fn refused(self, label: &str, words: &[&str]) {
        let Some(code) = self.code else { panic!("{label}: killed by a signal: {}", self.stderr) };
        assert!(code != 0, "{label}: succeeded, stdout: {}", self.stdout);
        assert!(code != 101 && !self.stderr.contains("panicked"), "{label}: panicked: {}", self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "{label}: stderr does not name {word}: {}", self.stderr);
        }
    }
}
