//! The placement of ranks on GPUs and nodes. `cargo xtask test-multi-gpu` describes it in two variables; the default is one rank per GPU on
//! one node.
//!
//! Consecutive ranks fill a GPU, and a node. Nodes may be simulated: then `NCCL_HOSTID` separates them, and they have the same GPUs.

/// The number of consecutive ranks on one GPU.
const RANKS_PER_GPU: &str = "GRADSYNC_TEST_RANKS_PER_GPU";
/// The number of nodes.
const NODES: &str = "GRADSYNC_TEST_NODES";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    ranks_per_gpu: usize,
    pub(crate) nodes: usize,
    pub(crate) ranks_per_node: usize,
}

impl Layout {
    pub(crate) fn from_env(world_size: usize) -> Self {
        let number = |name: &str| match std::env::var(name) {
            Ok(text) => match text.parse() {
                Ok(number) if number > 0 => number,
                _ => panic!("{name} is {text:?}, and no positive number"),
            },
            Err(_) => 1,
        };
        let (ranks_per_gpu, nodes) = (number(RANKS_PER_GPU), number(NODES));
        assert_eq!(world_size % nodes, 0, "{world_size} ranks on {nodes} nodes");
        Layout { ranks_per_gpu, nodes, ranks_per_node: world_size / nodes }
    }

    /// The number of a rank's GPU.
    pub(crate) fn device(self, rank: usize) -> usize {
        rank / self.ranks_per_gpu
    }

    /// Whether GPUs have several ranks, where there are as many.
    pub(crate) fn shares_gpus(self) -> bool {
        self.ranks_per_gpu > 1
    }

    /// Whether all ranks reach each other's memory.
    pub(crate) fn reaches_peers(self) -> bool {
        self.nodes == 1
    }
}
