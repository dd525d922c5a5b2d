//! The handshake of all ranks before data move: ranks exchange their calls, compare them, and every rank learns of a failure.
//!
//! A collective has two rounds. In the first, every rank publishes its call, with its payload for every other rank, and waits for the
//! other calls until the deadline. In the second, it publishes that it proceeds; a rank that has given up publishes its failure instead,
//! so either all ranks move data or none does. Within an exposure epoch, the end of the epoch can replace the second round. Ranks that
//! share memory publish in their `mailbox`, other ranks send records; failures are always records. The second round has a deadline too,
//! which passes if a rank is stopped between the two rounds. With mailboxes, all ranks still agree on the outcome then; with records,
//! some ranks may proceed, and learn of the failure while their data move, or in their next call.
//!
//! There is no coordinator, so that a small sum takes one round trip: the engine compares the calls of a round, and that is all on this path.
//! A rank whose wait may be in vain posts the calls and departures that it knows to an [`Engine`] of its own, which says who is missing or
//! gone, and which calls wait for each other. A rank does not know the transfers between two other ranks.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::time::Duration;

use super::link::Link;
use super::mailbox::{Mailboxes, Payload, Payloads};
use super::record::{EagerBytes, Record};
use super::scratch::Scratch;
use super::wait::Wait;
use crate::engine::{self, Engine};
use crate::error::{Call, CommError, Departure, Error, Operation, Result};
use crate::trace::CurrentCall;

/// Ranks with their calls; none for a rank whose calls are not known.
pub(super) type Known = Vec<(usize, Vec<Call>)>;

#[derive(Debug)]
pub(in crate::comm) struct Handshake {
    link: Box<dyn Link>,
    /// The mailboxes, if the ranks share the memory of one machine; other ranks exchange records. Equal on all ranks.
    pub(super) mailboxes: Option<Mailboxes>,
    pub(super) deadline: Duration,
    /// The number of collectives that this rank has completed. A collective counts as completed between its steps.
    completed: Cell<u64>,
    /// The first failure; it refuses every later call.
    failure: RefCell<Option<CommError>>,
    /// The trace of this rank's calls.
    pub(super) calls: CurrentCall,
    /// The workspace of transfers, kept from call to call: the system would clear new pages every time.
    pub(super) workspace: RefCell<Scratch>,
}

impl Handshake {
    pub(super) fn new(link: Box<dyn Link>, deadline: Duration, calls: CurrentCall) -> Self {
        let (completed, failure, workspace) = Default::default();
        Handshake { link, mailboxes: None, deadline, completed, failure, calls, workspace }
    }

    pub(in crate::comm) fn link(&self) -> &dyn Link {
        &*self.link
    }

    /// The first failure of this communicator.
    pub(super) fn failure(&self) -> Option<CommError> {
        self.failure.borrow().clone()
    }

    /// The failure of this communicator, if any, as the error of `operation`.
    pub(in crate::comm) fn check(&self, operation: Operation) -> Result<()> {
        self.failure().map_or(Ok(()), |failure| Err(failure.seen_in(operation).into()))
    }

    /// Ends this communicator with a failure, and reports it to all other ranks, which may wait for this rank.
    pub(in crate::comm) fn fail(&self, operation: Operation, failure: CommError) -> Error {
        let error = failure.clone().seen_in(operation);
        if self.failure.borrow_mut().replace(failure.clone()).is_none() {
            self.link.report(&self.failed(failure));
        }
        self.calls.failed(&error);
        error.into()
    }

    /// The report of a failure of this rank.
    pub(super) fn failed(&self, error: CommError) -> Record {
        Record::Failed { completed: self.completed.get(), error }
    }

    /// Returns an error in this rank's own operands, after reporting it to the other ranks, which would wait in vain.
    pub(in crate::comm) fn refuse(&self, operation: Operation, error: Error) -> Error {
        if let Err(earlier) = self.check(operation) {
            return earlier;
        }
        let (rank, reason) = (self.link.rank(), error.to_string());
        self.fail(operation, CommError::InvalidCall { operation, rank, reason });
        error
    }

    /// Makes a failure of this rank, such as an error of its transport.
    pub(in crate::comm) fn broken(&self, operation: Operation, reason: impl ToString) -> CommError {
        CommError::Transport { operation, rank: self.link.rank(), reason: reason.to_string() }
    }

