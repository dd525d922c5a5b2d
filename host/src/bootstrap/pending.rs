//! The pending calls: calls that ranks have posted and that are not yet matched, in each rank's order. Ranks may be ahead of each other.
//!
//! [`Matching`] takes one list of calls of a rank at a time; later calls of the rank wait here, whether the rank waits for them or has
//! continued. Like the matching, this is pure state: it does not depend on time, threads or connections.

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};

use super::matching::Matching;
use super::protocol::{ANNOUNCED_LIMIT, CALLS_LIMIT};
use crate::error::{Call, CommError, Operation};

/// The coordinator reports progress to a rank without a request when this many of its announced calls have been matched since the last
/// report.
const TELL_EVERY: u64 = ANNOUNCED_LIMIT / 4;

/// The calls that a rank posts in one request.
#[derive(Debug)]
pub(super) struct PendingCalls {
    pub(super) calls: Vec<Call>,
    /// The rank's bytes in an exchange.
    pub(super) contribution: Option<Vec<u8>>,
    /// Whether the rank waits until the calls are matched. If not, the calls are announced.
    pub(super) is_awaited: bool,
}

/// The pending calls of one rank.
#[derive(Debug, Default)]
struct CallQueue {
    /// The calls that are being matched.
    current: Option<PendingCalls>,
    /// The calls of later requests, in order.
    later: VecDeque<PendingCalls>,
    /// The number of calls in `current` and `later`.
    calls: usize,
    /// The number of announced calls that have been matched, from the beginning.
    matched: u64,
    /// The value of `matched` in the last report to the rank.
    told: u64,
    /// The values of `matched` at which the rank has requested a report; a rank that waits for one may have requested a later one since.
    /// A member requests each count once, and none beyond its announced calls.
    asked: BTreeSet<u64>,
}

impl CallQueue {
    fn all(&self) -> impl Iterator<Item = &PendingCalls> {
        self.current.iter().chain(&self.later)
    }
}

/// The pending calls of all ranks. Not to be used after a mismatch.
#[derive(Debug)]
pub(super) struct Pending {
    matching: Matching,
    queues: Vec<CallQueue>,
}

impl Pending {
    pub(super) fn new(world_size: usize) -> Self {
        Pending { matching: Matching::new(world_size), queues: (0..world_size).map(|_| CallQueue::default()).collect() }
    }

    /// Posts calls of `rank` that [`check`](super::matching::check) has accepted. Returns the calls that are now complete, with their
    /// ranks; each element holds calls that were completed together.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] if some calls can never be completed.
    pub(super) fn post(
        &mut self,
        rank: usize,
        pending: PendingCalls,
    ) -> Result<Vec<Vec<(usize, PendingCalls)>>, CommError> {
        self.queues[rank].calls += pending.calls.len();
        self.queues[rank].later.push_back(pending);
        let mut completed = Vec::new();
        let mut open = vec![rank];
        while let Some(rank) = open.pop() {
            let queue = &mut self.queues[rank];
            if queue.current.is_some() {
                continue;
            }
            let Some(pending) = queue.later.pop_front() else { continue };
            let released = self.matching.post(rank, &queue.current.insert(pending).calls)?;
            if released.is_empty() {
                continue;
            }
            completed.push(released.iter().filter_map(|&rank| Some((rank, self.complete(rank)?))).collect());
            open.extend(released);
        }
        Ok(completed)
    }

    fn complete(&mut self, rank: usize) -> Option<PendingCalls> {
        let queue = &mut self.queues[rank];
        let pending = queue.current.take()?;
        queue.calls -= pending.calls.len();
        queue.matched += if pending.is_awaited { 0 } else { pending.calls.len() as u64 };
        Some(pending)
    }

    /// Whether `rank` may post this many more calls: members wait before they exceed the coordinator's queue.
    pub(super) fn has_room(&self, rank: usize, calls: usize) -> bool {
        // Beside the announced calls, there can be one awaited request.
        self.queues[rank].calls + calls <= ANNOUNCED_LIMIT as usize + 2 * CALLS_LIMIT
    }

    /// Requests a report to `rank` when this many of its announced calls have been matched.
    pub(super) fn ask(&mut self, rank: usize, calls: u64) {
        self.queues[rank].asked.insert(calls);
    }

    /// The number of matched announced calls of `rank`, if a report to the rank is due.
    pub(super) fn news(&mut self, rank: usize) -> Option<u64> {
        let queue = &mut self.queues[rank];
        let mut is_answer = false;
        while queue.asked.first().is_some_and(|&asked| asked <= queue.matched) {
            queue.asked.pop_first();
            is_answer = true;
        }
        if is_answer || queue.matched - queue.told >= TELL_EVERY { self.last_news(rank) } else { None }
    }

    /// The number of matched announced calls of `rank`, if the rank does not know it yet.
    pub(super) fn last_news(&mut self, rank: usize) -> Option<u64> {
        let queue = &mut self.queues[rank];
        let is_new = queue.told < queue.matched;
        queue.told = queue.matched;
        is_new.then_some(queue.matched)
    }

    /// Records that `rank` has left: its awaited calls are removed, its earlier announcements stay.
    pub(super) fn depart(&mut self, rank: usize) {
        let queue = &mut self.queues[rank];
        let awaited = queue.later.iter().position(|pending| pending.is_awaited);
        queue.later.truncate(awaited.unwrap_or(queue.later.len()));
        if queue.current.as_ref().is_some_and(|pending| pending.is_awaited) {
            self.withdraw(rank);
        }
    }

    /// Removes all pending calls of `rank`.
    pub(super) fn withdraw(&mut self, rank: usize) {
        let queue = &mut self.queues[rank];
        queue.current = None;
        queue.later.clear();
        self.matching.withdraw(rank);
    }

    /// Whether `rank` waits in a pending call.
    pub(super) fn is_awaiting(&self, rank: usize) -> bool {
        self.queues[rank].all().any(|pending| pending.is_awaited)
    }

    /// Whether fewer than `calls` announced calls of `rank` have been matched.
    pub(super) fn lacks(&self, rank: usize, calls: u64) -> bool {
        self.queues[rank].matched < calls
    }

    /// The operation that errors about the oldest incomplete calls of `rank` name.
    pub(super) fn operation(&self, rank: usize) -> Option<Operation> {
        self.matching.operation(rank)
    }

    /// The ranks without pending calls for which `rank` waits, directly or through other ranks that wait for them.
    pub(super) fn missing(&self, rank: usize) -> Vec<usize> {
        self.matching.missing(rank)
    }

    /// A rank whose calls need further calls of a rank that has left, and the rank that has left.
    pub(super) fn missed(&self, has_left: impl Fn(usize) -> bool) -> Option<(usize, usize)> {
        let world_size = self.queues.len();
        let gone: Vec<usize> = (0..world_size).filter(|&peer| has_left(peer) && self.is_empty(peer)).collect();
        let waiting = (0..world_size).filter(|&rank| !gone.is_empty() && !self.is_empty(rank));
        let needed = |rank: usize| gone.iter().find(|&&peer| self.matching.needs(rank, peer));
        waiting.filter_map(|rank| Some((rank, *needed(rank)?))).next()
    }

    fn is_empty(&self, rank: usize) -> bool {
        self.queues[rank].all().next().is_none()
    }
}
