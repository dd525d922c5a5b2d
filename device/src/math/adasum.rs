//! Adasum of one layer, from inner products alone (Maleki et al., "Scaling Distributed Training with Adaptive Summation",
//! arXiv 2006.02924).
//!
//! A pair combines as `(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b`. Ranks combine as a tree of adjacent pairs, (0,1), (2,3), …, then pairs
//! of those; an odd rank moves up unchanged. The result is a linear combination of the inputs, whose weights follow from the Gram matrix of
//! the inputs: for `u = Σ wᵢ xᵢ` and `v = Σ wⱼ xⱼ`, `u·v = Σᵢⱼ wᵢ wⱼ Gᵢⱼ`. The two sides of a pair never share an input, so that combining
//! them only scales the weights on both sides.
//!
//! All numbers are `f64`. This module reads no vector and stores only the weights.

use super::precise;

/// Below this squared norm a side's coefficient is 1: the square root of the smallest normal `f64`, as in upstream.
pub const SMALLEST_SQUARED_NORM: f64 = 1.491_668_146_240_041_3e-154;

/// A squared norm computed from a Gram matrix that is below this fraction of its bound has lost digits to cancellation.
///
/// An entry of the matrix is wrong by at most `γ |xᵢ| |xⱼ|` (`γ` about 1e-13 for blocked sums of 2^30 terms), hence `u·u` by
/// at most `γ (Σ |wᵢ| |xᵢ|)² ≤ γ n Σ wᵢ² |xᵢ|²`. Where `u·u` is at least `1e-4` of that last bound, its relative error is at
/// most 1e-9, far under the unit roundoff of `f32`. Below it the layer takes the exact path, [`tree_value`].
pub const CANCELLATION: f64 = 1e-4;

/// The criterion by which a layer takes the exact path; it depends on the vectors' dtype. Layers with `f64` elements also take it where
/// products, or their products with weights, overflow: [`precise`] scales such vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Criterion {
    /// `f32` and narrower: below [`CANCELLATION`].
    Narrow,
    /// `f64`, where the exact path is [`precise`]: below [`precise::CANCELLATION`].
    Double,
    /// `f64` in a layer of at most [`precise::SHORT`] elements: always.
    ShortDouble,
    /// Where products overflow, and only there: `f64` beside narrower dtypes.
    Overflow,
}

impl Criterion {
    /// The criterion of a layer of `len` elements, over all ranks' parts, of `f64` or a narrower dtype.
    #[inline]
    pub const fn of(is_double: bool, len: usize) -> Self {
        match is_double {
            false => Self::Narrow,
            true if 0 < len && len <= precise::SHORT => Self::ShortDouble,
            true => Self::Double,
        }
    }
}

/// The coefficient of one side of a pair, from the dot product of both and the squared norm of that side.
///
/// A NaN norm gives 1, as upstream does; the NaN reaches the result through the other side's dot product.
#[inline(always)]
pub fn coefficient(dot: f64, squared_norm: f64) -> f64 {
    if squared_norm >= SMALLEST_SQUARED_NORM { 1.0 - dot / (2.0 * squared_norm) } else { 1.0 }
}

/// Number of inner products of `n` vectors with each other, themselves included.
#[inline(always)]
pub const fn products(n: usize) -> usize {
    n * (n + 1) / 2
}

/// Index of the product of vectors `i ≤ j` among [`products`]`(n)`: the upper triangle, row by row.
#[inline(always)]
pub const fn product_index(i: usize, j: usize, n: usize) -> usize {
    i * n - i * (i + 1) / 2 + j
}

/// One pair of the combination tree: ranks `begin..middle` are combined with ranks `middle..end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// First rank of the left side.
    pub begin: usize,
    /// First rank of the right side.
    pub middle: usize,
    /// One past the last rank of the right side.
    pub end: usize,
}

impl Pair {
    /// The first pair to combine among `world_size` ranks, if there are two.
    #[inline]
    pub fn first(world_size: usize) -> Option<Self> {
        Self::at_level(1, world_size)
    }

    /// The pair after this one: the next to the right, or the first pair of the next level.
    #[inline]
    pub fn next(self, world_size: usize) -> Option<Self> {
        let half = self.middle - self.begin;
        let begin = self.begin + 2 * half;
        if begin + half < world_size {
            return Some(Self { begin, middle: begin + half, end: world_size.min(begin + 2 * half) });
        }
        Self::at_level(2 * half, world_size)
    }

