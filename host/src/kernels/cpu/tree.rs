//! The exact path of Adasum: the combination tree evaluated at every element, from the ranks' own values.
//!
//! Where gradients nearly cancel, the norm of a combined vector has digits that the quadratic form of a Gram matrix has lost, and a result
//! computed from collapsed weights would amplify their rounding. Here every node of the tree has the value that combining whole vectors in
//! place in `f64` would give, computed block by block without storing any vector. Only layers that need the exact path are read. For
//! vectors of `f64` the tree has twice that precision ([`precise`]). Trees can also round every node to the vectors' dtype, as combining
//! vectors in place in that dtype does.

use std::ops::Range;

use gradsync_device::math::Element as Formula;
use gradsync_device::math::adasum::{self, Criterion, Pair, join, pairs, product_index, products};
use gradsync_device::math::precise::{self, Scales};
use gradsync_device::math::wide::Wide;

use super::elementwise::cast_near;
use super::isa::vectorized;
use super::products::{LANES, add_dot, blocks, check_vectors, check_world, lane_sum, sum_chunks, widen};
use super::{BLOCK_LEN, elements, for_each, pieces};
use crate::dtype::{storage, storage_mut};
use crate::error::{Error, Result, same_len};
use crate::plan::chunks::{Chunk, chunks_of_all};
use crate::slice::{Slice, SliceMut, check_floats, with_typed};

/// The known coefficients of the pairs of every layer's combination tree, and the selection of layers that have a tree.
#[derive(Clone, Debug, PartialEq)]
pub struct Trees {
    world_size: usize,
    /// The coefficients, indexed by layer and [`Pair::index`].
    coefficients: Coefficients,
    /// The layers that take the exact path.
    wanted: Vec<bool>,
    /// The pair whose next sums are scaled ([`Trees::scale_pair`]).
    scaled: Option<Pair>,
}

/// The coefficients, `layers × (P - 1)`.
#[derive(Clone, Debug, PartialEq)]
enum Coefficients {
    Plain(Vec<adasum::Coefficients>),
    /// Coefficients of nodes that are rounded to the vectors' dtype.
    Rounded(Vec<OfRounded>),
    Precise {
        of_pairs: Vec<precise::Coefficients>,
        /// The scaling norms of the ranks' vectors, `layers × P`.
        scaling_norms: Vec<f64>,
    },
}

/// The coefficients of a pair of rounded nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum OfRounded {
    Plain(adasum::Coefficients),
    /// The coefficients, and the scaling norms of both nodes, whose squared norms have overflowed.
    Scaled(precise::Coefficients, [f64; 2]),
}

