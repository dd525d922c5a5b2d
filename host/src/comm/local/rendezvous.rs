//! The rendezvous of a local group: the engine for the calls of its threads, and the operands of the calls.
//!
//! A rank registers its operands, posts its calls to the engine, and waits. Once a collective matches, every rank works on the registered
//! operands, and no rank returns before all have finished, so reading another rank's memory is sound. A transfer is carried out by its
//! receiver, while the sender waits. A failure ends only calls that have not been begun, and then no rank accesses their operands; calls that
//! have been begun are finished before their ranks return.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::operands::{CollectiveCall, TransferCall};
use super::signal::{Signal, Wait};
use crate::engine::{Engine, Run};
use crate::error::{Call, CommError, Departure, Operation, Result};
use crate::trace::{Recorded, Recorder};

#[derive(Debug)]
pub(super) struct GroupState {
    engine: Engine,
    /// The collective of each rank, and its transfers in the order of its list.
    collectives: Vec<Option<CollectiveCall>>,
    transfers: Vec<Vec<TransferCall>>,
    /// The matched transfers, by their receivers, which carry them out.
    matched: Vec<VecDeque<Run>>,
    /// The calls of all ranks, while the ranks work on the operands.
    work: Option<Vec<CollectiveCall>>,
    /// The number of ranks that have finished this work.
    finished: usize,
    /// Number of collectives completed.
    completed: u64,
    /// The number of the collective in which a rank's work panicked, whose results must not be used.
    panicked: Option<u64>,
    pub(super) epochs: Epochs,
    /// Groups that are being split off, by colour, each with the number of ranks that have yet to enter.
    pending_groups: BTreeMap<u64, (Arc<Rendezvous>, usize)>,
}

/// The exposure epochs of a group.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    /// The number of ranks whose work in the current epoch has ended.
    pub(super) ended: usize,
    /// The number of completed epochs.
    pub(super) over: u64,
}

#[derive(Debug)]
pub(super) struct Rendezvous {
    world_size: usize,
    deadline: Duration,
    state: Mutex<GroupState>,
    changed: Signal,
    /// The recorder of each rank; empty if traces are not written.
    recorders: Vec<Arc<Recorder>>,
}

/// The progress of a wait.
enum Progress<T> {
    Done(T),
    /// Another rank is using this rank's memory, which has to stay valid until the use ends, even after a failure.
    InUse,
    /// The condition of the wait does not hold yet.
    Waiting,
}

impl Rendezvous {
    pub(super) fn new(world_size: usize, deadline: Duration, recorders: Vec<Arc<Recorder>>) -> Self {
        let state = GroupState {
            engine: Engine::new(world_size),
            collectives: vec![None; world_size],
            transfers: vec![Vec::new(); world_size],
            matched: vec![VecDeque::new(); world_size],
            work: None,
            finished: 0,
            completed: 0,
            panicked: None,
            epochs: Epochs::default(),
            pending_groups: BTreeMap::new(),
        };
        Rendezvous { world_size, deadline, state: Mutex::new(state), changed: Signal::default(), recorders }
    }

    pub(super) fn world_size(&self) -> usize {
        self.world_size
    }

    /// No user code runs under the lock, so a poisoned one still guards consistent state.
    pub(super) fn lock(&self) -> MutexGuard<'_, GroupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all waiting ranks after a change of the state.
    pub(super) fn notify(&self) {
        self.changed.notify();
    }

