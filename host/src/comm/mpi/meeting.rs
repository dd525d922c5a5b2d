//! How ranks come together before data move: they tell each other what they call, compare it, and every rank learns of a failure.
//!
//! A collective has two rounds. In the first every rank tells all others its call, with what it brings for each of them, and waits for theirs
//! until the deadline. Then it says whether it goes on: a rank that has given up says that instead, so either all ranks move data or none
//! does; where memory is lent, the loan's end can stand for it. Ranks that have `boards` say it there, others by records; failures are always
//! records. The second round has a deadline too, which passes if a rank is stopped between the two. Boards keep all ranks of one mind then;
//! by records some may go on, and hear of the failure while their data move, or in their next call.
//! Those of one rank come in order, so one out of place is a mismatch. Never knows what is brought, nor where it goes.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::time::Duration;

use super::boards::{Boards, Brings};
#[cfg(feature = "cuda")]
use super::channel::Requests;
use super::channel::{Channel, Enclosed, Record};
use super::stream::{Stall, Stream};
use crate::error::MpiError;
use crate::error::{Call, CommError, Departure, Error, Operation, Result};

/// How long a wait is a busy one, and how long it sleeps between two looks afterwards.
const BUSY: Duration = Duration::from_millis(5);
const NAP: Duration = Duration::from_micros(100);
/// Pauses after which a rank that looks at boards hears what the others have failed with.
const LISTENS_AFTER: u32 = 16;

/// What a rank calls that has ended its work on what it was lent, as errors quote it. Ranks that lend are in the same operation.
pub(super) fn end_of_loan() -> Call {
    Call::without_data(Operation::LendWindows)
}

#[derive(Debug)]
pub(super) struct Meeting {
    channel: Channel,
    /// Where ranks of one machine meet; others tell each other by records.
    boards: Option<Boards>,
    deadline: Duration,
    /// Collectives that this rank has completed; between their steps, that it has gone on with.
    completed: Cell<u64>,
    /// The first failure; it refuses every later call.
    failure: RefCell<Option<CommError>>,
}

/// A failure on its way to the caller.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: CommError,
    /// Whether the other ranks do not learn of it unless this one tells them.
    pub(super) is_news: bool,
}

impl Meeting {
    pub(super) fn new(channel: Channel, deadline: Duration) -> Self {
        Meeting { channel, boards: None, deadline, completed: Cell::new(0), failure: RefCell::new(None) }
    }

    /// Has ranks meet at these from now on, of which all ranks have theirs.
    pub(super) fn set_boards(&mut self, boards: Boards) {
        self.boards = Some(boards);
    }

