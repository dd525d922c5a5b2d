//! [`Messages`]: the records and the bulk data of one group between this process and another.
//!
//! Messages of one direction are in order, each by one of two ways: its bytes travel in frames, or a frame says where they lie, and the receiver
//! fetches them from the sender's memory. The second way copies once, and takes a ticket (see [`Lane`](super::lane::Lane)), by which the
//! sender can take a message back at any moment.

use std::collections::VecDeque;

use super::connection::{Connection, Kind, PAYLOAD_BYTES};
use super::lane::{Lane, Ticket};
use crate::comm::message_passing::LinkError;

/// Messages up to this length travel in frames in any case: that takes less time than it takes the receiver to say that it has fetched them.
const SHORT_BYTES: usize = 16 << 10;
/// No further frames of bytes are queued while so many bytes wait for room.
const MOST_QUEUED: usize = 64 << 10;

/// A message that the receiver fetches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reference {
    pub(super) ticket: Ticket,
    pub(super) address: u64,
    pub(super) bytes: usize,
}

impl Reference {
    fn encode(self) -> [u8; 32] {
        let [index, word] = Lane::words(self.ticket);
        let mut bytes = [0; 32];
        let words = [index, word, self.address, self.bytes as u64];
        bytes.chunks_exact_mut(8).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; 32] = bytes.try_into().ok()?;
        let word = |index: usize| u64::from_le_bytes(std::array::from_fn(|at| bytes[8 * index + at]));
        Some(Self { ticket: Lane::of_words([word(0), word(1)]), address: word(2), bytes: word(3) as usize })
    }
}

/// A message that has arrived before this process receives it.
#[derive(Debug)]
enum Arrival {
    Bytes(Vec<u8>),
    Reference(Reference),
}

/// A message that this process receives.
#[derive(Debug)]
struct Receiving {
    number: u64,
    start: *mut u8,
    bytes: usize,
    filled: usize,
    reference: Option<Reference>,
}

impl Receiving {
    /// Whether it is known where all its bytes come from.
    fn is_matched(&self) -> bool {
        self.reference.is_some() || self.filled == self.bytes
    }
}

/// A message that this process sends.
#[derive(Debug)]
struct Sending {
    number: u64,
    start: *const u8,
    bytes: usize,
    state: SendState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendState {
    /// So many bytes are in frames.
    Framed(usize),
    Referred(Ticket),
    Fetched,
}

/// How far a message to receive is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Received {
    /// It is all there, and no longer known here.
    All,
    /// Nothing can be done but wait.
    Waiting,
    /// It is to be fetched.
    Fetch(Reference),
}

/// The messages of a group with one peer.
#[derive(Debug, Default)]
pub(super) struct Messages {
    /// Records that were received, encoded.
    pub(super) records: VecDeque<Box<[u8]>>,
    arrivals: VecDeque<Arrival>,
    receiving: VecDeque<Receiving>,
    sending: VecDeque<Sending>,
    /// How many messages were started.
    started: u64,
    /// Whether the peer has left the group, and whether this process has.
    pub(super) has_left: bool,
    is_closed: bool,
    /// What is wrong with what the peer has sent.
    error: Option<LinkError>,
}

// SAFETY: the memory behind the addresses is borrowed by the calls that have started the messages, until these are over or cancelled; whoever
// accesses it meanwhile has the lock that guards this.
unsafe impl Send for Messages {}

impl Messages {
    /// Whether neither process uses the group any more.
    pub(super) fn is_over(&self) -> bool {
        self.has_left && self.is_closed
    }

    /// Drops everything: this process has left the group.
    pub(super) fn close(&mut self, connection: &mut Connection) {
        self.sending.iter().for_each(|sending| withdraw(sending, connection));
        let (has_left, started) = (self.has_left, self.started);
        *self = Messages { has_left, started, is_closed: true, ..Messages::default() };
    }

    /// Takes a frame.
    pub(super) fn take(&mut self, kind: Kind, payload: &[u8]) {
        match kind {
            Kind::Left => self.has_left = true,
            _ if self.is_closed => {}
            Kind::Record => self.records.push_back(payload.into()),
            Kind::Bytes => self.take_bytes(payload),
            Kind::Reference => match Reference::decode(payload) {
                Some(reference) => self.take_reference(reference),
                None => self.fail(format!("a reference of {} bytes", payload.len())),
            },
        }
    }

    fn fail(&mut self, reason: String) {
        self.error.get_or_insert(LinkError(format!("a peer sent {reason} where no rank of this version does")));
    }

