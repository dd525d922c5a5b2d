//! Adasum across nodes: a sum, a mean or Adasum inside each node, and Adasum of the nodes' results by either algorithm, on shards (ONNX
//! Runtime's hierarchical reduction, Horovod's Adasum over NCCL; with Adasum inside nodes, small Gram matrices instead of a large one).
//!
//! Each rank of a node exchanges only its shard with the ranks at the same position on other nodes, and inner products are added over all
//! ranks, so that coefficients belong to whole tensors. The caller decides which ranks form a node.

use std::hash::{BuildHasher, RandomState};

use super::{Adasum, AdasumMemory, AdasumOptions, AdasumReport, Algorithm};
use crate::buffer::{GradientBuffer, TensorTable};
use crate::call::Value;
pub use crate::call::WithinNode;
use crate::call_comparison::{gather, same_call};
use crate::comm::{Communicator, ReduceOp};
use crate::error::{Error, Operation, Result};
use crate::memory::{Host, Memory};
use crate::plan::cost::{self, Scheme};

pub(super) const OPERATION: &str = "hierarchical_adasum_all_reduce";

/// The groups of a rank in a hierarchical reduction.
///
/// [`Groups`](crate::groups::Groups) makes them: all ranks of a data group, its ranks on this rank's node, and its ranks with this rank's
/// position on every node. The size of `all` is the product of the sizes of `node` and `across`.
///
/// ```
/// use gradsync::groups::{GroupKind, Groups, Sizes};
/// use gradsync::ops::{Adasum, Nodes, WithinNode};
/// use gradsync::prelude::*;
///
/// // Two nodes of two ranks.
/// let results = local::run(4, |comm| {
///     let mut gradients = GradientBuffer::new(DType::F32, 4, [("weight", [2])])?;
///     gradients.tensor_mut(0).data_mut::<f32>().fill(comm.rank() as f32);
///     let groups = Groups::new(comm, Sizes { world: 4, local: 2, data: 4, horizontal: 1, pipeline: 1 })?;
///     let nodes = Nodes {
///         all: groups.get(GroupKind::Data)?,
///         node: groups.get(GroupKind::NodeLocalData)?,
///         across: groups.get(GroupKind::CrossNodeData)?,
///     };
///     let mut adasum = Adasum::on_nodes(nodes, &gradients, ReduceOp::Mean, AdasumOptions::default())?;
///     adasum.all_reduce(&mut gradients)?;
///     gradients.tensor(0).to_vec::<f32>()
/// })?;
/// assert!(results.windows(2).all(|ranks| ranks[0] == ranks[1]));
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Nodes<'a, M: Memory = Host> {
    /// All ranks.
    pub all: &'a dyn Communicator<M>,
    /// The ranks of this node.
    pub node: &'a dyn Communicator<M>,
    /// One rank of every node, in the nodes' order: the ranks with the same rank in their `node`.
    pub across: &'a dyn Communicator<M>,
}

/// A rank's position among the nodes, in the form that ranks compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GridPosition {
    /// The position in its `node`.
    on_node: GroupPosition,
    /// The position in its `across`.
    across: GroupPosition,
}

/// A rank's position in one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GroupPosition {
    rank: u64,
    world_size: u64,
    /// The number, among all ranks, of the group's first rank, which is unique among the groups of this kind.
    first: u64,
}

impl GroupPosition {
    /// The number of words of a position.
    const WORDS: usize = 3;

    fn of_words(words: &[u64]) -> Self {
        GroupPosition { rank: words[0], world_size: words[1], first: words[2] }
    }
}

