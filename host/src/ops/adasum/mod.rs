//! Adasum all-reduce over any communicator (ONNX Runtime's AdasumAllReduce, Horovod's `op=Adasum`).
//!
//! [`Adasum`] is the reduction as an object: a [`Strategy`], chosen once by all ranks for the memory, the ranks and the size. `host` and
//! `device` choose it. There are two algorithms with the same result up to rounding, in `gram` and `tree`; `shared_memory` is the Gram form
//! for ranks that share memory, and `hierarchical` describes nodes, inside which vectors are reduced before either algorithm runs across
//! them. The arithmetic is in `kernels`, the steps are in `plan`; nothing here depends on a transport.

#[cfg(feature = "cuda")]
mod device;
mod gram;
mod hierarchical;
mod host;
mod shared_memory;
mod tree;
mod vector;

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

pub(crate) use self::hierarchical::check_nodes;
pub use self::hierarchical::{Nodes, WithinNode, hierarchical_adasum_all_reduce};
pub use self::vector::adasum;
use crate::buffer::{GradientBuffer, TensorTable};
use crate::call::scope;
use crate::comm::Communicator;
use crate::error::{Error, Operation, Result};
use crate::kernels::KernelMemory;
use crate::memory::{Host, Memory};
use crate::ops::tensors::copy_into;
use crate::plan::chunks::SumTable;
use crate::plan::cost::{self, Scheme};

pub use crate::call::{AdasumOptions, Algorithm, Granularity};

const OPERATION: &str = "adasum_all_reduce";

/// The name of the reduction of separate tensors in errors.
const TENSORS: &str = "Adasum of tensors";

/// Replaces every rank's buffer by the Adasum of all ranks' buffers, in place: bitwise the same on every rank and in every run.
///
/// Ranks combine as a tree of adjacent pairs, `(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b`, where a coefficient is 1 if the squared norm is
/// below the square root of the smallest normal `f64`; an odd rank moves up unchanged. Inner products and weighted sums are `f64`; the
/// result is rounded once ([`Algorithm::Gram`]) or once per level ([`Algorithm::Tree`]). A NaN or an infinity spreads over its layer
/// according to the formula.
///
/// # Choosing the ranks
/// A rank without a partner counts double, because it meets a pair: equal vectors get the weights 1/4, 1/4, 1/2 on 3 ranks, four times 1/8
/// and 1/2 on 5, four times 1/8 and twice 1/4 on 6, six times 1/8 and 1/4 on 7. On a power of two of ranks they get equal weights. All
/// ranks should draw from the same data: vectors in unrelated directions are added, so that ranks with labels of their own, above all
/// after steps of their own between reductions, diverge where a mean does not ([choosing a reduction](crate::docs::choosing)).
///
/// # Range and precision of `f64`
/// Finite elements may have any magnitude: where squared norms overflow, large vectors are scaled by a power of two. A vector whose norm is
/// below 1.22e-77, so that its square is below the square root above, has the coefficient 1: shorter vectors are added.
///
/// For layers of up to 128 elements, on up to 16 ranks and without nodes, the error is at most 8 × 2^-52 times the largest input, if the
/// elements are below 1e147. Inner products with vectors whose squares overflow have the precision of sums of `f64`: half of the digits
/// remain where two such vectors are opposite to within 1e-8.
///
/// This prepares an [`Adasum`], runs it once and waits for its report. A training loop keeps the object.
///
/// # Errors
/// The errors of [`Adasum::new`] and [`Adasum::all_reduce`]. After a communicator's error the contents of the buffer are unspecified; other
/// errors leave it unchanged.
pub fn adasum_all_reduce<M: AdasumMemory>(
    comm: &dyn Communicator<M>,
    buffer: &mut GradientBuffer<M>,
    options: AdasumOptions,
) -> Result<AdasumReport> {
    let mut adasum = Adasum::new(comm, buffer, options)?;
    adasum.all_reduce(buffer)?;
    adasum.report()
}

