//! Which files a rank believes: those that nobody but its own user, or root, can have put in their place.
//!
//! The rule is that of OpenSSH for `authorized_keys`, but stricter for the file, which holds a secret, and looser for
//! folders with the sticky bit, in which only owners rename and remove. Where the system is no Unix, a file only has to
//! be a regular one. Knows nothing of what the files hold.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::path::Path;

use super::error::BootstrapError;

/// Why a file was not opened.
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
    /// The error to report, where `report` makes it from the system's.
    pub(super) fn or(self, report: impl FnOnce(io::Error) -> BootstrapError) -> BootstrapError {
        match self {
            Refusal::System(error) => report(error),
            Refusal::Untrusted(error) => error,
        }
    }
}

/// Opens a file to read it, if it can be trusted. Never waits for another process, as the opening of a FIFO would.
pub(super) fn open(path: &Path) -> Result<File, Refusal> {
    // To open a device may have effects; and of a link or a socket, the system's error says little.
    check_file(path, &path.symlink_metadata()?)?;
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    unix::add_flags(&mut options);
    let file = options.open(path)?;
    // Another file may have come to the same path since.
    check_file(path, &file.metadata()?)?;
    check_folders(path)?;
    Ok(file)
}

/// Refuses a file that is not a regular one, or that others than this user or root own, may read or may write.
pub(super) fn check_file(path: &Path, metadata: &Metadata) -> Result<(), BootstrapError> {
    #[cfg(unix)]
    let (owner, mode, problem) = unix::inspect_file(metadata);
    #[cfg(not(unix))]
    let (owner, mode, problem) = (0, 0, (!metadata.is_file()).then(|| "it is not a regular file".to_owned()));
    let path = || path.display().to_string();
    problem.map_or(Ok(()), |reason| Err(BootstrapError::UntrustedFile { path: path(), owner, mode, reason }))
}

/// Refuses a path where others than this user or root can put another file in the place of the one that is meant: they
/// own a folder or a link on the way to it, or may write in a folder without the sticky bit.
pub(super) fn check_folders(path: &Path) -> Result<(), Refusal> {
    #[cfg(unix)]
    {
        let path = std::path::absolute(path)?;
        let folder = path.parent().unwrap_or(&path);
        let resolved = folder.canonicalize()?;
        for place in folder.ancestors().chain(resolved.ancestors()) {
            let (owner, mode, problem) = unix::inspect_folder(&place.symlink_metadata()?);
            if let Some(reason) = problem {
                let path = place.display().to_string();
                return Err(BootstrapError::UntrustedFolder { path, owner, mode, reason }.into());
            }
        }
    }
    #[cfg(not(unix))]
    let _ = path;
    Ok(())
}

#[cfg(unix)]
mod unix {
    use std::fs::{self, Metadata, OpenOptions};
    use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};

    use rustix::fs::OFlags;
    use rustix::process::geteuid;

    const ROOT: u32 = 0;
    const PERMISSIONS: u32 = 0o7777;
    const STICKY: u32 = 0o1000;
    const OTHERS: u32 = 0o077;
    const OTHERS_WRITE: u32 = 0o022;

    /// Owner, permissions, and what is wrong with them.
    type Finding = (u32, u32, Option<String>);

    pub(super) fn add_flags(options: &mut OpenOptions) {
        options.custom_flags((OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::NOCTTY).bits() as i32);
    }

    pub(super) fn inspect_file(metadata: &Metadata) -> Finding {
        let (owner, mode) = (metadata.uid(), metadata.mode() & PERMISSIONS);
        let problem = if !metadata.is_file() {
            Some(format!("it is {}, not a regular file", kind(metadata)))
        } else if mode & OTHERS != 0 {
            Some("nobody but its owner may read or write it".to_owned())
        } else {
            foreign(owner, false)
        };
        (owner, mode, problem)
    }

    pub(super) fn inspect_folder(metadata: &Metadata) -> Finding {
        let (owner, mode) = (metadata.uid(), metadata.mode() & PERMISSIONS);
        // A link has no permissions of its own.
        let is_open = !metadata.is_symlink() && mode & OTHERS_WRITE != 0 && mode & STICKY == 0;
        let open = || "others than its owner may replace what lies in it; `chmod go-w` or `chmod +t` it".to_owned();
        (owner, mode, foreign(owner, true).or_else(|| is_open.then(open)))
    }

    /// What is wrong with an owner, if anything is.
    fn foreign(owner: u32, may_be_unmapped: bool) -> Option<String> {
        let user = geteuid().as_raw();
        let is_known = owner == user || owner == ROOT || may_be_unmapped && Some(owner) == unmapped_user();
        (!is_known).then(|| format!("its owner must be the user of this process, {user}, or root"))
    }

    /// How the kernel shows the machine's root, among others, inside a container that does not map all users.
    fn unmapped_user() -> Option<u32> {
        let map = fs::read_to_string("/proc/self/uid_map").ok()?;
        let is_complete = map.split_whitespace().eq(["0", "0", "4294967295"]);
        let user = fs::read_to_string("/proc/sys/fs/overflowuid").ok()?;
        if is_complete { None } else { user.trim().parse().ok() }
    }

    fn kind(metadata: &Metadata) -> &'static str {
        let kind = metadata.file_type();
        match () {
            () if kind.is_symlink() => "a symbolic link",
            () if kind.is_dir() => "a folder",
            () if kind.is_fifo() => "a FIFO",
            () if kind.is_socket() => "a socket",
            () => "a device",
        }
    }
}
