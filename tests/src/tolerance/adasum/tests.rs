//! The bounds compared with plain f64 implementations: they hold, and they are tight.

use super::*;
use crate::inputs::{Kind, generate};

/// A naive Gram implementation in plain f64, which shows that the bound holds and is tight.
fn naive_gram(format: Format, inputs: &[Vec<f64>]) -> Vec<f64> {
    let world_size = inputs.len();
    let product = |i: usize, j: usize| -> f64 { inputs[i].iter().zip(&inputs[j]).map(|(x, y)| x * y).sum() };
    let gram: Vec<Vec<f64>> = (0..world_size).map(|i| (0..world_size).map(|j| product(i, j)).collect()).collect();
    let form = |u: &[f64], v: &[f64]| -> f64 {
        (0..world_size).map(|i| u[i] * (0..world_size).map(|j| gram[i][j] * v[j]).sum::<f64>()).sum()
    };
    let mut level: Vec<Vec<f64>> =
        (0..world_size).map(|r| (0..world_size).map(|i| if i == r { 1.0 } else { 0.0 }).collect()).collect();
    while level.len() > 1 {
        level = level
            .chunks(2)
            .map(|chunk| match chunk {
                [a, b] => {
                    let (s, qa, qb) = (form(a, b), form(a, a), form(b, b));
                    let ka = if qa < SMALLEST_SQUARED_NORM { 1.0 } else { 1.0 - s / (2.0 * qa) };
                    let kb = if qb < SMALLEST_SQUARED_NORM { 1.0 } else { 1.0 - s / (2.0 * qb) };
                    a.iter().zip(b).map(|(x, y)| ka * x + kb * y).collect()
                }
                one => one[0].clone(),
            })
            .collect();
    }
    (0..inputs[0].len()).map(|i| format.round(inputs.iter().zip(&level[0]).map(|(x, w)| w * x[i]).sum())).collect()
}

fn naive_tree(format: Format, inputs: &[Vec<f64>]) -> Vec<f64> {
    let mut level = inputs.to_vec();
    while level.len() > 1 {
        level = level
            .chunks(2)
            .map(|chunk| match chunk {
                [a, b] => {
                    let product = |x: &[f64], y: &[f64]| -> f64 { x.iter().zip(y).map(|(x, y)| x * y).sum() };
                    let (s, qa, qb) = (product(a, b), product(a, a), product(b, b));
                    let ka = if qa < SMALLEST_SQUARED_NORM { 1.0 } else { 1.0 - s / (2.0 * qa) };
                    let kb = if qb < SMALLEST_SQUARED_NORM { 1.0 } else { 1.0 - s / (2.0 * qb) };
                    a.iter().zip(b).map(|(x, y)| format.round(ka * x + kb * y)).collect()
                }
                one => one[0].clone(),
            })
            .collect();
    }
    level.remove(0)
}

#[test]
fn plain_implementations_stay_inside_the_bounds() {
    for format in Format::ALL {
        for kind in Kind::ADASUM {
            for world_size in [1, 2, 3, 4, 7, 8] {
                let inputs = generate(kind, format, world_size, 131, 5);
                let label = format!("{format:?} {kind:?} P={world_size}");
                let layers = std::slice::from_ref(&(0..131));
                let tree = expect(Method::Tree, format, &inputs, layers);
                let got = naive_tree(format, &inputs);
                crate::tolerance::assert_within(&format!("{label} tree"), format, &got, &tree.exact, &tree.bounds);
                let gram = expect(Method::Gram, format, &inputs, layers);
                assert!(gram.bounds.iter().all(|bound| bound.is_finite()), "{label}: an infinite bound checks nothing");
                if gram.possibly_cancelled() == 0 {
                    let got = naive_gram(format, &inputs);
                    crate::tolerance::assert_within(&format!("{label} gram"), format, &got, &gram.exact, &gram.bounds);
                }
            }
        }
    }
}

#[test]
fn the_gram_bound_of_ordinary_vectors_is_hardly_more_than_one_rounding() {
    for format in [Format::F32, Format::F16, Format::BF16] {
        let inputs = generate(Kind::Random, format, 8, 1000, 3);
        let expected = expect(Method::Gram, format, &inputs, std::slice::from_ref(&(0..1000)));
        for (bound, exact) in expected.bounds.iter().zip(&expected.exact) {
            assert!(*bound < 1.001 * format.rounding_error(*exact) + 1e-11, "{format:?}: {bound:e} for {exact:e}");
        }
    }
}

#[test]
fn nearly_opposite_vectors_are_told_apart_by_survival() {
    let at = |gap| {
        let inputs = generate(Kind::NearlyOpposite(gap), Format::F32, 4, 131, 5);
        expect(Method::Gram, Format::F32, &inputs, std::slice::from_ref(&(0..131))).survival[0]
    };
    assert!(at(1e-3) > SURELY_CANCELLED, "{:e}", at(1e-3));
    assert!(at(1e-6) < SURELY_CANCELLED, "{:e}", at(1e-6));
    assert!(at(0.0) < SURELY_CANCELLED, "{:e}", at(0.0));
}
