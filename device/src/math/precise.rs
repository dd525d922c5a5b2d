//! The exact path of Adasum in `f64`: the combination tree in twice the precision ([`Wide`]), rounded once at the end.
//!
//! # Why
//! A coefficient `1 - a·b / 2|a|²` scales `a`, so an error `δ` of `a` changes the pair's result by about `δ |b| / |a|`: if a node of the
//! tree is much shorter than the ranks' vectors below it, `|a| ≪ |b|`, the rounding errors of its elements are magnified by that ratio. Two
//! nearly opposite vectors of `f64` leave a node of down to `2^-53` of their length, so a result of 53 bits needs about 106 bits, about as
//! many as [`Wide`] has. Below that a node's direction is noise, and it counts as zero ([`LEAST_PART`]).
//!
//! # Sums that do not depend on the order
//! Inner products are sums over elements, threads, blocks and ranks, in any order that a transport uses. Here every term is divided into
//! [`SLICES`] numbers, multiples of fixed powers of two, so coarse that `f64` adds them without rounding: ordinary additions, and an
//! ordinary all-reduce of `f64`, give exact sums. The powers of two follow from the ranks' squared norms, since Adasum never gives a vector
//! longer than `√(Σ |xᵢ|²)`: with the cosine `c` of `a` and `b`, `|Adasum(a, b)|² = (|a|² + |b|²)(1 - 3c²/4) + c³ |a||b| / 2 ≤ |a|² +
//! |b|²`.
//! Relative to that scale, the first slice has 50 bits, each of the next two another 39 bits if a layer has at most `2^12` elements, and
//! the last slice the rest. For longer layers only the guarantee that the second and third are exact is lost.
//!
//! # Large vectors
//! Where the layer's squared norms overflow, its vectors from [`LARGE`] on, and the nodes that contain one, are multiplied by [`DOWN`]; the
//! others are not, so that both keep their digits and a coefficient is representable whatever the ratio of the norms. The coefficients of a
//! pair are those of the scaled vectors ([`coefficients`]). The overflowed norms of large vectors give no scale: their products are not
//! sliced, and have the precision of sums of `f64`.

use super::adasum::{Pair, SMALLEST_SQUARED_NORM};
use super::wide::Wide;

/// Layers of at most this length take this path for any Gram matrix: in short vectors neither cosines, which cost digits, nor roundings
/// average out.
pub const SHORT: usize = 128;

/// Longer layers take it if the squared norm of a node is below this fraction of `Σ wᵢ² |xᵢ|²`, its value for orthogonal vectors: that is,
/// if a bit is lost to cancellation. They also take it if that sum overflows.
pub const CANCELLATION: f64 = 0.5;

/// The limit of the sum of a layer's squared norms up to which no vector is scaled: beyond, parts of products could overflow. Elements are
/// then beyond `1e147`.
pub const MOST: f64 = f64::from_bits((1023 + 990) << 52);

/// The squared norm from which on vectors are large in a layer beyond [`MOST`]: at most 2^16 ranks exceed `MOST` only if one of them is large.
pub const LARGE: f64 = power(970);

/// The factor of large vectors, and of nodes that contain one. The squared norm of 2^40 of the largest numbers then has room for products
/// of parts ([`Wide::product`]). Elements below `2^-462` lose digits beside elements of at least `2^465`.
pub const DOWN: f64 = power(-560);

/// The square root of `1 / DOWN`.
const HALF_UP: f64 = power(280);

/// A squared norm below this part of the scale has no digits in [`Wide`], whose relative error is `2^-104`: the vector counts as zero.
pub const LEAST_PART: f64 = f64::from_bits((1023 - 180) << 52);

/// The number of numbers whose sum is a term of an inner product.
pub const SLICES: usize = 4;

/// The number of sums of a pair: the slices of `u·v`, of `|u|²` and of `|v|²`.
pub const SUMS: usize = 3 * SLICES;

/// The number of numbers that store a pair's coefficients: high and low parts.
pub const NUMBERS: usize = 4;

/// Both coefficients of a pair.
pub type Coefficients = (Wide, Wide);

/// The sums of a pair's inner products, slice by slice: `u·v`, `|u|²`, `|v|²`.
pub type Sums = [f64; SUMS];

/// Passes the squared norm by which the exact path scales each rank's vector to `set`: infinite for large vectors. `squared_norm` returns
/// the numbers of the Gram matrix, which are the same on all ranks.
#[inline]
pub fn scaling_norms(world_size: usize, squared_norm: impl Fn(usize) -> f64, mut set: impl FnMut(usize, f64)) {
    let (mut sum, mut rank) = (0.0, 0);
    while rank < world_size {
        sum += squared_norm(rank);
        rank += 1;
    }
    let least = if sum < MOST { f64::INFINITY } else { LARGE };
    rank = 0;
    while rank < world_size {
        let norm = squared_norm(rank);
        set(rank, if norm < least { norm } else { f64::INFINITY });
        rank += 1;
    }
}

/// Whether a vector is large, or with the sum of its ranks' norms a node, by its [scaling norm](scaling_norms).
#[inline(always)]
fn is_large(scaling_norm: f64) -> bool {
    scaling_norm == f64::INFINITY
}

