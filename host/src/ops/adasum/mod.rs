//! Adasum all-reduce over any communicator (ONNX Runtime's AdasumAllReduce, Horovod's `op=Adasum`).
//!
//! There are two algorithms with the same result up to rounding, in `gram` and `tree`; `shared_memory` is the Gram form for ranks that
//! share memory, and `hierarchical` reduces inside nodes before it runs either across them. `device` has the forms for CUDA memory. The
//! arithmetic is in `kernels`, the steps are in `plan`; nothing here depends on a transport.

#[cfg(feature = "cuda")]
mod device;
mod gram;
mod hierarchical;
mod object;
mod shared_memory;
mod tree;

use std::ops::Range;
use std::sync::Arc;

use gradsync_device::math::adasum::Criterion;

pub(crate) use self::gram::Extent;
#[cfg(feature = "cuda")]
use self::gram::{Cut, Gram, Vector};
pub(crate) use self::hierarchical::check_nodes;
#[cfg(feature = "cuda")]
use self::hierarchical::{Levels, agree};
pub use self::hierarchical::{Nodes, WithinNode, hierarchical_adasum_all_reduce};
pub(crate) use self::object::Prepared;
pub use self::object::{Adasum, AdasumMemory};
#[cfg(feature = "cuda")]
use self::tree::Tree;
use crate::agreement::same_plan;
use crate::buffer::{GradientBuffer, Parts, TensorTable};
use crate::call::Value;
use crate::call::scope;
use crate::comm::Communicator;
use crate::dtype::DType;
use crate::error::{Error, Operation, Result};
use crate::memory::Host;
use crate::plan::chunks::SumTable;
use crate::plan::cost::{self, Scheme};

pub use crate::call::{AdasumOptions, Algorithm, Granularity};

const OPERATION: &str = "adasum_all_reduce";

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
    /// use gradsync::comm::{Ranks, local};
    /// use gradsync::ops::{AdasumOptions, adasum_all_reduce};
    /// use gradsync::{DType, Error, GradientBuffer};
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

/// Replaces every rank's buffer by the Adasum of all ranks' buffers, in place: bitwise the same on every rank and in every run.
///
/// Ranks combine as a tree of adjacent pairs, `(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b`, where a coefficient is 1 if the squared norm is
/// below the square root of the smallest normal `f64`; an odd rank moves up unchanged. Inner products and weighted sums are `f64`; the
/// result is rounded once ([`Algorithm::Gram`]) or once per level ([`Algorithm::Tree`]). A NaN or an infinity spreads over its layer
/// according to the formula.
///
/// # Choosing the ranks
/// An odd rank counts double, because it meets a pair: equal vectors get the weights 1/4, 1/4, 1/2 on 3 ranks, four times 1/8 and 1/2 on 5,
/// four times 1/8 and twice 1/4 on 6, six times 1/8 and 1/4 on 7. On a power of two of ranks they get equal weights. Ranks must see alike
/// data: vectors in unrelated directions are added, so that ranks with labels of their own, above all after own steps between reductions,
/// diverge where a mean does not (page "Convergence", "What to use").
///
/// # Range and precision of `f64`
/// Finite elements may have any magnitude: where squared norms overflow, large vectors are scaled by a power of two. A vector whose norm is
/// below 1.22e-77, so that its square is below the square root above, has the coefficient 1: shorter vectors are added.
///
/// For layers of up to 128 elements, on up to 16 ranks and without nodes, the error is at most 8 × 2^-52 times the largest input, if the
/// elements are below 1e147. Inner products with vectors whose squares overflow have the precision of sums of `f64`, so that of two such
/// vectors that are opposite to within 1e-8, half of the digits remain.
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

impl AdasumMemory for Host {
    fn prepare<'c>(
        comm: &'c dyn Communicator,
        buffer: &GradientBuffer,
        options: AdasumOptions,
    ) -> Result<Box<dyn Prepared<Self> + 'c>> {
        let checked = options.algorithm.check_ranks(OPERATION, comm.world_size());
        let operation = Operation::AdasumAllReduce(options);
        let _scope = scope::within(operation).with_tensors(buffer.table().tensor_count());
        let made_for = MadeFor::new(buffer, options, comm.world_size());
        same_plan(operation, comm, buffer.table(), &[("memory", Value::Words(made_for.memory))], checked)?;
        Ok(Box::new(OfAllRanks { comm, options, made_for }))
    }

    fn prepare_on_nodes<'c>(
        nodes: Nodes<'c>,
        buffer: &GradientBuffer,
        within_node: WithinNode,
        options: AdasumOptions,
    ) -> Result<Box<dyn Prepared<Self> + 'c>> {
        Ok(Box::new(hierarchical::OnNodes::new(nodes, buffer, within_node, options)?))
    }
}

