//! [`NcclGroup`]: several operations that NCCL runs at once.
//!
//! No operation is enqueued before the group is submitted; a group that is dropped before has no effect.

use std::marker::PhantomData;

use super::NcclCommunicator;
use super::primitive::{Primitive, RawSlice, Reduction};
use crate::comm::collective_call::check_peer;
use crate::comm::{Collective, Operands, Ranks, ReduceOp, Scaling};
use crate::driver::{DeviceSlice, DeviceSliceMut, Queue};
use crate::dtype::DType;
use crate::error::{Call, Error, Operation, Result};
use crate::memory::Cuda;

/// Operations of one rank, all on one queue, that run at once; made by [`NcclCommunicator::group`].
///
/// Sends and receives between two ranks match in the order in which each rank adds them. Reductions are not scaled; means are limited to
/// those that NCCL computes itself: of f32, of f64, or in groups whose world size is a power of two.
#[must_use = "a group that is not submitted does nothing"]
#[derive(Debug)]
pub struct NcclGroup<'c, 'd> {
    comm: &'c NcclCommunicator,
    queue: Option<Queue>,
    calls: Vec<Call>,
    primitives: Vec<Primitive>,
    operands: PhantomData<&'d mut ()>,
}

impl<'c, 'd> NcclGroup<'c, 'd> {
    pub(super) fn new(comm: &'c NcclCommunicator) -> Self {
        Self { comm, queue: None, calls: Vec::new(), primitives: Vec::new(), operands: PhantomData }
    }

    /// Enqueues the operations. An empty group does nothing.
    ///
    /// # Errors
    /// The errors of [`Communicator`](crate::comm::Communicator).
    pub fn submit(self) -> Result<()> {
        let Some(queue) = &self.queue else { return Ok(()) };
        // SAFETY: every operand was borrowed for `'d`, which lasts until now, and belongs to the queue; later work is ordered after the
        // group.
        unsafe { self.comm.submit(queue, &self.calls, &self.primitives) }
    }

    /// Whether a collective can be part of a group: its operands are disjoint or reduced in place, and it needs no separate pass.
    pub(super) fn takes(&self, collective: &Collective<'_, Cuda>) -> bool {
        let is_fused = |op, dtype: DType| self.comm.reduction(op, dtype, 1.0).1 == 1.0;
        match collective {
            Collective::AllReduce { operands: Operands::InPlace(data), op, scaling } => {
                *scaling == Scaling::NONE && is_fused(*op, data.as_slice().dtype())
            }
            Collective::ReduceScatter { operands: Operands::Apart { input, .. }, op } => is_fused(*op, input.dtype()),
            Collective::AllGather { operands } | Collective::AllToAll { operands } => {
                matches!(operands, Operands::Apart { .. })
            }
            Collective::Broadcast { .. } => true,
            _ => false,
        }
    }

    /// Adds a collective that the group [takes](Self::takes).
    pub(super) fn add_collective(&mut self, collective: Collective<'d, Cuda>) -> Result<()> {
        let (rank, world_size) = (self.comm.rank(), self.comm.world());
        collective.check(rank, world_size)?;
        let call = collective.call(world_size);
        match &collective {
            Collective::AllReduce { operands: Operands::InPlace(data), op, .. } => {
                let data = data.as_slice();
                let reduction = self.reduction(call.operation, data, *op)?;
                self.add(
                    data.queue(),
                    call,
                    [Primitive::AllReduce { input: data.into(), output: data.address(), reduction }],
                )
            }
            Collective::ReduceScatter { operands: Operands::Apart { input, output }, op } => {
                let shard = output.as_slice();
                let reduction = self.reduction(call.operation, shard, *op)?;
                let primitive = Primitive::ReduceScatter { input: input.address(), output: shard.into(), reduction };
                self.add(input.queue(), call, [primitive])
            }
            Collective::AllGather { operands: Operands::Apart { input, output } } => {
                let primitive = Primitive::AllGather { input: (*input).into(), output: output.as_slice().address() };
                self.add(input.queue(), call, [primitive])
            }
            Collective::AllToAll { operands: Operands::Apart { input, output } } => {
                self.add(input.queue(), call, all_to_all((*input).into(), output.as_slice().into(), world_size))
            }
            Collective::Broadcast { data, root } => {
                let data = data.as_slice();
                self.add(data.queue(), call, [Primitive::Broadcast { data: data.into(), root: *root }])
            }
            other => unreachable!("a group does not take {other:?}"),
        }
    }

    /// Adds an all-reduce in place.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for data of another queue than the group's, or a mean that needs a separate pass.
    pub fn all_reduce(&mut self, data: DeviceSliceMut<'d>, op: ReduceOp) -> Result<()> {
        let operands = Operands::InPlace(data);
        self.add_collective(Collective::AllReduce { operands, op, scaling: Scaling::NONE })
    }

