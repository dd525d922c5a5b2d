//! Shared-memory mailboxes, by which ranks of one machine run a handshake without messages. Every rank writes to its own mailbox, and all
//! other ranks read it.
//!
//! A handshake is a sequence of rounds, which all ranks take in the same order. In each round, a rank publishes an entry with its record
//! and, if the round has one, a payload; then it raises the number of the round, which the other ranks poll. A rank enters the next round
//! only after it has read every rank's entry of this one. So no rank is more than one round ahead of another, and two entries and two
//! payload slots, used in turn, are enough.
//!
//! A rank whose wait fails closes the round: it writes its failure to its own mailbox and closes the counter ([`Closable`]) of the first rank
//! that has not arrived, which can no longer enter the round. So every rank finds the same outcome, and a process that was stopped learns the
//! decision of the others when it resumes. The ends of exposure epochs are closed in the same way.
//!
//! Mailboxes never wait. Other failures are sent as records, and a rank that has failed joins no further rounds.

use std::borrow::Cow;
use std::cell::Cell;
use std::io;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::record::{Record, shortened};
use crate::engine::{Closable, Closing};
use crate::error::{Call, CommError, Operation};
use crate::memory::file::{FileHandle, Mapped, MemoryFile};
use crate::memory::shared_bytes::SharedBytes;

/// The most payload bytes of all ranks together, and the size of each payload slot. Half and twice this size were slower.
pub(super) const MAX_TOTAL_BYTES: usize = 256 << 10;
/// The most ranks of a group with mailboxes: every rank polls all of them.
pub(super) const MOST_RANKS: usize = 1024;

/// The layout of a mailbox. The counters that other ranks poll are on separate cache lines.
const ROUND_AT: usize = 0;
const EPOCHS_AT: usize = 64;
const FAILED_EPOCH_AT: usize = 72;
const ENTRIES_AT: usize = 128;
const ENTRY_BYTES: usize = 256;
/// The failure with which this rank has closed a round, or the end of an epoch.
const FAILURE_AT: usize = 1024;
const FAILURE_BYTES: usize = 2048;
const DATA_AT: usize = 4096;
const MAILBOX_BYTES: usize = DATA_AT + 2 * MAX_TOTAL_BYTES;
/// The number of polls before the caller gets control again.
const POLLS: usize = 20;

/// The call of a rank that has left its exposure epoch, as errors quote it; ranks within the epoch are in the same operation.
pub(super) fn end_of_epoch() -> Call {
    Call::without_data(Operation::SharedWindows)
}

/// The bytes that a rank publishes with a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Payload<'a> {
    bytes: &'a [u8],
    /// Whether the bytes are one shard for every rank, in rank order; otherwise every rank gets all of them.
    are_shards: bool,
}

impl<'a> Payload<'a> {
    pub(super) const EMPTY: Payload<'static> = Payload { bytes: &[], are_shards: false };

    pub(super) fn for_all(bytes: &'a [u8]) -> Self {
        Self { bytes, are_shards: false }
    }

    pub(super) fn shards(bytes: &'a [u8]) -> Self {
        Self { bytes, are_shards: true }
    }

    /// The bytes that one of `world_size` ranks gets.
    pub(super) fn piece(self, rank: usize, world_size: usize) -> &'a [u8] {
        if !self.are_shards {
            return self.bytes;
        }
        let bytes = self.bytes.len() / world_size;
        &self.bytes[rank * bytes..(rank + 1) * bytes]
    }
}

/// Each rank's payload for this rank.
pub(super) type Payloads<'a> = Vec<Cow<'a, [u8]>>;

/// A mailbox's entry for one round.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Entry {
    /// The record, without the eager bytes of a call, which are in the payload slot.
    pub(super) record: Record,
    payload_bytes: usize,
    are_shards: bool,
}

/// A [`Closable`] in a rank's mailbox.
struct ClosableCounter<'a, M> {
    memory: &'a M,
    at: usize,
}

