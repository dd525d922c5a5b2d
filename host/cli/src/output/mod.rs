//! Output files: all files that the program creates are written through this module.
//!
//! A regular file is written beside its destination and renamed when it is complete, so that a failure leaves the old file; a link is
//! followed to its target, which need not exist. A path that is no regular file, such as a device or a pipe, is written directly, and `-`
//! is the standard output.

mod part;
#[allow(unsafe_code, reason = "it asks how a signal is handled")]
mod signals;

use std::fmt::Display;
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use self::part::UnfinishedFile;
pub use self::signals::ends_by_default;
use crate::text::shown;

/// The limit of links that lead to links, which is Linux's.
const MOST_LINKS: usize = 40;

/// The reason why an output was refused or could not be written, with its path.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// The system refused a call.
    #[error("{}: {source}", name(path))]
    Io {
        /// The output, as the user named it; the same in all variants.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The output is a folder.
    #[error("{}: is a folder", name(path))]
    Folder {
        /// The output.
        path: PathBuf,
    },
    /// The folder of the output does not exist.
    #[error("{}: its folder does not exist: {}", name(path), shown(folder))]
    NoFolder {
        /// The output.
        path: PathBuf,
        /// The missing folder.
        folder: PathBuf,
    },
    /// The output is one of the inputs.
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

/// A possible place of an output, to which nothing has been written yet.
#[derive(Debug)]
pub struct Destination {
    /// The path as the user named it.
    path: PathBuf,
    target: Target,
}

#[derive(Debug, PartialEq)]
enum Target {
    Stdout,
    /// A device or a pipe.
    Stream,
    /// A regular file, or a path without a file; no link.
    File(PathBuf),
}

impl Destination {
    /// Determines the kind of `path`, which must not be one of `inputs`, by any path or link.
    ///
    /// # Errors
    /// [`OutputError`] if nothing can be written there.
    pub fn find(path: &Path, inputs: &[PathBuf]) -> Result<Self, OutputError> {
        let io = |source| OutputError::Io { path: path.to_owned(), source };
        let facts =
            if is_dash(path) { Ok(stdout().and_then(|file| file.metadata()).map_err(io)?) } else { fs::metadata(path) };
        let target = match &facts {
            Ok(facts) if facts.is_dir() => return Err(OutputError::Folder { path: path.to_owned() }),
            Ok(_) if is_dash(path) => Target::Stdout,
            Ok(facts) if is_stdout(facts) => Target::Stdout,
            Ok(facts) if !facts.is_file() => Target::Stream,
            Ok(_) => Target::File(fs::canonicalize(path).map_err(io)?),
            Err(error) if error.kind() == ErrorKind::NotFound => Target::File(followed(path)?),
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
        Ok(Self { path: path.to_owned(), target })
    }

    /// The path as the user named it, or "standard output", as one line of text.
    pub fn shown(&self) -> String {
        name(&self.path).to_string()
    }

    /// Whether it is the standard output, to which nothing else can be written then.
    pub fn is_stdout(&self) -> bool {
        self.target == Target::Stdout
    }

    /// Whether the existing file stays until the output is complete.
    pub fn is_file(&self) -> bool {
        matches!(self.target, Target::File(_))
    }

    /// Whether both would overwrite each other.
    pub fn is_same(&self, other: &Self) -> bool {
        self.path == other.path || self.target == other.target && self.target != Target::Stream
    }

    /// Opens the output. For a named pipe, waits for a reader.
    ///
    /// # Errors
    /// [`OutputError::Io`] if the system refuses.
    pub fn open(self) -> Result<OutputFile, OutputError> {
        let Self { path, target } = self;
        let sink = signals::watch().and_then(|()| match target {
            Target::Stdout => Ok(Sink::Stream(stdout()?)),
            Target::Stream => Ok(Sink::Stream(fs::OpenOptions::new().write(true).open(&path)?)),
            Target::File(target) => Ok(Sink::File(UnfinishedFile::beside(&target)?, target)),
        });
        match sink {
            Ok(sink) => Ok(OutputFile { path, sink: BufWriter::with_capacity(1 << 20, sink) }),
            Err(source) => Err(OutputError::Io { path, source }),
        }
    }
}

/// The standard output, without the buffer of the rest of the program.
fn stdout() -> io::Result<File> {
    io::stdout().as_fd().try_clone_to_owned().map(File::from)
}

/// Whether `facts` describe the file behind the standard output, as for a path like `/dev/stdout`. A device can be used for both.
fn is_stdout(facts: &Metadata) -> bool {
    let same = |stdout: Metadata| (stdout.dev(), stdout.ino()) == (facts.dev(), facts.ino());
    !facts.file_type().is_char_device() && stdout().and_then(|file| file.metadata()).is_ok_and(same)
}

/// The target of a path where no file exists yet.
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

/// The folder of a file with this path.
fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// An output under way. Unless it is finished, a regular file stays as it was.
#[derive(Debug)]
pub struct OutputFile {
    path: PathBuf,
    sink: BufWriter<Sink>,
}

#[derive(Debug)]
enum Sink {
    Stream(File),
    /// A part, with its final path.
    File(UnfinishedFile, PathBuf),
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Sink::Stream(file) => file.write(bytes),
            Sink::File(part, _) => part.write(bytes),
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

    /// Lets `work` write to the output.
    ///
    /// # Errors
    /// [`OutputError::Io`] if `work` fails.
    pub fn write_by(&mut self, work: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), OutputError> {
        work(&mut self.sink).map_err(|source| OutputError::Io { path: self.path.clone(), source })
    }

    /// Renames the complete file.
    ///
    /// # Errors
    /// [`OutputError::Io`] if the system refuses.
    pub fn finish(self) -> Result<(), OutputError> {
        let Self { path, sink } = self;
        let finished = sink.into_inner().map_err(io::IntoInnerError::into_error).and_then(|sink| match sink {
            Sink::Stream(_) => Ok(()),
            Sink::File(part, target) => part.persist(&target),
        });
        finished.map_err(|source| OutputError::Io { path, source })
    }
}
