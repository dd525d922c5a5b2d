//! The groups of a rank when data, horizontal (tensor) and pipeline parallelism divide the world.
//!
//! Ranks fill a grid with the horizontal direction fastest, then data, then pipeline: rank r is at horizontal position `r % H`, data
//! position `r / H % D` and pipeline position `r / (H * D)`. Nodes are runs of `local` consecutive ranks. With 24 ranks, `D = 2`, `H = 3`
//! and 4 pipeline stages, rank 17 shares its model's slice with rank 14, its layer with ranks 15 and 16, and its pipeline with ranks 5, 11
//! and 23:
//!
//! ```
//! use gradsync::groups::{GroupKind, Sizes, Topology};
//!
//! let sizes = Sizes { world: 24, local: 4, data: 2, horizontal: 3, pipeline: 4 };
//! let group = Topology::new(17, sizes)?.group(GroupKind::Pipeline)?;
//! assert_eq!((group.id, group.ranks, group.index), (5, vec![5, 11, 17, 23], 2));
//! # Ok::<(), gradsync::Error>(())
//! ```
//!
//! A group's id and index are the colour and the key of [`Member::split`](crate::bootstrap::Member::split).

pub use crate::call::GroupKind;
use crate::error::{Error, Result};

const OPERATION: &str = "topology";

/// The limit of ranks of a world: NCCL and MPI count them in a 32-bit `int`.
pub const MOST_RANKS: usize = i32::MAX as usize;

/// The number of ranks in each direction. The same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sizes {
    /// The number of ranks of the world: the product of the last three sizes.
    pub world: usize,
    /// The number of ranks of a node; the last node has fewer if this does not divide the world.
    pub local: usize,
    /// The number of ranks of a data group.
    pub data: usize,
    /// The number of ranks of a horizontal group.
    pub horizontal: usize,
    /// The number of ranks of a pipeline group: its stages.
    pub pipeline: usize,
}

/// A group of ranks with a common purpose, from the view of one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Group {
    /// The purpose of the group.
    pub kind: GroupKind,
    /// The number of this group among the groups of its kind, which count from 0 in the order of their lowest ranks.
    pub id: usize,
    /// World ranks of the members, ascending.
    pub ranks: Vec<usize>,
    /// The index of this rank in `ranks`: its rank in the group.
    pub index: usize,
}

/// One rank's position in the grid of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Topology {
    rank: usize,
    sizes: Sizes,
}

