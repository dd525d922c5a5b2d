//! Hierarchical Adasum: sum, mean or Adasum inside nodes, which are made of threads of one process, and Adasum across nodes.

use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::{Ranks, ReduceOp, Split};
use gradsync::groups::{GroupKind, Sizes, Topology};
use gradsync::ops::{
    AdasumOptions, Algorithm, Granularity, Nodes, WithinNode, adasum_all_reduce, all_reduce,
    hierarchical_adasum_all_reduce,
};
use gradsync::{DType, GradientBuffer};
use gradsync_tests::array::patterns_of;
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::{agreed, guarded, on_ranks};

use gradsync_tests::suite::adasum::case::Case;
use gradsync_tests::suite::adasum::on_nodes::{Groups, OnNodes};

const SHAPES: [&[usize]; 8] = [&[1], &[0], &[37], &[5, 51], &[], &[64], &[700], &[3]];
/// Pairs of the number of nodes and the number of ranks per node.
const WORLDS: [(usize, usize); 9] = [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2), (2, 3), (4, 2), (5, 3), (8, 2)];

/// Runs a case twice on every rank, and compares the results with the oracle.
fn check(case: &OnNodes, label: &str) {
    let what = format!("{label}, {}", case.name());
    let run = || {
        agreed(&what, case.all.world_size(), |comm| {
            let mut buffer = case.all.buffer(comm.rank());
            let place = case.place(comm.rank());
            let groups = Groups::new(&comm, place);
            let options = case.all.options();
            let report =
                hierarchical_adasum_all_reduce(groups.nodes(), &mut buffer, case.within_node, options).unwrap();
            let bits = |weights: Vec<f64>| weights.into_iter().map(f64::to_bits).collect::<Vec<u64>>();
            (patterns_of(buffer.as_slice()), report.weights.map(bits), report.recomputed, report.algorithm)
        })
    };
    let first = run();
    assert!(run() == first, "{what}: the second run gives other bits");
    let (arena, weights, recomputed, algorithm) = first;
    let decode = |bits: u64| case.all.format.decode(bits);
    let segments = case.all.buffer(0).segments().to_vec();
    for (place, &bits) in arena.iter().enumerate() {
        let is_inside = segments.iter().any(|segment| segment.contains(&place));
        assert!(is_inside || bits == 0, "{what}: the gap at element {place} is not zero any more");
    }
    let layers: Vec<f64> =
        segments.into_iter().flat_map(|segment| arena[segment].iter().copied()).map(decode).collect();
    let weights: Option<Vec<f64>> = weights.map(|weights| weights.into_iter().map(f64::from_bits).collect());
    case.check(&what, &layers, (algorithm, weights.as_deref(), recomputed));
}

#[test]
fn sums_and_means_inside_adasum_across() {
    guarded(170, || {
        for (nodes, per_node) in WORLDS {
            for format in Format::ALL {
                let case = OnNodes::random(format, nodes, per_node, &SHAPES, (nodes * 10 + per_node) as u64);
                let gram = [case.clone(), case.clone().with_mean(), case.interleaved()];
                gram.iter().for_each(|case| check(case, "random"));
                if nodes.is_power_of_two() {
                    gram.map(OnNodes::along_tree).iter().for_each(|case| check(case, "random"));
                }
            }
        }
    });
}

#[test]
fn every_kind_of_gradient() {
    guarded(170, || {
        for (nodes, per_node) in [(2, 2), (3, 2), (4, 2)] {
            for kind in Kind::ADASUM {
                for granularity in [Granularity::Tensor, Granularity::Whole] {
                    let mut case = OnNodes::of_kind(kind, Format::F32, nodes, per_node, &SHAPES, 7);
                    case.all.granularity = granularity;
                    check(&case, &format!("{kind:?}"));
                    if nodes != 3 {
                        check(&case.along_tree(), &format!("{kind:?}"));
                    }
                }
            }
        }
    });
}

