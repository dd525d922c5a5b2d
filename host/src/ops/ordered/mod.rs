//! [`OrderedAllReduce`]: sums whose bits depend on the ranks' values alone, computed in a wide dtype and sent in a narrow one.
//!
//! Each rank receives its shard of every rank's data, adds the shards in rank order, and sends its shard of the result to all others: the
//! same number of bytes as a ring all-reduce, with one rounding per element instead of one per hop.

mod exchange;

use std::sync::Arc;

use self::exchange::Exchange;
use super::peer_connection::{PeerConnection, peers};
use super::tensors::copy_into;
use crate::buffer::{GradientBuffer, TensorTable};
use crate::call::{Value, scope};
use crate::call_comparison::{all_prepared, same_call};
use crate::comm::{Call, Communicator, Operation, ReduceOp};
use crate::driver::DeviceSliceMut;
use crate::dtype::DType;
use crate::error::{Error, Result, check_float};
use crate::kernels::KernelMemory;
use crate::kernels::cuda::{self, PeerKernel, PeerSums};
use crate::memory::Cuda;

const OPERATION: &str = "ordered all_reduce";

/// A bitwise reproducible all-reduce of gradient buffers on GPUs, with its workspace: prepared once by all ranks, and run in every step.
/// In host memory, every all-reduce is one.
///
/// Each element of the result is the sum of the ranks' elements in `f64`, in rank order, each times `1/P` for a mean, rounded once to the
/// dtype on the wire. It does not depend on the length, on the assignment of tensors to buckets, on the machine or on its load. With a wire
/// narrower than the data, every rank's data are rounded to it first (to nearest even), and so is the result.
///
/// | made by | one reduction is |
/// |---|---|
/// | [`new`](Self::new), where the kernels of all ranks, two to eight, can access each other's memory | one launch, which sends the peers their shards, adds the received ones and writes the result into every rank's buffer, and a second one, which waits for all ranks |
/// | `new` elsewhere, [`over_transport`](Self::over_transport) | two exchanges of the communicator, with a kernel that adds between them |
///
/// The workspace is the size of the buffer without this rank's own shard, and the size of the buffer once more if the wire has another dtype.
/// Peers may write to this rank's buffer after it has dropped the buffer or this object: the memory stays occupied until every rank has
/// dropped its own.
#[derive(Debug)]
pub struct OrderedAllReduce<'c> {
    comm: &'c dyn Communicator<Cuda>,
    op: ReduceOp,
    wire: DType,
    made_for: Arc<TensorTable>,
    steps: Steps,
}

#[derive(Debug)]
enum Steps {
    /// Kernels that access the buffers of all ranks.
    Peers(Arc<PeerConnection>),
    Exchange(Box<Exchange>),
}

impl<'c> OrderedAllReduce<'c> {
    /// Prepares the reduction of buffers with the tensors of `buffer` over the ranks of `comm`; `op` is `Sum` or `Mean`. The wire has the
    /// dtype of the buffer. Every rank must call it. The host waits for the other ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on every rank if `op` is neither `Sum` nor `Mean`, or the buffer was made for another world size, on any rank;
    /// [`Error::Disagreement`] on every rank if ranks have different tensors or reductions; [`Error::Cuda`], with code 2 when memory does
    /// not suffice for the workspace. If it does not suffice on one rank, all ranks fail, the others with an [`Error::InvalidArgument`] that
    /// names that rank. Errors of the communicator.
    pub fn new(comm: &'c dyn Communicator<Cuda>, buffer: &GradientBuffer<Cuda>, op: ReduceOp) -> Result<Self> {
        Self::prepare(comm, buffer, buffer.dtype(), op, true)
    }

    /// Like [`new`](Self::new), but always uses the communicator's own exchange, even where kernels can access the peers' memory, and sends
    /// the data as `wire`.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new); [`Error::InvalidArgument`] on every rank if `wire` is an integer type on any; [`Error::Disagreement`]
    /// if ranks differ in it.
    pub fn over_transport(
        comm: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        wire: DType,
        op: ReduceOp,
    ) -> Result<Self> {
        Self::prepare(comm, buffer, wire, op, false)
    }

