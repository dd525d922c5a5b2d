//! All-reduces with factors and weights. Factors that NCCL does not apply, or not exactly, are applied by a kernel of this crate, in the
//! operation's queue.

use super::NcclCommunicator;
use super::primitive::{Primitive, RawSlice, Reduction};
use crate::comm::{Ranks, ReduceOp, Scaling};
use crate::driver::{DeviceSlice, DeviceSliceMut, Queue};
use crate::dtype::{DType, Float, with_float};
use crate::error::{Call, Operation, Result};
use crate::kernels::cuda;
use crate::sys::nccl::RedOp;

impl NcclCommunicator {
    /// The reduction by which NCCL computes the reduction of inputs times `before`, and the remaining factor of the result.
    pub(super) fn reduction(&self, op: ReduceOp, dtype: DType, before: f64) -> (Reduction, f64) {
        let world_size = self.world();
        let is_wide = matches!(dtype, DType::F64 | DType::F32) || !dtype.is_float();
        match op {
            // Over one rank, NCCL 2.28 leaves the last elements of scaled sums and means unwritten.
            ReduceOp::Sum | ReduceOp::Mean if world_size == 1 => (Reduction::Plain(RedOp::SUM), before),
            ReduceOp::Max => (Reduction::Plain(RedOp::MAX), 1.0),
            ReduceOp::Min => (Reduction::Plain(RedOp::MIN), 1.0),
            ReduceOp::Sum if before == 1.0 => (Reduction::Plain(RedOp::SUM), 1.0),
            ReduceOp::Sum => (Reduction::ScaledSum(before), 1.0),
            // With a factor that the dtype cannot represent, the mean would be off by the factor's rounding. The next power of two keeps
            // the sum within the range of the mean, and the digits of all but the smallest numbers.
            ReduceOp::Mean if !(is_wide || world_size.is_power_of_two()) => {
                let share = 1.0 / world_size.next_power_of_two() as f64;
                let (reduction, _) = self.reduction(ReduceOp::Sum, dtype, before * share);
                (reduction, 1.0 / (share * world_size as f64))
            }
            ReduceOp::Mean if before == 1.0 => (Reduction::Plain(RedOp::AVG), 1.0),
            ReduceOp::Mean => (Reduction::ScaledSum(before / world_size as f64), 1.0),
        }
    }

    /// An all-reduce of `input` into memory of the same length and dtype, which may be the input itself, under the name of this operation.
    /// Only floats are scaled.
    ///
    /// # Safety
    /// The conditions of [`all_reduce_raw`](Self::all_reduce_raw).
    pub(super) unsafe fn reduce(
        &self,
        (queue, operation): (&Queue, Operation),
        (input, output): (RawSlice, u64),
        op: ReduceOp,
        scaling: Scaling,
    ) -> Result<()> {
        let call = Call::new(operation, input.len, input.dtype);
        // SAFETY: the caller's promise.
        if let Some(done) = unsafe { self.all_reduce_small(queue, call, (input, output), op, scaling) } {
            return done;
        }
        let Scaling { before, after } = scaling;
        let result = RawSlice { address: output, ..input };
        // NCCL's own factor has the dtype's precision, and NCCL has none for maxima.
        let is_wide = matches!(input.dtype, DType::F64 | DType::F32);
        let is_fused = before == 1.0
            || (matches!(op, ReduceOp::Sum | ReduceOp::Mean) && (is_wide || is_exact(before, input.dtype)));
        let (source, fused) = if is_fused {
            (input, before)
        } else {
            // SAFETY: the caller's promise; each element is read before it is written.
            let (to, from) = unsafe {
                (
                    DeviceSliceMut::from_raw_parts(queue, output, input.dtype, input.len),
                    DeviceSlice::from_raw_parts(queue, input.address, input.dtype, input.len),
                )
            };
            cuda::scale(to, from, before)?;
            (result, 1.0)
        };
        let (reduction, rest) = self.reduction(op, input.dtype, fused);
        let primitive = Primitive::AllReduce { input: source, output, reduction };
        // SAFETY: the caller's promise; later work on the operands is ordered after the operation.
        unsafe {
            self.submit(queue, &[call], &[primitive])?;
            scale_in_place(queue, result, rest * after)
        }
    }

    /// The weighted mean of the ranks' inputs: every rank multiplies its own by its share of the weights before the sum, which NCCL
    /// computes in the dtype of the data.
    ///
    /// # Safety
    /// As [`reduce`](Self::reduce).
    pub(super) unsafe fn reduce_weighted(
        &self,
        operation: Operation,
        (input, output): (DeviceSlice<'_>, DeviceSlice<'_>),
        weights: &[f64],
    ) -> Result<()> {
        let (queue, share) = (input.queue(), weights[self.rank()] / weights.iter().sum::<f64>());
        // SAFETY: the caller's promise; each element is read before it is written.
        let operand = unsafe { DeviceSliceMut::from_raw_parts(queue, output.address(), output.dtype(), output.len()) };
        if share == 0.0 { cuda::zero(operand) } else { cuda::scale(operand, input, share) }?;
        // SAFETY: the caller's promise.
        unsafe { self.reduce((queue, operation), (output.into(), output.address()), ReduceOp::Sum, Scaling::NONE) }
    }
}

/// Whether the dtype can represent the factor exactly.
fn is_exact(factor: f64, dtype: DType) -> bool {
    with_float!(dtype, T => <T as Float>::from_f64(factor).to_f64() == factor)
}

/// Multiplies memory by a factor, rounding once.
///
/// # Safety
/// As [`NcclCommunicator::all_reduce_raw`](super::NcclCommunicator::all_reduce_raw).
pub(super) unsafe fn scale_in_place(queue: &Queue, data: RawSlice, factor: f64) -> Result<()> {
    if factor == 1.0 || !data.dtype.is_float() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    let operand = unsafe { DeviceSliceMut::from_raw_parts(queue, data.address, data.dtype, data.len) };
    cuda::scale_in_place(operand, factor)
}
