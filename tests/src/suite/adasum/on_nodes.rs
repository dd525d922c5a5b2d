//! One hierarchical Adasum as data: the placement of ranks on nodes, the input of each rank, and the oracle's result for the nodes' sums.

use crate::inputs::Kind;
use crate::oracle::Format;
use crate::tolerance::adasum::Method;
use crate::tolerance::assert_within;
use gradsync::comm::{Communicator, Ranks, ReduceOp, Split};
use gradsync::memory::Memory;
use gradsync::ops::{Algorithm, Nodes};

use super::case::Case;

/// The groups of a rank: all ranks, its node, and one rank of each node.
pub struct Groups<'c, C> {
    /// All ranks.
    pub all: &'c C,
    node: C,
    across: C,
}

impl<'c, C: Split> Groups<'c, C> {
    /// The groups of the rank that is at `place` on the node with the number `node`.
    ///
    /// # Panics
    /// If the groups cannot be made.
    pub fn new(all: &'c C, (node, place): (usize, usize)) -> Self {
        let split = |color: usize| all.split(Some(color as u64), 0).unwrap().expect("every rank has a colour");
        let (node, across) = (split(node), split(place));
        Groups { all, node, across }
    }

    /// Nodes of this many consecutive ranks.
    ///
    /// # Panics
    /// If the groups cannot be made.
    pub fn of(all: &'c C, per_node: usize) -> Self
    where
        C: Ranks,
    {
        Self::new(all, (all.rank() / per_node, all.rank() % per_node))
    }

    /// The groups as an argument.
    pub fn nodes<M: Memory>(&self) -> Nodes<'_, M>
    where
        C: Communicator<M>,
    {
        Nodes { all: self.all, node: &self.node, across: &self.across }
    }
}

/// The input of all ranks, and the ranks that form a node.
#[derive(Clone, Debug)]
pub struct OnNodes {
    /// The input of every rank, before nodes are reduced.
    pub all: Case,
    /// The number of ranks of each node.
    pub per_node: usize,
    /// The reduction inside a node.
    pub within_node: ReduceOp,
    /// Whether consecutive ranks are on different nodes.
    pub interleaved: bool,
}

impl OnNodes {
    /// A case in which every rank has random vectors of its own.
    pub fn random(format: Format, nodes: usize, per_node: usize, shapes: &[&[usize]], seed: u64) -> Self {
        let all = Case::of(Kind::Random, format, nodes * per_node, shapes, seed);
        Self { all, per_node, within_node: ReduceOp::Sum, interleaved: false }
    }

    /// A case in which the nodes' sums are of one kind: in each node, one rank holds the layer, and the other ranks hold zeros.
    pub fn of_kind(kind: Kind, format: Format, nodes: usize, per_node: usize, shapes: &[&[usize]], seed: u64) -> Self {
        let sums = Case::of(kind, format, nodes, shapes, seed);
        let of_rank = |rank: usize| {
            let (node, place) = (rank / per_node, rank % per_node);
            let layers = sums.inputs[node].iter().enumerate();
            layers
                .map(|(i, layer)| if i % per_node == place { layer.clone() } else { vec![0.0; layer.len()] })
                .collect()
        };
        let inputs = (0..nodes * per_node).map(of_rank).collect();
        Self { all: Case { inputs, ..sums }, per_node, within_node: ReduceOp::Sum, interleaved: false }
    }

    /// Reduces by mean inside nodes.
    pub fn with_mean(mut self) -> Self {
        self.within_node = ReduceOp::Mean;
        self
    }

    /// Combines the nodes along the tree.
    pub fn along_tree(mut self) -> Self {
        self.all.algorithm = Algorithm::Tree;
        self
    }

    /// Assigns ranks to nodes in turn.
    pub fn interleaved(mut self) -> Self {
        self.interleaved = true;
        self
    }

    /// The number of nodes.
    pub fn nodes(&self) -> usize {
        self.all.world_size() / self.per_node
    }

    /// The node of a rank, and the rank's index in it.
    pub fn place(&self, rank: usize) -> (usize, usize) {
        if self.interleaved {
            (rank % self.nodes(), rank / self.nodes())
        } else {
            (rank / self.per_node, rank % self.per_node)
        }
    }

    /// The Adasum case over the nodes' sums or means, which are formed in `f64` in the order of indices and rounded once.
    pub fn of_nodes(&self) -> Case {
        let divisor = if self.within_node == ReduceOp::Mean { self.per_node as f64 } else { 1.0 };
        let of_node = |node: usize| {
            let ranks: Vec<usize> = (0..self.all.world_size()).filter(|&rank| self.place(rank).0 == node).collect();
            let element = |layer: usize, index: usize| {
                let values = ranks.iter().map(|&rank| self.all.inputs[rank][layer][index]);
                self.all.format.round(values.reduce(|sum, value| sum + value).expect("a node has ranks") / divisor)
            };
            let layer =
                |layer: usize| (0..self.all.inputs[0][layer].len()).map(|index| element(layer, index)).collect();
            (0..self.all.shapes.len()).map(layer).collect()
        };
        Case { inputs: (0..self.nodes()).map(of_node).collect(), ..self.all.clone() }
    }

    /// Compares the layers, laid end to end, and the fields of the report: the algorithm, the nodes' weights and the number of recomputed
    /// layers.
    pub fn check(
        &self,
        what: &str,
        layers: &[f64],
        (algorithm, weights, recomputed): (Algorithm, Option<&[f64]>, usize),
    ) {
        let combined = self.of_nodes();
        let is_tree = combined.algorithm == Algorithm::Tree;
        let expected = combined.expectation(if is_tree { Method::Tree } else { Method::Gram });
        assert!(expected.bounds.iter().all(|bound| bound.is_finite()), "{what}: an infinite bound would check nothing");
        assert_within(what, combined.format, layers, &expected.exact, &expected.bounds);
        assert_eq!(algorithm, combined.algorithm, "{what}");
        if is_tree {
            assert_eq!((weights, recomputed), (None, 0), "{what}: only Gram has these");
            return;
        }
        let weights = weights.unwrap_or_else(|| panic!("{what}: Gram reports weights"));
        assert_within(&format!("weights, {what}"), Format::F64, weights, &expected.weights, &expected.weight_bounds);
        let range = expected.surely_cancelled()..=expected.possibly_cancelled();
        assert!(range.contains(&recomputed), "{what}: {recomputed} layers recomputed, not {range:?}");
    }

    /// A description for messages.
    pub fn name(&self) -> String {
        let Self { all, per_node, within_node, interleaved, .. } = self;
        let order = if *interleaved { ", interleaved" } else { "" };
        let Case { format, granularity, algorithm, .. } = all;
        format!("{format:?} {granularity:?} {algorithm:?}, {} nodes of {per_node}{order}, {within_node}", self.nodes())
    }
}
