//! Duplicates of communicators, with messages separate from those of the original. MPI makes a duplicate with all ranks together; the
//! caller's deadline limits how long a rank waits for the others.
//!
//! Ranks first exchange a byte, which shows the missing ranks; then MPI makes the duplicate. A rank that gives up leaves both operations
//! pending. MPI would take later messages of the other ranks for a part of these two, and match messages of different calls, so no
//! further duplicate of that communicator is made.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::c_int;
use std::ptr;
use std::sync::Mutex;
use std::time::Duration;

use mpi::ffi;

use super::channel::Channel;
use super::library::{Library, lock};
use crate::comm::message_passing::Wait;
use crate::error::MpiError;
use crate::error::{CommError, Operation, Result};

/// Communicators that this process has begun to duplicate, by their handles: one duplicate at a time, as MPI requires. If MPI reuses a
/// handle after a duplicate was given up, the handle stays refused.
static ORIGINALS: Mutex<BTreeMap<usize, Attempt>> = Mutex::new(BTreeMap::new());

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    UnderWay,
    GivenUp,
}

/// Makes a duplicate; all ranks of the original have to call it.
///
/// # Safety
/// `original` is a live communicator. If it is freed later, then by `MPI_Comm_free`, which lets pending messages end (MPI-4.1, 7.4.3).
pub(super) unsafe fn duplicate(original: ffi::MPI_Comm, deadline: Duration) -> Result<Channel> {
    let library = Library::get()?;
    let mut is_inter = 0;
    // SAFETY: the handle is live; writes one integer.
    library.call("MPI_Comm_test_inter", || unsafe { ffi::MPI_Comm_test_inter(original, &mut is_inter) })?;
    if is_inter != 0 {
        return Err(MpiError::Intercommunicator.into());
    }
    let mut wait = Wait::new(Some(deadline));
    let mut turn =
        wait_for(&mut wait, deadline, || Turn::take(original.0 as usize).map(|turn| turn.ok_or_else(Vec::new)))?;
    // SAFETY: the caller's promise.
    let mut roll_call = unsafe { RollCall::begin(library, original) }?;
    wait_for(&mut wait, deadline, || {
        roll_call.missing().map(|missing| if missing.is_empty() { Ok(()) } else { Err(missing) })
    })?;
    // SAFETY: the caller's promise.
    let mut duplicate = unsafe { Duplicate::begin(library, original) }?;
    // All ranks have begun. MPI does not report which of them it waits for.
    let comm = wait_for(&mut wait, deadline, || duplicate.made().map(|made| made.ok_or_else(Vec::new)))?;
    turn.is_over = true;
    Ok(Channel::own(library, comm)?)
}

/// Calls `ask` until it has an answer, or returns a timeout that names the missing ranks.
fn wait_for<T>(
    wait: &mut Wait,
    deadline: Duration,
    mut ask: impl FnMut() -> Result<Result<T, Vec<usize>>, MpiError>,
) -> Result<T> {
    loop {
        match ask()? {
            Ok(answer) => return Ok(answer),
            Err(missing) if wait.is_over() => {
                return Err(CommError::Timeout { operation: Operation::SetUp, missing, deadline }.into());
            }
            Err(_) => wait.pause(),
        }
    }
}

/// The right to duplicate a communicator.
#[derive(Debug)]
struct Turn {
    original: usize,
    /// Whether the duplicate is made; otherwise it counts as given up when this is dropped.
    is_over: bool,
}