    /// Adds a reduce-scatter.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Error::LengthMismatch`], [`Error::DTypeMismatch`].
    pub fn reduce_scatter(&mut self, input: DeviceSlice<'d>, output: DeviceSliceMut<'d>, op: ReduceOp) -> Result<()> {
        self.add_collective(Collective::ReduceScatter { operands: Operands::Apart { input, output }, op })
    }

    /// Adds an all-gather.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    pub fn all_gather(&mut self, input: DeviceSlice<'d>, output: DeviceSliceMut<'d>) -> Result<()> {
        self.add_collective(Collective::AllGather { operands: Operands::Apart { input, output } })
    }

    /// Adds an all-to-all.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    pub fn all_to_all(&mut self, input: DeviceSlice<'d>, output: DeviceSliceMut<'d>) -> Result<()> {
        self.add_collective(Collective::AllToAll { operands: Operands::Apart { input, output } })
    }

    /// Adds a broadcast.
    ///
    /// # Errors
    /// [`CommError::InvalidPeer`](crate::CommError::InvalidPeer) for a root that does not exist; [`Error::InvalidArgument`] for data of
    /// another queue.
    pub fn broadcast(&mut self, data: DeviceSliceMut<'d>, root: usize) -> Result<()> {
        self.add_collective(Collective::Broadcast { data, root })
    }

    /// Adds a transfer to a peer.
    ///
    /// # Errors
    /// [`CommError::InvalidPeer`](crate::CommError::InvalidPeer) for this rank itself, or a rank that does not exist; [`Error::InvalidArgument`] for data of another
    /// queue.
    pub fn send(&mut self, data: DeviceSlice<'d>, peer: usize) -> Result<()> {
        let operation = Operation::Send { peer };
        self.comm.check_peer(operation, peer)?;
        let call = Call::new(operation, data.len(), data.dtype());
        self.add(data.queue(), call, [Primitive::Send { data: data.into(), peer }])
    }

    /// Adds a transfer from a peer; count and dtype must equal the sender's.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn recv(&mut self, data: DeviceSliceMut<'d>, peer: usize) -> Result<()> {
        let data = data.as_slice();
        let operation = Operation::Recv { peer };
        self.comm.check_peer(operation, peer)?;
        let call = Call::new(operation, data.len(), data.dtype());
        self.add(data.queue(), call, [Primitive::Recv { data: data.into(), peer }])
    }

    fn reduction(&self, operation: Operation, data: DeviceSlice<'_>, op: ReduceOp) -> Result<Reduction> {
        match self.comm.reduction(op, data.dtype(), 1.0) {
            (reduction, 1.0) => Ok(reduction),
            _ => Err(Error::InvalidArgument {
                operation: "group",
                reason: format!(
                    "{operation} of {} over {} ranks needs a pass of its own, which a group cannot have: sum in the \
                     group, and scale the result after it",
                    data.dtype(),
                    self.comm.world()
                ),
            }),
        }
    }

    fn add(&mut self, queue: &Queue, call: Call, primitives: impl IntoIterator<Item = Primitive>) -> Result<()> {
        self.queue.get_or_insert_with(|| queue.clone()).check_same("group", queue)?;
        self.calls.push(call);
        self.primitives.extend(primitives.into_iter().filter(|primitive| !primitive.is_empty()));
        Ok(())
    }
}

/// The transfers of an all-to-all, including this rank's own shard.
pub(super) fn all_to_all(input: RawSlice, output: RawSlice, world_size: usize) -> Vec<Primitive> {
    let len = input.len / world_size;
    let transfers = |peer: usize| {
        let (data, shard) = (input.range(peer * len, len), output.range(peer * len, len));
        [Primitive::Send { data, peer }, Primitive::Recv { data: shard, peer }]
    };
    (0..world_size).flat_map(transfers).collect()
}

/// The fewest bytes of shards that two ranks exchange directly instead of by a ring.
const DIRECT_BYTES: usize = 16 << 20;

/// The primitives of an all-gather, to be submitted as a group. Between two ranks, a ring is a transfer each way, and explicit transfers
/// are faster: by 3, 9 and 19 % for 64 MiB, 256 MiB and 1 GiB of shards together on two H200.
pub(super) fn all_gather(input: RawSlice, output: u64, (rank, world_size): (usize, usize)) -> Vec<Primitive> {
    if world_size != 2 || input.len * input.dtype.size_bytes() < DIRECT_BYTES {
        return vec![Primitive::AllGather { input, output }];
    }
    let whole = RawSlice { address: output, len: 2 * input.len, ..input };
    let shard = |peer: usize| whole.range(peer * input.len, input.len);
    // This rank's own shard may already be in place.
    let peers = (0..2).filter(|&peer| peer != rank || shard(rank).address != input.address);
    peers
        .flat_map(|peer| [Primitive::Send { data: input, peer }, Primitive::Recv { data: shard(peer), peer }])
        .collect()
}

impl NcclCommunicator {
    pub(super) fn check_peer(&self, operation: Operation, peer: usize) -> Result<()> {
        check_peer(operation, peer, self.rank(), self.world())
    }
}
