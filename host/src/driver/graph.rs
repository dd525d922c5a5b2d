//! [`Graph`]: work that is recorded once and enqueued repeatedly as a whole, at the cost of one launch.
//!
//! It records all work of a queue. A [`Recording`] keeps the resources that the work uses.

use std::any::Any;
use std::ptr;
use std::sync::Arc;

use super::recording::{Active, Recording};
use super::{CudaError, Held, LaunchOrder, Queue, check};
use crate::error::Result;
use crate::sys::cuda::{self, Status};

/// Recorded work of a queue (a CUDA graph), and the resources that it uses.
///
/// Buffers, communicators and objects that the work was recorded with may be dropped before the graph: the graph keeps their memory, and
/// the communicators stay open, until it is dropped too. Memory is kept if it was allocated before the recording ended and dropped after
/// it, whether the work uses it or not.
///
/// Recorded kernels that wait for the kernels of other ranks ([`OrderedAllReduce`](crate::ops::OrderedAllReduce) and Adasum, where they use
/// peers) keep the share of the GPU that their communicator had when they were recorded. As long as the graph lives, making such an
/// operation of another communicator on the same GPU fails with code 720 if it would leave less to the graph. So make all operations first,
/// and record then.
#[must_use = "recorded work does not run before its graph is launched"]
#[derive(Debug)]
pub struct Graph {
    queue: Queue,
    executable: cuda::CUgraphExec,
    /// Dropped after the executable.
    recording: Arc<Recording>,
}

/// A stream whose work is being recorded. Dropping it always ends the recording.
struct Capture<'a> {
    queue: &'a Queue,
    recording: Active,
    graph: cuda::CUgraph,
    is_over: bool,
}

impl<'a> Capture<'a> {
    fn begin(queue: &'a Queue) -> Result<Self, CudaError> {
        if queue.is_held_here() {
            return Err(unsupported("a recording", "not inside a call that enqueues work into the queue"));
        }
        let recording = Recording::begin(queue);
        let changing = queue.change_recordings(&[]);
        queue.make_current()?;
        let (stream, mode) = (queue.raw_stream(), cuda::CU_STREAM_CAPTURE_MODE_RELAXED);
        // SAFETY: the handle is live. Relaxed: kernels are loaded when they are first needed, which other modes forbid.
        check("cuStreamBeginCapture", unsafe { cuda::cuStreamBeginCapture_v2(stream, mode) })?;
        let capture = Self { queue, recording, graph: ptr::null_mut(), is_over: false };
        let id = queue.capture_id();
        if let Ok(Some(id)) = id {
            capture.recording.set_capture(id);
        }
        // Ending the recording after an error waits for calls once more.
        drop(changing);
        id.map(|_| capture)
    }

    fn end(&mut self) -> Result<(), CudaError> {
        self.is_over = true;
        // The recording of its other queues ends too.
        let branches = self.recording.recording().branches();
        let _changing = self.queue.change_recordings(&branches);
        self.queue.make_current()?;
        // SAFETY: ends the capture begun above, once; writes one handle, null if the recording is invalid.
        check("cuStreamEndCapture", unsafe { cuda::cuStreamEndCapture(self.queue.raw_stream(), &mut self.graph) })
    }

    fn instantiate(&self) -> Result<cuda::CUgraphExec, CudaError> {
        let mut executable = ptr::null_mut();
        // SAFETY: the graph is live; writes one handle.
        let status = unsafe { cuda::cuGraphInstantiateWithFlags(&mut executable, self.graph, 0) };
        check("cuGraphInstantiateWithFlags", status).map(|()| executable)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        let ended = if self.is_over { Ok(()) } else { self.end() };
        let destroyed = ended.and_then(|()| {
            if self.graph.is_null() {
                return Ok(());
            }
            // SAFETY: created in `end`, destroyed once; graphs instantiated from it live on.
            check("cuGraphDestroy", unsafe { cuda::cuGraphDestroy(self.graph) })
        });
        if let Err(error) = destroyed {
            tracing::error!(%error, "a recording was not destroyed");
        }
    }
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Graph {}

impl Queue {
    /// Records the work that `work` enqueues into this queue, on this thread, instead of running it.
    ///
    /// Kernels and collectives on existing memory can be recorded: reductions of gradient buffers by objects that have run once before,
    /// casts, sums. Work that allocates device memory, sends tables to the device, copies to or from the host or waits for the queue fails.
    /// Ranks record the same collectives in the same order. The graph keeps the memory that the work uses ([`Graph`]), except memory that
    /// was passed to an unsafe function by its address: the caller's promise to that function includes the graph.
    ///
    /// Work of another queue is part of the recording from the time when that queue [waits](Self::wait_for) for an event of the recording.
    /// Before the recording ends, this queue has to wait for the last of that work. Each launch is then ordered with the other queue too.
    ///
    /// The error of `work`; [`Error::Cuda`](crate::Error::Cuda), with code 900 and above for work that cannot be recorded, and for a queue
    /// on the legacy default stream.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.refuse_default_stream()?;
        let mut capture = Capture::begin(self)?;
        work().and(capture.end().map_err(Into::into))?;
        Ok(Graph { queue: self.clone(), executable: capture.instantiate()?, recording: capture.recording.recording() })
    }