/// An element of a rank's vector, scaled by its [scaling norm](scaling_norms).
#[inline(always)]
pub fn leaf(value: f64, scaling_norm: f64) -> Wide {
    let value = if is_large(scaling_norm) { value * DOWN } else { value };
    value.into()
}

/// An element of the root in `f64`, times a factor. `scaling_norm` is the sum of the ranks' [scaling norms](scaling_norms).
#[inline(always)]
pub fn root(value: Wide, scaling_norm: f64, factor: f64) -> f64 {
    let half_up = if is_large(scaling_norm) { HALF_UP } else { 1.0 };
    if factor == 1.0 {
        return value.high * half_up * half_up;
    }
    // Half of the power of two on either side: a factor far from 1 then overflows or underflows only with the result.
    value.scaled(half_up).times(factor.into()).high * half_up
}

/// Bounds of a pair's inner products, powers of two; 0 for products of large sides, which have no bound.
#[derive(Clone, Copy, Debug)]
pub struct Scales {
    dot: f64,
    left: f64,
    right: f64,
}

impl Scales {
    /// The scales of a pair, from the ranks' [scaling norms](scaling_norms).
    #[inline]
    pub fn of(pair: Pair, scaling_norm: impl Fn(usize) -> f64) -> Self {
        let side = |begin: usize, end: usize| {
            let (mut sum, mut rank) = (0.0, begin);
            while rank < end {
                sum += scaling_norm(rank);
                rank += 1;
            }
            (exponent_above(sum), is_large(sum))
        };
        let ((left, left_is_large), (right, right_is_large)) =
            (side(pair.begin, pair.middle), side(pair.middle, pair.end));
        let scale = |exponent, is_large| if is_large { 0.0 } else { power(exponent) };
        // The mean, rounded up.
        let dot = left + right - ((left + right) >> 1);
        Self {
            dot: scale(dot, left_is_large || right_is_large),
            left: scale(left, left_is_large),
            right: scale(right, right_is_large),
        }
    }

    /// The scale of one product, for all products.
    #[inline(always)]
    pub fn only(self, product: Product) -> Self {
        let scale = self.of_product(product);
        Self { dot: scale, left: scale, right: scale }
    }

    /// The scale of one product.
    #[inline(always)]
    pub fn of_product(self, product: Product) -> f64 {
        match product {
            Product::Dot => self.dot,
            Product::Left => self.left,
            Product::Right => self.right,
        }
    }
}

/// The exponent of a power of two that is at least twice `value`. Values below `2^-600` need no distinction: such a vector has coefficient
/// 1.
#[inline(always)]
fn exponent_above(value: f64) -> i32 {
    const LEAST: i32 = -600;
    let exponent = ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023 + 3;
    if exponent > LEAST { exponent } else { LEAST }
}

/// The power of two with a normal exponent.
#[inline(always)]
const fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// Divides a term of an inner product below `scale` into slices, or for the scale 0 into its high and low parts.
#[inline(always)]
fn slices(term: Wide, scale: f64) -> [f64; SLICES] {
    const GRIDS: [f64; SLICES - 1] = [power(-50), power(-89), power(-128)];
    let (first, rest) = cut(term, GRIDS[0] * scale);
    let (second, rest) = cut(rest, GRIDS[1] * scale);
    let (third, rest) = cut(rest, GRIDS[2] * scale);
    [first, second, third, rest.high]
}

/// The multiple of `grid`, a power of two, that is nearest to a number, and the rest. The number is below `2^51` times the grid.
#[inline(always)]
fn cut(number: Wide, grid: f64) -> (f64, Wide) {
    // Adding this number puts the last bit of 53 at the grid.
    let shift = grid * (3u64 << 51) as f64;
    let multiple = (number.high + shift) - shift;
    (multiple, Wide::sum(number.high - multiple, number.low))
}

/// One of the inner products of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    /// `u·v`.
    Dot,
    /// `|u|²`.
    Left,
    /// `|v|²`.
    Right,
}

/// Adds the term of one element, where the two sides of a pair are `left` and `right`, to the sums of one product with this scale.
#[inline(always)]
pub fn add_term(sums: [f64; SLICES], product: Product, scale: f64, left: Wide, right: Wide) -> [f64; SLICES] {
    let (a, b) = match product {
        Product::Dot => (left, right),
        Product::Left => (left, left),
        Product::Right => (right, right),
    };
    let slices = slices(a.times(b), scale);
    core::array::from_fn(|slice| sums[slice] + slices[slice])
}

/// Adds the terms of one element to all sums of a pair.
#[inline(always)]
pub fn add_terms(sums: Sums, scales: Scales, left: Wide, right: Wide) -> Sums {
    let add = |first: usize, product: Product| {
        add_term(core::array::from_fn(|slice| sums[first + slice]), product, scales.of_product(product), left, right)
    };
    let (dot, left, right) = (add(0, Product::Dot), add(SLICES, Product::Left), add(2 * SLICES, Product::Right));
    core::array::from_fn(|index| match index / SLICES {
        0 => dot[index % SLICES],
        1 => left[index % SLICES],
        _ => right[index % SLICES],
    })
}

