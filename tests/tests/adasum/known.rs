//! Cases with an answer that is known without an oracle: ONNX Runtime's numbers, the algebra of the rule, exact opposites.

use gradsync::kernels::cpu::coefficients;
use gradsync::ops::{AdasumOptions, Algorithm, Granularity, adasum_all_reduce};
use gradsync::{DType, GradientBuffer};
use gradsync_tests::inputs::{Kind, vector};
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::{guarded, on_ranks};

use crate::case::Case;

const BOTH: [Algorithm; 2] = [Algorithm::Gram, Algorithm::Tree];

fn results(format: Format, inputs: &[&[&[f64]]]) -> Vec<(Algorithm, Vec<Vec<f64>>)> {
    BOTH.into_iter()
        .filter(|algorithm| inputs.len().is_power_of_two() || matches!(algorithm, Algorithm::Gram))
        .map(|algorithm| {
            let case = Case::plain(format, inputs).with(algorithm, Granularity::Tensor);
            case.check("known");
            let layers = case.layers(&case.run());
            (algorithm, layers)
        })
        .collect()
}

/// Upstream gives four decimals, rounded in the first case and truncated in the second, so the tolerances are half a unit and one unit of
/// the fourth decimal. In the first case, each rank has two tensors, in swapped order.
#[test]
fn upstream_f32() {
    guarded(60, || {
        let (a, b) = ([4.0, 5.0, 6.0], [7.0, 8.0, 9.0]);
        for format in [Format::F32, Format::F64] {
            for (algorithm, layers) in results(format, &[&[&a, &b], &[&b, &a]]) {
                for layer in layers {
                    for (got, expected) in layer.iter().zip([5.6301, 6.5235, 7.4169]) {
                        assert!((got - expected).abs() < 5e-5, "{format:?} {algorithm:?}: {layer:?}");
                    }
                }
            }
        }
        for (algorithm, layers) in results(Format::F32, &[&[&[4.0, 5.0, 6.0, 7.0]], &[&[8.0, 9.0, 10.0, 11.0]]]) {
            for (got, expected) in layers[0].iter().zip([6.2643, 7.1228, 7.9812, 8.8397]) {
                assert!((got - expected).abs() < 1e-4, "{algorithm:?}: {layers:?}");
            }
        }
    });
}

/// The specification gives the exact halves, so the tolerance is zero.
#[test]
fn upstream_f16_exact_halves() {
    guarded(60, || {
        let a = [5.6301, 6.5235, 7.4169].map(|x| Format::F16.round(x));
        for (algorithm, layers) in results(Format::F16, &[&[&a], &[&[7.0, 8.0, 9.0]]]) {
            assert_eq!(layers[0], [6.324_218_75, 7.261_718_75, 8.203_125], "{algorithm:?}");
        }
    });
}

#[test]
fn pairs_with_exact_answers() {
    guarded(60, || {
        type Vector = &'static [f64];
        let cases: [(Vector, Vector, Vector); 7] = [
            (&[1.0, 0.0], &[0.0, 1.0], &[1.0, 1.0]),
            (&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0]),
            (&[1.0, 2.0], &[2.0, 4.0], &[1.5, 3.0]),
            (&[0.0, 0.0], &[3.0, 4.0], &[3.0, 4.0]),
            (&[0.0, 0.0], &[0.0, 0.0], &[0.0, 0.0]),
            (&[1.0, -2.0, 3.0], &[-1.0, 2.0, -3.0], &[0.0, 0.0, 0.0]),
            (&[8.0], &[-2.0], &[3.0]),
        ];
        for format in Format::ALL {
            for (a, b, expected) in cases {
                for (first, second) in [(a, b), (b, a)] {
                    for (algorithm, layers) in results(format, &[&[first], &[second]]) {
                        assert_eq!(layers[0], expected, "{format:?} {algorithm:?} {first:?} {second:?}");
                    }
                }
            }
        }
    });
}