/// A kind of memory whose gradient buffers Adasum can reduce: [`Host`] and `Cuda`.
pub trait AdasumMemory: KernelMemory {
    /// Chooses and prepares the strategy for all ranks at once; every rank calls it, in the scope of the operation.
    ///
    /// # Errors
    /// The errors of [`Adasum::new`].
    fn prepare<'c>(
        comm: &'c dyn Communicator<Self>,
        buffer: &GradientBuffer<Self>,
        options: AdasumOptions,
    ) -> Result<Box<dyn Strategy<Self> + 'c>>;

    /// Chooses and prepares the strategy inside nodes and across them, like [`prepare`](Self::prepare).
    ///
    /// # Errors
    /// The errors of [`Adasum::on_nodes`].
    fn prepare_on_nodes<'c>(
        nodes: Nodes<'c, Self>,
        buffer: &GradientBuffer<Self>,
        within_node: WithinNode,
        options: AdasumOptions,
    ) -> Result<Box<dyn Strategy<Self> + 'c>>;
}

/// A way in which ranks compute Adasum, with its communicators and its workspace.
pub trait Strategy<M: Memory>: Debug {
    /// Reduces a buffer with the tensors of the preparation's; the caller has compared them and entered the scope of the operation.
    ///
    /// # Errors
    /// The errors of [`Adasum::all_reduce`].
    fn run(&mut self, buffer: &mut GradientBuffer<M>) -> Result<()>;

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
/// All of them have the numerics of [`adasum_all_reduce`], whose documentation also says which numbers of ranks and which data suit Adasum.
/// The object keeps its communicators, and reduces buffers with the tensors of the buffer for which it was created.
#[derive(Debug)]
pub struct Adasum<'c, M: AdasumMemory = Host> {
    /// The operation, with its options.
    operation: Operation,
    /// The number of this rank among all.
    rank: usize,
    made_for: Arc<TensorTable>,
    strategy: Box<dyn Strategy<M> + 'c>,
}

impl<'c, M: AdasumMemory> Adasum<'c, M> {
    /// Prepares a strategy in the scope of the operation.
    fn prepared(
        operation: Operation,
        rank: usize,
        buffer: &GradientBuffer<M>,
        prepare: impl FnOnce() -> Result<Box<dyn Strategy<M> + 'c>>,
    ) -> Result<Self> {
        let _scope = scope::within(operation).with_tensors(buffer.table().tensor_count());
        Ok(Self { operation, rank, made_for: buffer.shared_table(), strategy: prepare()? })
    }

    /// Prepares the reduction of buffers with the tensors of `buffer` over the ranks of `comm`; every rank must call it. The host waits for
    /// the other ranks.
    ///
    /// On a GPU, kernels over peers' memory are loaded here. Where the crate has no cubin of them for the GPU, the driver compiles them the
    /// first time on a machine, in up to a quarter of a second.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the buffer was made for another world size;
    /// [`Error::Disagreement`] on every rank if ranks have different tensors, options or kinds of memory;
    /// [`Error::UnsupportedWorldSize`] for [`Algorithm::Tree`] on a number of
    /// ranks that is no power of two; on a GPU `Error::Cuda`, with code 2 when memory does not suffice. If memory does not suffice on some
    /// ranks only, the others return an [`Error::InvalidArgument`] that names one of them. Errors of the
    /// communicator.
    pub fn new(comm: &'c dyn Communicator<M>, buffer: &GradientBuffer<M>, options: AdasumOptions) -> Result<Self> {
        let operation = Operation::AdasumAllReduce(options);
        Self::prepared(operation, comm.rank(), buffer, || M::prepare(comm, buffer, options))
    }

    /// Prepares the reduction of buffers with the tensors of `buffer`, which was made for all ranks, over these groups, as
    /// [`hierarchical_adasum_all_reduce`] describes it; every rank must call it. The host waits for
    /// the other ranks.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::InvalidArgument`] on every rank if the groups do not
    /// form a grid of nodes or `within_node` is a
    /// [`WithinNode::Reduce`] by another operation than `Sum` or `Mean`. The tree needs a power of two of nodes.
    pub fn on_nodes(
        nodes: Nodes<'c, M>,
        buffer: &GradientBuffer<M>,
        within_node: impl Into<WithinNode>,
        options: AdasumOptions,
    ) -> Result<Self> {
        let within_node = within_node.into();
        let operation = Operation::HierarchicalAdasumAllReduce(within_node, options);
        let prepare = || M::prepare_on_nodes(nodes, buffer, within_node, options);
        Self::prepared(operation, nodes.all.rank(), buffer, prepare)
    }

