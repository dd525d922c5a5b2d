//! Requests of `gradsync launch` for traces, without a signal: a signal would run the handlers of the program too.
//!
//! The launcher's private folder has a pipe for each process that writes traces. A byte in the pipe is a request; a pipe that nobody reads is a
//! process that has ended. Through another pipe in that folder, processes report traces that they cannot write.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};

/// The name of the pipe for reports, which the launcher makes.
const REPORTS: &str = "reports";

/// Starts a thread that calls `write` at every request.
pub(super) fn listen(launcher: &Path, rank: usize, write: impl Fn() + Send + 'static) -> io::Result<()> {
    let path = launcher.join(format!("rank-{rank}.{}", std::process::id()));
    // A process of the same number, which has ended, may have left its pipe.
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    // Opened for both directions, the pipe has no end while the launcher does not have it open.
    let mut pipe = OpenOptions::new().read(true).write(true).custom_flags(OFlags::NOFOLLOW.bits() as i32).open(path)?;
    let serve = move || {
        let mut requests = [0; 64];
        loop {
            match pipe.read(&mut requests) {
                Ok(_) => write(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return tracing::warn!(%error, "the launcher cannot ask for traces any more"),
            }
        }
    };
    std::thread::Builder::new().name("gradsync-asked".into()).spawn(serve).map(drop)
}

/// Tells the launcher that a trace is not written.
pub(super) fn report(launcher: &Path, rank: usize, reason: &io::Error) -> io::Result<()> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let path = launcher.join(REPORTS);
    let mut pipe: File = OpenOptions::new().write(true).custom_flags(flags.bits() as i32).open(path)?;
    // One short write: the reports of ranks do not mix.
    let line: String = format!("{rank} {reason}").chars().filter(|c| !c.is_control()).take(500).collect();
    pipe.write_all(format!("{line}\n").as_bytes())
}
