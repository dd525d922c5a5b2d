//! [`Recorder`]: the last calls of one rank in one group.
//!
//! If no folder for traces is set, transports have no recorder, and calls have no extra cost.

use std::collections::VecDeque;
use std::error::Error;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::process::{self, Process};
use super::{CallState, GroupTrace, TracedCall};
use crate::call::{Call, Operation, scope};
use crate::error::{CommError, Departure};

/// How many calls are remembered.
const REMEMBERED: usize = 32;
/// The most times that a group's failure is written, because a program may continue to call a communicator that has failed.
const WRITES: usize = 2;

/// The kind of ranks of a group that was not split off from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankKind {
    /// Threads of one process.
    Threads,
    /// Processes: the rank is the rank of this process.
    Processes,
}

#[derive(Clone, Copy, Debug)]
struct RecordedCall {
    /// The number of the call among all calls of the group.
    number: u64,
    sequence: u64,
    call: Call,
    tensors: Option<usize>,
    /// Set for a call that [`Recorder::post`] has recorded.
    announced: Option<Announced>,
    state: CallState,
    posted: Instant,
    changed: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Announced {
    /// The number of collectives among the calls of [`Recorder::post`].
    sequence: u64,
    /// The call is matched once this many announced calls are matched; 0 if the other ranks do not compare it.
    announced: u64,
}

/// The first failure of a rank in a group.
#[derive(Clone, Debug)]
struct RankFailure {
    text: String,
    /// The ranks of the group that are its cause, as far as is known.
    blamed: Vec<usize>,
    departure: Option<Departure>,
}

impl RankFailure {
    fn of(error: &(dyn Error + 'static)) -> Self {
        let of_crate = error.downcast_ref().and_then(|error: &crate::Error| match error {
            crate::Error::Comm(error) => Some(error),
            _ => None,
        });
        let failure: Option<&CommError> = error.downcast_ref().or(of_crate);
        let departure = failure.and_then(|failure| match failure {
            CommError::PeerGone { departure, .. } => Some(*departure),
            _ => None,
        });
        RankFailure { text: error.to_string(), blamed: failure.map(CommError::blamed).unwrap_or_default(), departure }
    }
}

/// The time of a writing, by both clocks. Times of calls are measured by the monotonic clock, which is never set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    instant: Instant,
    /// Seconds since the Unix epoch.
    pub(super) seconds: f64,
}

impl Now {
    pub(super) fn new() -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        Now { instant: Instant::now(), seconds }
    }

    pub(super) fn seconds_of(&self, instant: Instant) -> f64 {
        self.seconds - self.instant.saturating_duration_since(instant).as_secs_f64()
    }
}

#[derive(Debug, Default)]
struct Log {
    entries: VecDeque<RecordedCall>,
    number: u64,
    sequence: u64,
    failure: Option<RankFailure>,
    /// How often a failure has been written.
    writes: usize,
    has_left: bool,
}

/// The last calls of one rank in one group.
#[derive(Debug)]
pub(crate) struct Recorder {
    /// The process that writes the calls; `None` if no folder is set.
    process: Option<&'static Process>,
    kind: RankKind,
    group: String,
    rank: usize,
    members: Vec<usize>,
    log: Mutex<Log>,
    /// How many collectives [`post`](Self::post) has recorded; changed under the lock.
    posted: AtomicU64,
    /// How many announced calls have been matched.
    matched: AtomicU64,
}

impl Recorder {
    /// Makes the recorder of a group of all ranks, whether or not its calls are written.
    pub(crate) fn always(kind: RankKind, transport: &'static str, rank: usize, world_size: usize) -> Arc<Self> {
        let process = process::start_tracing();
        let number = process.map_or(0, |process| process.count_group(transport, rank));
        Self::register(process, kind, format!("{transport} {number}"), rank, (0..world_size).collect())
    }

