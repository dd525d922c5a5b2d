//! Hidden files beside the outputs that they become: `.gradsync-<which output>-<random>.part`.
//!
//! The writer of a part holds a lock on it, which the system releases when the process is killed. So a part without a lock was left by a
//! killed process, and is removed when the same output is written again. A signal that ends the process removes its parts.

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
/// The number of attempts, since another process may remove a part between its creation and its lock.
const ATTEMPTS: usize = 16;

/// A part of this process, and its output.
pub(super) struct Unfinished {
    pub(super) part: PathBuf,
    pub(super) output: PathBuf,
}

static UNFINISHED: Mutex<Vec<Unfinished>> = Mutex::new(Vec::new());

/// The parts of this process. While this lock is held, no part is created, removed or renamed.
pub(super) fn unfinished() -> MutexGuard<'static, Vec<Unfinished>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is removed unless it gets its final name.
#[derive(Debug)]
pub(super) struct UnfinishedFile {
    /// `None` only while it is dropped.
    file: Option<NamedTempFile>,
}

impl UnfinishedFile {
    /// Creates a part in the folder of `output`, which is no link, with the permissions of an existing output.
    pub(super) fn beside(output: &Path) -> io::Result<Self> {
        let prefix = prefix(output);
        let mut unfinished = unfinished();
        remove_stale(folder(output), &prefix);
        // Without an existing file, the system's defaults for a new file apply.
        let permissions = fs::metadata(output).map_or(Permissions::from_mode(0o666), |facts| facts.permissions());
        for _ in 0..ATTEMPTS {
            let mut builder = tempfile::Builder::new();
            builder.prefix(&prefix).suffix(SUFFIX).permissions(permissions.clone());
            let file = builder.tempfile_in(folder(output))?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // Another process that looks for stale parts found this one before it was locked, and removes it.
                Err(Errno::WOULDBLOCK) => continue,
                Ok(()) if file.as_file().metadata()?.nlink() == 0 => continue,
                // On a file system without locks no other process gets a lock either, so none takes this part for stale.
                Ok(()) | Err(_) => {}
            }
            unfinished.push(Unfinished { part: file.path().to_owned(), output: output.to_owned() });
            return Ok(Self { file: Some(file) });
        }
        Err(io::Error::other("other processes keep removing its unfinished file"))
    }

    /// Renames the complete file.
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

impl Write for UnfinishedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.as_mut().map_or(Ok(0), |file| file.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        let Some(file) = self.file.take() else { return };
        let mut unfinished = unfinished();
        unfinished.retain(|known| known.part != file.path());
        drop(file);
    }
}

/// The prefix of the names of all parts of an output. Its length does not depend on the output's name.
fn prefix(output: &Path) -> String {
    let name = output.file_name().unwrap_or_default().as_encoded_bytes();
    let hash: String = Sha256::digest(name).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!(".gradsync-{hash}-")
}

/// Removes parts of an output that no process holds. A part that cannot be read or removed stays, which is harmless.
fn remove_stale(folder: &Path, prefix: &str) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_part = |name: &[u8]| name.starts_with(prefix.as_bytes()) && name.ends_with(SUFFIX.as_bytes());
    for path in entries.filter(|entry| is_part(entry.file_name().as_encoded_bytes())).map(|entry| entry.path()) {
        // The open neither follows a link nor waits for the writer of a pipe at this path.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::open(&path, flags, Mode::empty()).map(File::from) else { continue };
        let is_free = || rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
        if file.metadata().is_ok_and(|facts| facts.is_file()) && is_free() && fs::remove_file(&path).is_ok() {
            tracing::info!(?path, "removed what a killed process left");
        }
    }
}
