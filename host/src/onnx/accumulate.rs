//! InPlaceAccumulator and InPlaceAccumulatorV2, with their switches, in either memory.

use crate::error::Result;
use crate::kernels::KernelMemory;
use crate::memory::{TensorView, TensorViewMut};
use crate::ops::same_shape;
use crate::slice::Floats;

/// Computes `sum += value`, unless `do_update` is `Some(false)`, in which case nothing happens (InPlaceAccumulator).
///
/// The numerics are those of [`ops::accumulate`](crate::ops::accumulate).
///
/// # Errors
/// [`Error::ShapeMismatch`](crate::Error::ShapeMismatch) naming both shapes, for any `do_update`; otherwise as
/// [`ops::accumulate`](crate::ops::accumulate). Nothing is written then.
#[doc(alias = "InPlaceAccumulator")]
pub fn in_place_accumulator<'a, 'b, M: KernelMemory>(
    sum: impl Into<TensorViewMut<'a, M>> + Floats,
    value: impl Into<TensorView<'b, M>> + Floats,
    do_update: Option<bool>,
) -> Result<()> {
    let (sum, value) = (sum.into(), value.into());
    same_shape("in_place_accumulator", &sum, &value)?;
    if do_update == Some(false) {
        return Ok(());
    }
    M::accumulate(sum.into_data(), value.data())
}

/// Replaces `buffer` by `value`, with a cast where dtypes differ, if `overwrite` is set; otherwise adds like [`in_place_accumulator`]
/// (InPlaceAccumulatorV2). Returns the updated flag, which is always `true`.
///
/// # Errors
/// As [`ops::accumulate`](crate::ops::accumulate).
#[doc(alias = "InPlaceAccumulatorV2")]
pub fn in_place_accumulator_v2<'a, 'b, M: KernelMemory>(
    buffer: impl Into<TensorViewMut<'a, M>> + Floats,
    value: impl Into<TensorView<'b, M>> + Floats,
    overwrite: bool,
) -> Result<bool> {
    let (buffer, value) = (buffer.into(), value.into());
    same_shape("in_place_accumulator_v2", &buffer, &value)?;
    if overwrite {
        M::cast(buffer.into_data(), value.data())?;
    } else {
        M::accumulate(buffer.into_data(), value.data())?;
    }
    Ok(true)
}
