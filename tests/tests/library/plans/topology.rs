//! The groups of every rank of simulated worlds, against a grid filled according to section 1.3 of the specification.

use std::collections::BTreeMap;

use gradsync::groups::{Group, GroupKind, Sizes, Topology};
use proptest::prelude::*;

fn sizes(local: usize, data: usize, horizontal: usize, pipeline: usize) -> Sizes {
    Sizes { world: data * horizontal * pipeline, local, data, horizontal, pipeline }
}

fn group(rank: usize, sizes: Sizes, kind: GroupKind) -> Group {
    Topology::new(rank, sizes).unwrap().group(kind).unwrap()
}

/// The id, the members and the index in a group.
fn parts(rank: usize, sizes: Sizes, kind: GroupKind) -> (usize, Vec<usize>, usize) {
    let group = group(rank, sizes, kind);
    assert_eq!(group.kind, kind);
    (group.id, group.ranks, group.index)
}

/// Ranks grouped by equal keys, in groups ordered by their lowest ranks.
fn divided<K: Ord>(world: usize, key: impl Fn(usize) -> K) -> Vec<Vec<usize>> {
    let mut groups = BTreeMap::new();
    for rank in 0..world {
        groups.entry(key(rank)).or_insert_with(Vec::new).push(rank);
    }
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.sort();
    groups
}

/// All groups of a kind, in order. For cross-node data groups, the error is the number of a data group that nodes share unevenly.
fn expected(sizes: Sizes, kind: GroupKind) -> Result<Vec<Vec<usize>>, usize> {
    let Sizes { world, local, data, horizontal, pipeline } = sizes;
    let mut grid = Vec::new();
    for z in 0..pipeline {
        for y in 0..data {
            for x in 0..horizontal {
                grid.push((x, y, z));
            }
        }
    }
    assert_eq!(grid.len(), world);
    let data_key = |rank: usize| (grid[rank].0, grid[rank].2);
    let on_node = |rank: usize, node: usize| -> Vec<usize> {
        (0..world).filter(|&other| data_key(other) == data_key(rank) && other / local == node).collect()
    };
    match kind {
        GroupKind::World => Ok(divided(world, |_| ())),
        GroupKind::Data => Ok(divided(world, data_key)),
        GroupKind::NodeLocalData => Ok(divided(world, |rank| (data_key(rank), rank / local))),
        GroupKind::Horizontal => Ok(divided(world, |rank| (grid[rank].1, grid[rank].2))),
        GroupKind::Pipeline => Ok(divided(world, |rank| (grid[rank].0, grid[rank].1))),
        GroupKind::CrossNodeData => {
            for (id, members) in divided(world, data_key).iter().enumerate() {
                let per_node: Vec<_> = members.iter().map(|&rank| on_node(rank, rank / local).len()).collect();
                if per_node.iter().any(|&count| count != per_node[0]) {
                    return Err(id);
                }
            }
            let index = |rank: usize| on_node(rank, rank / local).iter().position(|&other| other == rank);
            Ok(divided(world, |rank| (data_key(rank), index(rank))))
        }
        other => unreachable!("no oracle for {other:?}"),
    }
}

fn check(sizes: Sizes) {
    for kind in GroupKind::ALL {
        let expected = expected(sizes, kind);
        for rank in 0..sizes.world {
            let found = Topology::new(rank, sizes).unwrap().group(kind);
            match &expected {
                Ok(groups) => {
                    let id = groups.iter().position(|ranks| ranks.contains(&rank)).unwrap();
                    let index = groups[id].iter().position(|&other| other == rank).unwrap();
                    let Group { kind: of, id: at, ranks, index: own, .. } = found.unwrap();
                    assert_eq!(
                        (of, at, &ranks, own),
                        (kind, id, &groups[id], index),
                        "{kind} of rank {rank}, {sizes:?}"
                    );
                }
                Err(_) => assert!(found.is_err(), "{kind} of rank {rank}, {sizes:?}"),
            }
        }
    }
    for one in GroupKind::ALL {
        for other in GroupKind::ALL {
            let same = expected(sizes, one).and_then(|groups| Ok(groups == expected(sizes, other)?));
            let found = Topology::new(0, sizes).unwrap().same_groups(one, other);
            assert_eq!(found.ok(), same.ok(), "{one} and {other}, {sizes:?}");
        }
    }
}

#[test]
fn the_numbers_of_upstream() {
    let sizes_24 = sizes(4, 2, 3, 4);
    assert_eq!(parts(17, sizes_24, GroupKind::Data), (8, vec![14, 17], 1));
    assert_eq!(parts(17, sizes_24, GroupKind::Horizontal), (5, vec![15, 16, 17], 2));
    assert_eq!(parts(17, sizes_24, GroupKind::Pipeline), (5, vec![5, 11, 17, 23], 2));
    assert_eq!(parts(17, sizes_24, GroupKind::World), (0, (0..24).collect(), 17));

    let sizes_4 = sizes(4, 2, 2, 1);
    assert_eq!(parts(1, sizes_4, GroupKind::Data), (1, vec![1, 3], 0));
    assert_eq!(parts(1, sizes_4, GroupKind::Horizontal), (0, vec![0, 1], 1));
    assert_eq!(group(1, sizes_4, GroupKind::NodeLocalData).ranks, [1, 3]);
    assert_eq!(group(1, sizes_4, GroupKind::CrossNodeData).ranks, [1]);

    let sizes_64 = sizes(8, 16, 1, 4);
    assert_eq!(parts(58, sizes_64, GroupKind::Data), (3, (48..64).collect(), 10));
    assert_eq!(parts(58, sizes_64, GroupKind::Pipeline), (10, vec![10, 26, 42, 58], 3));
    assert_eq!(group(58, sizes_64, GroupKind::NodeLocalData).ranks, (56..64).collect::<Vec<_>>());
    assert_eq!(group(58, sizes_64, GroupKind::CrossNodeData).ranks, [50, 58]);
}

