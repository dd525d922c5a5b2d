//! [`LowLatencyAllReduce`]: sums of small tensors in one launch, by packets that kernels write into each other's mailboxes.
//!
//! It maps the mailboxes and chooses the number of shots; `kernels::cuda` launches the kernels.

use std::sync::Arc;

use crate::agreement::{Plan, agree, all_prepared};
use crate::call::{Value, scope};
use crate::comm::{Call, Communicator, Operation, ReduceOp};
use crate::driver::{Claim, DeviceBuffer, DeviceSlice, DeviceSliceMut, Exposure, FlagList, HostFlag, Queue};
use crate::dtype::DType;
use crate::error::{Error, Result, same_len};
use crate::kernels::cuda::{MOST_RANKS, PacketGroup, Shots};
use crate::memory::Cuda;

use super::peers::peers;

const OPERATION: &str = "low latency all_reduce";

/// All-reduces of small tensors, for two to eight ranks whose kernels can access each other's memory: one launch each, without any work of
/// the host, which can be recorded in a CUDA graph.
///
/// The result is the sum of [`OrderedAllReduce`](crate::ops::OrderedAllReduce), with the same bits on all ranks and in every run: in rank
/// order, in `f64`, each element times `1/P` for a mean, rounded once. The tensors may lie anywhere in device memory, at any address that
/// suits their dtype.
///
/// Up to a threshold every rank sends all data to all others (one shot: half a round trip); above it, each rank sums up one window (two
/// shots, less traffic). Data travel in packets beside flags, like NCCL's protocol LL, so that they take twice their size on the links; from
/// about 1 MiB on NCCL is faster. The mailboxes take 8 times the largest tensor on every rank, and stay occupied until every rank has
/// dropped its own object.
#[derive(Debug)]
pub struct LowLatencyAllReduce<'c> {
    comm: &'c dyn Communicator<Cuda>,
    queue: Queue,
    mapped: Arc<Mapped>,
    /// The largest tensor, in bytes.
    most_bytes: usize,
    /// The largest tensor that is sent in one shot, in bytes.
    one_shot_bytes: usize,
}

/// The group, and the memory behind its addresses.
#[derive(Debug)]
struct Mapped {
    group: PacketGroup,
    _exposure: Exposure,
    _abort: Arc<HostFlag>,
}

impl<'c> LowLatencyAllReduce<'c> {
    /// Maps mailboxes for tensors of up to `most_bytes` bytes. Every rank must call it with the same number. `None`, on every rank, if
    /// there are not two to eight ranks, or kernels cannot access the memory of all of them. The host waits for the other ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no bytes or more than 64 MiB; [`Error::Disagreement`] if ranks differ in the number; [`Error::Cuda`],
    /// with code 2 when memory does not suffice: then all ranks fail, the others with an error that names that rank. Errors of the
    /// communicator.
    pub fn new(comm: &'c dyn Communicator<Cuda>, queue: &Queue, most_bytes: usize) -> Result<Option<Self>> {
        const OF: Operation = Operation::OrderedAllReduce(ReduceOp::Sum);
        const LARGEST: usize = 64 << 20;
        let _scope = scope::within(OF);
        let checked = if (1..=LARGEST).contains(&most_bytes) {
            Ok(())
        } else {
            let reason = format!("mailboxes for tensors of {most_bytes} bytes, and they hold 1 to {LARGEST}");
            Err(Error::InvalidArgument { operation: OPERATION, reason })
        };
        let lines = [("low latency, up to bytes", Value::Number(most_bytes))];
        agree(comm, &Plan { lines: &lines, ..Plan::of(OF) }, checked)?;
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let Some(sharing) = comm.sharing().filter(|_| (2..=MOST_RANKS).contains(&world_size)) else { return Ok(None) };

        let prepared = (|| {
            let mailbox = DeviceBuffer::zeroed(queue, DType::F64, PacketGroup::mailbox_len(most_bytes, world_size))?;
            let flags = FlagList::new(queue, world_size)?;
            // The mailbox is cleared before any peer can write to it, since mapping comes later.
            queue.synchronize()?;
            Ok((mailbox, flags))
        })();
        let (mailbox, mut flags) = all_prepared(OF, comm, prepared)?;
        let Some(lists) = flags.give(|list| sharing.share(list))? else { return Ok(None) };
        let mut exposure = Exposure::new(queue, rank, flags, lists.into_parts());
        exposure.export(mailbox.memory());
        let Some(shared) = sharing.share(mailbox.as_slice())? else { return Ok(None) };
        let (abort, sharers) = (shared.abort_flag().clone(), shared.sharers());
        let (mailboxes, mappings) = shared.into_parts();
        exposure.import(mappings);
        let group = Claim::new(queue, abort.address(), sharers).map_err(Into::into).and_then(|claim| {
            // SAFETY: the exposure keeps the mailboxes of all ranks, which have the length for these bytes and are cleared; the flag lives
            // as long.
            unsafe { PacketGroup::new(queue, (rank, abort.address()), &mailboxes, most_bytes, claim) }
        });
        // The peers' kernels write to this memory without waiting, so no rank continues before all have reached this point.
        let group = all_prepared(OF, comm, group)?;
        let one_shot_bytes = one_shot_bytes(world_size).min(group.most_bytes(Shots::One)).min(most_bytes);
        let mapped = Arc::new(Mapped { group, _exposure: exposure, _abort: abort });
        Ok(Some(Self { comm, queue: queue.clone(), mapped, most_bytes, one_shot_bytes }))
    }

