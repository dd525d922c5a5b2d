//! Where the ranks of a local group meet: who waits in which call, what has failed, and when buffers may be touched.
//!
//! A collective has two phases. First every rank posts its call and its buffers and waits; the last to arrive starts the second
//! phase if all calls agree. Then every rank works on the posted buffers, and none returns before all have finished: that is
//! what makes it sound to read another rank's memory. A failure can only end the first phase, after which nobody touches
//! anything. A transfer between two ranks follows the same rule: the receiver copies while the sender waits.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Call, CommError, Departure, Operation, Result};
use crate::slice::{Slice, SliceMut};

/// A rank's buffer, as the other ranks see it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    pub(super) start: *mut u8,
    pub(super) bytes: usize,
}

// SAFETY: a plain address; it is followed only while its owner waits inside the call that posted it.
unsafe impl Send for Memory {}

impl Memory {
    pub(super) const NONE: Memory = Memory { start: std::ptr::null_mut(), bytes: 0 };

    /// Memory that is only read.
    pub(super) fn of(data: Slice<'_>) -> Self {
        let bytes = data.as_bytes();
        Memory { start: bytes.as_ptr().cast_mut(), bytes: bytes.len() }
    }

    /// Memory that is read and written.
    pub(super) fn of_mut(data: SliceMut<'_>) -> Self {
        let bytes = data.as_bytes_mut();
        Memory { start: bytes.as_mut_ptr(), bytes: bytes.len() }
    }

    /// Shard `index` of `bytes` bytes.
    pub(super) fn shard(self, index: usize, bytes: usize) -> Self {
        assert!((index + 1) * bytes <= self.bytes, "shard {index} of {bytes} bytes lies beyond {} bytes", self.bytes);
        Memory { start: self.start.wrapping_add(index * bytes), bytes }
    }
}

/// What a rank brings to a collective.
#[derive(Clone, Copy, Debug)]
pub(super) struct Post {
    pub(super) call: Call,
    pub(super) input: Memory,
    pub(super) output: Memory,
}

/// What a rank waits for, outside collectives.
#[derive(Clone, Copy, Debug)]
struct Exchange {
    /// The transfer that it offers, until the receiver has taken it.
    outgoing: Option<(usize, Call, Memory)>,
    /// Whether the receiver is copying it.
    is_taken: bool,
    /// The rank that it waits for data from, with its own call.
    incoming: Option<(usize, Call)>,
}

#[derive(Debug)]
enum Waiting {
    Collective(Post),
    Exchange(Exchange),
}

