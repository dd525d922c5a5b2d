//! The exact path of Adasum: the combination tree evaluated at every element, from the ranks' own values.
//!
//! Where gradients nearly cancel, the norm of a combined vector has digits that the quadratic form of a Gram matrix has lost, and
//! a result formed from collapsed weights would amplify their rounding. Here every node of the tree is formed as combining whole
//! vectors in place in `f64` would form it, block by block and without storing any. Only layers that ask for it are read.

use std::ops::Range;

use gradsync_device::math::adasum::{self, Pair, join, pairs};

use super::combine::{narrow_block, parts};
use super::isa::vectorized;
use super::products::{LANES, add_dot, blocks, check_vectors, check_world, lane_sum, sum_chunks, widen};
use super::{BLOCK_LEN, elements, for_each};
use crate::dtype::storage_mut;
use crate::error::{Error, Result};
use crate::kernels::same_len;
use crate::slice::{Slice, SliceMut, with_typed};

/// The coefficients of the pairs of every layer's combination tree, as far as they are known, and which layers have one.
#[derive(Clone, Debug, PartialEq)]
pub struct Trees {
    world_size: usize,
    /// `layers × (P - 1)`; a pair is found by [`Pair::index`].
    coefficients: Vec<adasum::Coefficients>,
    /// The layers that take the exact path.
    wanted: Vec<bool>,
}

impl Trees {
    /// Trees over `world_size` ranks for the layers that are `wanted`, with nothing known of them yet.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a world of no or more than 65536 ranks.
    pub fn new(world_size: usize, wanted: Vec<bool>) -> Result<Self> {
        check_world("trees", world_size)?;
        Ok(Self { world_size, coefficients: vec![(1.0, 1.0); wanted.len() * (world_size - 1)], wanted })
    }

    /// The same tree for `count` segments that share the weights of one layer.
    pub fn repeated(&self, count: usize) -> Self {
        Self {
            world_size: self.world_size,
            coefficients: self.coefficients.repeat(count),
            wanted: self.wanted.repeat(count),
        }
    }

    /// Takes the coefficients of a pair from `[u·v, |u|², |v|²]` of its sides in each layer, and applies them to the weights of
    /// the wanted layers, `layers × P`, which started at 1.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a pair that the tree does not have; [`Error::LengthMismatch`] for sums or weights of another
    /// number of layers.
    pub fn set_pair(&mut self, pair: Pair, sums: &[[f64; 3]], weights: &mut [f64]) -> Result<()> {
        self.check_pair("set_pair", pair)?;
        let layers = self.wanted.len();
        same_len("set_pair", ("layers of the trees", layers), ("sums", sums.len()))?;
        same_len("set_pair", ("layers × ranks", layers * self.world_size), ("weights", weights.len()))?;
        for (layer, &[dot, left, right]) in sums.iter().enumerate().filter(|(layer, _)| self.wanted[*layer]) {
            let both = adasum::coefficients(dot, left, right);
            self.coefficients[layer * (self.world_size - 1) + pair.index()] = both;
            adasum::combine_pair(&mut weights[layer * self.world_size..][..self.world_size], pair, both);
        }
        Ok(())
    }

    fn check_pair(&self, operation: &'static str, pair: Pair) -> Result<()> {
        if pairs(self.world_size).any(|known| known == pair) {
            return Ok(());
        }
        let reason = format!("the tree of {} ranks has no {pair:?}", self.world_size);
        Err(Error::InvalidArgument { operation, reason })
    }

    /// The coefficients of a layer that takes the exact path.
    pub(super) fn wanted(&self, layer: usize) -> Option<&[adasum::Coefficients]> {
        self.wanted[layer].then(|| self.of_layer(layer))
    }

    fn of_layer(&self, layer: usize) -> &[adasum::Coefficients] {
        &self.coefficients[layer * (self.world_size - 1)..][..self.world_size - 1]
    }

