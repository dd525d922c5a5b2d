//! Opens a shared library by the first of several names that works; the error lists all names that were tried.
//!
//! It knows no library by name, and never unloads one: libraries that start threads do not survive unloading.

use std::error::Error;
#[cfg(feature = "cuda")]
use std::ffi::OsString;

#[cfg(feature = "cuda")]
use libloading::Library;

/// The reason for an error of `libloading`: the text of the system's loader, which is the source of the error, or else the error's own text.
pub fn reason(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// A library that could not be opened: each name that was tried, with the loader's reason.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NotFound(pub(crate) Vec<(String, String)>);

/// Opens the library that the environment variable names, or else the first of `names` that the system's loader finds. A variable that is
/// set is the user's choice: no other name is tried then.
#[cfg(feature = "cuda")]
pub(crate) fn open(variable: &str, names: &[&str]) -> Result<(Library, String), NotFound> {
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
