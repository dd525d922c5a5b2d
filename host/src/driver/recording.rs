//! [`Recording`]: the resources that a graph keeps for as long as it can be launched: the memory, the queues and everything else that its work uses.
//!
//! Recorded work names addresses, and safe code can drop the memory there. So memory that was allocated before a recording ended stays with
//! the recording when its owner drops it, whether the work uses it or not: the recording need not know the arguments of kernels. Memory
//! that was allocated later cannot be in it, and is not kept. All other resources of recorded work, such as a communicator or the memory of
//! peers, are handed over by the code that records it ([`Queue::keep_for_recording`]).
//!
//! The driver numbers recordings, so that work finds the recording that it becomes part of, whichever thread or queue has begun it.

use std::any::Any;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use super::{CudaError, LaunchOrder, Queue};
use crate::sys::cuda::Status;

/// The number of the next allocation of this process.
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// The number of recordings, readable without a lock: most programs have none.
static LIVE: AtomicUsize = AtomicUsize::new(0);
static RECORDINGS: Mutex<Vec<Weak<Recording>>> = Mutex::new(Vec::new());

/// No foreign code runs under these locks, so the state behind a poisoned lock is still consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether there are recordings, under way or as graphs.
pub(super) fn exist() -> bool {
    LIVE.load(Ordering::Acquire) > 0
}

/// Device memory that goes back to its queue when this is dropped.
#[derive(Debug)]
pub(super) struct RecordedBlock {
    queue: Queue,
    address: u64,
    bytes: usize,
}

impl Drop for RecordedBlock {
    fn drop(&mut self) {
        // Work in the queue may still use the memory; its next owner uses it only after that work.
        self.queue.free(self.address, self.bytes);
    }
}

/// An allocation. Its owner's drop frees it, unless a recording may use it.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    block: Option<RecordedBlock>,
    number: u64,
}

impl DeviceMemory {
    pub(super) fn new(queue: &Queue, bytes: usize) -> Result<Self, CudaError> {
        let block = RecordedBlock { queue: queue.clone(), address: queue.allocate(bytes)?, bytes };
        Ok(Self { block: Some(block), number: ALLOCATIONS.fetch_add(1, Ordering::AcqRel) })
    }

    fn block(&self) -> &RecordedBlock {
        self.block.as_ref().expect("taken in `drop` alone")
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.block().queue
    }

    pub(super) fn address(&self) -> u64 {
        self.block().address
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        if !exist() {
            return;
        }
        let users: Vec<_> = lock(&RECORDINGS).iter().filter_map(Weak::upgrade).collect();
        let block = Arc::new(block);
        for recording in users.iter().filter(|recording| self.number < recording.end.load(Ordering::Acquire)) {
            lock(&recording.kept).blocks.push(block.clone());
        }
    }
}

/// The resources of one graph.
#[derive(Debug)]
pub(super) struct Recording {
    queue: Queue,
    /// The driver's number of the recording, once it has begun.
    capture: OnceLock<u64>,
    /// The number of the first allocation after the recording ended.
    end: AtomicU64,
    kept: Mutex<RecordedResources>,
}

/// A resource that lives at least as long as a recording.
pub(crate) type Resource = Arc<dyn Any + Send + Sync>;

#[derive(Default)]
struct RecordedResources {
    blocks: Vec<Arc<RecordedBlock>>,
    /// Other queues that have taken part in the recording.
    branches: Vec<Queue>,
    /// The communicators whose kernels take part in it, in the order of their addresses.
    orders: Vec<Arc<LaunchOrder>>,
    resources: Vec<Resource>,
    /// For each part of a communicator, whether its ranks have to compare a launch before it runs.
    comparisons: Vec<Comparison>,
}

type Comparison = Arc<dyn Fn() -> bool + Send + Sync>;

impl std::fmt::Debug for RecordedResources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (blocks, branches, resources) = (self.blocks.len(), self.branches.len(), self.resources.len());
        write!(f, "{blocks} blocks of memory, {branches} queues and {resources} other resources")
    }
}

/// A recording under way, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct Active(Arc<Recording>);

impl Recording {
    /// Prepares to record work of a queue: memory that is dropped from now on is kept.
    pub(super) fn begin(queue: &Queue) -> Active {
        let (capture, end, kept) = (OnceLock::new(), AtomicU64::new(u64::MAX), Mutex::default());
        let recording = Arc::new(Self { queue: queue.clone(), capture, end, kept });
        LIVE.fetch_add(1, Ordering::AcqRel);
        lock(&RECORDINGS).push(Arc::downgrade(&recording));
        Active(recording)
    }

    /// Keeps a resource for as long as the graph can be launched.
    pub(super) fn keep(&self, resource: Resource) {
        lock(&self.kept).resources.push(resource);
    }

    /// The resources of this type.
    pub(super) fn parts<T: Any + Send + Sync>(&self) -> Vec<Arc<T>> {
        lock(&self.kept).resources.iter().filter_map(|resource| resource.clone().downcast().ok()).collect()
    }

