//! Collectives on raw memory, of any type that NCCL moves, for communicators of other crates' tensors.

use super::all_reduce::scale_in_place;
use super::primitive::{Primitive, RawSlice};
use super::{NcclCommunicator, group};
use crate::comm::collective_call::check_root;
use crate::comm::{Ranks, ReduceOp, Scaling};
use crate::driver::DeviceSlice;
use crate::dtype::DType;
use crate::error::{Call, Error, Operation, Result, same_len};

impl NcclCommunicator {
    /// [`all_reduce_into`](crate::comm::Collectives::all_reduce_into) on raw memory, of any type that NCCL has; in place where both
    /// addresses are equal. Means of integers round towards zero, as NCCL's do.
    ///
    /// # Errors
    /// As for that method, and [`Error::InvalidArgument`] for `i16`, `u16` and `bool`, which NCCL does not reduce.
    ///
    /// # Safety
    /// There are `input.len()` elements of `input.dtype()` at both addresses, on this rank's device, valid until the input's queue has
    /// passed the operation, not used meanwhile by work that is not ordered on that queue, and either the same or not overlapping.
    pub unsafe fn all_reduce_raw(&self, input: DeviceSlice<'_>, output: u64, op: ReduceOp) -> Result<()> {
        let operation = Operation::AllReduce(op);
        self.refused(operation, check_reducible("all_reduce", input.dtype()))?;
        // SAFETY: the caller's promise.
        unsafe { self.reduce((input.queue(), operation), (input.into(), output), op, Scaling::NONE) }
    }

    /// [`reduce_scatter`](crate::comm::Collectives::reduce_scatter) on raw memory; `input` holds `world_size` shards of `output.len()`,
    /// which is written.
    ///
    /// # Errors
    /// As for that method, and [`Error::InvalidArgument`] for `i16`, `u16` and `bool`, which NCCL does not reduce.
    ///
    /// # Safety
    /// Like [`all_reduce_raw`](Self::all_reduce_raw), where `output` may be shard `rank` of the input.
    pub unsafe fn reduce_scatter_raw(&self, input: u64, output: DeviceSlice<'_>, op: ReduceOp) -> Result<()> {
        let (queue, output) = (output.queue(), RawSlice::from(output));
        let call = Call::new(Operation::ReduceScatter(op), output.len, output.dtype);
        self.refused(call.operation, check_reducible("reduce_scatter", output.dtype))?;
        let (reduction, after) = self.reduction(op, output.dtype, 1.0);
        // SAFETY: the caller's promise.
        unsafe { self.submit(queue, &[call], &[Primitive::ReduceScatter { input, output, reduction }]) }?;
        // SAFETY: the caller's promise.
        unsafe { scale_in_place(queue, output, after) }
    }

    /// [`all_gather`](crate::comm::Collectives::all_gather) on raw memory; `output` has room for `world_size` times `input.len()`.
    ///
    /// # Errors
    /// As for that method.
    ///
    /// # Safety
    /// Like [`all_reduce_raw`](Self::all_reduce_raw), where `input` may be shard `rank` of the output.
    pub unsafe fn all_gather_raw(&self, input: DeviceSlice<'_>, output: u64) -> Result<()> {
        let call = Call::new(Operation::AllGather, input.len(), input.dtype());
        let primitives = group::all_gather(input.into(), output, (self.rank(), self.world()));
        // SAFETY: the caller's promise.
        unsafe { self.submit(input.queue(), &[call], &primitives) }
    }

    /// [`all_to_all`](crate::comm::Collectives::all_to_all) on raw memory; `output` has room for `input.len()` elements.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] for a length that is no multiple of the world size, and as there.
    ///
    /// # Safety
    /// As [`all_reduce_raw`](Self::all_reduce_raw); the two may not be the same.
    pub unsafe fn all_to_all_raw(&self, input: DeviceSlice<'_>, output: u64) -> Result<()> {
        let shards = input.len() / self.world() * self.world();
        self.refused(Operation::AllToAll, same_len("all_to_all", ("input", input.len()), ("equal shards", shards)))?;
        let call = Call::new(Operation::AllToAll, input.len(), input.dtype());
        let raw = RawSlice::from(input);
        let primitives = group::all_to_all(raw, RawSlice { address: output, ..raw }, self.world());
        // SAFETY: the caller's promise.
        unsafe { self.submit(input.queue(), &[call], &primitives) }
    }

    /// [`broadcast`](crate::comm::Collectives::broadcast) on raw memory.
    ///
    /// # Errors
    /// As for that method.
    ///
    /// # Safety
    /// Like [`all_reduce_raw`](Self::all_reduce_raw), for the one operand, which is written on all ranks but the root.
    pub unsafe fn broadcast_raw(&self, data: DeviceSlice<'_>, root: usize) -> Result<()> {
        let operation = Operation::Broadcast { root };
        self.refused(operation, check_root(operation, root, self.rank(), self.world()))?;
        let call = Call::new(operation, data.len(), data.dtype());
        // SAFETY: the caller's promise.
        unsafe { self.submit(data.queue(), &[call], &[Primitive::Broadcast { data: data.into(), root }]) }
    }
}

/// Refuses to reduce elements of a type that NCCL only moves, as bytes.
fn check_reducible(operation: &'static str, dtype: DType) -> Result<()> {
    if dtype.nccl_code().is_some() {
        return Ok(());
    }
    let reason = format!("NCCL does not reduce elements of {dtype}; it only moves them");
    Err(Error::InvalidArgument { operation, reason })
}
