//! The engine for calls: ranks post lists of calls, the engine matches them, and says which calls are to be carried out or why none can be.
//!
//! It is pure state. It has no clock, no thread, no memory of a caller and no connection: a *carrier* feeds it with the calls, departures and
//! passed deadlines of ranks, and carries out the [`Run`]s that it returns.
//!
//! - A rank [posts](Engine::post) a list of calls, such as a collective, or all sends and receives of one exchange. Only the oldest list of a
//!   rank that is not over is matched; later ones wait behind it, whether the rank waits for them or has gone on.
//! - The collectives of a list match once every rank's oldest list has the same collectives. Sends and receives match in order, for each pair
//!   of ranks, and each pair of them may be carried out at once.
//! - A list is over when all its calls have been matched and [finished](Engine::finish).
//! - A rank with unmatched calls waits for *further* calls of certain ranks, each because of one call. These waits are the edges of a graph
//!   (`waits`). Ranks on a cycle can never go on; a new cycle leads through the rank whose list was matched last. A wait for a rank that has
//!   left is a failure, and so is a wait whose deadline has passed.
//! - The first [failure](Engine::failure) is final. What was begun is still finished, and nothing else is begun.

mod closable;
#[cfg(test)]
mod explore;
mod list;
#[cfg(test)]
pub(crate) mod tests;
mod waits;

use std::collections::VecDeque;
use std::time::Duration;

pub(crate) use self::closable::{Closable, Closing};
use self::list::List;
pub(crate) use self::list::check;
pub(crate) use self::waits::{compare, compare_transfer};
use crate::error::{Call, CommError, Departure, Operation};

/// A list that a rank has posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub(crate) rank: usize,
    /// The number of the list among the lists of the rank, from 1.
    pub(crate) number: u64,
}

/// A send or a receive in the oldest list of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallIndex {
    pub(crate) rank: usize,
    /// The index of the call in its list.
    pub(crate) index: usize,
}

/// Calls that match, and that ranks carry out now; [`Engine::finish`] ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "calls that match have to be carried out"]
pub(crate) enum Run {
    /// The collectives in the oldest list of every rank, which are the same.
    Collectives,
    /// A send and its receive, of equal length and dtype.
    Transfer { send: CallIndex, receive: CallIndex },
}

/// The lists and the departure of one rank.
#[derive(Clone, Debug, Default)]
struct Rank {
    /// The lists that are not over, the oldest first.
    lists: VecDeque<List>,
    /// How many lists were posted, and how many are over.
    posted: u64,
    over: u64,
    departure: Option<Departure>,
}

/// The calls of all ranks of a group.
#[derive(Clone, Debug)]
pub(crate) struct Engine {
    ranks: Vec<Rank>,
    has_departures: bool,
    failure: Option<CommError>,
}

impl Engine {
    pub(crate) fn new(world_size: usize) -> Self {
        let ranks = (0..world_size).map(|_| Rank::default()).collect();
        Engine { ranks, has_departures: false, failure: None }
    }

    pub(crate) fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// The first failure of the group.
    pub(crate) fn failure(&self) -> Option<&CommError> {
        self.failure.as_ref()
    }

    /// Ends all unmatched calls with a failure, unless the group has failed already.
    pub(crate) fn fail(&mut self, failure: CommError) {
        self.failure.get_or_insert(failure);
    }

    /// Posts a list of calls, which [`check`] has accepted; `is_awaited` is whether the rank waits until the list is over. Returns the calls to
    /// be carried out now. After a failure, the list is not kept.
    pub(crate) fn post(&mut self, rank: usize, calls: &[Call], is_awaited: bool) -> (Ticket, Vec<Run>) {
        let own = &mut self.ranks[rank];
        own.posted += 1;
        let ticket = Ticket { rank, number: own.posted };
        let mut runs = Vec::new();
        if self.failure.is_none() {
            own.lists.push_back(List::new(calls, is_awaited));
            if own.lists.len() == 1 {
                self.match_oldest(rank, &mut runs);
            }
            self.look_for_departed();
        }
        (ticket, runs)
    }

    /// Notes that a run has been carried out. Returns the calls to be carried out next, of lists behind those that are over now.
    pub(crate) fn finish(&mut self, run: Run) -> Vec<Run> {
        let mut runs = Vec::new();
        // A list in progress is never withdrawn, so it is still there.
        self.ranks_of(run).for_each(|rank| self.ranks[rank].lists[0].running -= 1);
        self.ranks_of(run).for_each(|rank| self.advance(rank, &mut runs));
        if !runs.is_empty() || self.has_departures {
            self.look_for_departed();
        }
        runs
    }

