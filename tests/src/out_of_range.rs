//! Test cases for reductions whose intermediate values leave the range of a dtype, or of `f64`, although the result is within it; shared by
//! every transport of host memory.
//!
//! All ranks of a communicator run a case, which leaves the communicator usable.

use gradsync::comm::{Collectives, Communicator, ReduceOp, Scaling};

use crate::array::Array;
use crate::oracle::Format;
use crate::oracle::format::power_of_two;
use crate::suite::collectives::inputs;
use crate::tensors::Case;
use crate::tolerance::assert_equal;

/// All cases.
pub const ALL: &[Case] = &[
    Case { name: "weighted means", run: weighted },
    Case { name: "weighted means near the largest number", run: weighted_and_large },
    Case { name: "weights of 1 give the bits of the mean", run: equal_weights },
    Case { name: "a rank of weight 0 is not read", run: weight_zero },
    Case { name: "sums and means near the largest number", run: large },
    Case { name: "factors whose product is in range", run: factors },
    Case { name: "infinities beside sums that overflow", run: infinities },
];

/// Lengths on both sides of the boundaries at which transports change their algorithm.
const LENS: [usize; 4] = [0, 5, 1000, 150_001];
/// A length of `f64`s that processes of one machine read from each other's memory.
const LONG: usize = 600_000;
/// Lengths for vectors whose numbers are all alike.
const FEW_LENS: [usize; 3] = [3, 3000, 40_000];

/// The weights of the first ranks, in turn, which are integers.
pub const WEIGHTS: [&[f64]; 4] = [&[97.0, 1.0, 1.0], &[4.0, 0.0, 5.0, 2.0], &[1.0, 2.0], &[1e9, 7.0, 123_456.0]];

/// A weight for every rank.
pub fn weights_of(turn: usize, world_size: usize) -> Vec<f64> {
    WEIGHTS[turn].iter().copied().cycle().take(world_size).collect()
}

/// The weighted mean of one element: products added in `f64` in rank order, divided once, rounded once. The numbers are scaled down by a
/// power of two meanwhile, so that the reference does not overflow; the inputs are no tiny numbers.
pub fn weighted_mean(format: Format, weights: &[f64], values: impl Iterator<Item = f64>) -> f64 {
    let down = power_of_two(-100);
    let terms = weights.iter().zip(values).filter(|(weight, _)| **weight != 0.0);
    let sum = terms.map(|(weight, value)| weight * (value * down)).reduce(|sum, term| sum + term).expect("a weight");
    let mean = sum / weights.iter().sum::<f64>() / down;
    format.round(mean.clamp(-format.max_finite(), format.max_finite()))
}

/// The result on this rank of a call in place on `len` copies of this rank's number; all of them must be equal.
fn result(comm: &dyn Communicator, format: Format, len: usize, own: f64, call: impl Fn(&mut Array)) -> f64 {
    let mut data = Array::new(format, &vec![own; len]);
    call(&mut data);
    let values = data.values();
    let is_like_first = |value: &f64| value.to_bits() == values[0].to_bits();
    assert!(values.iter().all(is_like_first), "{len} {format:?} on rank {}", comm.rank());
    values[0]
}

fn weighted(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for format in Format::ALL {
        for len in LENS.into_iter().chain((format == Format::F64).then_some(LONG)) {
            let inputs = inputs(format, world_size, len);
            for turn in 0..if len == LONG { 1 } else { WEIGHTS.len() } {
                let weights = weights_of(turn, world_size);
                let mut data = Array::new(format, &inputs[rank]);
                comm.all_reduce_weighted(data.slice_mut(), &weights).unwrap();
                let mean = |at: usize| weighted_mean(format, &weights, inputs.iter().map(|input| input[at]));
                // One rank keeps its data as they are.
                let expected =
                    if world_size == 1 { inputs[0].clone() } else { (0..len).map(mean).collect::<Vec<f64>>() };
                assert_equal(&format!("{len} {format:?} with {weights:?}"), &data.values(), &expected);
            }
        }
    }
}

fn weighted_and_large(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for format in Format::ALL {
        let largest = format.max_finite();
        for len in FEW_LENS {
            for turn in 0..WEIGHTS.len() {
                let weights = weights_of(turn, world_size);
                let call = |data: &mut Array| comm.all_reduce_weighted(data.slice_mut(), &weights).unwrap();
                let found = result(comm, format, len, largest, call);
                let expected = weighted_mean(format, &weights, (0..world_size).map(|_| largest));
                assert!(expected >= largest * (1.0 - 1e-15), "the reference is {expected:e}");
                assert_eq!(found, if world_size == 1 { largest } else { expected }, "{format:?} with {weights:?}");
                // Signs that cancel.
                let signed = |rank: usize| if rank % 2 == 0 { largest } else { -largest };
                let found = result(comm, format, len, signed(rank), call);
                let expected = weighted_mean(format, &weights, (0..world_size).map(signed));
                assert_eq!(found, if world_size == 1 { largest } else { expected }, "{format:?} with {weights:?}");
            }
        }
    }
    if world_size == 4 {
        let weights = [97.0, 1.0, 1.0, 1.0];
        let call = |data: &mut Array| comm.all_reduce_weighted(data.slice_mut(), &weights).unwrap();
        for (format, number) in [(Format::F16, 30_000.0), (Format::F16, 65_504.0), (Format::F32, 2f64.powi(127))] {
            assert_eq!(result(comm, format, 5, number, call), number);
        }
    }
}

