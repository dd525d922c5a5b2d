//! [`Exposure`]: memory of this rank that the kernels of other ranks reach, and when it can be used for something else.
//!
//! A peer may launch kernels that write here after this rank has dropped its own objects. So the memory outlives its owner until every
//! rank has released it. A rank releases the memory of its peers when its own work on it is over: it unmaps that memory and sets its flag in every
//! rank's list of flags. No rank waits for another: pending releases are checked again when memory is allocated or a queue is waited for. Memory that a
//! rank never releases, because it was killed, stays out of use until this process ends.
//!
//! The lists of flags are the one thing that is unmapped after it was written; their memory never goes back to the driver.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::recording::Memory;
use super::{CudaError, DeviceBuffer, Event, Mapping, Queue, check};
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

/// A list of flags on every rank: number `p` of a list is set when rank `p` has let go of the memory of the list's owner.
#[derive(Debug)]
struct Flags {
    own: DeviceBuffer,
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
    /// A list of flags for so many ranks, none of them set, to be shared with them.
    pub(crate) fn flags(queue: &Queue, world_size: usize) -> Result<DeviceBuffer> {
        let queue = flag_queue(queue.ordinal())?;
        let flags = DeviceBuffer::zeroed(&queue, DType::F64, world_size)?;
        queue.synchronize()?;
        Ok(flags)
    }

    /// Of rank `rank`, whose work on the peers' memory is in `queue`. `own` came from [`flags`](Self::flags), and `lists` are where all ranks'
    /// lists are.
    pub(crate) fn new(
        queue: &Queue,
        rank: usize,
        own: DeviceBuffer,
        (lists, mappings): (Vec<u64>, Vec<Mapping>),
    ) -> Self {
        let flags = Some(Flags { own, lists, _mappings: mappings });
        Self { queue: queue.clone(), rank, exported: Vec::new(), mappings: Vec::new(), flags }
    }

    /// Takes in memory that the others have mapped, and theirs.
    pub(crate) fn add(&mut self, own: &Arc<Memory>, peers: Vec<Mapping>) {
        self.exported.push(own.clone());
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
            let (from, bytes) = (flags.own.as_slice().address(), size_of_val(&set[..]));
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
        let end = self.queue.event().and_then(|end| end.record().map(|()| end));
        match end {
            Ok(end) => {
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
    for mut departure in over {
        // Everybody has let go: its own drop has nothing to do.
        drop(departure.exposure.flags.take());
    }
}
