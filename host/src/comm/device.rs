//! [`DeviceCommunicator`]: the collectives of a group of ranks on the memory of GPUs, in the order of queues.
//!
//! The counterpart of [`Communicator`](super::Communicator), which works on the host's memory and blocks. Knows no transport.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use super::ReduceOp;
use crate::driver::{DeviceSlice, DeviceSliceMut, HostFlag, Mapping, Queue, Sharers};
use crate::dtype::DataType;
use crate::error::{Call, Error, Operation, Result};
use crate::kernels::same_len;

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

    /// What ranks call an all-reduce with these factors.
    pub(crate) fn operation(self, op: ReduceOp) -> Operation {
        match self {
            Self::NONE => Operation::AllReduce(op),
            Self { before, after } => Operation::ScaledAllReduce { op, before: before.into(), after: after.into() },
        }
    }

    /// Refuses factors that are no numbers to multiply with.
    pub(in crate::comm) fn check(self) -> Result<()> {
        let Self { before, after } = self;
        if before.is_finite() && after.is_finite() {
            return Ok(());
        }
        let reason = format!("factors must be finite, and are {before:?} before and {after:?} after");
        Err(Error::InvalidArgument { operation: "all_reduce", reason })
    }
}

/// Refuses an input and an output of an all-reduce that do not fit each other.
pub(in crate::comm) fn check_into(input: DeviceSlice<'_>, output: DeviceSlice<'_>) -> Result<()> {
    const OPERATION: &str = "all_reduce";
    same_len(OPERATION, ("input", input.len()), ("output", output.len()))?;
    if input.dtype() != output.dtype() {
        let (left, right) = (input.dtype(), output.dtype());
        return Err(Error::DTypeMismatch { operation: OPERATION, what: "input and output".into(), left, right });
    }
    input.queue().check_same(OPERATION, output.queue())
}

impl Default for Scaling {
    fn default() -> Self {
        Self::NONE
    }
}

/// Elements at an address of device memory, of a type that transports carry: what an operation gets where no
/// [`DeviceSlice`] is at hand, as with tensors of other crates and with integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawSlice {
    /// Device address of the first element.
    pub address: u64,
    /// Elements.
    pub len: usize,
    /// Their type.
    pub dtype: DataType,
}

impl RawSlice {
    /// The elements from `begin` on.
    pub(crate) fn range(self, begin: usize, len: usize) -> Self {
        Self { address: self.address + (begin * self.dtype.size_bytes()) as u64, len, ..self }
    }
}

impl From<DeviceSlice<'_>> for RawSlice {
    fn from(data: DeviceSlice<'_>) -> Self {
        Self { address: data.address(), len: data.len(), dtype: data.dtype().into() }
    }
}

/// What the ranks of a group have agreed on: hashes of calls that need not be compared again. Every rank of the group has the same.
#[derive(Debug, Default)]
pub struct Agreements(RefCell<HashSet<u64>>);

impl Agreements {
    pub(crate) fn contains(&self, value: u64) -> bool {
        self.0.borrow().contains(&value)
    }

    pub(crate) fn insert(&self, value: u64) {
        self.0.borrow_mut().insert(value);
    }
}

/// Memory of every rank of a group, reachable by this rank's kernels.
#[derive(Debug)]
pub struct SharedMemory {
    pub(super) addresses: Vec<u64>,
    /// Keeps what the addresses lead to.
    pub(super) mappings: Vec<Mapping>,
    pub(super) abort: Arc<HostFlag>,
    pub(super) sharers: Sharers,
}

impl SharedMemory {
    /// Memory that `queue`'s device reaches as it is, for communicators of other crates: that of ranks which are threads of one process, on one
    /// device or on several with access to each other. Their kernels wait for each other without an end.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// One address a rank, in rank order, each of what that rank has called [`share`](DeviceCommunicator::share) with; all within reach of that
    /// device, and valid as long as any rank uses what it makes of this.
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

    /// Every rank's words, in rank order; all ranks bring equally many. The host waits for the others.
    ///
    /// # Errors
    /// Those of every operation.
    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>>;

