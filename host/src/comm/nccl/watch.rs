//! The watching thread of one rank's communicator: it detects completed and late operations and departed ranks, aborts the communicator
//! after a failure, and destroys it when the rank is done.
//!
//! It never enqueues work, and the rank's thread waits for it only at the end.

use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::primitive::Refused;
use super::session::{Begun, Failure, Session};
use crate::error::{CommError, Departure, Operation};
use crate::sys::nccl::ResultCode;

/// The time for a failure to reach every rank of the group before kernels are ended.
const NEWS: Duration = Duration::from_millis(50);
/// The polling intervals while operations are in flight, and otherwise.
const BUSY: Duration = Duration::from_millis(2);
const IDLE: Duration = Duration::from_millis(20);
/// The interval at which NCCL is queried for asynchronous errors.
const ASK_NCCL: Duration = Duration::from_millis(100);
/// How long an abort waits for a call of NCCL in progress.
const PATIENCE: Duration = Duration::from_millis(500);

/// Runs the watching thread until the communicator has ended.
pub(super) fn watch(session: &Arc<Session>) {
    if let Err(error) = session.device.make_current() {
        session.report(Operation::Exchange, error.to_string());
    }
    let mut asked = Instant::now();
    let mut closing = None;
    let is_healthy = loop {
        if let Some(error) = session.member.failure() {
            session.fail(Failure::Comm(error));
        }
        if session.failure().is_some() {
            break false;
        }
        collect(session);
        if let Some(error) = late(session) {
            session.fail(Failure::Comm(error));
            break false;
        }
        if asked.elapsed() > ASK_NCCL {
            asked = Instant::now();
            let code = session.async_error().unwrap_or(ResultCode::SUCCESS);
            if code != ResultCode::SUCCESS && code != ResultCode::IN_PROGRESS {
                let operation =
                    session.lock().outstanding.front().map_or(Operation::Exchange, |front| front.begun.call.called());
                session.broken(Refused { call: "ncclCommGetAsyncError", code }, operation);
                break false;
            }
        }
        let state = session.lock();
        if state.is_closing {
            let since = *closing.get_or_insert_with(Instant::now);
            if state.outstanding.is_empty() {
                drop(state);
                // The other ranks' records of the last calls may still be in flight to the coordinator, which ends with rank 0.
                let left = session.options.deadline.saturating_sub(since.elapsed());
                break session.confirm(session.member.announced(), left).is_ok();
            }
        }
        let is_idle = state.outstanding.is_empty() && state.in_call.is_none();
        let pause = if is_idle { IDLE } else { BUSY };
        drop(session.changed.wait_timeout(state, pause));
    };
    end(session, is_healthy);
    session.lock().has_ended = true;
    session.changed.notify_all();
}

/// Removes completed work, oldest first.
fn collect(session: &Session) {
    loop {
        let front = {
            let mut state = session.lock();
            let Some(front) = state.outstanding.pop_front() else { return };
            state.looked_at = Some(front.begun);
            front
        };
        // The driver is queried without the lock, because the query may block, and the rank's thread must not wait for it.
        let done = front.done.is_done();
        if let Err(error) = &done {
            session.report(front.begun.call.called(), error.to_string());
        }
        let mut state = session.lock();
        state.looked_at = None;
        if !matches!(done, Ok(true)) {
            return state.outstanding.push_front(front);
        }
        drop(state);
        session.member.recorder().finish_announced(front.begun.number);
        session.recycle(front.done);
    }
}

/// The failure of the oldest operation in flight, if it is past its deadline or needs a rank that has left. A call that hangs inside
/// NCCL, where two ranks connect, is in flight too.
fn late(session: &Session) -> Option<CommError> {
    let Begun { sequence, call, started, .. } = {
        let state = session.lock();
        state.outstanding.front().map(|front| front.begun).or(state.in_call)?
    };
    let operation = call.called();
    if let Some((rank, departure)) = gone(session, sequence, call.operation) {
        let error = CommError::PeerGone { operation, rank, departure };
        session.member.fail(error.clone());
        return Some(error);
    }
    let is_late = started.elapsed() > session.options.deadline;
    is_late.then(|| session.member.late(sequence, operation, session.options.deadline))
}

/// A rank that left before it started the collective with this number. Transfers between two ranks have no number of their own.
fn gone(session: &Session, sequence: u64, operation: Operation) -> Option<(usize, Departure)> {
    let is_transfer = matches!(
        operation,
        Operation::Send { .. } | Operation::Recv { .. } | Operation::SendRecv { .. } | Operation::Exchange
    );
    if is_transfer { None } else { session.member.gone_before(sequence) }
}

/// Ends the communicator: in good order, or by an abort, which makes the kernels of its collectives return.
pub(super) fn end(session: &Session, is_healthy: bool) {
    if !is_healthy {
        // Kernels that are ended send incomplete data to the peers, so the peers have to learn of the failure first.
        std::thread::sleep(NEWS);
        session.abort.set();
    }
    let handle = session.take_handle(PATIENCE);
    if handle.is_null() {
        return;
    }
    let api = &session.nccl.functions;
    session.companions.end(handle, is_healthy, |handle, is_healthy| {
        let begun = Instant::now();
        // SAFETY: the handle was taken away, so that no other thread starts a call with it. A call that hangs is ended by the abort.
        let (call, code) = unsafe {
            if is_healthy {
                ("ncclCommDestroy", (api.ncclCommDestroy)(handle))
            } else {
                ("ncclCommAbort", (api.ncclCommAbort)(handle))
            }
        };
        let (rank, milliseconds) = (session.member.rank(), begun.elapsed().as_millis());
        if code == ResultCode::SUCCESS || code == ResultCode::IN_PROGRESS {
            tracing::debug!(rank, call, milliseconds, "communicator ended");
        } else {
            tracing::warn!(rank, call, code = code.0, milliseconds, "communicator did not end well");
        }
    });
}

/// Ends a communicator and its watching thread when dropped.
#[derive(Debug)]
pub(super) struct End {
    session: Arc<Session>,
    watcher: Option<JoinHandle<()>>,
}

impl End {
    pub(super) fn new(session: Arc<Session>, watcher: JoinHandle<()>) -> Self {
        Self { session, watcher: Some(watcher) }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let Some(watcher) = self.watcher.take() else { return };
        if std::thread::panicking() {
            let rank = self.session.member.rank();
            let departure = Departure::Panicked;
            self.session.member.fail(CommError::PeerGone { operation: Operation::Exchange, rank, departure });
        }
        let mut state = self.session.lock();
        state.is_closing = true;
        self.session.changed.notify_all();
        // An abort may hang, contrary to NCCL's documentation; then its thread is left behind.
        let until = Instant::now() + self.session.options.deadline.saturating_add(Duration::from_secs(10));
        while !state.has_ended && Instant::now() < until {
            let pause = Duration::from_millis(100);
            state = self.session.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        let has_ended = state.has_ended;
        drop(state);
        if has_ended {
            if watcher.join().is_err() {
                tracing::error!(rank = self.session.member.rank(), "the thread that watched over NCCL panicked");
            }
        } else {
            tracing::error!(rank = self.session.member.rank(), "NCCL did not end; its communicator is left behind");
        }
    }
}
