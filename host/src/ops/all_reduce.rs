//! All-reduce of a whole gradient buffer: one collective, whatever the number of tensors (ONNX Runtime's NcclAllReduce).

use crate::agreement::{Value, same_plan};
use crate::buffer::GradientBuffer;
use crate::call::scope;
use crate::comm::{Communicator, ReduceOp, reduce_windows};
use crate::error::{Operation, Result};
use crate::ops::memory_kind;
use crate::slice::SliceMut;

/// Replaces every rank's buffer by the reduction over ranks, in place and without packing.
///
/// The gaps between tensors take part and stay zero. Sums run in `f64` in rank order and are rounded once ([`ReduceOp`]). Buffers in
/// [shared](GradientBuffer::new_shared) memory are reduced where they lie, with the same bits.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the buffer was made for another world size;
/// [`Error::Disagreement`](crate::Error::Disagreement) on every rank if ranks have other tensors, reductions or kinds of memory; and those
/// of [`Communicator::all_reduce`]. After a communicator's error the contents of the buffer are unspecified.
pub fn all_reduce(comm: &dyn Communicator, buffer: &mut GradientBuffer, op: ReduceOp) -> Result<()> {
    let operation = Operation::AllReduce(op);
    let _scope = scope::within(operation);
    same_plan(operation, comm, buffer.table(), &[("memory", Value::Words(memory_kind(buffer)))], Ok(()))?;
    let _span = tracing::debug_span!("all_reduce", rank = comm.rank(), %op, len = buffer.len()).entered();
    if let Some(ranks) = comm.address_space().filter(|_| buffer.is_shared()) {
        let mut reduce = |windows: Vec<SliceMut<'_>>| {
            reduce_windows(windows, op);
            Ok(())
        };
        if ranks.lend_windows(buffer.as_mut_slice(), &mut reduce)? {
            return Ok(());
        }
    }
    comm.all_reduce(buffer.as_mut_slice(), op)
}