    /// The index of this pair's coefficients among the coefficients of all pairs of a tree: every rank but the first is the first rank of
    /// exactly one pair's right side.
    #[inline(always)]
    pub fn index(self) -> usize {
        self.middle - 1
    }

    /// Whether both sides are single ranks: their products are entries of the Gram matrix, without cancellation.
    #[inline(always)]
    pub fn joins_ranks(self) -> bool {
        self.end - self.begin == 2
    }

    #[inline]
    fn at_level(half: usize, world_size: usize) -> Option<Self> {
        (half < world_size).then(|| Self { begin: 0, middle: half, end: world_size.min(2 * half) })
    }
}

/// The pairs of the combination tree over `world_size` ranks, level by level, from neighbours to the root.
#[inline]
pub fn pairs(world_size: usize) -> impl Iterator<Item = Pair> {
    core::iter::successors(Pair::first(world_size), move |pair| pair.next(world_size))
}

/// The pairs of one level of that tree, from left to right; those of level 0 join single ranks.
#[inline(always)]
pub fn pairs_of_level(level: usize, world_size: usize) -> impl Iterator<Item = Pair> {
    let half = 1 << level;
    (0..(world_size + half - 1) >> (level + 1)).map(move |number| {
        let begin = number * 2 * half;
        Pair { begin, middle: begin + half, end: world_size.min(begin + 2 * half) }
    })
}

/// The weights of one layer while they are being computed: a slice on the CPU, device memory on a GPU.
pub trait Weights {
    /// The weight of `rank`.
    fn get(&self, rank: usize) -> f64;
    /// Replaces the weight of `rank`.
    fn set(&mut self, rank: usize, weight: f64);
}

impl Weights for [f64] {
    fn get(&self, rank: usize) -> f64 {
        self[rank]
    }
    fn set(&mut self, rank: usize, weight: f64) {
        self[rank] = weight;
    }
}

/// The coefficients of a pair: of its left side and of its right side.
pub type Coefficients = (f64, f64);

/// Both coefficients of a pair, from the dot product of its sides and their squared norms.
#[inline(always)]
pub fn coefficients(dot: f64, left_norm: f64, right_norm: f64) -> Coefficients {
    (coefficient(dot, left_norm), coefficient(dot, right_norm))
}

/// Applies a pair's coefficients to the weights of the ranks on its two sides.
#[inline]
pub fn combine_pair<W: Weights + ?Sized>(weights: &mut W, pair: Pair, (left, right): Coefficients) {
    for rank in pair.begin..pair.end {
        let side = if rank < pair.middle { left } else { right };
        weights.set(rank, weights.get(rank) * side);
    }
}

/// One element of a pair's combination: two products and their sum, each rounded.
#[inline(always)]
pub fn join((left, right): Coefficients, a: f64, b: f64) -> f64 {
    left * a + right * b
}

/// The limit of levels of a combination tree: 4096 ranks.
pub const LEVELS: usize = 12;

/// One element of the combination of ranks `begin..end`, a node of the tree or a whole tree truncated at the right: `value(rank)` is a
/// rank's element, `coefficients(pair)` the coefficients of a pair below the node.
///
/// Joins as soon as both sides are available, lowest level first, so that it needs one value per level, not an array of ranks. Order and
/// rounding of the operations are the same as in combining whole vectors in place, in `f64`. There are at most `2^LEVELS` ranks.
#[inline(always)]
pub fn tree_value(
    begin: usize,
    end: usize,
    value: impl Fn(usize) -> f64,
    coefficients: impl Fn(Pair) -> Coefficients,
) -> f64 {
    tree_node::<_, LEVELS>(begin, end, value, |pair, left, right| join(coefficients(pair), left, right))
}

