//! All-reduce of a whole gradient buffer on the device: one collective, whatever the number of tensors.

use crate::buffer::DeviceGradientBuffer;
use crate::comm::{DeviceCommunicator, ReduceOp, Scaling};
use crate::error::{Error, Result};

/// Replaces every rank's buffer by the reduction over ranks, in place and without packing; the gaps between tensors take part and
/// stay zero.
///
/// Every rank's buffer must hold the same tensors; [`OrderedAllReduce`](super::OrderedAllReduce) is the reproducible form.
///
/// # Errors
/// [`Error::InvalidArgument`] if the buffer was made for another world size; those of
/// [`DeviceCommunicator::all_reduce`].
pub fn all_reduce(
    comm: &dyn DeviceCommunicator,
    buffer: &mut DeviceGradientBuffer,
    op: ReduceOp,
    scaling: Scaling,
) -> Result<()> {
    let (world_size, planned) = (comm.world_size(), buffer.table().world_size());
    if planned != world_size {
        let reason = format!("the buffer is shared out over {planned} ranks, the world has {world_size}");
        return Err(Error::InvalidArgument { operation: "all_reduce", reason });
    }
    comm.all_reduce(buffer.as_mut_slice(), op, scaling)
}
