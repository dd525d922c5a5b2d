//! [`adasum`]: Adasum of a vector or slice, without a gradient buffer.

use super::{AdasumOptions, AdasumReport, adasum_all_reduce};
use crate::buffer::GradientBuffer;
use crate::call_comparison::all_prepared;
use crate::comm::Communicator;
use crate::error::{Operation, Result};
use crate::memory::{Host, Memory};
use crate::slice::{Floats, SliceMut};

/// Replaces every rank's `data`, a vector, slice or array in host memory, by the Adasum of all ranks' data as one layer, in place:
/// [`adasum_all_reduce`] with default options.
///
/// The data are copied to a new [`GradientBuffer`] and back. A training loop keeps a buffer, and an [`Adasum`](super::Adasum) for it.
///
/// ```
/// use gradsync::prelude::*;
///
/// let combined = local::run(2, |comm| {
///     let mut gradient = [vec![1.0f32, 0.0], vec![0.0, 3.0]][comm.rank()].clone();
///     adasum(&comm, &mut gradient)?;
///     Ok(gradient)
/// })?;
/// assert_eq!(combined, [[1.0, 3.0]; 2]); // orthogonal vectors are added
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// [`Error::Disagreement`](crate::Error::Disagreement) on every rank if ranks have different lengths or dtypes;
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory) for the buffer, which other ranks get as
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument). The data are unchanged after any error.
pub fn adasum<'a>(comm: &dyn Communicator, data: impl Into<SliceMut<'a>> + Floats) -> Result<AdasumReport> {
    let (data, options) = (data.into(), AdasumOptions::default());
    let buffer = GradientBuffer::new(data.dtype(), comm.world_size(), [("data", [data.len()])]);
    let mut buffer = all_prepared(Operation::AdasumAllReduce(options), comm, buffer)?;
    buffer.tensor_mut(0).copy_from_slice(data.as_slice())?;
    let report = adasum_all_reduce(comm, &mut buffer, options)?;
    Host::copy_from_slice(data, buffer.tensor(0).data())?;
    Ok(report)
}