impl Turn {
    /// Takes the turn; returns `None` while another thread has it.
    fn take(original: usize) -> Result<Option<Self>, MpiError> {
        match lock(&ORIGINALS).entry(original) {
            Entry::Vacant(entry) => {
                entry.insert(Attempt::UnderWay);
                Ok(Some(Self { original, is_over: false }))
            }
            Entry::Occupied(attempt) if *attempt.get() == Attempt::GivenUp => Err(MpiError::GivenUp),
            Entry::Occupied(_) => Ok(None),
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut originals = lock(&ORIGINALS);
        if self.is_over {
            originals.remove(&self.original);
        } else {
            originals.insert(self.original, Attempt::GivenUp);
        }
    }
}

/// Finds the ranks that have not arrived to make a duplicate, before this module has its own communicator: every rank sends each other
/// rank one byte.
#[derive(Debug)]
struct RollCall {
    library: Library,
    rank: usize,
    /// A byte to send to every rank, and room for one byte from every rank. MPI uses them until all requests are complete, which may
    /// never happen.
    bytes: *mut [u8],
    /// The requests by sending rank.
    requests: Vec<ffi::MPI_Request>,
}

impl RollCall {
    /// # Safety
    /// As [`duplicate`].
    unsafe fn begin(library: Library, original: ffi::MPI_Comm) -> Result<Self, MpiError> {
        // SAFETY: the caller's promise.
        let (rank, world_size) = unsafe { library.rank_and_size(original) }?;
        let bytes = Box::into_raw(vec![0u8; 2 * world_size].into_boxed_slice());
        let mut roll_call = Self { library, rank, bytes, requests: Vec::with_capacity(world_size) };
        let sent = bytes.cast::<u8>();
        for root in 0..world_size {
            // SAFETY: MPI's own constant.
            let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
            let received = sent.wrapping_add(world_size + root);
            library.call("MPI_Iscatter", || {
                // SAFETY: a byte for every rank, and room for one, which stay until the request is over; writes one handle.
                unsafe {
                    let (kind, root) = (ffi::RSMPI_UINT8_T, root as c_int);
                    ffi::MPI_Iscatter(sent.cast(), 1, kind, received.cast(), 1, kind, root, original, &mut request)
                }
            })?;
            roll_call.requests.push(request);
        }
        Ok(roll_call)
    }

    /// The other ranks that have not arrived. If MPI forwards bytes from rank to rank, ranks behind a missing rank are included.
    fn missing(&mut self) -> Result<Vec<usize>, MpiError> {
        let mut missing = Vec::new();
        for (rank, request) in self.requests.iter_mut().enumerate() {
            // SAFETY: our own request, or none once that is over.
            if !unsafe { self.library.test(request) }? && rank != self.rank {
                missing.push(rank);
            }
        }
        Ok(missing)
    }
}

impl Drop for RollCall {
    fn drop(&mut self) {
        // SAFETY: MPI's own constant.
        let none = unsafe { ffi::RSMPI_REQUEST_NULL };
        self.requests.retain(|request| *request != none);
        if self.requests.is_empty() {
            // SAFETY: made by `begin`, and MPI is done with it.
            drop(unsafe { Box::from_raw(self.bytes) });
        }
        // SAFETY: the bytes stay.
        self.requests.drain(..).for_each(|request| unsafe { self.library.give_up(request) });
    }
}

/// The duplicate that MPI makes.
#[derive(Debug)]
struct Duplicate {
    library: Library,
    request: ffi::MPI_Request,
    /// The place where MPI writes the handle at the end, which may never happen.
    comm: *mut ffi::MPI_Comm,
}

impl Duplicate {
    /// # Safety
    /// As [`duplicate`].
    unsafe fn begin(library: Library, original: ffi::MPI_Comm) -> Result<Self, MpiError> {
        let comm = Box::into_raw(Box::new(original));
        // SAFETY: MPI's own constant.
        let mut duplicate = Self { library, request: unsafe { ffi::RSMPI_REQUEST_NULL }, comm };
        library.call("MPI_Comm_idup", || {
            // SAFETY: the handle is live; writes one handle now, and another one later, whose place stays until the request is over.
            unsafe { ffi::MPI_Comm_idup(original, comm, &mut duplicate.request) }
        })?;
        Ok(duplicate)
    }

    /// Returns the duplicate, once MPI has made it.
    fn made(&mut self) -> Result<Option<ffi::MPI_Comm>, MpiError> {
        // SAFETY: our own request, or none once that is over.
        let is_made = unsafe { self.library.test(&mut self.request) }?;
        // SAFETY: made by `begin`; MPI writes there no more.
        Ok(is_made.then(|| unsafe { ptr::read(self.comm) }))
    }
}

impl Drop for Duplicate {
    fn drop(&mut self) {
        // SAFETY: MPI's own constant.
        if self.request == unsafe { ffi::RSMPI_REQUEST_NULL } {
            // SAFETY: made by `begin`, and MPI is done with it.
            drop(unsafe { Box::from_raw(self.comm) });
        } else {
            // SAFETY: the place of the handle stays.
            unsafe { self.library.give_up(self.request) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicate_runs_on_one_thread_at_a_time_until_one_gives_up() {
        let [good, bad] = [1, 2].map(|number| usize::MAX - number);
        let mut turn = Turn::take(good).unwrap().expect("nobody has it");
        assert!(Turn::take(good).unwrap().is_none());
        turn.is_over = true;
        drop(turn);
        assert!(Turn::take(good).unwrap().is_some());
        drop(Turn::take(bad).unwrap().expect("nobody has it"));
        assert_eq!(Turn::take(bad).unwrap_err(), MpiError::GivenUp);
    }
}
