//! Where the ranks of a local group meet: who waits in which call, what has failed, and when buffers may be touched.
//!
//! A collective has two phases. First every rank posts its call and its buffers and waits; the last to arrive starts
//! the second phase if all calls agree. Then every rank works on the posted buffers, and none returns before all have
//! finished: that is what makes it sound to read another rank's memory. A failure can only end the first phase, after
//! which nobody touches anything. Transfers follow the same rule, each on its own: the receiver copies while the
//! sender waits, and whatever fails meanwhile, the sender stays until the copy is done.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::loan::Loans;
use super::posts::{Post, Posts, Transfer};
use super::signal::{Signal, Wait};
use crate::error::{CommError, Departure, Error, Operation, Result};

#[derive(Debug)]
pub(super) struct State {
    posts: Posts,
    departed: Vec<Option<Departure>>,
    /// The first failure; it ends every wait and refuses every later call.
    failure: Option<CommError>,
    /// What all ranks have brought, while they work on it.
    work: Option<Vec<Post>>,
    /// Ranks that have finished that work.
    finished: usize,
    /// Number of collectives completed.
    completed: u64,
    /// The collective in which a rank's work panicked, so that its results are not to be used.
    spoiled: Option<u64>,
    pub(super) loans: Loans,
    /// Groups within this one, by colour, and how many of their ranks have still to enter.
    nursery: BTreeMap<u64, (Arc<Rendezvous>, usize)>,
}

#[derive(Debug)]
pub(super) struct Rendezvous {
    deadline: Duration,
    state: Mutex<State>,
    changed: Signal,
}

/// How far a wait has come.
enum Progress<T> {
    Done(T),
    /// Another rank is using this rank's memory: whatever has failed, it must stay until that is over.
    InUse,
    /// Not far enough.
    Waiting,
}

impl Rendezvous {
    pub(super) fn new(world_size: usize, deadline: Duration) -> Self {
        let state = State {
            posts: Posts::new(world_size),
            departed: vec![None; world_size],
            failure: None,
            work: None,
            finished: 0,
            completed: 0,
            spoiled: None,
            loans: Loans::default(),
            nursery: BTreeMap::new(),
        };
        Rendezvous { deadline, state: Mutex::new(state), changed: Signal::default() }
    }

    pub(super) fn world_size(&self) -> usize {
        self.lock().world_size()
    }

    /// No user code runs under the lock, so a poisoned one still guards consistent state.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells everybody that the state has changed.
    pub(super) fn notify(&self) {
        self.changed.notify();
    }