    /// Like [`always`](Self::always), but only if calls are written.
    pub(crate) fn if_written(
        kind: RankKind,
        transport: &'static str,
        rank: usize,
        world_size: usize,
    ) -> Option<Arc<Self>> {
        process::start_tracing().map(|_| Self::always(kind, transport, rank, world_size))
    }

    /// Makes the recorders of all ranks of a group of threads, in order; empty unless calls are written.
    pub(crate) fn of_threads(transport: &'static str, world_size: usize) -> Vec<Arc<Self>> {
        (0..world_size).filter_map(|rank| Self::if_written(RankKind::Threads, transport, rank, world_size)).collect()
    }

    /// Makes the recorder of a group that was split off as number `split`, with these ranks of the old group in their new order.
    pub(crate) fn split(&self, split: u64, ranks: &[usize], rank: usize) -> Arc<Self> {
        let members = ranks.iter().map(|&rank| self.members[rank]).collect();
        Self::register(self.process, self.kind, format!("{}/{split}", self.group), rank, members)
    }

    fn register(
        process: Option<&'static Process>,
        kind: RankKind,
        group: String,
        rank: usize,
        members: Vec<usize>,
    ) -> Arc<Self> {
        let (log, posted, matched) = Default::default();
        let recorder = Arc::new(Recorder { process, kind, group, rank, members, log, posted, matched });
        process.into_iter().for_each(|process| process.add(recorder.clone()));
        recorder
    }

    /// The rank in the group of all ranks.
    pub(super) fn origin(&self) -> usize {
        self.members[self.rank]
    }

    pub(super) fn kind(&self) -> RankKind {
        self.kind
    }

    /// No user code runs under the lock, so a poisoned one still guards consistent state.
    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that this rank makes these calls. They count as failed unless [`Recorded::end`] is called.
    pub(crate) fn record<'r>(&'r self, calls: impl IntoIterator<Item = Call>) -> Recorded<'r> {
        Recorded { recorder: Some(self), numbers: self.begin(calls) }
    }

    /// Records that this rank makes these calls. Returns their numbers.
    pub(super) fn begin(&self, calls: impl IntoIterator<Item = Call>) -> Range<u64> {
        let mut log = self.lock();
        let first = log.number + 1;
        let now = Instant::now();
        calls.into_iter().for_each(|call| log.post(call, None, now));
        first..log.number + 1
    }

    /// Records a call of a rank that has announced `announced` calls to the others, this one included. Returns the number of collectives
    /// that were recorded by this method, and the number of the call.
    pub(crate) fn post(&self, call: Call, announced: u64) -> (u64, u64) {
        let mut log = self.lock();
        let is_collective = call.operation.peers() == (None, None);
        let sequence = self.posted.load(Ordering::Acquire) + u64::from(is_collective);
        self.posted.store(sequence, Ordering::Release);
        log.post(call, Some(Announced { sequence, announced }), Instant::now());
        (sequence, log.number)
    }

    /// The number of collectives that [`post`](Self::post) has recorded. Takes no lock.
    pub(crate) fn sequence(&self) -> u64 {
        self.posted.load(Ordering::Acquire)
    }

    /// Records that the first `announced` announced calls have been matched.
    pub(crate) fn matched(&self, announced: u64) {
        self.matched.fetch_max(announced, Ordering::Relaxed);
    }

    /// Marks the announced calls up to this number as finished.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn finish_announced(&self, number: u64) {
        let mut log = self.lock();
        let now = Instant::now();
        let until = log.entries.iter_mut().take_while(|entry| entry.number <= number);
        until.filter(|entry| entry.announced.is_some() && !entry.state.is_over()).for_each(|entry| {
            (entry.state, entry.changed) = (CallState::Finished, now);
        });
    }

    /// Marks the oldest unfinished transfer of this operation as finished.
    pub(crate) fn finish_transfer(&self, operation: Operation) {
        let mut log = self.lock();
        let is_it = |entry: &&mut RecordedCall| entry.call.operation == operation && !entry.state.is_over();
        if let Some(entry) = log.entries.iter_mut().find(is_it) {
            (entry.state, entry.changed) = (CallState::Finished, Instant::now());
        }
    }

    pub(super) fn set(&self, numbers: &Range<u64>, state: CallState) {
        let mut log = self.lock();
        let now = Instant::now();
        let those = log.entries.iter_mut().rev().take_while(|entry| entry.number >= numbers.start);
        those.filter(|entry| numbers.contains(&entry.number) && !entry.state.is_over()).for_each(|entry| {
            (entry.state, entry.changed) = (state, now);
        });
    }

    /// Keeps the first failure and writes the trace: at the failure, and once more when the call in progress at that time has ended.
    pub(crate) fn failed(&self, error: &(dyn Error + 'static)) {
        let mut log = self.lock();
        let text = log.failure.get_or_insert_with(|| RankFailure::of(error)).text.clone();
        log.writes += 1;
        let is_news = log.writes <= WRITES;
        drop(log);
        if let Some(process) = self.process.filter(|_| is_news) {
            process.write(&text);
        }
    }

    /// Records that the rank has dropped its communicator.
    pub(crate) fn leave(&self) {
        self.lock().has_left = true;
    }

    pub(super) fn has_left(&self) -> bool {
        self.lock().has_left
    }

    /// The last calls that [`post`](Self::post) has recorded, with their numbers, oldest first.
    pub(crate) fn posted(&self) -> Vec<(u64, Call)> {
        self.lock().entries.iter().filter_map(|entry| Some((entry.announced?.sequence, entry.call))).collect()
    }

    pub(super) fn trace(&self, now: Now) -> GroupTrace {
        let log = self.lock();
        let matched = self.matched.load(Ordering::Relaxed);
        let failure = log.failure.as_ref();
        let blamed = failure.map_or(&[][..], |failure| &failure.blamed);
        GroupTrace {
            group: self.group.clone(),
            rank: self.rank,
            members: self.members.clone(),
            in_process: self.kind == RankKind::Threads,
            failure: failure.map(|failure| failure.text.clone()),
            blamed: blamed.iter().filter_map(|&rank| self.members.get(rank).copied()).collect(),
            departure: failure.and_then(|failure| failure.departure),
            has_left: log.has_left,
            calls: log.entries.iter().map(|entry| entry.trace(matched, now)).collect(),
        }
    }
}

