//! Values that a caller has written between the tensors of a buffer change neither results nor weights, by any algorithm or transport.

use gradsync::GradientBuffer;
use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::{Communicator, Ranks, ReduceOp, Split};
use gradsync::ops::{
    AdasumReport, Algorithm, Granularity, Nodes, WithinNode, adasum_all_reduce, hierarchical_adasum_all_reduce,
};
use gradsync_tests::array::{fill_gaps, tensor_patterns};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::{agreed, guarded};

use super::shared_memory::WithoutWindows;
use gradsync_tests::suite::adasum::case::Case;

/// Whether ranks send each other messages (`true`) or reach each other's memory (`false`).
const ARE_APART: [bool; 2] = [false, true];

/// The bits of the tensors on all ranks, the bits of the weights, and the number of recomputed layers.
type Outcome = (Vec<u64>, Option<Vec<u64>>, usize);

fn outcome(
    case: &Case,
    value: f64,
    reduce: impl Fn(&LocalCommunicator, &mut GradientBuffer) -> AdasumReport + Sync,
) -> Outcome {
    agreed(&case.name(), case.world_size(), |comm| {
        let mut buffer = case.buffer(comm.rank());
        fill_gaps(&mut buffer, value);
        let report = reduce(&comm, &mut buffer);
        let weights = report.weights.map(|weights| weights.into_iter().map(f64::to_bits).collect());
        (tensor_patterns(&buffer), weights, report.recomputed)
    })
}

/// Ones, other numbers and NaN in the gaps give the same outcome as zeros.
fn check(case: &Case, what: &str, reduce: impl Fn(&LocalCommunicator, &mut GradientBuffer) -> AdasumReport + Sync) {
    let clean = outcome(case, 0.0, &reduce);
    for value in [1.0, -2.0, f64::NAN] {
        assert!(outcome(case, value, &reduce) == clean, "{what}, {}, {value} in the gaps", case.name());
    }
}

fn cases(format: Format, world_size: usize, kind: Kind) -> impl Iterator<Item = Case> {
    let algorithms = [Algorithm::Gram, Algorithm::Tree, Algorithm::Auto];
    let takes = move |algorithm: &Algorithm| *algorithm != Algorithm::Tree || world_size.is_power_of_two();
    algorithms.into_iter().filter(takes).flat_map(move |algorithm| {
        [Granularity::Tensor, Granularity::Whole].map(|granularity| {
            let case = Case::of(kind, format, world_size, &[&[100], &[0], &[33], &[1], &[5, 51]], 8);
            case.with(algorithm, granularity)
        })
    })
}

/// The gaps hold ones beside two orthogonal vectors; the result must still be their sum, with weights of 1.
#[test]
fn ones_between_orthogonal_tensors() {
    guarded(60, || {
        for format in Format::ALL {
            for without_windows in ARE_APART {
                let case = Case::plain(format, &[&[&[3.0, 0.0], &[0.0]], &[&[0.0, 4.0], &[0.0]]]);
                let case = case.with(Algorithm::Gram, Granularity::Whole);
                let (bits, weights, _) = outcome(&case, 1.0, |comm, buffer| flat(&case, without_windows, comm, buffer));
                let values: Vec<f64> = bits.into_iter().map(|bits| format.decode(bits)).collect();
                assert_eq!(values, [3.0, 4.0, 0.0], "{format:?}, without windows: {without_windows}");
                assert_eq!(weights, Some(vec![1.0f64.to_bits(); 2]), "{format:?}, without windows: {without_windows}");
            }
        }
    });
}

fn flat(case: &Case, without_windows: bool, comm: &LocalCommunicator, buffer: &mut GradientBuffer) -> AdasumReport {
    let hidden = WithoutWindows(comm);
    let comm: &dyn Communicator = if without_windows { &hidden } else { comm };
    adasum_all_reduce(comm, buffer, case.options()).unwrap()
}

#[test]
fn all_ranks_at_once() {
    guarded(170, || {
        for world_size in [1, 2, 3, 4, 8] {
            for (format, kind) in [(Format::F32, Kind::Orthogonal), (Format::F64, Kind::NearlyOpposite(1e-6))] {
                for case in cases(format, world_size, kind) {
                    for without_windows in ARE_APART {
                        check(&case, "flat", |comm, buffer| flat(&case, without_windows, comm, buffer));
                    }
                }
            }
        }
    });
}

#[test]
fn inside_nodes_and_across() {
    guarded(170, || {
        let within: [WithinNode; 3] = [ReduceOp::Sum.into(), ReduceOp::Mean.into(), WithinNode::Adasum];
        for (nodes, per_node) in [(1, 4), (4, 1), (2, 2), (3, 2)] {
            let of_nodes = cases(Format::F32, nodes * per_node, Kind::Random);
            for case in of_nodes.filter(|case| case.algorithm != Algorithm::Tree || nodes.is_power_of_two()) {
                for within_node in within {
                    for without_windows in ARE_APART {
                        check(&case, &format!("{nodes} nodes, {within_node:?}"), |comm, buffer| {
                            hierarchical(&case, (per_node, within_node), without_windows, comm, buffer)
                        });
                    }
                }
            }
        }
    });
}

fn hierarchical(
    case: &Case,
    (per_node, within_node): (usize, WithinNode),
    without_windows: bool,
    all: &LocalCommunicator,
    buffer: &mut GradientBuffer,
) -> AdasumReport {
    let split = |color: usize| all.split(Some(color as u64), 0).unwrap().expect("every rank has a colour");
    let (node, across) = (split(all.rank() / per_node), split(all.rank() % per_node));
    let hidden = [all, &node, &across].map(WithoutWindows);
    let nodes = if without_windows {
        Nodes { all: &hidden[0], node: &hidden[1], across: &hidden[2] }
    } else {
        Nodes { all, node: &node, across: &across }
    };
    hierarchical_adasum_all_reduce(nodes, buffer, within_node, case.options()).unwrap()
}