    /// Whether ranks have to compare a launch before it runs.
    pub(super) fn needs_comparison(&self) -> bool {
        let comparisons = lock(&self.kept).comparisons.clone();
        comparisons.iter().any(|is_needed| is_needed())
    }

    /// Registers that another queue takes part in the recording.
    pub(super) fn join(&self, queue: &Queue) {
        let branches = &mut lock(&self.kept).branches;
        if !queue.is_same(&self.queue) && !branches.iter().any(|branch| branch.is_same(queue)) {
            branches.push(queue.clone());
        }
    }

    /// The other queues that have taken part in the recording.
    pub(super) fn branches(&self) -> Vec<Queue> {
        lock(&self.kept).branches.clone()
    }

    /// Registers that kernels of a communicator take part in the recording.
    pub(super) fn order(&self, order: &Arc<LaunchOrder>) {
        let orders = &mut lock(&self.kept).orders;
        if let Err(index) = orders.binary_search_by_key(&Arc::as_ptr(order), Arc::as_ptr) {
            orders.insert(index, order.clone());
        }
    }

    /// The communicators whose kernels take part in the recording, in the order of their addresses.
    pub(super) fn orders(&self) -> Vec<Arc<LaunchOrder>> {
        lock(&self.kept).orders.clone()
    }

    /// The recording with this number of the driver, unless another library has begun it.
    pub(super) fn find(capture: u64) -> Option<Arc<Self>> {
        let recordings = lock(&RECORDINGS).iter().filter_map(Weak::upgrade).collect::<Vec<_>>();
        recordings.into_iter().find(|recording| recording.capture.get() == Some(&capture))
    }
}

impl Active {
    /// Sets the driver's number of the recording.
    pub(super) fn set_capture(&self, id: u64) {
        self.0.capture.get_or_init(|| id);
    }

    /// The recording, which keeps dropped memory from now on.
    pub(super) fn recording(&self) -> Arc<Recording> {
        self.0.clone()
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.0.end.store(ALLOCATIONS.load(Ordering::Acquire), Ordering::Release);
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // The memory returns to the queues that it came from. These are ordered behind the last launch: its work uses only memory of this
        // queue and of the branches, and each launch is ordered with all of them.
        lock(&RECORDINGS).retain(|other| other.strong_count() > 0);
        LIVE.fetch_sub(1, Ordering::AcqRel);
        let blocks = std::mem::take(&mut self.kept.get_mut().unwrap_or_else(PoisonError::into_inner).blocks);
        for block in blocks {
            // Memory that a recording keeps may belong to the queue of an unrelated thread.
            let queue = block.queue.clone();
            drop(block);
            queue.retire();
        }
    }
}

impl Queue {
    /// The recording under way in this queue, if there is one.
    ///
    /// # Errors
    /// [`CudaError`] with code 900 where another library has begun the recording: nothing would keep the resources of its work.
    pub(super) fn recording(&self) -> Result<Option<Arc<Recording>>, CudaError> {
        let Some(id) = self.capture_id()? else { return Ok(None) };
        Recording::find(id).map(Some).ok_or_else(|| CudaError {
            call: "a recording".into(),
            code: Status::STREAM_CAPTURE_UNSUPPORTED.0,
            text: "the work of this queue is being recorded without Queue::capture, so that nothing would keep what the work uses".into(),
        })
    }

    /// Adds a resource to the recording under way, if work of this queue is being recorded: it then lives as long as the graph.
    ///
    /// # Errors
    /// The error of [`recording`](Self::recording).
    pub(crate) fn keep_for_recording(&self, resource: impl FnOnce() -> Resource) -> Result<(), CudaError> {
        if let Some(recording) = self.recording()? {
            recording.keep(resource());
        }
        Ok(())
    }

    /// The part of a communicator in the recording under way: the one that `is_own` accepts or, the first time, a new one, which the graph
    /// keeps. `needs_comparison` is whether its ranks have to compare a launch of the graph before it runs. `None` if work of this queue is
    /// not being recorded.
    ///
    /// # Errors
    /// The error of [`recording`](Self::recording).
    pub(crate) fn part_of_recording<T: Any + Send + Sync>(
        &self,
        is_own: impl Fn(&T) -> bool,
        make: impl FnOnce() -> T,
        needs_comparison: fn(&T) -> bool,
    ) -> Result<Option<Arc<T>>, CudaError> {
        let Some(recording) = self.recording()? else { return Ok(None) };
        if let Some(own) = recording.parts::<T>().into_iter().find(|part| is_own(part)) {
            return Ok(Some(own));
        }
        let part = Arc::new(make());
        let compared = part.clone();
        lock(&recording.kept).comparisons.push(Arc::new(move || needs_comparison(&compared)));
        recording.keep(part.clone());
        Ok(Some(part))
    }

    /// Makes this queue part of the recording that an event has just extended to it, if there is one, and if this crate has begun it.
    pub(super) fn join_recording(&self) -> Result<(), CudaError> {
        if !exist() {
            return Ok(());
        }
        if let Some(recording) = self.capture_id()?.and_then(Recording::find) {
            recording.join(self);
        }
        Ok(())
    }
}