    pub(super) fn boards(&self) -> Option<&Boards> {
        self.boards.as_ref()
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

    /// Whether this communicator has failed because it waited for a rank.
    pub(super) fn was_late(&self, peer: usize) -> bool {
        matches!(&*self.failure.borrow(), Some(CommError::Timeout { missing, .. }) if missing.contains(&peer))
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.borrow().is_some()
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
        self.meet_with(call, Brings::NOTHING).map(drop)
    }

    /// The same, where ranks bring something. Gives back, by rank, what the others have for this one: as many bytes as they get.
    pub(super) fn meet_with(&self, call: Call, brings: Brings<'_>) -> Result<Vec<Cow<'_, [u8]>>> {
        self.check(call.operation)?;
        let outcome = self.first_round(call, brings).and_then(|brought| self.second_round(call).map(|()| brought));
        self.complete(call, outcome)
    }

    /// The same while ranks use each other's memory, without the second round: a rank that has given up says so in any case before the others'
    /// loans end, and none of them has lost anything before.
    pub(super) fn meet_within_loan(&self, call: Call, brings: Brings<'_>) -> Result<Vec<Cow<'_, [u8]>>> {
        self.check(call.operation)?;
        self.complete(call, self.first_round(call, brings))
    }

    fn complete<T>(&self, call: Call, outcome: Result<T, Failure>) -> Result<T> {
        let given = outcome.map_err(|failure| self.fail(call.operation, failure))?;
        self.count_completed();
        Ok(given)
    }

    /// All ranks have gone on with a collective.
    pub(super) fn count_completed(&self) {
        self.completed.set(self.completed.get() + 1);
    }

    fn first_round(&self, call: Call, brings: Brings<'_>) -> Result<Vec<Cow<'_, [u8]>>, Failure> {
        let (rank, world_size) = (self.channel.rank(), self.channel.world_size());
        let own = Record::Call { call, enclosed: Enclosed::default() };
        self.come(call.operation, &own, brings)?;
        self.wait_for_all(call.operation, &own)?;
        let mut brought = Vec::with_capacity(world_size);
        let mut calls = Vec::with_capacity(world_size);
        for peer in 0..world_size {
            let (record, piece) = if peer == rank { (own.clone(), Cow::default()) } else { self.take(peer) };
            let Record::Call { call: theirs, .. } = record else {
                return Err(misplaced(call.operation, peer, &record));
            };
            calls.push((peer, theirs));
            brought.push(piece);
        }
        // Every rank has the same calls to compare.
        compare(&calls).map_err(|failure| Failure { is_news: false, ..failure })?;
        let is_other = |peer: &usize| brought[*peer].len() != brings.piece(*peer, world_size).len();
        let other = self.channel.others().find(is_other);
        other.map_or(Ok(brought), |peer| Err(self.other_kind(call, peer)))
    }

    /// Calls for memory of the host bring their data along where they are few, those for memory of devices never do.
    fn other_kind(&self, call: Call, peer: usize) -> Failure {
        let reason =
            format!("rank {peer} makes this call for another kind of memory than this rank, or by another version");
        self.own_failure(call.operation, reason)
    }

    fn second_round(&self, call: Call) -> Result<(), Failure> {
        self.agree_on(call.operation, &Record::Go)
    }

    /// Says this to every other rank, and waits until all have said the same, which they do unless a rank has failed or is stopped.
    fn agree_on(&self, operation: Operation, word: &Record) -> Result<(), Failure> {
        self.come(operation, word, Brings::NOTHING)?;
        self.wait_for_all(operation, word)?;
        for peer in self.channel.others() {
            let (record, _) = self.take(peer);
            if record != *word {
                return Err(misplaced(operation, peer, &record));
            }
        }
        Ok(())
    }

    /// Tells every other rank this rank's word, with what it brings.
    fn come(&self, operation: Operation, word: &Record, brings: Brings<'_>) -> Result<(), Failure> {
        if let Some(boards) = &self.boards {
            return boards.come(word, brings).map_err(|error| known(&error));
        }
        let record = |peer| match word {
            Record::Call { call, .. } => {
                let enclosed = Enclosed(brings.piece(peer, self.channel.world_size()).to_vec());
                Record::Call { call: *call, enclosed }
            }
            word => word.clone(),
        };
        let mut others = self.channel.others();
        let told = others.try_for_each(|peer| self.channel.post(peer, record(peer)));
        told.map_err(|error| self.broken(operation, &error))
    }

    /// Waits until every other rank has said a word like this rank's own.
    fn wait_for_all(&self, operation: Operation, own: &Record) -> Result<(), Failure> {
        let mut wait = Wait::new(Some(self.deadline));
        loop {
            if let Some(boards) = &self.boards {
                if boards.are_all_here() {
                    return Ok(());
                }
                if !wait.is_time_to_listen() {
                    wait.pause();
                    continue;
                }
            }
            self.pump(operation)?;
            // Before failures are looked for: ranks that have come may have failed since, behind a collective in which nothing is missing here.
            let mut missing = Vec::new();
            for peer in 0..self.channel.world_size() {
                if peer != self.channel.rank() && !self.has_come(operation, peer, own)? {
                    missing.push(peer);
                }
            }
            if missing.is_empty() {
                return Ok(());
            }
            self.look_for_failure()?;
            if let Some(error) = self.boards.as_ref().and_then(Boards::closed_round) {
                return Err(known(&error));
            }
            if wait.is_over() {
                // Those who are here may differ already, which says more.
                let timeout = CommError::Timeout { operation, missing: missing.clone(), deadline: self.deadline };
                let late = Failure { error: timeout, is_news: true };
                let failure = self.compare_without(&missing, own).err().unwrap_or(late);
                if let Some(failure) = self.give_up(failure, Boards::close_round) {
                    return Err(failure);
                }
            }
            wait.pause();
        }
    }

    /// The failure that a wait ends with which this one has made hopeless: where ranks have boards, that of the first to close what they wait for.
    /// Nothing, if all have come at the last moment.
    pub(super) fn give_up(
        &self,
        own: Failure,
        close: fn(&Boards, &CommError) -> Option<(usize, CommError)>,
    ) -> Option<Failure> {
        let Some(boards) = &self.boards else { return Some(own) };
        let (closer, error) = close(boards, &own.error)?;
        Some(if closer == self.channel.rank() { own } else { known(&error) })
    }

    /// Whether a rank has said a word like this rank's own, or an error if it does something else.
    fn has_come(&self, operation: Operation, peer: usize, own: &Record) -> Result<bool, Failure> {
        let rank = self.channel.rank();
        if let Some(boards) = &self.boards {
            // Read in this order: a rank can come to this round and end its loan at any moment.
            let has_ended = boards.has_ended_early(peer);
            if boards.is_here(peer) {
                return Ok(true);
            }
            if let (true, Record::Call { call, .. }) = (has_ended, own) {
                // It believes that its work on what it was lent is over.
                return Err(mismatch((rank, *call), (peer, end_of_loan())));
            }
        }
        let by_records = self.boards.is_none();
        match (self.channel.inbox()[peer].front(), own) {
            (None, _) => Ok(false),
            (Some(Record::Failed { error, .. }), _) => Err(known(error)),
            (Some(Record::Call { .. }), Record::Call { .. }) if by_records => Ok(true),
            (Some(record), own) if by_records && record == own => Ok(true),
            // This rank alone knows.
            (Some(Record::Offer { call: theirs, .. }), Record::Call { call, .. }) => {
                Err(mismatch((rank, *call), (peer, *theirs)))
            }
            (Some(record), _) => Err(misplaced(operation, peer, record)),
        }
    }

    /// What a rank has said that has come, and brought for this one.
    fn take(&self, peer: usize) -> (Record, Cow<'_, [u8]>) {
        if let Some(boards) = &self.boards {
            let word = boards.word(peer);
            let brought = boards.brought(peer, &word);
            return (word.record, brought.into());
        }
        match self.channel.inbox()[peer].pop_front() {
            Some(Record::Call { call, enclosed }) => {
                (Record::Call { call, enclosed: Enclosed::default() }, enclosed.0.into())
            }
            record => (record.expect("it has come"), Cow::default()),
        }
    }

    /// Compares the calls of all ranks but these, whose calls have come.
    fn compare_without(&self, missing: &[usize], own: &Record) -> Result<(), Failure> {
        let call_of = |peer: usize| {
            let record = match &self.boards {
                _ if peer == self.channel.rank() => Some(own.clone()),
                Some(boards) => Some(boards.word(peer).record),
                None => self.channel.inbox()[peer].front().cloned(),
            };
            match record {
                Some(Record::Call { call, .. }) => Some((peer, call)),
                _ => None,
            }
        };
        let here = (0..self.channel.world_size()).filter(|peer| !missing.contains(peer));
        compare(&here.filter_map(call_of).collect::<Vec<_>>())
    }

    /// Takes a step of a collective that all ranks have gone on with, which is not completed before the last of its steps. A rank that has taken
    /// that, and fails in its next call, has done its part for those that are behind it.
    fn take_step<T>(&self, operation: Operation, step: impl FnOnce() -> Result<T, Failure>) -> Result<T> {
        let completed = self.completed.replace(self.completed.get() - 1);
        let outcome = step().map_err(|failure| self.fail(operation, failure));
        self.completed.set(completed);
        outcome
    }

    /// Waits, in the middle of a collective, until all ranks have come as far.
    pub(super) fn go_on(&self, operation: Operation) -> Result<()> {
        self.take_step(operation, || self.agree_on(operation, &Record::Go))
    }

    /// Ends a collective in which a rank can fail half-way on its own: waits until every rank has done its part. All ranks have to
    /// call it, and each gets a failure if one has failed.
    #[cfg(feature = "cuda")]
    pub(super) fn close(&self, operation: Operation, own: Result<(), String>) -> Result<()> {
        self.take_step(operation, || match own {
            Ok(()) => self.agree_on(operation, &Record::Closed),
            Err(reason) => Err(self.own_failure(operation, reason)),
        })
    }

    pub(super) fn pump(&self, operation: Operation) -> Result<(), Failure> {
        self.channel.pump().map_err(|error| self.broken(operation, &error))
    }

    /// A failure that another rank has told, for a wait that it may concern. One from after the collective that this rank is still
    /// in does not: whoever sent it has everybody's call, and has sent its own data.
    pub(super) fn look_for_failure(&self) -> Result<(), Failure> {
        let inbox = self.channel.inbox();
        let failure = inbox.iter().flatten().find_map(|record| match record {
            Record::Failed { completed, error } if *completed <= self.completed.get() => Some(known(error)),
            _ => None,
        });
        failure.map_or(Ok(()), Err)
    }

    /// Waits until all streams are over, or nothing has moved for the deadline and they can be left.
    pub(super) fn finish_streams(&self, operation: Operation, mut streams: Vec<Stream>) -> Result<()> {
        self.take_step(operation, || self.wait_for_streams(operation, &mut streams))
    }

    fn wait_for_streams(&self, operation: Operation, streams: &mut [Stream]) -> Result<(), Failure> {
        let mut stall = Stall::new();
        while !streams.iter().all(Stream::is_done) {
            let has_moved = streams.iter_mut().fold(false, |moved, stream| stream.advance(&self.channel) | moved);
            if has_moved {
                stall.end();
                continue;
            }
            let is_over = stall.is_over(self.deadline);
            let can_be_left = streams.iter().all(Stream::can_be_left);
            if can_be_left && (stall.is_long() || stall.elapsed() >= self.deadline) {
                self.pump(operation)?;
                self.look_for_failure()?;
            }
            if can_be_left && is_over {
                let late = streams.iter().filter(|stream| !stream.is_done());
                let mut missing: Vec<usize> = late.map(|stream| stream.peer).collect();
                missing.sort_unstable();
                missing.dedup();
                let error = CommError::Timeout { operation, missing, deadline: self.deadline };
                return Err(Failure { error, is_news: true });
            }
            std::thread::yield_now();
        }
        let error = streams.iter_mut().find_map(Stream::take_error);
        error.map_or(Ok(()), |error| Err(self.broken(operation, &error)))
    }

    /// Waits until messages are out and in.
    #[cfg(feature = "cuda")]
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

/// An error that names two calls that differ, if any do.
fn compare(calls: &[(usize, Call)]) -> Result<(), Failure> {
    let Some(&first) = calls.first() else { return Ok(()) };
    let other = calls.iter().find(|(_, call)| !call.fits(&first.1));
    other.map_or(Ok(()), |&other| Err(mismatch(first, other)))
}

/// A failure that whoever found it has told everybody.
pub(super) fn known(error: &CommError) -> Failure {
    Failure { error: error.clone(), is_news: false }
}

pub(super) fn mismatch(one: (usize, Call), other: (usize, Call)) -> Failure {
    Failure { error: CommError::mismatch(one, other), is_news: true }
}

pub(super) fn misplaced(operation: Operation, rank: usize, record: &Record) -> Failure {
    // On a board that is what cannot be read.
    if let Record::Failed { error, .. } = record {
        return Failure { error: error.clone(), is_news: true };
    }
    let reason = format!("it sent {record:?} where no rank of this version does");
    Failure { error: CommError::Transport { operation, rank, reason }, is_news: true }
}

/// A wait: busy at first, and then at intervals, so that ranks which share a core let the late one run.
#[derive(Debug)]
pub(super) struct Wait {
    stall: Stall,
    deadline: Option<Duration>,
    pauses: u32,
}

impl Wait {
    pub(super) fn new(deadline: Option<Duration>) -> Self {
        Wait { stall: Stall::new(), deadline, pauses: 0 }
    }

    /// Whether the deadline has passed.
    pub(super) fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| self.stall.is_over(deadline))
    }

    /// Whether whoever looks at boards listens to the other ranks as well this time: that takes longer.
    pub(super) fn is_time_to_listen(&self) -> bool {
        self.pauses % LISTENS_AFTER == LISTENS_AFTER - 1 || self.stall.elapsed() >= BUSY
    }

    pub(super) fn pause(&mut self) {
        self.pauses = self.pauses.wrapping_add(1);
        if self.stall.elapsed() < BUSY {
            std::thread::yield_now();
        } else {
            std::thread::sleep(NAP);
        }
    }
}
