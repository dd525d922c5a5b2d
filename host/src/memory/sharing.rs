//! Memory that ranks share: [`SharedWindows`] of host memory, and with the feature `cuda` `PeerMemory`.

#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use crate::call::Call;
#[cfg(feature = "cuda")]
use crate::driver::{DeviceSlice, HostFlag, Mapping, Queue, Sharers};
use crate::error::Result;
use crate::slice::SliceMut;

/// Ranks that share host memory, such as threads of one process, or processes of one machine whose memory lies in files
/// that they can map: they work on each other's vectors in place, and exchange no data.
pub trait SharedWindows {
    /// Cuts every rank's vector into as many windows of one length as there are ranks, and hands window `rank` of every rank's vector, in
    /// rank order, to `work`, which is called once and has exclusive access to these windows (an exposure epoch, in the terms of MPI). `work` may call
    /// collectives of this communicator, on every rank alike. Returns on no rank before `work` has ended on all of them, even after a failure.
    ///
    /// With processes, either every rank's vector is the arena of a [shared](crate::GradientBuffer::new_shared) buffer, or none is. If none is, or a
    /// rank cannot map another rank's memory, this is `false` on every rank: `work` has not run.
    ///
    /// # Errors
    /// The errors of a collective; [`Error::LengthMismatch`](crate::Error::LengthMismatch) for a vector that has no such windows. On a rank
    /// whose `work` fails its error; on the others one that names that rank. `work` has run on every rank, or on none.
    fn with_windows(&self, vector: SliceMut<'_>, work: &mut Work<'_>) -> Result<bool>;
}

/// The work of a rank on the windows of an exposure epoch.
pub type Work<'a> = dyn FnMut(Vec<SliceMut<'_>>) -> Result<()> + 'a;

/// Ranks whose kernels can reach each other's memory.
///
/// # Safety
/// The memory that [`share`](Self::share) returns holds, for every rank in rank order, the address of the memory that this rank has called `share`
/// with in the same call, mapped in full for as long as the result lives. The rank and the world size of the communicator never change. Kernels write
/// to these addresses.
#[cfg(feature = "cuda")]
pub unsafe trait PeerMemory {
    /// Makes memory that each rank names reachable by the kernels of all others; `None`, on every rank, if some rank cannot reach
    /// another's, as on different machines. Every rank must call it; the host waits for the others. Every caller must keep its own
    /// memory until every rank is done with it. Where this is `None`, no rank reaches the memory any more; after an error some may.
    ///
    /// # Errors
    /// The errors of a collective.
    fn share(&self, data: DeviceSlice<'_>) -> Result<Option<SharedMemory>>;

    /// Runs `launch`, which enqueues kernels that synchronise with the kernels of the other ranks, as one collective operation of this
    /// communicator: compared with the other ranks' calls, watched over, and given up through the abort flag.
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
    pub(crate) sharers: Sharers,
}

#[cfg(feature = "cuda")]
impl SharedMemory {
    /// Memory that `queue`'s device reaches as it is, for communicators of other crates: the memory of ranks that are threads of one process, on
    /// one device or on several with access to each other. Their kernels wait for each other without an end.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    ///
    /// # Safety
    /// One address a rank, in rank order, each of the memory that this rank has called [`share`](PeerMemory::share) with; all within reach of that
    /// device, and valid as long as any rank uses operations that were made with it.
    pub unsafe fn new(queue: &Queue, addresses: Vec<u64>) -> Result<Self> {
        let abort = Arc::new(HostFlag::new(queue)?);
        Ok(Self { addresses, mappings: Vec::new(), abort, sharers: Sharers::ONE })
    }

    /// Where each rank's memory begins, in this rank's address space, and what has to be kept for that.
    pub(crate) fn into_parts(self) -> (Vec<u64>, Vec<Mapping>) {
        (self.addresses, self.mappings)
    }

    /// Set when kernels are not to wait for their peers any more; one for each communicator.
    pub(crate) fn abort_flag(&self) -> &Arc<HostFlag> {
        &self.abort
    }

    /// The ranks on this rank's GPU.
    pub(crate) fn sharers(&self) -> Sharers {
        self.sharers
    }
}
