//! Reductions and Adasum, over all ranks and across nodes, give the same bits over processes as over threads.

use gradsync::GradientBuffer;
use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::{Communicator, ReduceOp, Split};
use gradsync::ops::{
    AdasumOptions, Algorithm, Granularity, WithinNode, adasum_all_reduce, all_reduce, hierarchical_adasum_all_reduce,
};

use super::on_nodes::Groups;
use crate::array::{dtype, patterns_of, write};
use crate::double::{OUT_OF_RANGE, of_magnitudes};
use crate::inputs::{Kind, generate};
use crate::oracle::Format;
use crate::suite::{Suite, Transport};

const SHAPES: [&[usize]; 4] = [&[33], &[257, 3], &[1], &[20, 5, 5]];
/// The number of elements that makes each rank's part longer than one chunk.
const LONG: usize = 300_000;

/// The owner of a buffer's memory.
#[derive(Clone, Copy, Debug)]
enum Memory {
    Own,
    Shared,
}

impl Memory {
    /// The kinds of memory that this system has.
    const ALL: &[Self] = if cfg!(target_os = "linux") { &[Memory::Own, Memory::Shared] } else { &[Memory::Own] };

    fn buffer(self, format: Format, world_size: usize, shapes: &[&[usize]]) -> GradientBuffer {
        let tensors = shapes.iter().enumerate().map(|(i, shape)| (format!("layer{i}"), shape.to_vec()));
        let buffer = match self {
            Memory::Own => GradientBuffer::new(dtype(format), world_size, tensors),
            Memory::Shared => GradientBuffer::new_shared(dtype(format), world_size, tensors),
        };
        buffer.expect("a buffer")
    }
}

fn buffer(memory: Memory, format: Format, rank: usize, world_size: usize) -> GradientBuffer {
    let mut buffer = memory.buffer(format, world_size, &SHAPES);
    fill(&mut buffer, (Kind::Random, 0), format, rank, world_size);
    buffer
}

fn fill(buffer: &mut GradientBuffer, (kind, seed): (Kind, u64), format: Format, rank: usize, world_size: usize) {
    for (i, segment) in buffer.segments().to_vec().into_iter().enumerate() {
        let layer = &generate(kind, format, world_size, segment.len(), seed + i as u64)[rank];
        write(buffer.as_mut_slice(), segment.start, layer);
    }
}

/// The result of vectors whose products leave the range of `f64`.
fn adasum_out_of_range(
    comm: &dyn Communicator,
    memory: Memory,
    magnitudes: &[f64],
    options: AdasumOptions,
) -> Vec<u64> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mut buffer = memory.buffer(Format::F64, world_size, &SHAPES);
    for (seed, segment) in buffer.segments().to_vec().into_iter().enumerate() {
        let layer = &of_magnitudes(magnitudes, world_size, segment.len(), seed as u64)[rank];
        write(buffer.as_mut_slice(), segment.start, layer);
    }
    adasum_all_reduce(comm, &mut buffer, options).expect("Adasum");
    patterns_of(buffer.as_slice())
}

type Bits = (Vec<u64>, Option<Vec<u64>>);

/// Returns the results of three steps in one buffer: the second step reuses the scratch memory of the first, and the third has fresh
/// memory.
fn adasum(comm: &dyn Communicator, memory: Memory, kind: Kind, format: Format, options: AdasumOptions) -> Vec<Bits> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mut buffer = buffer(memory, format, rank, world_size);
    let step = |(kind, seed): (Kind, u64)| {
        fill(&mut buffer, (kind, seed), format, rank, world_size);
        let report = adasum_all_reduce(comm, &mut buffer, options).expect("Adasum");
        let weights = report.weights.map(|weights| weights.into_iter().map(f64::to_bits).collect());
        if seed == 0 {
            buffer.release_scratch();
        }
        (patterns_of(buffer.as_slice()), weights)
    };
    [(Kind::Random, 100), (kind, 0), (kind, 200)].into_iter().map(step).collect()
}

