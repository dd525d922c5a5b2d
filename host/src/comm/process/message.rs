//! [`Messages`]: the records and the bulk data of one group between this process and another.
//!
//! Messages of one direction are numbered, and their bytes are sent in frames.

use std::collections::VecDeque;

use super::connection::{Connection, Kind};
use crate::comm::message_passing::LinkError;

/// A message that this process receives.
#[derive(Debug)]
struct Receiving {
    number: u64,
    start: *mut u8,
    bytes: usize,
    filled: usize,
}

/// A message that this process sends.
#[derive(Debug)]
struct Sending {
    number: u64,
    start: *const u8,
    bytes: usize,
    /// This many bytes have been put in frames.
    framed: usize,
}

/// The messages of a group with one peer.
#[derive(Debug, Default)]
pub(super) struct Messages {
    /// Records that were received, encoded.
    pub(super) records: VecDeque<Box<[u8]>>,
    /// Bytes of messages that have arrived early, with the messages' numbers.
    arrivals: VecDeque<(u64, Vec<u8>)>,
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
    pub(super) fn close(&mut self) {
        *self = Messages { has_left: self.has_left, is_closed: true, ..Messages::default() };
    }

    /// Processes a received frame.
    pub(super) fn take(&mut self, kind: Kind, payload: &[u8]) {
        match kind {
            Kind::Left => self.has_left = true,
            _ if self.is_closed => {}
            Kind::Record => self.records.push_back(payload.into()),
            Kind::Bytes => {
                let taken = payload.split_first_chunk().ok_or("a message without a number".to_owned());
                let taken = taken.and_then(|(number, bytes)| self.take_bytes(u64::from_le_bytes(*number), bytes));
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

    fn take_bytes(&mut self, number: u64, bytes: &[u8]) -> Result<(), String> {
        let Some(next) = self.receiving.iter_mut().find(|receiving| receiving.number == number) else {
            self.arrivals.push_back((number, bytes.to_vec()));
            return Ok(());
        };
        let room = next.bytes - next.filled;
        if bytes.len() > room {
            return Err(format!("{} bytes of a message that lacks {room}", bytes.len()));
        }
        // SAFETY: within the memory of the message, which is this message's until it is over or cancelled.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), next.start.add(next.filled), bytes.len()) };
        next.filled += bytes.len();
        Ok(())
    }

    /// Whether data of the next message to receive have arrived.
    pub(super) fn has_arrived(&self) -> bool {
        self.arrivals.iter().any(|(number, _)| *number == self.received + 1)
    }

    /// Starts to receive a message; returns its number.
    pub(super) fn start_receiving(&mut self, start: *mut u8, bytes: usize) -> u64 {
        self.received += 1;
        let own = self.received;
        self.receiving.push_back(Receiving { number: own, start, bytes, filled: 0 });
        let (arrived, others) = std::mem::take(&mut self.arrivals).into_iter().partition(|(number, _)| *number == own);
        self.arrivals = others;
        let arrived: VecDeque<(u64, Vec<u8>)> = arrived;
        for (_, bytes) in arrived {
            self.take_bytes(own, &bytes).unwrap_or_else(|reason| _ = self.error.get_or_insert(LinkError(reason)));
        }
        own
    }

    /// Whether a message is complete; then it is no longer known here.
    pub(super) fn received(&mut self, number: u64) -> Result<bool, LinkError> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        let place = self.receiving.iter().position(|receiving| receiving.number == number).expect("it was started");
        let is_complete = self.receiving[place].filled == self.receiving[place].bytes;
        if is_complete {
            self.receiving.remove(place);
        }
        Ok(is_complete)
    }

    /// Cancels a message, whose memory is no longer used.
    pub(super) fn cancel_receiving(&mut self, number: u64) {
        self.receiving.retain(|receiving| receiving.number != number);
    }

    /// Starts to send a message; returns its number.
    pub(super) fn start_sending(&mut self, start: *const u8, bytes: usize) -> u64 {
        self.sent += 1;
        self.sending.push_back(Sending { number: self.sent, start, bytes, framed: 0 });
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
        let is_out = self.sending[place].framed == self.sending[place].bytes && connection.queued() == 0;
        if is_out {
            self.sending.remove(place);
        }
        is_out
    }

    /// Cancels a message, whose memory is no longer used. The peer never receives it.
    pub(super) fn cancel_sending(&mut self, number: u64) {
        self.sending.retain(|sending| sending.number != number);
    }
}

impl Sending {
    fn advance(&mut self, group: u64, connection: &mut Connection) {
        while self.framed < self.bytes {
            let bytes = connection.room().min(self.bytes - self.framed);
            if bytes == 0 {
                break;
            }
            // SAFETY: within the memory of the message, which stays as it is until the message is over or cancelled.
            let piece = unsafe { std::slice::from_raw_parts(self.start.add(self.framed), bytes) };
            connection.push_bytes(group, self.number, piece);
            self.framed += bytes;
        }
    }
}
