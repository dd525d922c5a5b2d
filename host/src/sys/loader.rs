//! Opens a shared library by the first of several names that works; the error lists all names that were tried.
//!
//! It knows no library by name, and never unloads one: libraries that start threads do not survive unloading.

use std::ffi::OsString;

use libloading::Library;

use crate::error::reason;

/// A library that could not be opened: each name that was tried, with the loader's reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NotFound(pub(super) Vec<(String, String)>);

/// Opens the library that the environment variable names, or else the first of `names` that the system's loader finds. A variable that is
/// set is the user's choice: no other name is tried then.
pub(super) fn open(variable: &str, names: &[&str]) -> Result<(Library, String), NotFound> {
    let chosen = std::env::var_os(variable).filter(|name| !name.is_empty());
    let candidates: Vec<OsString> = match chosen {
        Some(name) => vec![name],
        None => names.iter().map(OsString::from).collect(),
    };
    let mut tried = Vec::new();
    for name in candidates {
        let shown = name.to_string_lossy().into_owned();
        // SAFETY: opening runs the library's initialisers; the user or the system vouches for the library of this name.
        match unsafe { Library::new(&name) } {
            Ok(library) => return Ok((library, shown)),
            Err(error) => tried.push((shown, reason(&error))),
        }
    }
    Err(NotFound(tried))
}
