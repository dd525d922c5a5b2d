//! The rendezvous file: the address of rank 0 and the secret of one group, for ranks that share a file system.
//!
//! Only its owner can read the file, and it exists only while ranks join. A file that another user may have put in its place is not read.
//! A rank that has read the file and the process at the address still prove the secret to each other, so the file of a former group does
//! no harm.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::client::Invitation;
use super::frame::decode;
use super::hosts;
use super::secret::Secret;
use super::trust::{self, Refusal};
use crate::error::BootstrapError;

/// The first line of the file. A file of another version counts as no file.
const MAGIC: &[u8] = b"gradsync rendezvous 2\n";
/// The most bytes to read from the path: more than a rendezvous file ever has.
const LONGEST: u64 = 1 << 16;

#[derive(Serialize, Deserialize)]
struct Content {
    hosts: Vec<String>,
    port: u16,
    secret: [u8; 32],
}

/// The rendezvous file of rank 0, which is removed when this value is dropped.
#[derive(Debug)]
pub(super) struct RendezvousFile {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl RendezvousFile {
    /// Writes the file at a path that [`prepare`] has returned, and in one step: a reader finds either the whole file or none.
    pub(super) fn publish(path: PathBuf, bytes: Vec<u8>) -> Result<Self, BootstrapError> {
        // The temporary file is in the same folder, because only a rename within a file system is atomic, and its name has the process
        // id, so no other process uses it.
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.tmp", std::process::id()));
        let temporary = path.with_file_name(name);
        let write = || -> Result<(), Refusal> {
            remove(&temporary)?;
            let mut file = create_private(&temporary)?;
            // Some file systems ignore the requested permissions, or set another owner.
            trust::check_file(&path, &file.metadata()?)?;
            file.write_all(&bytes)?;
            drop(file);
            Ok(uninterrupted(|| fs::rename(&temporary, &path))?)
        };
        if let Err(refusal) = write() {
            // The removal is best effort; the earlier error is reported.
            let _ = remove(&temporary);
            return Err(refusal.or(|error| failure(&path, &error)));
        }
        Ok(RendezvousFile { path, bytes })
    }

    /// Checks that other ranks still find this rank by the file.
    ///
    /// # Errors
    /// [`BootstrapError::File`] if it is gone or another one; the error for something else at its path. A file system that does not answer
    /// now may answer later.
    pub(super) fn check(&self) -> Result<(), BootstrapError> {
        let reason = match bytes(&self.path) {
            Ok(bytes) if bytes == self.bytes => return Ok(()),
            Ok(_) => "another rank 0 has replaced it while ranks joined: each job needs a file of its own",
            Err(Refusal::Untrusted(error)) => return Err(error),
            Err(Refusal::System(error)) if error.kind() == io::ErrorKind::NotFound => {
                "it was removed while ranks joined, perhaps by rank 0 of another job"
            }
            Err(Refusal::System(_)) => return Ok(()),
        };
        Err(BootstrapError::File { path: self.path.display().to_string(), reason: reason.into() })
    }
}

/// Removes a file that a former group has left at `path`, and returns the resolved path.
pub(super) fn prepare(path: &Path) -> Result<PathBuf, BootstrapError> {
    let clear = || -> Result<PathBuf, Refusal> {
        let place = trust::resolve(path)?;
        match place.symlink_metadata() {
            Ok(metadata) => trust::check_kind(&place, &metadata)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(place),
            Err(error) => return Err(error.into()),
        }
        remove(&place)?;
        Ok(place)
    };
    clear().map_err(|refusal| refusal.or(|error| failure(path, &error)))
}

impl Drop for RendezvousFile {
    fn drop(&mut self) {
        // A later group's rank 0 may have replaced the file by its own.
        if !bytes(&self.path).is_ok_and(|bytes| bytes == self.bytes) {
            return;
        }
        if let Err(error) = remove(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "the rendezvous file stays behind");
        }
    }
}

/// Reads the invitation in the file, if the file exists, can be trusted and has this version.
pub(super) fn read(path: &Path) -> Result<Invitation, Refusal> {
    Ok(understand(&bytes(path)?)?)
}

fn bytes(path: &Path) -> Result<Vec<u8>, Refusal> {
    let mut bytes = Vec::new();
    trust::open(path)?.take(LONGEST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The content of a rendezvous file that says where this process listens. It may query the name server, for at most `time`.
pub(super) fn describe(port: u16, secret: &Secret, time: Duration) -> Vec<u8> {
    let content = Content { hosts: hosts::own(port, time), port, secret: *secret.bytes() };
    let body = postcard::to_stdvec(&content).expect("plain data");
    [MAGIC, &body].concat()
}

/// Parses the content that [`describe`] has made in this version.
pub(super) fn understand(bytes: &[u8]) -> io::Result<Invitation> {
    let body = bytes.strip_prefix(MAGIC).ok_or(io::ErrorKind::InvalidData)?;
    let Content { hosts, port, secret } = decode(body)?;
    Ok(Invitation { hosts, ports: vec![port], secret: Secret::from_bytes(secret) })
}

fn create_private(path: &Path) -> io::Result<fs::File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Removes a file if it is there.
fn remove(path: &Path) -> io::Result<()> {
    match uninterrupted(|| fs::remove_file(path)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Repeats a call as long as signals interrupt it, which happens on network file systems.
fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

fn failure(path: &Path, error: &dyn std::error::Error) -> BootstrapError {
    BootstrapError::File { path: path.display().to_string(), reason: error.to_string() }
}