/// The properties of buffers in host memory that the ranks have agreed on, and the report of the last reduction.
#[derive(Debug)]
struct MadeFor {
    table: Arc<TensorTable>,
    memory: &'static str,
    report: AdasumReport,
}

impl MadeFor {
    fn new(buffer: &GradientBuffer, options: AdasumOptions, vectors: usize) -> Self {
        let layers = options.granularity.layer_count(buffer.tensor_count());
        let report = match options.algorithm {
            Algorithm::Tree => AdasumReport::of_tree(),
            _ => AdasumReport::of_gram(vec![0.0; layers * vectors], layers, 0),
        };
        Self { table: buffer.shared_table(), memory: buffer.memory_kind(), report }
    }

    /// Refuses a buffer that differs from the buffer that the ranks agreed on.
    fn check(&self, operation: &'static str, buffer: &GradientBuffer) -> Result<()> {
        buffer.table().check_made_for(operation, &self.table)?;
        let (made_for, found) = (self.memory, buffer.memory_kind());
        if made_for == found {
            return Ok(());
        }
        let reason = format!("the buffer is in {found}, and this was made for {made_for}");
        Err(Error::InvalidArgument { operation, reason })
    }
}

/// Adasum of all ranks at once, in host memory.
#[derive(Debug)]
struct OfAllRanks<'c> {
    comm: &'c dyn Communicator,
    options: AdasumOptions,
    made_for: MadeFor,
}

impl Prepared<Host> for OfAllRanks<'_> {
    fn all_reduce(&mut self, buffer: &mut GradientBuffer) -> Result<()> {
        let Self { comm, options, made_for } = self;
        made_for.check(OPERATION, buffer)?;
        let _scope = scope::within(Operation::AdasumAllReduce(*options)).with_tensors(buffer.table().tensor_count());
        let _span = tracing::debug_span!(OPERATION, rank = comm.rank(), ?options, len = buffer.len()).entered();
        made_for.report = of_all_ranks(*comm, buffer.parts_mut(), *options)?;
        Ok(())
    }

    fn report(&self) -> Result<AdasumReport> {
        Ok(self.made_for.report.clone())
    }
}

fn of_all_ranks(comm: &dyn Communicator, mut parts: Parts<'_>, options: AdasumOptions) -> Result<AdasumReport> {
    let bytes = parts.arena.len() * parts.arena.dtype().size_bytes();
    match options.algorithm.chosen(comm.world_size(), bytes) {
        Algorithm::Tree => {
            if options.algorithm == Algorithm::Auto {
                // In shared memory only products are exchanged, so their number is no reason for a tree.
                if let Some(report) = gram::shared_memory(comm, &mut parts, options.granularity)? {
                    return Ok(report);
                }
            }
            tree::in_place(comm, parts, options.granularity)
        }
        _ => gram::in_place(comm, parts, options.granularity, Extent::All),
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

    /// The table of products of the layers of an arena with these tensors, of which every rank has a window of `window_len` elements.
    pub(crate) fn table(self, tensors: &[Range<usize>], window_len: usize) -> SumTable {
        SumTable::new(tensors, self.layer_count(tensors.len()), window_len)
    }

    /// The criterion of the exact path for each of these layers; gaps between tensors do not count.
    pub(crate) fn criteria(self, dtype: DType, tensors: &[Range<usize>]) -> Vec<Criterion> {
        let of = |len| Criterion::of(dtype == DType::F64, len);
        match self {
            Granularity::Tensor => tensors.iter().map(|tensor| of(tensor.len())).collect(),
            Granularity::Whole => vec![of(tensors.iter().map(Range::len).sum())],
        }
    }
}

/// Expands the weights of layers, `width` numbers each, to weights of tensors: a layer is one tensor, or all of them.
fn for_tensors(of_layers: &[f64], width: usize, tensors: usize) -> Vec<f64> {
    if of_layers.len() == width * tensors { of_layers.to_vec() } else { of_layers.repeat(tensors) }
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
    fn an_adasum_made_for_128_elements_refuses_a_buffer_that_collides_in_a_fast_hash() {
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
    fn gram_until_its_products_cost_and_the_tree_where_it_can() {
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
