//! [`Messages`]: the records and the bulk data of one group between this process and another.
//!
//! Messages of one direction are numbered, and each is sent in one of two ways: its bytes go in frames, or a frame has their address, and
//! the receiver fetches them from the sender's memory. The second way copies once, and takes a ticket (see [`Lane`]), by which the sender
//! can cancel the message at any moment. A receiver that cannot read the memory refuses the ticket, and gets the bytes in frames.

use std::collections::VecDeque;

use super::connection::{Connection, Kind};
use super::lane::{Answer, Lane, Ticket};
use crate::comm::message_passing::LinkError;

/// Messages up to this length are always sent in frames, which takes less time than the receiver's answer to a ticket.
const SHORT_BYTES: usize = 16 << 10;

/// A message that the receiver fetches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reference {
    pub(super) ticket: Ticket,
    pub(super) address: u64,
    pub(super) bytes: usize,
}

impl Reference {
    fn encode(self, message: u64) -> [u8; 40] {
        let [index, word] = Lane::words(self.ticket);
        let mut bytes = [0; 40];
        let words = [message, index, word, self.address, self.bytes as u64];
        bytes.chunks_exact_mut(8).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; 32] = bytes.try_into().ok()?;
        let word = |index: usize| u64::from_le_bytes(std::array::from_fn(|at| bytes[8 * index + at]));
        Some(Self { ticket: Lane::of_words([word(0), word(1)]), address: word(2), bytes: word(3) as usize })
    }
}

/// A message, or bytes of one, that has arrived before this process receives it.
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
    /// The message waits for a free ticket.
    Waiting,
    /// This many bytes have been put in frames.
    Framed(usize),
    Referred(Ticket),
    Fetched,
}

/// The progress of a message to receive.
#[derive(Clone, Copy, Debug)]
pub(super) enum Received {
    /// The message is complete, and is no longer known here.
    All,
    /// The rest of the message has not arrived.
    Waiting,
    /// The message has to be fetched.
    Fetch(Reference),
}

/// The messages of a group with one peer.
#[derive(Debug, Default)]
pub(super) struct Messages {
    /// Records that were received, encoded.
    pub(super) records: VecDeque<Box<[u8]>>,
    /// Messages that have arrived early, with their numbers.
    arrivals: VecDeque<(u64, Arrival)>,
    receiving: VecDeque<Receiving>,
    sending: VecDeque<Sending>,
    /// The numbers of messages that this process has started to receive, and to send.
    received: u64,
    sent: u64,
    /// Whether the peer has left the group, and whether this process has.
    pub(super) has_left: bool,
    is_closed: bool,
    /// The first protocol violation of the peer.
    error: Option<LinkError>,
}

// SAFETY: the memory behind the addresses is borrowed by the calls that have started the messages, until these are complete or cancelled;
// it is accessed only under the lock that guards this.
unsafe impl Send for Messages {}

impl Messages {
    /// Whether neither process uses the group any more.
    pub(super) fn is_over(&self) -> bool {
        self.has_left && self.is_closed
    }

    /// Drops all messages, because this process has left the group.
    pub(super) fn close(&mut self, connection: &Connection) {
        self.sending.iter().for_each(|sending| withdraw(sending, connection));
        *self = Messages { has_left: self.has_left, is_closed: true, ..Messages::default() };
    }

    /// Processes a received frame.
    pub(super) fn take(&mut self, kind: Kind, payload: &[u8]) {
        match kind {
            Kind::Left => self.has_left = true,
            _ if self.is_closed => {}
            Kind::Record => self.records.push_back(payload.into()),
            Kind::Bytes | Kind::Reference => {
                let taken = payload.split_first_chunk().ok_or("a message without a number".to_owned());
                let taken = taken.and_then(|(number, payload)| {
                    let number = u64::from_le_bytes(*number);
                    if kind == Kind::Bytes {
                        self.take_bytes(number, payload)
                    } else {
                        self.take_reference(number, payload)
                    }
                });
                if let Err(reason) = taken {
                    let reason = format!(
                        "a peer sent {reason}, which no rank of this version sends here: all ranks need one version of \
                         gradsync"
                    );
                    self.error.get_or_insert(LinkError(reason));
                }
            }
            Kind::Taken => {}
        }
    }

    fn receiving(&mut self, number: u64) -> Option<&mut Receiving> {
        self.receiving.iter_mut().find(|receiving| receiving.number == number)
    }

    fn take_bytes(&mut self, number: u64, bytes: &[u8]) -> Result<(), String> {
        let Some(next) = self.receiving(number) else {
            self.arrivals.push_back((number, Arrival::Bytes(bytes.to_vec())));
            return Ok(());
        };
        let room = next.bytes - next.filled;
        if bytes.len() > room || next.reference.is_some() {
            return Err(format!("{} bytes of a message that lacks {room}", bytes.len()));
        }
        // SAFETY: within the memory of the message, which is this message's until it is over or cancelled.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), next.start.add(next.filled), bytes.len()) };
        next.filled += bytes.len();
        Ok(())
    }

