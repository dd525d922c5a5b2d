//! The gradient-control family of ONNX Runtime training: ZeroGradient, InPlaceAccumulator, InPlaceAccumulatorV2.
//!
//! The meanings are ONNX Runtime's, without its gaps: every pair of dtypes, sums in a wider precision with one rounding (ONNX Runtime
//! converts the value to the sum's type first), 64-bit counts, and shapes that are compared instead of broadcast. They run on one rank
//! only, in either memory; on a GPU all work is enqueued into the queue of the operands.

use crate::error::{Error, Result};
use crate::kernels::KernelMemory;
use crate::memory::{TensorView, TensorViewMut};

/// Sets a gradient to zero (ZeroGradient, without its reset signal, which only expresses a dependency in a graph).
///
/// # Errors
/// `Error::Cuda`; never on the host.
pub fn zero_gradient<'a, M: KernelMemory>(gradient: impl Into<TensorViewMut<'a, M>>) -> Result<()> {
    M::zero(gradient.into().into_data())
}

/// Computes `sum += value`, unless `do_update` is `Some(false)`, in which case nothing happens (InPlaceAccumulator).
///
/// Both are widened to `f32`, or to `f64` if either is `f64`, added, and rounded once to the dtype of `sum`.
///
/// # Errors
/// [`Error::ShapeMismatch`] naming both shapes, for any `do_update`; nothing is written.
pub fn in_place_accumulate<'a, 'b, M: KernelMemory>(
    sum: impl Into<TensorViewMut<'a, M>>,
    value: impl Into<TensorView<'b, M>>,
    do_update: Option<bool>,
) -> Result<()> {
    let (sum, value) = (sum.into(), value.into());
    same_shape("in_place_accumulate", &sum, &value)?;
    if do_update == Some(false) {
        return Ok(());
    }
    M::accumulate(sum.into_data(), value.data())
}

/// Replaces `buffer` by `value`, with a cast where dtypes differ, if `overwrite` is set; otherwise adds like [`in_place_accumulate`]
/// (InPlaceAccumulatorV2). Returns the updated flag, which is always `true`. A slice as `value` has one dimension; for a matrix pass
/// `TensorView::new(&value, vec![2, 3])?`.
///
/// # Errors
/// [`Error::ShapeMismatch`] naming both shapes; nothing is written.
pub fn in_place_accumulate_v2<'a, 'b, M: KernelMemory>(
    buffer: impl Into<TensorViewMut<'a, M>>,
    value: impl Into<TensorView<'b, M>>,
    overwrite: bool,
) -> Result<bool> {
    let (buffer, value) = (buffer.into(), value.into());
    same_shape("in_place_accumulate_v2", &buffer, &value)?;
    if overwrite {
        M::cast(buffer.into_data(), value.data())?;
    } else {
        M::accumulate(buffer.into_data(), value.data())?;
    }
    Ok(true)
}

fn same_shape<M: KernelMemory>(
    operation: &'static str,
    left: &TensorViewMut<'_, M>,
    right: &TensorView<'_, M>,
) -> Result<()> {
    if left.shape() == right.shape() {
        return Ok(());
    }
    Err(Error::ShapeMismatch { operation, left: left.shape().to_vec(), right: right.shape().to_vec() })
}