impl<M: SharedBytes> ClosableCounter<'_, M> {
    fn load(&self) -> Closable {
        Closable(self.memory.load(self.at, Ordering::Acquire))
    }

    /// Raises the counter to `to`, and publishes all earlier writes to ranks that read it. If another rank has closed the counter,
    /// returns that rank as the error.
    fn raise(&self, to: u64) -> Result<(), usize> {
        let raised = self.memory.compare_exchange(self.at, to - 1, to, Ordering::AcqRel, Ordering::Acquire);
        // Only a broken rank raises it instead of this one, and no rank has this number.
        raised.map(drop).map_err(|word| Closable(word).closer().unwrap_or(usize::MAX))
    }

    /// Closes the counter as `rank`, unless it has reached `before`. Returns the rank that has closed it, if one has.
    fn close(&self, before: u64, rank: usize) -> Option<usize> {
        let mut closer = None;
        let closing = |word| match Closable(word).close(before, rank) {
            Closing::Closes(closed) => {
                closer = Some(rank);
                Some(closed.0)
            }
            Closing::ClosedBy(other) => {
                closer = Some(other);
                None
            }
            Closing::Reached => {
                closer = None;
                None
            }
        };
        // The error is the value of a counter that this rank has not closed.
        let _ = self.memory.fetch_update(self.at, Ordering::AcqRel, Ordering::Acquire, closing);
        closer
    }
}

/// One rank's mailbox, as mapped by this process.
#[derive(Debug)]
struct Mailbox<M>(M);

/// Where the entry of a round is.
fn entry_at(round: u64) -> usize {
    ENTRIES_AT + (round % 2) as usize * ENTRY_BYTES
}

/// Where the payload slot of a call is.
fn slot_at(call: u64) -> usize {
    DATA_AT + (call % 2) as usize * MAX_TOTAL_BYTES
}

impl Mailbox<Mapped> {
    /// The payload slot of a call.
    fn slot(&self, call: u64) -> *mut u8 {
        self.0.start().wrapping_add(slot_at(call))
    }
}

impl<M: SharedBytes> Mailbox<M> {
    /// The number of rounds that the mailbox's rank has entered.
    fn rounds(&self) -> ClosableCounter<'_, M> {
        ClosableCounter { memory: &self.0, at: ROUND_AT }
    }

    /// The number of exposure epochs that the mailbox's rank has ended.
    fn epochs(&self) -> ClosableCounter<'_, M> {
        ClosableCounter { memory: &self.0, at: EPOCHS_AT }
    }

    /// Whether the mailbox's rank has ended this many epochs, and if so, whether it had failed by the end of the last of these. The rank
    /// may have ended more epochs since, and failed in them.
    fn has_ended(&self, epochs: u64) -> Option<bool> {
        if self.epochs().load().number() < epochs {
            return None;
        }
        let failed = self.0.load(FAILED_EPOCH_AT, Ordering::Relaxed);
        Some((1..=epochs).contains(&failed))
    }
}

/// The mailboxes of all ranks.
#[derive(Debug)]
pub(super) struct Mailboxes<M = Mapped> {
    rank: usize,
    mailboxes: Vec<Mailbox<M>>,
    /// The number of rounds that this rank has entered.
    round: Cell<u64>,
    /// The number of payload slots that this rank has published, with a call or by [`advance`](Self::advance).
    calls: Cell<u64>,
    /// The number of exposure epochs that this rank is in, and the number of epochs that it has ended.
    open_epochs: Cell<u64>,
    ended_epochs: Cell<u64>,
}

impl Mailboxes {
    /// Allocates this rank's mailbox.
    pub(super) fn make() -> io::Result<MemoryFile> {
        MemoryFile::zeroed(MAILBOX_BYTES)
    }

