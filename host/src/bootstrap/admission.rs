//! The admission of ranks to a group: it collects the ranks that join, until all have joined and the coordinator starts.
//!
//! Threads of rank 0's process arrive by calls, other ranks through the threads that serve their connections. Ranks are admitted or
//! refused here, after they have authenticated themselves. The subgroups of a group in one process gather in [`Subgroups`], which their
//! parent group holds.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::coordinator::{Coordinator, Route, Violation};
use super::endpoint::Endpoint;
use super::notice::{self, Notices};
use super::protocol::{Event, Network, Request};
use crate::error::{BootstrapError, Call, Operation, Strangers};
use crate::trace::Recorder;

/// A rank that asks to join.
#[derive(Clone, Debug)]
pub(super) struct Applicant {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) generation: u64,
    pub(super) deadline: Duration,
    /// The time at which the deadline passes; `None` if the clock cannot represent it.
    pub(super) end: Option<Instant>,
    /// The recorder of the group that the rank joins.
    pub(super) recorder: Arc<Recorder>,
}

impl Applicant {
    /// Runs this rank's join, and records it as a call.
    pub(super) fn joining<T>(&self, join: impl FnOnce() -> Result<T, BootstrapError>) -> Result<T, BootstrapError> {
        let recorded = self.recorder.record([Call::without_data(Operation::SetUp)]);
        let outcome = join();
        recorded.end(&outcome);
        if outcome.is_err() {
            self.recorder.leave();
        }
        outcome
    }

    /// Makes the rank's endpoint of the control channel.
    pub(super) fn endpoint(&self, is_remote: bool) -> Arc<Endpoint> {
        Arc::new(Endpoint::new(self.rank, self.world_size, is_remote, self.recorder.clone()))
    }

    /// The time left until the deadline, if there is one.
    pub(super) fn left(&self) -> Option<Duration> {
        self.end.map(|end| end.saturating_duration_since(Instant::now()))
    }

    /// `time`, limited by the time left.
    pub(super) fn at_most(&self, time: Duration) -> Duration {
        self.left().map_or(time, |left| left.min(time))
    }
}

/// A rank that has joined.
#[derive(Debug)]
struct Arrival {
    route: Route,
    /// The address from which it has connected.
    address: Option<IpAddr>,
}

#[derive(Debug)]
struct AdmissionState {
    arrivals: Vec<Option<Arrival>>,
    unauthenticated: Strangers,
    /// Why the last authenticated rank was refused.
    refusal: Option<BootstrapError>,
    outcome: Option<Result<Arc<Coordinator>, BootstrapError>>,
}

#[derive(Debug)]
pub(super) struct Admission {
    world_size: usize,
    generation: u64,
    /// The loopback address, if the group is confined to it.
    loopback: Option<IpAddr>,
    /// Where ranks join, in words.
    address: String,
    state: Mutex<AdmissionState>,
    changed: Condvar,
    /// The subgroups, for members of a group in one process.
    pub(super) subgroups: Arc<Subgroups>,
}

impl Admission {
    pub(super) fn new(world_size: usize, generation: u64, loopback: Option<IpAddr>, address: String) -> Self {
        let arrivals = (0..world_size).map(|_| None).collect();
        let state = AdmissionState { arrivals, unauthenticated: Strangers::default(), refusal: None, outcome: None };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Admission { world_size, generation, loopback, address, state, changed, subgroups: Arc::default() }
    }

    /// No user code runs under the lock, so a poisoned one still guards consistent state.
    fn lock(&self) -> MutexGuard<'_, AdmissionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the admission has ended, by success or failure.
    pub(super) fn is_over(&self) -> bool {
        self.lock().outcome.is_some()
    }

    /// The coordinator, once all have joined.
    pub(super) fn coordinator(&self) -> Option<Arc<Coordinator>> {
        self.lock().outcome.clone()?.ok()
    }

    /// Admits a rank. The last rank to arrive starts the coordinator.
    ///
    /// # Errors
    /// The reason why the rank is refused. A rank with another world size fails the whole admission.
    pub(super) fn arrive(
        &self,
        identity: (usize, usize, u64),
        route: Route,
        address: Option<IpAddr>,
    ) -> Result<(), BootstrapError> {
        let mut state = self.lock();
        let outcome = self.admit(&mut state, identity, Arrival { route, address });
        state.refusal = outcome.as_ref().err().cloned().or(state.refusal.take());
        outcome
    }

