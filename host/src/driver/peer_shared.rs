//! [`PeerSharedMemory`]: memory of this rank that kernels of other ranks access, and the protocol by which it is released.
//!
//! A peer may launch kernels that write here after this rank has dropped its own objects. So the memory outlives its owner until every rank
//! has released it. A rank releases the memory of its peers when its own work on it is over: it unmaps that memory and sets its flag in
//! every rank's list of flags. No rank waits for another: pending releases are checked again when memory is allocated or a queue is waited
//! for. Memory that a rank never releases, because it was killed, stays out of use until this process ends.
//!
//! A rank unmaps the flag lists of its peers only after it has written to them; their owners may have read the flags and finished by then.
//! So the memory of a list is never returned to the driver, nor to a queue's pool, which would return it to the driver: it is reused for
//! another list or, where a peer may still write to it, never again.
//!
//! # Queues
//!
//! Any thread may advance the pending releases of all ranks of the process; it restores the context that was current before. The queue of a
//! release may have lost all other owners by then. Destroying a queue makes the driver wait for its device, where work may be waiting for
//! the very thread that destroys the queue. So the queue is retired instead ([`Queue::retire`]).

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::context::Current;
use super::recording::DeviceMemory;
use super::{CudaError, DeviceBuffer, DeviceSlice, Event, LaunchOrder, Mapping, Queue, check};
use crate::dtype::DType;
use crate::error::Result;
use crate::sys::cuda;

/// The least time between two checks of pending releases.
const PAUSE: Duration = Duration::from_millis(10);

/// Memory of this rank that its peers have mapped, and this rank's mappings of the peers' memory.
#[derive(Debug)]
pub(crate) struct PeerSharedMemory {
    queue: Queue,
    /// The launches that use the peers' memory, in any queue.
    order: Arc<LaunchOrder>,
    rank: usize,
    exported: Vec<Arc<DeviceMemory>>,
    mappings: Vec<Mapping>,
    flags: Option<Flags>,
}

/// A list of flags in this rank's memory. Dropping it makes the memory a spare for another list, unless a peer may still hold this one.
#[derive(Debug)]
pub(crate) struct FlagList {
    memory: Option<DeviceBuffer>,
    is_given: bool,
}

/// Memory of lists that no rank will write to again.
static SPARE_LISTS: Mutex<Vec<DeviceBuffer>> = Mutex::new(Vec::new());

impl FlagList {
    /// Creates a list of `world_size` flags on `queue`'s device, with no flag set.
    pub(crate) fn new(queue: &Queue, world_size: usize) -> Result<Self> {
        let queue = flag_queue(queue.ordinal())?;
        let spare = {
            let mut spare = SPARE_LISTS.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = |list: &DeviceBuffer| {
                let list = list.as_slice();
                list.len() == world_size && list.queue().ordinal() == queue.ordinal()
            };
            spare.iter().position(fits).map(|index| spare.swap_remove(index))
        };
        let memory = match spare {
            Some(memory) => memory,
            None => DeviceBuffer::allocate(&queue, DType::F64, world_size)?,
        };
        let mut list = Self { memory: Some(memory), is_given: false };
        list.memory.as_mut().expect("just set").as_mut_slice().clear()?;
        queue.synchronize()?;
        Ok(list)
    }

    fn memory(&self) -> &DeviceBuffer {
        self.memory.as_ref().expect("taken in `drop` alone")
    }

    /// Passes the list to the peers by `share`, which returns `None` if no rank holds it afterwards. After an error it is unknown which
    /// ranks hold it and will write to it.
    pub(crate) fn give<T>(&mut self, share: impl FnOnce(DeviceSlice<'_>) -> Result<Option<T>>) -> Result<Option<T>> {
        self.is_given = true;
        let shared = share(self.memory().as_slice())?;
        self.is_given = shared.is_some();
        Ok(shared)
    }
}

impl Drop for FlagList {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if self.is_given {
            // Deliberately never reused: a flag that a peer sets late would be taken for a release of other memory.
            std::mem::forget(memory);
        } else {
            SPARE_LISTS.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        }
    }
}

/// The flag lists of all ranks: flag `p` of a list is set once rank `p` has released the memory of the list's owner.
#[derive(Debug)]
struct Flags {
    own: FlagList,
    lists: Vec<u64>,
    _mappings: Vec<Mapping>,
}

/// The pending release of a dropped [`PeerSharedMemory`].
#[derive(Debug)]
struct Departure {
    shared_memory: PeerSharedMemory,
    /// The end of this rank's work on the peers' memory.
    end: Event,
    has_let_go: bool,
}

static DEPARTURES: Mutex<(Vec<Departure>, Option<Instant>)> = Mutex::new((Vec::new(), None));
/// The number of departures, readable without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The device's queue for flags alone. It lives as long as the process and waits for no kernel.
fn flag_queue(device: u32) -> Result<Queue, CudaError> {
    static QUEUES: Mutex<Option<HashMap<u32, Queue>>> = Mutex::new(None);
    let mut queues = QUEUES.lock().unwrap_or_else(PoisonError::into_inner);
    let queues = queues.get_or_insert_default();
    if let Some(queue) = queues.get(&device) {
        return Ok(queue.clone());
    }
    let queue = Queue::new(device)?;
    queues.insert(device, queue.clone());
    Ok(queue)
}

impl PeerSharedMemory {
    /// For rank `rank`, whose work on the peers' memory is in `queue` or is launched in `order`. `own` has been passed to the peers; `lists`
    /// are the addresses of all ranks' lists.
    pub(crate) fn new(
        (queue, order): (&Queue, Arc<LaunchOrder>),
        rank: usize,
        own: FlagList,
        (lists, mappings): (Vec<u64>, Vec<Mapping>),
    ) -> Self {
        let flags = Some(Flags { own, lists, _mappings: mappings });
        Self { queue: queue.clone(), order, rank, exported: Vec::new(), mappings: Vec::new(), flags }
    }