    /// Maps the mailboxes of all ranks. The owner may drop the file once all ranks have mapped it: the memory stays until no rank has it
    /// mapped.
    pub(super) fn find(handles: &[FileHandle], rank: usize) -> io::Result<Self> {
        let mailboxes = handles.iter().map(|handle| handle.map(MAILBOX_BYTES)).collect::<io::Result<_>>()?;
        Ok(Self::new(mailboxes, rank))
    }

    /// The slot for this rank's payload in the round after the next [`advance`](Self::advance): [`MAX_TOTAL_BYTES`], aligned for all
    /// dtypes. No other rank reads it until this rank enters that round.
    pub(super) fn next_slot(&self) -> *mut u8 {
        self.own().slot(self.calls.get() + 1)
    }

    /// The slot that a rank has published for this rank's last round, after all ranks have advanced; valid until this rank enters the
    /// next round.
    pub(super) fn slot(&self, peer: usize) -> *const u8 {
        self.mailboxes[peer].slot(self.calls.get()).cast_const()
    }
}

impl<M: SharedBytes> Mailboxes<M> {
    /// The mailboxes in the memory of each rank, which is zero.
    fn new(mailboxes: Vec<M>, rank: usize) -> Self {
        let (mailboxes, zero) = (mailboxes.into_iter().map(Mailbox).collect(), || Cell::new(0));
        Self { rank, mailboxes, round: zero(), calls: zero(), open_epochs: zero(), ended_epochs: zero() }
    }

    fn own(&self) -> &Mailbox<M> {
        &self.mailboxes[self.rank]
    }

    fn others(&self) -> impl Iterator<Item = &Mailbox<M>> {
        self.mailboxes.iter().enumerate().filter(|&(rank, _)| rank != self.rank).map(|(_, mailbox)| mailbox)
    }

    /// Enters the next round with this record, and publishes the payload if the record is a call.
    ///
    /// # Errors
    /// The failure with which another rank has closed the round.
    pub(super) fn publish(&self, record: &Record, payload: Payload<'_>) -> Result<(), CommError> {
        let round = self.round.get() + 1;
        if let Record::Call { .. } = record {
            self.calls.set(self.calls.get() + 1);
            assert!(payload.bytes.len() <= MAX_TOTAL_BYTES, "{} bytes", payload.bytes.len());
            // SAFETY: the slot has this much room, and no rank reads it any more: it belonged to the call before the last.
            unsafe { self.own().0.write(slot_at(self.calls.get()), payload.bytes) };
        }
        let entry =
            Entry { record: record.clone(), payload_bytes: payload.bytes.len(), are_shards: payload.are_shards };
        let mut room = [0; ENTRY_BYTES];
        postcard::to_slice(&entry, &mut room).expect("a word has room");
        // SAFETY: in this rank's mailbox; no rank reads this entry any more: it belonged to the round before the last.
        unsafe { self.own().0.write(entry_at(round), &room) };
        self.round.set(round);
        self.own().rounds().raise(round).map_err(|closer| self.failure_of(closer))
    }

    /// Closes this rank's last round, with this failure, to the ranks that have not arrived.
    ///
    /// # Errors
    /// The failure that the round is closed with, which may be the one of another rank; none if all ranks have arrived after all.
    pub(super) fn close_round(&self, failure: &CommError) -> Result<(), CommError> {
        self.close(failure, Mailbox::rounds, self.round.get())
    }

    /// Returns the failure that this rank's last round was closed with, if the counters of missing ranks show one.
    pub(super) fn check_round(&self) -> Result<(), CommError> {
        self.check(Mailbox::rounds, self.round.get())
    }

    /// Like [`close_round`](Self::close_round), for the end of this rank's last epoch.
    pub(super) fn close_epochs(&self, failure: &CommError) -> Result<(), CommError> {
        self.close(failure, Mailbox::epochs, self.ended_epochs.get())
    }

    pub(super) fn check_epochs(&self) -> Result<(), CommError> {
        self.check(Mailbox::epochs, self.ended_epochs.get())
    }