    fn admit(
        &self,
        state: &mut AdmissionState,
        (rank, world_size, generation): (usize, usize, u64),
        arrival: Arrival,
    ) -> Result<(), BootstrapError> {
        if generation != self.generation {
            return Err(BootstrapError::GenerationMismatch { rank, generation, expected: self.generation });
        }
        match &state.outcome {
            Some(Ok(_)) => return Err(BootstrapError::DuplicateRank { rank }),
            Some(Err(error)) => return Err(error.clone()),
            None => {}
        }
        if world_size != self.world_size {
            let left_rank = state.arrivals.iter().position(Option::is_some).unwrap_or(0);
            let (left, right_rank, right) = (self.world_size, rank, world_size);
            let error = BootstrapError::WorldSizeMismatch { left_rank, left, right_rank, right };
            self.refuse_all(state, error.clone());
            return Err(error);
        }
        let Some(slot) = state.arrivals.get_mut(rank) else {
            return Err(BootstrapError::RankOutOfRange { rank, world_size });
        };
        if slot.is_some() {
            return Err(BootstrapError::DuplicateRank { rank });
        }
        *slot = Some(arrival);
        if state.arrivals.iter().all(Option::is_some) {
            let (routes, addresses) =
                state.arrivals.drain(..).flatten().map(|arrival| (arrival.route, arrival.address)).unzip();
            let coordinator = Coordinator::new(routes, Network { loopback: self.loopback, addresses });
            state.outcome = Some(Ok(Arc::new(coordinator)));
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Waits for the other ranks; the first deadline that passes ends the admission for all ranks that have arrived. The lowest of these
    /// ranks says now and then for which others they wait.
    pub(super) fn wait(&self, applicant: &Applicant) -> Result<Arc<Coordinator>, BootstrapError> {
        let mut notices = Notices::new();
        loop {
            let mut state = self.lock();
            if state.outcome.is_none() && applicant.left() == Some(Duration::ZERO) {
                self.expire(&mut state, applicant.deadline);
            }
            if let Some(outcome) = &state.outcome {
                return outcome.clone();
            }
            let speaks = state.arrivals.iter().position(Option::is_some) == Some(applicant.rank);
            let line = (notices.is_due() && speaks).then(|| self.describe(&state, &notices, applicant.deadline));
            drop(state);
            // The terminal may not hold up other ranks.
            if let Some(line) = line {
                notice::say(&line);
            }
            let state = self.lock();
            if state.outcome.is_none() {
                let pause = applicant.at_most(notices.left());
                drop(self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner));
            }
        }
    }

    /// The line that tells for which ranks the others wait, and who was turned away.
    fn describe(&self, state: &AdmissionState, notices: &Notices, deadline: Duration) -> String {
        let missing = notice::listed(&missing(state));
        let (world_size, address, strangers) = (self.world_size, &self.address, &state.unauthenticated);
        let refusal = state.refusal.as_ref().map_or_else(String::new, |error| format!("; refused: {error}"));
        let seconds = notices.elapsed().as_secs();
        format!(
            "waiting for {missing} of {world_size} at {address}, for {seconds} s of {deadline:?}{strangers}{refusal}"
        )
    }

    /// Ends the admission for all ranks that have arrived.
    pub(super) fn fail(&self, error: BootstrapError) {
        self.refuse_all(&mut self.lock(), error);
    }

    /// Handles a request of a rank at the other end of a connection.
    ///
    /// # Errors
    /// [`Violation`] for a request that no rank makes before all have joined.
    pub(super) fn receive(&self, request: &Request) -> Result<(), Violation> {
        let mut state = self.lock();
        match request {
            Request::GiveUp { deadline } => self.expire(&mut state, *deadline),
            _ if state.outcome.is_some() => {}
            _ => return Err(Violation("a request before the group was complete")),
        }
        Ok(())
    }

    /// The connection to a rank broke; the rank may join again until all have joined.
    pub(super) fn lost(&self, rank: usize) {
        if let Some(arrival) = self.lock().arrivals.get_mut(rank) {
            *arrival = None;
        }
    }

    /// Counts an unauthenticated connection. Returns the number of such connections so far.
    pub(super) fn count_unauthenticated(&self, origin: SocketAddr, reason: String) -> u64 {
        let unauthenticated = &mut self.lock().unauthenticated;
        *unauthenticated = Strangers { connections: unauthenticated.connections + 1, last: origin.to_string(), reason };
        unauthenticated.connections
    }

    fn expire(&self, state: &mut AdmissionState, deadline: Duration) {
        let (missing, strangers) = (missing(state), state.unauthenticated.clone());
        self.refuse_all(state, BootstrapError::Missing { missing, deadline, strangers });
    }

    fn refuse_all(&self, state: &mut AdmissionState, error: BootstrapError) {
        if state.outcome.is_some() {
            return;
        }
        let routes: Vec<Route> = state.arrivals.drain(..).flatten().map(|arrival| arrival.route).collect();
        Route::tell_all(&routes, || Event::Refused(error.clone()));
        for route in &routes {
            if let Route::Remote(outbox) = route {
                outbox.close();
            }
        }
        state.outcome = Some(Err(error));
        self.changed.notify_all();
    }
}

fn missing(state: &AdmissionState) -> Vec<usize> {
    (0..state.arrivals.len()).filter(|&rank| state.arrivals[rank].is_none()).collect()
}

/// The successive admissions of groups of ranks that are threads of one process.
#[derive(Clone, Debug, Default)]
pub(super) struct InProcess(Arc<Mutex<Option<Arc<Admission>>>>);

impl InProcess {
    /// Admits a rank to the current admission, or to a new one if the current one has ended.
    ///
    /// # Errors
    /// As [`Admission::arrive`].
    pub(super) fn arrive(
        &self,
        applicant: &Applicant,
        endpoint: &Arc<Endpoint>,
    ) -> Result<Arc<Admission>, BootstrapError> {
        let &Applicant { rank, world_size, generation, .. } = applicant;
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let open = current.take().filter(|admission| !admission.is_over());
        let new = || Arc::new(Admission::new(world_size, generation, None, "a rendezvous of one process".into()));
        let admission = open.unwrap_or_else(new);
        *current = Some(admission.clone());
        admission.arrive((rank, world_size, generation), Route::Local(endpoint.clone()), None)?;
        Ok(admission)
    }
}

/// The admissions of subgroups in one process, by the number of the split and the colour.
#[derive(Debug, Default)]
pub(super) struct Subgroups(Mutex<HashMap<(u64, u64), InProcess>>);

impl Subgroups {
    /// The admission of the ranks of one colour.
    pub(super) fn of(&self, split: u64, color: u64) -> InProcess {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).entry((split, color)).or_default().clone()
    }

