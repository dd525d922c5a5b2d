//! The ranks of a step, node by node: what they compare and agree on.
//!
//! A rank stands in at most two groups, the one of its node and the one across nodes. Whatever is found out goes
//! through the first and then the second, so that every rank of every node learns it. Nothing here touches tensors.

use crate::comm::{Communicator, gather_words};
use crate::error::{Error, Result};

/// A rank's two groups.
#[derive(Clone, Copy)]
pub(super) struct Ranks<'a> {
    /// One rank of every node.
    pub(super) across: &'a dyn Communicator,
    /// The ranks of this node.
    pub(super) node: Option<&'a dyn Communicator>,
}

impl Ranks<'_> {
    /// How many ranks this node has.
    pub(super) fn on_node(self) -> usize {
        self.node.map_or(1, |node| node.world_size())
    }

    /// Refuses ranks that hold different numbers, on every rank.
    pub(super) fn same(self, operation: &'static str, fingerprint: u64) -> Result<()> {
        let what =
            "tensors of other names, shapes, order or dtype, another number of ranks on the node, or other options";
        let on_node = match self.node {
            Some(node) => odd_one(&gathered(node, [fingerprint])?),
            None => None,
        };
        let words = gathered(self.across, [u64::from(on_node.is_some()), fingerprint])?;
        let reason = if let Some(odd) = on_node {
            format!("rank 0 and rank {odd} of this node have {what}")
        } else if let Some(node) = words.iter().position(|word| word[0] != 0) {
            format!("the ranks on the node of rank {node} have {what}")
        } else if let Some(odd) = odd_one(&words) {
            format!("rank 0 and rank {odd} have {what}")
        } else {
            return Ok(());
        };
        Err(Error::InvalidArgument { operation, reason })
    }

    /// The places, in the group across nodes, of the nodes on which not every rank holds that all is well. The same on
    /// every rank.
    pub(super) fn not_well(self, well: bool) -> Result<Vec<usize>> {
        let node_is_well = match self.node {
            Some(node) => gathered(node, [u64::from(well)])?.iter().all(|word| word[0] == 1),
            None => well,
        };
        let nodes = gathered(self.across, [u64::from(node_is_well)])?;
        Ok(nodes.iter().enumerate().filter(|(_, word)| word[0] == 0).map(|(node, _)| node).collect())
    }
}

/// The first entry that differs from entry 0.
fn odd_one<const N: usize>(words: &[[u64; N]]) -> Option<usize> {
    words.iter().position(|word| word != &words[0])
}

/// Every rank's words, in rank order.
fn gathered<const N: usize>(comm: &dyn Communicator, words: [u64; N]) -> Result<Vec<[u64; N]>> {
    let all = gather_words(comm, &words)?;
    Ok(all.chunks_exact(N).map(|of_rank| std::array::from_fn(|place| of_rank[place])).collect())
}