/// The coefficients of a pair's scaled sides, whose combination is scaled by [`DOWN`] if one of the sides is; from the pair's sums over all
/// elements: `sum(index)`, called once for each.
#[inline]
pub fn coefficients(sum: impl Fn(usize) -> f64, scales: Scales) -> Coefficients {
    let total = |product: usize| {
        let slice = |slice: usize| Wide::from(sum(product * SLICES + slice));
        slice(0).plus(slice(1)).plus(slice(2)).plus(slice(3))
    };
    let dot = total(0);
    (coefficient(dot, total(1), scales.left, scales.right), coefficient(dot, total(2), scales.right, scales.left))
}

/// The coefficient of a side whose squared norm has the scale `scale`; the other side's has `other`.
///
/// A sum that is NaN, which an infinite element gives, makes the coefficient NaN.
#[inline(always)]
fn coefficient(dot: Wide, squared_norm: Wide, scale: f64, other: f64) -> Wide {
    // In units of the side `a` as it is stored and of the stored result: `DOWN` is missing where only the other side `b` has it, and there is
    // one too many in `a·b / |a|²` where only this one has it.
    let one = if scale != 0.0 && other == 0.0 { DOWN } else { 1.0 };
    let of_quotient = if scale == 0.0 && other != 0.0 { DOWN } else { 1.0 };
    let is_small = scale != 0.0 && squared_norm.high < SMALLEST_SQUARED_NORM;
    if is_small || squared_norm.high <= LEAST_PART * scale {
        return one.into();
    }
    Wide::from(one).plus(dot.over(squared_norm.plus(squared_norm)).scaled(of_quotient).negated())
}

/// One element of a pair's combination.
#[inline(always)]
pub fn join((left, right): Coefficients, a: Wide, b: Wide) -> Wide {
    left.times(a).plus(right.times(b))
}

/// A pair's coefficients of the vectors themselves, rounded to `f64`.
#[inline(always)]
pub fn rounded((left, right): Coefficients, scales: Scales) -> super::adasum::Coefficients {
    let unscaled = |coefficient: Wide, scale: f64, other: f64| {
        let half_up = if scale != 0.0 && other == 0.0 { HALF_UP } else { 1.0 };
        coefficient.high * half_up * half_up
    };
    (unscaled(left, scales.left, scales.right), unscaled(right, scales.right, scales.left))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The Adasum of two vectors of one element, and the coefficients.
    fn pair(values: [f64; 2]) -> (f64, super::super::adasum::Coefficients) {
        let (pair, mut norms) = (Pair { begin: 0, middle: 1, end: 2 }, [0.0; 2]);
        scaling_norms(2, |rank| values[rank] * values[rank], |rank, norm| norms[rank] = norm);
        let scales = Scales::of(pair, |rank| norms[rank]);
        let (a, b) = (leaf(values[0], norms[0]), leaf(values[1], norms[1]));
        let sums = add_terms([0.0; SUMS], scales, a, b);
        let both = coefficients(|index| sums[index], scales);
        (root(join(both, a, b), norms[0] + norms[1], 1.0), rounded(both, scales))
    }

    /// Parallel vectors give their mean, whatever the ratio of their norms, unless one is too short for a coefficient.
    #[test]
    fn coefficients_of_pairs_of_any_two_magnitudes() {
        assert_eq!(pair([1e160, 1e160]), (1e160, (0.5, 0.5)));
        assert_eq!(pair([f64::MAX, f64::MAX]), (f64::MAX, (0.5, 0.5)));
        assert_eq!(pair([1e160, -1e160]), (0.0, (1.5, 1.5)));
        assert_eq!(pair([2.0, 2f64.powi(1000)]).0, 1.0 + 2f64.powi(999));
        // 2^1200 is no f64, but the coefficient's product with the vector is.
        let (mean, (left, right)) = pair([2f64.powi(-200), 2f64.powi(1000)]);
        assert_eq!((mean, left, right), (2f64.powi(999), f64::NEG_INFINITY, 1.0));
        assert_eq!(pair([2f64.powi(-300), 2f64.powi(600)]), (2f64.powi(600), (1.0, 1.0)));
        let (sum, (left, right)) = pair([f64::INFINITY, 0.0]);
        assert!(sum.is_nan() && left.is_nan() && right == 1.0, "{sum} {left} {right}");
    }

    #[test]
    fn scaling_norms_are_of_large_vectors_that_overflow_alone() {
        let norms = |norms: [f64; 3]| {
            let mut found = [0.0; 3];
            scaling_norms(3, |rank| norms[rank], |rank, norm| found[rank] = norm);
            found
        };
        let almost = MOST / 4.0;
        assert_eq!(norms([1.0, almost, almost]), [1.0, almost, almost]);
        assert_eq!(norms([1.0, LARGE / 2.0, MOST]), [1.0, LARGE / 2.0, f64::INFINITY]);
        assert_eq!(norms([LARGE, f64::INFINITY, 0.0]), [f64::INFINITY, f64::INFINITY, 0.0]);
    }
}
