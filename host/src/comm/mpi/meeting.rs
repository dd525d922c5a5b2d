//! How ranks come together before data move: they tell each other what they call, compare it, and every rank learns of a failure.
//!
//! A collective has two rounds of records. In the first every rank tells all others its call, with what it encloses for each of them, and
//! waits for theirs until the deadline. Then it says whether it goes on: a rank that has given up says that instead, so either all ranks
//! move data or none does, and the second round needs no deadline. Records of one rank come in order, so one out of place is a mismatch.
//! Never knows what is enclosed, nor where it goes.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use super::channel::{Channel, Enclosed, Record, Requests};
use super::library::MpiError;
use crate::error::{Call, CommError, Departure, Error, Operation, Result};

/// How long a wait is a busy one, and how long it sleeps between two looks afterwards.
const BUSY: Duration = Duration::from_millis(5);
const NAP: Duration = Duration::from_micros(100);

/// What a rank calls that has ended its work on what it was lent, as the others' errors quote it.
pub(super) const END_OF_LOAN: Call = Call { operation: Operation::LendWindows, len: 0, dtype: None };

#[derive(Debug)]
pub(super) struct Meeting {
    channel: Channel,
    deadline: Duration,
    /// Collectives that all ranks have gone on with.
    completed: Cell<u64>,
    /// The first failure; it refuses every later call.
    failure: RefCell<Option<CommError>>,
}

/// The calls that have come, with the ranks that made them.
type Calls = Vec<(usize, Call)>;

/// A failure on its way to the caller.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: CommError,
    /// Whether the other ranks do not learn of it unless this one tells them.
    pub(super) is_news: bool,
}

impl Meeting {
    pub(super) fn new(channel: Channel, deadline: Duration) -> Self {
        Meeting { channel, deadline, completed: Cell::new(0), failure: RefCell::new(None) }
    }

    pub(super) fn channel(&self) -> &Channel {
        &self.channel
    }

    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    pub(super) fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// The failure of this communicator, if any, as the error of `operation`.
    pub(super) fn check(&self, operation: Operation) -> Result<()> {
        self.failure.borrow().clone().map_or(Ok(()), |failure| Err(failure.seen_in(operation).into()))
    }

    /// Takes note of a failure, and tells the others if it is news to them.
    pub(super) fn fail(&self, operation: Operation, failure: Failure) -> Error {
        let error = failure.error.clone().seen_in(operation);
        if self.failure.borrow_mut().replace(failure.error.clone()).is_none() && failure.is_news {
            for peer in self.channel.others() {
                self.tell_failure(peer, failure.error.clone());
            }
        }
        error.into()
    }

    /// Whoever cannot be told of a failure finds out by its deadline.
    pub(super) fn tell_failure(&self, peer: usize, error: CommError) {
        if let Err(error) = self.channel.post(peer, Record::Failed { completed: self.completed.get(), error }) {
            tracing::warn!(peer, %error, "cannot tell a rank of a failure");
        }
    }

    /// Passes on an error in this rank's own operands, after telling the other ranks, who would wait for nothing.
    pub(super) fn refuse(&self, operation: Operation, error: Error) -> Error {
        if let Err(earlier) = self.check(operation) {
            return earlier;
        }
        let rank = self.channel.rank();
        let invalid = CommError::InvalidCall { operation, rank, reason: error.to_string() };
        self.fail(operation, Failure { error: invalid, is_news: true });
        error
    }

    /// What MPI refused, as a failure of this rank.
    pub(super) fn broken(&self, operation: Operation, error: &MpiError) -> Failure {
        self.own_failure(operation, error.to_string())
    }

    /// A failure of this rank.
    pub(super) fn own_failure(&self, operation: Operation, reason: String) -> Failure {
        Failure { error: CommError::Transport { operation, rank: self.channel.rank(), reason }, is_news: true }
    }

    /// Hears what other ranks have failed with since the last call, without waiting.
    #[cfg(feature = "cuda")]
    pub(super) fn listen(&self, operation: Operation) -> Result<()> {
        self.check(operation)?;
        let heard = self.pump(operation).and_then(|()| self.look_for_failure());
        heard.map_err(|failure| self.fail(operation, failure))
    }

    /// Waits until all ranks have made this call: all go on, or none does.
    pub(super) fn meet(&self, call: Call) -> Result<()> {
        self.meet_with(call, |_| &[]).map(drop)
    }