    /// The ranks that carry out a run, in order; a rank that sends to itself comes twice, once for each end.
    pub(crate) fn ranks_of(&self, run: Run) -> impl Iterator<Item = usize> + use<> {
        let (all, ends) = match run {
            Run::Collectives => (0..self.ranks.len(), None),
            Run::Transfer { send, receive } => (0..0, Some([send.rank, receive.rank])),
        };
        all.chain(ends.into_iter().flatten())
    }

    /// Removes the oldest list of `rank` if it is over, and matches the next one.
    fn advance(&mut self, rank: usize, runs: &mut Vec<Run>) {
        let own = &mut self.ranks[rank];
        if own.lists.front().is_some_and(List::is_over) {
            own.lists.pop_front();
            own.over += 1;
            if !own.lists.is_empty() && self.failure.is_none() {
                self.match_oldest(rank, runs);
            }
        }
    }

    /// Whether all calls of a list have been carried out.
    pub(crate) fn is_over(&self, ticket: Ticket) -> bool {
        self.ranks[ticket.rank].over >= ticket.number
    }

    /// Whether calls of `rank` are being carried out: other ranks may be using the rank's memory.
    pub(crate) fn is_running(&self, rank: usize) -> bool {
        self.oldest(rank).is_some_and(|list| list.running > 0)
    }

    /// The oldest list of a rank that is not over.
    pub(crate) fn current(&self, rank: usize) -> Option<Ticket> {
        self.oldest(rank).map(|_| Ticket { rank, number: self.ranks[rank].over + 1 })
    }

    /// Whether a rank waits in a list.
    pub(crate) fn is_waiting(&self, rank: usize) -> bool {
        self.ranks[rank].lists.iter().any(|list| list.is_awaited)
    }

    /// The operation that errors about the oldest list of a rank name.
    fn operation(&self, rank: usize) -> Operation {
        self.oldest(rank).map_or(Operation::Exchange, |list| list.operation)
    }

    /// Removes all lists of `rank`, which has given up or is lost; none of its calls is being carried out any more.
    pub(crate) fn withdraw(&mut self, rank: usize) {
        debug_assert!(!self.is_running(rank), "rank {rank} withdraws calls in progress");
        self.ranks[rank].lists.clear();
    }

    /// Notes that `rank` has left. The first list in which it waits is removed with all later ones; earlier lists, from which it has gone on,
    /// stay. Its departure is a failure once a call needs a further call of it. None of the removed calls is being carried out.
    pub(crate) fn depart(&mut self, rank: usize, departure: Departure) {
        let own = &mut self.ranks[rank];
        let kept = own.lists.iter().position(|list| list.is_awaited).unwrap_or(own.lists.len());
        own.lists.truncate(kept);
        own.departure = Some(departure);
        self.has_departures = true;
        self.look_for_departed();
    }

    /// Notes that the deadline of the oldest list of `rank` has passed: a failure if the list needs further calls. Calls that are being carried
    /// out have no deadline here.
    pub(crate) fn expire(&mut self, rank: usize, deadline: Duration) {
        let missing = self.missing(rank);
        if !missing.is_empty() {
            self.fail(CommError::Timeout { operation: self.operation(rank), missing, deadline });
        }
    }

    /// Fails if a rank waits for a rank that has left.
    fn look_for_departed(&mut self) {
        if !self.has_departures || self.failure.is_some() {
            return;
        }
        let gone = |rank: usize| self.ranks[rank].departure.filter(|_| self.oldest(rank).is_none());
        let needed = |rank: usize| {
            let (peer, departure) =
                self.direct_waits(rank).into_iter().find_map(|(peer, _)| Some((peer, gone(peer)?)))?;
            Some(CommError::PeerGone { operation: self.operation(rank), rank: peer, departure })
        };
        self.failure = (0..self.ranks.len()).find_map(needed);
    }

    fn oldest(&self, rank: usize) -> Option<&List> {
        self.ranks[rank].lists.front()
    }

    /// Matches the calls of a list that has become the oldest one of its rank. If the list contradicts another one, nothing of it is begun.
    fn match_oldest(&mut self, rank: usize, runs: &mut Vec<Run>) {
        let (transfers, compared) = match self.counterparts(rank) {
            Ok(transfers) => (transfers, self.compare_collectives(rank)),
            Err(mismatch) => (Vec::new(), Err(mismatch)),
        };
        if let Err(mismatch) = compared {
            return self.fail(mismatch);
        }
        for &(send, receive) in &transfers {
            self.ranks[send.rank].lists[0].begin_send(receive.rank);
            self.ranks[receive.rank].lists[0].begin_receive(send.rank);
            runs.push(Run::Transfer { send, receive });
        }
        if (0..self.ranks.len()).all(|rank| self.has_collectives(rank)) {
            self.ranks.iter_mut().for_each(|rank| rank.lists[0].begin_collectives());
            runs.push(Run::Collectives);
        }
        if let Some(cycle) = self.cycle(rank) {
            self.fail(cycle);
        }
    }
}