    /// Replaces every rank's buffer by the result, in place: bitwise the same on every rank, and in every run on the same machines. On a
    /// GPU the call is asynchronous, in the buffer's queue, unless `staged` created the object.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a buffer with other tensors, or in another kind of memory, than the
    /// buffer of the preparation; where the peers' kernels access that buffer, for any other buffer. Errors of the communicators, after
    /// which the contents of the buffer are unspecified.
    pub fn all_reduce(&mut self, buffer: &mut GradientBuffer<M>) -> Result<()> {
        let Self { operation, rank, made_for, strategy } = self;
        buffer.table().check_made_for(operation.name(), made_for)?;
        let _scope = scope::within(*operation).with_tensors(buffer.table().tensor_count());
        let len = buffer.table().arena_len();
        let _span = tracing::debug_span!(OPERATION, %operation, rank = *rank, len).entered();
        strategy.run(buffer)
    }

    /// Like [`all_reduce`](Self::all_reduce), but reduces separate tensors in place. They are copied into `buffer`, which is reduced, and
    /// back, with casts where dtypes differ; on a GPU in one launch for each of their dtypes.
    ///
    /// # Errors
    /// The errors of [`all_reduce`](Self::all_reduce), [`Error::LengthMismatch`] naming a tensor whose length
    /// differs from the buffer's, and [`Error::InvalidArgument`] for another queue; no tensor is written,
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
            M::check_same_queue(TENSORS, buffer.as_slice(), M::as_slice(output))?;
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
        self.strategy.report()
    }

    /// Whether the ranks' kernels access each other's memory, so that no transport is needed.
    pub fn uses_peers(&self) -> bool {
        self.strategy.uses_peers()
    }
}

/// The report of an Adasum all-reduce.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct AdasumReport {
    /// The algorithm that ran; never [`Algorithm::Auto`].
    pub algorithm: Algorithm,
    /// The weights of the ranks' vectors in the result, `[layer][rank]`: with [`Granularity::Tensor`] each tensor is a layer, so that
    /// `weights[tensor * world_size + rank]` is the factor of that rank's tensor; with [`Granularity::Whole`] there is one layer. A
    /// hierarchical reduction has weights of nodes, `[layer][node]`, unless it combined all ranks by one Gram matrix. Weights may be negative;
    /// a weight beyond the range of `f64`, as of a vector of 1e-75 beside one of 1e300, is infinite here and has its right value in the result.
    /// `None` for [`Algorithm::Tree`], where no rank knows all of them. [`weights_of`](Self::weights_of) returns those of one layer.
    pub weights: Option<Vec<f64>>,
    /// The number of layers that lost digits to cancellation, or are short vectors of `f64`, or whose products overflowed, and were recomputed
    /// from the vectors; their weights are exact as well.
    pub recomputed: usize,
    /// The number of layers; 0 for [`Algorithm::Tree`].
    layers: usize,
}

impl AdasumReport {
    /// The [`weights`](Self::weights) of the vectors in a layer, one for each rank or node. `None` behind the last layer, and for
    /// [`Algorithm::Tree`].
    ///
    /// ```
    /// use gradsync::prelude::*;
    ///
    /// let reports = local::run(2, |comm| {
    ///     let mut gradients = GradientBuffer::new(DType::F32, 2, [("weight", [2]), ("bias", [1])])?;
    ///     gradients.tensor_mut(0).copy_from_slice(&[[1.0f32, 0.0], [0.0, 1.0]][comm.rank()]);
    ///     gradients.tensor_mut(1).copy_from_slice(&[3.0f32]);
    ///     adasum_all_reduce(&comm, &mut gradients, AdasumOptions::default())
    /// })?;
    /// // Orthogonal vectors are added, and equal ones averaged.
    /// assert_eq!(reports[0].weights_of(0), Some(&[1.0, 1.0][..]));
    /// assert_eq!(reports[0].weights_of(1), Some(&[0.5, 0.5][..]));
    /// assert_eq!(reports[0].weights_of(2), None);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn weights_of(&self, layer: usize) -> Option<&[f64]> {
        let weights = self.weights.as_deref()?;
        let vectors = weights.len().checked_div(self.layers)?;
        weights.chunks_exact(vectors.max(1)).nth(layer)
    }

    /// The report of [`Algorithm::Gram`] with weights of so many layers.
    pub(crate) fn of_gram(weights: Vec<f64>, layers: usize, recomputed: usize) -> Self {
        Self { algorithm: Algorithm::Gram, weights: Some(weights), recomputed, layers }
    }

    /// The report of [`Algorithm::Tree`].
    pub(crate) const fn of_tree() -> Self {
        Self { algorithm: Algorithm::Tree, weights: None, recomputed: 0, layers: 0 }
    }

    /// The report of [`Algorithm::Gram`] for a single vector, which is its own result.
    pub(crate) fn of_one_vector(layers: usize) -> Self {
        Self::of_gram(vec![1.0; layers], layers, 0)
    }
}

