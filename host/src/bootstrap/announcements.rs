//! The lists of calls that a rank has posted on the control channel, and the reports of matched calls to the rank.
//!
//! A rank goes on from calls that it announces, and asks later how many of them have been matched. This module counts; the matching is the
//! engine's.

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};

use super::protocol::{ANNOUNCED_LIMIT, CALLS_LIMIT};

/// The coordinator reports progress to a rank without a request when this many of its announced calls have been matched since the last
/// report.
const TELL_EVERY: u64 = ANNOUNCED_LIMIT / 4;

/// A list of calls that a rank has posted in one request.
#[derive(Debug)]
pub(super) struct Posted {
    /// The number of the calls.
    pub(super) calls: usize,
    /// The rank's bytes in an exchange.
    pub(super) contribution: Option<Vec<u8>>,
    /// Whether the rank waits until the calls are matched. If not, the calls are announced.
    pub(super) is_awaited: bool,
}

/// The lists of one rank.
#[derive(Debug, Default)]
pub(super) struct Announcements {
    /// The lists that are not over, the oldest first.
    lists: VecDeque<Posted>,
    /// The number of calls in `lists`.
    calls: usize,
    /// The numbers of announced calls, and of those that have been matched, from the beginning.
    announced: u64,
    matched: u64,
    /// The value of `matched` in the last report to the rank.
    told: u64,
    /// The values of `matched` at which the rank has requested a report; a rank that waits for one may have requested a later one since.
    asked: BTreeSet<u64>,
}

impl Announcements {
    /// Whether the rank may post this many more calls: members wait before they exceed the coordinator's queue.
    pub(super) fn has_room(&self, calls: usize) -> bool {
        // Beside the announced calls, there can be one awaited request.
        self.calls + calls <= ANNOUNCED_LIMIT as usize + 2 * CALLS_LIMIT
    }

    pub(super) fn post(&mut self, list: Posted) {
        self.calls += list.calls;
        self.announced += if list.is_awaited { 0 } else { list.calls as u64 };
        self.lists.push_back(list);
    }

    /// The oldest list that is not over.
    pub(super) fn current(&mut self) -> Option<&mut Posted> {
        self.lists.front_mut()
    }

    /// Notes that the oldest list is over. Returns whether the rank waits for it.
    pub(super) fn complete(&mut self) -> bool {
        let Some(list) = self.lists.pop_front() else { return false };
        self.calls -= list.calls;
        self.matched += if list.is_awaited { 0 } else { list.calls as u64 };
        list.is_awaited
    }

    /// Requests a report when this many announced calls have been matched. Returns whether so many were announced.
    pub(super) fn ask(&mut self, calls: u64) -> bool {
        let is_possible = calls <= self.announced;
        if is_possible {
            self.asked.insert(calls);
        }
        is_possible
    }

    /// The number of matched announced calls, if a report to the rank is due.
    pub(super) fn news(&mut self) -> Option<u64> {
        let mut is_answer = false;
        while self.asked.first().is_some_and(|&asked| asked <= self.matched) {
            self.asked.pop_first();
            is_answer = true;
        }
        if is_answer || self.matched - self.told >= TELL_EVERY { self.last_news() } else { None }
    }

    /// The number of matched announced calls, if the rank does not know it yet.
    pub(super) fn last_news(&mut self) -> Option<u64> {
        let is_new = self.told < self.matched;
        self.told = self.matched;
        is_new.then_some(self.matched)
    }

    /// Whether fewer than `calls` announced calls have been matched.
    pub(super) fn lacks(&self, calls: u64) -> bool {
        self.matched < calls
    }
}
