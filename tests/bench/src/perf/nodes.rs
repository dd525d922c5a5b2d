//! Adasum of ranks in nodes: the algorithms inside and across nodes, and the groups of ranks that they need.
//!
//! Consecutive ranks form nodes of `--ranks-per-node` ranks, whichever machines they are on; a fit uses rows with the fit's own node size.
//! Nothing is measured in this module.

use gradsync::comm::{ReduceOp, Split};
use gradsync::internal::plan::cost::Scheme;
use gradsync::ops::{AdasumOptions, Algorithm, WithinNode};

use super::PerfError;

/// A scheme of two levels, and the number of ranks per node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OnNodes {
    pub(crate) scheme: Scheme,
    pub(crate) per_node: usize,
}

impl OnNodes {
    /// Whether ranks of a node are summed, and Adasum combines the nodes' sums.
    pub(crate) fn is_of_sums(self) -> bool {
        matches!(self.scheme, Scheme::SumThenGram | Scheme::SumThenTree)
    }

    fn is_tree(self) -> bool {
        matches!(self.scheme, Scheme::GramThenTree | Scheme::SumThenTree)
    }

    pub(crate) fn within(self) -> WithinNode {
        if self.is_of_sums() { ReduceOp::Sum.into() } else { WithinNode::Adasum }
    }

    /// The options of the step across nodes.
    pub(crate) fn options(self) -> AdasumOptions {
        let algorithm = if self.is_tree() { Algorithm::Tree } else { Algorithm::Gram };
        AdasumOptions::default().with_algorithm(algorithm)
    }

    /// The reason why `ranks` ranks cannot use this scheme.
    pub(crate) fn refuses(self, ranks: usize) -> Option<String> {
        let Self { scheme, per_node } = self;
        if ranks % per_node != 0 {
            return Some(format!("adasum by {scheme}: {ranks} ranks are no nodes of {per_node} (--ranks-per-node)"));
        }
        let nodes = ranks / per_node;
        (self.is_tree() && !nodes.is_power_of_two())
            .then(|| format!("adasum by {scheme} needs a power of two of nodes, not {nodes}"))
    }
}

/// The group of this rank's node, and the group of ranks in this rank's position on all nodes.
pub(crate) struct Groups<C> {
    pub(crate) node: C,
    pub(crate) across: C,
}

impl<C: Split> Groups<C> {
    /// Creates the groups. Every rank of `comm` must call it.
    pub(crate) fn new(comm: &C, rank: usize, per_node: usize) -> Result<Self, PerfError> {
        let split =
            |color: usize| comm.split(Some(color as u64), 0).map(|group| group.expect("every rank has a colour"));
        Ok(Self { node: split(rank / per_node)?, across: split(rank % per_node)? })
    }
}
