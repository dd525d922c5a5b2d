//! The cases that every transport runs, written once: collectives, transfers, mismatches, failures and their texts, groups, shared windows and
//! Adasum.
//!
//! A test program of a transport of host memory implements [`Transport`], makes a [`Suite`] on each rank, and calls the functions `run` of
//! the modules here. Every rank runs the same cases in the same order. [`collectives`] and [`data_movement`] run over communicators of any memory,
//! which a program describes by [`Operands`](operands::Operands).
//!
//! A case fails by a panic. The name of the case and the rank are printed, and the rank runs no further case, because it may be out of step
//! with the others.

pub mod adasum;
pub mod checks;
pub mod collectives;
pub mod data_movement;
pub mod error_texts;
pub mod exchange;
pub mod failures;
pub mod groups;
pub mod mismatches;
pub mod mistakes;
pub mod operands;
pub mod operations;
pub mod owned_tensors;
pub mod point_to_point;
#[cfg(unix)]
pub mod processes;
pub mod tensors;
pub mod windows;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gradsync::comm::local::{LocalCommunicator, group_with_deadline};
use gradsync::comm::{CommError, Communicator, Ranks, Split};
use gradsync::{Error, Result};

use crate::ranks::on_ranks;

/// The deadline of ranks, unless a case has its own.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// One rank of a transport of host memory.
pub trait Transport {
    /// The transport's communicator.
    type Comm: Communicator + Split + Send;

    /// Whether ranks hear at once that a rank has dropped its communicator. That a rank has panicked they always do.
    const TELLS_OF_LEAVING: bool = true;

    /// Makes a communicator of all ranks on which no call has been made, with this rank's deadline. All ranks have to call it.
    fn fresh(&self, deadline: Duration) -> Self::Comm;
}

/// Runs cases, each of which fails by a panic.
pub trait Report {
    /// Runs a case.
    fn case(&mut self, name: &str, body: impl FnOnce());
}

/// The cases of one rank so far.
pub struct Progress {
    rank: usize,
    world_size: usize,
    count: usize,
    start: Instant,
    stage: Instant,
}

impl Report for Progress {
    fn case(&mut self, name: &str, body: impl FnOnce()) {
        self.count += 1;
        self.run(name, body);
    }
}

impl Progress {
    fn run(&self, name: &str, body: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(body)) {
            println!("FAILED on rank {} of {}: {name}", self.rank, self.world_size);
            resume_unwind(panic);
        }
    }
}

/// A rank, its communicator, and the cases that it has run.
pub struct Suite<T: Transport> {
    /// Makes further communicators of all ranks.
    pub transport: T,
    /// The communicator of all cases that leave their communicator usable.
    pub comm: T::Comm,
    /// The cases so far.
    pub report: Progress,
}

impl<T: Transport> Suite<T> {
    /// No case has run.
    pub fn new(transport: T) -> Self {
        let (comm, now) = (transport.fresh(DEADLINE), Instant::now());
        let report = Progress { rank: comm.rank(), world_size: comm.world_size(), count: 0, start: now, stage: now };
        Self { transport, comm, report }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// Runs a case that leaves its communicator usable.
    pub fn check(&mut self, name: &str, body: impl FnOnce(&T::Comm)) {
        self.report.case(name, || body(&self.comm));
    }

    /// Runs a case that makes communicators by itself.
    pub fn check_with(&mut self, name: &str, body: impl FnOnce(&Self)) {
        self.report.count += 1;
        self.report.run(name, || body(self));
    }

    /// Runs a case that breaks its communicator, on a communicator of its own.
    pub fn check_fresh(&mut self, name: &str, body: impl FnOnce(T::Comm)) {
        self.check_within(DEADLINE, name, body);
    }

    /// Like [`check_fresh`](Self::check_fresh), with another deadline of this rank.
    pub fn check_within(&mut self, deadline: Duration, name: &str, body: impl FnOnce(T::Comm)) {
        self.report.case(name, || body(self.transport.fresh(deadline)));
    }

    /// Prints the time since the last call, on rank 0.
    pub fn done(&mut self, stage: &str) {
        if self.rank() == 0 {
            println!("  {stage}: {:.2} s", self.report.stage.elapsed().as_secs_f64());
        }
        self.report.stage = Instant::now();
    }

    /// Waits for the end of the cases of all ranks, and prints their number on rank 0.
    pub fn finish(self) {
        self.comm.barrier().expect("all ranks have run all cases");
        if self.rank() == 0 {
            let Progress { world_size, count, start, .. } = self.report;
            println!("{world_size} ranks, {count} cases each, {:.1} s", start.elapsed().as_secs_f64());
        }
    }
}

/// A rank's communicator, until the rank takes it, and one on which its ranks meet first.
type Taken = Option<[LocalCommunicator; 2]>;

/// Ranks that are threads of one process.
pub struct Threads {
    rank: usize,
    world_size: usize,
    /// The communicators of each group that some rank has made.
    groups: Arc<Mutex<HashMap<u64, Vec<Taken>>>>,
    /// The number of groups that this rank has made.
    made: AtomicU64,
}

impl Transport for Threads {
    type Comm = LocalCommunicator;

    /// The deadline is that of the first rank that makes the group.
    fn fresh(&self, deadline: Duration) -> LocalCommunicator {
        let number = self.made.fetch_add(1, Ordering::SeqCst);
        let group = |deadline| group_with_deadline(self.world_size, deadline).expect("a group of threads").into_iter();
        let own = {
            let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
            let made = groups.entry(number).or_insert_with(|| {
                group(DEADLINE).zip(group(deadline)).map(|(first, comm)| Some([first, comm])).collect()
            });
            made[self.rank].take()
        };
        let [first, comm] = own.expect("each rank takes its own");
        first.barrier().expect("all ranks make it");
        comm
    }
}

/// Runs cases on threads, for each number of ranks.
pub fn on_threads(world_sizes: &[usize], run: fn(&mut Suite<Threads>)) {
    for &world_size in world_sizes {
        let groups = Arc::new(Mutex::new(HashMap::new()));
        on_ranks(world_size, |comm| {
            let (rank, groups) = (comm.rank(), Arc::clone(&groups));
            let transport = Threads { rank, world_size, groups, made: AtomicU64::new(0) };
            let mut suite = Suite::new(transport);
            run(&mut suite);
            suite.finish();
        });
    }
}

/// A call of one rank.
type Call = fn(&dyn Communicator) -> Result<()>;

/// Asserts that two ranks' calls differ, and that the error quotes all of these words.
#[track_caller]
fn assert_mismatch(outcome: Result<()>, words: &[&str]) {
    let error = outcome.expect_err("the calls differ");
    assert!(matches!(error, Error::Comm(CommError::Mismatch { .. })), "{error:?}");
    assert_names(&error, words);
}

/// Asserts that an error's text has all of these words.
#[track_caller]
fn assert_names(error: &Error, words: &[&str]) {
    let text = error.to_string();
    words.iter().for_each(|word| assert!(text.contains(word), "\"{text}\" does not name {word}"));
}

/// The next and the last rank in a ring.
fn neighbours(comm: &dyn Communicator) -> (usize, usize) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    ((rank + 1) % world_size, (rank + world_size - 1) % world_size)
}
