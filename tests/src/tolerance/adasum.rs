//! The error bound of an Adasum all-reduce, one number per element.
//!
//! # Derivation
//!
//! Take one node of the oracle's tree, `c = k_a a + k_b b` with `k_a = 1 − s/2q_a`, `s = a·b`, `q_a = |a|²`. The implementation has `ã`
//! instead of `a`. Every node carries these upper bounds:
//!
//! - `E_i ≥ |ã_i − a_i|`, and `e = |E|` its Euclidean norm;
//! - `W_i ≥ Σ_r |c_r||x_r,i|`, the magnitude of element i before cancellation (`c_r` are the weights of the inputs);
//! - `M ≥ Σ_r |c_r||x_r|`, the corresponding magnitude for norms.
//!
//! **Inner products.** `ã·b̃ − a·b = (ã−a)·b + a·(b̃−b) + (ã−a)·(b̃−b)`, and evaluating it errs by a relative `η`
//! of a magnitude `m_a m_b`:
//!
//! > δs = e_a|b| + |a|e_b + e_a e_b + η m_a m_b,   δq_a = 2 e_a|a| + e_a² + η m_a².
//!
//! *Tree* forms the vectors, so `m_a = |a| + e_a` and `η = γ_{n+P}` (n products; the partial sums of P ranks). *Gram*
//! evaluates `uᵀGv` from the inputs' Gram matrix, so `m_a = M_a + e_a`, and `η = γ_{n+P} + γ_{4P+4}`, because every
//! term `u_i v_j G_ij` is two multiplications and takes part in at most `P² `additions done as two nested sums of P.
//! This is where nearly opposite vectors hurt: |a| ≪ M_a.
//!
//! **Coefficients.** With `t = s/2q_a`: `|t̃ − t| ≤ (δs + 2|t|δq_a) / (2 (q_a − δq_a))` if `q_a > δq_a`, and two
//! roundings more: `δk = |t̃ − t| + 3u (1 + |t| + |t̃ − t|)`. A computed `q̃_a` below the threshold gives `k̃_a = 1`, and
//! then `δk = |t|` at most; the threshold itself is part of the rule, so this matters only where `q_a − δq_a` is below it.
//!
//! **A direction lost.** If `δq_a ≥ q_a`, nothing is known of the direction of `ã`. In the tree its contribution is still bounded, since
//! `s̃ ≤ (1+η)|ã||b̃|`: `|k̃_a ã_i| ≤ |ã_i| + (1+2η)(|b|+e_b)|ã_i| / 2|ã| ≤ |a_i| + E_i + (1+2η)(|b|+e_b)/2`. In the Gram form there is no
//! such bound (q̃ may be anything); the bound is infinite, and the layer must be recomputed exactly.
//!
//! **The new vector.** Per element
//!
//! > E_c = (|k_a|+δk_a) E_a + δk_a |a_i| + (the same for b) + rounding,
//!
//! where rounding is, for *Tree*, `3u (|k_a a_i| + |k_b b_i|)` for the f64 arithmetic and one rounding to the dtype; for
//! *Gram*, three roundings in `f64` of every weight, `3u W_c`, and at the root `γ_{P+1} W` for the weighted sum and the one
//! rounding to the dtype.
//!
//! **In `f64`**, layers of at most `SHORT` elements, and longer ones where a node has less than half of `Σ u_i²|x_i|²`, are *Precise*: the
//! tree in twice the precision, rounded once. All of the above holds with `w = 2^-100` in place of `u`, which also covers an oracle of
//! equal precision, and with one rounding to the dtype at the root; only weights are products of rounded coefficients.
//!
//! **Choice of the bound.** design.md requires that a layer is recomputed by the tree where the survival of a node that takes part in a
//! pair (`|u|²/Σ|u_i||u_j||G_ij|`) is below about 1e-10; the tree's bound then applies, which also covers an exact path that keeps `f64`
//! between levels. gradsync switches earlier, below 1e-4 of `P Σ u_i²|x_i|²`, which is at most P times the denominator of the survival:
//! above `1e-4 P` Gram's bound applies. In between either path may run, and the larger bound applies.

use std::ops::Range;

use super::{UNIT, gamma, survival};
use crate::oracle::Format;
use crate::oracle::adasum::{Node, Origin, Pair, SMALLEST_SQUARED_NORM, trees};
use crate::oracle::exact::dot;

/// gradsync's two methods of computing Adasum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// One weighted sum of the inputs, weights from the Gram matrix.
    Gram,
    /// Level by level, with a rounding to the dtype at each level.
    Tree,
}

/// The computation path of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    Gram,
    Tree,
    Precise,
}

