//! Cases with an answer that is known without an oracle, over threads.

use gradsync::internal::kernels::cpu::coefficients;
use gradsync::ops::{AdasumOptions, Algorithm, Granularity, adasum_all_reduce};
use gradsync::{DType, GradientBuffer};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::{guarded, on_ranks};
use gradsync_tests::suite::Report;
use gradsync_tests::suite::adasum::case::{Case, Outcome};
use gradsync_tests::suite::adasum::known::{self, Runner};

/// Starts a thread for each rank of a case.
struct Threads;

impl Runner for Threads {
    fn algorithms(&self, world_size: usize) -> &'static [Algorithm] {
        if world_size.is_power_of_two() { &[Algorithm::Gram, Algorithm::Tree] } else { &[Algorithm::Gram] }
    }

    fn run(&self, case: &Case, _: &str) -> Outcome {
        case.run()
    }

    fn check(&self, case: &Case, label: &str) -> Vec<Vec<f64>> {
        case.check(label)
    }
}

/// Prints the names of cases.
struct Names;

impl Report for Names {
    fn case(&mut self, name: &str, body: impl FnOnce()) {
        println!("{name}");
        body();
    }
}

#[test]
fn adasum_all_reduce_gives_the_known_answers() {
    guarded(170, || {
        for world_size in [1, 2, 3, 4, 5, 8, 16] {
            known::run(&Threads, world_size, |name| format!("{name}, {world_size} ranks"), &mut Names);
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
            for algorithm in [Algorithm::Gram, Algorithm::Tree] {
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