    pub(super) fn check(
        &self,
        operation: &'static str,
        vectors: &[Slice<'_>],
        segments: &[Range<usize>],
    ) -> Result<()> {
        check_vectors(operation, vectors, segments)?;
        same_len(operation, ("ranks of the trees", self.world_size), ("vectors", vectors.len()))?;
        same_len(operation, ("layers of the trees", self.wanted.len()), ("segments", segments.len()))
    }
}

type Block = [f64; BLOCK_LEN];

vectorized! {
    fn join_block<>(both: adasum::Coefficients, left: &mut Block, right: &Block) {
        for (left, &right) in left.iter_mut().zip(right) {
            *left = join(both, *left, right);
        }
    }
}

/// One block of the node over `ranks`.
pub(super) fn node(
    vectors: &[Slice<'_>],
    block: Range<usize>,
    ranks: Range<usize>,
    tree: &[adasum::Coefficients],
) -> Block {
    let (mut nodes, mut halfway) = (vec![[0.0; BLOCK_LEN]; ranks.len()], [0.0; BLOCK_LEN]);
    for (node, vector) in nodes.iter_mut().zip(&vectors[ranks.clone()]) {
        widen(node, &mut halfway, *vector, block.clone());
    }
    // Below a node, pairs are those of a tree of its own.
    for Pair { begin, middle, end } in pairs(ranks.len()) {
        let global = Pair { begin: ranks.start + begin, middle: ranks.start + middle, end: ranks.start + end };
        let (left, right) = nodes.split_at_mut(middle);
        join_block(tree[global.index()], &mut left[begin], &right[0]);
    }
    nodes[0]
}

/// `[u·v, |u|², |v|²]` of the two sides of a pair in each segment, in `f64`; zeros for segments that are not wanted. The pairs below
/// it must be known.
///
/// # Errors
/// As [`gram`](super::gram), and [`Error::LengthMismatch`] for trees of other ranks or layers,
/// [`Error::InvalidArgument`] for a pair that they do not have.
pub fn tree_dots(vectors: &[Slice<'_>], segments: &[Range<usize>], trees: &Trees, pair: Pair) -> Result<Vec<[f64; 3]>> {
    trees.check("tree_dots", vectors, segments)?;
    trees.check_pair("tree_dots", pair)?;
    let sums = sum_chunks(vectors.len(), segments, 3, |segment, chunk| {
        let mut lanes = [[0.0; LANES]; 3];
        if trees.wanted[segment] {
            for block in blocks(chunk) {
                let tree = trees.of_layer(segment);
                let left = node(vectors, block.clone(), pair.begin..pair.middle, tree);
                let right = node(vectors, block, pair.middle..pair.end, tree);
                add_dot(&mut lanes[0], &left, &right);
                add_dot(&mut lanes[1], &left, &left);
                add_dot(&mut lanes[2], &right, &right);
            }
        }
        lanes.into_iter().map(lane_sum).collect()
    });
    Ok(sums.chunks_exact(3).map(|sums| [sums[0], sums[1], sums[2]]).collect())
}

/// `dst[i] = D(factor × root[i])`: the root of each wanted segment's tree, rounded once; other elements are left alone. All pairs
/// must be known.
///
/// # Errors
/// As [`combine`](super::combine), and [`Error::LengthMismatch`] for trees of other ranks or
/// layers.
pub fn tree_combine(
    dst: SliceMut<'_>,
    vectors: &[Slice<'_>],
    segments: &[Range<usize>],
    trees: &Trees,
    factor: f64,
) -> Result<()> {
    trees.check("tree_combine", vectors, segments)?;
    same_len("tree_combine", ("destination", dst.len()), ("each vector", vectors[0].len()))?;
    with_typed!(SliceMut, dst, dst => {
        let mut parts = parts(dst, segments);
        parts.retain(|(segment, ..)| trees.wanted[*segment]);
        for_each(parts, elements(vectors.len(), segments), |(segment, range, part)| {
            for (block, part) in blocks(range).zip(storage_mut(part).chunks_mut(BLOCK_LEN)) {
                let mut root = node(vectors, block, 0..vectors.len(), trees.of_layer(segment));
                if factor != 1.0 {
                    root.iter_mut().for_each(|value| *value *= factor);
                }
                narrow_block(part, &root);
            }
        });
    });
    Ok(())
}
