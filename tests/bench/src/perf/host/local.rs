//! Ranks as threads of this process.
//!
//! The baseline is the bandwidth of the memory that all ranks share: a copy by all cores of as many bytes as the operation must move.

use gradsync::comm::Ranks;

use super::collectives::{self, HostBaseline, HostBaselines};
use super::vectors::{Copy, slots};
use crate::perf::PerfError;
use crate::perf::arguments::Counts;
use crate::perf::operation::{Operation, Row};
use crate::perf::output::Output;
use crate::perf::plan::Section;
use crate::perf::record::BaselineName;

/// Measures sections on `ranks` threads.
pub(crate) fn run(ranks: usize, sections: &[Section], output: &Output) -> Result<(), PerfError> {
    let outcomes = gradsync::internal::run_each(ranks, |comm| {
        collectives::run(&comm, sections, output, &Memory { is_first: comm.rank() == 0 })
    })?;
    first_failure(outcomes)
}

/// The failure that caused the other failures, if any.
pub(crate) fn first_failure(outcomes: Vec<std::thread::Result<Result<(), PerfError>>>) -> Result<(), PerfError> {
    let mut failures = Vec::new();
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(error)) => failures.push(error),
            Err(_) => failures.push(PerfError::Panicked { rank }),
        }
    }
    // A rank whose peer has left reports a communication error; the peer's own error is the cause.
    let is_cause = |error: &PerfError| !matches!(error, PerfError::Gradsync(gradsync::Error::Comm(_)));
    let cause = failures.iter().position(is_cause).unwrap_or(0);
    if failures.is_empty() { Ok(()) } else { Err(failures.swap_remove(cause)) }
}

/// The memory baseline, which rank 0 measures.
pub(crate) struct Memory {
    pub(crate) is_first: bool,
}

impl HostBaselines for Memory {
    fn name(&self, _: Operation) -> BaselineName {
        Copy::NAME
    }

    fn make(&self, row: &Row, counts: Counts) -> Result<Option<Box<dyn HostBaseline + '_>>, PerfError> {
        // Rank 0 copies with all threads; the other ranks have no work in the baseline and never are the slowest.
        let copy = self.is_first.then(|| Copy::new(row.traffic(), slots(counts.working_set, row.bytes())));
        Ok(Some(Box::new(copy.transpose()?)))
    }
}

impl HostBaseline for Option<Copy> {
    fn call(&mut self, round: usize) -> Result<(), PerfError> {
        if let Some(copy) = self {
            copy.call(round);
        }
        Ok(())
    }
}
