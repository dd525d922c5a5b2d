//! An input file, which is read by position. It is not mapped: a mapped file that shrinks ends the process that reads it.
//!
//! A writer that replaces the file by a rename does no harm, as the open file stays what it was. A writer that changes the file itself is
//! noticed by its length and its time of modification.

use std::fs::{self, File, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::FileError;
use super::formats;

/// The time after which another modification has another time: file systems take times from the system's ticks, of 10 ms at most.
const TICK: Duration = Duration::from_millis(12);
/// The number of bytes by which another format is recognised.
const BEGINNING: u64 = 1 << 20;

/// Lets this process hold so many inputs open, as far as the system's hard limit goes.
pub(super) fn allow_open(inputs: usize) {
    /// The descriptors of everything else.
    const OTHERS: u64 = 64;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < inputs as u64 + OTHERS) {
        // Where this fails, so does the opening of the first file beyond the limit, with its name.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    }
}

/// An open input.
pub(super) struct Input {
    path: PathBuf,
    file: File,
    version: Version,
}

/// The marks of one state of a file: its length, and its time of modification in seconds and nanoseconds.
#[derive(Clone, Copy, PartialEq)]
struct Version {
    len: u64,
    modified: (i64, i64),
}

impl Version {
    fn of(facts: &Metadata) -> Self {
        Self { len: facts.len(), modified: (facts.mtime(), facts.mtime_nsec()) }
    }
}

impl Input {
    /// Opens a regular file.
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        let io = |source| FileError::Io { path: path.to_owned(), source };
        let other = |what: &str| FileError::OtherFormat { path: path.to_owned(), what: what.to_owned() };
        // The type is checked before the file is opened: opening a pipe waits for a writer.
        let facts = fs::metadata(path).map_err(io)?;
        if facts.is_dir() {
            return Err(other("a folder: name the safetensors file in it"));
        }
        if !facts.is_file() {
            return Err(other(
                "a pipe, a device or a socket, and inputs are read more than once: write the data to a file first",
            ));
        }
        let file = File::open(path).map_err(io)?;
        let facts = file.metadata().map_err(io)?;
        let input = Self { path: path.to_owned(), file, version: Version::of(&facts) };
        // A file that was modified in this tick could be modified again without another time.
        let age = facts.modified().ok().and_then(|modified| SystemTime::now().duration_since(modified).ok());
        if let Some(rest) = age.and_then(|age| TICK.checked_sub(age)) {
            thread::sleep(rest);
            input.check()?;
        }
        if input.version.len == 0 {
            return Err(other("empty: its writer or a download has not come to write anything; make it again"));
        }
        Ok(input)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The number of bytes when the file was opened.
    pub(super) fn len(&self) -> u64 {
        self.version.len
    }

    /// Fills `bytes` from a position within the file's length.
    pub(super) fn read(&self, bytes: &mut [u8], position: u64) -> Result<(), FileError> {
        self.file.read_exact_at(bytes, position).map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => FileError::Changed { path: self.path.clone() },
            _ => FileError::Io { path: self.path.clone(), source },
        })
    }

    /// Refuses a file that has been changed since it was opened.
    pub(super) fn check(&self) -> Result<(), FileError> {
        match self.file.metadata() {
            Ok(facts) if Version::of(&facts) == self.version => Ok(()),
            Ok(_) => Err(FileError::Changed { path: self.path.clone() }),
            Err(source) => Err(FileError::Io { path: self.path.clone(), source }),
        }
    }

    /// The error of contents that are no safetensors file: the file may be changing, or of a format that is known.
    pub(super) fn malformed(&self, reason: String) -> FileError {
        let mut beginning = vec![0; self.len().min(BEGINNING) as usize];
        if let Err(error) = self.check().and_then(|()| self.read(&mut beginning, 0)) {
            return error;
        }
        let path = self.path.clone();
        match formats::recognised(&beginning) {
            Some(what) => FileError::OtherFormat { path, what },
            None => FileError::Malformed { path, reason },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The time of a modification may be that of the modification before, unless the reader has waited in between.
    #[test]
    fn check_finds_a_write_right_after_the_file_was_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("input");
        for _ in 0..40 {
            fs::write(&path, b"first").unwrap();
            let input = Input::open(&path).unwrap();
            assert!(input.check().is_ok());
            fs::write(&path, b"other").unwrap();
            assert!(matches!(input.check(), Err(FileError::Changed { .. })));
        }
    }
}
