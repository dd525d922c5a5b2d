//! [`OrderedAllReduce`]: sums whose bits depend on the ranks' values alone, computed in a wide dtype and sent in a narrow one.
//!
//! Each rank receives its part of every rank's data, adds the parts in rank order, and sends its part of the result to all others: the same
//! number of bytes as a ring all-reduce, with one rounding per element instead of one per hop. Over a communicator ([`OrderedAllReduce`])
//! these are two exchanges around the `combine` kernel; where the ranks' kernels can access each other's buffers ([`PeerAllReduce`]), one
//! launch.

use std::ops::Range;
use std::sync::Arc;

use super::peers::{Connection, peers};
use crate::agreement::{Plan, agree, same_plan};
use crate::buffer::GradientBuffer;
use crate::call::Value;
use crate::call::scope;
use crate::comm::{Call, Communicator, Operation, ReduceOp};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use crate::dtype::DType;
use crate::error::{Error, Result, same_len};
use crate::kernels::cpu::Coefficients;
use crate::kernels::cuda::{PeerKernel, PeerSums, SegmentWorkspace, cast};
use crate::memory::{Cuda, DeviceWireSliceMut};

const OPERATION: &str = "ordered all_reduce";

/// A bitwise reproducible all-reduce of vectors of one length.
///
/// Each element of the result is the sum of the ranks' elements in `f64`, in rank order, each times `1/P` for a mean, rounded once to the
/// dtype on the wire. It does not depend on the length, on the assignment of tensors to buckets, on the machine or on its load. With a wire
/// narrower than the data, every rank's data are rounded to it first (to nearest even), and so is the result.
#[derive(Debug)]
pub struct OrderedAllReduce<'c> {
    comm: &'c dyn Communicator<Cuda>,
    dtype: DType,
    wire: DType,
    len: usize,
    /// This rank's window of the data.
    own: Range<usize>,
    /// The length of the longest window.
    part_len: usize,
    op: ReduceOp,
    layers: SegmentWorkspace,
    /// The other ranks' parts.
    received: DeviceBuffer,
    /// The data in the dtype of the wire, if that differs.
    narrow: Option<DeviceBuffer>,
}

impl<'c> OrderedAllReduce<'c> {
    /// Prepares all-reduces of `len` elements of `dtype`, which are sent as `wire`; `op` is `Sum` or `Mean`. Every rank must call it with
    /// the same arguments. The host waits for the other ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another reduction; [`Error::Disagreement`] if ranks differ in any argument; [`Error::Cuda`], with
    /// code 2 when memory does not suffice for the other ranks' parts: almost the size of the data on the wire, or twice that if the wire
    /// has another dtype. If it does not suffice on one rank, all ranks fail, the others with an [`Error::InvalidArgument`] that names that
    /// rank. Errors of the communicator.
    pub fn new(
        comm: &'c dyn Communicator<Cuda>,
        queue: &Queue,
        (dtype, wire): (DType, DType),
        len: usize,
        op: ReduceOp,
    ) -> Result<Self> {
        let prepared = Self::prepare(comm, queue, (dtype, wire), len, op);
        let lines = [("dtype", Value::DType(dtype)), ("wire", Value::DType(wire)), ("elements", Value::Number(len))];
        agree(comm, &Plan { lines: &lines, ..Plan::of(Operation::OrderedAllReduce(op)) }, prepared)
    }

