//! The MPI library of this process: it is initialised once, finalised when the process ends, and its codes become errors.
//!
//! Never makes, or knows, a communicator of ours.

use std::ffi::{c_char, c_int};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;

/// What an MPI function returns when all is well, in every implementation.
const SUCCESS: c_int = 0;

/// Why MPI cannot be used, or what it refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// The process has finalised MPI, after which it cannot be used again (MPI-4.1, 11.2.2).
    #[error("MPI has been finalised in this process")]
    Finalised,
    /// MPI is initialised with less support for threads than this crate needs.
    #[error(
        "MPI was initialised with {found}, and at least MPI_THREAD_SERIALIZED is needed: let `MpiCommunicator::world` initialise it, \
         or ask for `Threading::Serialized` or `Threading::Multiple`"
    )]
    ThreadLevel {
        /// The level of this process, by MPI's name.
        found: &'static str,
    },
    /// The communicator connects two groups, and a collective of this crate runs in one.
    #[error("an intercommunicator cannot carry this crate's collectives")]
    Intercommunicator,
    /// MPI returned an error code.
    #[error("{call} failed with code {code}: {text}")]
    Refused {
        /// The MPI function.
        call: &'static str,
        /// Its code.
        code: i32,
        /// What `MPI_Error_string` says of it.
        text: String,
    },
}

/// What this crate initialised, until the process ends.
static UNIVERSE: Mutex<Option<Universe>> = Mutex::new(None);
/// Whose turn it is to call MPI, where it allows one thread at a time.
static TURN: Mutex<()> = Mutex::new(());

/// The right to call MPI: it is initialised, and its level of thread support is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Library {
    in_turns: bool,
}

impl Library {
    /// Initialises MPI unless somebody has.
    pub(super) fn get() -> Result<Self, MpiError> {
        let mut universe = lock(&UNIVERSE);
        if flag(ffi::MPI_Finalized) {
            return Err(MpiError::Finalised);
        }
        if !flag(ffi::MPI_Initialized) {
            // Nothing, if somebody else was faster, which is as good.
            if let Some((made, _)) = mpi::initialize_with_threading(Threading::Multiple) {
                *universe = Some(made);
                // SAFETY: `finalise` needs nothing of this process but its statics, and never unwinds. Refused, it is not called, and
                // MPI complains of a process that ended without it.
                let _ = unsafe { atexit(finalise) };
            }
        }
        match mpi::environment::threading_support() {
            Threading::Multiple => Ok(Library { in_turns: false }),
            Threading::Serialized => Ok(Library { in_turns: true }),
            Threading::Funneled => Err(MpiError::ThreadLevel { found: "MPI_THREAD_FUNNELED" }),
            Threading::Single => Err(MpiError::ThreadLevel { found: "MPI_THREAD_SINGLE" }),
        }
    }

    /// Makes one call of MPI.
    pub(super) fn call(self, call: &'static str, function: impl FnOnce() -> c_int) -> Result<(), MpiError> {
        let _turn = self.in_turns.then(|| lock(&TURN));
        match function() {
            SUCCESS => Ok(()),
            code => Err(MpiError::Refused { call, code, text: describe(code) }),
        }
    }
}

unsafe extern "C" {
    /// Of the C library, on every system that has an MPI.
    fn atexit(function: extern "C" fn()) -> c_int;
}

/// Ends MPI with the process, as it demands; waits for the other processes to do the same.
extern "C" fn finalise() {
    let Ok(mut universe) = UNIVERSE.try_lock() else { return };
    let universe = universe.take();
    if flag(ffi::MPI_Finalized) {
        std::mem::forget(universe);
    }
}

/// Asks one of the two questions that MPI answers at any time.
fn flag(question: unsafe extern "C" fn(*mut c_int) -> c_int) -> bool {
    let mut answer = 0;
    // SAFETY: writes one integer, and may be called before initialisation and after finalisation.
    let code = unsafe { question(&mut answer) };
    code == SUCCESS && answer != 0
}

fn describe(code: c_int) -> String {
    // Far longer than MPI_MAX_ERROR_STRING anywhere.
    let mut text = [0 as c_char; 4096];
    let mut len = 0;
    // SAFETY: writes at most MPI_MAX_ERROR_STRING characters and the length.
    let outcome = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut len) };
    let len = usize::try_from(len).unwrap_or(0).min(text.len());
    if outcome != SUCCESS || len == 0 {
        return "MPI has no text for it".into();
    }
    let bytes: Vec<u8> = text[..len].iter().map(|&character| character as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Nothing that panics runs under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