    /// Waits until the state has changed; may return spuriously.
    pub(super) fn wait_for_change<'a>(
        &'a self,
        state: MutexGuard<'a, GroupState>,
        wait: &mut Wait,
    ) -> MutexGuard<'a, GroupState> {
        self.changed.wait(|| self.lock(), state, wait, None)
    }

    /// Records a failure, unless there is one already, and wakes all ranks.
    pub(super) fn fail(&self, failure: CommError) {
        self.lock().engine.fail(failure);
        self.notify();
    }

    /// Marks a rank as departed, which is a failure only once a call needs the rank.
    pub(super) fn depart(&self, rank: usize) {
        let departure = if std::thread::panicking() { Departure::Panicked } else { Departure::Left };
        self.lock().engine.depart(rank, departure);
        self.notify();
        self.recorders.get(rank).into_iter().for_each(|recorder| recorder.leave());
    }

    /// Records calls that a rank makes.
    fn record(&self, rank: usize, calls: impl IntoIterator<Item = Call>) -> Recorded<'_> {
        self.recorders.get(rank).map_or(Recorded::NOWHERE, |recorder| recorder.record(calls))
    }

    /// Returns the rendezvous of the ranks of one colour, after a collective that has gathered all colours; `members` are these ranks in
    /// their new order. Each rank calls this once before its next collective, so colours of two splits never mix.
    pub(super) fn enter(&self, color: u64, members: &[usize]) -> Arc<Rendezvous> {
        let mut state = self.lock();
        let (split, world_size) = (state.completed, members.len());
        let new = || {
            let recorder =
                |(rank, member): (usize, &usize)| Some(self.recorders.get(*member)?.split(split, members, rank));
            let recorders = members.iter().enumerate().filter_map(recorder).collect();
            (Arc::new(Rendezvous::new(world_size, self.deadline, recorders)), world_size)
        };
        let (child, outside) = state.pending_groups.entry(color).or_insert_with(new);
        *outside -= 1;
        let (child, is_complete) = (child.clone(), *outside == 0);
        if is_complete {
            state.pending_groups.remove(&color);
        }
        child
    }

    /// Runs a collective: waits for all ranks, runs `work` on the calls of all ranks, and waits until all ranks have run their work.
    pub(super) fn collective(
        &self,
        rank: usize,
        collective: CollectiveCall,
        work: impl FnOnce(&[CollectiveCall]),
    ) -> Result<()> {
        let recorded = self.record(rank, [collective.call]);
        let outcome = self.run_collective(rank, collective, work, &recorded);
        recorded.end(&outcome);
        outcome
    }

    fn run_collective(
        &self,
        rank: usize,
        collective: CollectiveCall,
        work: impl FnOnce(&[CollectiveCall]),
        recorded: &Recorded<'_>,
    ) -> Result<()> {
        let operation = collective.call.operation;
        let end = self.end();
        let mut state = self.lock();
        state.check(operation)?;
        state.collectives[rank] = Some(collective);
        let (_, runs) = state.engine.post(rank, &[collective.call], true);
        state.begin(runs);
        let generation = state.completed;
        self.notify();

        let (state, calls) = self.wait(state, rank, operation, end, |state| match &state.work {
            Some(calls) => Progress::Done(calls.clone()),
            None => Progress::Waiting,
        })?;
        drop(state);
        // From here on, other ranks may be using this rank's memory, and wait for its work.
        let finish = Finish { rendezvous: self, operation, rank, generation };
        recorded.matched();
        work(&calls);
        drop(finish);

        let state = self.lock();
        // A failure in a later call of ranks that were faster is not a failure of this collective.
        if state.panicked == Some(generation) { state.check(operation) } else { Ok(()) }
    }

    /// Runs transfers to and from other ranks, each of which proceeds as soon as both ranks are present.
    pub(super) fn exchange(&self, rank: usize, operation: Operation, transfers: Vec<TransferCall>) -> Result<()> {
        let recorded = self.record(rank, transfers.iter().map(|transfer| transfer.call));
        let outcome = self.run_exchange(rank, operation, transfers);
        recorded.end(&outcome);
        outcome
    }

    fn run_exchange(&self, rank: usize, operation: Operation, transfers: Vec<TransferCall>) -> Result<()> {
        let end = self.end();
        let mut state = self.lock();
        state.check(operation)?;
        let calls: Vec<Call> = transfers.iter().map(|transfer| transfer.call).collect();
        state.transfers[rank] = transfers;
        let (ticket, runs) = state.engine.post(rank, &calls, true);
        state.begin(runs);
        self.notify();
        loop {
            let (guard, run) =
                self.wait(state, rank, operation, end, |state| match state.matched[rank].pop_front() {
                    Some(run) => Progress::Done(Some(run)),
                    None if state.engine.is_over(ticket) => Progress::Done(None),
                    None if state.engine.is_running(rank) => Progress::InUse,
                    None => Progress::Waiting,
                })?;
            state = guard;
            let Some(run) = run else { return Ok(()) };
            let Run::Transfer { send, receive } = run else { unreachable!("a collective has no receiver") };
            let [source, destination] = [send, receive].map(|end| state.transfers[end.rank][end.index].memory);
            drop(state);
            // SAFETY: the sender stays in its call until the run is finished below, so its memory stays borrowed; ours is borrowed by this
            // call; two live borrows, one of them mutable, never overlap; the engine has compared their lengths and dtypes.
            unsafe { std::ptr::copy_nonoverlapping(source.start, destination.start, destination.bytes) };
            // Recorded before the sender can return: its next transfer to this rank is another one.
            let (from, to) = (Operation::Recv { peer: send.rank }, Operation::Send { peer: rank });
            for (owner, operation) in [(rank, from), (send.rank, to)] {
                self.recorders.get(owner).into_iter().for_each(|recorder| recorder.finish_transfer(operation));
            }
            state = self.lock();
            let runs = state.engine.finish(run);
            state.begin(runs);
            self.notify();
        }
    }

    /// The deadline of a call that starts now; `None` if the clock cannot represent it.
    fn end(&self) -> Option<Instant> {
        Instant::now().checked_add(self.deadline)
    }

    /// Waits until `progress` returns `Done`, or until a failure occurs; in this case the rank's calls are withdrawn.
    fn wait<'a, T>(
        &'a self,
        mut state: MutexGuard<'a, GroupState>,
        rank: usize,
        operation: Operation,
        end: Option<Instant>,
        progress: impl Fn(&mut GroupState) -> Progress<T>,
    ) -> Result<(MutexGuard<'a, GroupState>, T)> {
        let mut wait = Wait::default();
        loop {
            match progress(&mut state) {
                Progress::Done(outcome) => return Ok((state, outcome)),
                Progress::InUse => {
                    state = self.wait_for_change(state, &mut wait);
                    continue;
                }
                Progress::Waiting => {}
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let is_late = left == Some(Duration::ZERO);
            if is_late && state.engine.failure().is_none() {
                state.engine.expire(rank, self.deadline);
                self.notify();
            }
            if let Err(error) = state.check(operation) {
                state.engine.withdraw(rank);
                return Err(error);
            }
            // After the deadline, this wait is for calls that other ranks are carrying out, which have none.
            let limit = left.filter(|_| !is_late);
            state = self.changed.wait(|| self.lock(), state, &mut wait, limit);
        }
    }
}

