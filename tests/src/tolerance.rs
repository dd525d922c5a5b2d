//! The largest error of a correct implementation, derived and not measured.
//!
//! No bound is a constant chosen to make a test pass. Notation: `u` is 2⁻⁵³; `u_T` the unit roundoff of the dtype T; `γ_k = k·u / (1 −
//! k·u)` bounds the relative error of k successive roundings (Higham, *Accuracy and Stability*, section 3.1), whatever their order; `|x|`
//! of a vector is its Euclidean norm.
//!
//! # Dots and norms
//!
//! A sum of `n` products in `f64`, in any order and any blocking, has at most `n` roundings on the path of every product
//! (one of the product itself, which is exact for f32 and narrower, and `n − 1` additions), so
//!
//! > |computed a·b − a·b| ≤ γ_{n} Σ|a_i b_i| ≤ γ_n |a||b|,   plus n times the smallest f64 for products that underflow.
//!
//! # Adasum
//!
//! See [`adasum`], which walks the oracle's tree and carries one bound per element.
//!
//! # Sums of a transport
//!
//! See [`transport`]: there the roundings are to the dtype, not to `f64`.
//!
//! # Optimizers
//!
//! See [`optimizer`], which carries one bound per weight from step to step.

use crate::oracle::adasum::Node;
use crate::oracle::exact::dot_f64;
use crate::oracle::{Format, adasum::SMALLEST_SQUARED_NORM};

pub mod adasum;
pub mod optimizer;
pub mod transport;

/// Unit roundoff of `f64`.
pub const UNIT: f64 = 1.110_223_024_625_156_5e-16;

/// `γ_k`, the bound of the relative error of `k` roundings in `f64`.
pub fn gamma(roundings: usize) -> f64 {
    gamma_of(UNIT, roundings)
}

/// `γ_k`, the bound of the relative error of `k` roundings with this unit roundoff.
pub fn gamma_of(unit: f64, roundings: usize) -> f64 {
    let product = roundings as f64 * unit;
    product / (1.0 - product)
}

/// The bound for a computed inner product of `a` and `b`.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    let magnitudes: (Vec<f64>, Vec<f64>) = (a.iter().map(|x| x.abs()).collect(), b.iter().map(|x| x.abs()).collect());
    let sum = dot_f64(&magnitudes.0, &magnitudes.1);
    gamma(a.len()) * sum + a.len() as f64 * Format::F64.smallest()
}

/// The bound for a mean over ranks that was added in `f64` in any order, multiplied by a rounded `1/P` or divided by `P`, and rounded once
/// to `format`: `P − 1` additions, two more roundings in `f64`, and the rounding to `format`.
pub fn mean(format: Format, values: &[f64]) -> f64 {
    let count = values.len() as f64;
    let magnitude: f64 = values.iter().map(|value| value.abs() / count).sum();
    let mean: f64 = values.iter().map(|value| value / count).sum();
    let before = gamma(values.len() + 2) * magnitude;
    before + format.rounding_error(mean.abs() + before)
}

/// The bound for a weighted sum `Σ w_r x_r` in `f64` with one rounding to `format`: each term is rounded once and then
/// takes part in at most `P` additions.
pub fn combine(format: Format, weights: &[f64], values: &[f64]) -> f64 {
    let magnitude: f64 = weights.iter().zip(values).map(|(w, x)| (w * x).abs()).sum();
    let sum: f64 = weights.iter().zip(values).map(|(w, x)| w * x).sum();
    let before = gamma(weights.len() + 1) * magnitude + weights.len() as f64 * Format::F64.smallest();
    before + format.rounding_error(sum.abs() + before)
}

/// Whether `actual` (a value of `format`) is within `bound` of `exact`. NaN only matches NaN. An infinity is accepted where the exact
/// value, moved by the bound, passes the threshold above which rounding to nearest overflows.
pub fn within(format: Format, actual: f64, exact: f64, bound: f64) -> bool {
    if exact.is_nan() || actual.is_nan() {
        return exact.is_nan() && actual.is_nan();
    }
    if actual == exact {
        return true;
    }
    let overflow = format.max_finite() * (1.0 + format.unit_roundoff() / 2.0);
    if actual.is_infinite() {
        return actual.signum() == exact.signum() && exact.abs() + bound >= overflow;
    }
    (actual - exact).abs() <= bound
}

/// Panics, naming `label` and the first wrong element, unless every element is [`within`] its bound.
pub fn assert_within(label: &str, format: Format, actual: &[f64], exact: &[f64], bounds: &[f64]) {
    assert_eq!(actual.len(), exact.len(), "{label}: wrong number of elements");
    assert_eq!(bounds.len(), exact.len(), "{label}: the test made a wrong number of bounds");
    for (i, ((&got, &want), &bound)) in actual.iter().zip(exact).zip(bounds).enumerate() {
        assert!(
            !bound.is_nan() || want.is_nan(),
            "{label}: the bound of element {i} is NaN, so nothing would be checked"
        );
        assert!(
            within(format, got, want, bound),
            "{label}: element {i} of {} is {got:e}, exact {want:e}, off by {:e}, allowed {bound:e}",
            exact.len(),
            (got - want).abs()
        );
    }
}

/// Panics unless every element is equal (`0 == -0`, NaN equals NaN).
pub fn assert_equal(label: &str, actual: &[f64], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len(), "{label}: wrong number of elements");
    for (i, (&got, &want)) in actual.iter().zip(expected).enumerate() {
        assert!(
            got == want || (got.is_nan() && want.is_nan()),
            "{label}: element {i} of {} is {got:e}, expected {want:e}",
            expected.len()
        );
    }
}

/// `|u|² / Σ|u_i||u_j||G_ij|` of a node: the part of the sum `uᵀGu` that remains after cancellation; 1 for an input.
pub fn survival(node: &Node, inputs: &[&[f64]]) -> f64 {
    let used: Vec<usize> = (0..inputs.len()).filter(|&rank| node.weights[rank].value() != 0.0).collect();
    if used.len() < 2 {
        return 1.0;
    }
    let mut magnitude = 0.0;
    for &i in &used {
        for &j in &used {
            let product = dot_f64(inputs[i], inputs[j]).abs();
            magnitude += (node.weights[i].value() * node.weights[j].value()).abs() * product;
        }
    }
    let square = crate::oracle::exact::dot(&node.vector, &node.vector).value();
    if magnitude < SMALLEST_SQUARED_NORM { 1.0 } else { square / magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn within_knows_overflow_and_nan() {
        assert!(within(Format::F16, f64::INFINITY, 65520.0, 0.0));
        assert!(!within(Format::F16, f64::INFINITY, 65519.0, 0.0));
        assert!(!within(Format::F16, f64::NEG_INFINITY, 70000.0, 1.0));
        assert!(!within(Format::F16, f64::NAN, 1.0, f64::INFINITY));
        assert!(!within(Format::F16, 1.0, f64::NAN, f64::INFINITY));
        assert!(within(Format::F32, 1.0, 1.0 + 1e-9, 1e-8));
        assert!(!within(Format::F32, 1.0, 1.0 + 1e-7, 1e-8));
    }

    #[test]
    #[should_panic(expected = "element 1 of 2")]
    fn assert_within_names_the_element() {
        assert_within("x", Format::F32, &[1.0, 2.0], &[1.0, 2.5], &[0.0, 0.1]);
    }
}
