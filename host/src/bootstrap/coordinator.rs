//! The coordinator of a group: the engine for the calls of members, fed by their requests. It lives in rank 0's process.
//!
//! It receives the requests of all members, by calls from its own process and over connections from others; every answer is an event for
//! one member or for all. It owns no thread and no clock: members report when their deadlines pass.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::announcements::{Announcements, Posted};
use super::control_channel::Outbox;
use super::endpoint::Endpoint;
use super::frame::{FRAME_LIMIT, encode};
use super::protocol::{CALLS_LIMIT, CONTRIBUTION_LIMIT, Event, Network, Request, bounded, violation};
use crate::engine::{Engine, Run, check};
use crate::error::{Call, CommError, Departure, Operation};

/// The most bytes of contributions in one frame.
const BATCH: usize = FRAME_LIMIT / 4;

/// The route by which events reach a member: a call in this process, or a connection.
#[derive(Clone, Debug)]
pub(super) enum Route {
    Local(Arc<Endpoint>),
    Remote(Outbox),
}

impl Route {
    /// Sends the same event to many members, encoded once.
    pub(super) fn tell_all<'a>(routes: impl IntoIterator<Item = &'a Route>, event: impl Fn() -> Event) {
        let mut frame: Option<Arc<[u8]>> = None;
        for route in routes {
            match (route, &frame) {
                (Route::Local(endpoint), _) => endpoint.deliver(event()),
                (Route::Remote(outbox), Some(frame)) => outbox.send_frame(frame.clone()),
                (Route::Remote(outbox), None) => match encode(&event(), FRAME_LIMIT) {
                    Ok(bytes) => outbox.send_frame(frame.insert(bytes.into()).clone()),
                    Err(error) => tracing::error!(%error, "an event was not sent"),
                },
            }
        }
    }
}

/// A request that no member of this version makes; no further request of its sender is accepted.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Violation(pub(super) &'static str);

/// A query to all ranks for the number of the collective that they have reached.
#[derive(Debug)]
struct Inquiry {
    number: u64,
    sequence: u64,
    operation: Operation,
    deadline: Duration,
    answers: Vec<Option<u64>>,
}

#[derive(Debug)]
struct CoordinatorState {
    routes: Vec<Route>,
    engine: Engine,
    announcements: Vec<Announcements>,
    /// For each rank that has left, the number of the last collective that it has reached.
    left: Vec<Option<u64>>,
    /// Whether the engine's failure was sent to the members.
    is_failure_told: bool,
    inquiry: Option<Inquiry>,
    inquiries: u64,
    /// Rank 0 has left, and its process ends the connections.
    is_closed: bool,
}

#[derive(Debug)]
pub(super) struct Coordinator {
    state: Mutex<CoordinatorState>,
    pub(super) network: Network,
}

impl Coordinator {
    /// Makes the coordinator of the members that `routes` reach, in rank order, and tells each member that the group is complete.
    pub(super) fn new(routes: Vec<Route>, network: Network) -> Self {
        Route::tell_all(&routes, || Event::Start(network.clone()));
        let world_size = routes.len();
        let state = CoordinatorState {
            routes,
            engine: Engine::new(world_size),
            announcements: (0..world_size).map(|_| Announcements::default()).collect(),
            left: vec![None; world_size],
            is_failure_told: false,
            inquiry: None,
            inquiries: 0,
            is_closed: false,
        };
        Coordinator { state: Mutex::new(state), network }
    }

    /// No user code runs under the lock, so a poisoned one still guards consistent state.
    fn lock(&self) -> MutexGuard<'_, CoordinatorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles a request of a member.
    ///
    /// # Errors
    /// [`Violation`] for a request that no member of this version makes.
    pub(super) fn receive(&self, rank: usize, request: Request) -> Result<(), Violation> {
        let mut state = self.lock();
        if state.is_closed {
            return Ok(());
        }
        match request {
            Request::Post { calls, contribution } => state.post(rank, &calls, contribution, true)?,
            Request::Announce { calls } => state.post(rank, &calls, None, false)?,
            Request::Confirm { calls } => state.confirm(rank, calls)?,
            Request::Unconfirmed { calls, deadline } => state.unconfirmed(rank, calls, deadline),
            Request::Overdue { deadline } => state.overdue(rank, deadline),
            Request::Late { sequence, operation, deadline } => state.inquire(rank, sequence, operation, deadline),
            Request::Conclude => state.conclude(),
            Request::Progress { inquiry, sequence } => state.answer(rank, inquiry, sequence),
            Request::Fail(failure) => state.engine.fail(failure),
            Request::Leave { departure, sequence } => state.depart(rank, departure, sequence),
            // The sender's deadline passed before it learnt that the group is complete.
            Request::GiveUp { .. } => {}
        }
        state.tell_failure();
        Ok(())
    }

