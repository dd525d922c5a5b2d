//! [`OptimizerMemory`]: the differences of optimizers' steps in host memory and on GPUs, which are the reports that a host reads without
//! waiting.

use std::collections::VecDeque;
use std::fmt::Debug;

use gradsync_device::math::step::{STEP_STATE_LEN, StepState};

#[cfg(feature = "cuda")]
use crate::driver::{Pinned, Queue};
use crate::error::Result;
use crate::kernels::KernelMemory;
#[cfg(feature = "cuda")]
use crate::memory::Cuda;
use crate::memory::Host;

/// The memory of an optimizer: [`Host`], or `Cuda` with the feature `cuda`.
pub trait OptimizerMemory: KernelMemory {
    /// The states of finished steps that the host has not read.
    #[doc(hidden)]
    type Reports: Debug;

    /// Whether a step is over when its call returns.
    #[doc(hidden)]
    const REPORTS_AT_ONCE: bool;

    #[doc(hidden)]
    fn reports(near: Self::Slice<'_>) -> Result<Self::Reports>;

    /// Takes the state behind a step, in the order of the queue; nothing within a recorded graph.
    #[doc(hidden)]
    fn take_report(reports: &mut Self::Reports, state: Self::Slice<'_>) -> Result<()>;

    /// The next state whose step is over. Does not wait.
    #[doc(hidden)]
    fn next_report(reports: &mut Self::Reports) -> Result<Option<StepState>>;
}

/// The state of a step from the numbers of its memory, which begin with it.
pub(super) fn state_of(numbers: &[f64]) -> StepState {
    StepState::from_numbers(numbers[..STEP_STATE_LEN].try_into().expect("as many"))
}

impl OptimizerMemory for Host {
    type Reports = VecDeque<StepState>;
    const REPORTS_AT_ONCE: bool = true;

    fn reports(_: Self::Slice<'_>) -> Result<Self::Reports> {
        Ok(VecDeque::new())
    }

    fn take_report(reports: &mut Self::Reports, state: Self::Slice<'_>) -> Result<()> {
        reports.push_back(state_of(state.typed().expect("numbers of f64")));
        Ok(())
    }

    fn next_report(reports: &mut Self::Reports) -> Result<Option<StepState>> {
        Ok(reports.pop_front())
    }
}

/// Copies of the states of steps in pinned memory.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub struct DeviceReports {
    queue: Queue,
    copies: Pinned,
    /// The blocks in use, oldest first.
    pending: VecDeque<usize>,
    next: usize,
}

#[cfg(feature = "cuda")]
impl DeviceReports {
    /// The steps by which a host can be ahead of its device.
    const AHEAD: usize = 8;
}

#[cfg(feature = "cuda")]
impl OptimizerMemory for Cuda {
    type Reports = DeviceReports;
    const REPORTS_AT_ONCE: bool = false;

    fn reports(near: Self::Slice<'_>) -> Result<DeviceReports> {
        let queue = near.queue().clone();
        let copies = Pinned::new(&queue, DeviceReports::AHEAD, STEP_STATE_LEN * size_of::<f64>())?;
        Ok(DeviceReports { queue, copies, pending: VecDeque::new(), next: 0 })
    }

    fn take_report(reports: &mut DeviceReports, state: Self::Slice<'_>) -> Result<()> {
        let queue = state.queue();
        let _held = queue.hold();
        if queue.capture_id()?.is_some() {
            return Ok(());
        }
        if reports.pending.len() == DeviceReports::AHEAD {
            // The host is so many steps ahead, and does not wait: the counts in a later report include this step.
            return Ok(());
        }
        let block = reports.next;
        reports.next = (block + 1) % DeviceReports::AHEAD;
        // SAFETY: the pinned memory waits for its copies before it is freed, and the queue of the state frees the state's memory in order; a
        // block is used again only when its copy is over.
        unsafe { reports.copies.fetch(queue, block, 0, state.address(), STEP_STATE_LEN * size_of::<f64>()) }?;
        reports.copies.mark(queue, block)?;
        reports.pending.push_back(block);
        Ok(())
    }

    fn next_report(reports: &mut DeviceReports) -> Result<Option<StepState>> {
        let Some(&block) = reports.pending.front() else { return Ok(None) };
        // A recording allows no question about events.
        if reports.queue.capture_id()?.is_some() || !reports.copies.is_done(block)? {
            return Ok(None);
        }
        reports.pending.pop_front();
        // SAFETY: the block has as many numbers, aligned as pages are; its copy is over.
        let numbers = unsafe { std::slice::from_raw_parts(reports.copies.block(block).cast::<f64>(), STEP_STATE_LEN) };
        Ok(Some(state_of(numbers)))
    }
}