/// Several chunks per part, so that transport and arithmetic overlap.
#[test]
fn layers_of_many_chunks() {
    guarded(170, || {
        let large = OnNodes::random(Format::F32, 2, 2, &[&[1 << 20], &[37], &[999_999]], 3);
        check(&large, "large");
        check(&large.along_tree(), "large");
        let kind = Kind::NearlyOpposite(1e-6);
        check(&OnNodes::of_kind(kind, Format::F32, 3, 1, &[&[1_500_001], &[5]], 3), "large, cancelling");
    });
}

/// Groups that a topology defines: the world is 2 nodes of 4 ranks, and each data group has 2 ranks on each node.
#[test]
fn groups_of_a_topology() {
    guarded(60, || {
        let sizes = Sizes { world: 8, local: 4, data: 4, horizontal: 2, pipeline: 1 };
        let sums = on_ranks(8, |comm| {
            let topology = Topology::new(comm.rank(), sizes).unwrap();
            let rank = comm.rank();
            let split = |kind| {
                let group = topology.group(kind).unwrap();
                comm.split(Some(group.id as u64), group.index as i64).unwrap().expect("every rank has a group")
            };
            let (all, node, across) =
                (split(GroupKind::Data), split(GroupKind::NodeLocalData), split(GroupKind::CrossNodeData));
            let mut buffer = GradientBuffer::new(DType::F64, 4, [("w", [4])]).unwrap();
            // The vectors of the two nodes of a data group are orthogonal, so Adasum adds them.
            buffer.tensor_mut(0).into_data().typed::<f64>().unwrap()[rank / 4] = (rank + 1) as f64;
            let nodes = Nodes { all: &all, node: &node, across: &across };
            hierarchical_adasum_all_reduce(nodes, &mut buffer, ReduceOp::Sum, AdasumOptions::default()).unwrap();
            buffer.tensor(0).data().to_f64_vec()
        });
        for (rank, sum) in sums.into_iter().enumerate() {
            let first = rank % 2;
            let of_node = |node: usize| (4 * node + first + 1 + 4 * node + first + 3) as f64;
            assert_eq!(sum, [of_node(0), of_node(1), 0.0, 0.0], "rank {rank}");
        }
    });
}

#[test]
fn one_node_is_the_sum_and_nodes_of_one_are_adasum() {
    guarded(60, || {
        let case = OnNodes::random(Format::F32, 1, 4, &SHAPES, 11);
        let run = |algorithm: Algorithm, place: fn(usize) -> (usize, usize)| {
            let options = AdasumOptions::default().with_algorithm(algorithm);
            on_ranks(4, |comm| {
                let rank = comm.rank();
                let mut buffers: [GradientBuffer; 3] = std::array::from_fn(|_| case.all.buffer(rank));
                all_reduce(&comm, &mut buffers[1], ReduceOp::Sum).unwrap();
                adasum_all_reduce(&comm, &mut buffers[2], options).unwrap();
                let groups = Groups::new(&comm, place(rank));
                hierarchical_adasum_all_reduce(groups.nodes(), &mut buffers[0], ReduceOp::Sum, options).unwrap();
                buffers.map(|buffer| patterns_of(buffer.as_slice()))
            })
        };
        for algorithm in [Algorithm::Auto, Algorithm::Tree] {
            for [hierarchical, sum, _] in run(algorithm, |rank| (0, rank)) {
                assert_eq!(hierarchical, sum, "one node, {algorithm:?}");
            }
            for [hierarchical, _, adasum] in run(algorithm, |rank| (rank, 0)) {
                assert_eq!(hierarchical, adasum, "nodes of one rank, {algorithm:?}");
            }
        }
    });
}

