//! The trust in files: only a rank's own user, or root, can have put a trusted file in its place.
//!
//! The rule is that of OpenSSH for `authorized_keys`, but stricter for the file, which holds a secret, and looser for folders with the
//! sticky bit, in which only owners rename and remove files. On other systems than Unix, a file only has to be a regular one. This module
//! does not look at the contents of files.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::BootstrapError;

/// The reason why a file was not opened.
#[derive(Debug)]
pub(super) enum Refusal {
    System(io::Error),
    Untrusted(BootstrapError),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Refusal::System(error)
    }
}

impl From<BootstrapError> for Refusal {
    fn from(error: BootstrapError) -> Self {
        Refusal::Untrusted(error)
    }
}

impl Refusal {
    /// The error to report; `report` converts an error of the system.
    pub(super) fn or(self, report: impl FnOnce(io::Error) -> BootstrapError) -> BootstrapError {
        match self {
            Refusal::System(error) => report(error),
            Refusal::Untrusted(error) => error,
        }
    }
}

/// Returns the path with links resolved, if only this user or root can replace the file there: they own every folder on the way, and
/// others may not write in a folder without the sticky bit.
pub(super) fn resolve(path: &Path) -> Result<PathBuf, Refusal> {
    let path = std::path::absolute(path)?;
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(not_a_file(&path, "a folder").into());
    };
    let folder = folder.canonicalize()?;
    #[cfg(unix)]
    for folder in folder.ancestors() {
        unix::check_folder(folder, &folder.symlink_metadata()?)?;
    }
    Ok(folder.join(name))
}

/// Opens a file for reading, if it can be trusted. Never blocks, as opening a FIFO would.
pub(super) fn open(path: &Path) -> Result<File, Refusal> {
    let path = resolve(path)?;
    // Opening a device may have side effects, and the system's error for a link or a socket says little.
    check_kind(&path, &path.symlink_metadata()?)?;
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    unix::add_flags(&mut options);
    let file = options.open(&path)?;
    // The file at this path may have been replaced since.
    check_file(&path, &file.metadata()?)?;
    Ok(file)
}

/// Refuses everything but a regular file.
pub(super) fn check_kind(path: &Path, metadata: &Metadata) -> Result<(), BootstrapError> {
    if metadata.is_file() {
        return Ok(());
    }
    #[cfg(unix)]
    let kind = unix::kind(metadata.file_type());
    #[cfg(not(unix))]
    let kind = "no regular file";
    Err(not_a_file(path, kind))
}

/// Refuses everything but a regular file that this user or root owns and that only its owner may read or write.
pub(super) fn check_file(path: &Path, metadata: &Metadata) -> Result<(), BootstrapError> {
    check_kind(path, metadata)?;
    #[cfg(unix)]
    unix::check_access(path, metadata)?;
    Ok(())
}

fn not_a_file(path: &Path, kind: &str) -> BootstrapError {
    BootstrapError::NotAFile { path: path.display().to_string(), kind: kind.to_owned() }
}

#[cfg(unix)]
mod unix {
    use std::fs::{self, FileType, Metadata, OpenOptions};
    use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
    use std::path::Path;

    use rustix::fs::OFlags;
    use rustix::process::geteuid;

    use super::BootstrapError;

    const ROOT: u32 = 0;
    const PERMISSIONS: u32 = 0o7777;
    const STICKY: u32 = 0o1000;
    const OTHERS: u32 = 0o077;
    const OTHERS_WRITE: u32 = 0o022;

    pub(super) fn add_flags(options: &mut OpenOptions) {
        options.custom_flags((OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::NOCTTY).bits() as i32);
    }

    pub(super) fn check_access(path: &Path, metadata: &Metadata) -> Result<(), BootstrapError> {
        let (owner, mode) = (metadata.uid(), metadata.mode() & PERMISSIONS);
        let reason = if !is_trusted(owner) {
            foreign()
        } else if mode & OTHERS != 0 {
            "nobody but its owner may have access to it, as with mode 0600".to_owned()
        } else {
            return Ok(());
        };
        Err(BootstrapError::UntrustedFile { path: path.display().to_string(), owner, mode, reason })
    }

    pub(super) fn check_folder(path: &Path, metadata: &Metadata) -> Result<(), BootstrapError> {
        let (owner, mode) = (metadata.uid(), metadata.mode() & PERMISSIONS);
        let reason = if !is_trusted(owner) && Some(owner) != unmapped_user() {
            foreign()
        } else if mode & OTHERS_WRITE != 0 && mode & STICKY == 0 {
            "others than its owner may replace what lies in it; `chmod go-w` or `chmod +t` it".to_owned()
        } else {
            return Ok(());
        };
        Err(BootstrapError::UntrustedFolder { path: path.display().to_string(), owner, mode, reason })
    }

    fn is_trusted(owner: u32) -> bool {
        owner == geteuid().as_raw() || owner == ROOT
    }

    fn foreign() -> String {
        format!("its owner must be user {}, who runs this process, or root", geteuid().as_raw())
    }

    /// The user that stands for all unmapped users, such as the machine's root, inside a container that does not map all users: it owns
    /// `/` there.
    fn unmapped_user() -> Option<u32> {
        let map = fs::read_to_string("/proc/self/uid_map").ok()?;
        let is_complete = map.split_whitespace().eq(["0", "0", "4294967295"]);
        let user = fs::read_to_string("/proc/sys/fs/overflowuid").ok()?;
        if is_complete { None } else { user.trim().parse().ok() }
    }

    pub(super) fn kind(kind: FileType) -> &'static str {
        match () {
            () if kind.is_symlink() => "a symbolic link",
            () if kind.is_dir() => "a folder",
            () if kind.is_fifo() => "a FIFO",
            () if kind.is_socket() => "a socket",
            () => "a device",
        }
    }
}
