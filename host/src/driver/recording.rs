//! [`Recording`]: the resources that a graph keeps for as long as it can be launched: the memory, the queues and everything else that its work uses.
//!
//! Recorded work names addresses, and safe code can drop the memory there. So memory that was allocated before a recording ended stays with the
//! recording when its owner drops it, whether the work uses it or not: the recording need not know the arguments of kernels. Memory that was
//! allocated later cannot be in it, and is not kept. All other resources of recorded work, such as a communicator or the memory of peers,
//! are handed over by the code that records it ([`Queue::keep_for_recording`]).

use std::any::Any;
use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::{CudaError, Queue};
use crate::sys::cuda::Status;

/// The number of the next allocation of this process.
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// How many recordings there are, to look at without a lock: most programs have none.
static LIVE: AtomicUsize = AtomicUsize::new(0);
static RECORDINGS: Mutex<Vec<Weak<Recording>>> = Mutex::new(Vec::new());

thread_local! {
    /// The recordings of this thread, the innermost last.
    static ACTIVE: RefCell<Vec<Arc<Recording>>> = const { RefCell::new(Vec::new()) };
}

/// No code of others runs under these locks, so a poisoned one still guards consistent state.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Device memory that goes back to its queue when this is dropped.
#[derive(Debug)]
pub(super) struct Block {
    queue: Queue,
    address: u64,
    bytes: usize,
}

impl Drop for Block {
    fn drop(&mut self) {
        // Work in the queue may still use the memory; its next owner uses it after that work.
        self.queue.free(self.address, self.bytes);
    }
}

/// An allocation. Its owner's drop frees it, unless a recording may use it.
#[derive(Debug)]
pub(crate) struct Memory {
    block: Option<Block>,
    number: u64,
}

impl Memory {
    pub(super) fn new(queue: &Queue, bytes: usize) -> Result<Self, CudaError> {
        let block = Block { queue: queue.clone(), address: queue.allocate(bytes)?, bytes };
        Ok(Self { block: Some(block), number: ALLOCATIONS.fetch_add(1, Ordering::AcqRel) })
    }

    fn block(&self) -> &Block {
        self.block.as_ref().expect("taken in `drop` alone")
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.block().queue
    }

    pub(super) fn address(&self) -> u64 {
        self.block().address
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        if LIVE.load(Ordering::Acquire) == 0 {
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
    /// The number of the first allocation after its end.
    end: AtomicU64,
    kept: Mutex<Kept>,
}

/// A resource that lives at least as long as a recording.
pub(crate) type Resource = Arc<dyn Any + Send + Sync>;

#[derive(Default)]
struct Kept {
    blocks: Vec<Arc<Block>>,
    /// Other queues that work was recorded on.
    queues: Vec<Queue>,
    resources: Vec<Resource>,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (blocks, queues, resources) = (self.blocks.len(), self.queues.len(), self.resources.len());
        write!(f, "{blocks} blocks of memory, {queues} queues and {resources} other resources")
    }
}

/// A recording under way on this thread; ended when this is dropped.
#[derive(Debug)]
pub(super) struct Active(Arc<Recording>);

impl Recording {
    /// Begins to record work of a queue on this thread.
    pub(super) fn begin(queue: &Queue) -> Active {
        let recording = Arc::new(Self { queue: queue.clone(), end: AtomicU64::new(u64::MAX), kept: Mutex::default() });
        LIVE.fetch_add(1, Ordering::AcqRel);
        lock(&RECORDINGS).push(Arc::downgrade(&recording));
        ACTIVE.with_borrow_mut(|active| active.push(recording.clone()));
        Active(recording)
    }
}

impl Active {
    /// The recording, which from now on keeps dropped memory.
    pub(super) fn recording(&self) -> Arc<Recording> {
        self.0.clone()
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.0.end.store(ALLOCATIONS.load(Ordering::Acquire), Ordering::Release);
        ACTIVE.with_borrow_mut(|active| active.retain(|other| !Arc::ptr_eq(other, &self.0)));
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        lock(&RECORDINGS).retain(|other| other.strong_count() > 0);
        LIVE.fetch_sub(1, Ordering::AcqRel);
        let kept = std::mem::take(self.kept.get_mut().unwrap_or_else(PoisonError::into_inner));
        // The last launch may still be under way on this queue. Memory of another one is to be used again behind it.
        let foreign = kept.blocks.iter().map(|block| &block.queue).filter(|queue| !queue.is_same(&self.queue));
        let foreign: Vec<&Queue> = foreign.collect();
        if foreign.is_empty() {
            return;
        }
        let ordered = self.queue.record().and_then(|end| foreign.iter().try_for_each(|queue| queue.wait_for(&end)));
        if let Err(error) = ordered {
            tracing::error!(%error, "memory that a graph has used is not used again");
            std::mem::forget(kept);
        }
    }
}

impl Queue {
    /// Hands a resource over to the recording under way, if work of this queue is being recorded: it then lives as long as the graph.
    ///
    /// # Errors
    /// [`CudaError`] with code 900 where another thread has begun the recording: nobody would keep the resource.
    pub(crate) fn keep_for_recording(&self, resource: impl FnOnce() -> Resource) -> Result<(), CudaError> {
        if !self.is_capturing()? {
            return Ok(());
        }
        let is_kept = ACTIVE.with_borrow(|active| {
            let resource = resource();
            active.iter().for_each(|recording| lock(&recording.kept).resources.push(resource.clone()));
            !active.is_empty()
        });
        if is_kept {
            return Ok(());
        }
        Err(CudaError {
            call: "a recording".into(),
            code: Status::STREAM_CAPTURE_UNSUPPORTED.0,
            text: "another thread records the work of this queue; only that thread can add collectives to it".into(),
        })
    }

    /// Like [`keep_for_recording`](Self::keep_for_recording), for this queue itself, which another queue's recording has reached.
    pub(super) fn join_recording(&self) {
        ACTIVE.with_borrow(|active| {
            active.iter().for_each(|recording| lock(&recording.kept).queues.push(self.clone()));
        });
    }
}
