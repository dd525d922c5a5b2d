//! The MPI library of this process: it is initialised once and finalised when the process ends, and its codes become errors.
//!
//! This module makes and keeps no communicators.

use std::ffi::{c_char, c_int};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;

use crate::error::MpiError;

/// The return code of success, in every implementation of MPI.
const SUCCESS: c_int = 0;
/// The highest tag that every MPI supports at least (MPI-4.1, 9.1.2).
const LEAST_HIGHEST_TAG: c_int = 32_767;

/// The MPI that this crate has initialised, until the process ends.
static UNIVERSE: Mutex<Option<Universe>> = Mutex::new(None);
/// Serialises calls of MPI, if it allows one thread at a time.
static TURN: Mutex<()> = Mutex::new(());

/// Operations that were given up at a deadline, and that MPI still has.
static GIVEN_UP: Mutex<Vec<GivenUp>> = Mutex::new(Vec::new());
/// How long the end of the process waits for these operations. A rank that was late has begun its part of them by then, or never does.
const LAST_WAIT: Duration = Duration::from_secs(1);

struct GivenUp {
    library: Library,
    request: ffi::MPI_Request,
}

// SAFETY: handles may be used from any thread if MPI supports it, or in turns, which `Library` ensures.
unsafe impl Send for GivenUp {}

/// The right to call MPI: it is initialised, and its level of thread support is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Library {
    in_turns: bool,
}

impl Library {
    /// Initialises MPI unless it is initialised.
    pub(super) fn get() -> Result<Self, MpiError> {
        let mut universe = lock(&UNIVERSE);
        if flag(ffi::MPI_Finalized) {
            return Err(MpiError::Finalised);
        }
        if !flag(ffi::MPI_Initialized) {
            // `None` if another thread has initialised MPI meanwhile, which is fine.
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

    /// Whether a request is complete or null; makes progress on it.
    ///
    /// # Safety
    /// The request is pending, and its memory stays valid, or it is null.
    pub(super) unsafe fn test(self, request: &mut ffi::MPI_Request) -> Result<bool, MpiError> {
        let mut is_over = 0;
        // SAFETY: the caller's promise; writes one integer.
        let test = || unsafe { ffi::MPI_Test(request, &mut is_over, ffi::RSMPI_STATUS_IGNORE) };
        self.call("MPI_Test", test)?;
        Ok(is_over != 0)
    }

    /// Leaves an operation to the end of the process.
    ///
    /// # Safety
    /// The request is pending, and its memory stays valid until the process ends.
    pub(super) unsafe fn give_up(self, request: ffi::MPI_Request) {
        lock(&GIVEN_UP).push(GivenUp { library: self, request });
    }

    /// This process's rank in a communicator, and the number of ranks.
    ///
    /// # Safety
    /// The communicator is live.
    pub(super) unsafe fn rank_and_size(self, comm: ffi::MPI_Comm) -> Result<(usize, usize), MpiError> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: the caller's promise; writes one integer.
        self.call("MPI_Comm_rank", || unsafe { ffi::MPI_Comm_rank(comm, &mut rank) })?;
        // SAFETY: as above.
        self.call("MPI_Comm_size", || unsafe { ffi::MPI_Comm_size(comm, &mut size) })?;
        Ok((rank as usize, size as usize))
    }

    /// The highest tag of a message.
    pub(super) fn highest_tag(self) -> Result<c_int, MpiError> {
        let (mut highest, mut is_known) = (ptr::null::<c_int>(), 0);
        self.call("MPI_Comm_get_attr", || {
            // SAFETY: MPI is initialised, so there is a world; writes the address of an integer, and an integer.
            unsafe {
                let (world, tags) = (ffi::RSMPI_COMM_WORLD, ffi::MPI_TAG_UB as c_int);
                ffi::MPI_Comm_get_attr(world, tags, (&raw mut highest).cast(), &mut is_known)
            }
        })?;
        // SAFETY: MPI's own integer, which stays.
        Ok(if is_known != 0 { unsafe { *highest } } else { LEAST_HIGHEST_TAG })
    }
}

unsafe extern "C" {
    /// A function of the C library, on every system that has an MPI.
    fn atexit(function: extern "C" fn()) -> c_int;
}

/// Finalises MPI at the end of the process, as MPI requires; waits for the other processes to do the same.
extern "C" fn finalise() {
    let Ok(mut universe) = UNIVERSE.try_lock() else { return };
    let universe = universe.take();
    if flag(ffi::MPI_Finalized) {
        std::mem::forget(universe);
    } else {
        complete_given_up();
    }
}

/// Completes what was given up, where the late ranks have come meanwhile: MPI wants no pending operation at its end (MPI-4.1, 11.2.2).
fn complete_given_up() {
    let Ok(mut given_up) = GIVEN_UP.try_lock() else { return };
    let start = Instant::now();
    loop {
        // SAFETY: the promise of `give_up`.
        given_up.retain_mut(|GivenUp { library, request }| matches!(unsafe { library.test(request) }, Ok(false)));
        if given_up.is_empty() || start.elapsed() > LAST_WAIT {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Calls one of the two queries that MPI allows at any time.
fn flag(question: unsafe extern "C" fn(*mut c_int) -> c_int) -> bool {
    let mut answer = 0;
    // SAFETY: writes one integer, and may be called before initialisation and after finalisation.
    let code = unsafe { question(&mut answer) };
    code == SUCCESS && answer != 0
}

fn describe(code: c_int) -> String {
    // The array is far longer than MPI_MAX_ERROR_STRING of any implementation.
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

/// Locks a mutex; no code that can panic runs under these locks.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
