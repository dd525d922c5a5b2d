//! Ranks of an MPI communicator of this crate, or a group of them, as a [`Link`].
//!
//! Groups share the communicator, and their messages have separate tags, because MPI's calls that make another communicator have no
//! deadline. All operations are nonblocking, so the caller decides how long to wait. A channel does not depend on collectives or
//! failures, and never lets MPI use memory of the caller after the call has returned.

use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use mpi::ffi;

use super::library::Library;
use crate::comm::message_passing::{
    Buffers, Incoming, Link, LinkError, Outgoing, Pending, RECORD_BYTES, Record, Requests,
};
use crate::error::{Departure, MpiError, Result};

/// The longest message, because MPI counts in `int`.
const PIECE_BYTES: usize = 1 << 30;

/// A record that MPI is receiving. The sender may have to call MPI again before it arrives, so the channel never waits for it.
#[derive(Debug)]
struct Arriving {
    peer: usize,
    request: ffi::MPI_Request,
    bytes: Box<[u8]>,
}

/// The two tags of a group's messages: this one for records, and the next one for data.
#[derive(Clone, Copy, Debug)]
struct Tags(c_int);

impl Tags {
    const FIRST: Self = Self(1);

    fn records(self) -> c_int {
        self.0
    }

    fn data(self) -> c_int {
        self.0 + 1
    }

    fn next(self) -> Self {
        Self(self.0.saturating_add(2))
    }

    /// The number of the group with these tags.
    fn number(self) -> u64 {
        self.0 as u64
    }

    fn of_number(number: u64) -> Self {
        Self(number as c_int)
    }
}

/// A communicator of this crate, which lives as long as a group of this process uses it.
#[derive(Debug)]
struct Shared {
    library: Library,
    comm: ffi::MPI_Comm,
    /// The lowest tag that this process has not used; it is or was in groups with lower tags, whose messages may still be in flight.
    free_tags: AtomicI32,
    highest_tag: c_int,
    /// Whether all its dropped channels had no messages in flight.
    is_quiet: AtomicBool,
}

#[derive(Debug)]
pub(super) struct Channel {
    shared: Arc<Shared>,
    library: Library,
    /// The communicator of `shared`.
    comm: ffi::MPI_Comm,
    tags: Tags,
    rank: usize,
    /// The rank in the communicator of each rank in this group.
    numbers: Vec<usize>,
    /// The rank in this group of each rank in the communicator that belongs to it.
    ranks: Vec<usize>,
    /// Records that were received and not yet used, by sender.
    inbox: RefCell<Vec<VecDeque<Record>>>,
    /// Records on their way to the inbox, in the order of their arrival.
    arriving: RefCell<VecDeque<Arriving>>,
    /// Records that MPI may still be reading.
    outbox: RefCell<Vec<(ffi::MPI_Request, Box<[u8]>)>>,
    buffers: Buffers,
    /// Whether, as far as this end knows, no message was in flight when it ended.
    is_quiet: bool,
}

