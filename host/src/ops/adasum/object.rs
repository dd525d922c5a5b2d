//! [`Adasum`]: the reduction as an object, which the ranks prepare together once and run in every step.

use std::fmt::Debug;

use super::{AdasumOptions, AdasumReport, Nodes, WithinNode};
use crate::buffer::GradientBuffer;
use crate::comm::Communicator;
use crate::error::Result;
use crate::kernels::KernelMemory;
use crate::memory::{Host, Memory};
use crate::ops::tensors::copy_into;

/// The name of the reduction of separate tensors in errors.
const TENSORS: &str = "Adasum of tensors";

/// A kind of memory whose gradient buffers Adasum can reduce: [`Host`] and `Cuda`.
#[doc(hidden)]
pub trait AdasumMemory: KernelMemory {
    /// Prepares the reduction of all ranks at once.
    ///
    /// # Errors
    /// The errors of [`Adasum::new`].
    fn prepare<'c>(
        comm: &'c dyn Communicator<Self>,
        buffer: &GradientBuffer<Self>,
        options: AdasumOptions,
    ) -> Result<Box<dyn Prepared<Self> + 'c>>;

    /// Prepares the reduction inside nodes and across them.
    ///
    /// # Errors
    /// The errors of [`Adasum::on_nodes`].
    fn prepare_on_nodes<'c>(
        nodes: Nodes<'c, Self>,
        buffer: &GradientBuffer<Self>,
        within_node: WithinNode,
        options: AdasumOptions,
    ) -> Result<Box<dyn Prepared<Self> + 'c>>;
}

/// A prepared reduction.
#[doc(hidden)]
pub trait Prepared<M: Memory>: Debug {
    /// See [`Adasum::all_reduce`].
    ///
    /// # Errors
    /// The errors of that method.
    fn all_reduce(&mut self, buffer: &mut GradientBuffer<M>) -> Result<()>;

    /// See [`Adasum::report`].
    ///
    /// # Errors
    /// The errors of that method.
    fn report(&self) -> Result<AdasumReport>;

    /// Whether the ranks' kernels access each other's memory.
    fn uses_peers(&self) -> bool {
        false
    }
}

/// Adasum of the gradient buffers of a group of ranks, with its workspace: prepared once by all ranks, and run in every step (ONNX
/// Runtime's AdasumAllReduce).
///
/// | made by | vectors lie in | ranks combine | ONNX Runtime's `reduce_algo` |
/// |---|---|---|---|
/// | [`new`](Self::new) | host memory, GPU | all at once | 1 for host memory; none on a GPU |
/// | [`on_nodes`](Self::on_nodes) | host memory, GPU | by a sum, a mean or Adasum inside nodes, by Adasum across them | 2 |
/// | `staged` | GPU | all at once, by the processors, over a transport of host memory | 1 |
///
/// All of them have the numerics of [`adasum_all_reduce`](super::adasum_all_reduce), which also says which ranks to choose: an odd one counts
/// double, and ranks must see alike data. The object keeps its communicators, and reduces
/// buffers with the tensors of the buffer for which it was created.
#[derive(Debug)]
pub struct Adasum<'c, M: AdasumMemory = Host>(Box<dyn Prepared<M> + 'c>);

impl<'c, M: AdasumMemory> Adasum<'c, M> {
    #[cfg(feature = "cuda")]
    pub(crate) fn of(prepared: impl Prepared<M> + 'c) -> Self {
        Self(Box::new(prepared))
    }

    /// Prepares the reduction of buffers with the tensors of `buffer` over the ranks of `comm`; every rank must call it. The host waits for
    /// the other ranks.
    ///
    /// On a GPU, kernels over peers' memory are loaded here. Where the crate has no cubin of them for the GPU, the driver compiles them the
    /// first time on a machine, in up to a quarter of a second.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the buffer was made for another world size;
    /// [`Error::Disagreement`](crate::Error::Disagreement) on every rank if ranks have different tensors, options or kinds of memory;
    /// [`Error::UnsupportedWorldSize`](crate::Error::UnsupportedWorldSize) for [`Algorithm::Tree`](super::Algorithm::Tree) on a number of
    /// ranks that is no power of two; on a GPU `Error::Cuda`, with code 2 when memory does not suffice. If memory does not suffice on some
    /// ranks only, the others return an [`Error::InvalidArgument`](crate::Error::InvalidArgument) that names one of them. Errors of the
    /// communicator.
    pub fn new(comm: &'c dyn Communicator<M>, buffer: &GradientBuffer<M>, options: AdasumOptions) -> Result<Self> {
        M::prepare(comm, buffer, options).map(Self)
    }

