//! One rank's part in an NCCL communicator, shared by the rank's thread, which enqueues work, and the watching thread.
//!
//! The first failure is permanent. It is published before the communicator is aborted, so that no thread waits for an abort.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::companions::Companions;
use super::primitive::{Primitive, Refused, checked};
use super::recorded::{Recorded, Recordings};
use super::setup::Connected;
use crate::bootstrap::Member;
use crate::driver::{Event, Graph, HostFlag, LaunchOrder, Queue, Sharers};
use crate::error::{Call, CommError, Error, Operation, Result};
use crate::sys::nccl::{Comm, Nccl, NcclError, ResultCode};

/// The reason why a communicator can no longer be used.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    Comm(CommError),
    Nccl(NcclError),
}

impl Failure {
    /// Converts the failure to the error of this rank's own `operation`.
    fn error(&self, own: Operation) -> Error {
        match self {
            Failure::Nccl(error) => error.clone().into(),
            Failure::Comm(error) => error.clone().of(own).into(),
        }
    }
}

/// An operation that has begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Begun {
    /// The number of the last collective that had been started when this operation began.
    pub(super) sequence: u64,
    /// The number of the last call in the trace.
    pub(super) number: u64,
    /// The last call.
    pub(super) call: Call,
    pub(super) started: Instant,
}

/// Enqueued work that is not known to be complete.
#[derive(Debug)]
pub(super) struct Outstanding {
    pub(super) begun: Begun,
    pub(super) done: Event,
}

#[derive(Debug, Default)]
pub(super) struct SessionState {
    pub(super) outstanding: std::collections::VecDeque<Outstanding>,
    /// The oldest outstanding work, while the watching thread queries the driver about it.
    pub(super) looked_at: Option<Begun>,
    /// The operation that the rank's thread is enqueuing.
    pub(super) in_call: Option<Begun>,
    /// Events to reuse.
    spare: Vec<Event>,
    failure: Option<Failure>,
    /// Set when the rank's thread has dropped the communicator.
    pub(super) is_closing: bool,
    /// Set when the watching thread has ended the communicator.
    pub(super) has_ended: bool,
}

/// The placement of the ranks, which they have told each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neighbours {
    /// The number of ranks on this rank's GPU, including this one.
    pub(super) ranks_on_device: usize,
    /// The ranks that share the GPU with this rank: these ranks, and the ranks of the communicator that this one was split from.
    pub(super) sharers: Sharers,
    /// Whether all ranks are on one machine; equal on all of them.
    pub(super) on_one_host: bool,
    /// Whether some ranks are threads of one process; equal on all of them.
    pub(super) share_process: bool,
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) nccl: &'static Nccl,
    pub(super) member: Member,
    /// A queue of the communicator's device; NCCL works in its context.
    pub(super) device: Queue,
    /// The options of the communicator.
    pub(super) options: super::NcclOptions,
    /// The ranks that are threads of this process, with which this one ends.
    pub(super) companions: Arc<Companions>,
    /// The placement of the ranks.
    pub(super) neighbours: Neighbours,
    /// The communicator; null once it has been destroyed or aborted.
    handle: AtomicPtr<std::ffi::c_void>,
    /// The flag that tells kernels which wait for other ranks to give up.
    pub(super) abort: Arc<HostFlag>,
    /// Held while a call of NCCL uses `handle`, and until a non-blocking communicator has processed the call.
    in_call: Mutex<()>,
    /// The launches of kernels that wait for kernels of other ranks.
    pub(super) order: Arc<LaunchOrder>,
    pub(super) recordings: Recordings,
    has_failed: AtomicBool,
    state: Mutex<SessionState>,
    pub(super) changed: Condvar,
}