// SAFETY: handles may be used from any thread if MPI supports it, or in turns, which `Library` ensures; one thread at a time uses a
// channel, since it is not `Sync`.
unsafe impl Send for Channel {}
// SAFETY: as above; several threads may use a communicator, each for the messages of its own group.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Channel {
    /// Makes a channel of all ranks of a communicator that was just made, and takes it over.
    pub(super) fn own(library: Library, comm: ffi::MPI_Comm) -> Result<Self, MpiError> {
        // SAFETY: the handle is live, and ours.
        library.call("MPI_Comm_set_errhandler", || unsafe {
            ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN)
        })?;
        // SAFETY: as above.
        let (rank, world_size) = unsafe { library.rank_and_size(comm) }?;
        let (free_tags, is_quiet) = (AtomicI32::new(Tags::FIRST.next().0), AtomicBool::new(true));
        let shared = Arc::new(Shared { library, comm, free_tags, highest_tag: library.highest_tag()?, is_quiet });
        Ok(Self::over(shared, Tags::FIRST, rank, (0..world_size).collect()))
    }

    fn over(shared: Arc<Shared>, tags: Tags, rank: usize, numbers: Vec<usize>) -> Self {
        let (library, comm) = (shared.library, shared.comm);
        let mut ranks = vec![usize::MAX; numbers.iter().max().map_or(0, |most| most + 1)];
        numbers.iter().enumerate().for_each(|(rank, &number)| ranks[number] = rank);
        let inbox = RefCell::new(vec![VecDeque::new(); numbers.len()]);
        let (arriving, outbox, buffers) = (RefCell::default(), RefCell::default(), Buffers::default());
        Channel { shared, library, comm, tags, rank, numbers, ranks, inbox, arriving, outbox, buffers, is_quiet: false }
    }

    /// A rank's number in the communicator.
    fn number(&self, peer: usize) -> c_int {
        self.numbers[peer] as c_int
    }

    /// Receives all records that have arrived, and frees the buffers of records that were sent.
    fn progress(&self) -> Result<(), MpiError> {
        let mut outbox = self.outbox.borrow_mut();
        let mut index = 0;
        while index < outbox.len() {
            if self.test(&mut outbox[index].0)? {
                outbox.swap_remove(index);
            } else {
                index += 1;
            }
        }
        let mut arriving = self.arriving.borrow_mut();
        while let Some(next) = self.receive_record()? {
            arriving.push_back(next);
        }
        let mut index = 0;
        while index < arriving.len() {
            // The records of one rank stay in order.
            let is_behind = arriving.range(..index).any(|earlier| earlier.peer == arriving[index].peer);
            if is_behind || !self.test(&mut arriving[index].request)? {
                index += 1;
                continue;
            }
            let Some(Arriving { peer, bytes, .. }) = arriving.remove(index) else { break };
            self.inbox.borrow_mut()[peer].push_back(Record::decode(&bytes, peer));
        }
        Ok(())
    }

    /// Begins to receive the next record, if one has arrived.
    fn receive_record(&self) -> Result<Option<Arriving>, MpiError> {
        let mut is_there = 0;
        // SAFETY: a structure of integers, for which 0 is a value, and MPI's own constants.
        let (mut status, mut message, mut request): (ffi::MPI_Status, _, _) =
            unsafe { (std::mem::zeroed(), ffi::RSMPI_MESSAGE_NULL, ffi::RSMPI_REQUEST_NULL) };
        self.library.call("MPI_Improbe", || {
            // SAFETY: our own live handle; writes one integer, one handle and one status.
            unsafe {
                let source = ffi::RSMPI_ANY_SOURCE;
                ffi::MPI_Improbe(source, self.tags.records(), self.comm, &mut is_there, &mut message, &mut status)
            }
        })?;
        if is_there == 0 {
            return Ok(None);
        }
        let mut bytes = vec![0u8; RECORD_BYTES].into_boxed_slice();
        self.library.call("MPI_Imrecv", || {
            // SAFETY: a message of at most so many bytes, whose buffer stays until it is received, for ever if need be; writes one handle.
            unsafe {
                let (start, len) = (bytes.as_mut_ptr().cast(), RECORD_BYTES as c_int);
                ffi::MPI_Imrecv(start, len, ffi::RSMPI_UINT8_T, &mut message, &mut request)
            }
        })?;
        Ok(Some(Arriving { peer: self.ranks[status.MPI_SOURCE as usize], request, bytes }))
    }

    unsafe fn isend(
        &self,
        peer: usize,
        tag: c_int,
        start: *const u8,
        bytes: usize,
    ) -> Result<ffi::MPI_Request, MpiError> {
        // SAFETY: MPI's own constant.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let (start, bytes, peer) = (start.cast::<c_void>(), bytes as c_int, self.number(peer));
        self.library.call("MPI_Isend", || {
            // SAFETY: as the caller promises; writes one handle.
            unsafe { ffi::MPI_Isend(start, bytes, ffi::RSMPI_UINT8_T, peer, tag, self.comm, &mut request) }
        })?;
        Ok(request)
    }

    unsafe fn irecv(&self, peer: usize, start: *mut u8, bytes: usize) -> Result<ffi::MPI_Request, MpiError> {
        // SAFETY: MPI's own constant.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let (start, bytes, peer) = (start.cast::<c_void>(), bytes as c_int, self.number(peer));
        self.library.call("MPI_Irecv", || {
            // SAFETY: as the caller promises; writes one handle.
            unsafe { ffi::MPI_Irecv(start, bytes, ffi::RSMPI_UINT8_T, peer, self.tags.data(), self.comm, &mut request) }
        })?;
        Ok(request)
    }

    fn pending(&self, request: Result<ffi::MPI_Request, MpiError>) -> Result<Box<dyn Pending>, LinkError> {
        Ok(Box::new(Piece { library: self.library, request: request? }))
    }

    fn test(&self, request: &mut ffi::MPI_Request) -> Result<bool, MpiError> {
        // SAFETY: a request of ours, whose memory stays until it is over.
        unsafe { self.library.test(request) }
    }
}

