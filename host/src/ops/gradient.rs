//! Gradient control on one rank, in either memory: clearing, accumulating and overwriting.
//!
//! The meanings are those of ONNX Runtime's ZeroGradient, InPlaceAccumulator and InPlaceAccumulatorV2, without its gaps: every pair of
//! dtypes, sums in a wider precision with one rounding (ONNX Runtime converts the value to the sum's type first), 64-bit counts, and shapes
//! that are compared instead of broadcast. On a GPU all work is enqueued into the queue of the operands.

use crate::error::{Error, Result};
use crate::kernels::KernelMemory;
use crate::memory::{TensorView, TensorViewMut};
use crate::slice::Floats;

/// Sets a gradient to zero (ZeroGradient, without its reset signal, which only expresses a dependency in a graph).
///
/// # Errors
/// `Error::Cuda`; never on the host.
pub fn zero_gradient<'a, M: KernelMemory>(gradient: impl Into<TensorViewMut<'a, M>> + Floats) -> Result<()> {
    M::zero(gradient.into().into_data())
}

/// Computes `sum += value`.
///
/// Both are widened to `f32`, or to `f64` if either is `f64`, added, and rounded once to the dtype of `sum`. A slice as `value` has one
/// dimension; for a matrix pass `TensorView::new(&value, vec![2, 3])?`.
///
/// # Errors
/// [`Error::ShapeMismatch`] naming both shapes; [`Error::InvalidArgument`] for elements that are no floating-point numbers, or not aligned.
/// Nothing is written then.
#[doc(alias("in_place_accumulate", "InPlaceAccumulator"))]
pub fn accumulate<'a, 'b, M: KernelMemory>(
    sum: impl Into<TensorViewMut<'a, M>> + Floats,
    value: impl Into<TensorView<'b, M>> + Floats,
) -> Result<()> {
    let (sum, value) = (sum.into(), value.into());
    same_shape("accumulate", &sum, &value)?;
    M::accumulate(sum.into_data(), value.data())
}

/// Replaces the elements of `destination` by those of `value`, as the first micro-batch of a step does. Values that the dtype of
/// `destination` cannot represent are rounded once, to nearest with ties to even.
///
/// # Errors
/// [`Error::ShapeMismatch`] naming both shapes; [`Error::InvalidArgument`] for elements that are no floating-point numbers, or not aligned.
/// Nothing is written then.
pub fn overwrite<'a, 'b, M: KernelMemory>(
    destination: impl Into<TensorViewMut<'a, M>> + Floats,
    value: impl Into<TensorView<'b, M>> + Floats,
) -> Result<()> {
    let (destination, value) = (destination.into(), value.into());
    same_shape("overwrite", &destination, &value)?;
    M::cast(destination.into_data(), value.data())
}

/// Refuses two tensors of different shapes.
pub(crate) fn same_shape<M: KernelMemory>(
    operation: &'static str,
    left: &TensorViewMut<'_, M>,
    right: &TensorView<'_, M>,
) -> Result<()> {
    if left.shape() == right.shape() {
        return Ok(());
    }
    Err(Error::ShapeMismatch { operation, left: left.shape().to_vec(), right: right.shape().to_vec() })
}