fn equal_weights(comm: &dyn Communicator) {
    for format in Format::ALL {
        for len in LENS {
            let own = Array::new(format, &inputs(format, comm.world_size(), len)[comm.rank()]);
            let (mut mean, mut weighted) = (own.clone(), own);
            comm.all_reduce(mean.slice_mut(), ReduceOp::Mean).unwrap();
            comm.all_reduce_weighted(weighted.slice_mut(), &vec![1.0; comm.world_size()]).unwrap();
            assert_eq!(weighted.patterns(), mean.patterns(), "{len} {format:?}");
        }
    }
}

fn weight_zero(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for ignored in (0..world_size).filter(|_| world_size > 1) {
        let weights: Vec<f64> = (0..world_size).map(|rank| if rank == ignored { 0.0 } else { 2.0 }).collect();
        for (format, len) in Format::ALL.into_iter().flat_map(|format| FEW_LENS.map(|len| (format, len))) {
            let own = if rank == ignored { f64::NAN } else { 0.75 };
            let call = |data: &mut Array| comm.all_reduce_weighted(data.slice_mut(), &weights).unwrap();
            assert_eq!(result(comm, format, len, own, call), 0.75, "{format:?} without rank {ignored}");
        }
    }
}

fn large(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for (format, len) in Format::ALL.into_iter().flat_map(|format| FEW_LENS.map(|len| (format, len))) {
        for number in [format.max_finite(), -format.max_finite(), format.round(format.max_finite() / 1.75)] {
            let mean = |data: &mut Array| comm.all_reduce(data.slice_mut(), ReduceOp::Mean).unwrap();
            let expected = weighted_mean(format, &vec![1.0; world_size], (0..world_size).map(|_| number));
            assert_eq!(result(comm, format, len, number, mean), expected, "the mean of {number:e}");
            // All ranks but the first add nothing in the end.
            let own = match rank {
                0 => number,
                _ if rank + 1 == world_size && world_size % 2 == 0 => 0.0,
                _ => number * if rank % 2 == 1 { 1.0 } else { -1.0 },
            };
            let sum = |data: &mut Array| comm.all_reduce(data.slice_mut(), ReduceOp::Sum).unwrap();
            assert_eq!(result(comm, format, len, own, sum), number, "a sum of {number:e}");
            let mut shard = Array::unwritten(format, len);
            let input = Array::new(format, &vec![number; len * world_size]);
            comm.reduce_scatter(input.slice(), shard.slice_mut(), ReduceOp::Mean).unwrap();
            assert_equal("the mean of shards", &shard.values(), &vec![expected; len]);
        }
    }
    if world_size == 4 {
        let mean = |data: &mut Array| comm.all_reduce(data.slice_mut(), ReduceOp::Mean).unwrap();
        assert_eq!(result(comm, Format::F64, 1, 1e308, mean), 1e308);
    }
}

/// Factors that are powers of two, so that the right result is the plain one times the product of the factors.
fn factors(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for (format, len) in Format::ALL.into_iter().flat_map(|format| FEW_LENS.map(|len| (format, len))) {
        let magnitudes = match format {
            Format::F64 => &[1e-300, 1e300, 1.0][..],
            _ => &[1.0, 0.25],
        };
        for &magnitude in magnitudes {
            let values: Vec<f64> = (0..world_size).map(|rank| format.round(magnitude * (rank as f64 + 1.1))).collect();
            for (before, after) in [(1000, -1000), (-1000, 1000), (1023, -1020), (-1022, 1023), (60, -62), (-62, 60)] {
                let scaling = Scaling { before: power_of_two(before), after: -power_of_two(after) };
                let product = power_of_two(before + after);
                for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min] {
                    let joined = match op {
                        ReduceOp::Max => values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
                        ReduceOp::Min => values.iter().copied().fold(f64::INFINITY, f64::min),
                        ReduceOp::Mean => values.iter().fold(0.0, |sum, value| sum + value) / world_size as f64,
                        _ => values.iter().fold(0.0, |sum, value| sum + value),
                    };
                    let call = |data: &mut Array| comm.all_reduce_scaled(data.slice_mut(), op, scaling).unwrap();
                    let found = result(comm, format, len, values[rank], call);
                    let expected = format.round(-joined * product);
                    assert_eq!(found, expected, "{op} of {magnitude:e} as {format:?}, by 2^{before} and 2^{after}");
                }
            }
        }
    }
}

/// An infinity of one rank is the result, whatever the numbers beside it add up to on the way.
fn infinities(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for len in FEW_LENS {
        let own = if rank + 1 == world_size { f64::NEG_INFINITY } else { f64::MAX };
        let sum = |data: &mut Array| comm.all_reduce(data.slice_mut(), ReduceOp::Sum).unwrap();
        assert_eq!(result(comm, Format::F64, len, own, sum), f64::NEG_INFINITY);
        let weights = vec![3.0; world_size];
        let weighted = |data: &mut Array| comm.all_reduce_weighted(data.slice_mut(), &weights).unwrap();
        assert_eq!(result(comm, Format::F64, len, own, weighted), f64::NEG_INFINITY);
        // A result beyond the range is an infinity.
        let largest = result(comm, Format::F64, len, f64::MAX, sum);
        assert_eq!(largest, if world_size == 1 { f64::MAX } else { f64::INFINITY });
    }
}
