//! A member's endpoint of the control channel: the rank's own state, as the coordinator's events describe it.
//!
//! Events arrive by a call or by the thread that reads the connection; the member's methods wait for them here. The endpoint makes no
//! decisions about other ranks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::protocol::Event;
use crate::error::{CommError, Departure, Operation};
use crate::trace::Recorder;

/// The pending call that this rank waits in.
#[derive(Debug)]
struct Waiting {
    operation: Operation,
    contributions: Vec<Vec<u8>>,
    is_released: bool,
}

#[derive(Debug)]
struct EndpointState {
    /// The first failure of the group; later failures are ignored.
    failure: Option<CommError>,
    /// Ranks that have left in good order, each with the last collective that it started.
    departed: Vec<Option<(Departure, u64)>>,
    /// How this rank itself has left.
    left: Option<Departure>,
    waiting: Option<Waiting>,
    /// How many of this rank's announced calls have been matched.
    matched: u64,
}

#[derive(Debug)]
pub(super) struct Endpoint {
    rank: usize,
    /// Whether the coordinator is reached over a connection, and ends with rank 0.
    is_remote: bool,
    /// Set with the failure, so that checking for one takes no lock.
    has_failed: AtomicBool,
    state: Mutex<EndpointState>,
    changed: Condvar,
    /// The recorder of this rank's last calls.
    pub(super) recorder: Arc<Recorder>,
}

