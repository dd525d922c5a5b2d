//! The ends of a staged transfer: pieces of device memory, each in a block of pinned memory while it is in flight.
//!
//! A sender holds a block from the fetch of a piece until MPI has sent it, a receiver only from the arrival of the piece's message, so a
//! block always becomes free without the help of another block, however many transfers there are. If a device fails, its messages are
//! still sent and received; the sender tells the receiver afterwards that the data were incorrect.
//!
//! A transfer whose peer does not go on within the deadline is abandoned: MPI keeps the blocks of its messages in flight for as long as the
//! process lives, and the communicator has failed, so that nothing else uses them.

use std::cell::RefCell;
use std::collections::VecDeque;

use crate::comm::message_passing::{DataMover, Incoming, Link, Outgoing, Requests, Stage};
use crate::driver::{CudaError, Pinned, Queue};

/// The most blocks that one transfer may hold: one is copied while the other is in a message.
const MOST_BLOCKS: usize = 2;

/// The blocks of one call: the first half is for sent pieces, the second for received ones.
pub(super) struct Slots<'a> {
    pinned: &'a Pinned,
    /// The queue that copies pieces from the device; it already waits for the work that `queue` held before the call.
    down: &'a Queue,
    /// The operands' queue, which copies pieces to the device.
    queue: &'a Queue,
    is_held: RefCell<Vec<bool>>,
}

/// A piece in flight.
struct Flight {
    block: usize,
    /// The offset of the piece in the data.
    begin: usize,
    bytes: usize,
    /// The piece's message, once it has been started.
    requests: Option<Requests>,
}

/// The state of either end of a transfer.
struct Pieces<'s, 'a> {
    slots: &'s Slots<'a>,
    address: u64,
    bytes: usize,
    /// The bytes of all pieces that have begun.
    begun: usize,
    flights: VecDeque<Flight>,
    failure: Option<String>,
    /// Whether MPI no longer reports arrivals, so that no further pieces are awaited.
    is_lost: bool,
    /// Whether the last call has made progress, or waited for a block or a copy: not for the peer.
    has_moved: bool,
}

impl<'a> Slots<'a> {
    pub(super) fn new(pinned: &'a Pinned, down: &'a Queue, queue: &'a Queue) -> Self {
        let is_held = RefCell::new(vec![false; pinned.count()]);
        Self { pinned, down, queue, is_held }
    }

    /// The sender's end of a transfer.
    ///
    /// # Safety
    /// There are `bytes` bytes at `address` on the queues' device, and they stay as `queue` leaves them until the transfer is done.
    pub(super) unsafe fn outgoing(&self, address: u64, bytes: usize) -> impl DataMover + use<'_, 'a> {
        Outward(Pieces::new(self, address, bytes))
    }

    /// The receiver's end of a transfer.
    ///
    /// # Safety
    /// `address` has `bytes` bytes on the queues' device, which stay valid until `queue` has completed the work that is enqueued here, and
    /// which only work in `queue` uses.
    pub(super) unsafe fn incoming(&self, address: u64, bytes: usize) -> impl DataMover + use<'_, 'a> {
        Inward(Pieces::new(self, address, bytes))
    }

