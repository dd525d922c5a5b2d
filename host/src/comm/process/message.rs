//! [`Messages`]: the records and the bulk data of one group between this process and another.
//!
//! Messages of one direction are numbered. Their bytes are sent in frames, or the receiver reads them where they are (`single_copy`).

use std::collections::VecDeque;

use super::connection::{Connection, FrameKind};
use super::single_copy::{self, Offer, Reading};
use crate::comm::message_passing::LinkError;

/// A message that this process receives.
#[derive(Debug)]
struct Receiving {
    number: u64,
    start: *mut u8,
    bytes: usize,
    filled: usize,
    /// The sender's offer, until it is answered.
    offer: Option<Offer>,
}

/// A message that this process sends.
#[derive(Debug)]
struct Sending {
    number: u64,
    start: *const u8,
    bytes: usize,
    /// This many bytes have been put in frames; all of them once the receiver has read the message.
    framed: usize,
    /// Whether the message is offered, and not answered.
    is_offered: bool,
}

/// The messages of a group with one peer.
#[derive(Debug, Default)]
pub(super) struct Messages {
    /// Records that were received, encoded.
    pub(super) records: VecDeque<Box<[u8]>>,
    /// Bytes and offers of messages that have arrived early, with the messages' numbers.
    arrivals: VecDeque<(u64, FrameKind, Vec<u8>)>,
    receiving: VecDeque<Receiving>,
    sending: VecDeque<Sending>,
    /// The numbers of messages that this process has started to receive, and to send.
    received: u64,
    sent: u64,
    /// Whether the peer has refused an offer, so that this process makes no more.
    is_refused: bool,
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
        self.sending.iter().for_each(|sending| sending.withdraw(connection));
        *self = Messages { has_left: self.has_left, is_closed: true, ..Messages::default() };
    }

    /// Processes a received frame.
    pub(super) fn take(&mut self, kind: FrameKind, payload: &[u8]) {
        match kind {
            FrameKind::Left => self.has_left = true,
            _ if self.is_closed => {}
            FrameKind::Record => self.records.push_back(payload.into()),
            FrameKind::Bytes | FrameKind::Offer | FrameKind::Answer => {
                let taken = payload.split_first_chunk().ok_or("a message without a number".to_owned());
                let taken = taken.and_then(|(number, rest)| {
                    let number = u64::from_le_bytes(*number);
                    if kind == FrameKind::Answer {
                        self.take_answer(number, rest)
                    } else {
                        self.take_data(number, kind, rest)
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
            FrameKind::Taken => {}
        }
    }

    /// Takes the next bytes of a message, or the offer of all of them.
    fn take_data(&mut self, number: u64, kind: FrameKind, bytes: &[u8]) -> Result<(), String> {
        let Some(next) = self.receiving.iter_mut().find(|receiving| receiving.number == number) else {
            self.arrivals.push_back((number, kind, bytes.to_vec()));
            return Ok(());
        };
        if kind == FrameKind::Offer {
            next.offer = Some(Offer::decode(bytes, next.bytes)?);
            return Ok(());
        }
        let room = next.bytes - next.filled;
        if bytes.len() > room || next.offer.is_some() {
            return Err(format!("{} bytes of a message that lacks {room}", bytes.len()));
        }
        // SAFETY: within the memory of the message, which is this message's until it is over or cancelled.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), next.start.add(next.filled), bytes.len()) };
        next.filled += bytes.len();
        Ok(())
    }

    /// Takes the answer to an offer, which may be cancelled.
    fn take_answer(&mut self, number: u64, answer: &[u8]) -> Result<(), String> {
        let &[is_read @ (0 | 1)] = answer else { return Err(format!("an answer of {} bytes", answer.len())) };
        self.is_refused |= is_read == 0;
        let offered = self.sending.iter_mut().find(|sending| sending.number == number && sending.is_offered);
        if let Some(sending) = offered {
            sending.is_offered = false;
            sending.framed = if is_read == 1 { sending.bytes } else { 0 };
        }
        Ok(())
    }

    /// Whether data of the next message to receive have arrived.
    pub(super) fn has_arrived(&self) -> bool {
        self.arrivals.iter().any(|(number, ..)| *number == self.received + 1)
    }

    /// Starts to receive a message; returns its number.
    pub(super) fn start_receiving(&mut self, start: *mut u8, bytes: usize) -> u64 {
        self.received += 1;
        let own = self.received;
        self.receiving.push_back(Receiving { number: own, start, bytes, filled: 0, offer: None });
        let (arrived, others) = std::mem::take(&mut self.arrivals).into_iter().partition(|(number, ..)| *number == own);
        self.arrivals = others;
        let arrived: VecDeque<(u64, FrameKind, Vec<u8>)> = arrived;
        for (_, kind, bytes) in arrived {
            self.take_data(own, kind, &bytes).unwrap_or_else(|reason| _ = self.error.get_or_insert(LinkError(reason)));
        }
        own
    }

    /// Whether a message is complete; then, and after an error, it is no longer known here, and its memory no longer in use.
    pub(super) fn received(&mut self, number: u64) -> Result<bool, LinkError> {
        if let Some(error) = self.error.clone() {
            self.cancel_receiving(number);
            return Err(error);
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
    pub(super) fn start_sending(
        &mut self,
        group: u64,
        connection: &mut Connection,
        start: *const u8,
        bytes: usize,
    ) -> u64 {
        self.sent += 1;
        let offer = if self.is_refused { None } else { Offer::new(start, bytes, connection) };
        if let Some(offer) = offer {
            connection.push_message(FrameKind::Offer, group, self.sent, &offer.encode());
        }
        self.sending.push_back(Sending { number: self.sent, start, bytes, framed: 0, is_offered: offer.is_some() });
        self.sent
    }

    /// Sends as many bytes as there is room for, and reads the next bytes of offered messages.
    pub(super) fn advance(&mut self, group: u64, connection: &mut Connection) {
        self.sending.iter_mut().for_each(|sending| sending.advance(group, connection));
        self.receiving.iter_mut().for_each(|receiving| receiving.advance(group, connection));
    }

    /// Whether a message is sent; then, and after an error, its memory is no longer in use.
    pub(super) fn sent(&mut self, number: u64, connection: &Connection) -> Result<bool, LinkError> {
        if let Some(error) = self.error.clone() {
            self.cancel_sending(number, connection);
            return Err(error);
        }
        let place = self.sending.iter().position(|sending| sending.number == number).expect("it was started");
        let is_out = self.sending[place].framed == self.sending[place].bytes && connection.queued() == 0;
        if is_out {
            self.sending.remove(place);
        }
        Ok(is_out)
    }

    /// Cancels a message, whose memory is no longer used. The peer never receives it.
    pub(super) fn cancel_sending(&mut self, number: u64, connection: &Connection) {
        self.sending.iter().filter(|sending| sending.number == number).for_each(|sending| sending.withdraw(connection));
        self.sending.retain(|sending| sending.number != number);
    }
}

impl Receiving {
    /// Reads the next bytes of an offered message, and answers after the last.
    fn advance(&mut self, group: u64, connection: &mut Connection) {
        let Some(offer) = &mut self.offer else { return };
        // SAFETY: the memory of the message, which is this message's until it is over or cancelled.
        let reading = unsafe { offer.read(self.start, connection) };
        if reading != Reading::Unfinished {
            let is_read = reading == Reading::Finished;
            self.offer = None;
            self.filled = if is_read { self.bytes } else { 0 };
            connection.push_message(FrameKind::Answer, group, self.number, &[is_read.into()]);
        }
    }
}

impl Sending {
    fn advance(&mut self, group: u64, connection: &mut Connection) {
        while self.framed < self.bytes && !self.is_offered {
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

    /// Ends the offer of a message that is cancelled.
    fn withdraw(&self, connection: &Connection) {
        if self.is_offered {
            single_copy::cancel(connection);
        }
    }
}