    /// The same, where this rank brings what `enclosed` says for every other. Gives back what the others have brought, by rank: as many
    /// bytes as they get.
    pub(super) fn meet_with<'a>(&self, call: Call, enclosed: impl Fn(usize) -> &'a [u8]) -> Result<Vec<Vec<u8>>> {
        self.check(call.operation)?;
        let outcome = self.first_round(call, enclosed).and_then(|brought| self.second_round(call).map(|()| brought));
        let brought = outcome.map_err(|failure| self.fail(call.operation, failure))?;
        self.completed.set(self.completed.get() + 1);
        Ok(brought)
    }

    fn first_round<'a>(&self, call: Call, enclosed: impl Fn(usize) -> &'a [u8]) -> Result<Vec<Vec<u8>>, Failure> {
        let record = |peer| Record::Call { call, enclosed: Enclosed(enclosed(peer).to_vec()) };
        self.tell_others(call.operation, record)?;
        let mut wait = Wait::new(Some(self.deadline));
        let calls = loop {
            self.pump(call.operation)?;
            let (calls, missing) = self.calls(call)?;
            if missing.is_empty() {
                break calls;
            }
            self.look_for_failure()?;
            if wait.is_over() {
                // Those who are here may differ already, which says more.
                self.compare(&calls)?;
                let (operation, deadline) = (call.operation, self.deadline);
                return Err(Failure { error: CommError::Timeout { operation, missing, deadline }, is_news: true });
            }
            wait.pause();
        };
        let mut brought = vec![Vec::new(); self.channel.world_size()];
        for peer in self.channel.others() {
            if let Some(Record::Call { enclosed, .. }) = self.channel.inbox()[peer].pop_front() {
                brought[peer] = enclosed.0;
            }
        }
        // Every rank has the same calls to compare.
        self.compare(&calls).map_err(|failure| Failure { is_news: false, ..failure })?;
        let other = self.channel.others().find(|&peer| brought[peer].len() != enclosed(peer).len());
        other.map_or(Ok(brought), |peer| Err(self.other_kind(call, peer)))
    }

    /// Calls for memory of the host bring their data along where they are few, those for memory of devices never do.
    fn other_kind(&self, call: Call, peer: usize) -> Failure {
        let reason =
            format!("rank {peer} makes this call for another kind of memory than this rank, or by another version");
        self.own_failure(call.operation, reason)
    }

    /// The calls that have come, in rank order, with our own, and the ranks whose call has not.
    fn calls(&self, own: Call) -> Result<(Calls, Vec<usize>), Failure> {
        let (rank, inbox) = (self.channel.rank(), self.channel.inbox());
        let (mut calls, mut missing) = (Vec::with_capacity(inbox.len()), Vec::new());
        for (peer, records) in inbox.iter().enumerate() {
            match records.front() {
                _ if peer == rank => calls.push((rank, own)),
                None => missing.push(peer),
                Some(Record::Call { call, .. }) => calls.push((peer, *call)),
                // This rank alone knows.
                Some(Record::Offer { call, .. }) => return Err(mismatch((rank, own), (peer, *call))),
                Some(Record::Failed { error, .. }) => return Err(known(error)),
                // It believes that its work on what it was lent is over.
                Some(Record::Ended) => return Err(mismatch((rank, own), (peer, END_OF_LOAN))),
                Some(record) => return Err(out_of_step(own.operation, peer, record)),
            }
        }
        Ok((calls, missing))
    }

    fn compare(&self, calls: &[(usize, Call)]) -> Result<(), Failure> {
        let first = calls[0];
        let other = calls.iter().find(|(_, call)| *call != first.1);
        other.map_or(Ok(()), |&other| Err(mismatch(first, other)))
    }

    fn second_round(&self, call: Call) -> Result<(), Failure> {
        self.tell_others(call.operation, |_| Record::Go)?;
        self.hear_from_all(call.operation, &Record::Go)
    }

    /// Ends a collective in which a rank can fail half-way on its own: waits until every rank has done its part. All ranks have to
    /// call it, and each gets a failure if one has failed.
    #[cfg(feature = "cuda")]
    pub(super) fn close(&self, operation: Operation, own: Result<(), String>) -> Result<()> {
        let outcome = match own {
            Ok(()) => {
                let told = self.tell_others(operation, |_| Record::Closed);
                told.and_then(|()| self.hear_from_all(operation, &Record::Closed))
            }
            Err(reason) => Err(self.own_failure(operation, reason)),
        };
        outcome.map_err(|failure| self.fail(operation, failure))
    }

    /// Takes note of a failure while a loan ends, unless there has been one.
    pub(super) fn note(&self, failure: Failure) {
        if self.failure.borrow().is_none() {
            self.fail(END_OF_LOAN.operation, failure);
        }
    }

    /// Tells all ranks that this one uses nothing of theirs any more, and waits until all have said so, even those that have failed. Whoever still
    /// does after a failure and the deadline ends the job.
    pub(super) fn end_loan(&self) {
        let (rank, operation) = (self.channel.rank(), END_OF_LOAN.operation);
        let outcome = self.tell_others(operation, |_| Record::Ended);
        outcome.unwrap_or_else(|failure| self.note(failure));
        let mut grace = None;
        for peer in self.channel.others() {
            let mut wait = Wait::new(None);
            loop {
                self.pump(operation).unwrap_or_else(|failure| self.note(failure));
                let record = self.channel.inbox()[peer].pop_front();
                match record {
                    Some(Record::Ended) => break,
                    Some(Record::Failed { error, .. }) => self.note(known(&error)),
                    Some(Record::Call { call, .. } | Record::Offer { call, .. }) => {
                        self.note(mismatch((rank, END_OF_LOAN), (peer, call)));
                    }
                    Some(record) => self.note(out_of_step(operation, peer, &record)),
                    None => wait.pause(),
                }
                let has_failed = self.failure.borrow().is_some();
                if has_failed && grace.get_or_insert_with(|| Wait::new(Some(self.deadline))).is_over() {
                    tracing::error!(rank, peer, "a rank keeps what it was lent after a failure: aborting the MPI job");
                    self.channel.abort(1);
                }
            }
        }
    }

    /// Takes one record from every other rank, which is to be the wanted one. It comes for certain unless a rank has failed, so that there
    /// is no deadline.
    fn hear_from_all(&self, operation: Operation, wanted: &Record) -> Result<(), Failure> {
        let mut wait = Wait::new(None);
        for peer in self.channel.others() {
            loop {
                self.pump(operation)?;
                let record = self.channel.inbox()[peer].front().cloned();
                match record {
                    Some(record) if record == *wanted => {
                        self.channel.inbox()[peer].pop_front();
                        break;
                    }
                    Some(Record::Failed { error, .. }) => return Err(known(&error)),
                    // Whoever gives up because another has failed sends nothing of its own; what ends a loan is still to be taken there.
                    Some(Record::Ended) | None => self.look_for_failure()?,
                    Some(record) => return Err(out_of_step(operation, peer, &record)),
                }
                wait.pause();
            }
        }
        Ok(())
    }

    /// Tells every other rank what `record` says for it.
    fn tell_others(&self, operation: Operation, record: impl Fn(usize) -> Record) -> Result<(), Failure> {
        let mut others = self.channel.others();
        let told = others.try_for_each(|peer| self.channel.post(peer, record(peer)));
        told.map_err(|error| self.broken(operation, &error))
    }

    pub(super) fn pump(&self, operation: Operation) -> Result<(), Failure> {
        self.channel.pump().map_err(|error| self.broken(operation, &error))
    }

    /// A failure that another rank has told, for a wait that it may concern. One from after the collective that this rank is still
    /// in does not: whoever sent it has everybody's call.
    pub(super) fn look_for_failure(&self) -> Result<(), Failure> {
        let inbox = self.channel.inbox();
        let failure = inbox.iter().flatten().find_map(|record| match record {
            Record::Failed { completed, error } if *completed <= self.completed.get() => Some(known(error)),
            _ => None,
        });
        failure.map_or(Ok(()), Err)
    }

    /// Waits until messages are out and in.
    pub(super) fn finish(&self, operation: Operation, requests: Requests) -> Result<()> {
        let outcome = self.channel.finish(requests, self.deadline);
        outcome.map_err(|error| self.fail(operation, self.broken(operation, &error)))
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        if self.failure.borrow().is_some() {
            return;
        }
        if std::thread::panicking() {
            let (rank, operation) = (self.channel.rank(), Operation::Exchange);
            let error = CommError::PeerGone { operation, rank, departure: Departure::Panicked };
            self.fail(operation, Failure { error, is_news: true });
        } else {
            self.channel.free();
        }
    }
}