#[test]
fn sizes_that_upstream_refuses() {
    for (data, horizontal) in [(65, 1), (1, 5), (8, 4)] {
        let sizes = Sizes { world: 64, local: 8, data, horizontal, pipeline: 1 };
        let message = Topology::new(0, sizes).unwrap_err().to_string();
        for value in [data, horizontal, 64].into_iter().filter(|&value| value != 1) {
            assert!(message.contains(&value.to_string()), "{message}");
        }
    }
}

/// ONNX Runtime stores ranks 1, 5, 9 and so on for local number 1, but half of them are in another data group.
#[test]
fn cross_node_groups_stay_in_the_data_group() {
    // 4 nodes of 4 ranks, 2 pipeline stages: ranks 0 to 7 see different data from ranks 8 to 15.
    let two_stages = sizes(4, 8, 1, 2);
    assert_eq!(group(1, two_stages, GroupKind::CrossNodeData).ranks, [1, 5]);
    assert_eq!(group(13, two_stages, GroupKind::CrossNodeData).ranks, [9, 13]);
    // With tensor parallelism in pairs, local number 1 always has the horizontal index 1.
    assert_eq!(group(5, sizes(4, 8, 2, 1), GroupKind::CrossNodeData).ranks, [1, 5, 9, 13]);
    // Pairs of stages share nodes of 4: rank 2 begins a data group that ends on its node.
    assert_eq!(group(2, sizes(4, 2, 1, 2), GroupKind::CrossNodeData).ranks, [2]);
}

/// Where a data group has other local numbers on its next node, the index in the node-local group decides: upstream's lists would not match
/// each other even within the data group.
#[test]
fn cross_node_groups_go_by_the_index_in_the_node_local_group() {
    let nodes_of_4_by_3 = sizes(4, 2, 3, 4);
    assert_eq!(parts(17, nodes_of_4_by_3, GroupKind::NodeLocalData).1, [17]);
    assert_eq!(parts(17, nodes_of_4_by_3, GroupKind::CrossNodeData).1, [14, 17]);
    // The lowest data group, 0 and 3, is on one node.
    assert_eq!(parts(3, nodes_of_4_by_3, GroupKind::CrossNodeData).1, [3]);
    assert_eq!(parts(0, nodes_of_4_by_3, GroupKind::CrossNodeData), (0, vec![0], 0));
}

#[test]
fn uneven_nodes_are_an_error_on_every_rank_that_names_them() {
    // Ranks 0 to 3 on node 0, 4 and 5 on node 1; the second data group is 6 and 7 on node 1, the rest on node 2.
    let uneven = sizes(4, 6, 1, 2);
    for rank in 0..12 {
        let topology = Topology::new(rank, uneven).unwrap();
        let message = topology.group(GroupKind::CrossNodeData).unwrap_err().to_string();
        assert!(message.contains("data group 0 has 4 members on node 0 and 2 on node 1"), "{message}");
        assert_eq!(topology.group(GroupKind::NodeLocalData).unwrap().ranks.len() % 2, 0);
    }
    // Only the last data group is uneven, and only on its last node.
    let last = sizes(3, 4, 1, 2);
    assert_eq!(expected(last, GroupKind::CrossNodeData), Err(0));
    let message = Topology::new(0, last).unwrap().group(GroupKind::CrossNodeData).unwrap_err().to_string();
    assert!(message.contains("data group 0 has 3 members on node 0 and 1 on node 1"), "{message}");
}

#[test]
fn small_worlds() {
    for data in 1..5 {
        for horizontal in 1..5 {
            for pipeline in 1..4 {
                for local in 1..10 {
                    check(sizes(local, data, horizontal, pipeline));
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn members_agree_and_groups_divide_the_world(
        local in 1usize..40,
        data in 1usize..12,
        horizontal in 1usize..7,
        pipeline in 1usize..5,
    ) {
        let sizes = sizes(local, data, horizontal, pipeline);
        check(sizes);
        for kind in GroupKind::ALL {
            let topologies = (0..sizes.world).map(|rank| Topology::new(rank, sizes).unwrap());
            let Ok(groups) = topologies.map(|topology| topology.group(kind)).collect::<Result<Vec<_>, _>>() else {
                continue;
            };
            for (rank, group) in groups.iter().enumerate() {
                prop_assert_eq!(group.ranks[group.index], rank);
                for other in &groups {
                    prop_assert_eq!(group.id == other.id, group.ranks == other.ranks);
                }
            }
            let firsts = groups.iter().filter(|group| group.index == 0);
            let mut all: Vec<_> = firsts.flat_map(|group| &group.ranks).collect();
            all.sort();
            prop_assert!(all.into_iter().copied().eq(0..sizes.world));
            let ids: std::collections::BTreeSet<_> = groups.iter().map(|group| group.id).collect();
            prop_assert!(ids.iter().copied().eq(0..ids.len()), "{ids:?}");
        }
    }

    #[test]
    fn any_sizes_are_taken_or_refused(
        sizes in prop::array::uniform5(prop_oneof![0usize..5, Just(usize::MAX), Just(1 << 31), any::<usize>()]),
        rank in prop_oneof![0usize..5, any::<usize>()],
    ) {
        let [world, local, data, horizontal, pipeline] = sizes;
        let sizes = Sizes { world, local, data, horizontal, pipeline };
        match Topology::new(rank, sizes) {
            Ok(topology) => prop_assert_eq!((topology.sizes(), topology.node()), (sizes, rank / local)),
            Err(error) => prop_assert!(error.to_string().starts_with("topology: ")),
        }
    }
}