impl Topology {
    /// The position of `rank`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the values if a size is 0, a size does not divide the world, the product of the sizes is not the
    /// world, the world has more than [`MOST_RANKS`], or `rank` is not below it.
    pub fn new(rank: usize, sizes: Sizes) -> Result<Self> {
        let refused = |reason| Err(Error::InvalidArgument { operation: OPERATION, reason });
        let Sizes { world, local, data, horizontal, pipeline } = sizes;
        let directions = [("data", data), ("horizontal", horizontal), ("pipeline", pipeline)];
        for (name, size) in [("world", world), ("local", local)].into_iter().chain(directions) {
            if size == 0 {
                return refused(format!("the {name} size is 0"));
            }
        }
        if world > MOST_RANKS {
            return refused(format!("the world size is {world}, and the most is {MOST_RANKS}"));
        }
        for (name, size) in directions {
            if world % size != 0 {
                return refused(format!("the {name} size {size} does not divide the world size {world}"));
            }
        }
        if data.checked_mul(horizontal).and_then(|product| product.checked_mul(pipeline)) != Some(world) {
            return refused(format!(
                "the data size {data}, the horizontal size {horizontal} and the pipeline size {pipeline} multiplied \
                 are not the world size {world}"
            ));
        }
        if rank >= world {
            return refused(format!("rank {rank} is not in a world of {world}"));
        }
        Ok(Self { rank, sizes })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks in each direction.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// The number of this rank's node.
    pub fn node(&self) -> usize {
        self.rank / self.sizes.local
    }

    /// The number of this rank on its node.
    pub fn local_rank(&self) -> usize {
        self.rank % self.sizes.local
    }

    /// The group of this kind to which this rank belongs.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for cross-node data groups, on every rank, if *any* data group of the world has more members on one of
    /// its nodes than on another: shards would differ in length. The message names the group and the nodes. No other kind is ever refused.
    pub fn group(&self, kind: GroupKind) -> Result<Group> {
        let Sizes { world, data, horizontal, pipeline, .. } = self.sizes;
        let ranks: Vec<usize> = match kind {
            GroupKind::World => (0..world).collect(),
            GroupKind::Horizontal => {
                let first = self.rank - self.rank % horizontal;
                (first..first + horizontal).collect()
            }
            GroupKind::Data => self.data_group(self.rank).collect(),
            GroupKind::Pipeline => {
                let stage = horizontal * data;
                (0..pipeline).map(|z| self.rank % stage + z * stage).collect()
            }
            GroupKind::NodeLocalData => {
                let local = |rank: &usize| self.node_of(*rank) == self.node();
                self.data_group(self.rank).filter(local).collect()
            }
            GroupKind::CrossNodeData => {
                self.check_nodes()?;
                // Every node of the data group has the same number of members, and they are consecutive in the group.
                let per_node = self.members_on_first_node(self.rank);
                self.data_group(self.rank)
                    .skip(self.index_in_data_group(self.rank) % per_node)
                    .step_by(per_node)
                    .collect()
            }
        };
        let id = match kind {
            GroupKind::World => 0,
            GroupKind::Horizontal => self.rank / horizontal,
            GroupKind::Data => self.data_id(self.rank),
            GroupKind::Pipeline => self.rank % (horizontal * data),
            GroupKind::NodeLocalData => self.node_groups_below(ranks[0]),
            GroupKind::CrossNodeData => self.cross_groups_below(ranks[0]),
        };
        let index = ranks.partition_point(|&rank| rank < self.rank);
        Ok(Group { kind, id, ranks, index })
    }

    /// Whether two kinds divide the world into the same groups, so that ranks can share one communicator for both. The result is the same
    /// on every rank.
    ///
    /// # Errors
    /// The errors of [`group`](Self::group), for either kind.
    pub fn same_groups(&self, one: GroupKind, other: GroupKind) -> Result<bool> {
        let (count, other_count) = (self.count(one)?, self.count(other)?);
        let is_within_data = |kind| matches!(kind, GroupKind::NodeLocalData | GroupKind::CrossNodeData);
        // Groups of one kind are subsets of groups of the other, so equal counts mean equal groups.
        let is_nested = one == other
            || one == GroupKind::World
            || other == GroupKind::World
            || (one == GroupKind::Data && is_within_data(other))
            || (other == GroupKind::Data && is_within_data(one));
        // Groups of any two other kinds have at most one rank in common.
        Ok(count == other_count && (is_nested || count == self.sizes.world))
    }

    /// The number of groups of a kind.
    fn count(&self, kind: GroupKind) -> Result<usize> {
        let Sizes { world, data, horizontal, pipeline, .. } = self.sizes;
        Ok(match kind {
            GroupKind::World => 1,
            GroupKind::Data => world / data,
            GroupKind::NodeLocalData => self.node_groups_below(world),
            GroupKind::CrossNodeData => {
                self.check_nodes()?;
                self.cross_groups_below(world)
            }
            GroupKind::Horizontal => world / horizontal,
            GroupKind::Pipeline => world / pipeline,
        })
    }

    /// The number of node-local data groups that begin below `end`.
    fn node_groups_below(&self, end: usize) -> usize {
        (0..end).filter(|&rank| self.leads_node(rank)).count()
    }

    /// The number of cross-node data groups that begin below `end`; every data group must have the same number of members on each of its
    /// nodes.
    fn cross_groups_below(&self, end: usize) -> usize {
        (0..end).filter(|&rank| self.index_in_data_group(rank) < self.members_on_first_node(rank)).count()
    }

    fn node_of(&self, rank: usize) -> usize {
        rank / self.sizes.local
    }

    /// The index of a rank in its data group.
    fn index_in_data_group(&self, rank: usize) -> usize {
        rank / self.sizes.horizontal % self.sizes.data
    }

    fn data_id(&self, rank: usize) -> usize {
        let Sizes { data, horizontal, .. } = self.sizes;
        rank % horizontal + rank / (horizontal * data) * horizontal
    }

    /// The data group of a rank.
    fn data_group(&self, rank: usize) -> impl Iterator<Item = usize> {
        let Sizes { data, horizontal, .. } = self.sizes;
        let first = rank - self.index_in_data_group(rank) * horizontal;
        (0..data).map(move |y| first + y * horizontal)
    }

    /// Whether a rank is the lowest of its data group on its node.
    fn leads_node(&self, rank: usize) -> bool {
        self.index_in_data_group(rank) == 0 || self.node_of(rank - self.sizes.horizontal) != self.node_of(rank)
    }

    /// The number of members of a rank's data group on its node, from that rank on.
    fn members_from(&self, rank: usize) -> usize {
        let Sizes { local, data, horizontal, .. } = self.sizes;
        (local - rank % local).div_ceil(horizontal).min(data - self.index_in_data_group(rank))
    }

    /// The number of members of a rank's data group on the node of its first member.
    fn members_on_first_node(&self, rank: usize) -> usize {
        self.members_from(rank - self.index_in_data_group(rank) * self.sizes.horizontal)
    }

    /// Refuses a world in which a data group has more members on one node than on another.
    fn check_nodes(&self) -> Result<()> {
        for rank in (0..self.sizes.world).filter(|&rank| self.leads_node(rank)) {
            let (per_node, members) = (self.members_on_first_node(rank), self.members_from(rank));
            if members != per_node {
                let first = rank - self.index_in_data_group(rank) * self.sizes.horizontal;
                let reason = format!(
                    "data group {} has {per_node} members on node {} and {members} on node {}, where cross-node data \
                     groups need equally many",
                    self.data_id(rank),
                    self.node_of(first),
                    self.node_of(rank)
                );
                return Err(Error::InvalidArgument { operation: OPERATION, reason });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(world: usize, local: usize, data: usize, horizontal: usize, pipeline: usize) -> Sizes {
        Sizes { world, local, data, horizontal, pipeline }
    }

    #[track_caller]
    fn refusal(rank: usize, sizes: Sizes) -> String {
        Topology::new(rank, sizes).unwrap_err().to_string()
    }

    #[test]
    fn sizes_refused_are_named() {
        for (index, name) in ["world", "local", "data", "horizontal", "pipeline"].into_iter().enumerate() {
            let mut given = [1; 5];
            given[index] = 0;
            let [world, local, data, horizontal, pipeline] = given;
            let message = refusal(0, sizes(world, local, data, horizontal, pipeline));
            assert_eq!(message, format!("topology: the {name} size is 0"));
        }
        assert!(refusal(0, sizes(64, 8, 65, 1, 1)).contains("data size 65 does not divide the world size 64"));
        assert!(refusal(0, sizes(64, 8, 1, 5, 1)).contains("horizontal size 5 does not divide the world size 64"));
        assert!(refusal(0, sizes(64, 8, 1, 1, 3)).contains("pipeline size 3 does not divide"));
        let message = refusal(0, sizes(64, 8, 8, 4, 1));
        assert!(["size 8", "size 4", "size 1 ", "size 64"].iter().all(|value| message.contains(value)), "{message}");
        assert!(refusal(64, sizes(64, 8, 8, 8, 1)).contains("rank 64 is not in a world of 64"));
        let huge = usize::MAX;
        assert!(refusal(0, sizes(huge, 1, huge, 1, 1)).contains(&huge.to_string()));
        // Each size divides the world, and the product exceeds `usize`.
        let most = MOST_RANKS;
        assert!(refusal(0, sizes(most, 1, most, most, most)).contains("multiplied"));
    }

    #[test]
    fn topology_takes_a_node_larger_than_the_world() {
        let topology = Topology::new(3, sizes(4, 8, 4, 1, 1)).unwrap();
        assert_eq!((topology.node(), topology.local_rank()), (0, 3));
        assert_eq!(topology.group(GroupKind::NodeLocalData).unwrap().ranks, [0, 1, 2, 3]);
        assert_eq!(topology.group(GroupKind::CrossNodeData).unwrap().ranks, [3]);
    }
}
