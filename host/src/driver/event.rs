//! [`Event`]: a point in a queue, to wait for, to order another queue behind, or to measure time by.

use std::ptr;

use super::{CudaError, Queue, check, recording};
use crate::sys::cuda::{self, Status};
use crate::trace::waiting_for_device;

/// A CUDA event without its queue. The context must be current in every call, and when it is dropped.
#[derive(Debug)]
pub(super) struct Mark(cuda::CUevent);

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Mark {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for Mark {}

/// Whether an event records the time. An event without a time costs the queue less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timing {
    Kept,
    Left,
}

impl Mark {
    pub(super) fn new(timing: Timing) -> Result<Self, CudaError> {
        let flags = match timing {
            Timing::Kept => cuda::CU_EVENT_DEFAULT,
            Timing::Left => cuda::CU_EVENT_DISABLE_TIMING,
        };
        let mut event = ptr::null_mut();
        // SAFETY: writes one handle; the context is current.
        check("cuEventCreate", unsafe { cuda::cuEventCreate(&mut event, flags) })?;
        Ok(Self(event))
    }

    pub(super) fn record(&self, stream: cuda::CUstream) -> Result<(), CudaError> {
        // SAFETY: both handles are live and belong to one context.
        check("cuEventRecord", unsafe { cuda::cuEventRecord(self.0, stream) })
    }

    pub(super) fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the handle is live.
        match unsafe { cuda::cuEventQuery(self.0) } {
            Status::NOT_READY => Ok(false),
            status => check("cuEventQuery", status).map(|()| true),
        }
    }

    pub(super) fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the handle is live.
        check("cuEventSynchronize", unsafe { cuda::cuEventSynchronize(self.0) })
    }

    /// Makes later work of the stream wait for this event.
    pub(super) fn make_stream_wait(&self, stream: cuda::CUstream) -> Result<(), CudaError> {
        // SAFETY: both handles are live.
        check("cuStreamWaitEvent", unsafe { cuda::cuStreamWaitEvent(stream, self.0, 0) })
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once; the driver keeps it while work still refers to it.
        if let Err(error) = check("cuEventDestroy", unsafe { cuda::cuEventDestroy_v2(self.0) }) {
            tracing::error!(%error, "an event was not destroyed");
        }
    }
}

/// A point in a queue of work.
#[derive(Debug)]
pub struct Event {
    mark: Option<Mark>,
    queue: Queue,
}

impl Event {
    pub(super) fn new(queue: &Queue, timing: Timing) -> Result<Self, CudaError> {
        queue.make_current()?;
        Ok(Self { mark: Some(Mark::new(timing)?), queue: queue.clone() })
    }

    pub(super) fn mark(&self) -> &Mark {
        self.mark.as_ref().expect("taken in `drop` alone")
    }

    /// Whether the event belongs to `queue`.
    pub(crate) fn is_of(&self, queue: &Queue) -> bool {
        self.queue.is_same(queue)
    }

    /// Whether the event may be part of a recording under way.
    pub(super) fn may_be_recorded(&self) -> bool {
        // A recording that has become invalid is one too.
        recording::exist() && self.queue.is_capturing().unwrap_or(true)
    }

    /// Drops the event without waiting for the device: a queue that has no other handle is [retired](Queue::retire).
    pub(crate) fn retire(self) {
        let queue = self.queue.clone();
        drop(self);
        queue.retire();
    }

    /// Moves the event to the end of its queue.
    ///
    /// # Errors
    /// [`CudaError`] of the driver.
    pub fn record(&self) -> Result<(), CudaError> {
        self.queue.make_current()?;
        self.mark().record(self.queue.raw_stream())
    }

    /// Whether the queue has passed the event. Does not wait.
    ///
    /// # Errors
    /// [`CudaError`] of work that failed while it ran.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.queue.make_current()?;
        self.mark().is_done()
    }

    /// Waits until the queue has passed the event.
    ///
    /// # Errors
    /// [`CudaError`] of work that failed while it ran.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.queue.make_current()?;
        let _waiting = waiting_for_device(self.queue.ordinal());
        self.mark().wait()
    }

    /// Waits until the queue has passed both events, and returns the seconds between them, with a resolution of about half a microsecond.
    ///
    /// # Errors
    /// [`CudaError`], also of work that failed while it ran, or if an event records no time.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64, CudaError> {
        self.synchronize()?;
        let mut milliseconds = 0.0;
        // SAFETY: both handles are live.
        check("cuEventElapsedTime", unsafe {
            cuda::cuEventElapsedTime(&mut milliseconds, earlier.mark().0, self.mark().0)
        })?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        match self.queue.make_current() {
            Ok(()) => drop(self.mark.take()),
            Err(error) => tracing::error!(%error, "an event was not destroyed"),
        }
    }
}