/// The expected result of one Adasum all-reduce.
#[derive(Clone, Debug)]
pub struct Expectation {
    /// The exact result, flat, with zeros outside the layers.
    pub exact: Vec<f64>,
    /// The largest admissible error, element by element.
    pub bounds: Vec<f64>,
    /// The exact weights, layers × ranks.
    pub weights: Vec<f64>,
    /// The largest admissible error of each weight.
    pub weight_bounds: Vec<f64>,
    /// The smallest survival of each layer.
    pub survival: Vec<f64>,
    surely_cancelled: usize,
    possibly_cancelled: usize,
}

impl Expectation {
    /// The number of layers that must have been recomputed: the Gram form cannot be accurate because of cancellation, or the layer is short
    /// and of `f64`.
    pub fn surely_cancelled(&self) -> usize {
        self.surely_cancelled
    }

    /// The number of layers that may have been recomputed.
    pub fn possibly_cancelled(&self) -> usize {
        self.possibly_cancelled
    }
}

/// Survival below which the exact path is required.
const SURELY_CANCELLED: f64 = 1e-10;
/// Survival per rank above which the exact path is not taken; the factor 2 allows for rounding in either computation of the ratio.
const SURELY_SOUND_PER_RANK: f64 = 2e-4;
/// The corresponding limit for `f64`: half of the sum of squares, which is at most the denominator of the survival, with a margin for
/// rounding.
const SURELY_SOUND_DOUBLE: f64 = 0.5001;
/// `f64` layers of at most this many elements always take the exact path.
const SHORT: usize = 128;
/// No layer with a larger squared norm takes the exact path.
const MOST: f64 = f64::from_bits((1023 + 990) << 52);
/// The unit roundoff of twice the precision of `f64`, with a margin.
const WIDE_UNIT: f64 = f64::from_bits((1023 - 100) << 52);

/// The exact result and its bounds for flat inputs (one per rank) cut into layers.
pub fn expect(method: Method, format: Format, inputs: &[Vec<f64>], layers: &[Range<usize>]) -> Expectation {
    let len = inputs[0].len();
    let mut expectation = Expectation {
        exact: vec![0.0; len],
        bounds: vec![0.0; len],
        weights: Vec::new(),
        weight_bounds: Vec::new(),
        survival: Vec::new(),
        surely_cancelled: 0,
        possibly_cancelled: 0,
    };
    for (node, layer) in trees(inputs, layers).iter().zip(layers) {
        let parts: Vec<&[f64]> = inputs.iter().map(|input| &input[layer.clone()]).collect();
        let walk = |path| Walk { path, format, len: layer.len(), world_size: inputs.len(), inputs: &parts }.root(node);
        let (bounds, weight_bounds) = match method {
            Method::Tree => walk(Path::Tree),
            Method::Gram => {
                let paths = paths(node, format, &parts);
                expectation.surely_cancelled += usize::from(!paths.contains(&Path::Gram));
                expectation.possibly_cancelled += usize::from(paths != [Path::Gram]);
                paths.iter().map(|&path| walk(path)).reduce(larger).expect("a layer has a path")
            }
        };
        for (offset, i) in layer.clone().enumerate() {
            expectation.exact[i] = node.vector[offset].value();
            expectation.bounds[i] = bounds[offset];
        }
        expectation.weights.extend(node.weights.iter().map(|weight| weight.value()));
        expectation.weight_bounds.extend(weight_bounds);
        expectation.survival.push(smallest_survival(node, &parts, true));
    }
    expectation
}

/// The computation paths that the Gram form of a layer may take.
fn paths(node: &Node, format: Format, inputs: &[&[f64]]) -> &'static [Path] {
    let (len, ranks) = (inputs[0].len(), inputs.len());
    let left = smallest_survival(node, inputs, true);
    if format != Format::F64 {
        return match left {
            _ if left >= SURELY_SOUND_PER_RANK * ranks as f64 => &[Path::Gram],
            _ if left < SURELY_CANCELLED => &[Path::Tree],
            _ => &[Path::Gram, Path::Tree],
        };
    }
    let squares: f64 = inputs.iter().copied().flatten().map(|value| value * value).sum();
    match left {
        _ if ranks == 1 || squares.is_nan() || squares >= MOST => &[Path::Gram],
        _ if (1..=SHORT).contains(&len) || left < SURELY_CANCELLED => &[Path::Precise],
        _ if left >= SURELY_SOUND_DOUBLE => &[Path::Gram],
        _ => &[Path::Gram, Path::Precise],
    }
}

fn larger(a: (Vec<f64>, Vec<f64>), b: (Vec<f64>, Vec<f64>)) -> (Vec<f64>, Vec<f64>) {
    let max = |a: Vec<f64>, b: Vec<f64>| a.into_iter().zip(b).map(|(x, y)| x.max(y)).collect();
    (max(a.0, b.0), max(a.1, b.1))
}

