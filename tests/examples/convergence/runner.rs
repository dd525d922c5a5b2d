//! Makes the runs of a plan, several at a time, and records each as soon as it has finished; the plan may grow as runs finish.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::learner::Data;
use crate::plan::{Spec, Task};
use crate::results::{Journal, Record, Results, ResultsError};
use crate::train::{self, TrainError};

/// The error that ended the runs early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunnerError {
    #[error("{spec}")]
    Train { spec: String, source: TrainError },
    #[error(transparent)]
    Results(#[from] ResultsError),
}

/// The data of the tasks.
pub(crate) struct Tasks<'a> {
    pub(crate) images: Option<&'a dyn Data>,
    pub(crate) text: Option<&'a dyn Data>,
}

impl Tasks<'_> {
    /// The tasks that have data.
    pub(crate) fn known(&self) -> Vec<Task> {
        let images = self.images.map(|_| Task::Images);
        images.into_iter().chain(self.text.map(|_| Task::Text)).collect()
    }

    fn data(&self, task: Task) -> &dyn Data {
        let data = match task {
            Task::Images => self.images,
            Task::Text => self.text,
        };
        data.expect("plans have tasks with data only")
    }
}

/// The number of parallel runs, and the time limit.
pub(crate) struct Limits {
    pub(crate) threads: usize,
    /// No run starts after this time.
    pub(crate) within: Option<Duration>,
}

/// The origin of runs.
#[derive(Clone)]
pub(crate) struct Origin {
    pub(crate) machine: String,
    pub(crate) commit: String,
}

/// The interval of progress lines if standard error is not a terminal.
const SILENCE: Duration = Duration::from_secs(20);

struct State {
    results: Results,
    journal: Option<Journal>,
    in_flight: Vec<Spec>,
    failed: Option<RunnerError>,
    done: usize,
    /// The time of the last progress line, if no bar is drawn.
    silent: Instant,
}

/// Makes the runs that `plan` returns, in its order, until it returns no more; the plan may depend on finished runs. Returns all results.
pub(crate) fn run(
    tasks: &Tasks<'_>,
    (journal, results): (Option<Journal>, Results),
    limits: &Limits,
    origin: &Origin,
    plan: &(dyn Fn(&Results) -> Vec<Spec> + Sync),
) -> Result<Results, RunnerError> {
    let begun = Instant::now();
    let progress = ProgressBar::new(0).with_style(
        ProgressStyle::with_template("{bar:40} {pos}/{len} runs, {elapsed} so far, {eta} left for these  {msg}")
            .expect("the template is a constant"),
    );
    let state = Mutex::new(State { results, journal, in_flight: Vec::new(), failed: None, done: 0, silent: begun });
    let changed = Condvar::new();
    std::thread::scope(|scope| {
        for _ in 0..limits.threads {
            scope.spawn(|| {
                let mut guard = lock(&state);
                loop {
                    let planned = plan(&guard.results);
                    let late = limits.within.is_some_and(|within| begun.elapsed() >= within);
                    let waiting: Vec<&Spec> = planned.iter().filter(|spec| !guard.results.has(spec)).collect();
                    progress.set_length((guard.done + waiting.len()) as u64);
                    let next = waiting.into_iter().find(|spec| !guard.in_flight.contains(spec)).copied();
                    let spec = match next {
                        _ if guard.failed.is_some() || late => break,
                        Some(spec) => spec,
                        // Runs in flight may extend the plan.
                        None if !guard.in_flight.is_empty() => {
                            guard = changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
                            continue;
                        }
                        None => break,
                    };
                    guard.in_flight.push(spec);
                    drop(guard);
                    let outcome = train::run(&spec, tasks.data(spec.arm.task));
                    guard = lock(&state);
                    guard.in_flight.retain(|other| *other != spec);
                    if let Err(error) = keep(&mut guard, spec, outcome, origin) {
                        guard.failed.get_or_insert(error);
                    }
                    progress.set_message(describe(&spec));
                    progress.set_position(guard.done as u64);
                    if progress.is_hidden() && guard.silent.elapsed() >= SILENCE {
                        guard.silent = Instant::now();
                        let (done, known) = (guard.done, progress.length().unwrap_or_default());
                        eprintln!("{done} of {known} runs in {} s", begun.elapsed().as_secs());
                    }
                    changed.notify_all();
                }
                drop(guard);
                changed.notify_all();
            });
        }
    });
    progress.finish_and_clear();
    let State { results, failed, .. } = state.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.map_or(Ok(results), Err)
}

fn keep(
    state: &mut State,
    spec: Spec,
    outcome: Result<train::Outcome, TrainError>,
    origin: &Origin,
) -> Result<(), RunnerError> {
    let outcome = outcome.map_err(|source| RunnerError::Train { spec: describe(&spec), source })?;
    let Origin { machine, commit } = origin.clone();
    let record = Record { spec, outcome, machine, commit };
    if let Some(journal) = &mut state.journal {
        journal.append(&record)?;
    }
    state.results.records.push(record);
    state.done += 1;
    Ok(())
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn describe(spec: &Spec) -> String {
    let Spec { purpose, arm, rate, seed, .. } = spec;
    let text = format!(
        "{:?} {:?} {:?} {} ranks, rate {rate}, seed {seed}, {purpose:?}",
        arm.task, arm.method, arm.reduction, arm.ranks
    );
    text.to_lowercase()
}
