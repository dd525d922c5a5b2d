//! [`LowLatency`]: a communicator whose small sums are one launch each, by packets that kernels write into each other's mailboxes.
//!
//! It chooses the number of shots; `packets` maps the mailboxes, `kernels::cuda` launches the kernels, and the communicator below it does all
//! other work.

use std::sync::Arc;

use super::packets::PacketConnection;
use super::peers::{factor, peers};
use crate::agreement::{Plan, agree};
use crate::call::{Value, scope};
use crate::comm::{Call, Collective, Communicator, Ledger, Operands, Operation, Ranks, ReduceOp, Scaling};
use crate::driver::{DeviceSlice, Queue};
use crate::error::{Error, Result};
use crate::kernels::cuda::{PacketKernels, Shots};
use crate::memory::{Cuda, DeviceWireSlice, DeviceWireSliceMut, PeerMemory};

const OPERATION: &str = "low latency all_reduce";
/// The limit of the size of the mailboxes, in bytes of the largest tensor.
const LARGEST: usize = 64 << 20;

/// A communicator over another one, of two to eight ranks whose kernels can access each other's memory: sums and means of small tensors
/// are one launch each, without any work of the host, which can be recorded in a CUDA graph. All else goes to the communicator below.
///
/// It is a [`Communicator`], so that the collectives by name ([`Collectives`](crate::comm::Collectives)), tensor parallelism and bundles
/// use it like any other:
///
/// ```no_run
/// use gradsync::comm::{Collectives, ReduceOp, nccl::NcclCommunicator};
/// use gradsync::driver::{DeviceBuffer, Queue};
/// use gradsync::ops::LowLatency;
///
/// fn sum(comm: &NcclCommunicator, queue: &Queue, small: &mut DeviceBuffer) -> gradsync::Result<()> {
///     let fast = LowLatency::new(comm, queue, 512 << 10)?;
///     fast.all_reduce(small.as_mut_slice(), ReduceOp::Sum)
/// }
/// ```
///
/// Which sums are small: all-reduces (`Sum` and `Mean`, without [`Scaling`]) of at most the number of bytes that it was made for, in the
/// queue that it was made for, on every rank alike. Their result is the sum of [`OrderedAllReduce`](crate::ops::OrderedAllReduce), with the
/// same bits on all ranks and in every run: in rank order, in `f64`, each element times `1/P` for a mean, rounded once. Tensors may lie
/// anywhere in device memory, at any address that suits their dtype.
///
/// Up to a threshold every rank sends all data to all others (one shot: half a round trip); above it, each rank sums up one window (two
/// shots, less traffic). Data travel in packets beside flags, like NCCL's protocol LL, so that they take twice their size on the links: on
/// GPUs that are connected by links, large tensors are faster over NCCL. The mailboxes take 8 times the largest small tensor on every rank,
/// and stay occupied until every rank has dropped its own object.
pub struct LowLatency<'c> {
    below: &'c dyn Communicator<Cuda>,
    queue: Queue,
    /// The group of the kernels; none where kernels cannot access the memory of all ranks.
    mapped: Option<Arc<PacketConnection>>,
    /// The largest small tensor, in bytes.
    most_bytes: usize,
    /// The largest tensor that is sent in one shot, in bytes.
    one_shot_bytes: usize,
}

impl<'c> LowLatency<'c> {
    /// Maps mailboxes for sums of up to `most_bytes` bytes in `queue`. Every rank must call it with the same number. Where there are not
    /// two to eight ranks, or kernels cannot access the memory of all of them, it maps none on any rank, and every call goes to the
    /// communicator below ([`is_mapped`](Self::is_mapped)). The host waits for the other ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no bytes or more than 64 MiB; [`Error::Disagreement`] if ranks differ in the number; [`Error::Cuda`],
    /// with code 2 when memory does not suffice: then all ranks fail, the others with an error that names that rank. Errors of the
    /// communicator.
    pub fn new(below: &'c dyn Communicator<Cuda>, queue: &Queue, most_bytes: usize) -> Result<Self> {
        Self::with_one_shot_bytes(below, queue, most_bytes, one_shot_bytes(below.world_size()))
    }

    /// Like [`new`](Self::new), and sends tensors of up to `one_shot_bytes` bytes in one shot, instead of up to the measured threshold. Every
    /// rank must call it with the same numbers. One that is larger than the mailboxes allow (twice the largest small tensor, divided by the
    /// number of ranks) means that one.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new); [`Error::Disagreement`] if ranks differ in either number.
    pub fn with_one_shot_bytes(
        below: &'c dyn Communicator<Cuda>,
        queue: &Queue,
        most_bytes: usize,
        one_shot_bytes: usize,
    ) -> Result<Self> {
        const OF: Operation = Operation::OrderedAllReduce(ReduceOp::Sum);
        let _scope = scope::within(OF);
        let checked = if (1..=LARGEST).contains(&most_bytes) {
            Ok(())
        } else {
            let reason = format!("mailboxes for tensors of {most_bytes} bytes, and they hold 1 to {LARGEST}");
            Err(Error::InvalidArgument { operation: OPERATION, reason })
        };
        let lines = [
            ("largest small tensor in bytes", Value::Number(most_bytes)),
            ("one shot up to bytes", Value::Number(one_shot_bytes)),
        ];
        agree(below, &Plan { lines: &lines, ..Plan::of(OF) }, checked)?;
        let mapped = PacketConnection::new(OF, below, queue, (most_bytes, PacketKernels::Sums))?.map(Arc::new);
        let fits = mapped.as_ref().map_or(0, |mapped| mapped.group.most_bytes(Shots::One));
        Ok(Self { below, queue: queue.clone(), mapped, most_bytes, one_shot_bytes: one_shot_bytes.min(fits) })
    }

