//! Memory that ranks share: [`SharedWindows`] of host memory, and with the feature `cuda` `PeerMemory`.

#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use crate::call::Call;
#[cfg(feature = "cuda")]
use crate::driver::{
    DeviceMemory, DeviceSlice, FlagList, HostFlag, LaunchOrder, Mapping, PeerSharedMemory, Queue, Sharers,
};
use crate::error::Result;
use crate::slice::SliceMut;

/// Access to the host memory of the other ranks of a communicator: ranks that are threads of one process, or processes of one machine whose
/// buffers are in files that all can map, work on each other's vectors in place, and exchange no data.
pub trait SharedWindows {
    /// Divides every rank's vector into `world_size` shards of equal length, and passes shard `rank` of every rank's vector, in rank
    /// order, to `work`, which is called once and has exclusive access to these windows (an exposure epoch, in the terms of MPI). `work`
    /// may call collectives of this communicator, on every rank alike. The call returns on no rank before `work` has ended on all of them,
    /// even after a failure.
    ///
    /// With processes, either every rank's vector is the arena of a [shared](crate::GradientBuffer::new_shared) buffer, or none is. If none
    /// is, or a rank cannot map another rank's memory, the result is `false` on every rank, and `work` has not run.
    ///
    /// # Errors
    /// The errors of a collective; [`Error::LengthMismatch`](crate::Error::LengthMismatch) for a vector that has no such windows. A rank
    /// whose `work` fails returns its error; the others return an error that names that rank. `work` has run on every rank, or on none.
    fn with_windows(&self, vector: SliceMut<'_>, work: &mut Work<'_>) -> Result<bool>;

    /// Whether vectors have to lie in [shared](crate::GradientBuffer::new_shared) buffers, because ranks are processes; threads reach all
    /// memory of their process.
    fn needs_shared_buffers(&self) -> bool;
}

/// The work of a rank on the windows of an exposure epoch.
pub type Work<'a> = dyn FnMut(Vec<SliceMut<'_>>) -> Result<()> + 'a;

/// Access by this rank's kernels to the GPU memory of the other ranks of a communicator.
///
/// # Safety
/// The memory that [`share`](Self::share) returns has, for every rank in rank order, the address of the memory that this rank passed to the
/// same call of `share`, mapped in full for as long as the result lives. The rank and the world size of the communicator never change.
/// Kernels write to these addresses.
#[cfg(feature = "cuda")]
pub unsafe trait PeerMemory {
    /// Makes the memory that each rank passes accessible to the kernels of all other ranks; `None`, on every rank, if some rank cannot
    /// access another's, as on different machines. Every rank must call it; the host waits for the others. Every caller must keep its own
    /// memory until every rank has finished using it. If the result is `None`, no rank accesses the memory any more; after an error some
    /// may.
    ///
    /// # Errors
    /// The errors of a collective.
    fn share(&self, data: DeviceSlice<'_>) -> Result<Option<SharedMemory>>;

    /// Runs `launch`, which enqueues kernels that synchronise with the kernels of the other ranks, as one collective operation of this
    /// communicator: it is compared with the other ranks' calls, monitored, and cancelled through the abort flag.
    ///
    /// # Errors
    /// The errors of a collective, and of `launch`.
    fn run_kernels(&self, call: Call, queue: &Queue, launch: &mut dyn FnMut() -> Result<()>) -> Result<()>;
}

/// Memory of every rank of a group, reachable by this rank's kernels.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub struct SharedMemory {
    pub(crate) addresses: Vec<u64>,
    /// Keeps the memory behind the addresses mapped.
    pub(crate) mappings: Vec<Mapping>,
    pub(crate) abort: Arc<HostFlag>,
    /// The launches of kernels that use the memory.
    pub(crate) order: Arc<LaunchOrder>,
    pub(crate) sharers: Sharers,
}

#[cfg(feature = "cuda")]
impl SharedMemory {
    /// Memory that `queue`'s device can access directly, for communicators of other crates: the memory of ranks that are threads of one
    /// process, on one device or on several with access to each other. Their kernels wait for each other without a time limit.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    ///
    /// # Safety
    /// There is one address per rank, in rank order, each of the memory that this rank passed to [`share`](PeerMemory::share). That device
    /// can access all of them, and they are valid as long as any rank uses operations that were created with them.
    pub unsafe fn new(queue: &Queue, addresses: Vec<u64>) -> Result<Self> {
        let abort = Arc::new(HostFlag::new(queue)?);
        Ok(Self { addresses, mappings: Vec::new(), abort, order: Arc::default(), sharers: Sharers::ONE })
    }

    /// The address of each rank's memory in this rank's address space, and the mappings that keep them valid.
    pub(crate) fn into_parts(self) -> (Vec<u64>, Vec<Mapping>) {
        (self.addresses, self.mappings)
    }
}

/// Shared memory without content yet, whose list of flags the peers have; `None`, on every rank, if a list cannot be accessed.
#[cfg(feature = "cuda")]
pub(crate) fn expose(
    peers: &dyn PeerMemory,
    queue: &Queue,
    rank: usize,
    mut flags: FlagList,
) -> Result<Option<PeerSharedMemory>> {
    let shared = flags.give(|list| peers.share(list))?;
    Ok(shared.map(|shared| PeerSharedMemory::new((queue, shared.order.clone()), rank, flags, shared.into_parts())))
}

/// The addresses of memory that every rank shares, the abort flag of the kernels that use it, and the ranks on this rank's GPU.
#[cfg(feature = "cuda")]
pub(crate) type Shared = (Vec<u64>, Arc<HostFlag>, Sharers);

/// Shares memory of this rank, which `shared_memory` keeps from now on; `None`, on every rank, if some memory cannot be accessed.
#[cfg(feature = "cuda")]
pub(crate) fn share(
    peers: &dyn PeerMemory,
    shared_memory: &mut PeerSharedMemory,
    memory: &Arc<DeviceMemory>,
    data: DeviceSlice<'_>,
) -> Result<Option<Shared>> {
    shared_memory.export(memory);
    let Some(shared) = peers.share(data)? else { return Ok(None) };
    let (abort, sharers) = (shared.abort.clone(), shared.sharers);
    let (addresses, mappings) = shared.into_parts();
    shared_memory.import(mappings);
    Ok(Some((addresses, abort, sharers)))
}