    /// Closes the first counter that has not reached `before`. All ranks try the same counters in the same order, and a counter is closed
    /// by one rank only, so all ranks agree on the outcome.
    fn close(
        &self,
        failure: &CommError,
        of: fn(&Mailbox<M>) -> ClosableCounter<'_, M>,
        before: u64,
    ) -> Result<(), CommError> {
        let record = shortened(Record::Failed { completed: 0, error: failure.clone() });
        let mut room = [0; FAILURE_BYTES];
        postcard::to_slice(&record, &mut room).expect("a failure has room");
        // SAFETY: in this rank's mailbox; no rank reads it before this rank has closed a counter, which it does once.
        unsafe { self.own().0.write(FAILURE_AT, &room) };
        match self.mailboxes.iter().find_map(|mailbox| of(mailbox).close(before, self.rank)) {
            None => Ok(()),
            Some(closer) if closer == self.rank => Err(failure.clone()),
            Some(closer) => Err(self.failure_of(closer)),
        }
    }

    fn check(&self, of: fn(&Mailbox<M>) -> ClosableCounter<'_, M>, before: u64) -> Result<(), CommError> {
        // One load for both: a counter that has reached the step may be closed later, before another step.
        let mut missing = self.others().map(|mailbox| of(mailbox).load()).filter(|counter| counter.number() < before);
        missing.find_map(Closable::closer).map_or(Ok(()), |closer| Err(self.failure_of(closer)))
    }

    /// The failure with which `closer` has closed a counter.
    fn failure_of(&self, closer: usize) -> CommError {
        let broken = |rank, reason| CommError::Transport { operation: Operation::Exchange, rank, reason };
        let Some(mailbox) = self.mailboxes.get(closer) else {
            let reason = "another process has written to its mailbox what no rank of this version writes".into();
            return broken(self.rank, reason);
        };
        // SAFETY: written before that rank closed the counter, and never again.
        let room = unsafe { mailbox.0.bytes(FAILURE_AT, FAILURE_BYTES) }.to_vec();
        match postcard::from_bytes(&room).unwrap_or_else(|error| Record::unreadable(closer, &error)) {
            Record::Failed { error, .. } => error,
            record => broken(closer, format!("it has given up with {record:?}, where no rank of this version does")),
        }
    }

    /// Whether a rank has entered this rank's last round.
    pub(super) fn has_arrived(&self, peer: usize) -> bool {
        self.has_come(&self.mailboxes[peer], self.round.get())
    }

    fn has_come(&self, mailbox: &Mailbox<M>, round: u64) -> bool {
        mailbox.rounds().load().number() >= round
    }

    /// Polls whether all other ranks have entered this rank's last round.
    pub(super) fn have_all_arrived(&self) -> bool {
        let round = self.round.get();
        self.look(|mailbox| self.has_come(mailbox, round))
    }

    fn look(&self, is_so: impl Fn(&Mailbox<M>) -> bool) -> bool {
        (0..POLLS).any(|_| {
            let is_so = self.others().all(&is_so);
            if !is_so {
                std::hint::spin_loop();
            }
            is_so
        })
    }

    /// The entry of a rank that [has arrived](Self::has_arrived), for this rank's last round.
    pub(super) fn entry(&self, peer: usize) -> Entry {
        self.read(peer, self.round.get())
    }

    /// The call of a rank that is not in this rank's last call any more, as far as its mailbox shows: it has left an exposure epoch which this
    /// rank is in, or is one round ahead.
    pub(super) fn call_elsewhere(&self, peer: usize) -> Option<Call> {
        let ended = || self.has_ended_early(peer).then(end_of_epoch);
        self.call_ahead(peer).or_else(ended)
    }

    /// The call of a rank that is one round ahead of this rank.
    fn call_ahead(&self, peer: usize) -> Option<Call> {
        let round = self.round.get() + 1;
        if !self.has_come(&self.mailboxes[peer], round) {
            return None;
        }
        match self.read(peer, round).record {
            Record::Call { call, .. } => Some(call),
            _ => None,
        }
    }

