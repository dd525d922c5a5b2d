//! Ranks of an MPI communicator of our own, or a group of them: records, which are small and wait in an inbox, and bulk data between ranks.
//!
//! Groups share the communicator, and their messages have tags of their own: MPI's calls that make another communicator know no deadline.
//! Everything is nonblocking underneath, so the waiting caller decides for how long. Knows nothing of collectives or failures, and never
//! lets MPI use memory of the caller after the call has returned.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
#[cfg(feature = "cuda")]
use std::time::{Duration, Instant};

use mpi::ffi;
use serde::{Deserialize, Serialize};

use super::library::Library;
use crate::error::MpiError;
use crate::error::{Call, CommError, Operation};

/// The longest encoded record: by default MPI implementations send as much without waiting for the receiver to post its buffer.
const RECORD_BYTES: usize = 4000;
/// The most eager bytes in a record.
pub(super) const MAX_EAGER_BYTES: usize = 3 << 10;
/// The longest message: MPI counts in `int`.
const PIECE_BYTES: usize = 1 << 30;
/// The lists and texts of a failure are cut to what fits into a record.
const LONGEST_REASON: usize = 500;
const MOST_MISSING: usize = 40;

/// The messages of the handshake; a rank's records arrive in the order in which it sent them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Record {
    /// The sender is in this collective; with the eager bytes for the receiver.
    Call { call: Call, eager: EagerBytes },
    /// All ranks are in the same collective, and the sender proceeds.
    Go,
    /// The sender has data for the receiver. `is_alone`: in the same call it receives nothing from the receiver.
    Offer { call: Call, is_alone: bool },
    /// The receiver of an offer is ready for the data.
    Accept,
    /// The data were sent without an error: follows data of devices, whose sender can fail half-way.
    Sent,
    /// The sender has done its part of a collective on memory of devices.
    Closed,
    /// The sender has failed, after this many collectives.
    Failed { completed: u64, error: CommError },
}

impl Record {
    /// Replaces a record of `rank` that cannot be decoded.
    pub(super) fn unreadable(rank: usize, error: &postcard::Error) -> Self {
        let reason = format!("it speaks another language, perhaps another version of this crate: {error}");
        Record::Failed { completed: 0, error: CommError::Transport { operation: Operation::Exchange, rank, reason } }
    }
}

/// Operands of a call. Errors quote records, and say only how many bytes these are.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct EagerBytes(#[serde(with = "serde_bytes")] pub(super) Vec<u8>);

impl fmt::Debug for EagerBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// Bytes for a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outgoing {
    pub(super) peer: usize,
    pub(super) start: *const u8,
    pub(super) bytes: usize,
}

/// Room for bytes from a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Incoming {
    pub(super) peer: usize,
    pub(super) start: *mut u8,
    pub(super) bytes: usize,
}

/// Messages under way; [`Channel::finish`] ends them.
#[derive(Debug, Default)]
pub(super) struct Requests {
    under_way: Vec<ffi::MPI_Request>,
    error: Option<MpiError>,
}

/// A record that MPI is receiving. The sender may have to call MPI again before it arrives, so nothing waits for it here.
#[derive(Debug)]
struct Arriving {
    peer: usize,
    request: ffi::MPI_Request,
    bytes: Box<[u8]>,
}

/// The two tags of a group's messages: this one of records, and the next one of data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tags(c_int);

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

    /// As ranks tell each other.
    pub(super) fn word(self) -> u64 {
        self.0 as u64
    }

    pub(super) fn of_word(word: u64) -> Self {
        Self(word as c_int)
    }
}

/// A communicator of our own, for as long as a group of this process's uses it.
#[derive(Debug)]
struct Shared {
    library: Library,
    comm: ffi::MPI_Comm,
    /// All tags below may be in use: this process is or was in a group that has them, and messages of it may still be under way.
    free_tags: AtomicI32,
    highest_tag: c_int,
    /// Whether all its channels that are gone were quiet at their ends.
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
    /// The rank in the communicator of each rank here.
    numbers: Vec<usize>,
    /// The rank here of each rank in the communicator that is here.
    ranks: Vec<usize>,
    /// Records that were received and not yet used, by sender.
    inbox: RefCell<Vec<VecDeque<Record>>>,
    /// Records on their way to the inbox, in the order of their arrival.
    arriving: RefCell<VecDeque<Arriving>>,
    /// Records that MPI may still be reading.
    outbox: RefCell<Vec<(ffi::MPI_Request, Box<[u8]>)>>,
    /// Whether, as far as this end knows, no message is under way when it ends.
    is_quiet: bool,
}

