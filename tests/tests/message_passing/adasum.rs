//! Operations on any communicator give the same bits over processes as over threads.

use gradsync::GradientBuffer;
use gradsync::comm::{Communicator, ReduceOp, local};
use gradsync::ops::{AdasumOptions, Algorithm, Granularity, adasum_all_reduce, all_reduce};
use gradsync_tests::array::{dtype, patterns_of, write};
use gradsync_tests::double::{OUT_OF_RANGE, of_magnitudes};
use gradsync_tests::inputs::{Kind, generate};
use gradsync_tests::oracle::Format;

use super::cases::Cases;

const SHAPES: [&[usize]; 4] = [&[33], &[257, 3], &[1], &[20, 5, 5]];

/// The owner of a buffer's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {
    Own,
    Shared,
}

impl Memory {
    /// The kinds of memory that this system has.
    pub(crate) const ALL: &[Self] =
        if cfg!(target_os = "linux") { &[Memory::Own, Memory::Shared] } else { &[Memory::Own] };

    pub(crate) fn buffer(self, format: Format, world_size: usize, shapes: &[&[usize]]) -> GradientBuffer {
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

pub(crate) fn run(cases: &mut Cases) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    let mut algorithms = vec![Algorithm::Gram];
    if world_size.is_power_of_two() {
        algorithms.push(Algorithm::Tree);
    }
    for &algorithm in &algorithms {
        let options = AdasumOptions::default().with_algorithm(algorithm);
        for magnitudes in OUT_OF_RANGE {
            cases.check(&format!("{algorithm:?} of magnitudes {magnitudes:?} as over threads"), |comm| {
                let over_threads =
                    |comm: &dyn Communicator| adasum_out_of_range(comm, Memory::Own, magnitudes, options);
                let mut ranks = local::run_each(world_size, |comm| over_threads(&comm)).unwrap();
                let expected = ranks.swap_remove(rank).expect("no rank panicked");
                for &memory in Memory::ALL {
                    let got = adasum_out_of_range(comm, memory, magnitudes, options);
                    assert!(got == expected, "other bits than over threads, in {memory:?} memory");
                }
            });
        }
    }
    for format in Format::ALL {
        for kind in [Kind::Random, Kind::Orthogonal, Kind::NearlyOpposite(1e-6)] {
            for &algorithm in &algorithms {
                for granularity in [Granularity::Tensor, Granularity::Whole] {
                    let options = AdasumOptions::default().with_algorithm(algorithm).with_granularity(granularity);
                    let label = format!("{algorithm:?} {granularity:?} of {kind:?} {format:?} as over threads");
                    cases.check(&label, |comm| {
                        let over_threads = |comm: &dyn Communicator| adasum(comm, Memory::Own, kind, format, options);
                        let mut ranks = local::run_each(world_size, |comm| over_threads(&comm)).unwrap();
                        let expected = ranks.swap_remove(rank).expect("no rank panicked");
                        for &memory in Memory::ALL {
                            let got = adasum(comm, memory, kind, format, options);
                            assert!(got == expected, "other bits than over threads, in {memory:?} memory");
                        }
                    });
                }
            }
        }
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min] {
            cases.check(&format!("{op} of a buffer of {format:?} as over threads"), |comm| {
                let reduced = |comm: &dyn Communicator, memory: Memory| {
                    let mut buffer = buffer(memory, format, comm.rank(), comm.world_size());
                    all_reduce(comm, &mut buffer, op).expect("all_reduce");
                    patterns_of(buffer.as_slice())
                };
                let mut ranks = local::run_each(world_size, |comm| reduced(&comm, Memory::Own)).unwrap();
                let expected = ranks.swap_remove(rank).expect("no rank panicked");
                for &memory in Memory::ALL {
                    assert!(reduced(comm, memory) == expected, "other bits than over threads, in {memory:?} memory");
                }
            });
        }
    }
    cases.done("adasum");
}