    /// Whether work of this queue is being recorded.
    pub(crate) fn is_capturing(&self) -> Result<bool, CudaError> {
        Ok(self.capture_id()?.is_some())
    }

    /// The driver's number of the recording under way in this queue, which is unique among the recordings of this process. Another library
    /// may have begun it.
    pub(crate) fn capture_id(&self) -> Result<Option<u64>, CudaError> {
        const CALL: &str = "cuStreamGetCaptureInfo";
        // Every context has a default stream with the same handle.
        self.make_current()?;
        let (mut status, mut id, graph) = (cuda::CU_STREAM_CAPTURE_STATUS_NONE, 0, ptr::null_mut());
        let (stream, nodes, count) = (self.raw_stream(), ptr::null_mut(), ptr::null_mut());
        // SAFETY: the handle is live; writes a status and a number. Null leaves the other results out.
        check(CALL, unsafe { cuda::cuStreamGetCaptureInfo_v2(stream, &mut status, &mut id, graph, nodes, count) })?;
        match status {
            cuda::CU_STREAM_CAPTURE_STATUS_NONE => Ok(None),
            cuda::CU_STREAM_CAPTURE_STATUS_ACTIVE => Ok(Some(id)),
            // The recording is invalid: it has no number, and never becomes a graph.
            _ => Err(CudaError::of(CALL.into(), Status::STREAM_CAPTURE_INVALIDATED)),
        }
    }

    /// Refuses work that would be wrong in a later launch, because its memory may belong to another owner by then.
    pub(super) fn refuse_capture(&self, call: &str) -> Result<(), CudaError> {
        if !self.is_capturing()? {
            return Ok(());
        }
        Err(unsupported(call, "not while work of this queue is being recorded; run it once before"))
    }
}

/// The error of a call that a recording does not allow.
fn unsupported(call: &str, text: &str) -> CudaError {
    CudaError { call: call.into(), code: Status::STREAM_CAPTURE_UNSUPPORTED.0, text: text.into() }
}

impl Graph {
    /// Enqueues the recorded work into its queue as one launch. Each launch runs behind the one before and, where the work has kernels that
    /// wait for other ranks, behind the other launches of such kernels of the same communicator.
    ///
    /// Other queues whose work is part of the recording ([`Queue::capture`]) are ordered with the launch as its own queue is: it runs
    /// behind the work that they have now, and their later work runs behind it.
    ///
    /// Where the work has collectives, or kernels that wait for other ranks, launch it by
    /// [`NcclCommunicator::launch`](crate::comm::nccl::NcclCommunicator::launch): ranks that do not launch it are then a timeout, as with
    /// a collective.
    ///
    /// # Errors
    /// [`CudaError`] of the driver; with code 900 while the work of its queue, or of another queue that the graph works in, is being
    /// recorded: CUDA does not record launches. Nothing is recorded then, and the recording goes on. With code 900 too where only
    /// [`NcclCommunicator::launch`](crate::comm::nccl::NcclCommunicator::launch) is safe, because it compares the recordings that ranks
    /// launch ([checks](crate::comm::nccl#checks)).
    pub fn launch(&self) -> Result<(), CudaError> {
        if self.recording.needs_comparison() {
            let text =
                "NCCL is safe only if all ranks launch the same recording, which NcclCommunicator::launch compares";
            return Err(unsupported("the launch of a graph", text));
        }
        self.enqueue()
    }

    /// Like [`launch`](Self::launch), for a launch that the ranks of all its communicators have compared if that is needed.
    pub(crate) fn enqueue(&self) -> Result<(), CudaError> {
        let branches = self.recording.branches();
        let queues = || branches.iter().chain([&self.queue]);
        let _held: Vec<Held<'_>> = queues().map(Queue::hold).collect();
        for queue in queues() {
            if queue.is_capturing()? {
                let text = "CUDA records no launches of graphs; record the work of the graph itself once more";
                return Err(unsupported("the launch of a graph", text));
            }
        }
        let mut end = None;
        if !branches.is_empty() {
            branches.iter().try_for_each(|branch| self.queue.wait_for_all_of(branch))?;
            end = Some(self.queue.event()?);
        }
        LaunchOrder::launch_graph(&self.recording.orders(), &self.queue, &mut || {
            self.queue.make_current()?;
            // SAFETY: both handles are live.
            check("cuGraphLaunch", unsafe { cuda::cuGraphLaunch(self.executable, self.queue.raw_stream()) })
        })?;
        let Some(end) = end else { return Ok(()) };
        end.record().and_then(|()| branches.iter().try_for_each(|branch| branch.wait_for(&end))).inspect_err(|_| {
            // The branches would reuse the graph's memory without waiting for this launch, so the graph keeps it for ever.
            std::mem::forget(self.recording.clone());
        })
    }

    /// The parts of this type in the recording ([`Queue::part_of_recording`]).
    pub(crate) fn parts<T: Any + Send + Sync>(&self) -> Vec<Arc<T>> {
        self.recording.parts()
    }

    /// The queue from which the work was recorded.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let destroyed = self.queue.make_current().and_then(|()| {
            // SAFETY: created in `capture`, destroyed once; the driver keeps it for launches that are under way.
            check("cuGraphExecDestroy", unsafe { cuda::cuGraphExecDestroy(self.executable) })
        });
        if let Err(error) = destroyed {
            tracing::error!(%error, "a graph was not destroyed");
        }
    }
}