    /// Whether mailboxes are mapped, the same on every rank.
    pub fn is_mapped(&self) -> bool {
        self.mapped.is_some()
    }

    /// The operands of a call that is small.
    fn small<'a>(&'a self, collective: &'a Collective<'_, Cuda>) -> Option<Small<'a>> {
        let Collective::AllReduce { operands, op: op @ (ReduceOp::Sum | ReduceOp::Mean), scaling: Scaling::NONE } =
            collective
        else {
            return None;
        };
        let (input, output) = match operands {
            Operands::InPlace(data) => (data.as_slice(), data.as_slice()),
            Operands::Apart { input, output } => (*input, output.as_slice()),
        };
        let bytes = input.len() * input.dtype().size_bytes();
        // The communicator below refuses operands that do not fit each other.
        let fits = (input.len(), input.dtype()) == (output.len(), output.dtype()) && bytes <= self.most_bytes;
        let is_ours = |slice: DeviceSlice<'_>| self.queue.check_same(OPERATION, slice.queue()).is_ok();
        let mapped = self.mapped.as_ref().filter(|_| fits && is_ours(input) && is_ours(output))?;
        let shots = if bytes <= self.one_shot_bytes { Shots::One } else { Shots::Two };
        Some(Small { mapped, input, output, op: *op, shots })
    }

    /// Runs a small call.
    fn sum(&self, Small { mapped, input, output, op, shots }: Small<'_>) -> Result<()> {
        mapped.keep_for_recording(&self.queue)?;
        let factor = factor(op, self.world_size());
        let call = Call::new(Operation::OrderedAllReduce(op), input.len(), input.dtype());
        peers(self.below).run_kernels(call, &self.queue, &mut || {
            if input.is_empty() {
                return Ok(());
            }
            // SAFETY: the slices have one length and dtype, and at most the size for which the mailboxes were made; the ranks' calls are
            // compared by the communicator. The output is borrowed mutably by the collective, and is the input or apart from it.
            unsafe { mapped.group.sum(output.address(), input, factor, shots) }
        })
    }
}

/// A sum that takes one launch.
struct Small<'a> {
    mapped: &'a Arc<PacketConnection>,
    input: DeviceSlice<'a>,
    output: DeviceSlice<'a>,
    op: ReduceOp,
    shots: Shots,
}

impl Ranks for LowLatency<'_> {
    fn rank(&self) -> usize {
        self.below.rank()
    }

    fn world_size(&self) -> usize {
        self.below.world_size()
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>> {
        self.below.gather_words(words)
    }

    fn barrier(&self) -> Result<()> {
        self.below.barrier()
    }

    fn ledger(&self) -> Option<&dyn Ledger> {
        self.below.ledger()
    }

    fn failure(&self) -> Option<Error> {
        self.below.failure()
    }
}

impl Communicator<Cuda> for LowLatency<'_> {
    fn run(&self, collective: Collective<'_, Cuda>) -> Result<()> {
        match self.small(&collective) {
            Some(small) => self.sum(small),
            None => self.below.run(collective),
        }
    }

    /// Small sums follow each other; if any call is not small, all go to the communicator below together.
    fn run_all(&self, collectives: Vec<Collective<'_, Cuda>>) -> Result<()> {
        let small: Option<Vec<Small<'_>>> = collectives.iter().map(|collective| self.small(collective)).collect();
        match small {
            Some(small) => small.into_iter().try_for_each(|small| self.sum(small)),
            None => self.below.run_all(collectives),
        }
    }

    fn exchange(
        &self,
        sends: &[(usize, DeviceWireSlice<'_>)],
        receives: &mut [(usize, DeviceWireSliceMut<'_>)],
    ) -> Result<()> {
        self.below.exchange(sends, receives)
    }

    fn sharing(&self) -> Option<&(dyn PeerMemory + 'static)> {
        self.below.sharing()
    }

    fn synchronize(&self, queue: &Queue) -> Result<()> {
        self.below.synchronize(queue)
    }
}

impl std::fmt::Debug for LowLatency<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { most_bytes, one_shot_bytes, .. } = self;
        f.debug_struct("LowLatency")
            .field("below", &self.below)
            .field("is_mapped", &self.is_mapped())
            .field("most_bytes", most_bytes)
            .field("one_shot_bytes", one_shot_bytes)
            .finish()
    }
}

/// The largest tensor for which one shot is faster than two, in bytes: measured on an H100 with ranks that share it.
fn one_shot_bytes(world_size: usize) -> usize {
    match world_size {
        2 => 1 << 20,
        3 | 4 => 128 << 10,
        _ => 64 << 10,
    }
}
