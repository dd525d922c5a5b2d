//! What runs over any communicator gives the same bits over MPI as over threads.

use gradsync::GradientBuffer;
use gradsync::comm::{Communicator, ReduceOp, local};
use gradsync::ops::{AdasumOptions, Algorithm, Granularity, adasum_all_reduce, all_reduce};
use gradsync_tests::array::{dtype, patterns_of, write};
use gradsync_tests::inputs::{Kind, generate};
use gradsync_tests::oracle::Format;

use crate::cases::Cases;

const SHAPES: [&[usize]; 4] = [&[33], &[257, 3], &[1], &[20, 5, 5]];

fn buffer(kind: Kind, format: Format, rank: usize, world_size: usize) -> GradientBuffer {
    let tensors = SHAPES.iter().enumerate().map(|(i, shape)| (format!("layer{i}"), shape.to_vec()));
    let mut buffer = GradientBuffer::new(dtype(format), world_size, tensors).expect("a buffer");
    for (i, segment) in buffer.segments().to_vec().into_iter().enumerate() {
        let layer = &generate(kind, format, world_size, segment.len(), i as u64)[rank];
        write(buffer.as_mut_slice(), segment.start, layer);
    }
    buffer
}

type Bits = (Vec<u64>, Option<Vec<u64>>);

fn adasum(comm: &dyn Communicator, kind: Kind, format: Format, options: AdasumOptions) -> Bits {
    let mut buffer = buffer(kind, format, comm.rank(), comm.world_size());
    let report = adasum_all_reduce(comm, &mut buffer, options).expect("Adasum");
    let weights = report.weights.map(|weights| weights.into_iter().map(f64::to_bits).collect());
    (patterns_of(buffer.as_slice()), weights)
}

pub(crate) fn run(cases: &mut Cases) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    let mut algorithms = vec![Algorithm::Gram];
    if world_size.is_power_of_two() {
        algorithms.push(Algorithm::Tree);
    }
    for format in Format::ALL {
        for kind in [Kind::Random, Kind::Orthogonal, Kind::NearlyOpposite(1e-6)] {
            for &algorithm in &algorithms {
                for granularity in [Granularity::Tensor, Granularity::Whole] {
                    let options = AdasumOptions { algorithm, granularity };
                    let what = format!("{algorithm:?} {granularity:?} of {kind:?} {format:?} as over threads");
                    cases.check(&what, |comm| {
                        let got = adasum(comm, kind, format, options);
                        let mut ranks = local::run(world_size, |comm| adasum(&comm, kind, format, options)).unwrap();
                        let expected = ranks.swap_remove(rank).expect("no rank panicked");
                        assert!(got == expected, "other bits than over threads");
                    });
                }
            }
        }
        cases.check(&format!("mean of a buffer of {format:?} as over threads"), |comm| {
            let mean = |comm: &dyn Communicator| {
                let mut buffer = buffer(Kind::Random, format, comm.rank(), comm.world_size());
                all_reduce(comm, &mut buffer, ReduceOp::Mean).expect("all_reduce");
                patterns_of(buffer.as_slice())
            };
            let got = mean(comm);
            let mut ranks = local::run(world_size, |comm| mean(&comm)).unwrap();
            assert!(got == ranks.swap_remove(rank).expect("no rank panicked"), "other bits than over threads");
        });
    }
    cases.done("adasum");
}