    /// The connection to a rank broke before the rank left the group, or carried what no rank sends ([`io::ErrorKind::InvalidData`]).
    pub(super) fn lost(&self, rank: usize, reason: &io::Error) {
        let mut state = self.lock();
        if state.is_closed || state.left[rank].is_some() {
            return;
        }
        tracing::warn!(rank, %reason, "a rank is lost");
        let departure = Departure::Lost;
        state.left[rank] = Some(0);
        state.engine.withdraw(rank);
        state.engine.fail(match reason.kind() {
            io::ErrorKind::InvalidData => bounded(violation(rank, reason)),
            _ => CommError::PeerGone { operation: Operation::Exchange, rank, departure },
        });
        state.engine.depart(rank, departure);
        state.tell_failure();
    }

    /// Closes the connections after rank 0 has left.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        for route in &state.routes {
            if let Route::Remote(outbox) = route {
                outbox.close();
            }
        }
    }
}

impl CoordinatorState {
    fn tell_all(&self, event: impl Fn() -> Event) {
        let present = self.routes.iter().zip(&self.left).filter(|(_, left)| left.is_none());
        Route::tell_all(present.map(|(route, _)| route), event);
    }

    /// Sends the first failure to all members, once.
    fn tell_failure(&mut self) {
        if let (Some(failure), false) = (self.engine.failure(), self.is_failure_told) {
            self.tell_all(|| Event::Failed(failure.clone()));
            self.is_failure_told = true;
        }
    }

    fn post(
        &mut self,
        rank: usize,
        calls: &[Call],
        contribution: Option<Vec<u8>>,
        is_awaited: bool,
    ) -> Result<(), Violation> {
        if calls.is_empty() || calls.len() > CALLS_LIMIT || check(calls, rank, self.routes.len()).is_err() {
            return Err(Violation("a post of calls that its own side should have refused"));
        }
        if contribution.as_ref().is_some_and(|bytes| bytes.len() > CONTRIBUTION_LIMIT) {
            return Err(Violation("a contribution that its own side should have refused"));
        }
        // Another thread of the rank may have left in the meantime.
        if self.engine.failure().is_some() || self.left[rank].is_some() {
            return Ok(());
        }
        if is_awaited && self.engine.is_waiting(rank) {
            return Err(Violation("a post of a rank that waits in another"));
        }
        if !self.announcements[rank].has_room(calls.len()) {
            return Err(Violation("more calls than its own side should have announced"));
        }
        self.announcements[rank].post(Posted { calls: calls.len(), contribution, is_awaited });
        let (_, mut runs) = self.engine.post(rank, calls, is_awaited);
        while !runs.is_empty() {
            runs = runs.into_iter().flat_map(|run| self.carry_out(run)).collect();
        }
        Ok(())
    }

    /// Carries out calls that match: gathers the contributions of an exchange, and tells the ranks whose lists are over. The members move
    /// all other data.
    fn carry_out(&mut self, run: Run) -> Vec<Run> {
        if run == Run::Collectives {
            self.gather();
        }
        let mut lists: Vec<_> = self.engine.ranks_of(run).filter_map(|rank| self.engine.current(rank)).collect();
        // A rank may send to itself.
        lists.dedup();
        let next = self.engine.finish(run);
        lists.retain(|list| self.engine.is_over(*list));
        let awaited: Vec<usize> =
            lists.iter().map(|list| list.rank).filter(|&rank| self.announcements[rank].complete()).collect();
        Route::tell_all(awaited.iter().map(|&rank| &self.routes[rank]), || Event::Released);
        for list in lists {
            self.tell_news(list.rank);
        }
        next
    }

    /// Sends the contributions of all ranks, if the collective is an exchange.
    fn gather(&mut self) {
        let current = self.announcements.iter_mut().map(Announcements::current);
        let contributions: Vec<Option<Vec<u8>>> = current.map(|list| list?.contribution.take()).collect();
        if contributions.iter().any(Option::is_some) {
            let all: Vec<Vec<u8>> = contributions.into_iter().map(Option::unwrap_or_default).collect();
            for batch in batches(&all) {
                self.tell_all(|| Event::Gathered { contributions: batch.to_vec() });
            }
        }
    }

    /// Reports the matched calls of a rank to it, if a report is due.
    fn tell_news(&mut self, rank: usize) {
        let news = self.announcements[rank].news();
        self.tell_progress(rank, news);
    }

    fn tell_progress(&self, rank: usize, matched: Option<u64>) {
        if let (Some(calls), None) = (matched, self.left[rank]) {
            Route::tell_all([&self.routes[rank]], || Event::Matched { calls });
        }
    }