/// The smallest survival in the tree. The root takes part in no pair, so its own cancellation does not matter.
fn smallest_survival(node: &Node, inputs: &[&[f64]], root: bool) -> f64 {
    let own = if root { 1.0 } else { survival(node, inputs) };
    match &node.origin {
        Origin::Input(_) => own,
        Origin::Pair(a, b, _) => own.min(smallest_survival(a, inputs, false)).min(smallest_survival(b, inputs, false)),
    }
}

/// The quantities that each node carries; the module's header defines them.
struct NodeBounds {
    element: Vec<f64>,
    magnitude: Vec<f64>,
    norm_magnitude: f64,
    norm: f64,
    weight: Vec<f64>,
}

/// The error of one coefficient.
enum Slack {
    Known(f64),
    DirectionLost,
}

struct Walk<'a> {
    path: Path,
    format: Format,
    len: usize,
    world_size: usize,
    inputs: &'a [&'a [f64]],
}

impl Walk<'_> {
    fn root(&self, node: &Node) -> (Vec<f64>, Vec<f64>) {
        let state = self.node(node);
        let bounds = match self.path {
            Path::Tree => state.element,
            Path::Gram | Path::Precise => {
                let sum = if self.path == Path::Gram { gamma(self.world_size + 1) } else { 0.0 };
                let before =
                    state.element.iter().zip(&state.magnitude).map(|(error, magnitude)| error + sum * magnitude);
                before
                    .zip(&node.vector)
                    .map(|(error, value)| {
                        // In twice the precision, the reference is rounded too; its rounding error is visible because no larger error
                        // remains.
                        let rounding = self.format.rounding_error(value.value().abs() + error);
                        error + if self.path == Path::Precise { 2.0 * rounding } else { rounding }
                    })
                    .collect()
            }
        };
        (bounds, state.weight)
    }

    fn node(&self, node: &Node) -> NodeBounds {
        let norm = dot(&node.vector, &node.vector).value().sqrt();
        match &node.origin {
            Origin::Input(rank) => NodeBounds {
                element: vec![0.0; self.len],
                magnitude: self.inputs[*rank].iter().map(|value| value.abs()).collect(),
                norm_magnitude: norm,
                norm,
                weight: vec![0.0; self.world_size],
            },
            Origin::Pair(a, b, pair) => self.pair(node, norm, (a, &self.node(a)), (b, &self.node(b)), pair),
        }
    }

    fn pair(
        &self,
        node: &Node,
        norm: f64,
        (a, in_a): (&Node, &NodeBounds),
        (b, in_b): (&Node, &NodeBounds),
        pair: &Pair,
    ) -> NodeBounds {
        let (left, right) = (pair.left.value(), pair.right.value());
        let slack_left = self.slack(pair.dot.value(), pair.left_square.value(), in_a, in_b);
        let slack_right = self.slack(pair.dot.value(), pair.right_square.value(), in_b, in_a);
        let mut element = Vec::with_capacity(self.len);
        let mut magnitude = Vec::with_capacity(self.len);
        for i in 0..self.len {
            let (x, y) = (a.vector[i].value(), b.vector[i].value());
            let mut error = self.term(left, &slack_left, x, in_a.element[i], in_b)
                + self.term(right, &slack_right, y, in_b.element[i], in_a);
            magnitude.push(left.abs() * in_a.magnitude[i] + right.abs() * in_b.magnitude[i]);
            match self.path {
                Path::Gram => error += 3.0 * UNIT * magnitude[i],
                Path::Precise => error += 3.0 * WIDE_UNIT * ((left * x).abs() + (right * y).abs()),
                Path::Tree => {
                    error += 3.0 * UNIT * ((left * x).abs() + (right * y).abs());
                    error += self.format.rounding_error(node.vector[i].value().abs() + error);
                }
            }
            element.push(error);
        }
        let weight = (0..self.world_size)
            .map(|rank| {
                weight_error(left, &slack_left, a.weights[rank].value(), in_a.weight[rank])
                    + weight_error(right, &slack_right, b.weights[rank].value(), in_b.weight[rank])
                    + 3.0 * UNIT * node.weights[rank].value().abs()
            })
            .collect();
        NodeBounds {
            element,
            magnitude,
            norm_magnitude: left.abs() * in_a.norm_magnitude + right.abs() * in_b.norm_magnitude,
            norm,
            weight,
        }
    }

    /// The bound of the difference between `k̃_a ã_i` and `k_a a_i`.
    fn term(&self, coefficient: f64, slack: &Slack, value: f64, error: f64, other: &NodeBounds) -> f64 {
        match slack {
            Slack::Known(slack) => (coefficient.abs() + slack) * error + slack * value.abs(),
            Slack::DirectionLost => {
                let reach = (1.0 + 2.0 * self.evaluation()) * (other.norm + norm_of(&other.element)) / 2.0;
                (coefficient * value).abs() + value.abs() + error + reach
            }
        }
    }

    /// The error bound of the coefficient `1 - dot / 2 square` of the vector described by `own`.
    fn slack(&self, dot: f64, square: f64, own: &NodeBounds, other: &NodeBounds) -> Slack {
        let (own_error, other_error) = (norm_of(&own.element), norm_of(&other.element));
        let (own_magnitude, other_magnitude) = match self.path {
            Path::Tree | Path::Precise => (own.norm + own_error, other.norm + other_error),
            Path::Gram => (own.norm_magnitude + own_error, other.norm_magnitude + other_error),
        };
        let evaluation = self.evaluation();
        // The loss by underflow in products does not scale with the magnitudes.
        let underflow = (self.len * self.world_size * self.world_size) as f64 * Format::F64.smallest();
        let dot_error = own_error * other.norm
            + own.norm * other_error
            + own_error * other_error
            + evaluation * own_magnitude * other_magnitude
            + underflow;
        let square_error =
            2.0 * own_error * own.norm + own_error * own_error + evaluation * own_magnitude * own_magnitude + underflow;
        let rest = square - square_error;
        if square < SMALLEST_SQUARED_NORM && square + square_error < SMALLEST_SQUARED_NORM {
            return Slack::Known(0.0);
        }
        if rest <= 0.0 || (square < SMALLEST_SQUARED_NORM) != (rest < SMALLEST_SQUARED_NORM) {
            return match self.path {
                Path::Tree | Path::Precise => Slack::DirectionLost,
                Path::Gram => Slack::Known(f64::INFINITY),
            };
        }
        let ratio = (dot / (2.0 * square)).abs();
        let drift = (dot_error + 2.0 * ratio * square_error) / (2.0 * rest);
        let unit = if self.path == Path::Precise { WIDE_UNIT } else { UNIT };
        Slack::Known(drift + 3.0 * unit * (1.0 + ratio + drift))
    }

    /// `η` of the module's header.
    fn evaluation(&self) -> f64 {
        let sums = gamma(self.len + self.world_size);
        match self.path {
            Path::Tree => sums,
            Path::Gram => sums + gamma(4 * self.world_size + 4),
            Path::Precise => (self.len + self.world_size) as f64 * WIDE_UNIT,
        }
    }
}

