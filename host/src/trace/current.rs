//! [`CurrentCall`]: the trace of a communicator that is in one call at a time.

use std::cell::RefCell;
use std::error::Error;
use std::ops::Range;
use std::sync::Arc;

use super::CallState;
use super::recorder::{RankKind, Recorder};
use crate::call::{Call, Operation};

/// The call that a rank is in, and its last calls; empty if no folder for traces is set.
#[derive(Debug, Default)]
pub(crate) struct CurrentCall {
    recorder: Option<Arc<Recorder>>,
    /// The numbers of the calls that were begun last, together.
    numbers: RefCell<Range<u64>>,
}

impl CurrentCall {
    /// Makes the trace of a group of all ranks, which are processes.
    pub(crate) fn of_processes(transport: &'static str, rank: usize, world_size: usize) -> Self {
        Self::over(Recorder::if_written(RankKind::Processes, transport, rank, world_size))
    }

    /// Makes the trace of a group that was split off as number `split`, with these ranks of the old group in their new order.
    pub(crate) fn split(&self, split: u64, ranks: &[usize], rank: usize) -> Self {
        Self::over(self.recorder.as_ref().map(|recorder| recorder.split(split, ranks, rank)))
    }

    fn over(recorder: Option<Arc<Recorder>>) -> Self {
        CurrentCall { recorder, numbers: RefCell::default() }
    }

    /// Records that this rank begins these calls together. Earlier calls are finished.
    pub(crate) fn begin(&self, calls: impl IntoIterator<Item = Call>) {
        let Some(recorder) = &self.recorder else { return };
        self.finish();
        self.numbers.replace(recorder.begin(calls));
    }

    /// Records that all participating ranks have made the current calls.
    pub(crate) fn matched(&self) {
        self.set(CallState::Matched);
    }

    /// Records that this rank's part in the current calls is done.
    pub(crate) fn finish(&self) {
        self.set(CallState::Finished);
    }

    /// Records that the oldest current transfer of this operation is done.
    pub(crate) fn finish_transfer(&self, operation: Operation) {
        self.recorder.iter().for_each(|recorder| recorder.finish_transfer(operation));
    }

    /// Records that the current calls have failed, and the communicator with them. The trace is written.
    pub(crate) fn failed(&self, error: &(dyn Error + 'static)) {
        self.set(CallState::Failed);
        self.recorder.iter().for_each(|recorder| recorder.failed(error));
    }

    fn set(&self, state: CallState) {
        self.recorder.iter().for_each(|recorder| recorder.set(&self.numbers.borrow(), state));
    }
}

impl Drop for CurrentCall {
    fn drop(&mut self) {
        self.recorder.iter().for_each(|recorder| recorder.leave());
    }
}