/// Like [`tree_value`], for elements of any type, where `join` combines the two sides of a pair, and for at most `2^MOST` ranks.
#[inline(always)]
pub fn tree_node<V: Copy + Default, const MOST: usize>(
    begin: usize,
    end: usize,
    value: impl Fn(usize) -> V,
    join: impl Fn(Pair, V, V) -> V,
) -> V {
    const { assert!(MOST <= LEVELS) };
    let mut waiting = [V::default(); LEVELS + 1];
    for rank in begin..end {
        let place = rank - begin;
        let mut node = value(rank);
        // Binary counting: a node of a level is stored where a bit is 0, and joins the stored one where it is 1.
        let mut is_placed = false;
        let mut level = 0;
        while level <= MOST {
            if !is_placed {
                if (place >> level) & 1 == 0 {
                    waiting[level] = node;
                    is_placed = true;
                } else {
                    let half = 1 << level;
                    let pair = Pair { begin: rank + 1 - 2 * half, middle: rank + 1 - half, end: rank + 1 };
                    node = join(pair, waiting[level], node);
                }
            }
            level += 1;
        }
    }
    // Joins the nodes still stored, from the right: an odd one moves up unchanged.
    let count = end - begin;
    let mut node = V::default();
    let mut start = end;
    let mut level = 0;
    while level <= MOST {
        if (count >> level) & 1 == 1 {
            let left = start - (1 << level);
            node = if start == end {
                waiting[level]
            } else {
                join(Pair { begin: left, middle: start, end }, waiting[level], node)
            };
            start = left;
        }
        level += 1;
    }
    node
}

/// Computes the weights of one layer from its Gram matrix; `gram(i, j)` is called for `i ≤ j` only. The coefficients of the pairs of single
/// ranks are passed to `keep`: the exact path starts from them.
///
/// Returns whether the layer takes the exact path, because a norm lost digits to cancellation or always ([`Criterion`]); the weights are
/// then not to be used, see [`start_tree`].
#[inline]
pub fn weights<W: Weights + ?Sized>(
    weights: &mut W,
    world_size: usize,
    criterion: Criterion,
    gram: impl Fn(usize, usize) -> f64,
    mut keep: impl FnMut(Pair, Coefficients),
) -> bool {
    for rank in 0..world_size {
        weights.set(rank, 1.0);
    }
    let mut cancelled = false;
    for pair in pairs(world_size) {
        let sums = PairSums::of(weights, pair, &gram);
        cancelled |= sums.left.is_cancelled(pair.middle - pair.begin, criterion);
        cancelled |= sums.right.is_cancelled(pair.end - pair.middle, criterion);
        let both = coefficients(sums.dot, sums.left.squared_norm(), sums.right.squared_norm());
        if pair.joins_ranks() {
            keep(pair, both);
        }
        combine_pair(weights, pair, both);
    }
    takes_exact_path(cancelled, criterion, world_size, gram)
}

/// The step of [`weights`] in which sides of pairs have `H` ranks, for one rank: the coefficient by which its weight is multiplied, and
/// whether the norm of its side has cancelled. Threads, one for each rank, compute the same weights without waiting for one pair after
/// another: `weight(rank)` and `gram(i, j)`, for `i ≤ j`, are called for ranks of the pair only, and the weights are those of the step before.
#[inline(always)]
pub fn step<const H: usize>(
    rank: usize,
    world_size: usize,
    criterion: Criterion,
    weight: impl Fn(usize) -> f64,
    gram: impl Fn(usize, usize) -> f64,
) -> (f64, bool) {
    let begin = rank & !(2 * H - 1);
    let middle = begin + H;
    // Without a right side, the left one moves up unchanged.
    if middle >= world_size {
        return (1.0, false);
    }
    let term = |i: usize, j: usize| weight(i) * weight(j) * gram(i, j);
    let (mut dot, mut side) = (0.0, SideSums::default());
    let first = if rank < middle { begin } else { middle };
    for i in 0..H {
        for j in 0..H {
            if middle + j < world_size {
                dot += term(begin + i, middle + j);
            }
            if j == i && first + i < world_size {
                side.diagonal += term(first + i, first + i);
            } else if j > i && first + j < world_size {
                side.rest += term(first + i, first + j);
            }
        }
    }
    let ranks = if rank < middle || world_size > middle + H { H } else { world_size - middle };
    (coefficient(dot, side.squared_norm()), side.is_cancelled(ranks, criterion))
}