    fn take_reference(&mut self, number: u64, payload: &[u8]) -> Result<(), String> {
        let reference = Reference::decode(payload).ok_or_else(|| format!("a reference of {} bytes", payload.len()))?;
        let Some(next) = self.receiving(number) else {
            self.arrivals.push_back((number, Arrival::Reference(reference)));
            return Ok(());
        };
        next.refer(reference)
    }

    /// Whether data of the next message to receive have arrived.
    pub(super) fn has_arrived(&self) -> bool {
        self.arrivals.iter().any(|(number, _)| *number == self.received + 1)
    }

    /// Starts to receive a message; returns its number.
    pub(super) fn start_receiving(&mut self, start: *mut u8, bytes: usize) -> u64 {
        self.received += 1;
        let own = self.received;
        self.receiving.push_back(Receiving { number: own, start, bytes, filled: 0, reference: None });
        let (arrived, others) = std::mem::take(&mut self.arrivals).into_iter().partition(|(number, _)| *number == own);
        self.arrivals = others;
        let arrived: VecDeque<(u64, Arrival)> = arrived;
        for (_, arrival) in arrived {
            let taken = match arrival {
                Arrival::Bytes(bytes) => self.take_bytes(own, &bytes),
                Arrival::Reference(reference) => self.receiving(own).map_or(Ok(()), |next| next.refer(reference)),
            };
            taken.unwrap_or_else(|reason| _ = self.error.get_or_insert(LinkError(reason)));
        }
        own
    }

    /// Returns the progress of a message.
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

    /// Records that all bytes of a message have been fetched, or that they will come in frames instead.
    pub(super) fn note_answer(&mut self, number: u64, answer: Answer) {
        if let Some(message) = self.receiving(number) {
            message.reference = None;
            message.filled = if answer == Answer::Fetched { message.bytes } else { 0 };
        }
    }

    /// Cancels a message, whose memory is no longer used.
    pub(super) fn cancel_receiving(&mut self, number: u64) {
        self.receiving.retain(|receiving| receiving.number != number);
    }

    /// Starts to send a message; returns its number.
    pub(super) fn start_sending(&mut self, start: *const u8, bytes: usize, can_refer: bool) -> u64 {
        self.sent += 1;
        let state = if can_refer && bytes > SHORT_BYTES { SendState::Waiting } else { SendState::Framed(0) };
        self.sending.push_back(Sending { number: self.sent, start, bytes, state });
        self.sent
    }

    /// Sends as many bytes as there is room for.
    pub(super) fn send(&mut self, group: u64, connection: &mut Connection) {
        for sending in &mut self.sending {
            sending.advance(group, connection);
        }
    }

    /// Whether a message is sent, and its memory no longer in use.
    pub(super) fn sent(&mut self, number: u64, connection: &Connection) -> bool {
        let place = self.sending.iter().position(|sending| sending.number == number).expect("it was started");
        let is_out = match self.sending[place].state {
            SendState::Framed(framed) => framed == self.sending[place].bytes && connection.queued() == 0,
            SendState::Waiting | SendState::Referred(_) => false,
            SendState::Fetched => true,
        };
        if is_out {
            self.sending.remove(place);
        }
        is_out
    }

    /// Cancels a message, whose memory is no longer used. The peer never receives it.
    pub(super) fn cancel_sending(&mut self, number: u64, connection: &Connection) {
        self.sending
            .iter()
            .filter(|sending| sending.number == number)
            .for_each(|sending| withdraw(sending, connection));
        self.sending.retain(|sending| sending.number != number);
    }
}

impl Receiving {
    fn refer(&mut self, reference: Reference) -> Result<(), String> {
        if self.filled != 0 || reference.bytes != self.bytes {
            return Err(format!("a message of {} bytes in place of one of {}", reference.bytes, self.bytes));
        }
        self.reference = Some(reference);
        Ok(())
    }
}

impl Sending {
    fn advance(&mut self, group: u64, connection: &mut Connection) {
        if let SendState::Referred(ticket) = self.state {
            match connection.lanes().and_then(|lanes| lanes.outward.answer(ticket)) {
                Some(Answer::Fetched) => self.state = SendState::Fetched,
                Some(Answer::Refused) => self.state = SendState::Framed(0),
                None => {}
            }
        }
        if self.state == SendState::Waiting
            && let Some(ticket) = connection.lanes().and_then(|lanes| lanes.outward.issue())
        {
            let address = self.start.expose_provenance() as u64;
            let reference = Reference { ticket, address, bytes: self.bytes };
            connection.push(Kind::Reference, group, &reference.encode(self.number));
            self.state = SendState::Referred(ticket);
        }
        let SendState::Framed(mut framed) = self.state else { return };
        while framed < self.bytes {
            let bytes = connection.room().min(self.bytes - framed);
            if bytes == 0 {
                break;
            }
            // SAFETY: within the memory of the message, which stays as it is until the message is over or cancelled.
            let piece = unsafe { std::slice::from_raw_parts(self.start.add(framed), bytes) };
            connection.push_bytes(group, self.number, piece);
            framed += bytes;
        }
        self.state = SendState::Framed(framed);
    }
}

fn withdraw(sending: &Sending, connection: &Connection) {
    if let (SendState::Referred(ticket), Some(lanes)) = (sending.state, connection.lanes()) {
        lanes.outward.withdraw(ticket);
    }
}