impl Session {
    pub(super) fn new(
        Connected { nccl, handle, companions, neighbours, .. }: Connected,
        member: Member,
        device: Queue,
        options: &super::NcclOptions,
        abort: Arc<HostFlag>,
    ) -> Self {
        let recordings = Recordings::new(nccl.version(), neighbours.share_process);
        Self {
            abort,
            recordings,
            nccl,
            member,
            device,
            options: options.clone(),
            companions,
            neighbours,
            handle: AtomicPtr::new(handle),
            in_call: Mutex::new(()),
            order: Arc::default(),
            has_failed: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// No user code runs under the lock, so a poisoned one still guards consistent state.
    pub(super) fn lock(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a failure, unless there is one already, and wakes all waiting threads.
    pub(super) fn fail(&self, failure: Failure) {
        self.lock().failure.get_or_insert(failure);
        self.has_failed.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        if !self.has_failed.load(Ordering::Acquire) {
            return None;
        }
        self.lock().failure.clone()
    }

    /// Records a failure of the group, if there is one, which the watching thread may not have detected yet.
    fn hear(&self) {
        if let Some(error) = self.member.failure() {
            self.fail(Failure::Comm(error));
        }
    }

    /// The failure of this communicator, if any, as the error of `operation`.
    pub(super) fn check(&self, operation: Operation) -> Result<()> {
        self.hear();
        self.failure().map_or(Ok(()), |failure| Err(failure.error(operation)))
    }

    /// Fails the group, because this rank cannot continue for this reason.
    pub(super) fn report(&self, operation: Operation, reason: String) {
        let rank = self.member.rank();
        self.member.fail(CommError::Transport { operation, rank, reason });
    }

    /// Returns an error in this rank's own operands, after reporting it to the other ranks, which would wait in vain.
    pub(super) fn refuse(&self, operation: Operation, error: Error) -> Error {
        let failure = CommError::InvalidCall { operation, rank: self.member.rank(), reason: error.to_string() };
        self.member.fail(failure.clone());
        self.fail(Failure::Comm(failure));
        error
    }

    /// Passes calls to NCCL, several as one group.
    ///
    /// # Safety
    /// The operands are memory of this communicator's device, valid until the queue has passed them, and used only by work that is
    /// ordered on the queue.
    pub(super) unsafe fn issue(&self, queue: &Queue, primitives: &[Primitive], operation: Operation) -> Result<()> {
        if primitives.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        let _in_call = self.in_call.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = self.handle.load(Ordering::Acquire);
        if handle.is_null() {
            self.check(operation)?;
        }
        let issue_all = || {
            primitives.iter().try_fold(ResultCode::SUCCESS, |_, primitive| {
                // SAFETY: the handle is live while the lock is held, or is being aborted because this very call hangs; the caller promises
                // the operands.
                unsafe { primitive.issue(self.nccl, handle, queue.stream()) }
            })
        };
        let issued = if Primitive::are_group(primitives) { self.in_group(issue_all) } else { issue_all() };
        self.settle(issued, started).map_err(|refused| self.broken(refused, operation))
    }

    /// Runs calls of NCCL as one group.
    fn in_group(&self, calls: impl FnOnce() -> Result<ResultCode, Refused>) -> Result<ResultCode, Refused> {
        let api = &self.nccl.functions;
        // SAFETY: a group of this thread begins.
        checked("ncclGroupStart", unsafe { (api.ncclGroupStart)() })?;
        let issued = calls();
        // SAFETY: the group that has begun above. It must be closed in any case, because it belongs to the thread.
        let ended = checked("ncclGroupEnd", unsafe { (api.ncclGroupEnd)() });
        issued.and(ended)
    }

    /// Launches a graph, which orders its own kernels that wait for kernels of other ranks. The launch is compared by the ranks of every
    /// communicator whose calls of NCCL are in the graph.
    pub(super) fn launch(&self, graph: &Graph) -> Result<()> {
        let parts = graph.parts::<Recorded>();
        let (own, others): (Vec<_>, Vec<_>) = parts.iter().partition(|part| std::ptr::eq(&*part.session, self));
        let own = own.first();
        let call = |part: Option<&Arc<Recorded>>| {
            Call::without_data(Operation::Graph { recording: part.map_or(0, |part| part.number()) })
        };
        self.check_queue(graph.queue(), call(own.copied()).operation)?;
        for other in others.into_iter().filter(|other| other.is_of_nccl()) {
            other.session.compare_launch(call(Some(other)), Some(other))?;
        }
        let call = call(own.copied());
        let _held = graph.queue().hold();
        self.compare_launch(call, own.copied().map(|own| &**own))?;
        let begun = self.begin(graph.queue(), &[call])?;
        let enqueued = graph.enqueue().map_err(Into::into);
        self.watch(graph.queue(), begun, true, enqueued)
    }

    /// Compares the launch of a graph with the other ranks' launches, before it runs if that is needed.
    fn compare_launch(&self, launch: Call, part: Option<&Recorded>) -> Result<()> {
        self.check(launch.called())?;
        let is_of_nccl = part.is_some_and(Recorded::is_of_nccl);
        let mut calls = Vec::new();
        // A recording of transfers alone concerns the ranks that they name, unless ranks compare every call.
        if self.options.checks || (is_of_nccl && part.is_some_and(|part| part.number() > 0)) {
            calls.push(launch);
        }
        calls.extend(part.map(Recorded::transfers).unwrap_or_default());
        self.announce(&calls)?;
        let waits = part.is_some_and(Recorded::launch_waits) || (self.options.checks && self.neighbours.share_process);
        if waits { self.confirm_all(launch) } else { Ok(()) }
    }

    /// Refuses a queue of another device.
    fn check_queue(&self, queue: &Queue, operation: Operation) -> Result<()> {
        self.check(operation)?;
        if queue.ordinal() != self.device.ordinal() {
            let (memory, own) = (queue.ordinal(), self.device.ordinal());
            let reason = format!("the operands are on device {memory}, this rank's communicator on device {own}");
            return Err(self.refuse(operation, Error::InvalidArgument { operation: "nccl", reason }));
        }
        Ok(())
    }

    /// Announces operations for comparison, before they are enqueued; returns the number of the queue's recording if there is one.
    /// `by_nccl` is whether NCCL's kernels run the operations. `recorded` is this communicator's part of the recording, if there is one;
    /// the caller holds the queue.
    pub(super) fn compare(
        &self,
        (queue, recorded): (&Queue, Option<&Recorded>),
        calls: &[Call],
        by_nccl: bool,
    ) -> Result<Option<u64>> {
        let Some(last) = calls.last() else { return Ok(None) };
        self.check_queue(queue, last.called())?;
        // A recording that the driver has ended because of an error is refused here.
        let recording = queue.capture_id().map_err(|error| self.refuse(last.called(), error.into()))?;
        // Inside a process, and between buffers that NCCL registers because a graph names them, NCCL writes to the peer's memory directly,
        // up to the writer's count. This crate's kernels write only to memory that their ranks have agreed on, whatever the call.
        let waits = self.neighbours.share_process || recorded.is_some();
        let is_compared = self.options.checks || (by_nccl && waits);
        let beginning = recorded.and_then(|recorded| recorded.add(calls, by_nccl, is_compared));
        if is_compared {
            match beginning {
                Some(beginning) => self.announce(&[&[beginning], calls].concat())?,
                None => self.announce(calls)?,
            }
            if waits {
                self.confirm_all(*last)?;
            }
        }
        Ok(recording)
    }

    /// Waits until all calls of this rank so far, of which `last` is the last one, have been compared.
    fn confirm_all(&self, last: Call) -> Result<()> {
        let confirmed = self.confirm(self.member.announced(), self.options.deadline);
        confirmed.or_else(|error| self.check(last.called()).and(Err(error)))
    }

    /// Notes operations that were compared and that this thread enqueues now. There is at least one.
    pub(super) fn begin(&self, queue: &Queue, calls: &[Call]) -> Result<Begun> {
        let (recorder, announced) = (self.member.recorder(), self.member.announced());
        let announced = if self.options.checks { announced } else { 0 };
        // `fold` instead of `last`, because every call has to be posted.
        let posted = calls.iter().fold(None, |_, &call| Some(recorder.post(call, announced)));
        let (sequence, number) = posted.unwrap_or_default();
        queue.make_current()?;
        let begun = Begun { sequence, number, call: calls[calls.len() - 1], started: Instant::now() };
        self.lock().in_call = Some(begun);
        Ok(begun)
    }

    /// Watches operations that have [begun](Self::begin), after they were enqueued. `runs` is whether the queue has work of them now: it
    /// has none where there are no data, or where the work is part of a recording.
    pub(super) fn watch(&self, queue: &Queue, begun: Begun, runs: bool, enqueued: Result<()>) -> Result<()> {
        let spare = {
            let mut state = self.lock();
            state.in_call = None;
            state.spare.pop()
        };
        let operation = begun.call.called();
        enqueued.inspect_err(|error| {
            // The other ranks have enqueued their part, or are about to.
            if self.failure().is_none() {
                self.report(operation, error.to_string());
                let (rank, reason) = (self.member.rank(), error.to_string());
                self.fail(Failure::Comm(CommError::Transport { operation, rank, reason }));
            }
        })?;
        if !runs {
            self.member.recorder().finish_announced(begun.number);
            return Ok(());
        }
        let done = match spare {
            Some(event) if event.is_of(queue) => event,
            other => {
                other.into_iter().for_each(Event::retire);
                queue.event()?
            }
        };
        done.record()?;
        let outstanding = Outstanding { begun, done };
        let mut state = self.lock();
        state.outstanding.push_back(outstanding);
        // The watching thread sleeps longer while no work is outstanding.
        if state.outstanding.len() == 1 {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Whether the ranks compare calls of NCCL that are not recorded.
    pub(super) fn compares_calls(&self) -> bool {
        self.options.checks || self.neighbours.share_process
    }

    /// Announces these calls for comparison. This does not wait: a mismatch may fail the communicator at any time, and
    /// [`confirm`](Self::confirm) waits for the comparison.
    pub(super) fn announce(&self, calls: &[Call]) -> Result<()> {
        if calls.is_empty() {
            return Ok(());
        }
        let fail = |error: &CommError| self.fail(Failure::Comm(error.clone()));
        Ok(self.member.announce(calls, self.options.deadline).inspect_err(fail)?)
    }

    /// Waits until the first `calls` announced calls have been compared with the other ranks' calls.
    pub(super) fn confirm(&self, calls: u64, deadline: Duration) -> Result<()> {
        self.member.confirm_first(calls, deadline).or_else(|error| {
            self.fail(Failure::Comm(error));
            self.check_outstanding()
        })
    }

    /// The failure of this communicator, if any, as the error of the oldest operation that it has ended.
    pub(super) fn check_outstanding(&self) -> Result<()> {
        self.hear();
        if !self.has_failed.load(Ordering::Acquire) {
            return Ok(());
        }
        let state = self.lock();
        let own =
            state.looked_at.or(state.outstanding.front().map(|front| front.begun)).map(|begun| begun.call.called());
        let Some(failure) = state.failure.clone() else { return Ok(()) };
        drop(state);
        Err(match (failure, own) {
            (Failure::Comm(error), None) => error.into(),
            (failure, own) => failure.error(own.unwrap_or(Operation::Exchange)),
        })
    }

    /// Waits until a non-blocking communicator has processed a call.
    fn settle(&self, issued: Result<ResultCode, Refused>, started: Instant) -> Result<(), Refused> {
        let mut code = issued?;
        while code == ResultCode::IN_PROGRESS {
            if self.has_failed.load(Ordering::Acquire) {
                return Ok(());
            }
            if started.elapsed() > Duration::from_micros(500) {
                std::thread::sleep(Duration::from_micros(100));
            } else {
                std::thread::yield_now();
            }
            code = self.ask_nccl();
        }
        if code == ResultCode::SUCCESS {
            return Ok(());
        }
        Err(Refused { call: "ncclCommGetAsyncError", code })
    }

    /// NCCL's status of the communicator's background work, for the watching thread; `None` if the rank's thread may be querying it too.
    ///
    /// For a non-blocking communicator, `ncclCommGetAsyncError` joins the thread of the background work. If two threads query at once and
    /// both join it, one never returns (seen with 2.32.3).
    pub(super) fn async_error(&self) -> Option<ResultCode> {
        let _in_call = if self.options.blocking { None } else { Some(self.in_call.try_lock().ok()?) };
        Some(self.ask_nccl())
    }

    /// Like [`async_error`](Self::async_error), for the only thread that queries.
    fn ask_nccl(&self) -> ResultCode {
        let handle = self.handle.load(Ordering::Acquire);
        if handle.is_null() {
            return ResultCode::SUCCESS;
        }
        let mut code = ResultCode::SUCCESS;
        // SAFETY: the handle is live: an abort is preceded by a failure, which ends `settle`, and waits for `in_call` longer than that
        // takes.
        let asked = unsafe { (self.nccl.functions.ncclCommGetAsyncError)(handle, &mut code) };
        if asked == ResultCode::SUCCESS { code } else { asked }
    }

    /// Returns the error of a refused call, after failing the group: the other ranks may have enqueued their part.
    pub(super) fn broken(&self, refused: Refused, operation: Operation) -> Error {
        // An abort makes calls in progress fail; the cause of the abort is the better error.
        if let Err(error) = self.check(operation) {
            return error;
        }
        let error = self.describe(refused);
        self.report(operation, error.to_string());
        self.fail(Failure::Nccl(error.clone()));
        error.into()
    }

    pub(super) fn describe(&self, refused: Refused) -> NcclError {
        NcclError::Failed {
            call: refused.call,
            code: refused.code.0,
            text: self.nccl.error_string(refused.code),
            // SAFETY: the handle is live or null.
            last_error: unsafe { self.nccl.last_error(self.handle.load(Ordering::Acquire)) },
            rank: self.member.rank(),
            world_size: self.member.world_size(),
        }
    }

    /// Keeps an event for reuse.
    pub(super) fn recycle(&self, event: Event) {
        self.lock().spare.push(event);
    }

    /// Takes the communicator away, to end it. Waits for a call that uses it, but no longer than `patience`, because an abort also has to
    /// end a call that hangs.
    pub(super) fn take_handle(&self, patience: Duration) -> Comm {
        let until = Instant::now() + patience;
        loop {
            if let Ok(_guard) = self.in_call.try_lock() {
                return self.handle.swap(ptr::null_mut(), Ordering::AcqRel);
            }
            if Instant::now() >= until {
                return self.handle.swap(ptr::null_mut(), Ordering::AcqRel);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