    /// Sends tensors of up to this many bytes in one shot, instead of up to the measured threshold. All ranks must choose the same number;
    /// one that is larger than the mailboxes allow (twice the largest tensor, divided by the number of ranks) has no effect beyond that.
    pub fn with_one_shot_bytes(mut self, bytes: usize) -> Self {
        self.one_shot_bytes = bytes.min(self.mapped.group.most_bytes(Shots::One)).min(self.most_bytes);
        self
    }

    /// The size of the largest tensor, in bytes.
    pub fn most_bytes(&self) -> usize {
        self.most_bytes
    }

    /// Replaces every rank's tensor by the reduction (`Sum` or `Mean`). Asynchronous, in the tensor's queue.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another reduction, a tensor that is too large, or of another queue than this object's; errors of the
    /// communicator.
    pub fn run(&mut self, data: DeviceSliceMut<'_>, op: ReduceOp) -> Result<()> {
        let view = data.as_slice();
        self.reduce(view, view, op)
    }

    /// Like [`run`](Self::run), with an output besides the input.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run); [`Error::LengthMismatch`] or [`Error::DTypeMismatch`] for an output unlike the input.
    pub fn run_into(&mut self, input: DeviceSlice<'_>, output: DeviceSliceMut<'_>, op: ReduceOp) -> Result<()> {
        self.reduce(input, output.as_slice(), op)
    }

    /// Reduces `input` into `output`, which is the same or borrowed mutably by the caller.
    fn reduce(&mut self, input: DeviceSlice<'_>, output: DeviceSlice<'_>, op: ReduceOp) -> Result<()> {
        let _scope = scope::within(Operation::OrderedAllReduce(op));
        let factor = match op {
            ReduceOp::Sum => 1.0,
            ReduceOp::Mean => 1.0 / self.comm.world_size() as f64,
            _ => {
                let reason = format!("{op}; it computes sums and means");
                return Err(Error::InvalidArgument { operation: OPERATION, reason });
            }
        };
        same_len(OPERATION, ("input", input.len()), ("output", output.len()))?;
        let (left, right) = (input.dtype(), output.dtype());
        if left != right {
            return Err(Error::DTypeMismatch { operation: OPERATION, what: "input and output".into(), left, right });
        }
        self.queue.check_same(OPERATION, input.queue())?;
        self.queue.check_same(OPERATION, output.queue())?;
        let bytes = input.len() * left.size_bytes();
        if bytes > self.most_bytes {
            let reason = format!("a tensor of {bytes} bytes, and the mailboxes hold {}", self.most_bytes);
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        let shots = if bytes <= self.one_shot_bytes { Shots::One } else { Shots::Two };
        self.queue.keep_for_recording(|| self.mapped.clone())?;
        let call = Call::new(Operation::OrderedAllReduce(op), input.len(), left);
        peers(self.comm).run_kernels(call, &self.queue, &mut || {
            if bytes == 0 {
                return Ok(());
            }
            // SAFETY: checked above; the ranks' calls are compared by the communicator. A view of the caller's mutable borrow is written.
            unsafe { self.mapped.group.sum(output.address(), input, factor, shots) }
        })
    }
}

/// The largest tensor for which one shot is faster than two, in bytes: measured on an H100 with ranks that share it.
fn one_shot_bytes(world_size: usize) -> usize {
    match world_size {
        2 => 256 << 10,
        3 | 4 => 64 << 10,
        _ => 32 << 10,
    }
}
