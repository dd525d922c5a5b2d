//! The rendezvous of a local group: it holds the pending call of each rank and the first failure, and determines when buffers may be
//! accessed.
//!
//! A collective has two phases. First every rank registers its call and its buffers and waits; the last rank to arrive starts the second
//! phase if all calls match. Then every rank works on the registered buffers, and no rank returns before all have finished, so reading
//! another rank's memory is sound. A failure can only end the first phase, and then no rank accesses any buffer. Each transfer follows
//! the same rule: the receiver copies while the sender waits, and even if a failure occurs meanwhile, the sender stays until the copy is
//! done.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::pending::{CollectiveCall, PendingCalls, Transfer};
use super::signal::{Signal, Wait};
use crate::error::{Call, CommError, Departure, Error, Operation, Result};
use crate::trace::{Recorded, Recorder};

#[derive(Debug)]
pub(super) struct State {
    pending: PendingCalls,
    departed: Vec<Option<Departure>>,
    /// The first failure; it ends every wait and refuses every later call.
    failure: Option<CommError>,
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
    deadline: Duration,
    state: Mutex<State>,
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
        let state = State {
            pending: PendingCalls::new(world_size),
            departed: vec![None; world_size],
            failure: None,
            work: None,
            finished: 0,
            completed: 0,
            panicked: None,
            epochs: Epochs::default(),
            pending_groups: BTreeMap::new(),
        };
        Rendezvous { deadline, state: Mutex::new(state), changed: Signal::default(), recorders }
    }

    pub(super) fn world_size(&self) -> usize {
        self.lock().world_size()
    }

    /// No user code runs under the lock, so a poisoned one still guards consistent state.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all waiting ranks after a change of the state.
    pub(super) fn notify(&self) {
        self.changed.notify();
    }

    /// Waits until the state has changed; may return spuriously.
    pub(super) fn wait_for_change<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        wait: &mut Wait,
    ) -> MutexGuard<'a, State> {
        self.changed.wait(|| self.lock(), state, wait, None)
    }

    /// Records a failure, unless there is one already, and wakes all ranks.
    pub(super) fn fail(&self, failure: CommError) {
        self.lock().failure.get_or_insert(failure);
        self.notify();
    }

    /// Marks a rank as departed, which is a failure only once a call needs the rank.
    pub(super) fn depart(&self, rank: usize) {
        let departure = if std::thread::panicking() { Departure::Panicked } else { Departure::Left };
        self.lock().departed[rank] = Some(departure);
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
        let outcome = state.pending.collective(rank, collective);
        state.note(outcome);
        let generation = state.completed;
        // A rank whose transfers are finished may not have returned from its exchange yet; it arrives only afterwards.
        if state.failure.is_none() {
            state.work = state.pending.all_collective();
        }
        self.notify();

        let (state, calls) = self.wait(state, rank, operation, end, |state| match &state.work {
            Some(calls) => Progress::Done(calls.clone()),
            None => Progress::Waiting,
        })?;
        drop(state);
        recorded.matched();
        let finish = Finish { rendezvous: self, operation, rank, generation };
        work(&calls);
        drop(finish);

        let state = self.lock();
        // A failure in a later call of ranks that were faster is not a failure of this collective.
        if state.panicked == Some(generation) { state.check(operation) } else { Ok(()) }
    }

    /// Runs transfers to and from other ranks, each of which proceeds as soon as both ranks are present.
    pub(super) fn exchange(
        &self,
        rank: usize,
        operation: Operation,
        outgoing: Vec<Transfer>,
        incoming: Vec<Transfer>,
    ) -> Result<()> {
        let recorded = self.record(rank, outgoing.iter().chain(&incoming).map(|transfer| transfer.call));
        let outcome = self.run_exchange(rank, operation, outgoing, incoming);
        recorded.end(&outcome);
        outcome
    }

    fn run_exchange(
        &self,
        rank: usize,
        operation: Operation,
        outgoing: Vec<Transfer>,
        incoming: Vec<Transfer>,
    ) -> Result<()> {
        let end = self.end();
        let mut state = self.lock();
        state.check(operation)?;
        let outcome = state.pending.exchange(rank, outgoing, incoming);
        state.note(outcome);
        self.notify();
        loop {
            let (guard, offer) =
                self.wait(state, rank, operation, end, |state| match state.pending.offer_for(rank) {
                    Some(peer) => Progress::Done(Some(peer)),
                    None if state.pending.is_over(rank) => Progress::Done(None),
                    None if state.pending.is_being_copied(rank) => Progress::InUse,
                    None => Progress::Waiting,
                })?;
            state = guard;
            let Some(peer) = offer else { break };
            let (source, destination) = match state.pending.take(rank, peer) {
                Ok(memory) => memory,
                Err(error) => {
                    state.failure.get_or_insert(error);
                    self.notify();
                    return Err(self.leave(state, rank, operation));
                }
            };
            drop(state);
            // SAFETY: the sender stays in its call until `finish` below, so its memory stays borrowed; ours is borrowed
            // by this call; two live borrows, one of them mutable, never overlap; `take` has compared their sizes.
            unsafe { std::ptr::copy_nonoverlapping(source.start, destination.start, destination.bytes) };
            state = self.lock();
            state.pending.finish(rank, peer);
            self.notify();
            for (owner, operation) in [(rank, Operation::Recv { peer }), (peer, Operation::Send { peer: rank })] {
                self.recorders.get(owner).into_iter().for_each(|recorder| recorder.finish_transfer(operation));
            }
        }
        state.pending.withdraw(rank);
        Ok(())
    }

    /// The deadline of a call that starts now; `None` if the clock cannot represent it.
    fn end(&self) -> Option<Instant> {
        Instant::now().checked_add(self.deadline)
    }

    /// Waits until `progress` returns `Done`, or until a failure occurs; in this case the rank's call is removed.
    fn wait<'a, T>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        rank: usize,
        operation: Operation,
        end: Option<Instant>,
        progress: impl Fn(&State) -> Progress<T>,
    ) -> Result<(MutexGuard<'a, State>, T)> {
        let mut wait = Wait::default();
        loop {
            match progress(&state) {
                Progress::Done(outcome) => return Ok((state, outcome)),
                Progress::InUse => {
                    state = self.wait_for_change(state, &mut wait);
                    continue;
                }
                Progress::Waiting => {}
            }
            if state.failure.is_none() {
                let left = end.map(|end| end.saturating_duration_since(Instant::now()));
                let is_late = left == Some(Duration::ZERO);
                let missing = state.missing(rank, is_late);
                let gone = missing.iter().find_map(|&peer| Some((peer, state.departed[peer]?)));
                if let Some((rank, departure)) = gone {
                    state.failure = Some(CommError::PeerGone { operation, rank, departure });
                } else if is_late && !missing.is_empty() {
                    state.failure = Some(CommError::Timeout { operation, missing, deadline: self.deadline });
                } else {
                    // The deadline has passed but no rank is missing: the remaining transfers are matched, and complete without a
                    // deadline.
                    let limit = left.filter(|_| !is_late);
                    state = self.changed.wait(|| self.lock(), state, &mut wait, limit);
                    continue;
                }
                self.notify();
            }
            return Err(self.leave(state, rank, operation));
        }
    }

    /// Ends this rank's part in a failed call, and returns the error.
    fn leave<'a>(&'a self, mut state: MutexGuard<'a, State>, rank: usize, operation: Operation) -> Error {
        // A receiver that is copying out of this rank's memory began before the failure, and has to finish.
        let mut wait = Wait::default();
        while state.pending.is_being_copied(rank) {
            state = self.wait_for_change(state, &mut wait);
        }
        state.pending.withdraw(rank);
        match state.check(operation) {
            Err(error) => error,
            Ok(()) => unreachable!("rank {rank} leaves a call that has not failed"),
        }
    }
}