/// Refuses groups that do not form a grid of nodes and positions, given every rank's position, in the order of `all`. The result is the
/// same on every rank.
fn check_grid(operation: &'static str, positions: &[GridPosition]) -> Result<()> {
    let refuse = |reason: String| Err(Error::InvalidArgument { operation, reason });
    let (node_size, nodes) = (positions[0].on_node.world_size, positions[0].across.world_size);
    if node_size * nodes != positions.len() as u64 {
        let ranks = positions.len();
        return refuse(format!("rank 0 has {nodes} nodes of {node_size} ranks, and there are {ranks} ranks in all"));
    }
    for (rank, position) in positions.iter().enumerate() {
        let (theirs, their_nodes) = (position.on_node.world_size, position.across.world_size);
        if (theirs, their_nodes) != (node_size, nodes) {
            return refuse(format!(
                "rank 0 has {nodes} nodes of {node_size} ranks, rank {rank} has {their_nodes} nodes of {theirs} ranks"
            ));
        }
        let before = || positions[..rank].iter().enumerate();
        if let Some((other, _)) = before().find(|(_, other)| {
            other.on_node.first == position.on_node.first && other.across.rank != position.across.rank
        }) {
            return refuse(format!(
                "ranks {other} and {rank} are on one node, and have different ranks in their groups across nodes, \
                 which must be equal"
            ));
        }
        if let Some((other, _)) = before().find(|(_, other)| {
            other.across.first == position.across.first && other.on_node.rank != position.on_node.rank
        }) {
            return refuse(format!(
                "ranks {other} and {rank} are in one group across nodes, and have different ranks on their nodes, \
                 which must be equal"
            ));
        }
    }
    Ok(())
}

/// Refuses reductions inside a node that are not linear.
fn check_within(operation: &'static str, within_node: WithinNode) -> Result<()> {
    let WithinNode::Reduce(op) = within_node else { return Ok(()) };
    if matches!(op, ReduceOp::Sum | ReduceOp::Mean) {
        return Ok(());
    }
    let reason = format!("nodes reduce by sum, mean or Adasum before Adasum, not by {op}");
    Err(Error::InvalidArgument { operation, reason })
}

/// The levels at which the ranks' vectors are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Levels {
    /// One Gram matrix of all ranks.
    One,
    /// Inside nodes, and then a Gram matrix of nodes.
    GramOfNodes,
    /// Inside nodes, and then the tree over nodes.
    TreeOfNodes,
}

impl Levels {
    /// The requested levels, or for [`Algorithm::Auto`] the levels that [`cost`] finds fastest among the levels
    /// with the same result; a switch is logged. `positions` has the positions of all ranks. The result is the same on every rank.
    ///
    /// # Errors
    /// [`Error::UnsupportedWorldSize`] for the tree over a number of nodes that is no power of two.
    pub(super) fn choose(
        within_node: WithinNode,
        options: AdasumOptions,
        positions: &[GridPosition],
        bytes: usize,
    ) -> Result<Self> {
        let (per_node, nodes) = (positions[0].on_node.world_size, positions[0].across.world_size);
        options.algorithm.check_nodes(OPERATION, nodes as usize)?;
        match options.algorithm {
            Algorithm::Auto => {}
            Algorithm::Gram => return Ok(Self::GramOfNodes),
            Algorithm::Tree => return Ok(Self::TreeOfNodes),
        }
        let is_adjacent = |(rank, position): (u64, &GridPosition)| {
            (position.across.rank, position.on_node.rank) == (rank / per_node, rank % per_node)
        };
        let is_tree_of_all = per_node.is_power_of_two() && (0..).zip(positions).all(is_adjacent);
        let is_adasum_of_all = within_node == WithinNode::Adasum && is_tree_of_all;
        // Otherwise only the step across nodes is chosen, with the same choice as after a sum.
        let among = if is_adasum_of_all { Scheme::OF_NODES } else { Scheme::OF_SUMS };
        let choice = cost::choose(among, positions.len(), per_node as usize, bytes);
        if choice.scheme != choice.usual {
            tracing::info!(ranks = positions.len(), per_node, bytes, ?within_node, %choice, "Adasum across nodes");
        }
        Ok(match choice.scheme {
            Scheme::Gram => Self::One,
            Scheme::GramThenTree | Scheme::SumThenTree => Self::TreeOfNodes,
            _ => Self::GramOfNodes,
        })
    }
}

