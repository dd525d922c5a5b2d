//! All-reduce of a whole gradient buffer on the device: one collective, whatever the number of tensors.

use crate::buffer::DeviceGradientBuffer;
use crate::call::scope;
use crate::comm::{DeviceCommunicator, ReduceOp, Scaling};
use crate::error::Result;

/// Replaces every rank's buffer by the reduction over ranks, in place and without packing; the gaps between tensors take part and
/// stay zero.
///
/// Every rank's buffer must hold the same tensors; [`OrderedAllReduce`](super::OrderedAllReduce) is the reproducible form.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the buffer was made for another world size; those of
/// [`DeviceCommunicator::all_reduce`].
pub fn all_reduce(
    comm: &dyn DeviceCommunicator,
    buffer: &mut DeviceGradientBuffer,
    op: ReduceOp,
    scaling: Scaling,
) -> Result<()> {
    let _scope = scope::within(scaling.operation(op));
    buffer.table().check_world_size("all_reduce", comm.world_size())?;
    comm.all_reduce(buffer.as_mut_slice(), op, scaling)
}