    /// Takes a free block, whose last copies are complete.
    fn take(&self, is_outward: bool) -> Result<Option<usize>, CudaError> {
        let middle = self.pinned.count() / 2;
        let blocks = if is_outward { 0..middle } else { middle..self.pinned.count() };
        let mut is_held = self.is_held.borrow_mut();
        for block in blocks {
            if !is_held[block] && self.pinned.is_done(block)? {
                is_held[block] = true;
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    /// Like [`take`](Self::take), but for a device that has failed and makes no more copies.
    fn take_anyway(&self, is_outward: bool) -> Option<usize> {
        let middle = self.pinned.count() / 2;
        let mut is_held = self.is_held.borrow_mut();
        let mut blocks = if is_outward { 0..middle } else { middle..self.pinned.count() };
        let block = blocks.find(|&block| !is_held[block])?;
        is_held[block] = true;
        Some(block)
    }

    fn give(&self, block: usize) {
        self.is_held.borrow_mut()[block] = false;
    }
}

impl<'s, 'a> Pieces<'s, 'a> {
    fn new(slots: &'s Slots<'a>, address: u64, bytes: usize) -> Self {
        let flights = VecDeque::new();
        Pieces { slots, address, bytes, begun: 0, flights, failure: None, is_lost: false, has_moved: false }
    }

    /// Keeps the first failure.
    fn note<T>(&mut self, outcome: Result<T, impl ToString>) -> Option<T> {
        outcome.map_err(|error| self.failure.get_or_insert_with(|| error.to_string()).len()).ok()
    }

    /// Begins the next piece, if there is one and a block for it is free. Returns its index.
    fn begin(&mut self, is_outward: bool) -> Option<usize> {
        if self.begun == self.bytes || self.flights.len() == MOST_BLOCKS {
            return None;
        }
        let taken = match self.failure {
            None => self.slots.take(is_outward),
            Some(_) => Ok(self.slots.take_anyway(is_outward)),
        };
        let block = self.note(taken).flatten()?;
        let (begin, bytes) = (self.begun, self.slots.pinned.block_bytes().min(self.bytes - self.begun));
        self.begun += bytes;
        self.flights.push_back(Flight { block, begin, bytes, requests: None });
        Some(self.flights.len() - 1)
    }

    /// Removes and returns the oldest piece if its message is complete.
    fn landed(&mut self) -> Option<Flight> {
        let requests = self.flights.front_mut()?.requests.as_mut()?;
        if !requests.progress() {
            return None;
        }
        self.has_moved = true;
        let mut flight = self.flights.pop_front()?;
        let outcome = flight.requests.take().map_or(Ok(()), Requests::into_result);
        self.note(outcome);
        Some(flight)
    }

    fn stage(&self) -> Stage {
        let has_moved = self.has_moved;
        match (self.begun, self.flights.is_empty()) {
            (_, true) if self.is_lost => Stage::Done,
            (0, _) => Stage::Idle,
            (begun, _) if begun < self.bytes => Stage::Starting { has_moved },
            _ if self.flights.iter().any(|flight| flight.requests.is_none()) => Stage::Starting { has_moved },
            (_, false) => Stage::Started { has_moved },
            (_, true) => Stage::Done,
        }
    }
}

impl Drop for Pieces<'_, '_> {
    /// Leaves the blocks of messages in flight to MPI, and lets the operands' queue wait for copies under way.
    fn drop(&mut self) {
        let Slots { pinned, queue, .. } = *self.slots;
        for flight in self.flights.drain(..) {
            match flight.requests {
                Some(requests) => {
                    pinned.leave();
                    std::mem::forget(requests);
                }
                None => {
                    if let Err(error) = pinned.make_queue_wait(queue, flight.block) {
                        tracing::warn!(%error, "work that follows an abandoned transfer does not wait for its copies");
                    }
                }
            }
        }
    }
}

struct Outward<'s, 'a>(Pieces<'s, 'a>);

impl DataMover for Outward<'_, '_> {
    fn advance(&mut self, link: &dyn Link, peer: usize) -> Stage {
        let Self(pieces) = self;
        let (pinned, down) = (pieces.slots.pinned, pieces.slots.down);
        // A transfer without messages in flight waits for a block or for a copy of its own.
        pieces.has_moved = pieces.flights.iter().all(|flight| flight.requests.is_none());
        // A block is taken before others are returned, so that other transfers get the blocks that this transfer returns.
        if let Some(index) = pieces.begin(true) {
            let Flight { block, begin, bytes, .. } = pieces.flights[index];
            if pieces.failure.is_none() {
                // SAFETY: by the contract of `Slots::outgoing`; the block is ours.
                let fetched = unsafe { pinned.fetch(down, block, 0, pieces.address + begin as u64, bytes) };
                pieces.note(fetched.and_then(|()| pinned.mark(down, block)));
            }
        }
        for index in 0..pieces.flights.len() {
            let Flight { block, bytes, ref requests, .. } = pieces.flights[index];
            if requests.is_some() {
                continue;
            }
            let is_there = match pieces.failure {
                None => pieces.note(pinned.is_done(block)),
                Some(_) => None,
            };
            // Messages keep their order. After a failure, their contents are unspecified.
            if is_there == Some(false) {
                break;
            }
            let (mut requests, start) = (Requests::default(), pinned.block(block).cast_const());
            // SAFETY: the block is ours, and left alone, until the message is out.
            unsafe { link.send(Outgoing { peer, start, bytes }, &mut requests) };
            pieces.flights[index].requests = Some(requests);
            pieces.has_moved = true;
        }
        while let Some(flight) = pieces.landed() {
            pieces.slots.give(flight.block);
        }
        pieces.stage()
    }

    fn failure(&mut self) -> Option<String> {
        self.0.failure.take()
    }

    fn is_confirmed(&self) -> bool {
        true
    }

    /// Its messages are in blocks of the communicator, which are left to MPI.
    fn can_be_left(&self) -> bool {
        true
    }
}

struct Inward<'s, 'a>(Pieces<'s, 'a>);

impl DataMover for Inward<'_, '_> {
    fn advance(&mut self, link: &dyn Link, peer: usize) -> Stage {
        let Self(pieces) = self;
        let (pinned, queue) = (pieces.slots.pinned, pieces.slots.queue);
        let mut has_come = false;
        pieces.has_moved = false;
        if pieces.begun < pieces.bytes && !pieces.is_lost {
            let probed = pieces.note(link.has_data(peer));
            (has_come, pieces.is_lost) = (probed == Some(true), probed.is_none());
        }
        if has_come {
            // It has moved, or other transfers hold all blocks.
            pieces.has_moved = true;
            if let Some(index) = pieces.begin(false) {
                let Flight { block, bytes, .. } = pieces.flights[index];
                let (mut requests, start) = (Requests::default(), pinned.block(block));
                // SAFETY: the block is ours, and left alone, until the message is in.
                unsafe { link.receive(Incoming { peer, start, bytes }, &mut requests) };
                pieces.flights[index].requests = Some(requests);
            }
        }
        while let Some(Flight { block, begin, bytes, .. }) = pieces.landed() {
            if pieces.failure.is_none() {
                // SAFETY: by the contract of `Slots::incoming`; the block is not taken again before the copy is over.
                let stored = unsafe { pinned.store(queue, block, 0, pieces.address + begin as u64, bytes) };
                pieces.note(stored.and_then(|()| pinned.mark(queue, block)));
            }
            pieces.slots.give(block);
        }
        pieces.stage()
    }

    fn failure(&mut self) -> Option<String> {
        self.0.failure.take()
    }

    fn is_confirmed(&self) -> bool {
        true
    }

    /// Its messages are in blocks of the communicator, which are left to MPI.
    fn can_be_left(&self) -> bool {
        true
    }
}
