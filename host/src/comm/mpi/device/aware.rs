//! The query whether this process's MPI accepts device memory; nothing is assumed without an answer.

use std::fmt;

/// The answer of MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// MPI does not have the query.
    Silent,
    No,
    Yes,
}

impl Answer {
    pub(super) fn word(self) -> u64 {
        self as u64
    }

    pub(super) fn from_word(word: u64) -> Self {
        [Answer::Silent, Answer::No, Answer::Yes]
            .into_iter()
            .find(|answer| answer.word() == word)
            .unwrap_or(Answer::Silent)
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Answer::Silent => "has no MPIX_Query_cuda_support to say so",
            Answer::No => "says by MPIX_Query_cuda_support that it does not",
            Answer::Yes => "says by MPIX_Query_cuda_support that it does",
        })
    }
}

/// Queries the loaded library. MPI must have been initialised.
#[cfg(unix)]
pub(super) fn ask() -> Answer {
    type Query = unsafe extern "C" fn() -> std::ffi::c_int;
    let process = libloading::os::unix::Library::this();
    // SAFETY: the declaration of Open MPI, which others that have the function share.
    let Ok(query) = (unsafe { process.get::<Query>(b"MPIX_Query_cuda_support\0") }) else { return Answer::Silent };
    // SAFETY: it takes nothing, and MPI is initialised.
    if unsafe { query() } == 1 { Answer::Yes } else { Answer::No }
}

/// Systems without the function return no answer.
#[cfg(not(unix))]
pub(super) fn ask() -> Answer {
    Answer::Silent
}
