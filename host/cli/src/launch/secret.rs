//! The secret of a job of several machines, from a file or the environment.

use std::fs::{self, OpenOptions};
use std::io::Read;
use std::path::Path;

use gradsync::bootstrap::Secret;
use gradsync_cli::text::shown;

use crate::regular;

/// The limit of a secret file's size in bytes.
const LONGEST: u64 = 4096;

/// The secret that the user has given, if any.
pub(super) fn given(file: Option<&Path>) -> Result<Option<Secret>, String> {
    match file {
        Some(path) => read(path).map(Some).map_err(|reason| format!("--secret-file {}: {reason}", shown(path))),
        None if std::env::var_os("GRADSYNC_SECRET").is_some() => {
            Secret::from_env().map(Some).map_err(|error| error.to_string())
        }
        None => Ok(None),
    }
}

fn read(path: &Path) -> Result<Secret, String> {
    // A link is the user's own choice here; a pipe must not hang the launcher.
    let opened = fs::canonicalize(path).and_then(|path| regular::open(&path, OpenOptions::new().read(true)));
    let file = opened.map_err(|error| error.to_string())?;
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    let mode = std::os::unix::fs::MetadataExt::mode(&metadata) & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!("others than its owner have access to it (mode {mode:04o}); `chmod 600` it"));
    }
    let mut text = String::new();
    file.take(LONGEST).read_to_string(&mut text).map_err(|error| error.to_string())?;
    text.parse().map_err(|error: gradsync::Error| error.to_string())
}
