//! The handshake of all ranks before data move: ranks exchange their calls, compare them, and every rank learns of a failure.
//!
//! A collective has two rounds. In the first, every rank publishes its call, with its payload for every other rank, and waits for the
//! other calls until the deadline. In the second, it publishes that it proceeds; a rank that has given up publishes its failure instead,
//! so either all ranks move data or none does. Within an exposure epoch, the end of the epoch can replace the second round. Ranks that
//! share memory publish in their `mailbox`, other ranks send records; failures are always records. The second round has a deadline too,
//! which passes if a rank is stopped between the two rounds. With mailboxes, all ranks still agree on the outcome then; with records,
//! some ranks may proceed, and learn of the failure while their data move, or in their next call.
//!
//! The records of one rank arrive in order, so a record out of place is a mismatch. The handshake does not interpret payloads.

use std::borrow::Cow;
use std::cell::{Cell, RefCell, RefMut};
use std::time::Duration;

#[cfg(all(feature = "cuda", feature = "mpi"))]
use super::link::Requests;
use super::link::{Link, LinkError};
use super::mailbox::{Mailboxes, Payload};
use super::record::{EagerBytes, Record};
use super::scratch::Scratch;
use super::stream::{Stall, Stream};
use crate::engine;
use crate::error::{Call, CommError, Departure, Error, Operation, Result};
use crate::trace::CurrentCall;

/// How long a wait spins, and how long it sleeps between two polls afterwards.
const SPIN: Duration = Duration::from_millis(5);
const SLEEP: Duration = Duration::from_micros(100);
/// After this many pauses, a rank that polls mailboxes also receives records, such as failures.
const LISTENS_AFTER: u32 = 16;

/// Placeholder call of a rank that has left its exposure epoch, as errors quote it; ranks within the epoch are in the same operation.
pub(super) fn end_of_epoch() -> Call {
    Call::without_data(Operation::SharedWindows)
}

#[derive(Debug)]
pub(in crate::comm) struct Handshake {
    link: Box<dyn Link>,
    /// The mailboxes, if the ranks share the memory of one machine; other ranks exchange records.
    mailboxes: Option<Mailboxes>,
    deadline: Duration,
    /// The number of collectives that this rank has completed. A collective counts as completed between its steps.
    completed: Cell<u64>,
    /// The first failure; it refuses every later call.
    failure: RefCell<Option<CommError>>,
    /// The trace of this rank's calls.
    calls: CurrentCall,
    /// The workspace of transfers, kept from call to call: the system would clear new pages every time.
    workspace: RefCell<Scratch>,
}

/// A failure on its way to the caller.
#[derive(Debug)]
pub(in crate::comm) struct Failure {
    pub(in crate::comm) error: CommError,
    /// Whether this rank has to report the failure to the others, because they do not learn of it otherwise.
    pub(in crate::comm) is_unreported: bool,
}

impl Handshake {
    pub(super) fn new(link: Box<dyn Link>, deadline: Duration, calls: CurrentCall) -> Self {
        Handshake {
            link,
            mailboxes: None,
            deadline,
            completed: Cell::new(0),
            failure: RefCell::new(None),
            calls,
            workspace: RefCell::default(),
        }
    }

    /// Replaces records by mailboxes; all ranks have to do so.
    pub(super) fn set_mailboxes(&mut self, mailboxes: Mailboxes) {
        self.mailboxes = Some(mailboxes);
    }

    pub(super) fn mailboxes(&self) -> Option<&Mailboxes> {
        self.mailboxes.as_ref()
    }

    pub(in crate::comm) fn link(&self) -> &dyn Link {
        &*self.link
    }

    /// The trace of this rank's calls.
    pub(super) fn calls(&self) -> &CurrentCall {
        &self.calls
    }

