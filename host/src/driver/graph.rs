//! [`Graph`]: work that is recorded once and put into its queue as a whole, again and again, at the cost of one launch.
//!
//! It records what is put into a queue, and knows nothing of it. Memory that recorded work uses is the caller's to keep.

use std::ptr;

use super::{CudaError, Queue, check};
use crate::error::Result;
use crate::sys::cuda::{self, Status};

/// Recorded work of a queue (a CUDA graph).
#[derive(Debug)]
pub struct Graph {
    queue: Queue,
    executable: cuda::CUgraphExec,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Graph {}

impl Queue {
    /// Records what `work` puts into this queue, on this thread, instead of running it.
    ///
    /// Work can be recorded that launches kernels or collectives on memory that is there: reductions of gradient buffers by objects that
    /// have run once before, casts, sums. What allocates device memory, sends tables to the device or waits for the queue cannot, and
    /// fails. Ranks record the same collectives in the same order.
    ///
    /// # Errors
    /// What `work` fails with; [`Error::Cuda`](crate::Error::Cuda), code 900 and above for work that cannot be recorded, and for a queue on
    /// the legacy default stream.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.refuse_default_stream()?;
        self.make_current()?;
        let (stream, mode) = (self.raw_stream(), cuda::CU_STREAM_CAPTURE_MODE_RELAXED);
        // SAFETY: the handle is live. Relaxed: kernels are loaded when they are first needed, which other modes forbid.
        check("cuStreamBeginCapture", unsafe { cuda::cuStreamBeginCapture_v2(stream, mode) })?;
        let outcome = work();
        self.make_current()?;
        let mut graph = ptr::null_mut();
        // SAFETY: ends what was begun above; writes one handle, null if the recording is spoiled.
        let ended = check("cuStreamEndCapture", unsafe { cuda::cuStreamEndCapture(stream, &mut graph) });
        let mut executable = ptr::null_mut();
        let made = outcome.and(ended.map_err(Into::into)).and_then(|()| {
            // SAFETY: the graph is live; writes one handle.
            let status = unsafe { cuda::cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
            Ok(check("cuGraphInstantiateWithFlags", status)?)
        });
        if !graph.is_null() {
            // SAFETY: made above, destroyed once; what was instantiated of it lives on.
            if let Err(error) = check("cuGraphDestroy", unsafe { cuda::cuGraphDestroy(graph) }) {
                tracing::error!(%error, "a recording was not destroyed");
            }
        }
        made.map(|()| Graph { queue: self.clone(), executable })
    }

    /// Whether work is being recorded.
    pub(crate) fn is_capturing(&self) -> Result<bool, CudaError> {
        let mut status = cuda::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the handle is live; writes one status.
        check("cuStreamIsCapturing", unsafe { cuda::cuStreamIsCapturing(self.raw_stream(), &mut status) })?;
        Ok(status != cuda::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Refuses what would be wrong when it runs again: it uses memory that is somebody else's by then.
    pub(super) fn refuse_capture(&self, what: &str) -> Result<(), CudaError> {
        if !self.is_capturing()? {
            return Ok(());
        }
        Err(CudaError {
            call: what.into(),
            code: Status::STREAM_CAPTURE_UNSUPPORTED.0,
            text: "not while work of this queue is being recorded; run it once before".into(),
        })
    }
}

impl Graph {
    /// Puts the recorded work into its queue, all of it at once. Each launch runs behind the one before.
    ///
    /// Where the work meets that of other ranks, launch it by
    /// [`DeviceCommunicator::run_kernels`](crate::comm::DeviceCommunicator::run_kernels) with the operation
    /// [`Graph`](crate::comm::Operation::Graph), so that it is watched over as collectives are.
    ///
    /// # Errors
    /// [`CudaError`] of the driver.
    pub fn launch(&self) -> Result<(), CudaError> {
        self.queue.make_current()?;
        // SAFETY: both handles are live.
        check("cuGraphLaunch", unsafe { cuda::cuGraphLaunch(self.executable, self.queue.raw_stream()) })
    }

    /// The queue that it was recorded from.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let destroyed = self.queue.make_current().and_then(|()| {
            // SAFETY: made in `capture`, destroyed once; the driver keeps it for launches that are under way.
            check("cuGraphExecDestroy", unsafe { cuda::cuGraphExecDestroy(self.executable) })
        });
        if let Err(error) = destroyed {
            tracing::error!(%error, "a graph was not destroyed");
        }
    }
}