/// Orthogonal vectors are added and parallel ones averaged, over any number of ranks that is a power of two.
#[test]
fn orthogonal_is_the_sum_and_identical_is_the_mean() {
    guarded(120, || {
        for format in Format::ALL {
            for world_size in [2, 3, 4, 5, 8, 16] {
                for algorithm in BOTH {
                    if matches!(algorithm, Algorithm::Tree) && !usize::is_power_of_two(world_size) {
                        continue;
                    }
                    let case = Case::of(Kind::Orthogonal, format, world_size, &[&[100], &[33]], 8);
                    let case = case.with(algorithm, Granularity::Tensor);
                    let sum: Vec<f64> =
                        (0..133).map(|i| case.inputs.iter().map(|layers| layers.concat()[i]).sum()).collect();
                    assert_eq!(case.layers(&case.run()).concat(), sum, "{}", case.name());

                    let mut case = case;
                    let same = vec![vector(format, 100, 1), vector(format, 33, 2)];
                    case.inputs = vec![same.clone(); world_size];
                    case.check("identical");
                    if format != Format::F64 {
                        // The coefficient 1/2 may be wrong by a few 2⁻⁵³, far below half a unit of the narrower dtypes; for f64, only the
                        // bound is checked.
                        assert_eq!(case.layers(&case.run()), same, "{}", case.name());
                    }
                }
            }
        }
    });
}

/// The tree of adjacent pairs gives an odd rank, which moves up unchanged, the weight of the pair that it meets.
#[test]
fn an_odd_rank_counts_double_among_equal_gradients() {
    let eighths = |weights: &[f64]| weights.iter().map(|weight| weight / 8.0).collect::<Vec<f64>>();
    for (ranks, expected) in [
        (2, eighths(&[4.0; 2])),
        (3, eighths(&[2.0, 2.0, 4.0])),
        (4, eighths(&[2.0; 4])),
        (5, eighths(&[1.0, 1.0, 1.0, 1.0, 4.0])),
        (6, eighths(&[1.0, 1.0, 1.0, 1.0, 2.0, 2.0])),
        (7, eighths(&[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0])),
        (8, eighths(&[1.0; 8])),
    ] {
        // All products of the vector (3, 4) with itself.
        let products = vec![25.0; ranks * (ranks + 1) / 2];
        assert_eq!(coefficients(&products, ranks).unwrap().weights, expected, "{ranks} ranks");
        let reports = on_ranks(ranks, |comm| {
            let mut gradients = GradientBuffer::new(DType::F32, ranks, [("weight", [2])]).unwrap();
            gradients.tensor_mut(0).copy_from_slice(&[3.0f32, 4.0]).unwrap();
            adasum_all_reduce(&comm, &mut gradients, AdasumOptions::default()).unwrap()
        });
        reports.iter().for_each(|report| assert_eq!(report.weights_of(0), Some(&expected[..]), "{ranks} ranks"));
    }
}

/// Small integers make every product and sum exact in any order, so exact opposites must vanish exactly and only the other pair remains. A
/// Gram form without the exact fall-back divides 0 by 0 here.
#[test]
fn exact_opposites_vanish() {
    guarded(60, || {
        let a: Vec<f64> = (0..333).map(|i| f64::from(i % 17 - 8)).collect();
        let minus: Vec<f64> = a.iter().map(|x| -x).collect();
        let b: Vec<f64> = (0..333).map(|i| f64::from(i * 5 % 13 - 6)).collect();
        for format in Format::ALL {
            for (algorithm, layers) in results(format, &[&[&a], &[&minus], &[&b], &[&b]]) {
                assert_eq!(layers[0], b, "{format:?} {algorithm:?}");
            }
            for (algorithm, layers) in results(format, &[&[&a], &[&minus], &[&b]]) {
                assert_eq!(layers[0], b, "{format:?} {algorithm:?}, three ranks");
            }
            for (algorithm, layers) in
                results(format, &[&[&a], &[&minus], &[&b], &[&b.iter().map(|x| -x).collect::<Vec<_>>()]])
            {
                assert_eq!(layers[0], vec![0.0; 333], "{format:?} {algorithm:?}, two pairs");
            }
        }
    });
}

/// One cancelling layer is recomputed, its neighbours are not, and the report counts one layer.
#[test]
fn only_the_layer_that_cancels_takes_the_exact_path() {
    guarded(60, || {
        for format in [Format::F64, Format::F32] {
            for world_size in [3, 4, 5, 8] {
                let shapes: [&[usize]; 3] = [&[301], &[257], &[264]];
                let mut case = Case::of(Kind::Random, format, world_size, &shapes, 4);
                let opposite = Case::of(Kind::NearlyOpposite(1e-6), format, world_size, &shapes, 4);
                for (rank, layers) in case.inputs.iter_mut().enumerate() {
                    layers[1].clone_from(&opposite.inputs[rank][1]);
                }
                case.check("one cancelling layer");
                assert_eq!(case.run().recomputed, 1, "{}", case.name());
            }
        }
    });
}

