//! The distribution of a launch's ranks over GPUs and nodes, and the environment variables that describe it to the processes.
//!
//! Consecutive ranks fill a GPU, and a node. Nodes of one machine are simulated: NCCL treats ranks with different values of `NCCL_HOSTID`
//! as ranks of different machines and moves their data by sockets. Communicators over NCCL detect machines by the same variable, and those of
//! processes, for host data, by `GRADSYNC_HOSTID`.

use std::env;

use super::suites::Who;

/// Thread blocks of NCCL's kernels on one GPU, for all its ranks together. A block of each channel waits for the other ranks' blocks, so
/// all of them must be resident at once: without a limit, four ranks hang from 1 Mi elements on.
const CHANNELS: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) ranks_per_gpu: usize,
    pub(crate) nodes: usize,
}

impl Layout {
    /// One rank per GPU on one node, which needs no variables.
    pub(crate) const PLAIN: Self = Self { ranks_per_gpu: 1, nodes: 1 };

    pub(crate) fn shares_gpus(self) -> bool {
        self.ranks_per_gpu > 1
    }

    /// The environment variables of a launch's processes, besides the rank and the rendezvous. Variables that limit NCCL or choose its
    /// network are not changed if the caller has set them.
    pub(crate) fn variables(self, world: usize, who: Who) -> Vec<(&'static str, String)> {
        let per_node = world / self.nodes;
        let mut variables = vec![("LOCAL_WORLD_SIZE", per_node.to_string())];
        if let Who::Rank(rank) = who {
            variables.push(("LOCAL_RANK", (rank % per_node).to_string()));
            if self.nodes > 1 {
                let node = rank / per_node;
                variables.push(("GROUP_RANK", node.to_string()));
                for name in ["NCCL_HOSTID", "GRADSYNC_HOSTID"] {
                    variables.push((name, format!("gradsync-node-{node}")));
                }
            }
        }
        if self != Self::PLAIN {
            variables.push(("GRADSYNC_TEST_RANKS_PER_GPU", self.ranks_per_gpu.to_string()));
            variables.push(("GRADSYNC_TEST_NODES", self.nodes.to_string()));
        }
        let mut defaults = Vec::new();
        if self.shares_gpus() {
            variables.push(("NCCL_MULTI_RANK_GPU_ENABLE", "1".to_owned()));
            let channels = (CHANNELS / self.ranks_per_gpu.min(world)).clamp(1, 4).to_string();
            defaults.push(("NCCL_MAX_NCHANNELS", channels.clone()));
            defaults.push(("NCCL_MAX_P2P_NCHANNELS", channels));
            defaults.push(("NCCL_NVLS_ENABLE", "0".to_owned()));
            if who == Who::AllRanks {
                // A process has eight hardware connections to the GPU by default, and streams that share a connection wait for each other.
                defaults.push(("CUDA_DEVICE_MAX_CONNECTIONS", "32".to_owned()));
            }
        }
        if self.nodes > 1 {
            defaults.push(("NCCL_SOCKET_IFNAME", "lo".to_owned()));
            defaults.push(("NCCL_IB_DISABLE", "1".to_owned()));
        }
        variables.extend(defaults.into_iter().filter(|(name, _)| env::var_os(name).is_none()));
        variables
    }

    /// The first line of a report; `None` for the plain layout.
    pub(crate) fn headline(self, gpus: usize, how: &str) -> Option<String> {
        if self == Self::PLAIN {
            return None;
        }
        let mut line = format!("{gpus} GPU{}", if gpus == 1 { "" } else { "s" });
        if self.shares_gpus() {
            line.push_str(&format!(", up to {} ranks on each, {how}", self.ranks_per_gpu));
        }
        if self.nodes > 1 {
            line.push_str(&format!("; {} nodes, made up by NCCL_HOSTID", self.nodes));
        }
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(layout: Layout, world: usize, who: Who, name: &str) -> Option<String> {
        layout.variables(world, who).into_iter().find(|(other, _)| *other == name).map(|(_, value)| value)
    }

    #[test]
    fn variables_of_a_plain_layout_are_the_position_alone() {
        let found = Layout::PLAIN.variables(4, Who::Rank(3));
        assert_eq!(found, [("LOCAL_WORLD_SIZE", "4".to_owned()), ("LOCAL_RANK", "3".to_owned())]);
        assert_eq!(Layout::PLAIN.variables(4, Who::AllRanks), [("LOCAL_WORLD_SIZE", "4".to_owned())]);
        assert_eq!(Layout::PLAIN.headline(2, ""), None);
    }

    #[test]
    fn variables_give_as_few_channels_as_the_ranks_of_a_gpu_need() {
        let layout = |ranks_per_gpu| Layout { ranks_per_gpu, ..Layout::PLAIN };
        let channels = |(ranks_per_gpu, world)| {
            value(layout(ranks_per_gpu), world, Who::Rank(0), "NCCL_MAX_NCHANNELS").map(|text| text.parse().unwrap())
        };
        let found = [(1, 8), (2, 2), (8, 2), (4, 4), (8, 8), (64, 64)].map(channels);
        assert_eq!(found, [None, Some(4), Some(4), Some(4), Some(2), Some(1)]);
        let connections = |who| value(layout(2), 2, who, "CUDA_DEVICE_MAX_CONNECTIONS");
        assert_eq!((connections(Who::Rank(0)), connections(Who::AllRanks)), (None, Some("32".to_owned())));
    }

    #[test]
    fn layout_puts_consecutive_ranks_on_one_node() {
        let layout = Layout { ranks_per_gpu: 8, nodes: 2 };
        let names = ["GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_HOSTID"];
        let found = [0, 3, 4, 7].map(|rank| {
            let values = names.map(|name| value(layout, 8, Who::Rank(rank), name).unwrap());
            values.join(" ")
        });
        let expected =
            ["0 0 4 gradsync-node-0", "0 3 4 gradsync-node-0", "1 0 4 gradsync-node-1", "1 3 4 gradsync-node-1"];
        assert_eq!(found, expected);
        for rank in [0, 3, 4, 7] {
            let host = |name| value(layout, 8, Who::Rank(rank), name);
            assert_eq!(host("GRADSYNC_HOSTID"), host("NCCL_HOSTID"), "rank {rank}");
        }
        assert_eq!(value(layout, 8, Who::Rank(1), "NCCL_SOCKET_IFNAME").as_deref(), Some("lo"));
        let expected = "1 GPU, up to 8 ranks on each, in time slices; 2 nodes, made up by NCCL_HOSTID";
        assert_eq!(layout.headline(1, "in time slices").unwrap(), expected);
    }
}