/// Replaces every rank's buffer by the Adasum of the nodes' sums, means or Adasums, in place: bitwise the same on every rank.
///
/// Inside a node, `within_node` reduces the vectors; nodes then combine as [`adasum_all_reduce`](super::adasum_all_reduce) combines ranks,
/// in the order of `across`, with inner products of whole tensors. With one node the result is the reduction inside the node, and with one
/// rank per node it is Adasum. Between nodes each rank sends its shard once in either direction.
///
/// The options name the algorithm across nodes: inside nodes, Adasum uses a Gram matrix. [`Algorithm::Auto`] selects the Gram matrix of
/// nodes, or the tree over a power of two of nodes where a model of costs finds it faster; with [`WithinNode::Adasum`] it
/// selects one Gram matrix over all ranks where its result differs by one rounding only and it is as fast. In that case the report has
/// weights of ranks. Otherwise it has weights of nodes, or none for the tree, and counts the layers that were recomputed across nodes, not
/// inside them.
///
/// This prepares an [`Adasum::on_nodes`], runs it once and waits for its report. A training loop keeps the object.
///
/// # Errors
/// [`Error::InvalidArgument`] on every rank if the groups do not form a grid of nodes, `within_node` is a
/// [`WithinNode::Reduce`] by another operation than `Sum` or `Mean`, or the buffer was made for another world size than `all` has; [`Error::Disagreement`] on every rank if ranks have different tensors or
/// options; [`Error::UnsupportedWorldSize`] for [`Algorithm::Tree`] over a number of nodes that is no power of two; errors of the
/// communicators. After an error of a communicator, or [`Error::OutOfMemory`], the contents of the buffer are unspecified; other errors
/// leave it unchanged.
pub fn hierarchical_adasum_all_reduce<M: AdasumMemory>(
    nodes: Nodes<'_, M>,
    buffer: &mut GradientBuffer<M>,
    within_node: impl Into<WithinNode>,
    options: AdasumOptions,
) -> Result<AdasumReport> {
    let mut adasum = Adasum::on_nodes(nodes, buffer, within_node, options)?;
    adasum.all_reduce(buffer)?;
    adasum.report()
}

