//! [`Collectives`]: the calls of every communicator by name.

use super::{Collective, Communicator, Operands, ReduceOp, Scaling};
use crate::call::scope;
use crate::dtype::Float;
use crate::error::{Operation, Result};
use crate::memory::{Host, Memory};
use crate::slice::Floats;

/// The collectives and transfers of a [`Communicator`], after MPI-4.1 chapters 3 and 6 and NCCL's API of the same names.
///
/// Operands are slices, arrays and vectors on the host, and buffers and slices of device memory on a GPU. [`Communicator`] documents
/// which arguments must be equal on all ranks, when a call waits, and its errors.
///
/// ```
/// use gradsync::prelude::*;
///
/// let sums = local::run(3, |comm| {
///     let mut gradients = vec![comm.rank() as f32 + 1.0; 4];
///     comm.all_reduce(&mut gradients, ReduceOp::Sum)?;
///     Ok(gradients)
/// })?;
/// assert_eq!(sums, [[6.0; 4]; 3]);
/// # Ok::<(), Error>(())
/// ```
pub trait Collectives<M: Memory = Host>: Communicator<M> {
    /// Replaces every rank's data by their reduction (MPI_Allreduce in place, 6.9.6).
    ///
    /// # Errors
    /// The errors of every call.
    fn all_reduce<'a>(&self, data: impl Into<M::SliceMut<'a>> + Floats, op: ReduceOp) -> Result<()> {
        self.run(Collective::AllReduce { operands: Operands::InPlace(data.into()), op, scaling: Scaling::NONE })
    }

    /// The reduction of every rank's `value`, such as the mean of the ranks' losses, over a transport of host memory.
    ///
    /// # Errors
    /// The errors of every call.
    fn all_reduce_scalar<T: Float>(&self, value: T, op: ReduceOp) -> Result<T>
    where
        Self: Communicator<Host>,
    {
        let mut reduced = [value];
        let operands = Operands::InPlace((&mut reduced).into());
        Communicator::<Host>::run(self, Collective::AllReduce { operands, op, scaling: Scaling::NONE })?;
        Ok(reduced[0])
    }

    /// Like [`all_reduce`](Self::all_reduce), with factors before and after the reduction.
    ///
    /// # Errors
    /// As for that method, and [`Error::InvalidArgument`](crate::Error::InvalidArgument) for factors that are not finite.
    fn all_reduce_scaled<'a>(
        &self,
        data: impl Into<M::SliceMut<'a>> + Floats,
        op: ReduceOp,
        scaling: Scaling,
    ) -> Result<()> {
        self.run(Collective::AllReduce { operands: Operands::InPlace(data.into()), op, scaling })
    }

    /// Replaces every rank's data by their weighted mean, `Σ weights[r] × data of rank r / Σ weights`: with the ranks' numbers of examples
    /// as weights, the mean over all examples. The weights, one for each rank, are equal on all ranks. Nothing is read from a rank of
    /// weight 0.
    ///
    /// On host memory, and over MPI, products are added in `f64` in rank order, and the sum is divided and rounded once; no intermediate
    /// value overflows. Weights of 1 give the bits of [`ReduceOp::Mean`]. NCCL adds in the dtype of the data: every rank's data are
    /// multiplied by `weights[r] / Σ weights`, which is at most 1, and rounded before the sum, in one more pass over memory.
    ///
    /// # Errors
    /// The errors of every call, [`Error::LengthMismatch`](crate::Error::LengthMismatch) for another number of weights than ranks, and
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a negative weight, or a sum that is not positive and finite.
    fn all_reduce_weighted<'a>(&self, data: impl Into<M::SliceMut<'a>> + Floats, weights: &'a [f64]) -> Result<()> {
        self.run(Collective::WeightedMean { operands: Operands::InPlace(data.into()), weights })
    }

    /// Like [`all_reduce_scaled`](Self::all_reduce_scaled), with a separate output (MPI_Allreduce, 6.9.6; ncclAllReduce).
    ///
    /// # Errors
    /// As for that method.
    fn all_reduce_into<'a>(
        &self,
        input: impl Into<M::Slice<'a>> + Floats,
        output: impl Into<M::SliceMut<'a>> + Floats,
        op: ReduceOp,
        scaling: Scaling,
    ) -> Result<()> {
        let operands = Operands::Apart { input: input.into(), output: output.into() };
        self.run(Collective::AllReduce { operands, op, scaling })
    }

    /// Reduces the ranks' inputs and leaves shard `rank` of the result in `output`; `input` holds `world_size` shards of
    /// `output`'s length (MPI_Reduce_scatter_block, 6.10.1; ncclReduceScatter).
    ///
    /// # Errors
    /// The errors of every call.
    fn reduce_scatter<'a>(
        &self,
        input: impl Into<M::Slice<'a>> + Floats,
        output: impl Into<M::SliceMut<'a>> + Floats,
        op: ReduceOp,
    ) -> Result<()> {
        let operands = Operands::Apart { input: input.into(), output: output.into() };
        self.run(Collective::ReduceScatter { operands, op })
    }

    /// Like [`reduce_scatter`](Self::reduce_scatter), but writes the result to this rank's shard of `data`. The other shards are
    /// unspecified afterwards. `data`'s length must be a multiple of the world size.
    ///
    /// # Errors
    /// The errors of every call.
    fn reduce_scatter_in_place<'a>(&self, data: impl Into<M::SliceMut<'a>> + Floats, op: ReduceOp) -> Result<()> {
        self.run(Collective::ReduceScatter { operands: Operands::InPlace(data.into()), op })
    }

    /// Concatenates the ranks' inputs, in rank order, on every rank (MPI_Allgather, 6.7; ncclAllGather).
    ///
    /// # Errors
    /// The errors of every call.
    fn all_gather<'a>(&self, input: impl Into<M::Slice<'a>>, output: impl Into<M::SliceMut<'a>>) -> Result<()> {
        let operands = Operands::Apart { input: input.into(), output: output.into() };
        self.run(Collective::AllGather { operands })
    }

    /// Like [`all_gather`](Self::all_gather), but in place: each rank's shard is already in `data`, whose length must be a multiple of
    /// the world size.
    ///
    /// # Errors
    /// The errors of every call.
    fn all_gather_in_place<'a>(&self, data: impl Into<M::SliceMut<'a>>) -> Result<()> {
        self.run(Collective::AllGather { operands: Operands::InPlace(data.into()) })
    }

    /// Sends shard `p` of `input` to rank `p`, and receives rank `p`'s shard for this rank into shard `p` of `output`
    /// (MPI_Alltoall, 6.8).
    ///
    /// # Errors
    /// The errors of every call.
    fn all_to_all<'a>(&self, input: impl Into<M::Slice<'a>>, output: impl Into<M::SliceMut<'a>>) -> Result<()> {
        let operands = Operands::Apart { input: input.into(), output: output.into() };
        self.run(Collective::AllToAll { operands })
    }

    /// Like [`all_to_all`](Self::all_to_all), but in place (MPI_IN_PLACE): shard `p` of `data` is sent to rank `p`, and replaced by rank
    /// `p`'s shard for this rank. `data`'s length must be a multiple of the world size. Each rank may choose to be in place or not. NCCL
    /// has no such call, so GPU memory is copied first, to memory that this call allocates; a CUDA graph cannot record that.
    ///
    /// # Errors
    /// The errors of every call.
    fn all_to_all_in_place<'a>(&self, data: impl Into<M::SliceMut<'a>>) -> Result<()> {
        self.run(Collective::AllToAll { operands: Operands::InPlace(data.into()) })
    }

    /// Copies the data of rank `root` to every rank (MPI_Bcast, 6.4; ncclBroadcast).
    ///
    /// # Errors
    /// The errors of every call, and [`CommError::InvalidPeer`](crate::CommError::InvalidPeer) for a root that does not exist.
    fn broadcast<'a>(&self, data: impl Into<M::SliceMut<'a>>, root: usize) -> Result<()> {
        self.run(Collective::Broadcast { data: data.into(), root })
    }

    /// Sends to another rank and waits until that rank has [received](Self::recv) the data (MPI_Ssend, 3.4); on a GPU the queue waits, and
    /// the call returns.
    ///
    /// # Errors
    /// As [`Communicator::exchange`].
    fn send<'a>(&self, data: impl Into<M::Slice<'a>>, peer: usize) -> Result<()> {
        self.exchange(&[(peer, data.into())], &mut [])
    }

    /// Receives from another rank (MPI_Recv, 3.2.4); count and type must equal the sender's.
    ///
    /// # Errors
    /// As [`Communicator::exchange`].
    fn recv<'a>(&self, data: impl Into<M::SliceMut<'a>>, peer: usize) -> Result<()> {
        self.exchange(&[], &mut [(peer, data.into())])
    }

    /// Sends to one rank and receives from the same or another rank, at once, so that two ranks can exchange data (MPI_Sendrecv, 3.10).
    ///
    /// # Errors
    /// As [`Communicator::exchange`].
    fn send_recv<'a>(
        &self,
        send: impl Into<M::Slice<'a>>,
        to: usize,
        recv: impl Into<M::SliceMut<'a>>,
        from: usize,
    ) -> Result<()> {
        let _scope = scope::within(Operation::SendRecv { to, from });
        self.exchange(&[(to, send.into())], &mut [(from, recv.into())])
    }
}

impl<M: Memory, C: Communicator<M> + ?Sized> Collectives<M> for C {}
