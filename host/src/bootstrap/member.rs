//! [`Member`]: one rank's end of the control channel.
//!
//! A member turns calls into requests to the coordinator and waits for the answers. The coordinator does the matching.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::admission::Subgroups;
use super::control_channel::{ChannelLink, Connections};
use super::coordinator::{Coordinator, Route};
use super::endpoint::Endpoint;
use super::protocol::{ANNOUNCED_LIMIT, CALLS_LIMIT, CONTRIBUTION_LIMIT, Network, Request, bounded};
use crate::engine::check;
use crate::error::{Call, CommError, Departure, Operation};
use crate::trace::Recorder;

/// How long [`Member::late`] waits for other ranks' answers.
const PROBE_TIME: Duration = Duration::from_millis(500);
/// How long the coordinator may take to answer before it counts as missing.
const COORDINATOR_TIME: Duration = Duration::from_secs(1);

/// How a member reaches the coordinator.
#[derive(Debug)]
pub(super) enum Uplink {
    /// By calls, if all ranks are in this process.
    InProcess { coordinator: Arc<Coordinator>, subgroups: Arc<Subgroups> },
    /// By calls, from rank 0 of a group that spans processes; rank 0 also owns the connections of the other ranks.
    Server { coordinator: Arc<Coordinator>, connections: Arc<Connections> },
    /// By a connection, from all other ranks.
    Remote(ChannelLink),
}

/// One rank's endpoint of a group's control channel, as [`Rendezvous::join`](super::Rendezvous::join) returns it.
///
/// Any thread may call any method at any time, but a rank makes one [`all_gather`](Self::all_gather) or [`split`](Self::split) at a time:
/// the call of a second thread waits for the first to end, and its deadline begins then. Dropping a member calls [`leave`](Self::leave).
///
/// The first failure is permanent, as [`CommError`] says. The coordinator runs in rank 0's process: in a group that spans processes,
/// calls that need the coordinator fail once rank 0 has left.
#[derive(Debug)]
pub struct Member {
    endpoint: Arc<Endpoint>,
    pub(super) uplink: Uplink,
    pub(super) network: Network,
    /// Held by the call that waits for other ranks.
    turn: Mutex<()>,
    /// Held while calls are announced.
    announcing: Mutex<()>,
    /// The number of announced calls, and the number of them that the coordinator was asked to confirm.
    announced: AtomicU64,
    asked: AtomicU64,
    /// The number of splits so far, equal on all ranks.
    pub(super) splits: Mutex<u64>,
}

// Hidden methods are the verbs of transports and of the tests of the control channel.
impl Member {
    /// Makes a member of a group in one process.
    pub(super) fn in_process(
        coordinator: Arc<Coordinator>,
        endpoint: Arc<Endpoint>,
        subgroups: Arc<Subgroups>,
    ) -> Self {
        let network = coordinator.network.clone();
        Member::new(endpoint, Uplink::InProcess { coordinator, subgroups }, network)
    }

    /// Makes the member of rank 0 in a group that spans processes.
    pub(super) fn server(
        coordinator: Arc<Coordinator>,
        endpoint: Arc<Endpoint>,
        connections: Arc<Connections>,
    ) -> Self {
        let network = coordinator.network.clone();
        Member::new(endpoint, Uplink::Server { coordinator, connections }, network)
    }

    /// Makes a member that reaches the coordinator over a connection.
    pub(super) fn remote(link: ChannelLink, endpoint: Arc<Endpoint>, network: Network) -> Self {
        Member::new(endpoint, Uplink::Remote(link), network)
    }

    /// Makes the only member of a group of one.
    pub(super) fn single(recorder: Arc<Recorder>) -> Self {
        let endpoint = Arc::new(Endpoint::new(0, 1, false, recorder));
        let coordinator = Coordinator::new(vec![Route::Local(endpoint.clone())], Network::default());
        Member::in_process(Arc::new(coordinator), endpoint, Arc::default())
    }

    fn new(endpoint: Arc<Endpoint>, uplink: Uplink, network: Network) -> Self {
        tracing::debug!(rank = endpoint.rank(), world_size = endpoint.world_size(), "joined");
        Member {
            endpoint,
            uplink,
            network,
            turn: Mutex::default(),
            announcing: Mutex::default(),
            announced: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            splits: Mutex::default(),
        }
    }