/// Whether a layer takes the exact path, if some norm has cancelled.
#[inline(always)]
pub fn takes_exact_path(
    cancelled: bool,
    criterion: Criterion,
    world_size: usize,
    gram: impl Fn(usize, usize) -> f64,
) -> bool {
    if criterion == Criterion::Narrow {
        return cancelled;
    }
    let mut squares = 0.0;
    for rank in 0..world_size {
        squares += gram(rank, rank);
    }
    // Elements that are NaN spread by the plain formula; infinite ones by either. A single vector does not need the exact path.
    let is_precise = criterion == Criterion::ShortDouble && squares < precise::MOST;
    (is_precise || (cancelled && squares >= 0.0)) && world_size > 1
}

/// Starts the exact path of one layer: sets the weights after the combination of the pairs of single ranks, whose coefficients were `kept`.
/// The pairs above need sums over the vectors ([`tree_value`]).
#[inline]
pub fn start_tree<W: Weights + ?Sized>(weights: &mut W, world_size: usize, kept: impl Fn(Pair) -> Coefficients) {
    for rank in 0..world_size {
        weights.set(rank, 1.0);
    }
    // The pairs of the first level.
    let mut rank = 0;
    while rank + 1 < world_size {
        let pair = Pair { begin: rank, middle: rank + 1, end: rank + 2 };
        combine_pair(weights, pair, kept(pair));
        rank += 2;
    }
}

/// The weight of one rank: the product of the coefficients, which were `kept`, of the pairs on its path from the first level to the root.
#[inline(always)]
pub fn weight_by_tree(rank: usize, world_size: usize, kept: impl Fn(Pair) -> Coefficients) -> f64 {
    let (mut weight, mut half) = (1.0, 1);
    while half < world_size {
        let begin = rank & !(2 * half - 1);
        let pair = Pair { begin, middle: begin + half, end: world_size.min(begin + 2 * half) };
        // Without a right side, the left one moves up unchanged.
        if pair.middle < world_size {
            let (left, right) = kept(pair);
            weight *= if rank < pair.middle { left } else { right };
        }
        half *= 2;
    }
    weight
}

/// `|Σ wᵢ xᵢ|²` over one side of a pair, in two parts.
#[derive(Clone, Copy, Default)]
struct SideSums {
    /// `Σ wᵢ² |xᵢ|²`.
    diagonal: f64,
    /// `Σ wᵢ wⱼ xᵢ·xⱼ` over `i < j`.
    rest: f64,
}

impl SideSums {
    #[inline(always)]
    fn squared_norm(self) -> f64 {
        self.diagonal + 2.0 * self.rest
    }

    /// Whether the norm of a side of `ranks` ranks is too small relative to the bound of its rounding error, or in `f64` has overflowed.
    #[inline(always)]
    fn is_cancelled(self, ranks: usize, criterion: Criterion) -> bool {
        let norm = self.squared_norm();
        match criterion {
            Criterion::Narrow => norm < CANCELLATION * (ranks as f64 * self.diagonal),
            Criterion::Overflow => !norm.is_finite(),
            _ => norm < precise::CANCELLATION * self.diagonal || !norm.is_finite(),
        }
    }
}

/// The sums from which a pair's coefficients are computed.
struct PairSums {
    dot: f64,
    left: SideSums,
    right: SideSums,
}