    fn prepare(
        comm: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        wire: DType,
        op: ReduceOp,
        with_peers: bool,
    ) -> Result<Self> {
        let operation = Operation::OrderedAllReduce(op);
        let _scope = scope::within(operation);
        let ways = if with_peers { "peers' memory or transport" } else { "transport" };
        let lines = [("ways", Value::Words(ways)), ("wire", Value::DType(wire))];
        // Without the choice of a dtype for the wire, only the buffers can differ.
        let lines = &lines[..if with_peers { 1 } else { 2 }];
        same_call(operation, comm, buffer.table(), lines, check_op(op).and_then(|()| check_float(OPERATION, wire)))?;
        let connected = if with_peers {
            PeerConnection::new(operation, comm, buffer, (PeerKernel::Reduce, PeerSums::default()), || Ok(()))?
        } else {
            None
        };
        let steps = match connected {
            Some((connection, ())) => Steps::Peers(connection),
            None => Steps::Exchange(Box::new(all_prepared(operation, comm, Exchange::new(comm, buffer, wire))?)),
        };
        Ok(Self { comm, op, wire, made_for: buffer.shared_table(), steps })
    }

    /// The dtype in which the data are sent.
    pub fn wire(&self) -> DType {
        self.wire
    }

    /// The reduction.
    pub fn op(&self) -> ReduceOp {
        self.op
    }

    /// Whether the ranks' kernels access each other's memory, so that no transport is needed.
    pub fn uses_peers(&self) -> bool {
        matches!(self.steps, Steps::Peers(_))
    }

    /// Replaces every rank's buffer by their reduction. Asynchronous, in the buffer's queue.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a buffer with other tensors than the buffer of the preparation; where the peers' kernels access that
    /// buffer, for any other buffer. Errors of the communicator, after which the contents of the buffer are unspecified.
    pub fn all_reduce(&mut self, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        self.reduce(buffer, self.op)
    }

    /// Replaces every rank's buffer by their weighted mean: the sum of the buffers, each multiplied by its rank's share of the weights,
    /// which is at most 1, and rounded.
    ///
    /// # Errors
    /// The errors of [`all_reduce`](Self::all_reduce).
    pub(crate) fn weighted_mean(&mut self, buffer: &mut GradientBuffer<Cuda>, weights: &[f64]) -> Result<()> {
        let share = weights[self.comm.rank()] / weights.iter().sum::<f64>();
        cuda::scale_in_place(buffer.as_mut_slice(), share)?;
        self.reduce(buffer, ReduceOp::Sum)
    }

    /// Replaces every rank's buffer by this reduction of them.
    fn reduce(&mut self, buffer: &mut GradientBuffer<Cuda>, op: ReduceOp) -> Result<()> {
        let operation = Operation::OrderedAllReduce(op);
        let _scope = scope::within(operation);
        buffer.table().check_made_for(OPERATION, &self.made_for)?;
        match &mut self.steps {
            Steps::Peers(connection) => {
                connection.check(OPERATION, buffer)?;
                let _held = buffer.queue().hold();
                connection.keep_for_recording(buffer.queue())?;
                let call = Call::new(operation, buffer.len(), buffer.dtype());
                let factor = factor(op, self.comm.world_size());
                let group = &connection.group;
                peers(self.comm).run_kernels(call, buffer.queue(), &mut || group.reduce(factor))
            }
            Steps::Exchange(exchange) => exchange.run(self.comm, buffer.as_mut_slice(), op),
        }
    }

    /// Like [`all_reduce`](Self::all_reduce), but reduces separate tensors in place. They are copied into `buffer`, which is reduced, and
    /// back, with casts where dtypes differ, in one launch for each of their dtypes.
    ///
    /// # Errors
    /// The errors of [`all_reduce`](Self::all_reduce), [`Error::LengthMismatch`] naming a tensor whose length differs from the buffer's, and
    /// [`Error::InvalidArgument`] for another queue; no tensor is written, but the buffer may be.
    pub fn all_reduce_tensors(
        &mut self,
        buffer: &mut GradientBuffer<Cuda>,
        tensors: &mut [DeviceSliceMut<'_>],
    ) -> Result<()> {
        copy_into(OPERATION, buffer, &tensors.iter().map(DeviceSliceMut::as_slice).collect::<Vec<_>>())?;
        self.all_reduce(buffer)?;
        Cuda::unpack(tensors, buffer.as_slice(), &buffer.table().offsets())
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
    let reason = format!(
        "{op} has no order of additions, as it adds nothing: call all_reduce, whose bits are the same in every run"
    );
    Err(Error::InvalidArgument { operation: OPERATION, reason })
}