    fn take_bytes(&mut self, payload: &[u8]) {
        let Some(next) = self.receiving.iter_mut().find(|receiving| !receiving.is_matched()) else {
            return self.arrivals.push_back(Arrival::Bytes(payload.to_vec()));
        };
        if payload.len() > next.bytes - next.filled {
            let (bytes, room) = (payload.len(), next.bytes - next.filled);
            return self.fail(format!("{bytes} bytes for a message that lacks {room}"));
        }
        // SAFETY: within the memory of the message, which is this message's until it is over or cancelled.
        unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), next.start.add(next.filled), payload.len()) };
        next.filled += payload.len();
    }

    fn take_reference(&mut self, reference: Reference) {
        let Some(next) = self.receiving.iter_mut().find(|receiving| !receiving.is_matched()) else {
            return self.arrivals.push_back(Arrival::Reference(reference));
        };
        if next.filled != 0 || reference.bytes != next.bytes {
            let (bytes, expected) = (reference.bytes, next.bytes);
            return self.fail(format!("a message of {bytes} bytes in place of one of {expected}"));
        }
        next.reference = Some(reference);
    }

    /// Whether bulk data have arrived that this process does not receive yet.
    pub(super) fn has_arrived(&self) -> bool {
        !self.arrivals.is_empty()
    }

    fn next_number(&mut self) -> u64 {
        self.started += 1;
        self.started
    }

    /// Starts to receive a message; returns its number.
    pub(super) fn start_receiving(&mut self, start: *mut u8, bytes: usize) -> u64 {
        let number = self.next_number();
        self.receiving.push_back(Receiving { number, start, bytes, filled: 0, reference: None });
        while self.receiving.back().is_some_and(|last| !last.is_matched()) {
            match self.arrivals.pop_front() {
                Some(Arrival::Bytes(bytes)) => self.take_bytes(&bytes),
                Some(Arrival::Reference(reference)) => self.take_reference(reference),
                None => break,
            }
        }
        number
    }

    /// How far a message is.
    pub(super) fn received(&mut self, number: u64) -> Result<Received, LinkError> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        let place = self.receiving.iter().position(|receiving| receiving.number == number).expect("it was started");
        let Receiving { bytes, filled, reference, .. } = self.receiving[place];
        if filled == bytes {
            self.receiving.remove(place);
            return Ok(Received::All);
        }
        Ok(reference.map_or(Received::Waiting, Received::Fetch))
    }

    /// Notes that all bytes of a message have been fetched.
    pub(super) fn note_fetched(&mut self, number: u64) {
        let message = self.receiving.iter_mut().find(|receiving| receiving.number == number);
        message.into_iter().for_each(|message| message.filled = message.bytes);
    }

    /// Gives a message up, whose memory is not used any more.
    pub(super) fn cancel_receiving(&mut self, number: u64) {
        self.receiving.retain(|receiving| receiving.number != number);
    }

    /// Starts to send a message; returns its number.
    pub(super) fn start_sending(&mut self, start: *const u8, bytes: usize) -> u64 {
        let number = self.next_number();
        self.sending.push_back(Sending { number, start, bytes, state: SendState::Framed(0) });
        number
    }

    /// Sends as much as there is room for, in order.
    pub(super) fn send(&mut self, group: u64, connection: &mut Connection, can_refer: bool) {
        for sending in &mut self.sending {
            if let SendState::Referred(ticket) = sending.state {
                let is_fetched = connection.lanes().is_some_and(|lanes| lanes.outward.is_fetched(ticket));
                if is_fetched {
                    sending.state = SendState::Fetched;
                }
            }
            let SendState::Framed(mut framed) = sending.state else { continue };
            if can_refer && framed == 0 && sending.bytes > SHORT_BYTES {
                let address = sending.start.expose_provenance() as u64;
                let ticket = connection.lanes().and_then(|lanes| lanes.outward.issue());
                if let Some(ticket) = ticket {
                    let reference = Reference { ticket, address, bytes: sending.bytes };
                    connection.push(Kind::Reference, group, &reference.encode());
                    sending.state = SendState::Referred(ticket);
                    continue;
                }
                // All tickets are in use: later messages wait as well.
                return;
            }
            while framed < sending.bytes && connection.queued() < MOST_QUEUED {
                let bytes = PAYLOAD_BYTES.min(sending.bytes - framed);
                // SAFETY: within the memory of the message, which stays as it is until the message is over or cancelled.
                let payload = unsafe { std::slice::from_raw_parts(sending.start.add(framed), bytes) };
                connection.push(Kind::Bytes, group, payload);
                framed += bytes;
            }
            sending.state = SendState::Framed(framed);
            if framed < sending.bytes {
                return;
            }
        }
    }

    /// Whether a message is out, and its memory in use no more.
    pub(super) fn sent(&mut self, number: u64, connection: &Connection) -> bool {
        let place = self.sending.iter().position(|sending| sending.number == number).expect("it was started");
        let is_out = match self.sending[place].state {
            SendState::Framed(framed) => framed == self.sending[place].bytes && connection.queued() == 0,
            SendState::Referred(_) => false,
            SendState::Fetched => true,
        };
        if is_out {
            self.sending.remove(place);
        }
        is_out
    }

    /// Gives a message up, whose memory is not used any more. The peer never receives it.
    pub(super) fn cancel_sending(&mut self, number: u64, connection: &Connection) {
        self.sending.iter().filter(|sending| sending.number == number).for_each(|sending| withdraw(sending, connection));
        self.sending.retain(|sending| sending.number != number);
    }
}

fn withdraw(sending: &Sending, connection: &Connection) {
    if let (SendState::Referred(ticket), Some(lanes)) = (sending.state, connection.lanes()) {
        lanes.outward.withdraw(ticket);
    }
}