#[derive(Debug)]
struct State {
    /// What each rank is waiting in, if it is in a call.
    waiting: Vec<Option<Waiting>>,
    departed: Vec<Option<Departure>>,
    /// The first failure; it ends every wait and refuses every later call.
    failure: Option<CommError>,
    /// Set while all ranks work on the posted buffers.
    is_working: bool,
    /// Ranks that have finished that work.
    finished: usize,
    /// Number of collectives completed.
    completed: u64,
    /// The collective in which a rank's work panicked, so that its results are not to be used.
    spoiled: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Rendezvous {
    deadline: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

impl Rendezvous {
    pub(super) fn new(world_size: usize, deadline: Duration) -> Self {
        let state = State {
            waiting: (0..world_size).map(|_| None).collect(),
            departed: vec![None; world_size],
            failure: None,
            is_working: false,
            finished: 0,
            completed: 0,
            spoiled: None,
        };
        Rendezvous { deadline, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn world_size(&self) -> usize {
        self.lock().departed.len()
    }

    /// No user code runs under the lock, so a poisoned one still guards consistent state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a failure, unless there is one already, and wakes everybody.
    pub(super) fn fail(&self, failure: CommError) {
        self.lock().failure.get_or_insert(failure);
        self.changed.notify_all();
    }

    /// Takes note that a rank is gone. That is a failure only once somebody needs it.
    pub(super) fn depart(&self, rank: usize) {
        let departure = if std::thread::panicking() { Departure::Panicked } else { Departure::Left };
        self.lock().departed[rank] = Some(departure);
        self.changed.notify_all();
    }

    /// A collective: waits for all ranks, runs `work` on everybody's posts, and waits until all have.
    pub(super) fn meet(&self, rank: usize, post: Post, work: impl FnOnce(&[Post])) -> Result<()> {
        let operation = post.call.operation;
        let end = self.end();
        let mut state = self.lock();
        state.check(operation)?;
        state.waiting[rank] = Some(Waiting::Collective(post));
        state.find_mismatch(rank);
        let generation = state.completed;
        // A rank whose transfer is over may not have noticed yet; it is not here before it has.
        if state.failure.is_none() && state.waiting.iter().all(is_in_collective) {
            state.is_working = true;
        }
        self.changed.notify_all();

        let state = self.wait(state, rank, operation, end, |state| {
            if state.is_working {
                return Progress::Done;
            }
            let absent = |peer: &usize| !is_in_collective(&state.waiting[*peer]);
            Progress::Missing((0..state.waiting.len()).filter(absent).collect())
        })?;

        let posts: Vec<Post> = state.posts();
        drop(state);
        let finish = Finish { rendezvous: self, operation, rank, generation };
        work(&posts);
        drop(finish);

        let state = self.lock();
        // A failure after this collective, of ranks that were faster to go on, is no failure of this one.
        if state.spoiled == Some(generation) { state.check(operation) } else { Ok(()) }
    }

    /// A transfer to one rank, from one rank, or both at once.
    pub(super) fn exchange(
        &self,
        rank: usize,
        operation: Operation,
        outgoing: Option<(usize, Call, Memory)>,
        incoming: Option<(usize, Call, Memory)>,
    ) -> Result<()> {
        let end = self.end();
        let mut state = self.lock();
        state.check(operation)?;
        let awaited = incoming.map(|(peer, call, _)| (peer, call));
        state.waiting[rank] = Some(Waiting::Exchange(Exchange { outgoing, is_taken: false, incoming: awaited }));
        state.find_mismatch(rank);
        self.changed.notify_all();

        if let Some((from, call, destination)) = incoming {
            state = self.wait(state, rank, operation, end, |state| match state.exchange(from) {
                Some(Exchange { outgoing: Some((to, ..)), is_taken: false, .. }) if *to == rank => Progress::Done,
                _ => Progress::Missing(vec![from]),
            })?;
            let offer = state.exchange_mut(from);
            let (_, offered, source) = offer.outgoing.expect("just seen");
            if (offered.len, offered.dtype) != (call.len, call.dtype) {
                state.failure.get_or_insert(mismatch((from, offered), (rank, call)));
                self.changed.notify_all();
                return self.leave(state, rank, operation);
            }
            offer.is_taken = true;
            drop(state);
            // SAFETY: the sender waits until `outgoing` is taken away below, so its memory stays borrowed; ours is borrowed
            // by this call; two live borrows, one of them mutable, never overlap; the lengths were just compared.
            unsafe { std::ptr::copy_nonoverlapping(source.start, destination.start, destination.bytes) };
            state = self.lock();
            let offer = state.exchange_mut(from);
            (offer.outgoing, offer.is_taken) = (None, false);
            state.exchange_mut(rank).incoming = None;
            self.changed.notify_all();
        }
        if let Some((to, ..)) = outgoing {
            state = self.wait(state, rank, operation, end, |state| match state.exchange(rank) {
                Some(Exchange { outgoing: None, .. }) => Progress::Done,
                Some(Exchange { is_taken: true, .. }) => Progress::Underway,
                _ => Progress::Missing(vec![to]),
            })?;
        }
        state.waiting[rank] = None;
        Ok(())
    }

    /// When a call that starts now is over at the latest; `None` if the clock does not reach that far.
    fn end(&self) -> Option<Instant> {
        Instant::now().checked_add(self.deadline)
    }

    /// Waits until `progress` says that it is done, or until something fails; then this rank no longer waits in anything.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        rank: usize,
        operation: Operation,
        end: Option<Instant>,
        progress: impl Fn(&State) -> Progress,
    ) -> Result<MutexGuard<'a, State>> {
        loop {
            let missing = match progress(&state) {
                Progress::Done => return Ok(state),
                // The peer is copying from our memory: whatever has failed, we must stay until it is through.
                Progress::Underway => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                Progress::Missing(missing) => missing,
            };
            if state.failure.is_none() {
                let gone = missing.iter().find_map(|&peer| Some((peer, state.departed[peer]?)));
                let left = end.map(|end| end.saturating_duration_since(Instant::now()));
                if let Some((rank, departure)) = gone {
                    state.failure = Some(CommError::PeerGone { operation, rank, departure });
                } else if left == Some(Duration::ZERO) {
                    state.failure = Some(CommError::Timeout { operation, missing, deadline: self.deadline });
                } else {
                    state = match left {
                        Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
                        None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                    };
                    continue;
                }
                self.changed.notify_all();
            }
            self.leave(state, rank, operation)?;
            unreachable!("leaving a call returns the failure");
        }
    }

    /// Ends this rank's part in a call that has failed.
    fn leave(&self, mut state: MutexGuard<'_, State>, rank: usize, operation: Operation) -> Result<()> {
        // A receiver that is copying out of our memory got it before the failure; let it finish.
        while matches!(state.exchange(rank), Some(Exchange { is_taken: true, .. })) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting[rank] = None;
        state.check(operation)
    }
}

fn is_in_collective(waiting: &Option<Waiting>) -> bool {
    matches!(waiting, Some(Waiting::Collective(_)))
}

/// How far a wait has come.
enum Progress {
    Done,
    /// Another rank is using this rank's memory.
    Underway,
    /// These ranks have not come.
    Missing(Vec<usize>),
}

impl State {
    /// The failure of this group, if any, as the error of `operation`.
    fn check(&self, operation: Operation) -> Result<()> {
        self.failure.clone().map_or(Ok(()), |failure| Err(failure.seen_in(operation).into()))
    }

    fn posts(&self) -> Vec<Post> {
        let post = |waiting: &Option<Waiting>| match waiting {
            Some(Waiting::Collective(post)) => *post,
            other => unreachable!("work began while a rank was in {other:?}"),
        };
        self.waiting.iter().map(post).collect()
    }

    fn exchange(&self, rank: usize) -> Option<&Exchange> {
        match &self.waiting[rank] {
            Some(Waiting::Exchange(exchange)) => Some(exchange),
            _ => None,
        }
    }

    fn exchange_mut(&mut self, rank: usize) -> &mut Exchange {
        match &mut self.waiting[rank] {
            Some(Waiting::Exchange(exchange)) => exchange,
            other => unreachable!("rank {rank} is in {other:?}, not in a transfer"),
        }
    }

    /// Compares the call that `rank` has just posted with those that others wait in, and records the first that cannot go
    /// together with it: a different collective, a transfer that needs a rank which is in a collective, or two ranks that both
    /// send to, or both receive from, each other.
    fn find_mismatch(&mut self, rank: usize) {
        let own = self.waiting[rank].as_ref().expect("just posted");
        let clash = (0..self.waiting.len()).find_map(|peer| {
            let other = self.waiting[peer].as_ref().filter(|_| peer != rank)?;
            let (own_call, other_call) = clash((rank, own), (peer, other))?;
            Some(mismatch((rank, own_call), (peer, other_call)))
        });
        if let Some(clash) = clash {
            self.failure.get_or_insert(clash);
        }
    }
}

/// The calls of two ranks, if they can never both complete.
fn clash((left_rank, left): (usize, &Waiting), (right_rank, right): (usize, &Waiting)) -> Option<(Call, Call)> {
    match (left, right) {
        (Waiting::Collective(left), Waiting::Collective(right)) => {
            (left.call != right.call).then_some((left.call, right.call))
        }
        (Waiting::Collective(left), Waiting::Exchange(right)) => right.needs(left_rank).map(|call| (left.call, call)),
        (Waiting::Exchange(left), Waiting::Collective(right)) => left.needs(right_rank).map(|call| (call, right.call)),
        (Waiting::Exchange(left), Waiting::Exchange(right)) => {
            let left_call = left.needs(right_rank)?;
            let right_call = right.needs(left_rank)?;
            let both_send = left.incoming.is_none() && right.incoming.is_none();
            let both_receive = left.outgoing.is_none() && right.outgoing.is_none();
            (both_send || both_receive).then_some((left_call, right_call))
        }
    }
}

impl Exchange {
    /// The call by which this rank waits for `peer`, if it does.
    fn needs(&self, peer: usize) -> Option<Call> {
        let outgoing = self.outgoing.filter(|(to, ..)| *to == peer && !self.is_taken).map(|(_, call, _)| call);
        outgoing.or(self.incoming.filter(|(from, _)| *from == peer).map(|(_, call)| call))
    }
}

fn mismatch(one: (usize, Call), other: (usize, Call)) -> CommError {
    let ((left_rank, left), (right_rank, right)) = if one.0 < other.0 { (one, other) } else { (other, one) };
    CommError::Mismatch { left_rank, left, right_rank, right }
}

/// Takes note that a rank's work on the posted buffers is over, and waits for the others', even if it panicked: they may be
/// reading its memory.
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
        if state.finished == state.waiting.len() {
            state.waiting.fill_with(|| None);
            (state.is_working, state.finished) = (false, 0);
            state.completed += 1;
            self.rendezvous.changed.notify_all();
        }
        // Everybody works on buffers that are all there, so this ends without a deadline.
        while state.completed == self.generation {
            state = self.rendezvous.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
