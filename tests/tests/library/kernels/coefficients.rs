//! Weights of Adasum from Gram matrices, against the oracle's tree of formed vectors.

use gradsync::internal::kernels::cpu;
use gradsync_tests::inputs::{Kind, generate};
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::exact::dot_f64;
use gradsync_tests::tolerance::adasum::{Method, expect};
use gradsync_tests::tolerance::assert_within;

/// The upper triangle of the Gram matrix, by rows.
fn gram(inputs: &[Vec<f64>]) -> Vec<f64> {
    let rows = (0..inputs.len()).flat_map(|i| (i..inputs.len()).map(move |j| (i, j)));
    rows.map(|(i, j)| dot_f64(&inputs[i], &inputs[j])).collect()
}

#[test]
fn weights_of_every_kind_and_rank_count() {
    for kind in Kind::ADASUM {
        for world_size in [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64] {
            let inputs = generate(kind, Format::F32, world_size, 97, 14);
            let expected = expect(Method::Gram, Format::F32, &inputs, std::slice::from_ref(&(0..97)));
            let got = cpu::coefficients(&gram(&inputs), world_size).unwrap();
            let what = format!("{kind:?}, {world_size} ranks");
            assert_eq!((got.weights.len(), got.cancelled.len()), (world_size, 1), "{what}");
            if expected.surely_cancelled() == 1 {
                assert!(got.cancelled[0], "{what}: survival {:e} was not noticed", expected.survival[0]);
            } else if expected.possibly_cancelled() == 0 {
                assert!(!got.cancelled[0], "{what}: survival {:e} counts as cancelled", expected.survival[0]);
                assert_within(&what, Format::F64, &got.weights, &expected.weights, &expected.weight_bounds);
            }
        }
    }
}

#[test]
fn layers_are_independent() {
    let layers: Vec<Vec<Vec<f64>>> = [Kind::Random, Kind::NearlyOpposite(0.0), Kind::Zero, Kind::Orthogonal]
        .into_iter()
        .map(|kind| generate(kind, Format::F32, 4, 50, 15))
        .collect();
    let together: Vec<f64> = layers.iter().flat_map(|layer| gram(layer)).collect();
    let got = cpu::coefficients(&together, 4).unwrap();
    assert_eq!(got.cancelled, [false, true, false, false]);
    for (i, layer) in layers.iter().enumerate() {
        let alone = cpu::coefficients(&gram(layer), 4).unwrap();
        assert_eq!(got.weights[4 * i..4 * i + 4], alone.weights[..], "layer {i}");
    }
    assert_eq!(got.weights[8..], [1.0; 8], "zero and orthogonal vectors are added");
}

#[test]
fn known_pairs() {
    let weights = |gram: [f64; 3]| cpu::coefficients(&gram, 2).unwrap().weights;
    assert_eq!(weights([5.0, 10.0, 20.0]), [0.0, 0.75], "(1,2) and (2,4)");
    assert_eq!(weights([14.0, 14.0, 14.0]), [0.5, 0.5], "identical");
    assert_eq!(weights([1.0, 0.0, 1.0]), [1.0, 1.0], "orthogonal");
    assert_eq!(weights([0.0, 0.0, 25.0]), [1.0, 1.0], "zero and (3,4)");
    let upstream = weights([77.0, 122.0, 194.0]);
    assert!((upstream[0] - (1.0 - 122.0 / 154.0)).abs() < 4e-16, "(4,5,6) and (7,8,9): {upstream:?}");
    assert!((upstream[1] - (1.0 - 122.0 / 388.0)).abs() < 4e-16, "(4,5,6) and (7,8,9): {upstream:?}");
}

/// The rule's threshold is the square root of the smallest normal f64; a squared norm equal to the threshold is still used as a divisor.
#[test]
fn the_threshold_of_the_rule() {
    let threshold = f64::MIN_POSITIVE.sqrt();
    let below = f64::from_bits(threshold.to_bits() - 1);
    let weights = |square: f64| cpu::coefficients(&[square; 3], 2).unwrap().weights;
    assert_eq!(weights(threshold), [0.5, 0.5]);
    assert_eq!(weights(below), [1.0, 1.0]);
}

#[test]
fn nan_gives_nan_weights_and_no_panic() {
    let got = cpu::coefficients(&[f64::NAN, f64::NAN, 1.0], 2).unwrap();
    assert!(got.weights.iter().any(|weight| weight.is_nan()), "{:?}", got.weights);
}

#[test]
fn a_gram_matrix_of_the_wrong_length_is_an_error() {
    for (len, world_size) in [(2, 2), (4, 2), (7, 3), (1, 0)] {
        assert!(cpu::coefficients(&vec![1.0; len], world_size).is_err(), "{len} products for {world_size} ranks");
    }
    assert_eq!(cpu::coefficients(&[], 3).unwrap().weights.len(), 0, "no layers, no weights");
}