fn weight_error(coefficient: f64, slack: &Slack, weight: f64, error: f64) -> f64 {
    match slack {
        Slack::Known(slack) if weight != 0.0 || error != 0.0 => {
            (coefficient.abs() + slack) * error + slack * weight.abs()
        }
        Slack::DirectionLost if weight != 0.0 || error != 0.0 => f64::INFINITY,
        _ => 0.0,
    }
}

fn norm_of(values: &[f64]) -> f64 {
    // The values are scaled, so that the squares of huge errors do not overflow.
    let largest = values.iter().fold(0.0_f64, |max, value| max.max(value.abs()));
    if largest == 0.0 || !largest.is_finite() {
        return largest;
    }
    largest * values.iter().map(|value| (value / largest).powi(2)).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
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
    fn expect_bounds_plain_implementations() {
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
                    assert!(
                        gram.bounds.iter().all(|bound| bound.is_finite()),
                        "{label}: an infinite bound checks nothing"
                    );
                    if gram.possibly_cancelled() == 0 {
                        let got = naive_gram(format, &inputs);
                        crate::tolerance::assert_within(
                            &format!("{label} gram"),
                            format,
                            &got,
                            &gram.exact,
                            &gram.bounds,
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn expect_of_gram_is_hardly_more_than_one_rounding() {
        for format in [Format::F32, Format::F16, Format::BF16] {
            let inputs = generate(Kind::Random, format, 8, 1000, 3);
            let expected = expect(Method::Gram, format, &inputs, std::slice::from_ref(&(0..1000)));
            for (bound, exact) in expected.bounds.iter().zip(&expected.exact) {
                assert!(*bound < 1.001 * format.rounding_error(*exact) + 1e-11, "{format:?}: {bound:e} for {exact:e}");
            }
        }
    }

    #[test]
    fn expect_tells_nearly_opposite_vectors_apart_by_survival() {
        let at = |gap| {
            let inputs = generate(Kind::NearlyOpposite(gap), Format::F32, 4, 131, 5);
            expect(Method::Gram, Format::F32, &inputs, std::slice::from_ref(&(0..131))).survival[0]
        };
        assert!(at(1e-3) > SURELY_CANCELLED, "{:e}", at(1e-3));
        assert!(at(1e-6) < SURELY_CANCELLED, "{:e}", at(1e-6));
        assert!(at(0.0) < SURELY_CANCELLED, "{:e}", at(0.0));
    }
}
