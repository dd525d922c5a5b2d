//! Whole training steps: either gradients are reduced over ranks before the optimizer, or Adasum combines the steps of the optimizers (ONNX
//! Runtime's Adasum optimizer, Horovod's `DistributedOptimizer` with `op=Adasum`).
//!
//! | here | contents |
//! |---|---|
//! | [`Reducer`] | gradients of any program reduced in buckets while they are computed, in host memory and on GPUs |
//! | [`Stepper`] | one step, from rank 0's weights on: check, reduce, optimize, apply; skipped on all ranks where numbers are not finite |
//! | [`Reduction`], [`StepOptions`] | mean, sum or Adasum, and how |
//! | [`Sgd`], [`AdamW`], [`DeltaOptimizer`] | optimizers, on CPUs and GPUs, and the trait for one of your own |
//! | [`Schedule`], [`LossScaler`], [`ParameterGroup`] | the rate in each step, the scale of a loss, options by the names of parameters |
//!
//! A step uses the operations of [`ops`](crate::ops). It keeps no weights and runs no model. [`Stepper`] runs the whole step of optimizers
//! in host memory; [`Reducer`] reduces gradients for optimizers of another crate.

mod metrics;
mod optimizer;
mod random;
pub(crate) mod reducer;
mod same_bits;
mod sampler;
mod start;
mod step;

pub use metrics::{RunningMean, mean_over_ranks};
pub use optimizer::{
    AdamW, AdamWOptions, DeltaOptimizer, LossScaler, Optimizer, OptimizerMemory, OptimizerOptions, ParameterGroup,
    Schedule, Sgd, SgdOptions, TensorStep, UpdateOutcome, UpdateReport,
};
pub use random::RankSeeds;
pub use reducer::{
    AbsentGradients, BucketMemory, BucketTimes, GradientState, NonFinite, NonFiniteGradient, Parameter, Reduced,
    Reducer, ReducerOptions, Step, StepTimes, UnevenEnds,
};
pub use sampler::{Position, ShardOptions, ShardedIndices, Tail};
pub use start::{Start, broadcast_numbers, broadcast_parameters, compare_parameters};
pub use step::{Reduction, StepOptions, StepOutcome, StepReport, Stepper};

use crate::buffer::{GradientBuffer, TensorTable};
use crate::dtype::DType;
use crate::error::{Error, Result, same_len};
use crate::kernels::KernelMemory;

/// Allocates a buffer of zeros for the tensors of `like`, in its memory, in another dtype or for another world size.
fn zeros_like<M: KernelMemory>(like: &GradientBuffer<M>, dtype: DType, world_size: usize) -> Result<GradientBuffer<M>> {
    let tensors = (0..like.tensor_count()).map(|index| (like.name(index), like.shape(index)));
    GradientBuffer::of_arena(TensorTable::new(dtype, world_size, tensors)?, |len| {
        M::zeros_near("gradient buffer", like.as_slice(), dtype, len)
    })
}

/// Refuses buffers whose tensors differ in name, shape or order; dtypes and world sizes may differ.
fn same_tensors(operation: &'static str, left: (&str, &TensorTable), right: (&str, &TensorTable)) -> Result<()> {
    let ((left_name, left), (right_name, right)) = (left, right);
    let counted = |name| format!("the list of {name}");
    let (left_count, right_count) = (counted(left_name), counted(right_name));
    same_len(operation, (&left_count, left.tensor_count()), (&right_count, right.tensor_count()))?;
    for index in 0..left.tensor_count() {
        let (ours, theirs) = (left.name(index), right.name(index));
        if ours != theirs {
            let reason =
                format!("tensor {index} is {ours:?} among the {left_name} and {theirs:?} among the {right_name}");
            return Err(Error::InvalidArgument { operation, reason });
        }
        if left.shape(index) != right.shape(index) {
            let (left, right) = (left.shape(index), right.shape(index));
            let reason = format!(
                "tensor {ours:?} has shape {left:?} among the {left_name} and {right:?} among the {right_name}"
            );
            return Err(Error::InvalidArgument { operation, reason });
        }
    }
    Ok(())
}