impl Link for Channel {
    fn transport(&self) -> &'static str {
        "mpi"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.numbers.len()
    }

    fn post(&self, peer: usize, record: Record) -> Result<(), LinkError> {
        let bytes = record.encode();
        // SAFETY: the bytes live in the outbox until the message is out, for ever if need be.
        let request = unsafe { self.isend(peer, self.tags.records(), bytes.as_ptr(), bytes.len()) }?;
        self.outbox.borrow_mut().push((request, bytes));
        Ok(())
    }

    fn pump(&self) -> Result<(), LinkError> {
        Ok(self.progress()?)
    }

    fn inbox(&self) -> RefMut<'_, Vec<VecDeque<Record>>> {
        self.inbox.borrow_mut()
    }

    fn has_data(&self, peer: usize) -> Result<bool, LinkError> {
        let mut is_there = 0;
        self.library.call("MPI_Iprobe", || {
            // SAFETY: our own live handle; writes one integer, and its status is not asked for.
            unsafe {
                ffi::MPI_Iprobe(self.number(peer), self.tags.data(), self.comm, &mut is_there, ffi::RSMPI_STATUS_IGNORE)
            }
        })?;
        Ok(is_there != 0)
    }

    unsafe fn send(&self, outgoing: Outgoing, requests: &mut Requests) {
        for (at, bytes) in pieces(outgoing.bytes) {
            // SAFETY: as the caller promises.
            let request = unsafe { self.isend(outgoing.peer, self.tags.data(), outgoing.start.add(at), bytes) };
            requests.add(self.pending(request));
        }
    }

    unsafe fn receive(&self, incoming: Incoming, requests: &mut Requests) {
        for (at, bytes) in pieces(incoming.bytes) {
            // SAFETY: as the caller promises.
            let request = unsafe { self.irecv(incoming.peer, incoming.start.add(at), bytes) };
            requests.add(self.pending(request));
        }
    }

    /// MPI cannot be made to release the memory of a message.
    fn buffers(&self) -> Option<&Buffers> {
        Some(&self.buffers)
    }

    /// MPI does not report departures.
    fn departure(&self, _: usize) -> Option<Departure> {
        None
    }

    /// MPI does not report this: ranks find out when they try to share memory.
    fn is_one_machine(&self) -> bool {
        true
    }

    fn longest_message(&self, _: usize) -> usize {
        usize::MAX
    }

    fn free_group(&self) -> u64 {
        Tags(self.shared.free_tags.load(Ordering::Relaxed)).number()
    }

    fn take_group(&self, number: u64) -> Result<bool> {
        let (tags, highest) = (Tags::of_number(number), self.shared.highest_tag);
        if tags.records() >= highest {
            return Err(MpiError::OutOfTags { highest }.into());
        }
        let before = self.shared.free_tags.fetch_max(tags.next().0, Ordering::Relaxed);
        Ok(before <= tags.0)
    }

    fn among(&self, members: &[usize], number: u64) -> Box<dyn Link> {
        let rank = members.iter().position(|&member| member == self.rank).expect("this rank is among them");
        let numbers = members.iter().map(|&member| self.numbers[member]).collect();
        Box::new(Self::over(self.shared.clone(), Tags::of_number(number), rank, numbers))
    }

    /// Gives up its part in the communicator, which is freed with the last part. If messages of a part are still in flight, the
    /// communicator stays until the process ends, so that no late message finds another communicator in its place.
    fn leave(&mut self, has_failed: bool) {
        self.is_quiet = !has_failed
            && self.progress().is_ok()
            && self.outbox.get_mut().is_empty()
            && self.arriving.get_mut().is_empty();
    }

    fn abort(&self, code: i32) -> ! {
        // SAFETY: our own live handle. Called even if another thread is in MPI: nothing comes after it.
        unsafe { ffi::MPI_Abort(self.comm, code) };
        std::process::abort()
    }
}

/// The offsets and lengths of the pieces of a message, each short enough for MPI to count.
fn pieces(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes).step_by(PIECE_BYTES).map(move |at| (at, PIECE_BYTES.min(bytes - at)))
}

/// A piece of a message in flight.
#[derive(Debug)]
struct Piece {
    library: Library,
    request: ffi::MPI_Request,
}

impl Pending for Piece {
    fn test(&mut self) -> Result<bool, LinkError> {
        // SAFETY: a request of ours, whose memory stays until it is over.
        Ok(unsafe { self.library.test(&mut self.request) }?)
    }

    fn cancel(&mut self) {
        unreachable!("MPI takes no message back");
    }
}

impl From<MpiError> for LinkError {
    fn from(error: MpiError) -> Self {
        LinkError(error.to_string())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if *self.is_quiet.get_mut() && Library::get().is_ok() {
            // A failure is not reported.
            // SAFETY: our own handle, which is not used again.
            let _ = self.library.call("MPI_Comm_free", || unsafe { ffi::MPI_Comm_free(&mut self.comm) });
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if !self.is_quiet {
            self.shared.is_quiet.store(false, Ordering::Relaxed);
        }
        // MPI may access these buffers for as long as the process lives.
        std::mem::forget((self.outbox.take(), self.arriving.take()));
    }
}