    /// Adds memory of this rank. Called before any peer maps it, so that it stays until all peers have released it, also where sharing it
    /// fails half-way.
    pub(crate) fn export(&mut self, own: &Arc<DeviceMemory>) {
        self.exported.push(own.clone());
    }

    /// Adds this rank's mappings of the peers' memory.
    pub(crate) fn import(&mut self, peers: Vec<Mapping>) {
        self.mappings.extend(peers);
    }

    /// Unmaps the peers' memory and sets this rank's flag in their lists.
    fn let_go(&mut self) -> Result<(), CudaError> {
        self.mappings.clear();
        let Some(flags) = &self.flags else { return Ok(()) };
        let (queue, set) = (flag_queue(self.queue.ordinal())?, 1u64);
        queue.make_current()?;
        for list in &flags.lists {
            let flag = list + (self.rank * size_of::<u64>()) as u64;
            // SAFETY: the address is this rank's flag in a mapped list; `set` lives until the wait below is over.
            check("cuMemcpyHtoDAsync", unsafe {
                cuda::cuMemcpyHtoDAsync_v2(flag, (&raw const set).cast(), size_of::<u64>(), queue.raw_stream())
            })?;
        }
        queue.wait()
    }

    /// Whether every rank has released this rank's memory.
    fn is_released(&self) -> Result<bool, CudaError> {
        let Some(flags) = &self.flags else { return Ok(true) };
        let mut set = vec![0u64; flags.lists.len()];
        let queue = flag_queue(self.queue.ordinal())?;
        queue.make_current()?;
        // SAFETY: both lists have one number per rank; `set` lives until the wait is over.
        check("cuMemcpyDtoHAsync", unsafe {
            let (from, bytes) = (flags.own.memory().as_slice().address(), size_of_val(&set[..]));
            cuda::cuMemcpyDtoHAsync_v2(set.as_mut_ptr().cast(), from, bytes, queue.raw_stream())
        })?;
        queue.wait()?;
        Ok(set.iter().all(|&flag| flag != 0))
    }
}

impl Drop for PeerSharedMemory {
    fn drop(&mut self) {
        let Some(flags) = self.flags.take() else { return };
        let shared_memory = PeerSharedMemory {
            queue: self.queue.clone(),
            order: self.order.clone(),
            rank: self.rank,
            exported: std::mem::take(&mut self.exported),
            mappings: std::mem::take(&mut self.mappings),
            flags: Some(flags),
        };
        let departed = {
            let _held = shared_memory.queue.hold();
            shared_memory.queue.recording().and_then(|recording| match recording {
                // Waiting for the end of recorded work would invalidate the recording. So the recording keeps the shared memory for its graph,
                // and drops it later.
                Some(recording) => Ok(Err(recording)),
                None => {
                    shared_memory.order.follow(&shared_memory.queue)?;
                    shared_memory.queue.event().and_then(|end| end.record().map(|()| Ok(end)))
                }
            })
        };
        match departed {
            Ok(Err(recording)) => recording.keep(Arc::new(shared_memory)),
            Ok(Ok(end)) => {
                COUNT.fetch_add(1, Ordering::AcqRel);
                let departure = Departure { shared_memory, end, has_let_go: false };
                DEPARTURES.lock().unwrap_or_else(PoisonError::into_inner).0.push(departure);
                settle(true);
            }
            Err(error) => {
                tracing::error!(%error, "memory that peers have mapped stays out of use");
                std::mem::forget(shared_memory);
            }
        }
    }
}

impl Departure {
    /// Advances the release as far as possible without waiting; returns true if it is complete.
    fn settle(&mut self) -> Result<bool, CudaError> {
        if !self.has_let_go {
            if !self.end.is_done()? {
                return Ok(false);
            }
            self.shared_memory.let_go()?;
            self.has_let_go = true;
        }
        self.shared_memory.is_released()
    }

    /// Frees the memory, once every rank has released it.
    fn end(mut self) {
        let queue = self.shared_memory.queue.clone();
        if let Some(mut flags) = self.shared_memory.flags.take() {
            // All ranks have written their flags, so the list can be reused.
            flags.own.is_given = false;
        }
        drop(self);
        queue.retire();
    }
}

/// Advances all pending releases without waiting for any other rank; at most once per `PAUSE`, unless `now` is set.
pub(super) fn settle(now: bool) {
    if COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    // If another thread is advancing them, this thread need not.
    let Ok(mut guard) = DEPARTURES.try_lock() else { return };
    let (departures, last) = &mut *guard;
    if !now && last.is_some_and(|last| last.elapsed() < PAUSE) {
        return;
    }
    *last = Some(Instant::now());
    let before = match Current::get() {
        Ok(before) => before,
        Err(error) => return tracing::error!(%error, "memory that peers have mapped is not looked after"),
    };
    let mut over = Vec::new();
    for index in (0..departures.len()).rev() {
        match departures[index].settle() {
            Ok(false) => continue,
            Ok(true) => over.push(departures.swap_remove(index)),
            Err(error) => {
                tracing::error!(%error, "memory that peers have mapped stays out of use");
                std::mem::forget(departures.swap_remove(index));
            }
        }
        COUNT.fetch_sub(1, Ordering::AcqRel);
    }
    drop(guard);
    over.into_iter().for_each(Departure::end);
    if let Err(error) = before.restore() {
        tracing::error!(%error, "the context of this thread is another one now");
    }
}