impl Log {
    fn post(&mut self, call: Call, announced: Option<Announced>, now: Instant) {
        if self.entries.len() == REMEMBERED {
            self.entries.pop_front();
        }
        self.number += 1;
        self.sequence += u64::from(call.operation.peers() == (None, None));
        let (number, sequence, tensors) = (self.number, self.sequence, scope::tensors());
        let state = CallState::Posted;
        self.entries.push_back(RecordedCall {
            number,
            sequence,
            call,
            tensors,
            announced,
            state,
            posted: now,
            changed: now,
        });
    }
}

impl RecordedCall {
    fn trace(&self, matched: u64, now: Now) -> TracedCall {
        let Call { within, operation, len, dtype } = self.call;
        let is_matched = self.announced.is_some_and(|call| 0 < call.announced && call.announced <= matched);
        let (to, from) = operation.peers();
        TracedCall {
            sequence: self.sequence,
            state: if self.state == CallState::Posted && is_matched { CallState::Matched } else { self.state },
            posted: now.seconds_of(self.posted),
            changed: now.seconds_of(self.changed),
            operation: operation.to_string(),
            to,
            from,
            len,
            bytes: dtype.map_or(0, |dtype| len.saturating_mul(dtype.size_bytes()) as u64),
            dtype: dtype.map(|dtype| dtype.to_string()),
            within: within.filter(|within| *within != operation).map(|within| within.to_string()),
            tensors: self.tensors,
        }
    }
}