    /// The workspace, with at least so many bytes, for one transfer.
    pub(super) fn workspace(&self, bytes: usize) -> RefMut<'_, Scratch> {
        let mut workspace = self.workspace.borrow_mut();
        workspace.reserve(bytes);
        workspace
    }

    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    pub(super) fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// The failure of this communicator, if any, as the error of `operation`.
    pub(in crate::comm) fn check(&self, operation: Operation) -> Result<()> {
        self.failure.borrow().clone().map_or(Ok(()), |failure| Err(failure.seen_in(operation).into()))
    }

    /// Whether this communicator has failed with a timeout that names `peer`.
    pub(super) fn was_late(&self, peer: usize) -> bool {
        matches!(&*self.failure.borrow(), Some(CommError::Timeout { missing, .. }) if missing.contains(&peer))
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    /// Stores a failure, and reports it to the other ranks if they do not know it.
    pub(in crate::comm) fn fail(&self, operation: Operation, failure: Failure) -> Error {
        let error = failure.error.clone().seen_in(operation);
        if self.failure.borrow_mut().replace(failure.error.clone()).is_none() && failure.is_unreported {
            for peer in self.link.others() {
                self.tell_failure(peer, failure.error.clone());
            }
        }
        self.calls.failed(&error);
        error.into()
    }

    /// Reports a failure to a rank. A rank that cannot be reached detects the failure by its deadline.
    pub(super) fn tell_failure(&self, peer: usize, error: CommError) {
        if let Err(error) = self.link.post(peer, Record::Failed { completed: self.completed.get(), error }) {
            tracing::warn!(peer, %error, "cannot tell a rank of a failure");
        }
    }

    /// Returns an error in this rank's own operands, after reporting it to the other ranks, which would wait in vain.
    pub(in crate::comm) fn refuse(&self, operation: Operation, error: Error) -> Error {
        if let Err(earlier) = self.check(operation) {
            return earlier;
        }
        let rank = self.link.rank();
        let invalid = CommError::InvalidCall { operation, rank, reason: error.to_string() };
        self.fail(operation, Failure { error: invalid, is_unreported: true });
        error
    }

    /// Converts an error of the transport to a failure of this rank.
    pub(super) fn broken(&self, operation: Operation, error: &LinkError) -> Failure {
        self.own_failure(operation, error.to_string())
    }

    /// Makes a failure of this rank.
    pub(in crate::comm) fn own_failure(&self, operation: Operation, reason: String) -> Failure {
        Failure { error: CommError::Transport { operation, rank: self.link.rank(), reason }, is_unreported: true }
    }

    /// Receives the failures that other ranks have sent since the last call, without waiting.
    #[cfg(all(feature = "cuda", feature = "mpi"))]
    pub(in crate::comm) fn listen(&self, operation: Operation) -> Result<()> {
        self.check(operation)?;
        let heard = self.pump(operation).and_then(|()| self.look_for_failure());
        heard.map_err(|failure| self.fail(operation, failure))
    }

    /// Waits until all ranks have made this call: either all ranks proceed, or none does.
    pub(super) fn agree(&self, call: Call) -> Result<()> {
        self.agree_with(call, Payload::EMPTY).map(drop)
    }

    /// Like [`agree`](Self::agree), with a payload. Returns each rank's payload for this rank; all payloads must have the length of this
    /// rank's own.
    pub(super) fn agree_with(&self, call: Call, payload: Payload<'_>) -> Result<Vec<Cow<'_, [u8]>>> {
        self.check(call.operation)?;
        self.calls.begin([call]);
        let outcome = self.first_round(call, payload).and_then(|received| self.second_round(call).map(|()| received));
        self.complete(call, outcome)
    }

    /// Like [`agree_with`](Self::agree_with), but within an exposure epoch and without the second round: a rank that gives up publishes
    /// its failure before the epoch ends in any case, and until then no rank has lost data.
    pub(super) fn agree_within_epoch(&self, call: Call, payload: Payload<'_>) -> Result<Vec<Cow<'_, [u8]>>> {
        self.check(call.operation)?;
        self.calls.begin([call]);
        self.complete(call, self.first_round(call, payload))
    }

    fn complete<T>(&self, call: Call, outcome: Result<T, Failure>) -> Result<T> {
        let given = outcome.map_err(|failure| self.fail(call.operation, failure))?;
        self.count_completed();
        self.calls.matched();
        Ok(given)
    }

    /// Counts a collective in which all ranks have proceeded.
    pub(super) fn count_completed(&self) {
        self.completed.set(self.completed.get() + 1);
    }

    fn first_round(&self, call: Call, payload: Payload<'_>) -> Result<Vec<Cow<'_, [u8]>>, Failure> {
        let (rank, world_size) = (self.link.rank(), self.link.world_size());
        let own = Record::Call { call, eager: EagerBytes::default() };
        self.publish(call.operation, &own, payload)?;
        self.wait_for_all(call.operation, &own)?;
        let mut received = Vec::with_capacity(world_size);
        let mut calls = Vec::with_capacity(world_size);
        for peer in 0..world_size {
            let (record, piece) = if peer == rank { (own.clone(), Cow::default()) } else { self.take_record(peer) };
            let Record::Call { call: theirs, .. } = record else {
                return Err(misplaced(call.operation, peer, &record));
            };
            calls.push((peer, theirs));
            received.push(piece);
        }
        // Every rank compares the same calls.
        engine::compare(&calls).map_err(|mismatch| known(&mismatch))?;
        let is_other = |peer: &usize| received[*peer].len() != payload.piece(*peer, world_size).len();
        let other = self.link.others().find(is_other);
        other.map_or(Ok(received), |peer| Err(self.other_kind(call, peer)))
    }

    /// The failure of calls whose payloads differ in length: small calls on host memory have eager payloads, and calls on device memory
    /// never have them.
    fn other_kind(&self, call: Call, peer: usize) -> Failure {
        let reason = format!(
            "rank {peer} makes this call with another kind of memory (host or device) than this rank, or has another \
             version of gradsync"
        );
        self.own_failure(call.operation, reason)
    }

    fn second_round(&self, call: Call) -> Result<(), Failure> {
        self.agree_on(call.operation, &Record::Go)
    }

    /// Publishes a record to every other rank, and waits until all ranks have published the same record, which they do unless a rank has
    /// failed or is stopped.
    fn agree_on(&self, operation: Operation, word: &Record) -> Result<(), Failure> {
        self.publish(operation, word, Payload::EMPTY)?;
        self.wait_for_all(operation, word)?;
        for peer in self.link.others() {
            let (record, _) = self.take_record(peer);
            if record != *word {
                return Err(misplaced(operation, peer, &record));
            }
        }
        Ok(())
    }

    /// Publishes this rank's record with its payload.
    fn publish(&self, operation: Operation, word: &Record, payload: Payload<'_>) -> Result<(), Failure> {
        if let Some(mailboxes) = &self.mailboxes {
            return mailboxes.publish(word, payload).map_err(|error| known(&error));
        }
        let record = |peer| match word {
            Record::Call { call, .. } => {
                let eager = EagerBytes(payload.piece(peer, self.link.world_size()).to_vec());
                Record::Call { call: *call, eager }
            }
            word => word.clone(),
        };
        let mut others = self.link.others();
        let told = others.try_for_each(|peer| self.link.post(peer, record(peer)));
        told.map_err(|error| self.broken(operation, &error))
    }

    /// Waits until every other rank has published a record that matches this rank's own.
    fn wait_for_all(&self, operation: Operation, own: &Record) -> Result<(), Failure> {
        let mut wait = Wait::new(Some(self.deadline));
        loop {
            if let Some(mailboxes) = &self.mailboxes {
                if mailboxes.have_all_arrived() {
                    return Ok(());
                }
                if !wait.is_time_to_listen() {
                    wait.pause();
                    continue;
                }
            }
            self.pump(operation)?;
            // Arrivals are checked before failures, because a rank that has arrived may have failed since, in a later collective, which
            // does not concern this one.
            let mut missing = Vec::new();
            for peer in 0..self.link.world_size() {
                if peer != self.link.rank() && !self.has_come(operation, peer, own)? {
                    missing.push(peer);
                }
            }
            if missing.is_empty() {
                return Ok(());
            }
            self.look_for_failure()?;
            if let Some(error) = self.mailboxes.as_ref().and_then(Mailboxes::closed_round) {
                return Err(known(&error));
            }
            if let Some(departed) = missing.iter().find_map(|&peer| self.departure(operation, peer)) {
                match self.give_up(departed, Mailboxes::close_round) {
                    Some(failure) => return Err(failure),
                    None => return Ok(()),
                }
            }
            if wait.is_over() {
                // A mismatch between the ranks that have arrived says more than a timeout.
                let timeout = CommError::Timeout { operation, missing: missing.clone(), deadline: self.deadline };
                let late = Failure { error: timeout, is_unreported: true };
                let failure = self.compare_without(&missing, own).err().unwrap_or(late);
                if let Some(failure) = self.give_up(failure, Mailboxes::close_round) {
                    return Err(failure);
                }
            }
            wait.pause();
        }
    }

    /// Returns the failure that ends a wait which can no longer succeed. With mailboxes, it is the failure of the first rank that closed
    /// the round or the epoch; `None` if all ranks have arrived at the last moment.
    pub(super) fn give_up(
        &self,
        own: Failure,
        close: fn(&Mailboxes, &CommError) -> Option<(usize, CommError)>,
    ) -> Option<Failure> {
        let Some(mailboxes) = &self.mailboxes else { return Some(own) };
        let (closer, error) = close(mailboxes, &own.error)?;
        Some(if closer == self.link.rank() { own } else { known(&error) })
    }

    /// The failure of a call that needs `rank`, if the rank has left: a failure that a rank has sent, if there is one, as the probable
    /// cause. Everything that the rank had sent has been received by then.
    pub(super) fn departure(&self, operation: Operation, rank: usize) -> Option<Failure> {
        let departure = self.link.departure(rank)?;
        let reason = self.link.inbox().iter().flatten().find_map(|record| match record {
            Record::Failed { error, .. } => Some(known(error)),
            _ => None,
        });
        if reason.is_some() {
            return reason;
        }
        Some(Failure { error: CommError::PeerGone { operation, rank, departure }, is_unreported: true })
    }

    /// Whether the peer sent the matching record; returns an error if it sent a record that rules out a match.
    fn has_come(&self, operation: Operation, peer: usize, own: &Record) -> Result<bool, Failure> {
        let rank = self.link.rank();
        if let Some(mailboxes) = &self.mailboxes {
            // The order matters: the peer can enter this round and end its epoch at any moment.
            let has_ended = mailboxes.has_ended_early(peer);
            if mailboxes.has_arrived(peer) {
                return Ok(true);
            }
            if let (true, Record::Call { call, .. }) = (has_ended, own) {
                // The peer has left its exposure epoch, which this rank is still in.
                return Err(mismatch((rank, *call), (peer, end_of_epoch())));
            }
        }
        let by_records = self.mailboxes.is_none();
        match (self.link.inbox()[peer].front(), own) {
            (None, _) => Ok(false),
            (Some(Record::Failed { error, .. }), _) => Err(known(error)),
            (Some(Record::Call { .. }), Record::Call { .. }) if by_records => Ok(true),
            (Some(record), own) if by_records && record == own => Ok(true),
            // Only this rank can detect this mismatch, because an offer is sent to one receiver.
            (Some(Record::Offer { call: theirs, .. }), Record::Call { call, .. }) => {
                Err(mismatch((rank, *call), (peer, *theirs)))
            }
            (Some(record), _) => Err(misplaced(operation, peer, record)),
        }
    }

    /// Takes the record of a rank that has arrived, with its payload for this rank.
    fn take_record(&self, peer: usize) -> (Record, Cow<'_, [u8]>) {
        if let Some(mailboxes) = &self.mailboxes {
            let entry = mailboxes.entry(peer);
            let received = mailboxes.received(peer, &entry);
            return (entry.record, received.into());
        }
        match self.link.inbox()[peer].pop_front() {
            Some(Record::Call { call, eager }) => (Record::Call { call, eager: EagerBytes::default() }, eager.0.into()),
            record => (record.expect("it has come"), Cow::default()),
        }
    }

    /// Compares the calls of all ranks that are not missing.
    fn compare_without(&self, missing: &[usize], own: &Record) -> Result<(), Failure> {
        let call_of = |peer: usize| {
            let record = match &self.mailboxes {
                _ if peer == self.link.rank() => Some(own.clone()),
                Some(mailboxes) => Some(mailboxes.entry(peer).record),
                None => self.link.inbox()[peer].front().cloned(),
            };
            match record {
                Some(Record::Call { call, .. }) => Some((peer, call)),
                _ => None,
            }
        };
        let here = (0..self.link.world_size()).filter(|peer| !missing.contains(peer));
        let compared = engine::compare(&here.filter_map(call_of).collect::<Vec<_>>());
        compared.map_err(|error| Failure { error, is_unreported: true })
    }

    /// Runs one step of a collective in which all ranks have proceeded, and which completes with its last step. A rank that has finished
    /// the last step, and fails in its next call, has done its part for ranks that are still in this collective.
    fn take_step<T>(&self, operation: Operation, step: impl FnOnce() -> Result<T, Failure>) -> Result<T> {
        let completed = self.completed.replace(self.completed.get() - 1);
        let outcome = step().map_err(|failure| self.fail(operation, failure));
        self.completed.set(completed);
        outcome
    }

    /// Waits until all ranks have reached the same step of a collective.
    pub(super) fn wait_for_step(&self, operation: Operation) -> Result<()> {
        self.take_step(operation, || self.agree_on(operation, &Record::Go))
    }

    /// Ends a collective in which one rank alone can fail half-way: waits until every rank has done its part. All ranks have to call it,
    /// and all get a failure if one has failed.
    #[cfg(all(feature = "cuda", feature = "mpi"))]
    pub(in crate::comm) fn close(&self, operation: Operation, own: Result<(), String>) -> Result<()> {
        self.take_step(operation, || match own {
            Ok(()) => self.agree_on(operation, &Record::Closed),
            Err(reason) => Err(self.own_failure(operation, reason)),
        })
    }

    pub(super) fn pump(&self, operation: Operation) -> Result<(), Failure> {
        self.link.pump().map_err(|error| self.broken(operation, &error))
    }

    /// Returns a failure that another rank has sent, if it concerns the current wait. A failure after the current collective does not
    /// concern it: the sender has received all calls of that collective, and has sent its own data.
    pub(super) fn look_for_failure(&self) -> Result<(), Failure> {
        let inbox = self.link.inbox();
        let failure = inbox.iter().flatten().find_map(|record| match record {
            Record::Failed { completed, error } if *completed <= self.completed.get() => Some(known(error)),
            _ => None,
        });
        failure.map_or(Ok(()), Err)
    }

    /// Waits until all streams are done; fails if none has progressed for the deadline and all can be abandoned.
    pub(super) fn finish_streams(&self, operation: Operation, mut streams: Vec<Stream>) -> Result<()> {
        self.take_step(operation, || self.wait_for_streams(operation, &mut streams))
    }

    fn wait_for_streams(&self, operation: Operation, streams: &mut [Stream]) -> Result<(), Failure> {
        let mut stall = Stall::new();
        while !streams.iter().all(Stream::is_done) {
            let has_moved = streams.iter_mut().fold(false, |moved, stream| stream.advance(&*self.link) | moved);
            if has_moved {
                stall.end();
                continue;
            }
            let is_over = stall.is_over(self.deadline);
            let can_be_left = streams.iter().all(Stream::can_be_left);
            if can_be_left && (stall.is_long() || stall.elapsed() >= self.deadline) {
                self.pump(operation)?;
                self.look_for_failure()?;
                for stream in streams.iter_mut().filter(|stream| !stream.is_done()) {
                    if let Some(departed) = self.departure(operation, stream.peer) {
                        // By now, everything that the departed rank has sent and received is known.
                        stream.advance(&*self.link);
                        if !stream.is_done() {
                            return Err(departed);
                        }
                    }
                }
            }
            if can_be_left && is_over {
                let late = streams.iter().filter(|stream| !stream.is_done());
                let mut missing: Vec<usize> = late.map(|stream| stream.peer).collect();
                missing.sort_unstable();
                missing.dedup();
                let error = CommError::Timeout { operation, missing, deadline: self.deadline };
                return Err(Failure { error, is_unreported: true });
            }
            std::thread::yield_now();
        }
        let error = streams.iter_mut().find_map(Stream::take_error);
        error.map_or(Ok(()), |error| Err(self.broken(operation, &error)))
    }

    /// Waits until all messages are sent and received.
    #[cfg(all(feature = "cuda", feature = "mpi"))]
    pub(super) fn finish(&self, operation: Operation, requests: Requests) -> Result<()> {
        let outcome = requests.finish(&*self.link, self.deadline);
        outcome.map_err(|error| self.fail(operation, self.broken(operation, &error)))
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.has_failed() {
            let (rank, operation) = (self.link.rank(), Operation::Exchange);
            let error = CommError::PeerGone { operation, rank, departure: Departure::Panicked };
            self.fail(operation, Failure { error, is_unreported: true });
        }
        let completed = self.completed.get();
        self.link.leave(self.failure.take().map(|error| Record::Failed { completed, error }));
    }
}

/// A failure that the detecting rank has reported to all ranks.
pub(super) fn known(error: &CommError) -> Failure {
    Failure { error: error.clone(), is_unreported: false }
}

pub(super) fn mismatch(one: (usize, Call), other: (usize, Call)) -> Failure {
    Failure { error: CommError::mismatch(one, other), is_unreported: true }
}

pub(super) fn misplaced(operation: Operation, rank: usize, record: &Record) -> Failure {
    // A mailbox returns this for an unreadable record.
    if let Record::Failed { error, .. } = record {
        return Failure { error: error.clone(), is_unreported: true };
    }
    let reason =
        format!("it sent {record:?}, which no rank of this version sends here: all ranks need one version of gradsync");
    Failure { error: CommError::Transport { operation, rank, reason }, is_unreported: true }
}

/// A wait that spins at first and then sleeps between polls, so that a late rank on the same core can run.
#[derive(Debug)]
pub(in crate::comm) struct Wait {
    stall: Stall,
    deadline: Option<Duration>,
    pauses: u32,
}

impl Wait {
    pub(in crate::comm) fn new(deadline: Option<Duration>) -> Self {
        Wait { stall: Stall::new(), deadline, pauses: 0 }
    }

    /// Whether the deadline has passed.
    pub(in crate::comm) fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| self.stall.is_over(deadline))
    }

    /// Whether a rank that polls mailboxes also receives records this time, which takes longer.
    pub(super) fn is_time_to_listen(&self) -> bool {
        self.pauses % LISTENS_AFTER == LISTENS_AFTER - 1 || self.stall.elapsed() >= SPIN
    }

    pub(in crate::comm) fn pause(&mut self) {
        self.pauses = self.pauses.wrapping_add(1);
        if self.stall.elapsed() < SPIN {
            std::thread::yield_now();
        } else {
            std::thread::sleep(SLEEP);
        }
    }
}
