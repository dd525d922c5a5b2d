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

use super::adasum::{Pair, SMALLEST_SQUARED_NORM};
use super::wide::Wide;

/// Layers of at most this length take this path for any Gram matrix: in short vectors neither cosines, which cost digits, nor roundings
/// average out.
pub const SHORT: usize = 128;

/// Longer layers take it if the squared norm of a node is below this fraction of `Σ wᵢ² |xᵢ|²`, its value for orthogonal vectors: that is,
/// if a bit is lost to cancellation.
pub const CANCELLATION: f64 = 0.5;

/// The limit of the sum of squared norms for this path: beyond, parts of products could overflow. Elements are then beyond `1e147`.
pub const MOST: f64 = f64::from_bits((1023 + 990) << 52);

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

/// Bounds of a pair's inner products, powers of two.
#[derive(Clone, Copy, Debug)]
pub struct Scales {
    dot: f64,
    left: f64,
    right: f64,
}

impl Scales {
    /// The scales of a pair, from the ranks' squared norms, which are the same numbers on all ranks.
    #[inline]
    pub fn of(pair: Pair, squared_norm: impl Fn(usize) -> f64) -> Self {
        let side = |begin: usize, end: usize| {
            let (mut sum, mut rank) = (0.0, begin);
            while rank < end {
                sum += squared_norm(rank);
                rank += 1;
            }
            exponent_above(sum)
        };
        let (left, right) = (side(pair.begin, pair.middle), side(pair.middle, pair.end));
        // The mean, rounded up.
        Self { dot: power(left + right - ((left + right) >> 1)), left: power(left), right: power(right) }
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
fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// Divides a term of an inner product below `scale` into slices.
#[inline(always)]
fn slices(term: Wide, scale: f64) -> [f64; SLICES] {
    const GRIDS: [f64; SLICES - 1] = [power_of(-50), power_of(-89), power_of(-128)];
    let (first, rest) = cut(term, GRIDS[0] * scale);
    let (second, rest) = cut(rest, GRIDS[1] * scale);
    let (third, rest) = cut(rest, GRIDS[2] * scale);
    [first, second, third, rest.high]
}

/// [`power`] for constants.
const fn power_of(exponent: i64) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
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

/// The coefficients of a pair, from its sums over all elements: `sum(index)`, called once for each.
#[inline]
pub fn coefficients(sum: impl Fn(usize) -> f64, scales: Scales) -> Coefficients {
    let total = |product: usize| {
        let slice = |slice: usize| Wide::from(sum(product * SLICES + slice));
        slice(0).plus(slice(1)).plus(slice(2)).plus(slice(3))
    };
    let dot = total(0);
    (coefficient(dot, total(1), scales.left), coefficient(dot, total(2), scales.right))
}

#[inline(always)]
fn coefficient(dot: Wide, squared_norm: Wide, scale: f64) -> Wide {
    let one = Wide::from(1.0);
    if squared_norm.high >= SMALLEST_SQUARED_NORM && squared_norm.high > LEAST_PART * scale {
        one.plus(dot.over(squared_norm.plus(squared_norm)).negated())
    } else {
        one
    }
}

/// One element of a pair's combination.
#[inline(always)]
pub fn join((left, right): Coefficients, a: Wide, b: Wide) -> Wide {
    left.times(a).plus(right.times(b))
}

/// A pair's coefficients rounded to `f64`.
#[inline(always)]
pub fn rounded((left, right): Coefficients) -> super::adasum::Coefficients {
    (left.high, right.high)
}
