//! Tensor parallelism: collectives with their adjoints, like TransformerEngine's fusible operations.
//!
//! A layer whose weights are divided among ranks needs a collective in its forward pass and the adjoint of that collective in its backward
//! pass. Each [`TensorOp`] here is such a pair; a [`Pipeline`] runs several in sequence, including the caller's own layers.
//!
//! | operation | forward | backward |
//! |---|---|---|
//! | [`AllReduce`] | sum over the ranks | identity |
//! | [`AllReduceGradient`] | identity | sum over the ranks |
//! | [`AllGather`] | concatenates along dimension 0 | sums, and keeps this rank's part of dimension 0 |
//! | [`ReduceScatter`] | sums, and keeps this rank's part of dimension 0 | concatenates along dimension 0 |
//!
//! The same operations serve an [`OwnedTensor`] of `f64`, `f32`, `f16` or `bf16` in host memory, over any [`Communicator`], and with the
//! feature `cuda` an `OwnedTensor<Cuda>`, over any `Communicator<Cuda>`. On the host, calls block. On the device they enqueue work into the
//! tensor's queue and return.
//!
//! Operations take tensors by value and return them: they never write to memory that the caller still owns, and a group of one rank returns
//! its argument. Nothing here computes a layer, keeps a tensor, or holds parameters.
//!
//! # Numerics
//!
//! Sums have the same bits on every rank. On the host they run in `f64` in rank order and are rounded once. On the device the transport
//! adds: NCCL in the tensor's dtype, in an order that depends on the length and on the machine, and the kernels of small all-reduces of
//! `NcclCommunicator` in `f64` in rank order, so that [`AllReduce`], and
//! [`ReduceScatter`] followed by [`AllGather`], may differ in their last bits. The other directions move bits and compute nothing.
//!
//! # Agreement
//!
//! Ranks compare their calls before any data move: another shape, dtype, operation or direction on one rank is an
//! [`Error::Disagreement`](crate::Error::Disagreement) on every rank that names two ranks and quotes the call of each; the group stays
//! usable. Identities compare nothing and accept everything.
//!
//! On the host every call is compared. On the device that would make the host wait for all others each time, so the communicator decides. A
//! communicator that remembers what its ranks have agreed on, as `NcclCommunicator` does, compares the first call of each operation,
//! direction, dtype and shape, and of each pipeline's pass; after that the host never waits. With `NcclOptions::checks`, which is on by
//! default, the later calls are compared without waiting, like all calls of that communicator: a call that differs on one rank ends the
//! group with an error, by the next `synchronize` at the latest. Without it, a different order of known calls is not detected, and a call
//! that is new to one rank only is an error at the deadline, which quotes no call.

mod collective;
#[cfg(feature = "cuda")]
mod device;
mod host;
mod pipeline;
mod tensor;

pub use pipeline::Pipeline;
pub use tensor::OwnedTensor;
// Hidden: the bound of code that is written once for both memories.
#[doc(hidden)]
pub use tensor::OwnedTensorMemory;

use crate::comm::Communicator;
use crate::error::{Pass, Result};
use crate::memory::Host;

/// A step of a computation with its adjoint: a collective of this module, or a layer of the caller's.
///
/// All ranks of the communicator call the same operation in the same order; the [module](self) describes how they compare. An error drops
/// the tensor that was passed. If a single rank fails after the comparison, for example for lack of memory, the others wait for it until it
/// drops its communicator or their deadline is over.
// The tensor is the parameter before the communicator, because types are inferred from left to right and it determines the communicator's
// type.
pub trait TensorOp<M: OwnedTensorMemory = Host>: Send {
    /// The operation's name in errors.
    fn name(&self) -> &str;

