//! Tensor parallelism: collectives with a way back, as TransformerEngine's fusible operations have it.
//!
//! A layer whose weights are split over ranks needs a collective on its way forward and the adjoint of that collective
//! on the way back. Each [`TensorOp`] here is such a pair; a [`Pipeline`] runs several in a row, the caller's own
//! layers among them.
//!
//! | operation | forward | backward |
//! |---|---|---|
//! | [`AllReduce`] | sum over the ranks | identity |
//! | [`AllReduceGradient`] | identity | sum over the ranks |
//! | [`AllGather`] | concatenates along dimension 0 | sums, and keeps this rank's part of dimension 0 |
//! | [`ReduceScatter`] | sums, and keeps this rank's part of dimension 0 | concatenates along dimension 0 |
//!
//! Tensors are handed over and handed back: nothing that the caller still has is ever written, and a group of one rank
//! gets back the very tensor that it gave. Sums run in `f64` in rank order and are rounded once, so that they are the
//! same bits on every rank. Nothing here computes a layer, keeps a tensor, or holds parameters.

mod agreement;
mod collective;
mod pipeline;
mod tensor;

pub use pipeline::Pipeline;
pub use tensor::HostTensor;

use crate::comm::Communicator;
use crate::error::Result;

/// A step of a computation with its way back: a collective of this module, or a layer of the caller's.
///
/// All ranks of the communicator call the same operation in the same order. Those of this module compare their calls
/// before any data move: another shape, dtype, operation or direction on one rank is an
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) on every rank that names two ranks and what each called.
/// The identities ask nobody and accept everything. An error drops the tensor that was handed over.
pub trait TensorOp: Send {
    /// What messages call this operation.
    fn name(&self) -> &str;

    /// The output for an input.
    ///
    /// # Errors
    /// What the operation refuses, and what its communication fails with.
    fn forward(&mut self, comm: &dyn Communicator, input: HostTensor) -> Result<HostTensor>;

    /// The gradient with respect to the input, from the one with respect to the output of the last
    /// [`forward`](Self::forward).
    ///
    /// # Errors
    /// What the operation refuses, and what its communication fails with.
    fn backward(&mut self, comm: &dyn Communicator, gradient: HostTensor) -> Result<HostTensor>;
}

/// Sums the ranks' tensors; the gradient passes as it is, being the same on all ranks already (Megatron-LM's *g*).
///
/// What follows a layer whose weight is split by input columns ("row-parallel"). Works in the memory that it was
/// handed.
///
/// ```
/// use gradsync::comm::local;
/// use gradsync::ops::tensor_parallel::{AllReduce, HostTensor, TensorOp};
///
/// let sums = local::run(2, |comm| {
///     let partial = HostTensor::new(vec![1.0f32, 2.0, 3.0], [1, 3])?;
///     AllReduce.forward(&comm, partial)
/// })?;
/// for sum in sums {
///     assert_eq!(sum.expect("no rank panicked")?.into_vec::<f32>(), Some(vec![2.0, 4.0, 6.0]));
/// }
/// # Ok::<(), gradsync::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct AllReduce;

/// Passes the tensor as it is and sums the ranks' gradients: the adjoint of [`AllReduce`] (Megatron-LM's *f*, its "copy
/// to the tensor-parallel region").
///
/// What precedes a layer whose weight is split by output rows ("column-parallel"): all ranks read one input, and each
/// knows only its part of the gradient with respect to it.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllReduceGradient;

/// Concatenates the ranks' tensors along dimension 0, in rank order; every rank keeps its part of the summed gradient.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming shape and world size for a tensor without a
/// dimension 0, forward, and for a gradient whose dimension 0 the ranks do not divide, backward.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllGather;

/// Sums the ranks' tensors and keeps this rank's part of dimension 0; gradients are concatenated along it: the adjoint
/// of [`AllGather`].
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming shape and world size for a tensor whose dimension 0
/// is missing or not divided by the ranks, forward, and for a gradient without a dimension 0, backward.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReduceScatter;

impl TensorOp for AllReduce {
    fn name(&self) -> &str {
        "AllReduce"
    }

    fn forward(&mut self, comm: &dyn Communicator, input: HostTensor) -> Result<HostTensor> {
        collective::sum("AllReduce forward", comm, input)
    }

    fn backward(&mut self, _: &dyn Communicator, gradient: HostTensor) -> Result<HostTensor> {
        Ok(gradient)
    }
}

impl TensorOp for AllReduceGradient {
    fn name(&self) -> &str {
        "AllReduceGradient"
    }

    fn forward(&mut self, _: &dyn Communicator, input: HostTensor) -> Result<HostTensor> {
        Ok(input)
    }

    fn backward(&mut self, comm: &dyn Communicator, gradient: HostTensor) -> Result<HostTensor> {
        collective::sum("AllReduceGradient backward", comm, gradient)
    }
}

impl TensorOp for AllGather {
    fn name(&self) -> &str {
        "AllGather"
    }

    fn forward(&mut self, comm: &dyn Communicator, input: HostTensor) -> Result<HostTensor> {
        collective::concatenate("AllGather forward", comm, input)
    }

    fn backward(&mut self, comm: &dyn Communicator, gradient: HostTensor) -> Result<HostTensor> {
        collective::sum_part("AllGather backward", comm, gradient)
    }
}

impl TensorOp for ReduceScatter {
    fn name(&self) -> &str {
        "ReduceScatter"
    }

    fn forward(&mut self, comm: &dyn Communicator, input: HostTensor) -> Result<HostTensor> {
        collective::sum_part("ReduceScatter forward", comm, input)
    }

    fn backward(&mut self, comm: &dyn Communicator, gradient: HostTensor) -> Result<HostTensor> {
        collective::concatenate("ReduceScatter backward", comm, gradient)
    }
}
