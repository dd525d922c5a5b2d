//! The rendezvous file: where rank 0 listens and the secret of this one group, for ranks that share a file system.
//!
//! Only its owner can read it, and it exists only while ranks join. A file that another user may have put there is not read. A rank that has
//! read a file still has to prove the secret to the process at its address, and that process to it, so that a file of a former group does no harm.

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
/// More than a rendezvous file ever holds; of anything else that lies there, no more is read.
const LONGEST: u64 = 1 << 16;

#[derive(Serialize, Deserialize)]
struct Content {
    hosts: Vec<String>,
    port: u16,
    secret: [u8; 32],
}

/// Rank 0's file, which goes when this goes.
#[derive(Debug)]
pub(super) struct RendezvousFile {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl RendezvousFile {
    /// Writes the file in the place that [`prepare`] has made, and in one step: who reads it finds all of it or nothing.
    pub(super) fn publish(path: PathBuf, bytes: Vec<u8>) -> Result<Self, BootstrapError> {
        // Beside the file, as only a rename within a file system is one step; under a name that no other process takes.
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.tmp", std::process::id()));
        let temporary = path.with_file_name(name);
        let write = || -> Result<(), Refusal> {
            remove(&temporary)?;
            let mut file = create_private(&temporary)?;
            // Some file systems give files other permissions, or another owner, than they were asked for.
            trust::check_file(&path, &file.metadata()?)?;
            file.write_all(&bytes)?;
            drop(file);
            Ok(uninterrupted(|| fs::rename(&temporary, &path))?)
        };
        if let Err(refusal) = write() {
            // Best effort: the error that led here is the one to report.
            let _ = remove(&temporary);
            return Err(refusal.or(|error| failure(&path, &error)));
        }
        Ok(RendezvousFile { path, bytes })
    }
}

/// Removes a file that a former group has left there, and returns the resolved path.
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
        // A rank 0 of a later group may have put its own in place.
        if !bytes(&self.path).is_ok_and(|bytes| bytes == self.bytes) {
            return;
        }
        if let Err(error) = remove(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "the rendezvous file stays behind");
        }
    }
}

/// The contents of the file, if it exists, can be trusted and has this version.
pub(super) fn read(path: &Path) -> Result<Invitation, Refusal> {
    Ok(understand(&bytes(path)?)?)
}

fn bytes(path: &Path) -> Result<Vec<u8>, Refusal> {
    let mut bytes = Vec::new();
    trust::open(path)?.take(LONGEST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The content of a rendezvous file: where this process listens. May ask the name server for at most `time`.
pub(super) fn describe(port: u16, secret: &Secret, time: Duration) -> Vec<u8> {
    let content = Content { hosts: hosts::own(port, time), port, secret: *secret.bytes() };
    let body = postcard::to_stdvec(&content).expect("plain data");
    [MAGIC, &body].concat()
}

/// Parses the content that [`describe`] makes, of this version.
pub(super) fn understand(bytes: &[u8]) -> io::Result<Invitation> {
    let body = bytes.strip_prefix(MAGIC).ok_or(io::ErrorKind::InvalidData)?;
    let Content { hosts, port, secret } = decode(body)?;
    Ok(Invitation { hosts, port, secret: Secret::from_bytes(secret) })
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

/// Repeats a call as long as signals interrupt it, which happens on file systems over a network.
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