impl PairSums {
    /// Computed in one loop over the products of all ranks of the pair: a loop for each sum would be as many loops in a kernel.
    #[inline(always)]
    fn of<W: Weights + ?Sized>(weights: &W, pair: Pair, gram: &impl Fn(usize, usize) -> f64) -> Self {
        let mut sums = Self { dot: 0.0, left: SideSums::default(), right: SideSums::default() };
        for i in pair.begin..pair.end {
            for j in i..pair.end {
                let term = weights.get(i) * weights.get(j) * gram(i, j);
                // The branches use constant fields: a reference to a side would put the sums into memory.
                match (i == j, i < pair.middle, j < pair.middle) {
                    (true, true, _) => sums.left.diagonal += term,
                    (true, false, _) => sums.right.diagonal += term,
                    (false, true, true) => sums.left.rest += term,
                    (false, false, _) => sums.right.rest += term,
                    (false, true, false) => sums.dot += term,
                }
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::vec::Vec;

    use super::*;

    #[test]
    fn pairs_are_those_of_adjacent_halving() {
        let of = |ranks| pairs(ranks).map(|pair| (pair.begin, pair.middle, pair.end)).collect::<Vec<_>>();
        assert_eq!(of(1), []);
        assert_eq!(of(5), [(0, 1, 2), (2, 3, 4), (0, 2, 4), (0, 4, 5)]);
        assert_eq!(of(7), [(0, 1, 2), (2, 3, 4), (4, 5, 6), (0, 2, 4), (4, 6, 7), (0, 4, 7)]);
        for ranks in 1..200 {
            let all: Vec<_> = pairs(ranks).collect();
            assert_eq!(all.len(), ranks - 1);
            let joined: Vec<_> = all.iter().filter(|pair| pair.joins_ranks()).map(|pair| pair.begin).collect();
            assert!(joined.into_iter().eq((0..ranks - 1).step_by(2)), "{ranks} ranks");
            let by_level: Vec<_> = (0..8).flat_map(|level| pairs_of_level(level, ranks)).collect();
            assert_eq!(by_level, all, "{ranks} ranks");
            let mut places: Vec<_> = all.into_iter().map(Pair::index).collect();
            places.sort_unstable();
            assert!(places.into_iter().eq(0..ranks - 1), "{ranks} ranks");
        }
    }

    /// The steps of single ranks must have the bits of `weights`, for numbers that are not finite too.
    #[test]
    fn step_of_single_ranks_gives_the_same_weights() {
        fn check(world_size: usize, criterion: Criterion, seed: u32) {
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                f64::from(state >> 8) / f64::from(1u32 << 23) - 1.0
            };
            // The vectors, the later of which are nearly opposite to earlier ones for some seeds.
            let mut vectors = Vec::<[f64; 5]>::new();
            for rank in 0..world_size {
                let opposite = (rank > 1 && seed % 3 == 0).then(|| vectors[rank / 2]);
                vectors.push(core::array::from_fn(|element| match opposite {
                    Some(vector) => -vector[element] * (1.0 + 1e-4 * next()),
                    None => next(),
                }));
            }
            if seed % 7 == 1 {
                vectors[world_size - 1][3] = [f64::NAN, f64::INFINITY, 1e200, 0.0][seed as usize % 4];
            }
            let gram = |i: usize, j: usize| (0..5).map(|place| vectors[i][place] * vectors[j][place]).sum::<f64>();
            let mut expected = std::vec![0.0; world_size];
            let is_lost = weights(&mut expected[..], world_size, criterion, gram, |_, _| ());
            let (mut found, mut cancelled) = (std::vec![1.0; world_size], false);
            for level in 0..3 {
                let before = found.clone();
                for (rank, weight) in found.iter_mut().enumerate() {
                    let of = |rank: usize| before[rank];
                    let (coefficient, is_cancelled) = match level {
                        0 => step::<1>(rank, world_size, criterion, of, gram),
                        1 => step::<2>(rank, world_size, criterion, of, gram),
                        _ => step::<4>(rank, world_size, criterion, of, gram),
                    };
                    *weight *= coefficient;
                    cancelled |= is_cancelled;
                }
            }
            let found_lost = takes_exact_path(cancelled, criterion, world_size, gram);
            let bits = |weights: &[f64]| weights.iter().map(|weight| weight.to_bits()).collect::<Vec<_>>();
            let case = std::format!("{world_size} ranks, {criterion:?}, seed {seed}");
            assert_eq!((found_lost, bits(&found)), (is_lost, bits(&expected)), "{case}");
        }
        for criterion in [Criterion::Narrow, Criterion::Double, Criterion::ShortDouble, Criterion::Overflow] {
            for seed in 0..60 {
                (1..=8).for_each(|world_size| check(world_size, criterion, seed));
            }
        }
    }

    /// `tree_value` must have the bits of combining whole vectors in place, pair by pair.
    #[test]
    fn tree_value_is_of_combining_in_place() {
        for ranks in 1..70 {
            let value = |rank: usize| 1.0 / (rank as f64 + 3.0);
            let coefficients = |pair: Pair| {
                let index = pair.index() as f64;
                (1.0 + 1.0 / (index + 2.0), 0.3 - 1.0 / (index + 7.0))
            };
            let mut values: Vec<f64> = (0..ranks).map(value).collect();
            for pair in pairs(ranks) {
                let left = tree_value(pair.begin, pair.middle, value, coefficients);
                let right = tree_value(pair.middle, pair.end, value, coefficients);
                assert_eq!(left.to_bits(), values[pair.begin].to_bits(), "{pair:?} of {ranks}");
                assert_eq!(right.to_bits(), values[pair.middle].to_bits(), "{pair:?} of {ranks}");
                values[pair.begin] = join(coefficients(pair), values[pair.begin], values[pair.middle]);
            }
            assert_eq!(tree_value(0, ranks, value, coefficients).to_bits(), values[0].to_bits(), "{ranks}");
        }
    }

    /// `weight_by_tree` must have the bits of scaling all weights on both sides of each pair.
    #[test]
    fn weight_by_tree_is_of_combining_pairs() {
        for ranks in 1..70 {
            let kept = |pair: Pair| {
                let index = pair.index() as f64;
                (1.0 + 1.0 / (index + 2.0), 0.3 - 1.0 / (index + 7.0))
            };
            let mut expected = std::vec![1.0; ranks];
            for pair in pairs(ranks) {
                combine_pair(&mut expected[..], pair, kept(pair));
            }
            let found: Vec<f64> = (0..ranks).map(|rank| weight_by_tree(rank, ranks, kept)).collect();
            assert_eq!(found, expected, "{ranks} ranks");
        }
    }

    /// Vectors of one element: only NaN, which gives NaN anyway, and finite products are left to the plain formula.
    #[test]
    fn weights_of_overflowing_products_take_the_exact_path() {
        let is_lost = |criterion: Criterion, vectors: [f64; 4]| {
            weights(&mut [0.0; 4][..], 4, criterion, |i, j| vectors[i] * vectors[j], |_, _| ())
        };
        for criterion in [Criterion::Double, Criterion::Overflow] {
            assert!(!is_lost(criterion, [1e-70, 2e-70, 1e-70, 2e-70]), "{criterion:?}");
            assert!(!is_lost(criterion, [1e150; 4]), "{criterion:?}");
            assert!(is_lost(criterion, [1e-75, 1e90, 1e-75, 1e90]), "{criterion:?}: squares of weights");
            assert!(is_lost(criterion, [1.0, 1.0, 1.0, 1e160]), "{criterion:?}: squares of elements");
            assert!(is_lost(criterion, [1.0, f64::INFINITY, 1.0, 1.0]), "{criterion:?}");
            assert!(!is_lost(criterion, [1.0, f64::NAN, 1.0, 1e160]), "{criterion:?}");
        }
        assert!(
            is_lost(Criterion::Double, [1.0, -1.0, 1.0, 1.0]) && !is_lost(Criterion::Overflow, [1.0, -1.0, 1.0, 1.0])
        );
        assert!(is_lost(Criterion::Double, [1e150, -1e150, 1.0, 1.0]), "cancelled, and beyond what needs no scaling");
    }

    #[test]
    fn weights_of_known_pairs() {
        // Orthogonal: the sum. Parallel, one twice the other: coefficients 0 and 3/4.
        let mut found = [0.0; 2];
        assert!(!weights(&mut found[..], 2, Criterion::Narrow, |i, j| if i == j { 1.0 } else { 0.0 }, |_, _| ()));
        assert_eq!(found, [1.0, 1.0]);
        let parallel = [[5.0, 10.0], [10.0, 20.0]];
        assert!(!weights(&mut found[..], 2, Criterion::Narrow, |i, j| parallel[i][j], |_, _| ()));
        assert_eq!(found, [0.0, 0.75]);
        // Opposite pairs cancel, which has an effect only where the next level needs their norms.
        let mut found = [0.0; 4];
        let opposite = |i: usize, j: usize| if (i + j) % 2 == 0 { 1.0 } else { -1.0 };
        let mut kept = Vec::new();
        assert!(weights(&mut found[..], 4, Criterion::Narrow, opposite, |pair, both| kept.push((pair, both))));
        // The exact path starts from there.
        assert_eq!(kept.iter().map(|(pair, _)| (pair.begin, pair.end)).collect::<Vec<_>>(), [(0, 2), (2, 4)]);
        start_tree(&mut found[..], 4, |pair| kept[pair.begin / 2].1);
        assert_eq!(found, [1.5; 4]);
    }
}