    fn confirm(&mut self, rank: usize, calls: u64) -> Result<(), Violation> {
        // Calls that came after a failure were not counted.
        if self.engine.failure().is_some() || self.left[rank].is_some() {
            return Ok(());
        }
        if !self.announcements[rank].ask(calls) {
            return Err(Violation("a request for a report of calls that it has not announced"));
        }
        self.tell_news(rank);
        Ok(())
    }

    fn unconfirmed(&mut self, rank: usize, calls: u64, deadline: Duration) {
        // If all these calls are matched by now, the report has crossed this request.
        if self.announcements[rank].lacks(calls) {
            self.engine.expire(rank, deadline);
        }
    }

    fn overdue(&mut self, rank: usize, deadline: Duration) {
        // If the rank is not waiting, its release has crossed this request.
        if self.engine.is_waiting(rank) {
            self.engine.expire(rank, deadline);
        }
    }

    fn depart(&mut self, rank: usize, departure: Departure, sequence: u64) {
        if self.left[rank].is_some() {
            return;
        }
        if rank == 0 {
            // The coordinator may end with rank 0, so the other ranks get their last reports of matched calls now.
            for other in 0..self.routes.len() {
                let news = self.announcements[other].last_news();
                self.tell_progress(other, news);
            }
        }
        self.left[rank] = Some(sequence);
        self.tell_all(|| Event::Departed { rank, departure, sequence });
        self.engine.depart(rank, departure);
        if let Some(inquiry) = &mut self.inquiry {
            inquiry.answers[rank] = Some(sequence);
            self.conclude_if_all_answered();
        }
    }

    fn inquire(&mut self, rank: usize, sequence: u64, operation: Operation, deadline: Duration) {
        // A second rank that asks gets the answer to the first query.
        if self.engine.failure().is_some() || self.inquiry.is_some() {
            return;
        }
        self.inquiries += 1;
        let number = self.inquiries;
        let known = |peer: usize| match (&self.routes[peer], self.left[peer]) {
            _ if peer == rank => Some(sequence),
            (_, Some(last)) => Some(last),
            (Route::Local(endpoint), None) => Some(endpoint.recorder.sequence()),
            (Route::Remote(_), None) => None,
        };
        let answers: Vec<Option<u64>> = (0..self.routes.len()).map(known).collect();
        let open = self.routes.iter().zip(&answers).filter(|(_, answer)| answer.is_none());
        Route::tell_all(open.map(|(route, _)| route), || Event::Probe { inquiry: number });
        self.inquiry = Some(Inquiry { number, sequence, operation, deadline, answers });
        self.conclude_if_all_answered();
    }

    fn answer(&mut self, rank: usize, number: u64, sequence: u64) {
        if let Some(inquiry) = self.inquiry.as_mut().filter(|inquiry| inquiry.number == number) {
            inquiry.answers[rank] = Some(sequence);
            self.conclude_if_all_answered();
        }
    }

    fn conclude_if_all_answered(&mut self) {
        if self.inquiry.as_ref().is_some_and(|inquiry| inquiry.answers.iter().all(Option::is_some)) {
            self.conclude();
        }
    }

    fn conclude(&mut self) {
        if let Some(Inquiry { sequence, operation, deadline, answers, .. }) = self.inquiry.take() {
            let is_behind = |answer: &Option<u64>| answer.is_none_or(|number| number < sequence);
            let missing = (0..answers.len()).filter(|&rank| is_behind(&answers[rank])).collect();
            self.engine.fail(CommError::Timeout { operation, missing, deadline });
        }
    }
}

/// Splits contributions, in rank order, into batches that fit into one frame each.
fn batches(mut all: &[Vec<u8>]) -> Vec<&[Vec<u8>]> {
    let mut batches = Vec::new();
    while !all.is_empty() {
        let mut bytes = 0;
        let full = all.iter().position(|contribution| {
            // In the frame, a contribution is preceded by its length.
            bytes += contribution.len() + 10;
            bytes > BATCH
        });
        let (batch, rest) = all.split_at(full.unwrap_or(all.len()).max(1));
        batches.push(batch);
        all = rest;
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_keep_order_and_size() {
        let contributions: Vec<Vec<u8>> = (0..40).map(|rank| vec![rank; CONTRIBUTION_LIMIT - rank as usize]).collect();
        let batches = batches(&contributions);
        assert!(batches.len() > 1);
        assert!(batches.iter().all(|batch| encode(&batch.to_vec(), FRAME_LIMIT).is_ok()));
        assert_eq!(batches.concat(), contributions);
    }
}