    /// Prepares the reduction of buffers with the tensors of `buffer`, which was made for all ranks, over these groups, as
    /// [`hierarchical_adasum_all_reduce`](super::hierarchical_adasum_all_reduce) describes it; every rank must call it. The host waits for
    /// the other ranks.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::InvalidArgument`](crate::Error::InvalidArgument) on every rank if the groups do not
    /// form a grid of nodes or `within_node` is a
    /// [`WithinNode::Reduce`](super::WithinNode::Reduce) by another operation than `Sum` or `Mean`. The tree needs a power of two of nodes.
    pub fn on_nodes(
        nodes: Nodes<'c, M>,
        buffer: &GradientBuffer<M>,
        within_node: impl Into<WithinNode>,
        options: AdasumOptions,
    ) -> Result<Self> {
        M::prepare_on_nodes(nodes, buffer, within_node.into(), options).map(Self)
    }

    /// Replaces every rank's buffer by the result, in place: bitwise the same on every rank, and in every run on the same machines. On a
    /// GPU the call is asynchronous, in the buffer's queue, unless `staged` created the object.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a buffer with other tensors, or in another kind of memory, than the
    /// buffer of the preparation; where the peers' kernels access that buffer, for any other buffer. Errors of the communicators, after
    /// which the contents of the buffer are unspecified.
    pub fn all_reduce(&mut self, buffer: &mut GradientBuffer<M>) -> Result<()> {
        self.0.all_reduce(buffer)
    }

    /// Like [`all_reduce`](Self::all_reduce), but reduces separate tensors in place. They are copied into `buffer`, which is reduced, and
    /// back, with casts where dtypes differ; on a GPU in one launch for each of their dtypes.
    ///
    /// # Errors
    /// The errors of [`all_reduce`](Self::all_reduce), [`Error::LengthMismatch`](crate::Error::LengthMismatch) naming a tensor whose length
    /// differs from the buffer's, and [`Error::InvalidArgument`](crate::Error::InvalidArgument) for another queue; no tensor is written,
    /// but the buffer may be.
    pub fn all_reduce_tensors(
        &mut self,
        buffer: &mut GradientBuffer<M>,
        tensors: &mut [M::SliceMut<'_>],
    ) -> Result<()> {
        self.reduce_copies(buffer, &tensors.iter().map(M::as_slice).collect::<Vec<_>>())?;
        M::unpack(tensors, buffer.as_slice(), &buffer.table().offsets())
    }

    /// Like [`all_reduce_tensors`](Self::all_reduce_tensors), but writes the results to separate outputs.
    ///
    /// # Errors
    /// The errors of [`all_reduce_tensors`](Self::all_reduce_tensors).
    pub fn all_reduce_tensors_into(
        &mut self,
        buffer: &mut GradientBuffer<M>,
        inputs: &[M::Slice<'_>],
        outputs: &mut [M::SliceMut<'_>],
    ) -> Result<()> {
        buffer.table().check_lens(TENSORS, "output", outputs.iter().map(|output| M::len(M::as_slice(output))))?;
        for output in outputs.iter() {
            M::check_same_queue(TENSORS, buffer.as_slice().into(), M::as_slice(output).into())?;
        }
        self.reduce_copies(buffer, inputs)?;
        M::unpack(outputs, buffer.as_slice(), &buffer.table().offsets())
    }

    fn reduce_copies(&mut self, buffer: &mut GradientBuffer<M>, tensors: &[M::Slice<'_>]) -> Result<()> {
        copy_into(TENSORS, buffer, tensors)?;
        self.all_reduce(buffer)
    }

    /// The report of the last reduction; on a GPU it waits for the queue. Before the first reduction, weights are zeros.
    ///
    /// # Errors
    /// `Error::Cuda`; never for host memory.
    pub fn report(&self) -> Result<AdasumReport> {
        self.0.report()
    }

    /// Whether the ranks' kernels access each other's memory, so that no transport is needed.
    pub fn uses_peers(&self) -> bool {
        self.0.uses_peers()
    }
}