/// The coefficients of one layer's tree.
#[derive(Clone, Copy)]
pub(super) enum LayerTree<'a> {
    Plain(&'a [adasum::Coefficients]),
    Rounded(&'a [OfRounded]),
    /// The coefficients, and the scaling norms of the ranks' vectors.
    Precise(&'a [precise::Coefficients], &'a [f64]),
}

/// Coefficients of `f64` that are not set.
const PRECISE_ONES: precise::Coefficients = (Wide { high: 1.0, low: 0.0 }, Wide { high: 1.0, low: 0.0 });

impl Trees {
    /// Creates trees over `world_size` ranks for the layers selected by `wanted`, without coefficients.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a world size of 0 or above 65536.
    pub fn new(world_size: usize, wanted: Vec<bool>) -> Result<Self> {
        check_world("trees", world_size)?;
        let coefficients = Coefficients::Plain(vec![(1.0, 1.0); wanted.len() * (world_size - 1)]);
        Ok(Self { world_size, coefficients, wanted, scaled: None })
    }

    /// Like [`new`](Self::new), with every node rounded to the dtype of the vectors, as [`Algorithm::Tree`](crate::ops::Algorithm::Tree)
    /// computes it where each rank has one vector.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn rounded(world_size: usize, wanted: Vec<bool>) -> Result<Self> {
        check_world("trees", world_size)?;
        let ones = OfRounded::Plain((1.0, 1.0));
        let coefficients = Coefficients::Rounded(vec![ones; wanted.len() * (world_size - 1)]);
        Ok(Self { world_size, coefficients, wanted, scaled: None })
    }

    /// Like [`new`](Self::new), for vectors of `f64`, in twice the precision of `f64`. `gram` has the layers' Gram matrices, from which the
    /// scales of the sums are derived; where squared norms overflow, large vectors are scaled by a power of two.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::LengthMismatch`] for Gram matrices of another number of layers or ranks.
    pub fn precise(world_size: usize, wanted: Vec<bool>, gram: &[f64]) -> Result<Self> {
        check_world("trees", world_size)?;
        let count = products(world_size);
        same_len("trees", ("products of the layers", wanted.len() * count), ("products", gram.len()))?;
        let mut scaling_norms = Vec::with_capacity(wanted.len() * world_size);
        for gram in gram.chunks_exact(count) {
            let squared_norm = |rank: usize| gram[product_index(rank, rank, world_size)];
            precise::scaling_norms(world_size, squared_norm, |_, norm| scaling_norms.push(norm));
        }
        let of_pairs = vec![PRECISE_ONES; wanted.len() * (world_size - 1)];
        let coefficients = Coefficients::Precise { of_pairs, scaling_norms };
        Ok(Self { world_size, coefficients, wanted, scaled: None })
    }

    /// Repeats the tree for `count` segments that share the weights of one layer.
    pub fn repeated(&self, count: usize) -> Self {
        let coefficients = match &self.coefficients {
            Coefficients::Plain(of_pairs) => Coefficients::Plain(of_pairs.repeat(count)),
            Coefficients::Rounded(of_pairs) => Coefficients::Rounded(of_pairs.repeat(count)),
            Coefficients::Precise { of_pairs, scaling_norms } => {
                Coefficients::Precise { of_pairs: of_pairs.repeat(count), scaling_norms: scaling_norms.repeat(count) }
            }
        };
        Self { coefficients, wanted: self.wanted.repeat(count), ..*self }
    }

    /// The number of sums per layer that [`tree_dots`] returns.
    pub fn sums(&self) -> usize {
        match self.coefficients {
            Coefficients::Plain(_) => 3,
            Coefficients::Rounded(_) if self.scaled.is_none() => 3,
            Coefficients::Rounded(_) | Coefficients::Precise { .. } => precise::SUMS,
        }
    }

    /// Whether a squared norm in a pair's sums, from rounded trees of `f64`, has overflowed in some layer. The pair's sums must then be
    /// computed again, scaled, before they are passed to [`set_pair`](Self::set_pair). False for other trees.
    ///
    /// # Errors
    /// The errors of [`set_pair`](Self::set_pair).
    pub fn scale_pair(&mut self, pair: Pair, sums: &[f64]) -> Result<bool> {
        self.check_pair("scale_pair", pair)?;
        same_len("scale_pair", ("sums of the trees", self.wanted.len() * self.sums()), ("sums", sums.len()))?;
        let Coefficients::Rounded(of_pairs) = &mut self.coefficients else { return Ok(false) };
        for (layer, sums) in sums.chunks_exact(3).enumerate().filter(|(layer, _)| self.wanted[*layer]) {
            let (gram, mut norms) = ([sums[1], sums[0], sums[2]], [0.0; 2]);
            let product = |i: usize, j: usize| gram[i + j];
            let is_lost = adasum::weights(&mut [0.0; 2][..], 2, Criterion::Overflow, product, |_, _| ());
            precise::scaling_norms(2, |side| product(side, side), |side, norm| norms[side] = norm);
            of_pairs[layer * (self.world_size - 1) + pair.index()] = if is_lost {
                self.scaled = Some(pair);
                OfRounded::Scaled(PRECISE_ONES, norms)
            } else {
                OfRounded::Plain(adasum::coefficients(sums[0], sums[1], sums[2]))
            };
        }
        Ok(self.scaled.is_some())
    }

    /// Computes the coefficients of a pair from the sums of [`tree_dots`] for each layer, added over all parts of the vectors, and applies
    /// them to the weights of the wanted layers, `layers × P`, which must start at 1.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a pair that the tree does not have; [`Error::LengthMismatch`] for sums or weights of another
    /// number of layers.
    pub fn set_pair(&mut self, pair: Pair, sums: &[f64], weights: &mut [f64]) -> Result<()> {
        self.check_pair("set_pair", pair)?;
        let (layers, width, ranks) = (self.wanted.len(), self.sums(), self.world_size);
        same_len("set_pair", ("sums of the trees", layers * width), ("sums", sums.len()))?;
        same_len("set_pair", ("layers × ranks", layers * ranks), ("weights", weights.len()))?;
        let is_scaled = self.scaled.take().is_some();
        for (layer, sums) in sums.chunks_exact(width).enumerate().filter(|(layer, _)| self.wanted[*layer]) {
            let position = layer * (ranks - 1) + pair.index();
            let precise = |to: &mut precise::Coefficients, scales: Scales| {
                *to = precise::coefficients(|index| sums[index], scales);
                precise::rounded(*to, scales)
            };
            let both = match &mut self.coefficients {
                Coefficients::Plain(of_pairs) => {
                    of_pairs[position] = adasum::coefficients(sums[0], sums[1], sums[2]);
                    of_pairs[position]
                }
                Coefficients::Rounded(of_pairs) => match &mut of_pairs[position] {
                    OfRounded::Scaled(to, norms) if is_scaled => precise(to, Scales::of(OF_NODES, |side| norms[side])),
                    OfRounded::Plain(both) if is_scaled => *both,
                    other => {
                        let both = adasum::coefficients(sums[0], sums[1], sums[2]);
                        *other = OfRounded::Plain(both);
                        both
                    }
                },
                Coefficients::Precise { of_pairs, scaling_norms } => {
                    precise(&mut of_pairs[position], Scales::of(pair, |rank| scaling_norms[layer * ranks + rank]))
                }
            };
            adasum::combine_pair(&mut weights[layer * ranks..][..ranks], pair, both);
        }
        Ok(())
    }

    fn check_pair(&self, operation: &'static str, pair: Pair) -> Result<()> {
        let reason = if !pairs(self.world_size).any(|known| known == pair) {
            format!("the tree of {} ranks has no {pair:?}", self.world_size)
        } else if let Some(scaled) = self.scaled.filter(|&scaled| scaled != pair) {
            format!("{pair:?}: the scaled sums of {scaled:?} come first")
        } else {
            return Ok(());
        };
        Err(Error::InvalidArgument { operation, reason })
    }

    /// The tree of a layer that takes the exact path.
    pub(super) fn wanted(&self, layer: usize) -> Option<LayerTree<'_>> {
        let pairs = layer * (self.world_size - 1)..(layer + 1) * (self.world_size - 1);
        self.wanted[layer].then(|| match &self.coefficients {
            Coefficients::Plain(of_pairs) => LayerTree::Plain(&of_pairs[pairs]),
            Coefficients::Rounded(of_pairs) => LayerTree::Rounded(&of_pairs[pairs]),
            Coefficients::Precise { of_pairs, scaling_norms } => {
                LayerTree::Precise(&of_pairs[pairs], &scaling_norms[layer * self.world_size..][..self.world_size])
            }
        })
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

type TreeBlock = [f64; BLOCK_LEN];

vectorized! {
    fn join_block<>(both: adasum::Coefficients, left: &mut TreeBlock, right: &TreeBlock) {
        for (left, &right) in left.iter_mut().zip(right) {
            *left = join(both, *left, right);
        }
    }
}

/// The pairs below the node over `ranks`: each as a pair of a tree of its own, and as a pair of the whole tree.
fn pairs_below(ranks: Range<usize>) -> impl Iterator<Item = (Pair, Pair)> {
    let start = ranks.start;
    pairs(ranks.len()).map(move |pair| {
        let Pair { begin, middle, end } = pair;
        (pair, Pair { begin: start + begin, middle: start + middle, end: start + end })
    })
}

/// Computes one block of the root, times `factor`, rounded to `f64`.
pub(super) fn root(vectors: &[Slice<'_>], block: Range<usize>, tree: LayerTree<'_>, factor: f64) -> TreeBlock {
    let ranks = 0..vectors.len();
    match tree {
        LayerTree::Plain(_) | LayerTree::Rounded(_) => {
            let mut root = node(vectors, block, ranks, tree);
            if factor != 1.0 {
                root.iter_mut().for_each(|value| *value *= factor);
            }
            root
        }
        LayerTree::Precise(of_pairs, norms) => {
            let (mut root, norm) = ([0.0; BLOCK_LEN], norms.iter().sum());
            for (to, from) in root.iter_mut().zip(precise_node(vectors, block, ranks, (of_pairs, norms))) {
                *to = precise::root(from, norm, factor);
            }
            root
        }
    }
}

/// Computes one block of the node over `ranks`, of a tree that is not precise.
fn node(vectors: &[Slice<'_>], block: Range<usize>, ranks: Range<usize>, tree: LayerTree<'_>) -> TreeBlock {
    let mut nodes = vec![[0.0; BLOCK_LEN]; ranks.len()];
    for (node, vector) in nodes.iter_mut().zip(&vectors[ranks.clone()]) {
        widen(node, *vector, block.clone());
    }
    for (Pair { begin, middle, .. }, global) in pairs_below(ranks) {
        let (left, right) = nodes.split_at_mut(middle);
        let (left, right) = (&mut left[begin], &right[0]);
        let index = global.index();
        match tree {
            LayerTree::Plain(of_pairs) => join_block(of_pairs[index], left, right),
            LayerTree::Rounded(of_pairs) => {
                match of_pairs[index] {
                    OfRounded::Plain(both) => join_block(both, left, right),
                    OfRounded::Scaled(both, norms) => join_scaled(both, norms, left, right),
                }
                with_typed!(vectors[0], data => round(left, storage(data)));
            }
            LayerTree::Precise(..) => unreachable!("the nodes of precise trees are no blocks of f64"),
        }
    }
    nodes[0]
}

/// The pair of two nodes as a tree of its own.
const OF_NODES: Pair = Pair { begin: 0, middle: 1, end: 2 };

/// Joins two blocks of nodes whose squared norms have overflowed.
fn join_scaled(both: precise::Coefficients, norms: [f64; 2], left: &mut TreeBlock, right: &TreeBlock) {
    for (left, &right) in left.iter_mut().zip(right) {
        let joined = precise::join(both, precise::leaf(*left, norms[0]), precise::leaf(right, norms[1]));
        *left = precise::root(joined, norms[0] + norms[1], 1.0);
    }
}

/// Rounds a block to the dtype of a vector.
fn round<T: Formula>(block: &mut TreeBlock, _vector: &[T]) {
    let mut narrow = [T::from_f64(0.0); BLOCK_LEN];
    cast_near(&mut narrow, block);
    cast_near(block, &narrow);
}

/// Computes one block of a node in twice the precision of `f64`, for the elements of the block alone, from the coefficients of the tree and
/// the scaling norms of all ranks.
fn precise_node(
    vectors: &[Slice<'_>],
    block: Range<usize>,
    ranks: Range<usize>,
    (tree, norms): (&[precise::Coefficients], &[f64]),
) -> Vec<Wide> {
    let values = |rank: usize| -> Vec<Wide> {
        with_typed!(vectors[rank].range(block.clone()), data => {
            storage(data).iter().map(|value| precise::leaf(value.to_f64(), norms[rank])).collect()
        })
    };
    let mut nodes: Vec<Vec<Wide>> = ranks.clone().map(values).collect();
    for (Pair { begin, middle, .. }, global) in pairs_below(ranks) {
        let (left, right) = nodes.split_at_mut(middle);
        for (left, &right) in left[begin].iter_mut().zip(&right[0]) {
            *left = precise::join(tree[global.index()], *left, right);
        }
    }
    nodes.swap_remove(0)
}

/// Computes the sums over each segment from which [`Trees::set_pair`] derives the coefficients of a pair, [`Trees::sums`] per segment;
/// zeros for segments that are not wanted. They may be added to the sums of other parts of the same layers. The coefficients of the pairs
/// below this one must be set.
///
/// The sums are `[u·v, |u|², |v|²]` of the two sides of the pair, in `f64`; for precise trees, each sum is divided into slices, whose sums
/// are exact.
///
/// # Errors
/// The errors of [`gram`](super::gram), and [`Error::LengthMismatch`] for trees of another number of ranks or layers,
/// [`Error::InvalidArgument`] for a pair that they do not have.
pub fn tree_dots(vectors: &[Slice<'_>], segments: &[Range<usize>], trees: &Trees, pair: Pair) -> Result<Vec<f64>> {
    trees.check("tree_dots", vectors, segments)?;
    trees.check_pair("tree_dots", pair)?;
    let mut totals = vec![0.0; segments.len() * trees.sums()];
    add_tree_dots(&mut totals, vectors, &chunks_of_all(segments), trees, pair);
    Ok(totals)
}

/// Adds the sums of [`tree_dots`] over each chunk to the chunk's row of the totals. Chunks of layers that are not wanted are not read. The
/// tree must have the pair; there must be one vector per rank, all of one length and including the chunks.
pub(crate) fn add_tree_dots(totals: &mut [f64], vectors: &[Slice<'_>], chunks: &[Chunk], trees: &Trees, pair: Pair) {
    let (left, right) = (pair.begin..pair.middle, pair.middle..pair.end);
    sum_chunks(
        vectors.len(),
        chunks,
        (totals, trees.sums()),
        || (),
        |chunk, (), sums| match trees.wanted(chunk.layer) {
            None => {}
            Some(tree @ LayerTree::Rounded(of_pairs)) if trees.scaled.is_some() => {
                let OfRounded::Scaled(_, norms) = of_pairs[pair.index()] else { return };
                let mut terms = [0.0; precise::SUMS];
                let scales = Scales::of(OF_NODES, |side| norms[side]);
                for block in blocks(chunk.range.clone()) {
                    let len = block.len();
                    let nodes = [&left, &right].map(|ranks| node(vectors, block.clone(), ranks.clone(), tree));
                    for (&left, &right) in nodes[0][..len].iter().zip(&nodes[1]) {
                        let (left, right) = (precise::leaf(left, norms[0]), precise::leaf(right, norms[1]));
                        terms = precise::add_terms(terms, scales, left, right);
                    }
                }
                sums.copy_from_slice(&terms);
            }
            Some(tree @ (LayerTree::Plain(_) | LayerTree::Rounded(_))) => {
                let mut lanes = [[0.0; LANES]; 3];
                for block in blocks(chunk.range.clone()) {
                    let left = node(vectors, block.clone(), left.clone(), tree);
                    let right = node(vectors, block, right.clone(), tree);
                    add_dot(&mut lanes[0], &left, &right);
                    add_dot(&mut lanes[1], &left, &left);
                    add_dot(&mut lanes[2], &right, &right);
                }
                sums.copy_from_slice(&lanes.map(lane_sum));
            }
            Some(LayerTree::Precise(of_pairs, norms)) => {
                let mut terms = [0.0; precise::SUMS];
                let scales = Scales::of(pair, |rank| norms[rank]);
                for block in blocks(chunk.range.clone()) {
                    let left = precise_node(vectors, block.clone(), left.clone(), (of_pairs, norms));
                    let right = precise_node(vectors, block, right.clone(), (of_pairs, norms));
                    for (&left, &right) in left.iter().zip(&right) {
                        terms = precise::add_terms(terms, scales, left, right);
                    }
                }
                sums.copy_from_slice(&terms);
            }
        },
    );
}

/// Computes `dst[i] = D(factor × root[i])`: the root of each wanted segment's tree, rounded once; other elements are left unchanged. The
/// coefficients of all pairs must be set.
///
/// # Errors
/// The errors of `combine`, and [`Error::LengthMismatch`] for trees of another number of ranks or layers.
pub fn tree_combine(
    dst: SliceMut<'_>,
    vectors: &[Slice<'_>],
    segments: &[Range<usize>],
    trees: &Trees,
    factor: f64,
) -> Result<()> {
    trees.check("tree_combine", vectors, segments)?;
    same_len("tree_combine", ("destination", dst.len()), ("each vector", vectors[0].len()))?;
    check_floats("tree_combine", dst.as_slice())?;
    let mut of_dst = pieces(dst, segments);
    of_dst.retain(|(segment, ..)| trees.wanted[*segment]);
    for_each(of_dst, elements(vectors.len(), segments), |(segment, range, piece)| {
        let Some(tree) = trees.wanted(segment) else { return };
        with_typed!(piece, piece => {
            for (block, piece) in blocks(range).zip(storage_mut(piece).chunks_mut(BLOCK_LEN)) {
                cast_near(piece, &root(vectors, block, tree, factor));
            }
        });
    });
    Ok(())
}
