//! One rank's part in an NCCL communicator, shared by the rank's thread, which puts work into queues, and the thread that watches
//! over that work.
//!
//! The first failure sticks. It is published before the communicator is aborted, so that nobody waits for an abort.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::primitive::{Primitive, Refused, issue_all};
use crate::bootstrap::Member;
use crate::driver::{Event, HostFlag, Queue, Sharers};
use crate::error::{Call, CommError, Error, Operation, Result};
use crate::sys::nccl::{Comm, Nccl, NcclError, ResultCode};

/// Why a communicator can no longer be used.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    Comm(CommError),
    Nccl(NcclError),
}

impl Failure {
    /// As the error of this rank's own `operation`.
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
    /// The number of the last collective that had been started when this was.
    pub(super) sequence: u64,
    /// The number of the last call in the record of calls.
    pub(super) number: u64,
    /// The last call.
    pub(super) call: Call,
    pub(super) started: Instant,
}

/// Work in a queue that is not known to be over.
#[derive(Debug)]
pub(super) struct Outstanding {
    pub(super) begun: Begun,
    pub(super) done: Event,
}

/// Whether anything was put into a queue.
pub(super) enum Put {
    Nothing,
    /// Not to run now, but whenever the recording runs.
    Recorded,
    Work,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) outstanding: std::collections::VecDeque<Outstanding>,
    /// The oldest of it, while the watching thread asks the driver about it.
    pub(super) looked_at: Option<Begun>,
    /// What the rank's thread is putting into a queue.
    pub(super) in_call: Option<Begun>,
    /// Events to use again.
    spare: Vec<Event>,
    failure: Option<Failure>,
    /// Set when the rank's thread has dropped the communicator.
    pub(super) is_closing: bool,
    /// Set when nothing is left to do for the watching thread.
    pub(super) has_ended: bool,
}

/// What ranks have told each other of where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neighbours {
    /// How many ranks are on this rank's GPU, this one included.
    pub(super) ranks_on_device: usize,
    /// Who shares the GPU with this rank: these ranks, and those of the communicator that this one was split from.
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
    /// A queue of the communicator's device; its context is what NCCL works in.
    pub(super) device: Queue,
    /// What it was made with.
    pub(super) options: super::NcclOptions,
    /// Which of the other ranks are near.
    pub(super) neighbours: Neighbours,
    /// The communicator; null once it has been destroyed or aborted.
    handle: AtomicPtr<std::ffi::c_void>,
    /// Tells kernels that meet those of other ranks to give up.
    pub(super) abort: Arc<HostFlag>,
    /// Held while a call of NCCL uses `handle`, and until a communicator that does not block has taken the call in.
    in_call: Mutex<()>,
    /// The end of the last kernels that met those of other ranks.
    last_kernels: Mutex<Option<Event>>,
    /// The same of recorded ones, with the number of the recording.
    last_recorded: Mutex<Option<(u64, Event)>>,
    has_failed: AtomicBool,
    state: Mutex<State>,
    pub(super) changed: Condvar,
}

