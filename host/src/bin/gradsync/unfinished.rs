//! Files that are written beside their place and renamed when complete, so that a failure leaves no half-written one and what stood there.
//!
//! Never gives a file its name: who has written all of it does that.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use tempfile::NamedTempFile;

/// A file in the folder of `path`, with the permissions of what stands there; gone unless it is given that name.
pub(crate) fn beside(path: &Path) -> io::Result<NamedTempFile> {
    // Where nothing stands, what the system gives to a new file.
    let permissions = fs::metadata(path).map_or(fs::Permissions::from_mode(0o666), |facts| facts.permissions());
    tempfile::Builder::new().prefix(".gradsync-").suffix(".part").permissions(permissions).tempfile_in(folder(path))
}

/// Where a file of that path lies.
pub(crate) fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
