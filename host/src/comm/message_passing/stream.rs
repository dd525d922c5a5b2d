//! Streams: host memory that is sent to or received from a rank, in pieces.
//!
//! If messages can be cancelled, a stream is one message in the caller's memory. MPI cannot release the memory of a pending message: a
//! rank whose peer is stopped could never return the caller's memory. So each piece is copied through buffers of the link, while it is
//! in the caches and while other pieces are in flight. A rank that gives up leaves the buffers of pieces in flight to MPI for as long as
//! the process lives.
//!
//! Messages longer than [`MOST_COPIED`] are the exception: MPI gets their memory itself, because copies make them two to three
//! times as slow. Their ranks wait for each other without a deadline once data move.

use std::collections::VecDeque;

use super::handshake::Handshake;
use super::link::{Buffers, Incoming, Link, LinkError, Outgoing, Requests};
use super::wait::Stall;
use crate::error::{Call, CommError, Operation, Result};

/// The bytes of a piece, equal on all ranks: few messages, and still in the caches when it is copied.
const PIECE_BYTES: usize = Buffers::BYTES;
/// The most bytes of a message that is copied.
const MOST_COPIED: usize = 2 << 20;
/// The most pieces of one stream in flight.
const MOST_FLIGHTS: usize = 3;

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

impl Handshake {
    /// Waits until all streams of a collective are done; fails if none has progressed for the deadline and all can be abandoned.
    pub(super) fn finish_streams(&self, operation: Operation, mut streams: Vec<Stream>) -> Result<()> {
        self.take_step(operation, || self.wait_for_streams(operation, &mut streams))
    }

    fn wait_for_streams(&self, operation: Operation, streams: &mut [Stream]) -> Result<(), CommError> {
        let mut stall = Stall::new();
        while !streams.iter().all(Stream::is_done) {
            if streams.iter_mut().fold(false, |moved, stream| stream.advance(self.link()) | moved) {
                stall.end();
                continue;
            }
            let is_over = stall.is_over(self.deadline);
            let is_stalled = stall.is_long() || stall.elapsed() >= self.deadline;
            if is_stalled && streams.iter().all(Stream::can_be_left) {
                self.pump(operation)?;
                self.look_for_failure()?;
                let late: Vec<usize> =
                    streams.iter().filter(|stream| !stream.is_done()).map(|stream| stream.peer).collect();
                let own: Vec<Call> = late.iter().map(|&peer| Call::without_data(Operation::Recv { peer })).collect();
                let judged = self.judge(&own, late.into_iter().map(|peer| (peer, Vec::new())).collect(), is_over);
                // By now, everything that a departed rank has sent and received is known.
                match streams.iter_mut().fold(false, |moved, stream| stream.advance(self.link()) | moved) {
                    true => stall.end(),
                    false => judged?,
                }
            }
            std::thread::yield_now();
        }
        let error = streams.iter_mut().find_map(Stream::take_error);
        error.map_or(Ok(()), |error| Err(self.broken(operation, error)))
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