    /// Waits until all ranks have made this call: either all ranks proceed, or none does. Returns each rank's payload for this rank; all
    /// payloads must have the length of this rank's own. Within an exposure epoch, a call need not be confirmed by the second round: a rank
    /// that gives up publishes its failure before the epoch ends in any case, and until then no rank has lost data.
    pub(super) fn agree(&self, call: Call, payload: Payload<'_>, is_confirmed: bool) -> Result<Payloads<'_>> {
        self.check(call.operation)?;
        self.calls.begin([call]);
        let received = self.exchange_calls(call, payload);
        let confirmed = received.and_then(|received| match is_confirmed {
            true => self.exchange_word(&call, &Record::Go).map(|()| received),
            false => Ok(received),
        });
        let received = confirmed.map_err(|failure| self.fail(call.operation, failure))?;
        self.count_completed();
        self.calls.matched();
        Ok(received)
    }

    /// Counts a collective in which all ranks have proceeded.
    pub(super) fn count_completed(&self) {
        self.completed.set(self.completed.get() + 1);
    }

    /// The first round: publishes this rank's call, and compares it with the calls of all ranks. Returns their payloads for this rank.
    fn exchange_calls(&self, own: Call, payload: Payload<'_>) -> Result<Payloads<'_>, CommError> {
        let (world_size, record) = (self.link.world_size(), Record::Call { call: own, eager: EagerBytes::default() });
        self.publish(&record, &own, payload)?;
        let mut received = Vec::with_capacity(world_size);
        let mut calls = Vec::with_capacity(world_size);
        for peer in 0..world_size {
            let (record, piece) =
                if peer == self.link.rank() { (record.clone(), Cow::default()) } else { self.take_record(peer) };
            let Record::Call { call, .. } = record else { return Err(record.misplaced(own.operation, peer)) };
            calls.push((peer, call));
            received.push(piece);
        }
        // Every rank compares the same calls.
        engine::compare(&calls)?;
        // Small calls on host memory have payloads, and calls on device memory never have them.
        let is_other = |peer: &usize| received[*peer].len() != payload.piece(*peer, world_size).len();
        let Some(peer) = self.link.others().find(is_other) else { return Ok(received) };
        let reason = format!(
            "rank {peer} makes this call with another kind of memory (host or device) than this rank, or has another \
             version of gradsync"
        );
        Err(self.broken(own.operation, reason))
    }

    /// Publishes a word, and waits until all ranks have published the same word in the call `own`, which they do unless a rank has failed
    /// or is stopped.
    fn exchange_word(&self, own: &Call, word: &Record) -> Result<(), CommError> {
        self.publish(word, own, Payload::EMPTY)?;
        for peer in self.link.others() {
            let (record, _) = self.take_record(peer);
            if record != *word {
                return Err(record.misplaced(own.operation, peer));
            }
        }
        Ok(())
    }

    /// Publishes this rank's record of a round with its payload, and waits for the records of all other ranks.
    fn publish(&self, record: &Record, own: &Call, payload: Payload<'_>) -> Result<(), CommError> {
        if let Some(mailboxes) = &self.mailboxes {
            mailboxes.publish(record, payload)?;
            return self.wait_for_all(own);
        }
        for peer in self.link.others() {
            let record = record.with_eager(payload.piece(peer, self.link.world_size()));
            self.link.post(peer, record).map_err(|error| self.broken(own.operation, error))?;
        }
        self.wait_for_all(own)
    }

    /// Waits until all other ranks have published their records of this round of the call `own`.
    fn wait_for_all(&self, own: &Call) -> Result<(), CommError> {
        let mut wait = None;
        loop {
            if self.mailboxes.as_ref().is_some_and(Mailboxes::have_all_arrived) {
                return Ok(());
            }
            // A round whose ranks are all here does not read the clock.
            let wait = wait.get_or_insert_with(|| Wait::new(Some(self.deadline)));
            if self.mailboxes.is_some() && !wait.is_time_to_listen() {
                wait.pause();
                continue;
            }
            self.pump(own.operation)?;
            let missing: Vec<usize> = self.link.others().filter(|&peer| !self.has_arrived(peer)).collect();
            let mut others = self.calls_elsewhere(&[*own], missing.iter().copied());
            // The order matters: a rank can enter this round, leave its epoch and make its next call at any moment. A rank that has arrived
            // may have failed since, in a later collective, which does not concern this one.
            if missing.iter().all(|&peer| self.has_arrived(peer)) {
                return Ok(());
            }
            self.look_for_failure()?;
            self.mailboxes.as_ref().map_or(Ok(()), Mailboxes::check_round)?;
            let is_late = wait.is_over();
            if is_late {
                let arrived = self.link.others().filter(|peer| !missing.contains(peer));
                others.extend(arrived.map(|peer| match self.take_record(peer) {
                    (Record::Call { call, .. }, _) => (peer, vec![call]),
                    _ => (peer, vec![*own]),
                }));
            }
            if let Err(failure) = self.judge(&[*own], others, is_late) {
                let Some(mailboxes) = &self.mailboxes else { return Err(failure) };
                return mailboxes.close_round(&failure);
            }
            wait.pause();
        }
    }

    /// Asks the engine whether this rank's calls `own` can still be matched. `others` are the ranks that are missing, with the calls in which
    /// they wait instead, and the ranks that are not, with their calls.
    ///
    /// # Errors
    /// The engine's failure; or, if a missing rank has left, a failure that any rank has reported, as the probable cause.
    pub(super) fn judge(&self, own: &[Call], mut others: Known, is_late: bool) -> Result<(), CommError> {
        let silent = others.iter().filter(|(_, calls)| calls.is_empty());
        let departures: Vec<_> = silent.filter_map(|&(peer, _)| Some((peer, self.link.departure(peer)?))).collect();
        if !is_late && departures.is_empty() && others.iter().all(|(_, calls)| calls.is_empty()) {
            return Ok(());
        }
        let (rank, world_size) = (self.link.rank(), self.link.world_size());
        // Everything that a rank had sent has been received before its departure is known.
        let cause = self.link.reported(0..world_size, u64::MAX);
        cause.filter(|_| !departures.is_empty()).map_or(Ok(()), Err)?;
        let mut engine = Engine::new(world_size);
        others.retain(|(_, calls)| !calls.is_empty());
        others.push((rank, own.to_vec()));
        // Ranks that know the same calls find the same failure, because they post in rank order.
        others.sort_by_key(|(rank, _)| *rank);
        others.iter().for_each(|(rank, calls)| drop(engine.post(*rank, calls, true)));
        departures.into_iter().for_each(|(peer, departure)| engine.depart(peer, departure));
        if is_late {
            engine.expire(rank, self.deadline);
        }
        engine.failure().cloned().map_or(Ok(()), Err)
    }

    /// The missing ranks, each with the calls in which it waits instead of joining this rank's calls `own`, as far as this rank knows.
    pub(super) fn calls_elsewhere(&self, own: &[Call], missing: impl IntoIterator<Item = usize>) -> Known {
        let calls_of = |peer: usize| {
            let sends = own.iter().any(|call| call.operation.peers().0 == Some(peer));
            // A sender makes its offers before it makes other calls. The records of a receiver may be under way.
            let mailboxes = self.mailboxes.as_ref().filter(|_| !sends);
            let ahead = mailboxes.and_then(|mailboxes| mailboxes.call_elsewhere(peer));
            (peer, self.link.waiting_calls(peer, sends).into_iter().chain(ahead).collect())
        };
        missing.into_iter().map(calls_of).collect()
    }

    /// Whether a rank has published its record of this round.
    fn has_arrived(&self, peer: usize) -> bool {
        self.mailboxes.as_ref().map_or_else(|| self.link.has_word(peer), |mailboxes| mailboxes.has_arrived(peer))
    }

    /// Takes the record of a rank that has arrived, with its payload for this rank.
    fn take_record(&self, peer: usize) -> (Record, Cow<'_, [u8]>) {
        let Some(mailboxes) = &self.mailboxes else { return self.link.take_word(peer) };
        let entry = mailboxes.entry(peer);
        let received = mailboxes.received(peer, &entry);
        (entry.record, received.into())
    }

    /// Runs one step of a collective in which all ranks have proceeded, and which completes with its last step. A rank that has finished
    /// the last step, and fails in its next call, has done its part for ranks that are still in this collective.
    pub(super) fn take_step<T>(&self, operation: Operation, step: impl FnOnce() -> Result<T, CommError>) -> Result<T> {
        let completed = self.completed.replace(self.completed.get() - 1);
        let outcome = step().map_err(|failure| self.fail(operation, failure));
        self.completed.set(completed);
        outcome
    }

    /// Waits until all ranks have done the same step of a collective, in which one rank alone can fail; `word` is equal on all ranks. Either
    /// all ranks succeed, or none does.
    pub(in crate::comm) fn end_step(&self, operation: Operation, word: &Record, own: Result<(), String>) -> Result<()> {
        self.take_step(operation, || match own {
            Ok(()) => self.exchange_word(&Call::without_data(operation), word),
            Err(reason) => Err(self.broken(operation, reason)),
        })
    }

    pub(super) fn pump(&self, operation: Operation) -> Result<(), CommError> {
        self.link.pump().map_err(|error| self.broken(operation, error))
    }

    /// Returns a failure that another rank has sent, if it concerns the current wait. A failure after the current collective does not
    /// concern it: the sender has received all calls of that collective, and has sent its own data.
    pub(super) fn look_for_failure(&self) -> Result<(), CommError> {
        self.link.reported(0..self.link.world_size(), self.completed.get()).map_or(Ok(()), Err)
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        if std::thread::panicking() && self.failure().is_none() {
            let (rank, operation) = (self.link.rank(), Operation::Exchange);
            self.fail(operation, CommError::PeerGone { operation, rank, departure: Departure::Panicked });
        }
        self.link.leave(self.failure.get_mut().is_some());
    }
}