    /// Waits until the state has changed, or for no reason.
    pub(super) fn wait_for_change<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        wait: &mut Wait,
    ) -> MutexGuard<'a, State> {
        self.changed.wait(|| self.lock(), state, wait, None)
    }

    /// Records a failure, unless there is one already, and wakes everybody.
    pub(super) fn fail(&self, failure: CommError) {
        self.lock().failure.get_or_insert(failure);
        self.notify();
    }

    /// Takes note that a rank is gone. That is a failure only once somebody needs it.
    pub(super) fn depart(&self, rank: usize) {
        let departure = if std::thread::panicking() { Departure::Panicked } else { Departure::Left };
        self.lock().departed[rank] = Some(departure);
        self.notify();
    }

    /// Where the ranks of one colour meet, `world_size` of them, after a collective in which all have said theirs. Each
    /// comes here once before its next collective, so that colours of two splits never mix.
    pub(super) fn enter(&self, color: u64, world_size: usize) -> Arc<Rendezvous> {
        let mut state = self.lock();
        let new = || (Arc::new(Rendezvous::new(world_size, self.deadline)), world_size);
        let (child, outside) = state.nursery.entry(color).or_insert_with(new);
        *outside -= 1;
        let (child, is_complete) = (child.clone(), *outside == 0);
        if is_complete {
            state.nursery.remove(&color);
        }
        child
    }

    /// A collective: waits for all ranks, runs `work` on everybody's posts, and waits until all have.
    pub(super) fn meet(&self, rank: usize, post: Post, work: impl FnOnce(&[Post])) -> Result<()> {
        let operation = post.call.operation;
        let end = self.end();
        let mut state = self.lock();
        state.check(operation)?;
        let posted = state.posts.collective(rank, post);
        state.note(posted);
        let generation = state.completed;
        // A rank whose transfers are over may not have noticed yet; it is not here before it has.
        if state.failure.is_none() {
            state.work = state.posts.all_collective();
        }
        self.notify();

        let (state, posts) = self.wait(state, rank, operation, end, |state| match &state.work {
            Some(posts) => Progress::Done(posts.clone()),
            None => Progress::Waiting,
        })?;
        drop(state);
        let finish = Finish { rendezvous: self, operation, rank, generation };
        work(&posts);
        drop(finish);

        let state = self.lock();
        // A failure after this collective, of ranks that were faster to go on, is no failure of this one.
        if state.spoiled == Some(generation) { state.check(operation) } else { Ok(()) }
    }

    /// Transfers to and from other ranks, each of which goes on as soon as both sides are there.
    pub(super) fn exchange(
        &self,
        rank: usize,
        operation: Operation,
        outgoing: impl IntoIterator<Item = Transfer>,
        incoming: impl IntoIterator<Item = Transfer>,
    ) -> Result<()> {
        let end = self.end();
        let mut state = self.lock();
        state.check(operation)?;
        let posted = state.posts.exchange(rank, outgoing, incoming);
        state.note(posted);
        self.notify();
        loop {
            let (guard, offer) = self.wait(state, rank, operation, end, |state| match state.posts.offer_for(rank) {
                Some(peer) => Progress::Done(Some(peer)),
                None if state.posts.is_over(rank) => Progress::Done(None),
                None if state.posts.is_taken(rank) => Progress::InUse,
                None => Progress::Waiting,
            })?;
            state = guard;
            let Some(peer) = offer else { break };
            let (source, destination) = match state.posts.take(rank, peer) {
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
            state.posts.finish(rank, peer);
            self.notify();
        }
        state.posts.withdraw(rank);
        Ok(())
    }

    /// When a call that starts now is over at the latest; `None` if the clock does not reach that far.
    fn end(&self) -> Option<Instant> {
        Instant::now().checked_add(self.deadline)
    }

    /// Waits until `progress` says that it is done, or until something fails; then this rank is in no call any more.
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
                    // Late with nobody missing: what is left has met, and ends without a deadline.
                    let limit = left.filter(|_| !is_late);
                    state = self.changed.wait(|| self.lock(), state, &mut wait, limit);
                    continue;
                }
                self.notify();
            }
            return Err(self.leave(state, rank, operation));
        }
    }

    /// Ends this rank's part in a call that has failed, and returns why.
    fn leave<'a>(&'a self, mut state: MutexGuard<'a, State>, rank: usize, operation: Operation) -> Error {
        // A receiver that is copying out of our memory got it before the failure; let it finish.
        let mut wait = Wait::default();
        while state.posts.is_taken(rank) {
            state = self.wait_for_change(state, &mut wait);
        }
        state.posts.withdraw(rank);
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

    /// The ranks that have not come on which the call of `rank` depends, as far as anybody has to know: on time it
    /// matters only whether one of them is gone.
    fn missing(&self, rank: usize, is_late: bool) -> Vec<usize> {
        let is_needed = is_late || self.departed.iter().any(Option::is_some);
        if is_needed { self.posts.missing(rank) } else { Vec::new() }
    }
}

/// Takes note that a rank's work on the posted buffers is over, and waits for the others', even if it panicked: they
/// may be reading its memory.
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
            state.spoiled = Some(state.completed);
        }
        state.finished += 1;
        if state.finished == state.world_size() {
            state.posts.withdraw_all();
            (state.work, state.finished) = (None, 0);
            state.completed += 1;
            self.rendezvous.notify();
        }
        // Everybody works on buffers that are all there, so this ends without a deadline.
        let mut wait = Wait::default();
        while state.completed == self.generation {
            state = self.rendezvous.wait_for_change(state, &mut wait);
        }
    }
}
