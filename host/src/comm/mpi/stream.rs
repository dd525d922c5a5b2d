//! Bytes of the host on their way to a rank or from one, in pieces that MPI reads and writes in memory of this module.
//!
//! MPI takes no memory back that it is still to read or to fill. A rank whose peer is stopped could not return to its caller, whose memory this
//! is, so each piece is copied: while it is in the caches, and while others are on their way. Whoever gives up leaves MPI the rooms of the pieces
//! under way for as long as the process lives.

use std::cell::Cell;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::channel::{Channel, Incoming, Outgoing, Requests};
use super::library::MpiError;

/// Bytes of a piece, the same on all ranks: few handshakes, and still in the caches when it is copied.
const PIECE_BYTES: usize = 1 << 20;
/// Pieces of a stream that are on their way at a time.
const MOST_FLIGHTS: usize = 3;
/// How long nothing moves before a rank looks whether others have failed.
const STALLED: Duration = Duration::from_millis(200);
/// How long a rank still looks whose deadline has passed.
const LAST_LOOKS: Duration = Duration::from_millis(50);

/// One direction between two ranks. Those between the same two in the same direction begin one after the other.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) peer: usize,
    start: *mut u8,
    bytes: usize,
    is_outward: bool,
    begun: usize,
    flights: VecDeque<Flight>,
    /// Rooms of pieces that have landed, for the next ones.
    rooms: Vec<Box<[u8]>>,
    error: Option<MpiError>,
}

/// A piece on its way.
#[derive(Debug)]
struct Flight {
    begin: usize,
    bytes: usize,
    room: Box<[u8]>,
    requests: Requests,
}

impl Stream {
    /// # Safety
    /// The memory stays valid and unchanged for as long as [`advance`](Self::advance) is called.
    pub(super) unsafe fn outward(outgoing: Outgoing) -> Self {
        Self::new(outgoing.peer, outgoing.start.cast_mut(), outgoing.bytes, true)
    }

    /// # Safety
    /// The memory stays valid and is used by nobody else for as long as [`advance`](Self::advance) is called.
    pub(super) unsafe fn inward(incoming: Incoming) -> Self {
        Self::new(incoming.peer, incoming.start, incoming.bytes, false)
    }

    fn new(peer: usize, start: *mut u8, bytes: usize, is_outward: bool) -> Self {
        let (flights, rooms) = (VecDeque::new(), Vec::new());
        Self { peer, start, bytes, is_outward, begun: 0, flights, rooms, error: None }
    }

    /// Whether the messages of all pieces have been started.
    pub(super) fn has_begun(&self) -> bool {
        self.begun == self.bytes
    }

    pub(super) fn is_done(&self) -> bool {
        self.has_begun() && self.flights.is_empty()
    }

    /// Goes on as far as is possible without waiting; whether anything has moved.
    pub(super) fn advance(&mut self, channel: &Channel) -> bool {
        let before = self.begun;
        while !self.has_begun() && self.flights.len() < MOST_FLIGHTS {
            self.begin(channel);
        }
        let mut has_moved = self.begun > before;
        while let Some(flight) = self.flights.front_mut() {
            if !channel.progress(&mut flight.requests) {
                break;
            }
            let Flight { begin, bytes, room, requests } = self.flights.pop_front().expect("the front");
            if let Err(error) = requests.into_result() {
                self.fail(error);
            } else if !self.is_outward {
                // SAFETY: within the memory, by the contract of `inward`; a room is apart from it.
                unsafe { std::ptr::copy_nonoverlapping(room.as_ptr(), self.start.add(begin), bytes) };
            }
            self.rooms.push(room);
            has_moved = true;
        }
        has_moved
    }

    fn begin(&mut self, channel: &Channel) {
        let (peer, begin, bytes) = (self.peer, self.begun, PIECE_BYTES.min(self.bytes - self.begun));
        let mut room = self.rooms.pop().unwrap_or_else(|| vec![0; PIECE_BYTES.min(self.bytes)].into_boxed_slice());
        let mut requests = Requests::default();
        // SAFETY: a piece of the memory, by the contracts of `outward` and `inward`; the room is MPI's until the message is over, or for ever.
        unsafe {
            if self.is_outward {
                std::ptr::copy_nonoverlapping(self.start.add(begin), room.as_mut_ptr(), bytes);
                channel.start(&[], &[Outgoing { peer, start: room.as_ptr(), bytes }], &mut requests);
            } else {
                channel.start(&[Incoming { peer, start: room.as_mut_ptr(), bytes }], &[], &mut requests);
            }
        }
        self.begun += bytes;
        self.flights.push_back(Flight { begin, bytes, room, requests });
    }

    /// Takes note of what MPI has refused.
    pub(super) fn fail(&mut self, error: MpiError) {
        self.error.get_or_insert(error);
    }

    /// What MPI has refused.
    pub(super) fn take_error(&mut self) -> Option<MpiError> {
        self.error.take()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        std::mem::forget(std::mem::take(&mut self.flights));
    }
}

/// How long nothing has moved of what a rank waits for.
#[derive(Debug)]
pub(super) struct Stall {
    start: Instant,
    /// When it was first seen that a deadline had passed.
    seen_over: Cell<Option<Instant>>,
}

impl Stall {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), seen_over: Cell::new(None) }
    }

    /// Takes note that something has moved.
    pub(super) fn end(&mut self) {
        *self = Self::new();
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Whether it is time to ask if others have failed.
    pub(super) fn is_long(&self) -> bool {
        self.elapsed() >= STALLED
    }

    /// Whether the deadline has passed; not at once, since this process may itself have been stopped meanwhile, and what the others have told it
    /// comes in only as it looks.
    pub(super) fn is_over(&self, deadline: Duration) -> bool {
        if self.elapsed() < deadline {
            return false;
        }
        let seen = self.seen_over.get().unwrap_or_else(Instant::now);
        self.seen_over.set(Some(seen));
        seen.elapsed() >= LAST_LOOKS
    }
}
