//! Streams: host memory that is sent to or received from a rank, in pieces.
//!
//! If messages can be cancelled, a stream is one message in the caller's memory. MPI cannot release the memory of a pending message: a
//! rank whose peer is stopped could never return the caller's memory. So each piece is copied through buffers of the link, while it is
//! in the caches and while other pieces are in flight. A rank that gives up leaves the buffers of pieces in flight to MPI for as long as
//! the process lives.
//!
//! Messages longer than [`MOST_COPIED`] are the exception: MPI gets their memory itself, because copies make them two to three
//! times as slow. Their ranks wait for each other without a deadline once data move.

use std::cell::Cell;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::link::{Buffers, Incoming, Link, LinkError, Outgoing, Requests};

/// The bytes of a piece, equal on all ranks: few messages, and still in the caches when it is copied.
const PIECE_BYTES: usize = Buffers::BYTES;
/// The most bytes of a message that is copied.
const MOST_COPIED: usize = 2 << 20;
/// The most pieces of one stream in flight.
const MOST_FLIGHTS: usize = 3;
/// After this time without progress, a rank checks whether others have failed.
const STALLED: Duration = Duration::from_millis(200);
/// How long a rank still checks for failures after its deadline has passed.
const LAST_LOOKS: Duration = Duration::from_millis(50);

/// One transfer in one direction between two ranks. Streams between the same two ranks in the same direction begin one after another.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) peer: usize,
    start: *mut u8,
    bytes: usize,
    is_outward: bool,
    /// Whether messages in flight can be cancelled, so that they need no buffers.
    can_cancel: bool,
    /// Whether the host can copy the memory.
    is_host: bool,
    begun: usize,
    flights: VecDeque<Flight>,
    error: Option<LinkError>,
}

/// A piece in flight.
#[derive(Debug)]
struct Flight {
    begin: usize,
    bytes: usize,
    /// The buffer of the piece; `None` if MPI uses the caller's memory.
    buffer: Option<Box<[u8]>>,
    requests: Requests,
}

impl Stream {
    /// # Safety
    /// The memory stays valid and unchanged for as long as [`advance`](Self::advance) is called.
    pub(super) unsafe fn outward(link: &dyn Link, outgoing: Outgoing) -> Self {
        Self::new(link, outgoing.peer, outgoing.start.cast_mut(), outgoing.bytes, true)
    }

    /// # Safety
    /// The memory stays valid and is used by nothing else for as long as [`advance`](Self::advance) is called.
    pub(super) unsafe fn inward(link: &dyn Link, incoming: Incoming) -> Self {
        Self::new(link, incoming.peer, incoming.start, incoming.bytes, false)
    }

    fn new(link: &dyn Link, peer: usize, start: *mut u8, bytes: usize, is_outward: bool) -> Self {
        let (flights, can_cancel) = (VecDeque::new(), link.buffers().is_none());
        Self { peer, start, bytes, is_outward, can_cancel, is_host: true, begun: 0, flights, error: None }
    }

    /// The same stream of memory that may be a device's: the transport gets the memory itself.
    pub(super) fn without_copies(mut self) -> Self {
        self.is_host = false;
        self
    }

    fn is_copied(&self) -> bool {
        self.bytes <= MOST_COPIED && !self.can_cancel && self.is_host
    }

    /// Whether the transport uses no memory of the caller, or can release it.
    pub(super) fn can_be_left(&self) -> bool {
        self.is_copied() || self.can_cancel || self.flights.is_empty()
    }

    /// Whether the messages of all pieces have been started.
    pub(super) fn has_begun(&self) -> bool {
        self.begun == self.bytes
    }

    pub(super) fn is_done(&self) -> bool {
        self.has_begun() && self.flights.is_empty()
    }

    /// Makes progress without waiting. Returns whether anything has moved.
    pub(super) fn advance(&mut self, link: &dyn Link) -> bool {
        let before = self.begun;
        while !self.has_begun() && self.flights.len() < MOST_FLIGHTS {
            self.begin(link);
        }
        let mut has_moved = self.begun > before;
        while let Some(flight) = self.flights.front_mut() {
            if !flight.requests.progress() {
                break;
            }
            let Flight { begin, bytes, buffer, requests } = self.flights.pop_front().expect("the front");
            if let Err(error) = requests.into_result() {
                self.fail(error);
            } else if let Some(buffer) = buffer.as_ref().filter(|_| !self.is_outward) {
                // SAFETY: within the memory, by the contract of `inward`; the buffer does not overlap it.
                unsafe { std::ptr::copy_nonoverlapping(buffer.as_ptr(), self.start.add(begin), bytes) };
            }
            if let (Some(buffers), Some(buffer)) = (link.buffers(), buffer) {
                buffers.give(buffer);
            }
            has_moved = true;
        }
        has_moved
    }

    fn begin(&mut self, link: &dyn Link) {
        let longest = if self.is_copied() { PIECE_BYTES } else { self.bytes };
        let (peer, begin, bytes) = (self.peer, self.begun, longest.min(self.bytes - self.begun));
        let mut buffer = link.buffers().filter(|_| self.is_copied()).map(Buffers::take);
        let mut requests = Requests::default();
        // SAFETY: a piece of the memory, by the contracts of `outward` and `inward`. The buffer is MPI's until the message is over, or
        // for ever; a stream without buffers is not abandoned before its messages are over.
        unsafe {
            let memory = self.start.add(begin);
            let start = buffer.as_mut().map_or(memory, |buffer| buffer.as_mut_ptr());
            if self.is_outward {
                if start != memory {
                    std::ptr::copy_nonoverlapping(memory, start, bytes);
                }
                link.send(Outgoing { peer, start, bytes }, &mut requests);
            } else {
                link.receive(Incoming { peer, start, bytes }, &mut requests);
            }
        }
        self.begun += bytes;
        self.flights.push_back(Flight { begin, bytes, buffer, requests });
    }

    /// Stores an error of MPI.
    pub(super) fn fail(&mut self, error: LinkError) {
        self.error.get_or_insert(error);
    }

    /// The first error of MPI.
    pub(super) fn take_error(&mut self) -> Option<LinkError> {
        self.error.take()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let mut flights = std::mem::take(&mut self.flights);
        if self.can_cancel {
            flights.iter_mut().for_each(|flight| flight.requests.cancel());
        } else {
            std::mem::forget(flights);
        }
    }
}

/// The time for which a wait has made no progress.
#[derive(Debug)]
pub(super) struct Stall {
    start: Instant,
    /// When the passing of a deadline was first detected.
    seen_over: Cell<Option<Instant>>,
}

impl Stall {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), seen_over: Cell::new(None) }
    }

    /// Restarts the time after progress.
    pub(super) fn end(&mut self) {
        *self = Self::new();
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Whether it is time to check if others have failed.
    pub(super) fn is_long(&self) -> bool {
        self.elapsed() >= STALLED
    }

    /// Whether the deadline passed at least [`LAST_LOOKS`] ago. This process may itself have been stopped meanwhile, and receives the
    /// records of the other ranks only while it continues to check.
    pub(super) fn is_over(&self, deadline: Duration) -> bool {
        if self.elapsed() < deadline {
            return false;
        }
        let seen = self.seen_over.get().unwrap_or_else(Instant::now);
        self.seen_over.set(Some(seen));
        seen.elapsed() >= LAST_LOOKS
    }
}