impl Session {
    pub(super) fn new(
        nccl: &'static Nccl,
        member: Member,
        device: Queue,
        options: &super::NcclOptions,
        (handle, neighbours): (Comm, Neighbours),
        abort: Arc<HostFlag>,
    ) -> Self {
        Self {
            abort,
            nccl,
            member,
            device,
            options: options.clone(),
            neighbours,
            handle: AtomicPtr::new(handle),
            in_call: Mutex::new(()),
            last_kernels: Mutex::default(),
            last_recorded: Mutex::default(),
            has_failed: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// No user code runs under the lock, so a poisoned one still guards consistent state.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a failure, unless there is one already, and wakes everybody.
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

    /// Takes note of a failure of the group, if there is one: the watching thread may not have come to it yet.
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

    /// Tells every rank that this one cannot go on, and why.
    pub(super) fn report(&self, operation: Operation, reason: String) {
        let rank = self.member.rank();
        self.member.fail(CommError::Transport { operation, rank, reason });
    }

    /// Passes on an error in this rank's own operands, after telling the other ranks, who would wait for nothing.
    pub(super) fn refuse(&self, operation: Operation, error: Error) -> Error {
        let failure = CommError::InvalidCall { operation, rank: self.member.rank(), reason: error.to_string() };
        self.member.fail(failure.clone());
        self.fail(Failure::Comm(failure));
        error
    }

    /// Puts operations into a queue, all of them as one group.
    ///
    /// # Safety
    /// The operands are memory of this communicator's device, valid until the queue has got past them, and used by nothing but work
    /// ordered on the queue.
    pub(super) unsafe fn submit(&self, queue: &Queue, calls: &[Call], primitives: &[Primitive]) -> Result<()> {
        let Some(last) = calls.last() else { return Ok(()) };
        self.admit(queue, calls, true, || {
            if primitives.is_empty() {
                return Ok(Put::Nothing);
            }
            let started = Instant::now();
            let _in_call = self.in_call.lock().unwrap_or_else(PoisonError::into_inner);
            let handle = self.handle.load(Ordering::Acquire);
            if handle.is_null() {
                self.check(last.called())?;
            }
            // SAFETY: the handle is live while the lock is held, or is being aborted because this very call hangs; the operands are
            // the caller's promise.
            let issued = unsafe { issue_all(primitives, self.nccl, handle, queue.stream()) };
            self.settle(issued, started).map_err(|refused| self.broken(refused, last.called()))?;
            Ok(if queue.is_capturing()? { Put::Recorded } else { Put::Work })
        })
    }

    /// Like [`admit`](Self::admit), for kernels that meet those of other ranks. They run in the order of their calls, whatever their
    /// queues: two launches that fill the GPU and wait for peers, in another order on each rank, would wait for ever.
    pub(super) fn admit_kernels(
        &self,
        queue: &Queue,
        call: Call,
        launch: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        self.admit(queue, &[call], false, || {
            // Launches of a graph are ordered as a whole when it runs, and the kernels in it here.
            if let Some(recording) = queue.capture_id()? {
                let mut last = self.last_recorded.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some((_, event)) = last.take_if(|(number, event)| *number == recording && !event.is_of(queue)) {
                    queue.wait_for(&event)?;
                }
                launch()?;
                let event = queue.event()?;
                event.record()?;
                *last = Some((recording, event));
                return Ok(Put::Recorded);
            }
            let mut last = self.last_kernels.lock().unwrap_or_else(PoisonError::into_inner);
            let event = match last.take() {
                Some(event) if event.is_of(queue) => event,
                Some(other) => {
                    queue.wait_for(&other)?;
                    queue.event()?
                }
                None => queue.event()?,
            };
            launch()?;
            event.record()?;
            *last = Some(event);
            Ok(Put::Work)
        })
    }

    /// Lets `put` put operations into a queue, after the ranks' control channel has got them to compare, and watches over them from
    /// then on. `by_nccl`: NCCL's kernels run the operations, and not our own.
    fn admit(&self, queue: &Queue, calls: &[Call], by_nccl: bool, put: impl FnOnce() -> Result<Put>) -> Result<()> {
        let Some(last) = calls.last() else { return Ok(()) };
        self.check(last.called())?;
        if queue.ordinal() != self.device.ordinal() {
            let (memory, own) = (queue.ordinal(), self.device.ordinal());
            let reason = format!("the operands are on device {memory}, this rank's communicator on device {own}");
            return Err(self.refuse(last.called(), Error::InvalidArgument { operation: "nccl", reason }));
        }
        // Our own kernels write where their ranks have agreed that they may, whatever the call.
        if self.options.checks || by_nccl {
            self.announce(calls)?;
        }
        if self.neighbours.share_process || queue.is_capturing()? {
            // Inside a process, and between buffers that it registers because a graph names them, NCCL writes to the peer's memory directly, as far
            // as the writer's count goes.
            self.confirm(self.member.announced(), self.options.deadline)?;
        }
        let (recorder, announced) = (self.member.recorder(), self.member.announced());
        let announced = if self.options.checks { announced } else { 0 };
        let posted = calls.iter().map(|&call| recorder.post(call, announced)).last();
        let (sequence, number) = posted.unwrap_or_default();
        queue.make_current()?;
        let begun = Begun { sequence, number, call: *last, started: Instant::now() };
        self.lock().in_call = Some(begun);
        let put = put();
        let spare = {
            let mut state = self.lock();
            state.in_call = None;
            state.spare.pop()
        };
        let put = put.inspect_err(|error| {
            // The other ranks have put their part into their queues, or are about to.
            if self.failure().is_none() {
                self.report(last.called(), error.to_string());
                let (operation, rank, reason) = (last.called(), self.member.rank(), error.to_string());
                self.fail(Failure::Comm(CommError::Transport { operation, rank, reason }));
            }
        });
        match put? {
            Put::Nothing | Put::Recorded => {
                recorder.finish_announced(number);
                return Ok(());
            }
            Put::Work => {}
        }
        let done = match spare {
            Some(event) if event.is_of(queue) => event,
            _ => queue.event()?,
        };
        done.record()?;
        let outstanding = Outstanding { begun, done };
        let mut state = self.lock();
        state.outstanding.push_back(outstanding);
        // The watching thread sleeps long only while there is nothing to watch.
        if state.outstanding.len() == 1 {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Has the ranks compare these calls, if they check calls at all, as ranks of one process always do. Nobody waits for that here: it may fail the communicator at any
    /// time, and [`confirm`](Self::confirm) waits for it.
    pub(super) fn announce(&self, calls: &[Call]) -> Result<()> {
        if !self.options.checks && !self.neighbours.share_process {
            return Ok(());
        }
        let fail = |error: &CommError| self.fail(Failure::Comm(error.clone()));
        Ok(self.member.announce(calls, self.options.deadline).inspect_err(fail)?)
    }

    /// Waits until the first `calls` announced calls have been compared with the other ranks'; does not wait without checks.
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

    /// Waits until a communicator that does not block has taken a call in.
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

    /// NCCL's report on the communicator's background work, for the watching thread; `None` where the rank's thread may be asking too.
    ///
    /// Of a communicator that does not block, `ncclCommGetAsyncError` joins the thread of the background work, and of two threads that ask at
    /// once and join it both, one never returns (seen with 2.32.3).
    pub(super) fn async_error(&self) -> Option<ResultCode> {
        let _in_call = if self.options.blocking { None } else { Some(self.in_call.try_lock().ok()?) };
        Some(self.ask_nccl())
    }

    /// The same, for the only thread that asks.
    fn ask_nccl(&self) -> ResultCode {
        let handle = self.handle.load(Ordering::Acquire);
        if handle.is_null() {
            return ResultCode::SUCCESS;
        }
        let mut code = ResultCode::SUCCESS;
        // SAFETY: the handle is live: an abort is preceded by a failure, which ends `settle`, and waits for `in_call` longer than that takes.
        let asked = unsafe { (self.nccl.functions.ncclCommGetAsyncError)(handle, &mut code) };
        if asked == ResultCode::SUCCESS { code } else { asked }
    }

    /// The error of a refused call, after making it everybody's failure: the others may have put their part into their queues.
    pub(super) fn broken(&self, refused: Refused, operation: Operation) -> Error {
        // An abort makes calls in progress fail; what it was for is the better answer.
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

    /// Takes an event back.
    pub(super) fn recycle(&self, event: Event) {
        self.lock().spare.push(event);
    }

    /// Takes the communicator away, for its end. A call that uses it is waited for, but no longer than `patience`: one that hangs is
    /// what an abort is for.
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