/// What this rank gets over threads.
fn over_threads<R: Send>(comm: &dyn Communicator, run: impl Fn(&LocalCommunicator) -> R + Sync) -> R {
    let mut ranks = gradsync::internal::run_each(comm.world_size(), |comm| run(&comm)).expect("threads");
    ranks.swap_remove(comm.rank()).expect("no rank panicked")
}

/// Asserts that `run` gives the same over this transport as over threads, in every kind of memory.
fn assert_as_over_threads<R: PartialEq + Send>(
    comm: &dyn Communicator,
    run: impl Fn(&dyn Communicator, Memory) -> R + Sync,
) {
    let expected = over_threads(comm, |comm| run(comm, Memory::Own));
    for &memory in Memory::ALL {
        assert!(run(comm, memory) == expected, "other bits than over threads, in {memory:?} memory");
    }
}

/// All cases.
pub fn run<T: Transport>(suite: &mut Suite<T>) {
    let mut algorithms = vec![Algorithm::Gram];
    if suite.world_size().is_power_of_two() {
        algorithms.push(Algorithm::Tree);
    }
    for &algorithm in &algorithms {
        let options = AdasumOptions::default().with_algorithm(algorithm);
        for magnitudes in OUT_OF_RANGE {
            suite.check(&format!("{algorithm:?} of magnitudes {magnitudes:?} as over threads"), |comm| {
                assert_as_over_threads(comm, |comm, memory| adasum_out_of_range(comm, memory, magnitudes, options));
            });
        }
    }
    for format in Format::ALL {
        for kind in [Kind::Random, Kind::Orthogonal, Kind::NearlyOpposite(1e-6)] {
            for &algorithm in &algorithms {
                for granularity in [Granularity::Tensor, Granularity::Whole] {
                    let options = AdasumOptions::default().with_algorithm(algorithm).with_granularity(granularity);
                    let label = format!("{algorithm:?} {granularity:?} of {kind:?} {format:?} as over threads");
                    suite.check(&label, |comm| {
                        assert_as_over_threads(comm, |comm, memory| adasum(comm, memory, kind, format, options));
                    });
                }
            }
        }
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min] {
            suite.check(&format!("{op} of a buffer of {format:?} as over threads"), |comm| {
                assert_as_over_threads(comm, |comm, memory| {
                    let mut buffer = buffer(memory, format, comm.rank(), comm.world_size());
                    all_reduce(comm, &mut buffer, op).expect("all_reduce");
                    patterns_of(buffer.as_slice())
                });
            });
        }
    }
    suite.done("adasum");
    nodes(suite);
    suite.done("adasum across nodes");
}

/// Nodes are runs of consecutive ranks, of every size that divides the world size.
fn nodes<T: Transport>(suite: &mut Suite<T>) {
    let world_size = suite.world_size();
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
            suite.check(&label, |comm| {
                let how = (within_node, AdasumOptions::default().with_algorithm(algorithm));
                let expected = over_threads(comm, |comm| across_nodes(comm, Memory::Own, per_node, kind, how));
                for &memory in Memory::ALL {
                    let got = across_nodes(comm, memory, per_node, kind, how);
                    assert!(got == expected, "other bits than over threads, in {memory:?} memory");
                }
            });
        }
    }
    if world_size <= 4 {
        suite.check("Adasum and the mean of parts of several chunks as over threads", |comm| {
            assert_as_over_threads(comm, |comm, memory| {
                let mut buffer = memory.buffer(Format::F32, world_size, &[&[LONG * world_size]]);
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
            });
        });
    }
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
    fill(&mut buffer, (kind, 0), Format::F32, rank, world_size);
    hierarchical_adasum_all_reduce(Groups::of(all, per_node).nodes(), &mut buffer, within_node, options)
        .expect("Adasum");
    patterns_of(buffer.as_slice())
}