// SAFETY: handles may be used from any thread where MPI supports it, or in turns, which `Library` sees to; one thread at a time uses
// a channel, since it is not `Sync`.
unsafe impl Send for Channel {}
// SAFETY: as above; several threads may use a communicator, each for the messages of its own group.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Channel {
    /// A channel of all ranks of a communicator that was just made, and is ours.
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
        let (arriving, outbox, is_quiet) = (RefCell::default(), RefCell::default(), false);
        Channel { shared, library, comm, tags, rank, numbers, ranks, inbox, arriving, outbox, is_quiet }
    }

    /// Tags that this process has used for no group yet.
    pub(super) fn free_tags(&self) -> Tags {
        Tags(self.shared.free_tags.load(Ordering::Relaxed))
    }

    /// Takes tags for a group, unless this process has used them, or later ones, before.
    pub(super) fn take_tags(&self, tags: Tags) -> Result<bool, MpiError> {
        let highest = self.shared.highest_tag;
        if tags.records() >= highest {
            return Err(MpiError::OutOfTags { highest });
        }
        let before = self.shared.free_tags.fetch_max(tags.next().0, Ordering::Relaxed);
        Ok(before <= tags.0)
    }

    /// A channel among these ranks, in this order. This rank is one of them, and all of them have taken these tags for it.
    pub(super) fn among(&self, members: &[usize], tags: Tags) -> Self {
        let rank = members.iter().position(|&member| member == self.rank).expect("this rank is among them");
        let numbers = members.iter().map(|&member| self.numbers[member]).collect();
        Self::over(self.shared.clone(), tags, rank, numbers)
    }

    /// A rank's number in the communicator.
    fn number(&self, peer: usize) -> c_int {
        self.numbers[peer] as c_int
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn world_size(&self) -> usize {
        self.numbers.len()
    }

    /// The other ranks, beginning with the next one, so that not all ranks begin with the same.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, world_size) = (self.rank, self.world_size());
        (1..world_size).map(move |step| (rank + step) % world_size)
    }

    /// Sends a record; never waits for the receiver.
    pub(super) fn post(&self, peer: usize, record: Record) -> Result<(), MpiError> {
        let bytes = postcard::to_stdvec(&shortened(record)).expect("plain data").into_boxed_slice();
        assert!(bytes.len() <= RECORD_BYTES, "a record of {} bytes", bytes.len());
        // SAFETY: the bytes live in the outbox until the message is out, for ever if need be.
        let request = unsafe { self.isend(peer, self.tags.records(), bytes.as_ptr(), bytes.len()) }?;
        self.outbox.borrow_mut().push((request, bytes));
        Ok(())
    }

    /// Receives all records that have arrived, and frees the buffers of records that were sent.
    pub(super) fn pump(&self) -> Result<(), MpiError> {
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
            let record = postcard::from_bytes(&bytes).unwrap_or_else(|error| Record::unreadable(peer, &error));
            self.inbox.borrow_mut()[peer].push_back(record);
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

    /// The received records, by sender.
    pub(super) fn inbox(&self) -> std::cell::RefMut<'_, Vec<VecDeque<Record>>> {
        self.inbox.borrow_mut()
    }

    /// Whether bulk data of a rank can be received.
    pub(super) fn has_data(&self, peer: usize) -> Result<bool, MpiError> {
        let mut is_there = 0;
        self.library.call("MPI_Iprobe", || {
            // SAFETY: our own live handle; writes one integer, and its status is not asked for.
            unsafe {
                ffi::MPI_Iprobe(self.number(peer), self.tags.data(), self.comm, &mut is_there, ffi::RSMPI_STATUS_IGNORE)
            }
        })?;
        Ok(is_there != 0)
    }

    /// Starts to send and to receive, in pieces that MPI can count.
    ///
    /// # Safety
    /// The memory stays valid, and nothing else uses memory that is received into, until [`finish`](Self::finish) has returned, or
    /// [`progress`](Self::progress) has returned true.
    pub(super) unsafe fn start(&self, receive: &[Incoming], send: &[Outgoing], requests: &mut Requests) {
        let pieces = |bytes: usize| (0..bytes).step_by(PIECE_BYTES).map(move |at| (at, PIECE_BYTES.min(bytes - at)));
        for incoming in receive {
            for (at, bytes) in pieces(incoming.bytes) {
                // SAFETY: as the caller promises.
                requests.add(unsafe { self.irecv(incoming.peer, incoming.start.add(at), bytes) });
            }
        }
        for outgoing in send {
            for (at, bytes) in pieces(outgoing.bytes) {
                // SAFETY: as the caller promises.
                requests.add(unsafe { self.isend(outgoing.peer, self.tags.data(), outgoing.start.add(at), bytes) });
            }
        }
    }

    /// Whether all messages are out and in.
    pub(super) fn progress(&self, requests: &mut Requests) -> bool {
        requests.under_way.retain_mut(|request| match self.test(request) {
            Ok(is_done) => !is_done,
            Err(error) => {
                requests.error.get_or_insert(error);
                false
            }
        });
        requests.under_way.is_empty()
    }

    /// Waits until all messages are out and in. If one has failed, the others get `deadline` to end; if they do not, the job is
    /// aborted: MPI would go on to use memory after the call that has borrowed it.
    #[cfg(feature = "cuda")]
    pub(super) fn finish(&self, mut requests: Requests, deadline: Duration) -> Result<(), MpiError> {
        let mut failed: Option<Instant> = None;
        while !self.progress(&mut requests) {
            if requests.error.is_some() && failed.get_or_insert_with(Instant::now).elapsed() > deadline {
                tracing::error!(rank = self.rank, error = ?requests.error, "messages that cannot be ended: aborting the MPI job");
                self.abort(1);
            }
            std::thread::yield_now();
        }
        requests.error.map_or(Ok(()), Err)
    }

    /// Ends all processes of the job.
    pub(super) fn abort(&self, code: i32) -> ! {
        // SAFETY: our own live handle. Called even if another thread is in MPI: nothing comes after it.
        unsafe { ffi::MPI_Abort(self.comm, code) };
        std::process::abort()
    }

    /// Gives up its part in the communicator, which is freed with the last one; all ranks do so, in their own time. Where a part was not given up
    /// well, the communicator stays until the process ends, so that no late message finds another communicator in its place.
    pub(super) fn free(&mut self) {
        self.is_quiet = self.pump().is_ok() && self.outbox.get_mut().is_empty() && self.arriving.get_mut().is_empty();
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

    fn test(&self, request: &mut ffi::MPI_Request) -> Result<bool, MpiError> {
        // SAFETY: a request of ours, whose memory stays until it is over.
        unsafe { self.library.test(request) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if *self.is_quiet.get_mut() && Library::get().is_ok() {
            // A failure is not reported: nobody is left to hear of it.
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
        // MPI may read and write them for as long as the process lives.
        std::mem::forget((self.outbox.take(), self.arriving.take()));
    }
}

impl Requests {
    fn add(&mut self, started: Result<ffi::MPI_Request, MpiError>) {
        match started {
            Ok(request) => self.under_way.push(request),
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
    }

    pub(super) fn into_result(self) -> Result<(), MpiError> {
        debug_assert!(self.under_way.is_empty(), "messages are still under way");
        self.error.map_or(Ok(()), Err)
    }
}

/// The same with lists and texts that are short enough.
pub(super) fn shortened(mut record: Record) -> Record {
    if let Record::Failed { error, .. } = &mut record {
        match error {
            CommError::InvalidCall { reason, .. } | CommError::Transport { reason, .. } => {
                let end = (0..=LONGEST_REASON.min(reason.len())).rev().find(|&end| reason.is_char_boundary(end));
                reason.truncate(end.unwrap_or(0));
            }
            CommError::Timeout { missing, .. } => missing.truncate(MOST_MISSING),
            _ => {}
        }
    }
    record
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::ReduceOp;
    use crate::dtype::DataType;
    use crate::error::Operation;

    #[test]
    fn a_record_is_long_enough_for_an_eager_call() {
        let factor = (-1.5f64).into();
        let operation = Operation::ScaledAllReduce { op: ReduceOp::Min, before: factor, after: factor };
        let call = Call { within: Some(operation), ..Call::new(operation, usize::MAX, DataType::BF16) };
        let record = Record::Call { call, eager: EagerBytes(vec![255; MAX_EAGER_BYTES]) };
        let bytes = postcard::to_stdvec(&record).unwrap();
        assert!(bytes.len() + 100 < RECORD_BYTES, "{} bytes", bytes.len());
        assert!(!format!("{record:?}").contains("255"), "{record:?}");
        let mut received = vec![0; RECORD_BYTES];
        received[..bytes.len()].copy_from_slice(&bytes);
        assert_eq!(postcard::from_bytes::<Record>(&received), Ok(record));
    }
}