/// Compares tensors, options and groups over all ranks, and returns every rank's position.
pub(super) fn agree<M: Memory>(
    nodes: Nodes<'_, M>,
    table: &TensorTable,
    (within_node, options): (WithinNode, AdasumOptions),
    lines: &[(&str, Value<'_>)],
) -> Result<Vec<GridPosition>> {
    let operation = Operation::HierarchicalAdasumAllReduce(within_node, options);
    same_call(operation, nodes.all, table, lines, check_within(OPERATION, within_node))?;
    check_nodes(OPERATION, nodes)
}

/// Refuses groups that do not form a grid of nodes and positions, or that have ranks outside `all`; returns every rank's position. The
/// result is the same on every rank.
pub(crate) fn check_nodes<M: Memory>(operation: &'static str, nodes: Nodes<'_, M>) -> Result<Vec<GridPosition>> {
    let Nodes { all, node, across } = nodes;
    // Random, so ranks of another world are not mistaken for ranks with the same numbers in this one.
    let badge = RandomState::new().hash_one(all.rank());
    let position_in = |group: &dyn Communicator<M>| {
        let members = gather(group, &[all.rank() as u64, badge])?;
        Ok::<_, Error>([
            group.rank() as u64,
            group.world_size() as u64,
            members[0],
            sum(members.chunks_exact(2).map(|member| member[1])),
        ])
    };
    let own = [&position_in(node)?[..], &position_in(across)?, &[badge]].concat();
    let words = gather(all, &own)?;
    let ranks: Vec<&[u64]> = words.chunks_exact(own.len()).collect();
    let (on_node, across) = (0, GroupPosition::WORDS + 1);
    check_members(operation, "node", on_node, &ranks)?;
    check_members(operation, "across", across, &ranks)?;
    let position_in = |words: &[u64], at: usize| GroupPosition::of_words(&words[at..]);
    let positions: Vec<GridPosition> = ranks
        .iter()
        .map(|words| GridPosition { on_node: position_in(words, on_node), across: position_in(words, across) })
        .collect();
    check_grid(operation, &positions)?;
    Ok(positions)
}

/// Refuses a group of a rank if the badges of its members differ from the badges in `all`. `at` is the offset of the rank's position in
/// this group within its words; the sum of the group's badges follows, and the last word is the rank's own badge.
fn check_members(operation: &'static str, group: &str, at: usize, ranks: &[&[u64]]) -> Result<()> {
    let first = |words: &[u64]| GroupPosition::of_words(&words[at..]).first;
    let is_foreign = |words: &&[u64]| {
        let known = ranks.iter().filter(|other| first(other) == first(words));
        sum(known.map(|other| other[other.len() - 1])) != words[at + GroupPosition::WORDS]
    };
    let Some(rank) = ranks.iter().position(is_foreign) else { return Ok(()) };
    let reason = format!("the group {group:?} of rank {rank} has ranks that are not among all {} ranks", ranks.len());
    Err(Error::InvalidArgument { operation, reason })
}

/// The wrapping sum of the words.
fn sum(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The positions of all ranks, node by node.
    fn positions(nodes: u64, per_node: u64) -> Vec<GridPosition> {
        let position = |rank: u64| {
            let (node, position) = (rank / per_node, rank % per_node);
            GridPosition {
                on_node: GroupPosition { rank: position, world_size: per_node, first: node * per_node },
                across: GroupPosition { rank: node, world_size: nodes, first: position },
            }
        };
        (0..nodes * per_node).map(position).collect()
    }

    fn chosen(within_node: impl Into<WithinNode>, options: AdasumOptions, positions: &[GridPosition]) -> Levels {
        Levels::choose(within_node.into(), options, positions, 32 << 20).unwrap()
    }

    #[test]
    fn choose_takes_one_matrix_then_two_then_a_tree_of_nodes() {
        let auto = AdasumOptions::default();
        let of = |nodes, per_node| chosen(WithinNode::Adasum, auto, &positions(nodes, per_node));
        assert_eq!([of(1, 1), of(1, 8), of(2, 1), of(4, 1)], [Levels::One; 4]);
        assert_eq!([of(2, 8), of(64, 8)], [Levels::GramOfNodes; 2]);
        assert_eq!([of(128, 8), of(64, 1)], [Levels::TreeOfNodes; 2]);
        // The number of nodes is no power of two.
        assert_eq!(of(127, 8), Levels::GramOfNodes);
        // One matrix would give another result, so only the step across nodes is chosen.
        assert_eq!([of(1, 3), of(2, 3)], [Levels::GramOfNodes; 2]);
        assert_eq!(of(256, 3), Levels::TreeOfNodes);
        let mut exchanged = positions(1, 8);
        exchanged.swap(2, 5);
        assert_eq!(chosen(WithinNode::Adasum, auto, &exchanged), Levels::GramOfNodes);
        for op in [ReduceOp::Sum, ReduceOp::Mean] {
            let of = |nodes| chosen(op, auto, &positions(nodes, 8));
            assert_eq!([of(1), of(64), of(127)], [Levels::GramOfNodes; 3]);
            assert_eq!(of(128), Levels::TreeOfNodes);
        }
    }

    #[test]
    fn choose_takes_the_algorithm_of_the_options() {
        let of = |algorithm, nodes| {
            let options = AdasumOptions { algorithm, ..AdasumOptions::default() };
            Levels::choose(WithinNode::Adasum, options, &positions(nodes, 8), 32 << 20)
        };
        for nodes in [1, 2, 3, 128] {
            assert_eq!(of(Algorithm::Gram, nodes).unwrap(), Levels::GramOfNodes);
            match of(Algorithm::Tree, nodes) {
                Ok(levels) => assert_eq!((levels, nodes.is_power_of_two()), (Levels::TreeOfNodes, true)),
                Err(error) => assert!(nodes == 3 && error.to_string().contains("there are 3"), "{error}"),
            }
        }
    }
}