/// Nodes that also combine by Adasum: for adjacent ranks and powers of two, the result is Adasum over all ranks.
#[test]
fn adasum_of_adasums_is_the_adasum_of_all() {
    const LENS: [usize; 3] = [700, 255, 1];
    /// Values are from 0.5 to 1.5, so no sum of products cancels.
    fn value(rank: usize, place: usize) -> f64 {
        0.5 + ((rank * 7919 + place * 104_729) % 1009) as f64 / 1009.0
    }
    fn buffer(world_size: usize, rank: usize) -> GradientBuffer {
        let tensors = LENS.iter().enumerate().map(|(layer, &len)| (format!("layer{layer}"), vec![len]));
        let mut buffer = GradientBuffer::new(DType::F64, world_size, tensors).unwrap();
        for layer in 0..LENS.len() {
            let data = buffer.tensor_mut(layer).into_data().typed::<f64>().unwrap();
            data.iter_mut().enumerate().for_each(|(place, to)| *to = value(rank, place + 1000 * layer));
        }
        buffer
    }
    guarded(120, || {
        for (nodes, per_node) in [(1, 1), (1, 4), (4, 1), (2, 2), (2, 4), (4, 2), (3, 2)] {
            for granularity in [Granularity::Tensor, Granularity::Whole] {
                let (what, world_size) = (format!("{nodes} nodes of {per_node}, {granularity:?}"), nodes * per_node);
                let results = on_ranks(world_size, |comm| {
                    let rank = comm.rank();
                    let auto = AdasumOptions::default().with_granularity(granularity);
                    let gram = auto.with_algorithm(Algorithm::Gram);
                    let tree = auto.with_algorithm(Algorithm::Tree);
                    let mut of_all = buffer(world_size, rank);
                    adasum_all_reduce(&comm, &mut of_all, gram).unwrap();
                    let groups = Groups::new(&comm, (rank / per_node, rank % per_node));
                    let run = |options| {
                        let mut buffer = buffer(world_size, rank);
                        let report =
                            hierarchical_adasum_all_reduce(groups.nodes(), &mut buffer, WithinNode::Adasum, options);
                        (buffer.as_slice().to_f64_vec(), report.unwrap().weights.map(|weights| weights.len()))
                    };
                    let along_tree = nodes.is_power_of_two().then(|| run(tree));
                    (of_all.as_slice().to_f64_vec(), run(gram), run(auto), along_tree)
                });
                assert!(results.iter().all(|result| *result == results[0]), "{what}: ranks differ");
                let layers = if granularity == Granularity::Tensor { LENS.len() } else { 1 };
                let (of_all, two, chosen, along_tree) = &results[0];
                assert_eq!(two.1, Some(layers * nodes), "{what}: weights");
                // Coefficients are at most 1, so the result is at most the sum of the vectors. A sum of up to n positive products is wrong
                // by at most n units; it enters each coefficient twice, and each vector is multiplied by log2 P coefficients. The tree also
                // rounds at each level.
                let terms: usize = LENS.iter().sum();
                let bound = world_size as f64 * 1.5 * 4.0 * 3.0 * (terms + 1) as f64 * f64::EPSILON;
                let trees = along_tree.iter().inspect(|tree| assert_eq!(tree.1, None, "{what}: weights of a tree"));
                for by_levels in trees.chain([two]) {
                    for (place, (one, two)) in of_all.iter().zip(&by_levels.0).enumerate() {
                        assert!((one - two).abs() <= bound, "{what}: element {place}: {two}, and {one} by one matrix");
                    }
                }
                let is_one = chosen.1 == Some(layers * world_size) && world_size > nodes;
                assert_eq!(&chosen.0, if is_one { of_all } else { &two.0 }, "{what}: the automatic choice");
            }
        }
    });
}

/// Runs on `world_size` ranks, each of which must be refused, and returns every rank's error.
fn refusals(world_size: usize, run: impl Fn(LocalCommunicator) -> gradsync::Result<()> + Sync) -> Vec<String> {
    let outcomes = on_ranks(world_size, |comm| run(comm).map_err(|error| error.to_string()));
    outcomes.into_iter().map(|outcome| outcome.expect_err("refused on every rank")).collect()
}

