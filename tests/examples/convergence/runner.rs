//! Makes the runs of a plan in its order, several at a time, and records each as soon as it has finished; the plan grows as runs finish.

use std::panic::catch_unwind;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

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

struct RunnerState {
    runs: Runs,
    /// The runs that are being made.
    running: Vec<Spec>,
    failed: Option<anyhow::Error>,
    reported: Instant,
}

impl Runner<'_> {
    /// Makes all runs that are missing, or as many as the time allows.
    pub(crate) fn run(&self, runs: Runs) -> Result<Runs> {
        let begun = Instant::now();
        let state = Mutex::new(RunnerState { runs, running: Vec::new(), failed: None, reported: begun });
        let finished = Condvar::new();
        std::thread::scope(|scope| {
            for _ in 0..self.threads {
                scope.spawn(|| self.work(&state, &finished, begun));
            }
        });
        let RunnerState { runs, failed, .. } = state.into_inner().unwrap_or_else(PoisonError::into_inner);
        failed.map_or(Ok(runs), Err)
    }

    /// Makes one run after the other, until none is left to start.
    fn work(&self, state: &Mutex<RunnerState>, finished: &Condvar, begun: Instant) {
        let mut guard = lock(state);
        while guard.failed.is_none() && begun.elapsed() < self.within {
            let RunnerState { runs, running, .. } = &mut *guard;
            let plan = Study { scale: self.scale, runs }.plan();
            let next = plan.into_iter().find(|spec| runs.get(spec).is_none() && !running.contains(spec));
            let Some(spec) = next else {
                if running.is_empty() {
                    return;
                }
                // More runs may be determined by the ones that are being made.
                guard = finished.wait(guard).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            running.push(spec);
            drop(guard);
            // After a panic that is not caught, other threads would wait forever.
            let outcome = catch_unwind(|| train::run(&spec, self.images));
            guard = lock(state);
            guard.running.retain(|other| *other != spec);
            let kept = outcome.unwrap_or_else(|_| Err(anyhow!("the training panicked"))).and_then(|outcome| {
                let (machine, commit) = (self.machine.clone(), self.commit.clone());
                guard.runs.add(Record { spec, outcome, machine, commit })
            });
            if let Err(error) = kept.with_context(|| format!("{spec:?}")) {
                guard.failed.get_or_insert(error);
            }
            finished.notify_all();
            if guard.reported.elapsed() >= INTERVAL {
                guard.reported = Instant::now();
                eprintln!("{:4} s: {} runs", begun.elapsed().as_secs(), guard.runs.records.len());
            }
        }
    }
}

fn lock(state: &Mutex<RunnerState>) -> MutexGuard<'_, RunnerState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
