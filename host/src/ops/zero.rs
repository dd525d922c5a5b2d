//! [`ZeroPartition`]: gradients and parameters divided among ranks, so that each rank keeps the optimizer's state of its shard only (ZeRO,
//! Rajbhandari et al., arXiv 1910.02054).
//!
//! `plan::zero` assigns the elements to ranks; the optimizer is the caller's.

use std::sync::Arc;

use crate::buffer::{GradientBuffer, TensorTable};
use crate::call::scope;
use crate::call_comparison::same_call;
use crate::comm::{Collectives, Communicator, ReduceOp};
use crate::error::{Operation, Result};
use crate::memory::{Host, Memory};
use crate::plan::zero::{ZeroPart, partition, parts_of};

const OPERATION: Operation = Operation::ZeroPartition;

/// The division of a buffer's elements over the ranks that update them.
///
/// A step reduce-scatters the gradients, updates the elements of [`parts`](Self::parts) in the parameters, and all-gathers the parameters.
#[derive(Debug)]
pub struct ZeroPartition<'c, M: Memory = Host> {
    comm: &'c dyn Communicator<M>,
    made_for: Arc<TensorTable>,
    parts: Vec<ZeroPart>,
}

impl<'c, M: Memory> ZeroPartition<'c, M> {
    /// Divides buffers with the tensors of `buffer` among the ranks; every rank must call it. The host waits for the other ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the buffer was made for another world size;
    /// [`Error::Disagreement`](crate::Error::Disagreement) on every rank if ranks have different tensors; errors of the communicator.
    pub fn new(comm: &'c dyn Communicator<M>, buffer: &GradientBuffer<M>) -> Result<Self> {
        let table = buffer.table();
        same_call(OPERATION, comm, table, &[], Ok(()))?;
        let parts = partition(table.segments(), table.shard_len(), table.world_size())?;
        Ok(Self { comm, made_for: buffer.shared_table(), parts })
    }

    /// The parts of tensors that this rank updates, in order.
    pub fn parts(&self) -> &[ZeroPart] {
        parts_of(&self.parts, self.comm.rank())
    }

    /// The parts of all tensors, in order, with the ranks that update them.
    pub fn all_parts(&self) -> &[ZeroPart] {
        &self.parts
    }

    /// Replaces this rank's shard of the gradients by their reduction over ranks; the other shards are unspecified afterwards.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a buffer with other tensors; the errors of
    /// [`Collectives::reduce_scatter_in_place`].
    pub fn reduce_scatter(&self, gradients: &mut GradientBuffer<M>, op: ReduceOp) -> Result<()> {
        let _scope = scope::within(OPERATION).with_tensors(gradients.table().tensor_count());
        self.check(gradients)?;
        self.comm.reduce_scatter_in_place(gradients.as_mut_slice(), op)
    }

    /// Replaces every rank's parameters by the shards that their owners have updated.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a buffer with other tensors; the errors of
    /// [`Collectives::all_gather_in_place`].
    pub fn all_gather(&self, parameters: &mut GradientBuffer<M>) -> Result<()> {
        let _scope = scope::within(OPERATION).with_tensors(parameters.table().tensor_count());
        self.check(parameters)?;
        self.comm.all_gather_in_place(parameters.as_mut_slice())
    }

    fn check(&self, buffer: &GradientBuffer<M>) -> Result<()> {
        buffer.table().check_made_for(OPERATION.name(), &self.made_for)
    }
}
