//! The calls that ranks have posted and that are not yet matched, in each rank's order: ranks may be at different places.
//!
//! [`Matching`] decides about one post a rank; whatever a rank posts after it waits here, whether the rank waits for it
//! or has gone on. Pure state, like the matching: no time, no threads, no connections.

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};

use super::matching::Matching;
use super::message::{ANNOUNCED_LIMIT, CALLS_LIMIT};
use crate::error::{Call, CommError, Operation};

/// The coordinator reports progress to a rank unasked when so many of its announced calls have been matched since the last report.
const TELL_EVERY: u64 = ANNOUNCED_LIMIT / 4;

/// The calls that a rank posts at once.
#[derive(Debug)]
pub(super) struct Post {
    pub(super) calls: Vec<Call>,
    /// The rank's bytes for an exchange.
    pub(super) contribution: Option<Vec<u8>>,
    /// Whether the rank waits for the end of it. If not, the calls are announced.
    pub(super) is_awaited: bool,
}

/// The posts of one rank.
#[derive(Debug, Default)]
struct CallQueue {
    /// The post that is being matched.
    current: Option<Post>,
    /// The posts after it.
    later: VecDeque<Post>,
    /// Calls of all of these posts.
    calls: usize,
    /// Announced calls that have been matched, from the beginning.
    matched: u64,
    /// The number of them that the rank was told last.
    told: u64,
    /// The counts that it has asked to be told of, each when it is reached: a rank that waits for one may have asked for a later one since. A member asks
    /// for each count once, and for none that it has not announced.
    asked: BTreeSet<u64>,
}

impl CallQueue {
    fn posts(&self) -> impl Iterator<Item = &Post> {
        self.current.iter().chain(&self.later)
    }
}

/// The posts of all ranks. After a mismatch it is not to be used again.
#[derive(Debug)]
pub(super) struct Pending {
    matching: Matching,
    queues: Vec<CallQueue>,
}

impl Pending {
    pub(super) fn new(world_size: usize) -> Self {
        Pending { matching: Matching::new(world_size), queues: (0..world_size).map(|_| CallQueue::default()).collect() }
    }

    /// `rank` makes a post of calls that [`check`](super::matching::check) has passed. Returns the posts that are now
    /// complete: those that were completed at once, with their ranks, in each element.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] if some post can never be completed.
    pub(super) fn post(&mut self, rank: usize, post: Post) -> Result<Vec<Vec<(usize, Post)>>, CommError> {
        self.queues[rank].calls += post.calls.len();
        self.queues[rank].later.push_back(post);
        let mut completed = Vec::new();
        let mut open = vec![rank];
        while let Some(rank) = open.pop() {
            let queue = &mut self.queues[rank];
            if queue.current.is_some() {
                continue;
            }
            let Some(post) = queue.later.pop_front() else { continue };
            let released = self.matching.post(rank, &queue.current.insert(post).calls)?;
            if released.is_empty() {
                continue;
            }
            completed.push(released.iter().filter_map(|&rank| Some((rank, self.complete(rank)?))).collect());
            open.extend(released);
        }
        Ok(completed)
    }

    fn complete(&mut self, rank: usize) -> Option<Post> {
        let queue = &mut self.queues[rank];
        let post = queue.current.take()?;
        queue.calls -= post.calls.len();
        queue.matched += if post.is_awaited { 0 } else { post.calls.len() as u64 };
        Some(post)
    }

    /// Whether `rank` may post so many more calls: members wait before they exceed the coordinator's queue.
    pub(super) fn has_room(&self, rank: usize, calls: usize) -> bool {
        // Beside the announced calls there can be a post that is awaited.
        self.queues[rank].calls + calls <= ANNOUNCED_LIMIT as usize + 2 * CALLS_LIMIT
    }

    /// Requests a report to `rank` when that many of its announced calls have been matched.
    pub(super) fn ask(&mut self, rank: usize, calls: u64) {
        self.queues[rank].asked.insert(calls);
    }

    /// How many announced calls of `rank` have been matched, if a report to the rank is due.
    pub(super) fn news(&mut self, rank: usize) -> Option<u64> {
        let queue = &mut self.queues[rank];
        let mut is_answer = false;
        while queue.asked.first().is_some_and(|&asked| asked <= queue.matched) {
            queue.asked.pop_first();
            is_answer = true;
        }
        if is_answer || queue.matched - queue.told >= TELL_EVERY { self.last_news(rank) } else { None }
    }

    /// How many announced calls of `rank` have been matched, if the rank does not know it yet.
    pub(super) fn last_news(&mut self, rank: usize) -> Option<u64> {
        let queue = &mut self.queues[rank];
        let is_new = queue.told < queue.matched;
        queue.told = queue.matched;
        is_new.then_some(queue.matched)
    }

    /// `rank` has left: its awaited post is removed, its earlier announcements stay.
    pub(super) fn depart(&mut self, rank: usize) {
        let queue = &mut self.queues[rank];
        let awaited = queue.later.iter().position(|post| post.is_awaited);
        queue.later.truncate(awaited.unwrap_or(queue.later.len()));
        if queue.current.as_ref().is_some_and(|post| post.is_awaited) {
            self.withdraw(rank);
        }
    }

    /// Removes all posts of `rank`.
    pub(super) fn withdraw(&mut self, rank: usize) {
        let queue = &mut self.queues[rank];
        queue.current = None;
        queue.later.clear();
        self.matching.withdraw(rank);
    }

    /// Whether `rank` waits for the end of a post.
    pub(super) fn is_awaiting(&self, rank: usize) -> bool {
        self.queues[rank].posts().any(|post| post.is_awaited)
    }

    /// Whether fewer than that many announced calls of `rank` have been matched.
    pub(super) fn lacks(&self, rank: usize, calls: u64) -> bool {
        self.queues[rank].matched < calls
    }

    /// The name of the oldest incomplete post of `rank` in errors.
    pub(super) fn operation(&self, rank: usize) -> Option<Operation> {
        self.matching.operation(rank)
    }

    /// The ranks without a post for which `rank` waits, directly or through other ranks that wait for them.
    pub(super) fn missing(&self, rank: usize) -> Vec<usize> {
        self.matching.missing(rank)
    }

    /// A rank with a post that needs a further one of a rank which has left, and that rank.
    pub(super) fn missed(&self, has_left: impl Fn(usize) -> bool) -> Option<(usize, usize)> {
        let world_size = self.queues.len();
        let gone: Vec<usize> = (0..world_size).filter(|&peer| has_left(peer) && self.is_empty(peer)).collect();
        let waiting = (0..world_size).filter(|&rank| !gone.is_empty() && !self.is_empty(rank));
        let needed = |rank: usize| gone.iter().find(|&&peer| self.matching.needs(rank, peer));
        waiting.filter_map(|rank| Some((rank, *needed(rank)?))).next()
    }

    fn is_empty(&self, rank: usize) -> bool {
        self.queues[rank].posts().next().is_none()
    }
}
