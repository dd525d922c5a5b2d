//! [`DeviceCommunicator`]: the collectives of a group of ranks on the memory of GPUs, in the order of queues.
//!
//! The counterpart of [`Communicator`](super::Communicator), which works on the host's memory and blocks. Knows no transport.

use std::sync::Arc;

use super::ReduceOp;
use crate::driver::{DeviceSlice, DeviceSliceMut, HostFlag, Mapping, Queue};
use crate::error::{Call, Result};

/// Factors of an all-reduce: every rank's input is multiplied by `before`, and the reduction by `after`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// Applied to each element before it is reduced.
    pub before: f64,
    /// Applied to each element of the reduction.
    pub after: f64,
}

impl Scaling {
    /// No scaling.
    pub const NONE: Self = Self { before: 1.0, after: 1.0 };
}

impl Default for Scaling {
    fn default() -> Self {
        Self::NONE
    }
}

/// Memory of every rank of a group, reachable by this rank's kernels.
#[derive(Debug)]
pub struct SharedMemory {
    pub(super) addresses: Vec<u64>,
    /// Keeps what the addresses lead to.
    pub(super) _mappings: Vec<Mapping>,
    pub(super) abort: Arc<HostFlag>,
}

impl SharedMemory {
    /// Where each rank's memory begins, in this rank's address space.
    pub(crate) fn addresses(&self) -> &[u64] {
        &self.addresses
    }

    /// The address of a u32 that becomes nonzero when kernels are not to wait for their peers any more.
    pub(crate) fn abort_flag(&self) -> u64 {
        self.abort.address()
    }
}

/// The collectives of a group of ranks on device memory.
///
/// Every rank must make the same calls in the same order with equal counts, dtypes, reductions, factors and roots. Calls are
/// asynchronous: they put work into the queue of their operands and return. Nothing races: whatever was in that queue before runs
/// before, whatever is put there afterwards runs after, and memory may be reused or dropped at once. Results of reductions are
/// bitwise identical on all ranks, in the transport's own order of additions, which may depend on the length.
///
/// A call that fails at once returns the error. A failure later on, while the queue runs, is sticky: every later call returns it,
/// and so does [`synchronize`](Self::synchronize), which should stand before results are used; without it, a failed collective leaves
/// whatever its operands held.
pub trait DeviceCommunicator {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world_size(&self) -> usize;

    /// Fails on every rank, and names two of them, unless all ranks call it with the same value; the host waits for the others.
    /// `operation` and `what` say what is compared.
    fn agree_on(&self, operation: &'static str, what: &str, value: u64) -> Result<()>;

    /// Replaces every rank's data by their reduction.
    fn all_reduce(&self, data: DeviceSliceMut<'_>, op: ReduceOp, scaling: Scaling) -> Result<()>;

    /// As [`all_reduce`](Self::all_reduce), leaving the input alone.
    fn all_reduce_into(
        &self,
        input: DeviceSlice<'_>,
        output: DeviceSliceMut<'_>,
        op: ReduceOp,
        scaling: Scaling,
    ) -> Result<()>;

    /// Reduces the ranks' inputs and leaves shard `rank` of the result in `output`; `input` holds `world_size` shards of
    /// `output`'s length.
    fn reduce_scatter(&self, input: DeviceSlice<'_>, output: DeviceSliceMut<'_>, op: ReduceOp) -> Result<()>;

    /// As [`reduce_scatter`](Self::reduce_scatter), where this rank's shard of `data` receives the result. What the other shards hold
    /// afterwards is unspecified. `data`'s length must be a multiple of the world size.
    fn reduce_scatter_in_place(&self, data: DeviceSliceMut<'_>, op: ReduceOp) -> Result<()>;

    /// Concatenates the ranks' inputs, in rank order, on every rank.
    fn all_gather(&self, input: DeviceSlice<'_>, output: DeviceSliceMut<'_>) -> Result<()>;

    /// As [`all_gather`](Self::all_gather), where each rank's shard already lies at its place in `data`; `data`'s length must be a
    /// multiple of the world size.
    fn all_gather_in_place(&self, data: DeviceSliceMut<'_>) -> Result<()>;

    /// Sends shard `p` of `input` to rank `p`, and receives rank `p`'s shard for this rank into shard `p` of `output`.
    fn all_to_all(&self, input: DeviceSlice<'_>, output: DeviceSliceMut<'_>) -> Result<()>;

    /// Copies the data of rank `root` to every rank.
    fn broadcast(&self, data: DeviceSliceMut<'_>, root: usize) -> Result<()>;

    /// Sends to and receives from any number of peers at once; each transfer must meet its counterpart in a call of the peer, in order
    /// for each pair of ranks.
    fn exchange(&self, sends: Vec<(usize, DeviceSlice<'_>)>, receives: Vec<(usize, DeviceSliceMut<'_>)>) -> Result<()>;

    /// Sends to another rank, which must receive.
    fn send(&self, data: DeviceSlice<'_>, peer: usize) -> Result<()> {
        self.exchange(vec![(peer, data)], Vec::new())
    }

    /// Receives from another rank; count and dtype must equal the sender's.
    fn recv(&self, data: DeviceSliceMut<'_>, peer: usize) -> Result<()> {
        self.exchange(Vec::new(), vec![(peer, data)])
    }

    /// Makes memory that each rank names reachable by the kernels of all others; `None`, on every rank, if some rank cannot reach
    /// another's, as on different machines. Every rank must call it; the host waits for the others. Whoever uses it must keep its own
    /// memory until every rank is done with it.
    fn share(&self, _data: DeviceSlice<'_>) -> Result<Option<SharedMemory>> {
        Ok(None)
    }

    /// Runs `launch`, which puts kernels into the queue that meet those of the other ranks, as one collective operation of this
    /// communicator: compared with the other ranks' calls, watched over, and given up through the abort flag.
    fn run_kernels(&self, _call: Call, _queue: &Queue, launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        launch()
    }

    /// Waits for everything in the queue, or for the failure of a collective, whichever comes first.
    fn synchronize(&self, queue: &Queue) -> Result<()>;
}
