//! Runs cases on this rank, records failures, and sums them up over all ranks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gradsync::comm::{Collectives, Ranks, ReduceOp};
use gradsync_tests::array::Array;

pub(crate) use crate::transport::fresh;
use crate::transport::{self, Comm};

/// The deadline of ranks, unless a case has its own.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// The panics of all threads of this rank since the last case.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn panics() -> MutexGuard<'static, Vec<String>> {
    PANICS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The counts and the communicator of the cases so far.
pub(crate) struct Cases {
    comm: Comm,
    count: usize,
    failed: usize,
    start: Instant,
    stage: Instant,
}

impl Cases {
    pub(crate) fn start() -> gradsync::Result<Self> {
        let comm = transport::start()?;
        std::panic::set_hook(Box::new(|info| panics().push(info.to_string())));
        let now = Instant::now();
        Ok(Cases { comm, count: 0, failed: 0, start: now, stage: now })
    }

    pub(crate) fn rank(&self) -> usize {
        self.comm.rank()
    }

    pub(crate) fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// Runs a case on the communicator that all successful cases share.
    pub(crate) fn check(&mut self, what: &str, body: impl FnOnce(&Comm)) {
        let outcome = catch_unwind(AssertUnwindSafe(|| body(&self.comm)));
        self.count(what, outcome.is_err());
    }

    /// Runs a case that breaks its communicator, on a communicator of its own.
    pub(crate) fn check_fresh(&mut self, what: &str, body: impl FnOnce(Comm)) {
        let outcome = catch_unwind(AssertUnwindSafe(|| body(fresh())));
        self.count(what, outcome.is_err());
    }

    fn count(&mut self, what: &str, is_failed: bool) {
        self.count += 1;
        let messages = std::mem::take(&mut *panics()).join("\n");
        if is_failed {
            self.failed += 1;
            println!("FAILED on rank {} of {}: {what}: {messages}", self.rank(), self.world_size());
        }
    }

    /// Prints the duration of a group of cases.
    pub(crate) fn done(&mut self, stage: &str) {
        if self.rank() == 0 {
            println!("  {stage}: {:.2} s", self.stage.elapsed().as_secs_f64());
        }
        self.stage = Instant::now();
    }

    /// Sums up the failures over `comm`, which no case has used.
    pub(crate) fn finish(self, comm: &Comm) -> ExitCode {
        let world_size = self.world_size();
        let mut failed = vec![self.failed as f64];
        let summed = comm.all_reduce(&mut failed, ReduceOp::Sum);
        if let Err(error) = &summed {
            println!("FAILED on rank {}: the summary: {error}", comm.rank());
        }
        let is_good = summed.is_ok() && failed[0] == 0.0 && self.failed == 0;
        if comm.rank() == 0 {
            let (count, seconds) = (self.count, self.start.elapsed().as_secs_f64());
            println!("{world_size} ranks, {count} cases each, {} failures, {seconds:.1} s", failed[0]);
        }
        if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Panics unless all ranks have the same bits.
pub(crate) fn assert_agreed(comm: &Comm, what: &str, array: &Array) {
    let own: Vec<f64> = array.patterns().into_iter().map(f64::from_bits).collect();
    let mut all = vec![0.0f64; own.len() * comm.world_size()];
    comm.all_gather(&own, &mut all).expect("gathering the results");
    for (rank, other) in all.chunks_exact(own.len().max(1)).enumerate() {
        let same = other.iter().zip(&own).all(|(left, right)| left.to_bits() == right.to_bits());
        assert!(same, "{what}: rank {rank} has other bits than rank {}", comm.rank());
    }
}