/// A failure that whoever found it has told everybody.
pub(super) fn known(error: &CommError) -> Failure {
    Failure { error: error.clone(), is_news: false }
}

pub(super) fn mismatch(one: (usize, Call), other: (usize, Call)) -> Failure {
    let ((left_rank, left), (right_rank, right)) = if one.0 < other.0 { (one, other) } else { (other, one) };
    Failure { error: CommError::Mismatch { left_rank, left, right_rank, right }, is_news: true }
}

pub(super) fn out_of_step(operation: Operation, rank: usize, record: &Record) -> Failure {
    let reason = format!("it sent {record:?} where no rank of this version does");
    Failure { error: CommError::Transport { operation, rank, reason }, is_news: true }
}

/// A wait: busy at first, and then at intervals, so that ranks which share a core let the late one run.
#[derive(Debug)]
pub(super) struct Wait {
    start: Instant,
    deadline: Option<Duration>,
}

impl Wait {
    pub(super) fn new(deadline: Option<Duration>) -> Self {
        Wait { start: Instant::now(), deadline }
    }

    /// Whether the deadline has passed.
    pub(super) fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| self.start.elapsed() >= deadline)
    }

    pub(super) fn pause(&mut self) {
        if self.start.elapsed() < BUSY {
            std::thread::yield_now();
        } else {
            std::thread::sleep(NAP);
        }
    }
}