impl Endpoint {
    pub(super) fn new(rank: usize, world_size: usize, is_remote: bool, recorder: Arc<Recorder>) -> Self {
        let departed = vec![None; world_size];
        Endpoint {
            rank,
            is_remote,
            has_failed: AtomicBool::new(false),
            state: Mutex::new(EndpointState { failure: None, departed, left: None, waiting: None, matched: 0 }),
            changed: Condvar::new(),
            recorder,
        }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn world_size(&self) -> usize {
        self.lock().departed.len()
    }

    /// No user code runs under the lock, so a poisoned one still guards consistent state.
    fn lock(&self) -> MutexGuard<'_, EndpointState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies an event of the coordinator. Probes, and events of the join, are not handled here.
    pub(super) fn deliver(&self, event: Event) {
        let mut state = self.lock();
        match event {
            Event::Gathered { contributions } => {
                if let Some(waiting) = &mut state.waiting {
                    waiting.contributions.extend(contributions);
                }
            }
            Event::Released => {
                if let Some(waiting) = &mut state.waiting {
                    waiting.is_released = true;
                }
            }
            Event::Matched { calls } => {
                state.matched = calls;
                self.recorder.matched(calls);
            }
            Event::Failed(failure) => self.set_failure(&mut state, failure),
            Event::Departed { rank, departure, sequence } => {
                if let Some(departed) = state.departed.get_mut(rank) {
                    *departed = Some((departure, sequence));
                }
            }
            Event::Start(_) | Event::Refused(_) | Event::Probe { .. } => {}
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Records a failure, unless there is one already.
    pub(super) fn fail(&self, failure: CommError) {
        self.set_failure(&mut self.lock(), failure);
        self.changed.notify_all();
    }

    fn set_failure(&self, state: &mut EndpointState, failure: CommError) {
        if state.failure.is_none() {
            self.recorder.failed(&failure);
        }
        state.failure.get_or_insert(failure);
        self.has_failed.store(true, Ordering::Release);
    }

    /// Records that the connection to the coordinator has ended: a failure, unless this rank or rank 0 has left before.
    pub(super) fn disconnected(&self) {
        let mut state = self.lock();
        if state.left.is_none() && state.departed[0].is_none() {
            let (operation, departure) = (Operation::Exchange, Departure::Lost);
            self.set_failure(&mut state, CommError::PeerGone { operation, rank: 0, departure });
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Records that this rank leaves. Returns false if it had left before.
    pub(super) fn leave(&self, departure: Departure) -> bool {
        let mut state = self.lock();
        let is_first = state.left.is_none();
        state.left.get_or_insert(departure);
        drop(state);
        self.recorder.leave();
        self.changed.notify_all();
        is_first
    }

    /// Begins a call that this rank will wait in.
    pub(super) fn begin(&self, operation: Operation) -> Result<(), CommError> {
        let mut state = self.lock();
        self.check(&mut state, operation)?;
        state.waiting = Some(Waiting { operation, contributions: Vec::new(), is_released: false });
        Ok(())
    }

    /// Waits until the current call is complete or the group has failed; returns `None` if neither has happened by `end`. A failure after
    /// the release does not concern this call.
    pub(super) fn wait(&self, end: Option<Instant>) -> Option<Result<Vec<Vec<u8>>, CommError>> {
        let mut state = self.lock();
        loop {
            let waiting = state.waiting.as_mut().expect("a post has begun");
            let operation = waiting.operation;
            let outcome = if waiting.is_released {
                Ok(std::mem::take(&mut waiting.contributions))
            } else {
                match self.check(&mut state, operation) {
                    Ok(()) => {
                        state = self.sleep(state, end)?;
                        continue;
                    }
                    Err(error) => Err(error),
                }
            };
            state.waiting = None;
            return Some(outcome);
        }
    }

    /// How many of this rank's announced calls have been matched, as far as the coordinator has reported.
    pub(super) fn matched(&self) -> u64 {
        self.lock().matched
    }

    /// Waits until `calls` announced calls have been matched or the group has failed; returns `None` if neither has come
    /// by `end`. A later failure does not concern these calls. The error names `operation`; without one it is the group's own.
    pub(super) fn wait_matched(
        &self,
        calls: u64,
        operation: Option<Operation>,
        end: Option<Instant>,
    ) -> Option<Result<(), CommError>> {
        let mut state = self.lock();
        loop {
            if state.matched >= calls {
                return Some(Ok(()));
            }
            if let Err(error) = self.check(&mut state, operation.unwrap_or(Operation::Exchange)) {
                let failure = if operation.is_none() { state.failure.clone() } else { None };
                return Some(Err(failure.unwrap_or(error)));
            }
            state = self.sleep(state, end)?;
        }
    }

    /// Waits at most `time` for the group to fail, or for this rank to leave.
    pub(super) fn wait_failure(&self, time: Duration) -> Option<CommError> {
        let end = Instant::now().checked_add(time);
        let mut state = self.lock();
        while state.failure.is_none() && state.left.is_none() {
            state = self.sleep(state, end)?;
        }
        state.failure()
    }

    pub(super) fn failure(&self) -> Option<CommError> {
        if self.has_failed.load(Ordering::Acquire) { self.lock().failure() } else { None }
    }

    /// Whether this rank can still reach the coordinator.
    pub(super) fn has_coordinator(&self) -> bool {
        let state = self.lock();
        state.left.is_none() && !(self.is_remote && state.departed[0].is_some())
    }

    /// The error of `operation` if no call of this rank can complete any more.
    pub(super) fn refusal(&self, operation: Operation) -> Option<CommError> {
        self.check(&mut self.lock(), operation).err()
    }

    pub(super) fn gone_before(&self, sequence: u64) -> Option<(usize, Departure)> {
        let state = self.lock();
        let gone = state.departed.iter().enumerate();
        gone.filter_map(|(rank, departed)| Some((rank, (*departed)?)))
            .find_map(|(rank, (departure, last))| (last < sequence).then_some((rank, departure)))
    }

    /// Sleeps until the state changes; returns `None` once `end` has passed.
    fn sleep<'a>(
        &self,
        state: MutexGuard<'a, EndpointState>,
        end: Option<Instant>,
    ) -> Option<MutexGuard<'a, EndpointState>> {
        let Some(end) = end else {
            return Some(self.changed.wait(state).unwrap_or_else(PoisonError::into_inner));
        };
        let left = end.saturating_duration_since(Instant::now());
        let sleep = || self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        (!left.is_zero()).then(sleep)
    }

    fn check(&self, state: &mut EndpointState, operation: Operation) -> Result<(), CommError> {
        if let Some(departure) = state.left {
            return Err(CommError::PeerGone { operation, rank: self.rank, departure });
        }
        // A remote coordinator ends with its rank, and every call needs the coordinator.
        if let (true, Some((departure, _))) = (self.is_remote, state.departed[0]) {
            self.set_failure(state, CommError::PeerGone { operation, rank: 0, departure });
        }
        match &state.failure {
            Some(failure) => Err(failure.clone().seen_in(operation)),
            None => Ok(()),
        }
    }
}

impl EndpointState {
    /// The failure, as the error of the call that this rank is in.
    fn failure(&self) -> Option<CommError> {
        let failure = self.failure.clone()?;
        Some(match &self.waiting {
            Some(waiting) => failure.of(waiting.operation),
            None => failure,
        })
    }
}