    /// Computes the output for an input.
    ///
    /// # Errors
    /// Refusals of the operation, and errors of its communication.
    fn forward(&mut self, input: OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<OwnedTensor<M>>;

    /// Computes the gradient with respect to the input, from the gradient with respect to the output of the last
    /// [`forward`](Self::forward).
    ///
    /// # Errors
    /// Refusals of the operation, and errors of its communication.
    fn backward(&mut self, gradient: OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<OwnedTensor<M>>;
}

/// Sums the ranks' tensors; the gradient is unchanged, since it is already the same on all ranks (Megatron-LM's *g*).
///
/// This is the all-reduce after a layer whose weight is divided by input columns ("row-parallel"). It works in place.
///
/// ```
/// use gradsync::comm::local;
/// use gradsync::ops::tensor_parallel::{AllReduce, OwnedTensor, TensorOp};
///
/// let sums = local::run(2, |comm| {
///     let partial = OwnedTensor::new(vec![1.0f32, 2.0, 3.0], [1, 3])?;
///     AllReduce.forward(partial, &comm)
/// })?;
/// for sum in sums {
///     assert_eq!(sum.into_vec::<f32>()?, [2.0, 4.0, 6.0]);
/// }
/// # Ok::<(), gradsync::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct AllReduce;

/// Returns the tensor unchanged and sums the ranks' gradients: the adjoint of [`AllReduce`] (Megatron-LM's *f*, its "copy to the
/// tensor-parallel region").
///
/// This is the all-reduce of gradients before a layer whose weight is divided by output rows ("column-parallel"): all ranks read one input,
/// and each computes only its part of the gradient with respect to it.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllReduceGradient;

/// Concatenates the ranks' tensors along dimension 0, in rank order; every rank keeps its part of the summed gradient.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming shape and world size for a tensor without a dimension 0, forward, and
/// for a gradient whose dimension 0 is not divisible by the world size, backward.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllGather;

/// Sums the ranks' tensors and keeps this rank's part of dimension 0; gradients are concatenated along it: the adjoint
/// of [`AllGather`].
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming shape and world size for a tensor whose dimension 0 is missing or not
/// divisible by the world size, forward, and for a gradient without a dimension 0, backward.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReduceScatter;

impl<M: OwnedTensorMemory> TensorOp<M> for AllReduce {
    fn name(&self) -> &str {
        "AllReduce"
    }

    fn forward(&mut self, input: OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<OwnedTensor<M>> {
        collective::sum(Pass::AllReduceForward, input, comm)
    }

    fn backward(&mut self, gradient: OwnedTensor<M>, _: &dyn Communicator<M>) -> Result<OwnedTensor<M>> {
        Ok(gradient)
    }
}

impl<M: OwnedTensorMemory> TensorOp<M> for AllReduceGradient {
    fn name(&self) -> &str {
        "AllReduceGradient"
    }

    fn forward(&mut self, input: OwnedTensor<M>, _: &dyn Communicator<M>) -> Result<OwnedTensor<M>> {
        Ok(input)
    }

    fn backward(&mut self, gradient: OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<OwnedTensor<M>> {
        collective::sum(Pass::AllReduceGradientBackward, gradient, comm)
    }
}

impl<M: OwnedTensorMemory> TensorOp<M> for AllGather {
    fn name(&self) -> &str {
        "AllGather"
    }

    fn forward(&mut self, input: OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<OwnedTensor<M>> {
        collective::concatenate(Pass::AllGatherForward, input, comm)
    }

    fn backward(&mut self, gradient: OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<OwnedTensor<M>> {
        collective::sum_part(Pass::AllGatherBackward, gradient, comm)
    }
}

impl<M: OwnedTensorMemory> TensorOp<M> for ReduceScatter {
    fn name(&self) -> &str {
        "ReduceScatter"
    }

    fn forward(&mut self, input: OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<OwnedTensor<M>> {
        collective::sum_part(Pass::ReduceScatterForward, input, comm)
    }

    fn backward(&mut self, gradient: OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<OwnedTensor<M>> {
        collective::concatenate(Pass::ReduceScatterBackward, gradient, comm)
    }
}