impl State {
    pub(super) fn world_size(&self) -> usize {
        self.departed.len()
    }

    /// The failure of this group, if any, as the error of `operation`.
    fn check(&self, operation: Operation) -> Result<()> {
        self.failure.clone().map_or(Ok(()), |failure| Err(failure.seen_in(operation).into()))
    }

    /// Keeps the first failure.
    fn note(&mut self, outcome: Result<(), CommError>) {
        if let Err(failure) = outcome {
            self.failure.get_or_insert(failure);
        }
    }

    /// The missing ranks on which the call of `rank` depends. Before the deadline they matter only if a rank has departed, and are not
    /// looked up otherwise.
    fn missing(&self, rank: usize, is_late: bool) -> Vec<usize> {
        let is_needed = is_late || self.departed.iter().any(Option::is_some);
        if is_needed { self.pending.missing(rank) } else { Vec::new() }
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
            state.failure.get_or_insert(CommError::PeerGone { operation, rank, departure: Departure::Panicked });
            state.panicked = Some(state.completed);
        }
        state.finished += 1;
        if state.finished == state.world_size() {
            state.pending.withdraw_all();
            (state.work, state.finished) = (None, 0);
            state.completed += 1;
            self.rendezvous.notify();
        }
        // All ranks work on registered buffers, so this wait ends without a deadline.
        let mut wait = Wait::default();
        while state.completed == self.generation {
            state = self.rendezvous.wait_for_change(state, &mut wait);
        }
    }
}