/// However badly the direction of a vanishing pair is known, Cauchy-Schwarz bounds the result of the rule: `|k_a a| ≤ |a| + |b|/2`, so
/// `|result| ≤ 3/2 (|a| + |b|)` for the coefficients of the combined vectors. Weights that belong to another rounding of the same pair have
/// no such bound. The allowance of 1e-9 covers all other roundings.
#[test]
fn a_vanishing_pair_is_never_amplified() {
    guarded(60, || {
        for len in [1, 3, 100] {
            for algorithm in [Algorithm::Gram, Algorithm::Tree] {
                for seed in 0..250 {
                    let pair = Case::of(Kind::NearlyOpposite(0.0), Format::F64, 4, &[&[len]], 1000 + seed);
                    let mut case = pair.with(algorithm, Granularity::Tensor);
                    case.inputs[3][0].fill(0.0);
                    let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
                    let limit = 1.5 * norm(&case.inputs[2][0]) * (1.0 + 1e-9);
                    let result = norm(&case.layers(&case.run_once("a vanishing pair"))[0]);
                    assert!(result <= limit, "{}, {len} elements, seed {seed}: {result:e} > {limit:e}", case.name());
                }
            }
        }
    });
}

/// The rule is homogeneous of degree 1: scaling the inputs by a power of two scales the result by the same power, bit for bit.
#[test]
fn scaling_by_a_power_of_two_scales_the_result() {
    guarded(60, || {
        for format in Format::ALL {
            for algorithm in BOTH {
                let case = Case::of(Kind::Random, format, 4, &[&[77], &[300]], 9).with(algorithm, Granularity::Tensor);
                // The values stay far from the subnormals, where the spacing of numbers does not scale.
                let mut case = case;
                case.inputs.iter_mut().flatten().flatten().for_each(|x| *x *= 64.0);
                let mut scaled = case.clone();
                scaled.inputs.iter_mut().flatten().flatten().for_each(|x| *x *= 4.0);
                let expected: Vec<f64> = case.layers(&case.run()).concat().iter().map(|x| x * 4.0).collect();
                assert_eq!(scaled.layers(&scaled.run()).concat(), expected, "{}", case.name());
            }
        }
    });
}

/// The granularities differ on two layers, of which one is parallel and the other orthogonal.
#[test]
fn granularity_decides_what_a_layer_is() {
    guarded(60, || {
        let inputs: [&[&[f64]]; 2] = [&[&[1.0, 2.0], &[1.0, 0.0]], &[&[1.0, 2.0], &[0.0, 1.0]]];
        for algorithm in BOTH {
            let tensor = Case::plain(Format::F32, &inputs).with(algorithm, Granularity::Tensor);
            assert_eq!(tensor.layers(&tensor.run()), [[1.0, 2.0], [1.0, 1.0]]);
            // The dot product is 5 and both squared norms are 6, so both coefficients are 1 - 5/12.
            let whole = Case::plain(Format::F32, &inputs).with(algorithm, Granularity::Whole);
            let seven = f64::from((7.0_f64 / 12.0) as f32);
            let twice = [f64::from((7.0_f64 / 6.0) as f32), f64::from((7.0_f64 / 3.0) as f32)];
            assert_eq!(whole.layers(&whole.run()), [twice, [seven, seven]]);
        }
    });
}

/// Orthogonal vectors of the largest finite number: the sum overflows to infinity as IEEE 754 says, and the other elements stay right.
#[test]
fn an_overflowing_result_is_infinite_and_nothing_else() {
    guarded(60, || {
        for format in [Format::F32, Format::F16, Format::BF16] {
            let max = format.max_finite();
            for (algorithm, layers) in results(format, &[&[&[max, max], &[1.0]], &[&[max, -max], &[1.0]]]) {
                assert_eq!(layers[0], [f64::INFINITY, 0.0], "{format:?} {algorithm:?}");
                assert_eq!(layers[1], [1.0], "{format:?} {algorithm:?}");
            }
        }
    });
}

/// The threshold of the rule, from both sides: the square of one element is just at the threshold or just below it.
#[test]
fn squares_below_the_threshold_have_the_coefficient_one() {
    guarded(60, || {
        // sqrt(2^-511) is no f64; 2^-255 has the square 2^-510 above it, 2^-256 has 2^-512 below it.
        let (above, below) = (2.0_f64.powi(-255), 2.0_f64.powi(-256));
        for (algorithm, layers) in results(Format::F64, &[&[&[above], &[below]], &[&[above], &[below]]]) {
            assert_eq!(layers, [[above], [2.0 * below]], "{algorithm:?}");
        }
    });
}
