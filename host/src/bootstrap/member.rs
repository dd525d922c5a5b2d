//! [`Member`]: one rank's end of the control channel.
//!
//! It turns calls into requests to the hub and waits for the answers. What fits together is decided by the hub.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::client::Link;
use super::hub::{Hub, Place};
use super::matching::check;
use super::message::{ANNOUNCED_LIMIT, CALLS_LIMIT, CONTRIBUTION_LIMIT, Network, Request, bounded};
use super::seat::Seat;
use super::server::Connections;
use crate::error::{Call, CommError, Departure, Operation};

/// How long [`Member::late`] waits for other ranks' answers.
const PROBE_TIME: Duration = Duration::from_millis(500);
/// How long the hub may take to answer before it counts as missing.
const HUB_TIME: Duration = Duration::from_secs(1);

/// How a member reaches the hub.
#[derive(Debug)]
pub(super) enum Uplink {
    /// By calls; rank 0 of a group that spans processes answers for the connections of the others.
    Here {
        hub: Arc<Hub>,
        connections: Option<Arc<Connections>>,
    },
    There(Link),
}

/// One rank's end of the control channel of a group: what [`Rendezvous::join`](super::Rendezvous::join) returns.
///
/// Any thread may call anything at any time, but a rank makes one [`agree`](Self::agree),
/// [`all_gather`](Self::all_gather) or [`split`](Self::split) at a time: a second thread's waits for the first to end,
/// and its deadline begins then. Dropping it is [`leave`](Self::leave).
///
/// The first failure sticks, as [`CommError`] says. The hub runs in rank 0's process; whatever needs it fails once rank
/// 0 has left a group that spans processes.
#[derive(Debug)]
pub struct Member {
    seat: Arc<Seat>,
    pub(super) uplink: Uplink,
    pub(super) network: Network,
    /// Held by the call that waits in a post.
    turn: Mutex<()>,
    /// Held while calls are announced.
    announcing: Mutex<()>,
    /// How many calls have been announced, and of how many the hub was asked to say when they have been matched.
    announced: AtomicU64,
    asked: AtomicU64,
    /// How many groups were split off; all ranks count alike.
    pub(super) splits: Mutex<u64>,
}

impl Member {
    /// A member in the hub's process.
    pub(super) fn here(hub: Arc<Hub>, seat: Arc<Seat>, connections: Option<Arc<Connections>>) -> Self {
        let network = hub.network.clone();
        Member::new(seat, Uplink::Here { hub, connections }, network)
    }

    /// A member at the other end of a connection.
    pub(super) fn there(link: Link, seat: Arc<Seat>, network: Network) -> Self {
        Member::new(seat, Uplink::There(link), network)
    }

    /// The only member of its group.
    pub(super) fn alone() -> Self {
        let seat = Arc::new(Seat::new(0, 1, false));
        let hub = Hub::new(vec![Place::Here(seat.clone())], Network::default());
        Member::here(Arc::new(hub), seat, None)
    }

