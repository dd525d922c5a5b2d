//! Hidden files beside the outputs that they become: `.gradsync-<which output>-<random>.part`.
//!
//! Whoever writes one holds a lock on it for as long, which the system takes away from a process that is killed: a part without a lock was left
//! by such a process, and goes when the same output is written again. A signal that ends the process takes its parts along.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use tempfile::NamedTempFile;

use super::folder;

const SUFFIX: &str = ".part";
/// How often a part may be taken away between its beginning and its lock.
const ATTEMPTS: usize = 16;

/// A part of this process, and the output that it shall become.
pub(super) struct Unfinished {
    pub(super) part: PathBuf,
    pub(super) output: PathBuf,
}

static UNFINISHED: Mutex<Vec<Unfinished>> = Mutex::new(Vec::new());

/// The parts of this process. None comes, goes or gets its name while this is held.
pub(super) fn unfinished() -> MutexGuard<'static, Vec<Unfinished>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is gone unless it gets a name.
#[derive(Debug)]
pub(super) struct Part {
    /// `None` only at its end.
    file: Option<NamedTempFile>,
}

impl Part {
    /// Begins one in the folder of `output`, which is no link, with the permissions of what stands there.
    pub(super) fn beside(output: &Path) -> io::Result<Self> {
        let prefix = prefix(output);
        let mut unfinished = unfinished();
        remove_stale(folder(output), &prefix);
        // Where nothing stands, what the system gives to a new file.
        let permissions = fs::metadata(output).map_or(Permissions::from_mode(0o666), |facts| facts.permissions());
        for _ in 0..ATTEMPTS {
            let mut builder = tempfile::Builder::new();
            builder.prefix(&prefix).suffix(SUFFIX).permissions(permissions.clone());
            let file = builder.tempfile_in(folder(output))?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // Another process looks for stale parts, has found this one before it was locked, and removes it.
                Err(Errno::WOULDBLOCK) => continue,
                Ok(()) if file.as_file().metadata()?.nlink() == 0 => continue,
                // A file system without locks: nobody else gets one either, and takes this part for stale.
                Ok(()) | Err(_) => {}
            }
            unfinished.push(Unfinished { part: file.path().to_owned(), output: output.to_owned() });
            return Ok(Self { file: Some(file) });
        }
        Err(io::Error::other("other processes keep removing its unfinished file"))
    }

    /// Gives the complete file its name.
    pub(super) fn persist(mut self, output: &Path) -> io::Result<()> {
        self.file.as_ref().map_or(Ok(()), |file| file.as_file().sync_all())?;
        let mut unfinished = unfinished();
        let Some(file) = self.file.take() else { return Ok(()) };
        let path = file.path().to_owned();
        let persisted = file.persist(output).map(drop).map_err(|error| error.error);
        unfinished.retain(|known| known.part != path);
        persisted
    }
}

impl Write for Part {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.as_mut().map_or(Ok(0), |file| file.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let Some(file) = self.file.take() else { return };
        let mut unfinished = unfinished();
        unfinished.retain(|known| known.part != file.path());
        drop(file);
    }
}

/// How the names of all parts of an output begin: of any length that a file's name can have.
fn prefix(output: &Path) -> String {
    let name = output.file_name().unwrap_or_default().as_encoded_bytes();
    let hash: String = Sha256::digest(name).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!(".gradsync-{hash}-")
}

/// Removes parts of an output that no process holds. What cannot be read or removed stays: it is in nobody's way.
fn remove_stale(folder: &Path, prefix: &str) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_part = |name: &[u8]| name.starts_with(prefix.as_bytes()) && name.ends_with(SUFFIX.as_bytes());
    for path in entries.filter(|entry| is_part(entry.file_name().as_encoded_bytes())).map(|entry| entry.path()) {
        // Neither follows a link nor waits for the writer of a pipe that somebody has put there.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::open(&path, flags, Mode::empty()).map(File::from) else { continue };
        let is_free = || rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
        if file.metadata().is_ok_and(|facts| facts.is_file()) && is_free() && fs::remove_file(&path).is_ok() {
            tracing::info!(?path, "removed what a killed process left");
        }
    }
}
