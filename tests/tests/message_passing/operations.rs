//! Operations on any communicator, over processes: hierarchical Adasum as over threads, Send and Recv, and the groups of a topology.

use gradsync::GradientBuffer;
use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::{Collectives, Communicator, Ranks, ReduceOp, Split, local};
use gradsync::groups::Groups;
use gradsync::ops::{
    AdasumOptions, Algorithm, Nodes, WithinNode, adasum_all_reduce, all_reduce, hierarchical_adasum_all_reduce,
};
use gradsync::plan::groups::{GroupKind, Sizes, Topology};
use gradsync_tests::array::{patterns_of, write};
use gradsync_tests::inputs::{Kind, generate};
use gradsync_tests::oracle::Format;
use gradsync_tests::transfers::HostRank;
use gradsync_tests::{range, reducer, start, tensors, transfers};

use super::adasum::Memory;
use super::cases::{Cases, fresh};

const SHAPES: [&[usize]; 4] = [&[33], &[257, 3], &[1], &[20, 5, 5]];
/// The number of elements that makes each rank's part longer than one chunk.
const LONG: usize = 300_000;

pub(crate) fn run(cases: &mut Cases) {
    let world_size = cases.world_size();
    if world_size > 1 {
        for (index, (name, _)) in transfers::good::<HostRank<'_>>().into_iter().enumerate() {
            cases.check(name, |comm| transfers::good()[index].1(&HostRank(comm)));
        }
        for (index, (name, _)) in transfers::fatal::<HostRank<'_>>().into_iter().enumerate() {
            cases.check_fresh(name, |comm| {
                transfers::fatal()[index].1(&HostRank(&comm));
                // No rank leaves before all have heard of the failure.
                fresh().barrier().expect("another communicator");
            });
        }
    }
    cases.done("send and recv");
    for case in tensors::ALL.iter().chain(range::ALL) {
        cases.check(case.name, |comm| (case.run)(comm));
    }
    cases.done("tensors");
    for case in reducer::ALL.iter().chain(start::ALL) {
        cases.check(case.name, |comm| (case.run)(comm));
    }
    cases.done("reducers");
    nodes(cases);
    groups(cases);
}

/// Nodes are runs of consecutive ranks, of every size that divides the world size.
fn nodes(cases: &mut Cases) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    for per_node in (1..=world_size).filter(|per_node| world_size % per_node == 0) {
        for (kind, within_node, algorithm) in [
            (Kind::Random, ReduceOp::Mean.into(), Algorithm::Auto),
            (Kind::NearlyOpposite(1e-6), ReduceOp::Sum.into(), Algorithm::Auto),
            (Kind::NearlyOpposite(1e-6), WithinNode::Adasum, Algorithm::Auto),
            (Kind::Random, ReduceOp::Sum.into(), Algorithm::Tree),
            (Kind::Random, WithinNode::Adasum, Algorithm::Tree),
        ] {
            if algorithm == Algorithm::Tree && !(world_size / per_node).is_power_of_two() {
                continue;
            }
            let label = format!(
                "Adasum across nodes of {per_node} of {kind:?} after {within_node:?} by {algorithm:?} as over threads"
            );
            cases.check(&label, |comm| {
                let how = (within_node, AdasumOptions::default().with_algorithm(algorithm));
                let over_threads = |comm: &LocalCommunicator| across_nodes(comm, Memory::Own, per_node, kind, how);
                let ranks = local::run_each(world_size, |comm| over_threads(&comm));
                let expected = ranks.unwrap().swap_remove(rank).expect("no rank panicked");
                for &memory in Memory::ALL {
                    let got = across_nodes(comm, memory, per_node, kind, how);
                    assert!(got == expected, "other bits than over threads, in {memory:?} memory");
                }
            });
        }
    }
    if world_size <= 4 {
        cases.check("Adasum and the mean of parts of several chunks as over threads", |comm| {
            let run = |comm: &dyn Communicator, memory: Memory| {
                let len = LONG * world_size;
                let mut buffer = memory.buffer(Format::F32, world_size, &[&[len]]);
                let fill = |buffer: &mut GradientBuffer| {
                    let number = |index: u64| ((index * 2_654_435_761) >> (comm.rank() + 8)) as u32 as f32 - 2e9;
                    let data = buffer.tensor_mut(0).into_data().typed::<f32>().expect("f32");
                    data.iter_mut().zip(0..).for_each(|(to, index)| *to = number(index));
                };
                fill(&mut buffer);
                adasum_all_reduce(comm, &mut buffer, AdasumOptions::default()).expect("Adasum");
                let adasum = patterns_of(buffer.as_slice());
                fill(&mut buffer);
                all_reduce(comm, &mut buffer, ReduceOp::Mean).expect("all_reduce");
                (adasum, patterns_of(buffer.as_slice()))
            };
            let mut ranks = local::run_each(world_size, |comm| run(&comm, Memory::Own)).unwrap();
            let expected = ranks.swap_remove(rank).expect("no rank panicked");
            for &memory in Memory::ALL {
                assert!(run(comm, memory) == expected, "other bits than over threads, in {memory:?} memory");
            }
        });
    }
    cases.done("adasum across nodes");
}

fn across_nodes<C: Communicator + Split>(
    all: &C,
    memory: Memory,
    per_node: usize,
    kind: Kind,
    (within_node, options): (WithinNode, AdasumOptions),
) -> Vec<u64> {
    let (rank, world_size) = (all.rank(), all.world_size());
    let mut buffer = memory.buffer(Format::F32, world_size, &SHAPES);
    for (i, segment) in buffer.segments().to_vec().into_iter().enumerate() {
        let layer = &generate(kind, Format::F32, world_size, segment.len(), i as u64)[rank];
        write(buffer.as_mut_slice(), segment.start, layer);
    }
    let split = |color: usize| all.split(Some(color as u64), 0).unwrap().expect("every rank has a colour");
    let (node, across) = (split(rank / per_node), split(rank % per_node));
    let nodes = Nodes { all, node: &node, across: &across };
    hierarchical_adasum_all_reduce(nodes, &mut buffer, within_node, options).expect("Adasum");
    patterns_of(buffer.as_slice())
}

/// Every kind of group has the ranks of its plan.
fn groups(cases: &mut Cases) {
    let world = cases.world_size();
    let (data, horizontal) = if world % 2 == 0 { (world / 2, 2) } else { (world, 1) };
    let sizes = Sizes { world, local: world.div_ceil(2), data, horizontal, pipeline: 1 };
    cases.check("the groups of a topology", |comm| {
        let comm = comm.split(Some(0), comm.rank() as i64).unwrap().expect("a colour");
        let (rank, groups) = (comm.rank(), Groups::new(comm, sizes).unwrap());
        let topology = Topology::new(rank, sizes).unwrap();
        for kind in GroupKind::ALL {
            let Ok(planned) = topology.group(kind) else {
                assert!(groups.get(kind).is_err(), "{kind}: a group that cannot be");
                continue;
            };
            let group = groups.get(kind).unwrap();
            let mut members = vec![0.0; group.world_size()];
            group.all_gather(&[rank as f64], &mut members).unwrap();
            let expected: Vec<f64> = planned.ranks.iter().map(|&rank| rank as f64).collect();
            assert_eq!((group.rank(), members), (planned.index, expected), "{kind}");
            assert!(std::ptr::eq(group, groups.get(kind).unwrap()), "{kind}: made twice");
        }
    });
    cases.done("groups of a topology");
}