/// Calls that a rank is in. If this is dropped before [`end`](Self::end), for example in a panic, the calls have failed.
#[must_use = "the calls fail when this is dropped"]
#[derive(Debug)]
pub(crate) struct Recorded<'r> {
    recorder: Option<&'r Recorder>,
    numbers: Range<u64>,
}

impl Recorded<'_> {
    /// The calls of a transport that records nothing.
    pub(crate) const NOWHERE: Self = Recorded { recorder: None, numbers: 0..0 };

    /// Records that all participating ranks have made the calls.
    pub(crate) fn matched(&self) {
        self.recorder.into_iter().for_each(|recorder| recorder.set(&self.numbers, CallState::Matched));
    }

    /// Records the outcome of the calls. A failure is written to the trace.
    pub(crate) fn end<T, E: Error + 'static>(mut self, outcome: &Result<T, E>) {
        let Some(recorder) = self.recorder.take() else { return };
        match outcome {
            Ok(_) => recorder.set(&self.numbers, CallState::Finished),
            Err(error) => {
                recorder.set(&self.numbers, CallState::Failed);
                recorder.failed(error);
            }
        }
    }
}

impl Drop for Recorded<'_> {
    fn drop(&mut self) {
        if let Some(recorder) = self.recorder {
            recorder.set(&self.numbers, CallState::Failed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    fn states(recorder: &Recorder) -> Vec<(u64, CallState)> {
        recorder.trace(Now::new()).calls.iter().map(|call| (call.sequence, call.state)).collect()
    }

    #[test]
    fn recorder_keeps_the_last_calls_with_states_and_numbers() {
        let recorder = Recorder::register(None, RankKind::Threads, "test 0".into(), 1, vec![4, 7]);
        let barrier = || Call::without_data(Operation::Barrier);
        let first = recorder.record([barrier()]);
        first.matched();
        assert_eq!(states(&recorder), [(1, CallState::Matched)]);
        first.end(&Ok::<(), CommError>(()));
        let transfer = Call::new(Operation::Send { peer: 0 }, 5, DType::F64);
        let second = recorder.record([transfer, transfer, barrier()]);
        recorder.finish_transfer(Operation::Send { peer: 0 });
        let (operation, departure) = (Operation::Barrier, Departure::Panicked);
        let error = CommError::PeerGone { operation, rank: 0, departure };
        second.end(&Err::<(), _>(crate::Error::Comm(error.clone())));
        let expected =
            [(1, CallState::Finished), (1, CallState::Finished), (1, CallState::Failed), (2, CallState::Failed)];
        assert_eq!(states(&recorder), expected);
        let trace = recorder.trace(Now::new());
        assert_eq!((trace.failure, trace.rank, recorder.origin()), (Some(error.to_string()), 1, 7));
        assert_eq!((trace.blamed, trace.departure), (vec![4], Some(departure)));
        let sent = &trace.calls[1];
        assert_eq!((sent.to, sent.from, sent.bytes, sent.dtype.as_deref()), (Some(0), None, 40, Some("f64")));
        for _ in 0..2 * REMEMBERED {
            recorder.record([barrier()]).end(&Ok::<(), CommError>(()));
        }
        assert_eq!(recorder.trace(Now::new()).calls.len(), REMEMBERED);
        assert_eq!(states(&recorder).last(), Some(&(2 + 2 * REMEMBERED as u64, CallState::Finished)));
    }

    #[test]
    fn finish_announced_takes_calls_by_number() {
        let recorder = Recorder::register(None, RankKind::Threads, "test 0".into(), 0, vec![0]);
        let reduce = || Call::new(Operation::AllGather, 3, DType::F32);
        let numbers = [1, 2, 3].map(|announced| recorder.post(reduce(), announced));
        assert_eq!(numbers, [(1, 1), (2, 2), (3, 3)]);
        recorder.matched(2);
        recorder.finish_announced(1);
        assert_eq!(states(&recorder), [(1, CallState::Finished), (2, CallState::Matched), (3, CallState::Posted)]);
    }
}