    /// Prepares this rank's resources, without the other ranks.
    fn prepare(
        comm: &'c dyn Communicator<Cuda>,
        queue: &Queue,
        (dtype, wire): (DType, DType),
        len: usize,
        op: ReduceOp,
    ) -> Result<Self> {
        check_op(op)?;
        let world_size = comm.world_size();
        // Parts begin at multiples of 16 bytes.
        let part_len = len.div_ceil(world_size).next_multiple_of(8);
        let own = window(comm.rank(), part_len, len);
        let own_len = own.len();
        let mut layers = SegmentWorkspace::new(queue, own_len, &[0..own_len], world_size)?;
        layers.write_coefficients(&Coefficients {
            weights: vec![factor(op, world_size); world_size],
            cancelled: vec![false],
        })?;
        Ok(Self {
            comm,
            dtype,
            wire,
            len,
            own,
            part_len,
            op,
            layers,
            received: DeviceBuffer::zeroed(queue, wire, own_len * (world_size - 1))?,
            narrow: if wire == dtype { None } else { Some(DeviceBuffer::zeroed(queue, wire, len)?) },
        })
    }

    /// The dtype in which the data are sent.
    pub fn wire(&self) -> DType {
        self.wire
    }

    /// The reduction.
    pub fn op(&self) -> ReduceOp {
        self.op
    }

    /// Replaces every rank's data by their reduction.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] or [`Error::DTypeMismatch`] for data other than prepared for; errors of the communicator.
    pub fn run(&mut self, mut data: DeviceSliceMut<'_>) -> Result<()> {
        let _scope = scope::within(Operation::OrderedAllReduce(self.op));
        let view = data.as_slice();
        same_len(OPERATION, ("data", view.len()), ("what was prepared for", self.len))?;
        if view.dtype() != self.dtype {
            let what = "data and what was prepared for".into();
            return Err(Error::DTypeMismatch { operation: OPERATION, what, left: view.dtype(), right: self.dtype });
        }
        let Some(mut narrow) = self.narrow.take() else {
            return self.reduce(data);
        };
        let outcome = cast(narrow.as_mut_slice(), view)
            .and_then(|()| self.reduce(narrow.as_mut_slice()))
            .and_then(|()| cast(data.reborrow(), narrow.as_slice()));
        self.narrow = Some(narrow);
        outcome
    }

    /// Reduces data in the dtype of the wire.
    fn reduce(&mut self, mut data: DeviceSliceMut<'_>) -> Result<()> {
        let comm = self.comm;
        let (rank, world_size, own_len) = (comm.rank(), comm.world_size(), self.own.len());
        let view = data.as_slice();
        let peers = || (0..world_size).filter(|&peer| peer != rank);
        let sends: Vec<_> =
            peers().map(|peer| (peer, view.range(window(peer, self.part_len, self.len)).into())).collect();
        let receives = split(self.received.as_mut_slice(), own_len, peers());
        comm.exchange(&sends, &mut wires(receives))?;

        let own = view.range(self.own.clone());
        let vectors: Vec<DeviceSlice<'_>> = (0..world_size)
            .map(|peer| match peer.cmp(&rank) {
                std::cmp::Ordering::Equal => own,
                std::cmp::Ordering::Less => self.received.as_slice().range(peer * own_len..(peer + 1) * own_len),
                std::cmp::Ordering::Greater => self.received.as_slice().range((peer - 1) * own_len..peer * own_len),
            })
            .collect();
        // SAFETY: the data are borrowed mutably; the kernel reads each element of this part before it writes it, in one thread.
        self.layers.combine(unsafe { DeviceSliceMut::from_view(own) }, &vectors)?;

        // Every window except this rank's own is written by another rank.
        let (before, rest) = data.reborrow().split_at_mut(self.own.start);
        let (middle, after) = rest.split_at_mut(own_len);
        let sends: Vec<_> = peers().map(|peer| (peer, middle.as_slice().into())).collect();
        let lens = |range: Range<usize>| range.map(|peer| (peer, window(peer, self.part_len, self.len).len()));
        let mut receives = split_uneven(before, lens(0..rank));
        receives.extend(split_uneven(after, lens(rank + 1..world_size)));
        comm.exchange(&sends, &mut wires(receives))
    }
}

