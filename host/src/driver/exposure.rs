//! [`Exposure`]: memory of this rank that the kernels of other ranks reach, and when it can be used for something else.
//!
//! A peer may launch kernels that write here after this rank has dropped its own objects. So the memory outlives its owner until every
//! rank has released it. A rank releases the memory of its peers when its own work on it is over: it unmaps that memory and sets its flag in every
//! rank's list of flags. No rank waits for another: pending releases are checked again when memory is allocated or a queue is waited for. Memory that a
//! rank never releases, because it was killed, stays out of use until this process ends.
//!
//! A rank unmaps the lists of flags only after it has written to them, when their owners may have used them up already. So their memory never goes back to
//! the driver, nor to the pool of a queue, which returns it there: a list is used again for another one, or, where a peer may still write to
//! it, for nothing.
//!
//! # Queues
//!
//! Any thread goes on with the releases of all ranks of the process. The context that was current on the thread is so afterwards. The queue of a release may
//! have lost all other owners by then, and destroying it makes the driver wait for its device, on which work may be waiting for the very thread
//! that would destroy it. So it is retired ([`Queue::retire`]).

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::context::Current;
use super::recording::Memory;
use super::{CudaError, DeviceBuffer, DeviceSlice, Event, Mapping, Queue, check};
use crate::dtype::DType;
use crate::error::Result;
use crate::sys::cuda;

/// The least time between two checks of pending releases.
const PAUSE: Duration = Duration::from_millis(10);

/// Memory of this rank that the others have mapped, and theirs that this one has.
#[derive(Debug)]
pub(crate) struct Exposure {
    queue: Queue,
    rank: usize,
    exported: Vec<Arc<Memory>>,
    mappings: Vec<Mapping>,
    flags: Option<Flags>,
}

/// A list of flags in this rank's memory. Dropping it sets the memory aside for another list, unless a peer may have been given this one.
#[derive(Debug)]
pub(crate) struct FlagList {
    memory: Option<DeviceBuffer>,
    is_given: bool,
}

/// Memory of lists that no rank will write to any more.
static SPARE_LISTS: Mutex<Vec<DeviceBuffer>> = Mutex::new(Vec::new());

impl FlagList {
    /// A list for so many ranks, with no flag set, on `queue`'s device.
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

    /// Gives the list to the peers by `share`, which returns `None` once no rank has it any more. After an error nobody knows which ranks have it,
    /// and will write to it.
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
            // Deliberately never used again: a flag that a peer sets late would be taken for a release of other memory.
            std::mem::forget(memory);
        } else {
            SPARE_LISTS.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        }
    }
}

/// A list of flags on every rank: number `p` of a list is set when rank `p` has let go of the memory of the list's owner.
#[derive(Debug)]
struct Flags {
    own: FlagList,
    lists: Vec<u64>,
    _mappings: Vec<Mapping>,
}

/// The release of a dropped [`Exposure`], as far as it is pending.
#[derive(Debug)]
struct Departure {
    exposure: Exposure,
    /// The end of this rank's work on the peers' memory.
    end: Event,
    has_let_go: bool,
}

static DEPARTURES: Mutex<(Vec<Departure>, Option<Instant>)> = Mutex::new((Vec::new(), None));
/// How many there are, to look at without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A queue of the device for flags alone, which lives as long as the process and waits for no kernel.
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

impl Exposure {
    /// Of rank `rank`, whose work on the peers' memory is in `queue`. `own` has been given to the others, and `lists` are where all ranks' lists are.
    pub(crate) fn new(queue: &Queue, rank: usize, own: FlagList, (lists, mappings): (Vec<u64>, Vec<Mapping>)) -> Self {
        let flags = Some(Flags { own, lists, _mappings: mappings });
        Self { queue: queue.clone(), rank, exported: Vec::new(), mappings: Vec::new(), flags }
    }

