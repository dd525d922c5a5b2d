//! All-reduce of a whole gradient buffer by one collective, for any number of tensors (ONNX Runtime's NcclAllReduce).

use crate::agreement::{Plan, agree_once};
use crate::buffer::GradientBuffer;
use crate::call::Value;
use crate::call::scope;
use crate::comm::{Collectives, Communicator, ReduceOp, Scaling, reduce_windows};
use crate::error::Result;
use crate::memory::{Host, Memory};
use crate::ops::memory_kind;
use crate::slice::SliceMut;

/// The shortest buffer that is reduced in windows: the operands of shorter ones travel with the call, in fewer rounds.
const LEAST_WINDOW_BYTES: usize = 64 << 10;

/// A kind of memory whose gradient buffers can be reduced as a whole: [`Host`] and `Cuda`.
#[doc(hidden)]
pub trait ReducibleMemory: Memory {
    /// The kind of the gradients' memory, which ranks compare.
    fn kind(buffer: &GradientBuffer<Self>) -> &'static str;

    /// Reduces the ranks' buffers in place in shared windows, to a mean with these weights if there are any; `false`, on every rank, where
    /// that is impossible, or slower than a collective.
    ///
    /// # Errors
    /// The errors of a collective.
    fn reduce_in_windows(
        comm: &dyn Communicator<Self>,
        buffer: &mut GradientBuffer<Self>,
        op: ReduceOp,
        weights: &[f64],
    ) -> Result<bool> {
        let _ = (comm, buffer, op, weights);
        Ok(false)
    }
}

impl ReducibleMemory for Host {
    fn kind(buffer: &GradientBuffer) -> &'static str {
        memory_kind(buffer)
    }

    fn reduce_in_windows(
        comm: &dyn Communicator,
        buffer: &mut GradientBuffer,
        op: ReduceOp,
        weights: &[f64],
    ) -> Result<bool> {
        let is_long = buffer.len() * buffer.dtype().size_bytes() >= LEAST_WINDOW_BYTES;
        let Some(ranks) = comm.sharing().filter(|_| is_long && buffer.is_shared()) else { return Ok(false) };
        let mut reduce = |windows: Vec<SliceMut<'_>>| {
            reduce_windows(windows, op, weights);
            Ok(())
        };
        ranks.with_windows(buffer.as_mut_slice(), &mut reduce)
    }
}

#[cfg(feature = "cuda")]
impl ReducibleMemory for crate::memory::Cuda {
    fn kind(_: &GradientBuffer<Self>) -> &'static str {
        "device memory"
    }
}

/// Replaces every rank's buffer by the reduction over ranks, in place and without packing.
///
/// The gaps between tensors take part and stay zero. On the host, sums run in `f64` in rank order and are rounded once ([`ReduceOp`]);
/// buffers in [shared](GradientBuffer::new_shared) memory are reduced in place, with the same bits. On a GPU, the transport adds;
/// `OrderedAllReduce` is the reproducible form.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the buffer was made for another world size;
/// [`Error::Disagreement`](crate::Error::Disagreement) on every rank if ranks have different tensors, reductions or kinds of memory; the
/// errors of [`Collectives::all_reduce`]. After a communicator's error the contents of the buffer are unspecified.
pub fn all_reduce<M: ReducibleMemory>(
    comm: &dyn Communicator<M>,
    buffer: &mut GradientBuffer<M>,
    op: ReduceOp,
) -> Result<()> {
    all_reduce_scaled(comm, buffer, op, Scaling::NONE)
}

/// Like [`all_reduce`], with factors before and after the reduction.
///
/// # Errors
/// The errors of [`all_reduce`], and [`Error::InvalidArgument`](crate::Error::InvalidArgument) for factors that are not finite.
pub fn all_reduce_scaled<M: ReducibleMemory>(
    comm: &dyn Communicator<M>,
    buffer: &mut GradientBuffer<M>,
    op: ReduceOp,
    scaling: Scaling,
) -> Result<()> {
    let operation = scaling.operation(op);
    let _scope = scope::within(operation).with_tensors(buffer.table().tensor_count());
    let checked = buffer.table().check_world_size(operation.name(), comm.world_size());
    let lines = [("memory", Value::Words(M::kind(buffer)))];
    agree_once(comm, &Plan { lines: &lines, tables: &[("", buffer.table())], ..Plan::of(operation) }, checked)?;
    let _span = tracing::debug_span!("all_reduce", rank = comm.rank(), %op, len = buffer.len()).entered();
    if scaling == Scaling::NONE && M::reduce_in_windows(comm, buffer, op, &[])? {
        return Ok(());
    }
    comm.all_reduce_scaled(buffer.as_mut_slice(), op, scaling)
}