    /// Reads the entry of a rank for `round`, which is this rank's last round or the next.
    fn read(&self, peer: usize, round: u64) -> Entry {
        // SAFETY: the peer does not overwrite this entry before this rank enters the next round.
        let bytes = unsafe { self.mailboxes[peer].0.bytes(entry_at(round), ENTRY_BYTES) };
        let room: [u8; ENTRY_BYTES] = bytes.try_into().expect("as many bytes");
        postcard::from_bytes(&room).unwrap_or_else(|error| Entry {
            record: Record::unreadable(peer, &error),
            payload_bytes: 0,
            are_shards: false,
        })
    }

    /// The payload that a rank published for this rank with the last call, given the rank's entry; valid until this rank makes the next
    /// call.
    pub(super) fn received(&self, peer: usize, entry: &Entry) -> &[u8] {
        let bytes = entry.payload_bytes.min(MAX_TOTAL_BYTES);
        // SAFETY: within the slot; the peer does not overwrite it before this rank enters the next call.
        let bytes = unsafe { self.mailboxes[peer].0.bytes(slot_at(self.calls.get()), bytes) };
        Payload { bytes, are_shards: entry.are_shards }.piece(self.rank, self.mailboxes.len())
    }

    /// Makes the next slot this rank's payload, for a round without a call: its length is equal on all ranks, and not published.
    pub(super) fn advance(&self) {
        self.calls.set(self.calls.get() + 1);
    }

    /// Begins an exposure epoch; all ranks do so after a call.
    pub(super) fn begin_epoch(&self) {
        self.open_epochs.set(self.open_epochs.get() + 1);
    }

    /// Whether this rank is in an exposure epoch, which does not end before all ranks have left it.
    pub(super) fn in_epoch(&self) -> bool {
        self.open_epochs.get() > 0
    }

    /// Publishes that this rank has left its last epoch, and whether it has failed.
    ///
    /// # Errors
    /// The failure with which another rank has closed the end of the epoch.
    pub(super) fn end_epoch(&self, has_failed: bool) -> Result<(), CommError> {
        self.open_epochs.set(self.open_epochs.get() - 1);
        self.ended_epochs.set(self.ended_epochs.get() + 1);
        let (ended, own) = (self.ended_epochs.get(), &self.own().0);
        let has_failed_in = || {
            if own.load(FAILED_EPOCH_AT, Ordering::Relaxed) == 0 {
                own.store(FAILED_EPOCH_AT, ended, Ordering::Relaxed);
            }
        };
        if has_failed {
            has_failed_in();
        }
        // A rank that reads the raised counter sees this rank's writes to its memory.
        self.own().epochs().raise(ended).map_err(|closer| {
            has_failed_in();
            // The closing mark stays: ranks that still wait for this step see that it was made, and that it failed.
            own.fetch_add(EPOCHS_AT, 1, Ordering::Release);
            self.failure_of(closer)
        })
    }

    /// Polls whether all other ranks have ended every epoch that this rank has ended.
    pub(super) fn have_all_ended(&self) -> bool {
        let ended = self.ended_epochs.get();
        self.look(|mailbox| mailbox.has_ended(ended).is_some())
    }

    /// Whether a rank has ended the epochs that this rank has ended, and if so, whether it had failed.
    pub(super) fn has_ended(&self, peer: usize) -> Option<bool> {
        self.mailboxes[peer].has_ended(self.ended_epochs.get())
    }

    /// Whether a rank that has not failed has ended an epoch that this rank is still in.
    fn has_ended_early(&self, peer: usize) -> bool {
        self.mailboxes[peer].has_ended(self.ended_epochs.get() + 1) == Some(false)
    }
}

#[cfg(test)]
mod model;
#[cfg(all(test, target_os = "linux"))]
mod tests;
