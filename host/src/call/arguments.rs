//! The arguments of operations that must agree between ranks: reductions, algorithms, kinds of groups, passes.
//!
//! These types are plain data; the modules of the operations implement them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Defines a method for each field of an options type, which returns the options with that field changed.
///
/// Such types are `#[non_exhaustive]`, so that they can get more options later; programs start from the defaults.
macro_rules! setters {
    ($($setter:ident($field:ident: $type:ty)),+ $(,)?) => { $(
        #[doc = concat!("The same options with this [`", stringify!($field), "`](Self#structfield.", stringify!($field), ").")]
        #[must_use]
        pub fn $setter(self, $field: $type) -> Self {
            Self { $field, ..self }
        }
    )+ };
}
pub(crate) use setters;

/// The reduction of the ranks' values of one element.
///
/// On host memory, sums run in `f64` in rank order and are rounded once, and a mean divides that sum by the world size before the rounding,
/// so that results depend neither on shards nor on timing; `Max` and `Min` give NaN if any value is NaN. No sum on the way overflows, in
/// `f64` either, where the result is within the range of the dtype. NCCL adds in the dtype of the
/// data and in its own order, except for small sums, and its `Max` and `Min` of NaN are unspecified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs)] // the variants are what their names say
pub enum ReduceOp {
    Sum,
    Mean,
    Max,
    Min,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
        })
    }
}

/// The algorithm that combines the ranks' vectors in Adasum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Algorithm {
    /// By a model of costs, for nodes of 8 ranks: [`Gram`](Self::Gram), and [`Tree`](Self::Tree) for powers of two of
    /// ranks, once the products of all pairs and the bytes between nodes take noticeable time: from 16, 32 or 64 ranks on, by size. Ranks
    /// that share memory on a host send only products, and stay with Gram. A switch is logged with its reason. Given the nodes,
    /// [`hierarchical_adasum_all_reduce`](crate::ops::hierarchical_adasum_all_reduce) chooses between one Gram matrix of all ranks, one
    /// of nodes, and the tree over nodes.
    #[default]
    Auto,
    /// Weights from the inner products of all vectors; any number of ranks; the result is rounded once.
    Gram,
    /// Pair by pair along the tree; powers of two; intermediate results are rounded to the dtype at every level. On GPUs it is the reference,
    /// not made for speed: it always exchanges vectors over the transport.
    Tree,
}

/// The granularity of Adasum's weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Granularity {
    /// Each tensor on its own ("per layer"), as upstream has it.
    #[default]
    Tensor,
    /// All tensors together, as one vector.
    Whole,
}

/// Choices of an Adasum all-reduce; equal on all ranks.
///
/// ```
/// use gradsync::ops::{AdasumOptions, Granularity};
///
/// let options = AdasumOptions::default().with_granularity(Granularity::Whole);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AdasumOptions {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The elements that share one set of weights.
    pub granularity: Granularity,
}

impl AdasumOptions {
    setters! { with_algorithm(algorithm: Algorithm), with_granularity(granularity: Granularity) }
}

/// The reduction of the vectors of a node's ranks, before nodes combine; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum WithinNode {
    /// The sum of the vectors ([`ReduceOp::Sum`]), or their mean ([`ReduceOp::Mean`], which scales by 1 / ranks of the node), rounded
    /// once to the dtype.
    Reduce(ReduceOp),
    /// The Adasum of the vectors, rounded once to the dtype. If every node has a power of two of adjacent ranks, the result is the Adasum
    /// of all ranks. The Gram matrices have the products of a node's ranks, and of the nodes, instead of the products of all ranks.
    Adasum,
}

impl From<ReduceOp> for WithinNode {
    fn from(op: ReduceOp) -> Self {
        WithinNode::Reduce(op)
    }
}

/// The kinds of group.
///
/// The groups of one kind divide the world: each rank is in exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum GroupKind {
    /// All ranks.
    World,
    /// The ranks that hold the same part of the model and see different data: they reduce gradients.
    Data,
    /// The ranks of one data group that are on one node.
    NodeLocalData,
    /// One rank of each node that the data group is on: the ranks with the same index in their node-local data groups.
    ///
    /// After a reduce-scatter within each node-local data group, these ranks hold the same shard, which a hierarchical all-reduce and
    /// hierarchical Adasum reduce across nodes. If the data group takes the same local ranks on each of its nodes, they are the ranks of
    /// the data group with this rank's local rank. ONNX Runtime takes all ranks of the *world* with that local rank, whether or not they
    /// are in the data group.
    CrossNodeData,
    /// The ranks that share a layer (tensor parallelism).
    Horizontal,
    /// The ranks that pass activations on, from the first stage to the last.
    Pipeline,
}

impl GroupKind {
    /// All kinds, in the order of ONNX Runtime's attribute `group_type`, which counts from 0.
    pub const ALL: [GroupKind; 6] = [
        GroupKind::World,
        GroupKind::Data,
        GroupKind::NodeLocalData,
        GroupKind::CrossNodeData,
        GroupKind::Horizontal,
        GroupKind::Pipeline,
    ];
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            GroupKind::World => "world",
            GroupKind::Data => "data",
            GroupKind::NodeLocalData => "node-local data",
            GroupKind::CrossNodeData => "cross-node data",
            GroupKind::Horizontal => "horizontal",
            GroupKind::Pipeline => "pipeline",
        })
    }
}

/// A pass of a [tensor-parallel](crate::ops::tensor_parallel) operation that communicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs)] // an operation and a direction
pub enum Pass {
    AllReduceForward,
    AllReduceGradientBackward,
    AllGatherForward,
    AllGatherBackward,
    ReduceScatterForward,
    ReduceScatterBackward,
    PipelineForward,
    PipelineBackward,
}

impl Pass {
    /// The operation and the direction, such as `AllGather backward`.
    pub fn name(self) -> &'static str {
        match self {
            Pass::AllReduceForward => "AllReduce forward",
            Pass::AllReduceGradientBackward => "AllReduceGradient backward",
            Pass::AllGatherForward => "AllGather forward",
            Pass::AllGatherBackward => "AllGather backward",
            Pass::ReduceScatterForward => "ReduceScatter forward",
            Pass::ReduceScatterBackward => "ReduceScatter backward",
            Pass::PipelineForward => "Pipeline forward",
            Pass::PipelineBackward => "Pipeline backward",
        }
    }
}