    /// Fails on every rank, and names two of them, unless all ranks call it with the same value; the host waits for the others.
    /// `operation` and `what` say what is compared.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where ranks differ; those of every operation.
    fn agree_on(&self, operation: &'static str, what: &str, value: u64) -> Result<()> {
        let all = self.gather_words(&[value])?;
        let Some(rank) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
        let (left, right) = (all[0], all[rank]);
        let reason = format!("rank 0 and rank {rank} differ in {what}: rank 0 has {left}, rank {rank} has {right}");
        Err(Error::InvalidArgument { operation, reason })
    }

    /// Where operations that are repeated at every step note what the ranks have agreed on, so that the host waits for that once. `None`,
    /// the default, makes ranks compare their calls every time.
    fn agreements(&self) -> Option<&Agreements> {
        None
    }

    /// How many calls of this rank were given to the other ranks to compare; always 0, the default, where calls are not compared, or before
    /// they are made.
    fn announced(&self) -> u64 {
        0
    }

    /// Whether the first `calls` of [`announced`](Self::announced) are known to fit those of the other ranks. Does not wait.
    fn is_confirmed(&self, calls: u64) -> bool {
        let _ = calls;
        true
    }

    /// Waits until they are.
    ///
    /// # Errors
    /// Those of every operation.
    fn confirm(&self, calls: u64) -> Result<()> {
        let _ = calls;
        Ok(())
    }

    /// Relies once more on what [`agreements`](Self::agreements) holds, without waiting for anybody. Where calls are compared, ranks that
    /// rely on different agreements fail as those whose calls differ. Does nothing by default.
    ///
    /// # Errors
    /// Those of every operation.
    fn recall(&self, agreement: u64) -> Result<()> {
        let _ = agreement;
        Ok(())
    }

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
    ///
    /// # Errors
    /// Those of every operation, [`CommError::InvalidPeer`](crate::CommError::InvalidPeer) for this rank itself or one that there is
    /// not, and [`Error::InvalidArgument`] for operands of different queues.
    fn exchange(&self, sends: Vec<(usize, DeviceSlice<'_>)>, receives: Vec<(usize, DeviceSliceMut<'_>)>) -> Result<()> {
        let receives: Vec<(usize, DeviceSlice<'_>)> =
            receives.iter().map(|(peer, data)| (*peer, data.as_slice())).collect();
        let operands = || sends.iter().chain(&receives).map(|(_, data)| *data);
        let Some(queue) = operands().map(|data| data.queue()).next() else { return Ok(()) };
        operands().try_for_each(|data| queue.check_same("exchange", data.queue()))?;
        let raw = |list: &[(usize, DeviceSlice<'_>)]| -> Vec<(usize, RawSlice)> {
            list.iter().map(|&(peer, data)| (peer, data.into())).collect()
        };
        // SAFETY: operands of one queue, those that are received into borrowed mutably; later work on them is ordered behind.
        unsafe { self.exchange_raw(queue, &raw(&sends), &raw(&receives)) }
    }

    /// [`exchange`](Self::exchange) on raw memory, of any type that transports carry.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// All elements of every operand are on this rank's device, valid until `queue` has got past the operation, and not used meanwhile
    /// by work that is not ordered on `queue`; none that is received into overlaps another.
    unsafe fn exchange_raw(
        &self,
        queue: &Queue,
        sends: &[(usize, RawSlice)],
        receives: &[(usize, RawSlice)],
    ) -> Result<()>;

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

    /// The failure that has ended this communicator, if any, also of work that ran after its call had returned. Does not wait. Transports
    /// of which every failure is that of a call have none.
    fn failure(&self) -> Option<Error> {
        None
    }

    /// Waits for everything in the queue, or for the failure of a collective, whichever comes first; where ranks compare their calls, until
    /// all calls of this rank so far have been compared too.
    fn synchronize(&self, queue: &Queue) -> Result<()>;
}

impl fmt::Debug for dyn DeviceCommunicator + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank(), self.world_size())
    }
}