#[test]
fn what_is_refused_is_refused_on_every_rank() {
    guarded(60, || {
        let case = OnNodes::random(Format::F32, 2, 2, &SHAPES, 1);
        let with = |within_node: ReduceOp, options: AdasumOptions| {
            let case = &case;
            refusals(4, move |comm| {
                let mut buffer = case.all.buffer(comm.rank());
                let place = case.place(comm.rank());
                let groups = Groups::new(&comm, place);
                hierarchical_adasum_all_reduce(groups.nodes(), &mut buffer, within_node, options).map(drop)
            })
        };
        for message in with(ReduceOp::Max, AdasumOptions::default()) {
            assert!(message.contains("max"), "{message}");
        }
        // One rank alone makes the mistake, and the others learn of it.
        let others = refusals(4, |comm| {
            let rank = comm.rank();
            let mut buffer = case.all.buffer(rank);
            let groups = Groups::new(&comm, case.place(rank));
            let within_node = if rank == 3 { ReduceOp::Max } else { ReduceOp::Sum };
            hierarchical_adasum_all_reduce(groups.nodes(), &mut buffer, within_node, AdasumOptions::default()).map(drop)
        });
        for (rank, message) in others.into_iter().enumerate() {
            assert!(message.contains("max") && (rank == 3 || message.contains("rank 3 refuses")), "{message}");
        }
        // Three nodes of one rank each; the tree needs a power of two.
        for message in refusals(3, |comm| {
            let rank = comm.rank();
            let mut buffer = OnNodes::random(Format::F32, 3, 1, &SHAPES, 1).all.buffer(rank);
            let groups = Groups::new(&comm, (rank, 0));
            let tree = AdasumOptions::default().with_algorithm(Algorithm::Tree);
            hierarchical_adasum_all_reduce(groups.nodes(), &mut buffer, ReduceOp::Sum, tree).map(drop)
        }) {
            assert!(message.contains("the tree algorithm needs a power of two of nodes, and there are 3"), "{message}");
        }
        // The nodes are {0, 1} and {2, 3}, and the groups across them are {0, 3} and {1, 2}.
        for message in refusals(4, |comm| {
            let rank = comm.rank();
            let mut buffer = case.all.buffer(rank);
            let node = comm.split(Some(rank as u64 / 2), 0)?.expect("a colour");
            let across = comm.split(Some(u64::from(rank == 1 || rank == 2)), 0)?.expect("a colour");
            let nodes = Nodes { all: &comm, node: &node, across: &across };
            hierarchical_adasum_all_reduce(nodes, &mut buffer, ReduceOp::Sum, AdasumOptions::default()).map(drop)
        }) {
            assert!(message.contains("ranks 0 and 3") || message.contains("ranks 1 and 2"), "{message}");
        }
        // Nodes of 3 ranks and of 1 rank.
        for message in refusals(4, |comm| {
            let rank = comm.rank();
            let mut buffer = case.all.buffer(rank);
            let groups = Groups::new(&comm, if rank == 3 { (1, 0) } else { (0, rank) });
            hierarchical_adasum_all_reduce(groups.nodes(), &mut buffer, ReduceOp::Sum, AdasumOptions::default())
                .map(drop)
        }) {
            assert!(message.contains("rank 0 has 2 nodes of 3 ranks"), "{message}");
        }
        // The world is split into two groups of two ranks, and each node has a rank of both groups.
        for message in refusals(4, |comm| {
            let rank = comm.rank();
            let mut buffer = OnNodes::random(Format::F32, 1, 2, &SHAPES, 1).all.buffer(rank % 2);
            let [all, node, across] = [rank / 2, rank % 2, rank].map(|color| comm.split(Some(color as u64), 0));
            let (all, node, across) = (all?.expect("a colour"), node?.expect("a colour"), across?.expect("a colour"));
            let nodes = Nodes { all: &all, node: &node, across: &across };
            hierarchical_adasum_all_reduce(nodes, &mut buffer, ReduceOp::Sum, AdasumOptions::default()).map(drop)
        }) {
            assert!(message.contains("the group \"node\" of rank 0 has ranks that are not among all"), "{message}");
        }
        // One rank has other tensors.
        let odd = Case::of(Kind::Random, Format::F32, 4, &[&[5]], 1);
        for message in refusals(4, |comm| {
            let rank = comm.rank();
            let mut buffer = if rank == 2 { odd.buffer(rank) } else { case.all.buffer(rank) };
            let groups = Groups::new(&comm, case.place(rank));
            hierarchical_adasum_all_reduce(groups.nodes(), &mut buffer, ReduceOp::Sum, AdasumOptions::default())
                .map(drop)
        }) {
            let expected = "hierarchical_adasum_all_reduce(sum within nodes, Auto, per tensor): ranks disagree on tensor 0 \"layer0\": \
                            rank 0 has shape [1], rank 2 has shape [5]";
            assert_eq!(message, expected);
        }
    });
}