    fn new(seat: Arc<Seat>, uplink: Uplink, network: Network) -> Self {
        tracing::debug!(rank = seat.rank(), world_size = seat.world_size(), "joined");
        Member {
            seat,
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
        self.seat.rank()
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.seat.world_size()
    }

    /// Gives every rank the bytes of all, in rank order; they may differ in length. Blocks until all ranks have called
    /// it.
    ///
    /// # Errors
    /// [`CommError::InvalidCall`], on every rank, if one brings more than 64 KiB; else as [`agree`](Self::agree).
    pub fn all_gather(&self, bytes: &[u8], deadline: Duration) -> Result<Vec<Vec<u8>>, CommError> {
        self.gather(0, bytes, deadline)
    }

    /// As [`all_gather`](Self::all_gather); exchanges of different kinds do not fit together.
    pub(super) fn gather(&self, kind: usize, bytes: &[u8], deadline: Duration) -> Result<Vec<Vec<u8>>, CommError> {
        // Nobody asks how many elements an exchange has, so the length can tell kinds apart.
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

    /// Blocks until these calls, one or those of a group in order, fit with what the other ranks post:
    ///
    /// * collectives fit once every rank waits with the same list of them, equal in operation, length and dtype;
    /// * a send to a rank fits a receive of that rank from this one with the same length and dtype, in order; a
    ///   `SendRecv` is one of each. Inside a group, a rank may send to itself;
    /// * the post is complete when each of its calls fits. What other ranks do in the meantime does not matter: a post
    ///   without collectives involves only the ranks that it names.
    ///
    /// # Errors
    /// * [`CommError::Mismatch`], on every rank and at once, for calls that can never be complete: they differ, or
    ///   ranks wait for each other;
    /// * [`CommError::Timeout`] after `deadline`, on every rank, naming those that had not posted;
    /// * [`CommError::PeerGone`] if it needs a rank that has left, or any rank is lost;
    /// * [`CommError::InvalidPeer`] for a rank that does not exist, or a transfer of this rank to itself without its
    ///   counterpart; nothing is posted then, and nothing fails;
    /// * [`CommError::InvalidCall`], on every rank, if one posts more than 16384 calls at once;
    /// * whatever this group has failed with before.
    pub fn agree(&self, calls: &[Call], deadline: Duration) -> Result<(), CommError> {
        if self.check(calls)?.is_none() {
            return Ok(());
        }
        self.exchange(calls.to_vec(), None, deadline).map(drop)
    }

    /// Tells the hub that this rank makes these calls, one or those of a group in order, and goes on. They are matched as
    /// those of [`agree`](Self::agree), each after all that this rank has announced or waited in before: calls that can
    /// never fit fail the group on every rank, soon after the hub knows of both; [`confirm`](Self::confirm) waits until
    /// all fit.
    ///
    /// A rank may be ahead of the others by 4096 calls. Beyond that this waits for them, at most until `deadline`.
    ///
    /// # Errors
    /// Those of `agree`, except that a mismatch is not known yet: it is the error of some later call.
    pub fn announce(&self, calls: &[Call], deadline: Duration) -> Result<(), CommError> {
        let Some(operation) = self.check(calls)? else { return Ok(()) };
        let _announcing = self.announcing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(refusal) = self.seat.refusal(operation) {
            return Err(refusal);
        }
        let before = self.announced.load(Ordering::Acquire);
        let after = before + calls.len() as u64;
        self.wait_matched(before.min(after.saturating_sub(ANNOUNCED_LIMIT)), Some(operation), deadline)?;
        self.send(Request::Announce { calls: calls.to_vec() });
        self.announced.store(after, Ordering::Release);
        Ok(())
    }

    /// Asks the hub to say when all calls that this rank has announced so far have been matched, so that a
    /// [`confirm`](Self::confirm) soon afterwards need not wait for the answer. Returns at once.
    pub fn ask_to_confirm(&self) {
        self.ask_about(self.announced());
    }

    /// How many calls this rank has announced.
    pub fn announced(&self) -> u64 {
        self.announced.load(Ordering::Acquire)
    }

    /// Whether the first `calls` that this rank has announced have been matched, as far as is known here; asks the hub to
    /// say so when they have. Returns at once.
    pub fn is_confirmed(&self, calls: u64) -> bool {
        self.ask_about(calls);
        self.seat.matched() >= calls
    }

    /// Waits until all calls that this rank has announced so far have been matched with those of the ranks that take
    /// part in them. Does not wait where that is known, nor where nothing was announced.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] if some do not fit, [`CommError::Timeout`] after `deadline`, naming the ranks that have not
    /// announced theirs, [`CommError::PeerGone`], and whatever this group has failed with before; all on every rank.
    pub fn confirm(&self, deadline: Duration) -> Result<(), CommError> {
        self.confirm_first(self.announced(), deadline)
    }

    /// As [`confirm`](Self::confirm), of the first `calls` that this rank has announced.
    ///
    /// # Errors
    /// As there.
    pub fn confirm_first(&self, calls: u64, deadline: Duration) -> Result<(), CommError> {
        self.wait_matched(calls.min(self.announced()), None, deadline)
    }

    /// Takes note that this rank starts a call, and returns the number of collectives that it has started, this one
    /// included. Transfers are noted under the number of the collective before them. Talks to nobody.
    pub fn posted(&self, call: Call) -> u64 {
        self.seat.recorder.posted(call)
    }

    /// The last 32 calls of [`posted`](Self::posted) with their numbers, oldest first.
    pub fn recent(&self) -> Vec<(u64, Call)> {
        self.seat.recorder.recent()
    }

    /// This rank's collective number `sequence` did not complete within `deadline`: makes that the failure of the
    /// group, as a [`CommError::Timeout`] that names the ranks which have not come to it. Ranks are asked, and count as
    /// missing if they have not answered after 500 ms; rank 0 alone does if the hub is silent for 1 s. Returns what the
    /// group has failed with, which may be something else that came first.
    pub fn late(&self, sequence: u64, operation: Operation, deadline: Duration) -> CommError {
        if let Some(refusal) = self.seat.refusal(operation) {
            return refusal;
        }
        self.send(Request::Late { sequence, operation, deadline });
        let answer = self.seat.wait_failure(PROBE_TIME).or_else(|| {
            self.send(Request::Conclude);
            self.seat.wait_failure(HUB_TIME - PROBE_TIME)
        });
        let failure = answer.unwrap_or_else(|| self.give_up_on_hub(operation, deadline));
        failure.of(operation)
    }

    /// Makes a failure that of the whole group, unless it has failed already. It is [`failure`](Self::failure)'s when
    /// this returns.
    pub fn fail(&self, failure: CommError) {
        if self.seat.has_hub() && self.failure().is_none() {
            self.send(Request::Fail(bounded(failure.clone())));
            self.seat.wait_failure(HUB_TIME);
        }
        // Without the hub, it is at least this rank's.
        self.seat.fail(failure);
    }

    /// What this group has failed with, if it has; costs next to nothing while it has not. The operation is that of
    /// this rank's call in progress, if one is.
    pub fn failure(&self) -> Option<CommError> {
        self.seat.failure()
    }

    /// Waits at most `timeout` for this group to fail; not at all once this rank has left.
    pub fn wait_failure(&self, timeout: Duration) -> Option<CommError> {
        self.seat.wait_failure(timeout)
    }

    /// The first rank that has left in good order before it came to collective number `sequence`.
    pub fn gone_before(&self, sequence: u64) -> Option<(usize, Departure)> {
        self.seat.gone_before(sequence)
    }

    /// Leaves in good order, or as a panic if this thread is panicking: no failure for the others unless they need this
    /// rank. Every later call of this rank is refused, and one in progress on another thread ends. Dropping does the
    /// same.
    pub fn leave(&self) {
        let departure = if thread::panicking() { Departure::Panicked } else { Departure::Left };
        if !self.seat.leave(departure) {
            return;
        }
        self.send(Request::Leave { departure, sequence: self.seat.recorder.sequence() });
        match &self.uplink {
            Uplink::Here { hub, connections: Some(connections) } => {
                hub.close();
                connections.finish();
            }
            Uplink::Here { connections: None, .. } => {}
            Uplink::There(link) => link.finish(),
        }
    }

    /// One post, from its start to its end.
    fn exchange(
        &self,
        calls: Vec<Call>,
        contribution: Option<Vec<u8>>,
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        let operation = calls.first().map_or(Operation::Exchange, Call::called);
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let end = Instant::now().checked_add(deadline);
        self.seat.begin(operation)?;
        self.send(Request::Post { calls, contribution });
        let in_time = self.seat.wait(end);
        let outcome = in_time.or_else(|| {
            // The hub knows who is missing, and whether the last of them came just now.
            self.send(Request::Overdue { deadline });
            self.seat.wait(Instant::now().checked_add(HUB_TIME))
        });
        outcome.unwrap_or_else(|| {
            self.give_up_on_hub(operation, deadline);
            self.seat.wait(None).unwrap_or_else(|| unreachable!("without an end, a wait ends with an outcome"))
        })
    }

    /// Waits until so many announced calls have been matched.
    fn wait_matched(&self, calls: u64, operation: Option<Operation>, deadline: Duration) -> Result<(), CommError> {
        if self.seat.matched() >= calls {
            return Ok(());
        }
        self.ask_about(calls);
        let end = Instant::now().checked_add(deadline);
        let outcome = self.seat.wait_matched(calls, operation, end).or_else(|| {
            // The hub knows who is missing, and whether the last of them came just now.
            self.send(Request::Unconfirmed { calls, deadline });
            self.seat.wait_matched(calls, operation, Instant::now().checked_add(HUB_TIME))
        });
        outcome.unwrap_or_else(|| Err(self.give_up_on_hub(operation.unwrap_or(Operation::Exchange), deadline)))
    }

    fn ask_about(&self, calls: u64) {
        if self.asked.fetch_max(calls, Ordering::AcqRel) < calls && self.seat.matched() < calls {
            self.send(Request::Confirm { calls });
        }
    }

    /// Refuses calls that this rank cannot make. Returns what to call them in errors, or `None` if there are none.
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

    /// The hub does not answer: rank 0 is what is missing. It hears of this when it comes back.
    fn give_up_on_hub(&self, operation: Operation, deadline: Duration) -> CommError {
        let failure = CommError::Timeout { operation, missing: vec![0], deadline };
        self.seat.fail(failure.clone());
        self.send(Request::Fail(failure.clone()));
        self.seat.failure().unwrap_or(failure)
    }

    /// Refuses a call of this rank, for which the others would wait in vain.
    fn refuse(&self, operation: Operation, reason: String) -> CommError {
        let failure = CommError::InvalidCall { operation, rank: self.rank(), reason };
        self.fail(failure.clone());
        self.seat.refusal(operation).unwrap_or(failure)
    }

    fn send(&self, request: Request) {
        match &self.uplink {
            Uplink::Here { hub, .. } => {
                if let Err(violation) = hub.receive(self.rank(), request) {
                    unreachable!("a member of this process made {violation}");
                }
            }
            Uplink::There(link) => link.outbox.send(&request),
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.leave();
    }
}
