//! All-reduce of a whole gradient buffer by one collective, for any number of tensors (ONNX Runtime's NcclAllReduce).

use crate::buffer::GradientBuffer;
use crate::call::{Value, scope};
use crate::call_comparison::{ComparedCall, agree_once};
use crate::comm::{Collectives, Communicator, ReduceOp, Scaling, reduce_windows};
use crate::error::Result;
use crate::memory::Memory;

/// The shortest buffer that is reduced in windows: the operands of shorter ones travel with the call, in fewer rounds.
const LEAST_WINDOW_BYTES: usize = 64 << 10;

/// Reduces the ranks' buffers in place in shared windows, to a mean with these weights if there are any; `false`, on every rank, where that
/// is impossible, or slower than a collective.
pub(crate) fn reduce_in_windows<M: Memory>(
    comm: &dyn Communicator<M>,
    buffer: &mut GradientBuffer<M>,
    op: ReduceOp,
    weights: &[f64],
) -> Result<bool> {
    let is_long = buffer.len() * buffer.dtype().size_bytes() >= LEAST_WINDOW_BYTES;
    let Some(sharing) = comm.sharing().filter(|_| is_long) else { return Ok(false) };
    buffer.with_windows(sharing, &mut |windows| {
        reduce_windows(windows, op, weights);
        Ok(())
    })
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
pub fn all_reduce<M: Memory>(comm: &dyn Communicator<M>, buffer: &mut GradientBuffer<M>, op: ReduceOp) -> Result<()> {
    all_reduce_scaled(comm, buffer, op, Scaling::NONE)
}

/// Like [`all_reduce`], with factors before and after the reduction.
///
/// # Errors
/// The errors of [`all_reduce`], and [`Error::InvalidArgument`](crate::Error::InvalidArgument) for factors that are not finite.
pub fn all_reduce_scaled<M: Memory>(
    comm: &dyn Communicator<M>,
    buffer: &mut GradientBuffer<M>,
    op: ReduceOp,
    scaling: Scaling,
) -> Result<()> {
    let operation = scaling.operation(op);
    let _scope = scope::within(operation).with_tensors(buffer.table().tensor_count());
    let checked = buffer.table().check_world_size(operation.name(), comm.world_size());
    let lines = [("memory", Value::Words(buffer.memory_kind()))];
    agree_once(
        comm,
        &ComparedCall { lines: &lines, tables: &[("", buffer.table())], ..ComparedCall::of(operation) },
        checked,
    )?;
    let _span = tracing::debug_span!("all_reduce", rank = comm.rank(), %op, len = buffer.len()).entered();
    if scaling == Scaling::NONE && reduce_in_windows(comm, buffer, op, &[])? {
        return Ok(());
    }
    comm.all_reduce_scaled(buffer.as_mut_slice(), op, scaling)
}