fn wires(places: Vec<(usize, DeviceSliceMut<'_>)>) -> Vec<(usize, DeviceWireSliceMut<'_>)> {
    places.into_iter().map(|(peer, place)| (peer, place.into())).collect()
}

/// The sums of [`OrderedAllReduce`], with the same bits, for gradient buffers that the kernels of all ranks can access. In one launch each
/// rank sends the peers their shards, adds the shards that it has received and writes the result into every rank's buffer; a second launch
/// waits for all ranks. It needs two to eight ranks on one machine. The memory stays occupied until every rank has dropped its own, as for
/// [`Adasum`](crate::ops::Adasum). The workspace is the peers' shards: the size of the buffer without this rank's own shard.
#[derive(Debug)]
pub struct PeerAllReduce<'c> {
    comm: &'c dyn Communicator<Cuda>,
    connection: Arc<Connection>,
    op: ReduceOp,
}

impl<'c> PeerAllReduce<'c> {
    /// Maps the buffers of all ranks. Every rank must call it, with equal tensors, and keep the buffer while it uses this object. `None`,
    /// on every rank, if kernels cannot access all buffers. The host waits for the other ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on every rank if any rank has a reduction other than `Sum` and `Mean` or a buffer made for another world
    /// size; [`Error::Disagreement`] if ranks have different tensors or reductions; [`Error::Cuda`]; errors of the communicator.
    pub fn new(comm: &'c dyn Communicator<Cuda>, buffer: &GradientBuffer<Cuda>, op: ReduceOp) -> Result<Option<Self>> {
        let operation = Operation::OrderedAllReduce(op);
        let _scope = scope::within(operation);
        same_plan(operation, comm, buffer.table(), &[], check_op(op))?;
        let connected = Connection::new(operation, comm, buffer, (PeerKernel::Reduce, PeerSums::default()), || Ok(()))?;
        Ok(connected.map(|(connection, ())| Self { comm, connection, op }))
    }

    /// Replaces every rank's buffer by their reduction. Asynchronous, in the buffer's queue.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a buffer that was not mapped; errors of the communicator.
    pub fn run(&mut self, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        let _scope = scope::within(Operation::OrderedAllReduce(self.op));
        self.connection.check(OPERATION, buffer)?;
        self.connection.keep_for_recording(buffer.queue())?;
        let dtype = buffer.table().dtype();
        let call = Call::new(Operation::OrderedAllReduce(self.op), buffer.table().arena_len(), dtype);
        let factor = factor(self.op, self.comm.world_size());
        let group = &self.connection.group;
        peers(self.comm).run_kernels(call, buffer.queue(), &mut || group.reduce(factor))
    }
}

/// The factor of every rank's elements.
fn factor(op: ReduceOp, world_size: usize) -> f64 {
    if op == ReduceOp::Mean { 1.0 / world_size as f64 } else { 1.0 }
}

fn check_op(op: ReduceOp) -> Result<()> {
    if matches!(op, ReduceOp::Sum | ReduceOp::Mean) {
        return Ok(());
    }
    let reason = format!("{op} has no order of additions; the transport's own is reproducible");
    Err(Error::InvalidArgument { operation: OPERATION, reason })
}

/// The range of elements that `rank` adds.
fn window(rank: usize, part_len: usize, len: usize) -> Range<usize> {
    len.min(rank * part_len)..len.min((rank + 1) * part_len)
}

/// Consecutive parts of `data`, one for each peer.
fn split(
    data: DeviceSliceMut<'_>,
    part_len: usize,
    peers: impl Iterator<Item = usize>,
) -> Vec<(usize, DeviceSliceMut<'_>)> {
    split_uneven(data, peers.map(|peer| (peer, part_len)))
}

fn split_uneven<'a>(
    data: DeviceSliceMut<'a>,
    parts: impl Iterator<Item = (usize, usize)>,
) -> Vec<(usize, DeviceSliceMut<'a>)> {
    let mut rest = data;
    let mut found = Vec::new();
    for (peer, len) in parts {
        let (part, others) = rest.split_at_mut(len);
        found.push((peer, part));
        rest = others;
    }
    found
}