    /// The number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.endpoint.rank()
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.endpoint.world_size()
    }

    /// Gathers the bytes of all ranks on every rank, in rank order; the lengths may differ. Blocks until all ranks have called it.
    ///
    /// # Errors
    /// [`CommError::InvalidCall`], on every rank, if one rank gives more than 64 KiB; else the errors of a collective.
    pub fn all_gather(&self, bytes: &[u8], deadline: Duration) -> Result<Vec<Vec<u8>>, CommError> {
        self.gather(0, bytes, deadline)
    }

    /// Like [`all_gather`](Self::all_gather); exchanges of different kinds do not match.
    pub(super) fn gather(&self, kind: usize, bytes: &[u8], deadline: Duration) -> Result<Vec<Vec<u8>>, CommError> {
        // An exchange has no number of elements to compare, so the length can stand for the kind.
        let call = Call::of(Operation::Exchange, kind, None);
        if bytes.len() > CONTRIBUTION_LIMIT {
            let reason = format!("{} bytes for an exchange of at most {CONTRIBUTION_LIMIT}", bytes.len());
            return Err(self.refuse(call.called(), reason));
        }
        let all = self.exchange(vec![call], Some(bytes.to_vec()), deadline)?;
        if all.len() != self.world_size() {
            let reason = format!("the exchange gave {} contributions", all.len());
            return Err(self.refuse(call.called(), reason));
        }
        Ok(all)
    }

    /// Blocks until these calls, a single one or all calls of a group in order, match the calls of the other ranks:
    ///
    /// * collectives match once every rank waits with the same list of them, equal in operation, length and dtype;
    /// * a send to a rank matches a receive of that rank from this one with the same length and dtype, in order; a
    ///   `SendRecv` is one of each. Inside a group, a rank may send to itself;
    /// * the wait ends when each of these calls is matched. Other calls do not matter: a list without collectives involves only the ranks
    ///   that it names.
    ///
    /// # Errors
    /// * [`CommError::Mismatch`], on every rank and at once, for calls that can never be complete: they differ, or ranks wait for each
    ///   other;
    /// * [`CommError::Timeout`] after `deadline`, on every rank, naming the ranks that have not made their calls;
    /// * [`CommError::PeerGone`] if the calls need a rank that has left, or if any rank is lost;
    /// * [`CommError::InvalidPeer`] for a rank that does not exist, or a transfer of this rank to itself without its counterpart; in this
    ///   case nothing is posted, and the group does not fail;
    /// * [`CommError::InvalidCall`], on every rank, if one rank makes more than 16384 calls at once;
    /// * the earlier failure of this group, if it has one.
    pub(crate) fn agree(&self, calls: &[Call], deadline: Duration) -> Result<(), CommError> {
        if self.check(calls)?.is_none() {
            return Ok(());
        }
        self.exchange(calls.to_vec(), None, deadline).map(drop)
    }

    /// Announces that this rank makes these calls, a single one or all calls of a group in order, and returns without waiting. They are
    /// matched like the calls of [`agree`](Self::agree), each after all earlier calls of this rank. Calls that can never match fail the
    /// group on every rank, soon after the coordinator has received both; [`confirm`](Self::confirm) waits until all are matched.
    ///
    /// A rank may be ahead of the others by 4096 calls. Beyond that, this method waits for them, at most until `deadline`.
    ///
    /// # Errors
    /// The errors of `agree`, except that a mismatch is not known yet: a later call returns it.
    pub(crate) fn announce(&self, calls: &[Call], deadline: Duration) -> Result<(), CommError> {
        let Some(operation) = self.check(calls)? else { return Ok(()) };
        let _announcing = self.announcing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(refusal) = self.endpoint.refusal(operation) {
            return Err(refusal);
        }
        let before = self.announced.load(Ordering::Acquire);
        let after = before + calls.len() as u64;
        self.wait_matched(before.min(after.saturating_sub(ANNOUNCED_LIMIT)), Some(operation), deadline)?;
        self.send(Request::Announce { calls: calls.to_vec() });
        self.announced.store(after, Ordering::Release);
        Ok(())
    }

    /// Asks the coordinator to report when all calls that this rank has announced so far have been matched, so that a
    /// [`confirm`](Self::confirm) soon afterwards need not wait for the answer. Returns at once.
    pub(crate) fn ask_to_confirm(&self) {
        self.ask_about(self.announced());
    }

    /// The number of calls that this rank has announced.
    pub(crate) fn announced(&self) -> u64 {
        self.announced.load(Ordering::Acquire)
    }

    /// Whether the first `calls` calls that this rank has announced are known to be matched; asks the coordinator to report when they
    /// are. Returns at once.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_confirmed(&self, calls: u64) -> bool {
        self.ask_about(calls);
        self.endpoint.matched() >= calls
    }

    /// Waits until all calls that this rank has announced so far have been matched with the calls of the other ranks that take part in
    /// them. Does not wait if they are known to be matched, or if nothing was announced.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] if some calls do not match, [`CommError::Timeout`] after `deadline`, naming the ranks that have not
    /// announced their calls, [`CommError::PeerGone`], and an earlier failure of this group; all on every rank.
    pub(crate) fn confirm(&self, deadline: Duration) -> Result<(), CommError> {
        self.confirm_first(self.announced(), deadline)
    }

    /// Like [`confirm`](Self::confirm), for the first `calls` calls that this rank has announced.
    ///
    /// # Errors
    /// As [`confirm`](Self::confirm).
    pub(crate) fn confirm_first(&self, calls: u64, deadline: Duration) -> Result<(), CommError> {
        self.wait_matched(calls.min(self.announced()), None, deadline)
    }

    /// Records that this rank starts a call, and returns the number of collectives that it has started, including this one. Transfers are
    /// recorded under the number of the collective before them. Sends no message.
    pub(crate) fn posted(&self, call: Call) -> u64 {
        self.recorder().post(call, self.announced()).0
    }

    /// The calls of [`posted`](Self::posted) among this rank's last 32 calls, with their numbers, oldest first. They are also written to
    /// the files of [`trace`](crate::trace).
    pub(crate) fn recent(&self) -> Vec<(u64, Call)> {
        self.recorder().posted()
    }

    /// The recorder of this rank's last calls.
    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.endpoint.recorder
    }

    /// Reports that this rank's collective number `sequence` did not complete within `deadline`. The group fails with a
    /// [`CommError::Timeout`] that names the ranks which have not reached this collective. All ranks are queried, and count as missing if
    /// they have not answered after 500 ms; if the coordinator is silent for 1 s, only rank 0 counts as missing. Returns the failure of
    /// the group, which may be another one that came first.
    pub(crate) fn late(&self, sequence: u64, operation: Operation, deadline: Duration) -> CommError {
        if let Some(refusal) = self.endpoint.refusal(operation) {
            return refusal;
        }
        self.send(Request::Late { sequence, operation, deadline });
        let answer = self.endpoint.wait_failure(PROBE_TIME).or_else(|| {
            self.send(Request::Conclude);
            self.endpoint.wait_failure(COORDINATOR_TIME - PROBE_TIME)
        });
        let failure = answer.unwrap_or_else(|| self.give_up_on_coordinator(operation, deadline));
        failure.of(operation)
    }

    /// Makes `failure` the failure of the whole group, unless the group has failed already. [`failure`](Self::failure) returns it from
    /// then on.
    pub fn fail(&self, failure: CommError) {
        if self.endpoint.has_coordinator() && self.failure().is_none() {
            self.send(Request::Fail(bounded(failure.clone())));
            self.endpoint.wait_failure(COORDINATOR_TIME);
        }
        // Without the coordinator, at least this rank has the failure.
        self.endpoint.fail(failure);
    }

    /// The failure of this group, if it has failed; the check is cheap. The error names the operation of this rank's call in progress, if
    /// there is one.
    pub fn failure(&self) -> Option<CommError> {
        self.endpoint.failure()
    }

    /// Waits at most `timeout` for this group to fail, and not at all once this rank has left.
    pub(crate) fn wait_failure(&self, timeout: Duration) -> Option<CommError> {
        self.endpoint.wait_failure(timeout)
    }

    /// The first rank that has left in good order before it reached collective number `sequence`.
    pub(crate) fn gone_before(&self, sequence: u64) -> Option<(usize, Departure)> {
        self.endpoint.gone_before(sequence)
    }

    /// Leaves in good order, or as a panic if this thread is panicking. The other ranks do not fail unless they need this rank. Every
    /// later call of this rank is refused, and a call in progress on another thread ends. Dropping a member does the same.
    pub fn leave(&self) {
        let departure = if thread::panicking() { Departure::Panicked } else { Departure::Left };
        if !self.endpoint.leave(departure) {
            return;
        }
        self.send(Request::Leave { departure, sequence: self.endpoint.recorder.sequence() });
        match &self.uplink {
            Uplink::Server { coordinator, connections } => {
                coordinator.close();
                connections.finish();
            }
            Uplink::InProcess { .. } => {}
            Uplink::Remote(link) => link.finish(),
        }
    }

    /// Records calls, posts them and waits for their end.
    fn exchange(
        &self,
        calls: Vec<Call>,
        contribution: Option<Vec<u8>>,
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let recorded = self.recorder().record(calls.iter().copied());
        let outcome = self.post(calls, contribution, deadline);
        recorded.end(&outcome);
        outcome
    }

    fn post(
        &self,
        calls: Vec<Call>,
        contribution: Option<Vec<u8>>,
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        let operation = calls.first().map_or(Operation::Exchange, Call::called);
        let end = Instant::now().checked_add(deadline);
        self.endpoint.begin(operation)?;
        self.send(Request::Post { calls, contribution });
        let in_time = self.endpoint.wait(end);
        let outcome = in_time.or_else(|| {
            // The coordinator knows the missing ranks, and whether the last of them has arrived just now.
            self.send(Request::Overdue { deadline });
            self.endpoint.wait(Instant::now().checked_add(COORDINATOR_TIME))
        });
        outcome.unwrap_or_else(|| {
            self.give_up_on_coordinator(operation, deadline);
            self.endpoint.wait(None).unwrap_or_else(|| unreachable!("without an end, a wait ends with an outcome"))
        })
    }

    /// Waits until the first `calls` announced calls have been matched.
    fn wait_matched(&self, calls: u64, operation: Option<Operation>, deadline: Duration) -> Result<(), CommError> {
        if self.endpoint.matched() >= calls {
            return Ok(());
        }
        self.ask_about(calls);
        let end = Instant::now().checked_add(deadline);
        let outcome = self.endpoint.wait_matched(calls, operation, end).or_else(|| {
            // The coordinator knows the missing ranks, and whether the last of them has arrived just now.
            self.send(Request::Unconfirmed { calls, deadline });
            self.endpoint.wait_matched(calls, operation, Instant::now().checked_add(COORDINATOR_TIME))
        });
        outcome.unwrap_or_else(|| Err(self.give_up_on_coordinator(operation.unwrap_or(Operation::Exchange), deadline)))
    }

    fn ask_about(&self, calls: u64) {
        if self.asked.fetch_max(calls, Ordering::AcqRel) < calls && self.endpoint.matched() < calls {
            self.send(Request::Confirm { calls });
        }
    }

    /// Refuses calls that this rank cannot make. Returns the operation that errors name, or `None` if there are no calls.
    fn check(&self, calls: &[Call]) -> Result<Option<Operation>, CommError> {
        let Some(first) = calls.first() else {
            return self.failure().map_or(Ok(None), Err);
        };
        check(calls, self.rank(), self.world_size())?;
        if calls.len() > CALLS_LIMIT {
            let reason = format!("{} calls in a group of at most {CALLS_LIMIT}", calls.len());
            return Err(self.refuse(first.called(), reason));
        }
        Ok(Some(first.called()))
    }

    /// Fails because the coordinator does not answer, so that rank 0 counts as missing. Rank 0 receives this failure when it resumes.
    fn give_up_on_coordinator(&self, operation: Operation, deadline: Duration) -> CommError {
        let failure = CommError::Timeout { operation, missing: vec![0], deadline };
        self.endpoint.fail(failure.clone());
        self.send(Request::Fail(failure.clone()));
        self.endpoint.failure().unwrap_or(failure)
    }

    /// Fails the group because of an invalid call of this rank: the other ranks would wait for it in vain.
    fn refuse(&self, operation: Operation, reason: String) -> CommError {
        let failure = CommError::InvalidCall { operation, rank: self.rank(), reason };
        self.fail(failure.clone());
        self.endpoint.refusal(operation).unwrap_or(failure)
    }

    fn send(&self, request: Request) {
        match &self.uplink {
            Uplink::InProcess { coordinator, .. } | Uplink::Server { coordinator, .. } => {
                if let Err(violation) = coordinator.receive(self.rank(), request) {
                    unreachable!("a member of this process made {violation}");
                }
            }
            Uplink::Remote(link) => link.outbox.send(&request),
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.leave();
    }
}