    /// Takes in memory of this rank before any other rank maps it, so that it stays until all have let go, also where sharing it fails
    /// half-way.
    pub(crate) fn export(&mut self, own: &Arc<Memory>) {
        self.exported.push(own.clone());
    }

    /// Takes in memory of the others that this rank has mapped.
    pub(crate) fn import(&mut self, peers: Vec<Mapping>) {
        self.mappings.extend(peers);
    }

    /// Unmaps the peers' memory and tells them.
    fn let_go(&mut self) -> Result<(), CudaError> {
        self.mappings.clear();
        let Some(flags) = &self.flags else { return Ok(()) };
        let (queue, set) = (flag_queue(self.queue.ordinal())?, 1u64);
        queue.make_current()?;
        for list in &flags.lists {
            let place = list + (self.rank * size_of::<u64>()) as u64;
            // SAFETY: the flag of this rank in a list that is mapped; the number stays until the wait below is over.
            check("cuMemcpyHtoDAsync", unsafe {
                cuda::cuMemcpyHtoDAsync_v2(place, (&raw const set).cast(), size_of::<u64>(), queue.raw_stream())
            })?;
        }
        queue.wait()
    }

    /// Whether every rank has let go of this one's memory.
    fn is_released(&self) -> Result<bool, CudaError> {
        let Some(flags) = &self.flags else { return Ok(true) };
        let mut set = vec![0u64; flags.lists.len()];
        let queue = flag_queue(self.queue.ordinal())?;
        queue.make_current()?;
        // SAFETY: the list has a number for each rank, and so has the host's, which stays until the wait is over.
        check("cuMemcpyDtoHAsync", unsafe {
            let (from, bytes) = (flags.own.memory().as_slice().address(), size_of_val(&set[..]));
            cuda::cuMemcpyDtoHAsync_v2(set.as_mut_ptr().cast(), from, bytes, queue.raw_stream())
        })?;
        queue.wait()?;
        Ok(set.iter().all(|&flag| flag != 0))
    }
}

impl Drop for Exposure {
    fn drop(&mut self) {
        let Some(flags) = self.flags.take() else { return };
        let exposure = Exposure {
            queue: self.queue.clone(),
            rank: self.rank,
            exported: std::mem::take(&mut self.exported),
            mappings: std::mem::take(&mut self.mappings),
            flags: Some(flags),
        };
        let departed = exposure.queue.recording().and_then(|recording| match recording {
            // Waiting for the end of recorded work would spoil the recording. It keeps this for its graph, and later drops it.
            Some(recording) => Ok(Err(recording)),
            None => exposure.queue.event().and_then(|end| end.record().map(|()| Ok(end))),
        });
        match departed {
            Ok(Err(recording)) => recording.keep(Arc::new(exposure)),
            Ok(Ok(end)) => {
                COUNT.fetch_add(1, Ordering::AcqRel);
                let departure = Departure { exposure, end, has_let_go: false };
                DEPARTURES.lock().unwrap_or_else(PoisonError::into_inner).0.push(departure);
                settle(true);
            }
            Err(error) => {
                tracing::error!(%error, "memory that peers have mapped stays out of use");
                std::mem::forget(exposure);
            }
        }
    }
}

impl Departure {
    /// Goes on with the release as far as possible; true if it is complete.
    fn settle(&mut self) -> Result<bool, CudaError> {
        if !self.has_let_go {
            if !self.end.is_done()? {
                return Ok(false);
            }
            self.exposure.let_go()?;
            self.has_let_go = true;
        }
        self.exposure.is_released()
    }

    /// Gives the memory back, once everybody has let go.
    fn end(mut self) {
        let queue = self.exposure.queue.clone();
        if let Some(mut flags) = self.exposure.flags.take() {
            // All ranks have written to it.
            flags.own.is_given = false;
        }
        drop(self);
        queue.retire();
    }
}

/// Goes on with all pending releases, without waiting for any other rank; not too often, unless `now`.
pub(super) fn settle(now: bool) {
    if COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    // Another thread that is at it will do.
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
