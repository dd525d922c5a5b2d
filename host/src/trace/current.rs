//! [`CurrentCall`]: the record of a communicator that is in one call at a time.

use std::cell::RefCell;
use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use super::CallState;
use super::recorder::{Kind, Recorder};
use crate::call::{Call, Operation};

/// The call that a rank is in, and its last ones; nothing where no folder for traces is named.
#[derive(Debug, Default)]
pub(crate) struct CurrentCall {
    recorder: Option<Arc<Recorder>>,
    /// The numbers of the calls that have begun together last.
    numbers: RefCell<Range<u64>>,
}

impl CurrentCall {
    /// Of a group of all ranks, which are processes.
    pub(crate) fn of_processes(transport: &'static str, rank: usize, world_size: usize) -> Self {
        Self::over(Recorder::if_written(Kind::Processes, transport, rank, world_size))
    }

    /// Of a group that was split off as number `split`, of these ranks of the old group in their new order.
    pub(crate) fn split(&self, split: u64, ranks: &[usize], rank: usize) -> Self {
        Self::over(self.recorder.as_ref().map(|recorder| recorder.split(split, ranks, rank)))
    }

    fn over(recorder: Option<Arc<Recorder>>) -> Self {
        CurrentCall { recorder, numbers: RefCell::default() }
    }

    /// This rank makes these calls together. Earlier ones are over.
    pub(crate) fn begin(&self, calls: impl IntoIterator<Item = Call>) {
        let Some(recorder) = &self.recorder else { return };
        self.finish();
        self.numbers.replace(recorder.begin(calls));
    }

    /// All ranks that take part have made them.
    pub(crate) fn matched(&self) {
        self.set(CallState::Matched);
    }

    /// This rank's part in them is done.
    pub(crate) fn finish(&self) {
        self.set(CallState::Finished);
    }

    /// Of transfers that have begun together, the oldest one of this operation is done.
    pub(crate) fn finish_transfer(&self, operation: Operation) {
        self.recorder.iter().for_each(|recorder| recorder.finish_transfer(operation));
    }

    /// They have failed, and the communicator has with them. A failure is written.
    pub(crate) fn failed(&self, error: &dyn Display) {
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