impl Algorithm {
    /// Refuses the tree over a number of ranks that is no power of two.
    pub(crate) fn check_ranks(self, operation: &'static str, ranks: usize) -> Result<()> {
        self.check_vectors(operation, ranks, "a power of two of ranks")
    }

    /// Refuses the tree over a number of nodes that is no power of two.
    fn check_nodes(self, operation: &'static str, nodes: usize) -> Result<()> {
        self.check_vectors(operation, nodes, "a power of two of nodes")
    }

    fn check_vectors(self, operation: &'static str, found: usize, needs: &'static str) -> Result<()> {
        if self != Algorithm::Tree || found.is_power_of_two() {
            return Ok(());
        }
        Err(Error::UnsupportedWorldSize { operation, algorithm: "tree", needs, world_size: found })
    }

    /// The algorithm for ranks that do not share memory; never [`Auto`](Self::Auto). The result is the same on every rank.
    pub(crate) fn chosen(self, world_size: usize, bytes: usize) -> Self {
        /// The usual number of ranks of a machine with NVLink; a communicator does not know its own.
        const RANKS_PER_NODE: usize = 8;
        if self != Algorithm::Auto {
            return self;
        }
        let choice = cost::choose(Scheme::OF_RANKS, world_size, RANKS_PER_NODE, bytes);
        if choice.scheme != Scheme::Tree {
            return Algorithm::Gram;
        }
        tracing::info!(world_size, bytes, %choice, "Adasum by the tree");
        Algorithm::Tree
    }
}

impl Granularity {
    /// The number of layers of `tensors` tensors.
    pub(crate) fn layer_count(self, tensors: usize) -> usize {
        match self {
            Granularity::Tensor => tensors,
            Granularity::Whole => tensors.min(1),
        }
    }

    /// The table of products of the layers of an arena with these tensors, of which every rank has a shard of `shard_len` elements.
    pub(crate) fn table(self, tensors: &[Range<usize>], shard_len: usize) -> SumTable {
        SumTable::new(tensors, self.layer_count(tensors.len()), shard_len)
    }
}

#[cfg(test)]
mod tests {
    use super::Algorithm;
    use crate::GradientBuffer;
    use crate::buffer::table::tests::{LENS, colliding};
    use crate::comm::local;
    use crate::dtype::DType;
    use crate::error::Error;
    use crate::ops::{Adasum, AdasumOptions};

    #[test]
    fn adasum_refuses_a_buffer_that_collides_in_a_fast_hash() {
        let run = local::run(2, |comm| {
            let [small, large] = colliding();
            let mut large = GradientBuffer::new(DType::F32, 2, large)?;
            let mut adasum = Adasum::new(&comm, &GradientBuffer::new(DType::F32, 2, small)?, AdasumOptions::default())?;
            assert_eq!(large.segments()[0].len(), LENS[1]);
            large.tensor_mut(0).copy_from_slice(&vec![1.0f32; LENS[1]])?;
            let error = adasum.all_reduce(&mut large).expect_err("made for other tensors");
            assert!(
                matches!(&error, Error::InvalidArgument { reason, .. } if reason.contains("other tensors")),
                "{error}"
            );
            assert_eq!(large.tensor(0).to_vec::<f32>()?, vec![1.0; LENS[1]]);
            Ok::<_, Error>(())
        });
        run.unwrap();
    }

    #[test]
    fn chosen_is_gram_until_its_products_cost_more_than_the_tree() {
        const BYTES: usize = 64 << 20;
        // Without knowledge of nodes.
        for world_size in (1..=15).chain([24, 63, 100, 4000]) {
            assert_eq!(Algorithm::Auto.chosen(world_size, BYTES), Algorithm::Gram, "{world_size} ranks");
        }
        for world_size in [16, 64, 512, 4096] {
            assert_eq!(Algorithm::Auto.chosen(world_size, BYTES), Algorithm::Tree, "{world_size} ranks");
        }
        assert_eq!(Algorithm::Gram.chosen(4096, BYTES), Algorithm::Gram);
        assert_eq!(Algorithm::Tree.chosen(2, BYTES), Algorithm::Tree);
    }
}
