//! Where the program writes: every file that a command makes goes through here.
//!
//! A regular file is written beside its place and takes its name when it is complete, so that a failure leaves what stood there; a link
//! leads to the file that it names, be that there or not. What is no regular file, a device or a pipe, is written to as it is, and `-` is
//! the standard output.

mod part;
mod signals;

use std::fmt::Display;
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use self::part::Part;
pub use self::signals::ends_by_default;
use crate::text::shown;

/// Links that lead to links: as many as Linux follows.
const MOST_LINKS: usize = 40;

/// Why an output was refused or could not be written, always by its path.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// The system's refusal.
    #[error("{}: {source}", name(path))]
    Io {
        /// The output, as the user called it; so in all variants.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A folder, where a file was wanted.
    #[error("{}: is a folder", name(path))]
    Folder {
        /// The output.
        path: PathBuf,
    },
    /// A file in a folder that does not exist.
    #[error("{}: its folder does not exist: {}", name(path), shown(folder))]
    NoFolder {
        /// The output.
        path: PathBuf,
        /// The folder that it would be in.
        folder: PathBuf,
    },
    /// One of the inputs.
    #[error("{}: the output is also an input", name(path))]
    Input {
        /// The output.
        path: PathBuf,
    },
}

fn name(path: &Path) -> impl Display {
    if is_dash(path) { "standard output".to_owned() } else { shown(path).to_string() }
}

fn is_dash(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// A place that an output can have; nothing has been written there yet.
#[derive(Debug)]
pub struct Destination {
    /// As the user called it.
    path: PathBuf,
    place: Place,
}

#[derive(Debug, PartialEq)]
enum Place {
    Stdout,
    /// A device or a pipe.
    Stream,
    /// A regular file, or nothing yet; no link.
    File(PathBuf),
}

impl Destination {
    /// Finds out what `path` is. It may be none of `inputs`, by whatever path or link.
    ///
    /// # Errors
    /// [`OutputError`] where nothing can be written.
    pub fn find(path: &Path, inputs: &[PathBuf]) -> Result<Self, OutputError> {
        let io = |source| OutputError::Io { path: path.to_owned(), source };
        let facts =
            if is_dash(path) { Ok(stdout().and_then(|file| file.metadata()).map_err(io)?) } else { fs::metadata(path) };
        let place = match &facts {
            Ok(facts) if facts.is_dir() => return Err(OutputError::Folder { path: path.to_owned() }),
            Ok(_) if is_dash(path) => Place::Stdout,
            Ok(facts) if is_stdout(facts) => Place::Stdout,
            Ok(facts) if !facts.is_file() => Place::Stream,
            Ok(_) => Place::File(fs::canonicalize(path).map_err(io)?),
            Err(error) if error.kind() == ErrorKind::NotFound => Place::File(followed(path)?),
            Err(_) => return Err(io(facts.expect_err("it is one"))),
        };
        let identity = |facts: &Metadata| (facts.dev(), facts.ino());
        let is_output = |input: &PathBuf| {
            let (Ok(input), Ok(output)) = (fs::metadata(input), &facts) else { return false };
            output.is_file() && identity(&input) == identity(output)
        };
        if inputs.iter().any(is_output) {
            return Err(OutputError::Input { path: path.to_owned() });
        }
        Ok(Self { path: path.to_owned(), place })
    }

    /// Whether it is the standard output, which then has no room for anything else.
    pub fn is_stdout(&self) -> bool {
        self.place == Place::Stdout
    }

    /// Whether what stands there stays until the output is complete.
    pub fn is_file(&self) -> bool {
        matches!(self.place, Place::File(_))
    }

    /// Whether both would write over each other.
    pub fn is_same(&self, other: &Self) -> bool {
        self.path == other.path || self.place == other.place && self.place != Place::Stream
    }

    /// Opens it. Waits for a reader where it is a named pipe.
    ///
    /// # Errors
    /// [`OutputError::Io`] if the system refuses.
    pub fn open(self) -> Result<OutputFile, OutputError> {
        let Self { path, place } = self;
        let sink = signals::watch().and_then(|()| match place {
            Place::Stdout => Ok(Sink::Stream(stdout()?)),
            Place::Stream => Ok(Sink::Stream(fs::OpenOptions::new().write(true).open(&path)?)),
            Place::File(target) => Ok(Sink::Part(Part::beside(&target)?, target)),
        });
        match sink {
            Ok(sink) => Ok(OutputFile { path, sink: BufWriter::with_capacity(1 << 20, sink) }),
            Err(source) => Err(OutputError::Io { path, source }),
        }
    }
}

/// The standard output, without the buffer that the rest of the program has before it.
fn stdout() -> io::Result<File> {
    io::stdout().as_fd().try_clone_to_owned().map(File::from)
}

/// Whether this is what the standard output leads to: by a path like `/dev/stdout`. A device has room for both.
fn is_stdout(facts: &Metadata) -> bool {
    let same = |stdout: Metadata| (stdout.dev(), stdout.ino()) == (facts.dev(), facts.ino());
    !facts.file_type().is_char_device() && stdout().and_then(|file| file.metadata()).is_ok_and(same)
}

/// The place that a path leads to where nothing stands yet.
fn followed(path: &Path) -> Result<PathBuf, OutputError> {
    let mut target = path.to_owned();
    for _ in 0..MOST_LINKS {
        let Ok(next) = fs::read_link(&target) else { break };
        target = folder(&target).join(next);
    }
    let Some(name) = target.file_name().filter(|_| !target.as_os_str().as_bytes().ends_with(b"/")) else {
        return Err(OutputError::Folder { path: path.to_owned() });
    };
    let folder = folder(&target);
    match fs::canonicalize(folder) {
        Ok(folder) => Ok(folder.join(name)),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(OutputError::NoFolder { path: path.to_owned(), folder: folder.to_owned() })
        }
        Err(source) => Err(OutputError::Io { path: path.to_owned(), source }),
    }
}

/// Where a file of that path lies.
fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// An output on its way. Unless it is finished, a regular file is as if nothing had been written.
#[derive(Debug)]
pub struct OutputFile {
    path: PathBuf,
    sink: BufWriter<Sink>,
}

#[derive(Debug)]
enum Sink {
    Stream(File),
    /// With the place that it will have.
    Part(Part, PathBuf),
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Sink::Stream(file) => file.write(bytes),
            Sink::Part(part, _) => part.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl OutputFile {
    /// Writes bytes.
    ///
    /// # Errors
    /// [`OutputError::Io`] if the system refuses.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), OutputError> {
        self.write_by(|sink| sink.write_all(bytes))
    }

    /// Has `work` write to it.
    ///
    /// # Errors
    /// [`OutputError::Io`] if `work` fails.
    pub fn write_by(&mut self, work: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), OutputError> {
        work(&mut self.sink).map_err(|source| OutputError::Io { path: self.path.clone(), source })
    }

    /// Gives the complete file its name.
    ///
    /// # Errors
    /// [`OutputError::Io`] if the system refuses.
    pub fn finish(self) -> Result<(), OutputError> {
        let Self { path, sink } = self;
        let finished = sink.into_inner().map_err(io::IntoInnerError::into_error).and_then(|sink| match sink {
            Sink::Stream(_) => Ok(()),
            Sink::Part(part, target) => part.persist(&target),
        });
        finished.map_err(|source| OutputError::Io { path, source })
    }
}