    /// Removes the entry of a colour once its ranks have joined or failed to join.
    pub(super) fn remove(&self, split: u64, color: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&(split, color));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::RankKind;

    fn arrive(admission: &Admission, rank: usize, world_size: usize, generation: u64) -> Result<(), BootstrapError> {
        let recorder = Recorder::always(RankKind::Threads, "test", rank, world_size);
        let route = Route::Local(Arc::new(Endpoint::new(rank, world_size, false, recorder)));
        admission.arrive((rank, world_size, generation), route, None)
    }

    #[test]
    fn admission_admits_each_rank_once() {
        let admission = Admission::new(2, 7, None, "a test".into());
        assert_eq!(arrive(&admission, 1, 2, 7), Ok(()));
        assert_eq!(arrive(&admission, 1, 2, 7), Err(BootstrapError::DuplicateRank { rank: 1 }));
        assert_eq!(arrive(&admission, 2, 2, 7), Err(BootstrapError::RankOutOfRange { rank: 2, world_size: 2 }));
        let expected = BootstrapError::GenerationMismatch { rank: 0, generation: 6, expected: 7 };
        assert_eq!(arrive(&admission, 0, 3, 6), Err(expected), "of another generation, nothing else matters");
        assert!(!admission.is_over());
        assert_eq!(arrive(&admission, 0, 2, 7), Ok(()));
        assert!(admission.coordinator().is_some());
        assert_eq!(arrive(&admission, 0, 2, 7), Err(BootstrapError::DuplicateRank { rank: 0 }));
    }

    #[test]
    fn admission_takes_a_rank_again_after_its_connection_broke() {
        let admission = Admission::new(3, 0, None, "a test".into());
        arrive(&admission, 1, 3, 0).unwrap();
        admission.lost(1);
        arrive(&admission, 1, 3, 0).unwrap();
        admission.receive(&Request::GiveUp { deadline: Duration::from_secs(9) }).unwrap();
        let strangers = Strangers::default();
        let expected = BootstrapError::Missing { missing: vec![0, 2], deadline: Duration::from_secs(9), strangers };
        assert_eq!(arrive(&admission, 2, 3, 0), Err(expected));
    }
}
