//! Regular files in folders to which other users may write: they are opened without following a link, and without waiting as for a pipe. The
//! folders that users name for such files.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Opens a regular file with these options.
///
/// # Errors
/// The system's, and that the path is a link or no regular file.
pub(crate) fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let refusal = |reason| Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    let file = match options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(error) => match error.raw_os_error() {
            Some(libc::ELOOP) => return refusal("it is a link"),
            // A pipe without a reader, or a socket.
            Some(libc::ENXIO) => return refusal("it is no regular file"),
            _ => return Err(error),
        },
    };
    if file.metadata()?.is_file() { Ok(file) } else { refusal("it is no regular file") }
}

/// Reads a regular file of at most so many bytes.
///
/// # Errors
/// As [`open`], and that the file is longer.
pub(crate) fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path, OpenOptions::new().read(true))?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {most} bytes")));
    }
    Ok(bytes)
}

/// Makes a folder, and the folders above it, unless it is there.
///
/// # Errors
/// The reason in words, where it is not the system's: something else stands there.
#[cfg(target_os = "linux")]
pub(crate) fn make_folder(path: &Path) -> Result<(), String> {
    std::fs::create_dir_all(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => "it is no folder".into(),
        _ => error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn open_and_read_take_short_regular_files_alone() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("file"), "12345").unwrap();
        assert_eq!(read(&path("file"), 5).unwrap(), b"12345");
        assert_eq!(read(&path("file"), 4).unwrap_err().to_string(), "it has more than 4 bytes");
        std::os::unix::fs::symlink(path("file"), path("link")).unwrap();
        assert_eq!(read(&path("link"), 5).unwrap_err().to_string(), "it is a link");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, path("pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let _listener = UnixListener::bind(path("socket")).unwrap();
        for name in ["pipe", "socket", "."] {
            assert_eq!(read(&path(name), 5).unwrap_err().to_string(), "it is no regular file", "{name}");
        }
        let writing = open(&path("pipe"), OpenOptions::new().write(true)).unwrap_err();
        assert_eq!(writing.to_string(), "it is no regular file");
    }
}