impl GroupState {
    /// Hands matched calls to the ranks that carry them out.
    fn begin(&mut self, runs: Vec<Run>) {
        for run in runs {
            match run {
                Run::Collectives => self.work = self.collectives.iter().copied().collect(),
                Run::Transfer { receive, .. } => self.matched[receive.rank].push_back(run),
            }
        }
    }

    /// The failure of this group, if any, as the error of `operation`.
    fn check(&self, operation: Operation) -> Result<()> {
        self.engine.failure().map_or(Ok(()), |failure| Err(failure.clone().seen_in(operation).into()))
    }
}

/// Marks a rank's work on the registered buffers as finished when dropped, and waits for the work of the other ranks, even if its own
/// work panicked: they may be reading its memory.
struct Finish<'a> {
    rendezvous: &'a Rendezvous,
    operation: Operation,
    rank: usize,
    generation: u64,
}

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        let mut state = self.rendezvous.lock();
        if std::thread::panicking() {
            let (operation, rank) = (self.operation, self.rank);
            state.engine.fail(CommError::PeerGone { operation, rank, departure: Departure::Panicked });
            state.panicked = Some(state.completed);
        }
        state.finished += 1;
        if state.finished == self.rendezvous.world_size {
            (state.work, state.finished) = (None, 0);
            state.completed += 1;
            let runs = state.engine.finish(Run::Collectives);
            state.begin(runs);
            self.rendezvous.notify();
        }
        // All ranks work on registered buffers, so this wait ends without a deadline.
        let mut wait = Wait::default();
        while state.completed == self.generation {
            state = self.rendezvous.wait_for_change(state, &mut wait);
        }
    }
}
