//! Makes the runs of a plan, several at a time, and records each as soon as it has finished; the plan grows as runs finish.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::images::Images;
use crate::results::{Record, Runs};
use crate::study::{Scale, Spec, Study};
use crate::train;

/// How, where and by which program runs are made.
pub(crate) struct Runner<'a> {
    pub(crate) scale: &'a Scale,
    pub(crate) images: &'a Images,
    /// The number of runs at a time.
    pub(crate) threads: usize,
    /// No run starts after this time.
    pub(crate) within: Duration,
    pub(crate) machine: String,
    pub(crate) commit: String,
}

/// The interval of lines about progress.
const INTERVAL: Duration = Duration::from_secs(10);

struct State {
    runs: Runs,
    waiting: Vec<Spec>,
    failed: Option<anyhow::Error>,
    reported: Instant,
}

impl Runner<'_> {
    /// Makes all runs that are missing, or as many as the time allows, in rounds: the next round's runs depend on the last one's results.
    pub(crate) fn run(&self, runs: Runs) -> Result<Runs> {
        let begun = Instant::now();
        let state = Mutex::new(State { runs, waiting: Vec::new(), failed: None, reported: begun });
        loop {
            let mut guard = lock(&state);
            let mut missing = Study { scale: self.scale, runs: &guard.runs }.plan();
            missing.retain(|spec| guard.runs.get(spec).is_none());
            if missing.is_empty() || guard.failed.is_some() || begun.elapsed() >= self.within {
                break;
            }
            missing.reverse();
            guard.waiting = missing;
            drop(guard);
            std::thread::scope(|scope| {
                for _ in 0..self.threads {
                    scope.spawn(|| self.work(&state, begun));
                }
            });
        }
        let State { runs, failed, .. } = state.into_inner().unwrap_or_else(PoisonError::into_inner);
        failed.map_or(Ok(runs), Err)
    }

    /// Makes waiting runs, one after the other.
    fn work(&self, state: &Mutex<State>, begun: Instant) {
        loop {
            let mut guard = lock(state);
            if guard.failed.is_some() || begun.elapsed() >= self.within {
                return;
            }
            let Some(spec) = guard.waiting.pop() else { return };
            drop(guard);
            let outcome = train::run(&spec, self.images);
            let mut guard = lock(state);
            let kept = outcome.and_then(|outcome| {
                let (machine, commit) = (self.machine.clone(), self.commit.clone());
                guard.runs.add(Record { spec, outcome, machine, commit })
            });
            if let Err(error) = kept.with_context(|| format!("{spec:?}")) {
                guard.failed.get_or_insert(error);
            }
            if guard.reported.elapsed() >= INTERVAL {
                guard.reported = Instant::now();
                let (waiting, seconds) = (guard.waiting.len(), begun.elapsed().as_secs());
                eprintln!("{seconds:4} s: {} runs, {waiting} waiting in this round", guard.runs.records.len());
            }
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
