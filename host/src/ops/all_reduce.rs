//! All-reduce of a whole gradient buffer: one collective, whatever the number of tensors (ONNX Runtime's NcclAllReduce).

use crate::buffer::GradientBuffer;
use crate::comm::{Communicator, ReduceOp};
use crate::error::Result;

/// Replaces every rank's buffer by the reduction over ranks, in place and without packing.
///
/// The gaps between tensors take part and stay zero. Sums run in `f64` in rank order and are rounded once ([`ReduceOp`]).
///
/// # Errors
/// Those of [`Communicator::all_reduce`]. On failure the contents of the buffer are unspecified.
pub fn all_reduce(comm: &dyn Communicator, buffer: &mut GradientBuffer, op: ReduceOp) -> Result<()> {
    let _span = tracing::debug_span!("all_reduce", rank = comm.rank(), %op, len = buffer.len()).entered();
    comm.all_reduce(buffer.as_mut_slice(), op)
}
