//! The exact path of Adasum: the combination tree evaluated at every element, from the ranks' own values.
//!
//! Where gradients nearly cancel, the norm of a combined vector has digits that the quadratic form of a Gram matrix has lost, and a result
//! computed from collapsed weights would amplify their rounding. Here every node of the tree has the value that combining whole vectors in
//! place in `f64` would give, computed block by block without storing any vector. Only layers that need the exact path are read. For
//! vectors of `f64` the tree has twice that precision ([`precise`]). Trees can also round every node to the vectors' dtype, as combining
//! vectors in place in that dtype does.

use std::ops::Range;

use gradsync_device::math::Element as Formula;
use gradsync_device::math::adasum::{self, Pair, join, pairs, product_index, products};
use gradsync_device::math::precise::{self, Scales};
use gradsync_device::math::wide::Wide;

use super::elementwise::cast_near;
use super::isa::vectorized;
use super::products::{LANES, add_dot, blocks, check_vectors, check_world, lane_sum, sum_chunks, widen};
use super::{BLOCK_LEN, elements, for_each, parts};
use crate::error::{Error, Result, same_len};
use crate::plan::chunks::{Chunk, chunks_of_all};
use crate::slice::{Slice, SliceMut, with_typed};
use crate::slice::{storage, storage_mut};

/// The known coefficients of the pairs of every layer's combination tree, and the selection of layers that have a tree.
#[derive(Clone, Debug, PartialEq)]
pub struct Trees {
    world_size: usize,
    /// The coefficients, indexed by layer and [`Pair::index`].
    coefficients: Coefficients,
    /// The layers that take the exact path.
    wanted: Vec<bool>,
}

/// The coefficients, `layers × (P - 1)`.
#[derive(Clone, Debug, PartialEq)]
enum Coefficients {
    Plain(Vec<adasum::Coefficients>),
    /// Coefficients of nodes that are rounded to the vectors' dtype.
    Rounded(Vec<adasum::Coefficients>),
    Precise {
        of_pairs: Vec<precise::Coefficients>,
        /// The squared norms of the ranks' vectors, `layers × P`.
        squared_norms: Vec<f64>,
    },
}

/// The coefficients of one layer's tree.
#[derive(Clone, Copy)]
pub(super) enum Tree<'a> {
    Plain(&'a [adasum::Coefficients]),
    Rounded(&'a [adasum::Coefficients]),
    /// The coefficients, and the squared norms of the ranks' vectors.
    Precise(&'a [precise::Coefficients], &'a [f64]),
}

impl Trees {
    /// Creates trees over `world_size` ranks for the layers selected by `wanted`, without coefficients.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a world size of 0 or above 65536.
    pub fn new(world_size: usize, wanted: Vec<bool>) -> Result<Self> {
        check_world("trees", world_size)?;
        let coefficients = Coefficients::Plain(vec![(1.0, 1.0); wanted.len() * (world_size - 1)]);
        Ok(Self { world_size, coefficients, wanted })
    }

    /// Like [`new`](Self::new), with every node rounded to the dtype of the vectors, as [`Algorithm::Tree`](crate::ops::Algorithm::Tree)
    /// computes it where each rank has one vector.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn rounded(world_size: usize, wanted: Vec<bool>) -> Result<Self> {
        check_world("trees", world_size)?;
        let coefficients = Coefficients::Rounded(vec![(1.0, 1.0); wanted.len() * (world_size - 1)]);
        Ok(Self { world_size, coefficients, wanted })
    }

    /// Like [`new`](Self::new), for vectors of `f64`, in twice the precision of `f64`. `gram` has the layers' Gram matrices, from which the
    /// scales of the sums are derived.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::LengthMismatch`] for Gram matrices of another number of layers or ranks.
    pub fn precise(world_size: usize, wanted: Vec<bool>, gram: &[f64]) -> Result<Self> {
        check_world("trees", world_size)?;
        let count = products(world_size);
        same_len("trees", ("products of the layers", wanted.len() * count), ("products", gram.len()))?;
        let norms = |gram: &[f64]| -> Vec<f64> {
            (0..world_size).map(|rank| gram[product_index(rank, rank, world_size)]).collect()
        };
        let coefficients = Coefficients::Precise {
            of_pairs: vec![(Wide::from(1.0), Wide::from(1.0)); wanted.len() * (world_size - 1)],
            squared_norms: gram.chunks_exact(count).flat_map(norms).collect(),
        };
        Ok(Self { world_size, coefficients, wanted })
    }

    /// Repeats the tree for `count` segments that share the weights of one layer.
    pub fn repeated(&self, count: usize) -> Self {
        let coefficients = match &self.coefficients {
            Coefficients::Plain(of_pairs) => Coefficients::Plain(of_pairs.repeat(count)),
            Coefficients::Rounded(of_pairs) => Coefficients::Rounded(of_pairs.repeat(count)),
            Coefficients::Precise { of_pairs, squared_norms } => {
                Coefficients::Precise { of_pairs: of_pairs.repeat(count), squared_norms: squared_norms.repeat(count) }
            }
        };
        Self { world_size: self.world_size, coefficients, wanted: self.wanted.repeat(count) }
    }

    /// The number of sums per layer that [`tree_dots`] returns.
    pub fn sums(&self) -> usize {
        match self.coefficients {
            Coefficients::Plain(_) | Coefficients::Rounded(_) => 3,
            Coefficients::Precise { .. } => precise::SUMS,
        }
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
        for (layer, sums) in sums.chunks_exact(width).enumerate().filter(|(layer, _)| self.wanted[*layer]) {
            let place = layer * (ranks - 1) + pair.index();
            let both = match &mut self.coefficients {
                Coefficients::Plain(of_pairs) | Coefficients::Rounded(of_pairs) => {
                    of_pairs[place] = adasum::coefficients(sums[0], sums[1], sums[2]);
                    of_pairs[place]
                }
                Coefficients::Precise { of_pairs, squared_norms } => {
                    let scales = Scales::of(pair, |rank| squared_norms[layer * ranks + rank]);
                    of_pairs[place] = precise::coefficients(|index| sums[index], scales);
                    precise::rounded(of_pairs[place])
                }
            };
            adasum::combine_pair(&mut weights[layer * ranks..][..ranks], pair, both);
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

    /// The tree of a layer that takes the exact path.
    pub(super) fn wanted(&self, layer: usize) -> Option<Tree<'_>> {
        let pairs = layer * (self.world_size - 1)..(layer + 1) * (self.world_size - 1);
        self.wanted[layer].then(|| match &self.coefficients {
            Coefficients::Plain(of_pairs) => Tree::Plain(&of_pairs[pairs]),
            Coefficients::Rounded(of_pairs) => Tree::Rounded(&of_pairs[pairs]),
            Coefficients::Precise { of_pairs, squared_norms } => {
                Tree::Precise(&of_pairs[pairs], &squared_norms[layer * self.world_size..][..self.world_size])
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

type Block = [f64; BLOCK_LEN];

vectorized! {
    fn join_block<>(both: adasum::Coefficients, left: &mut Block, right: &Block) {
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
pub(super) fn root(vectors: &[Slice<'_>], block: Range<usize>, tree: Tree<'_>, factor: f64) -> Block {
    let ranks = 0..vectors.len();
    match tree {
        Tree::Plain(of_pairs) | Tree::Rounded(of_pairs) => {
            let mut root = node(vectors, block, ranks, of_pairs, matches!(tree, Tree::Rounded(_)));
            if factor != 1.0 {
                root.iter_mut().for_each(|value| *value *= factor);
            }
            root
        }
        Tree::Precise(tree, _) => {
            let mut root = [0.0; BLOCK_LEN];
            for (to, from) in root.iter_mut().zip(precise_node(vectors, block, ranks, tree)) {
                *to = if factor == 1.0 { from.high } else { from.times(factor.into()).high };
            }
            root
        }
    }
}

/// Computes one block of the node over `ranks`; `rounded` is set for trees that round every node.
fn node(
    vectors: &[Slice<'_>],
    block: Range<usize>,
    ranks: Range<usize>,
    tree: &[adasum::Coefficients],
    rounded: bool,
) -> Block {
    let mut nodes = vec![[0.0; BLOCK_LEN]; ranks.len()];
    for (node, vector) in nodes.iter_mut().zip(&vectors[ranks.clone()]) {
        widen(node, *vector, block.clone());
    }
    for (Pair { begin, middle, .. }, global) in pairs_below(ranks) {
        let (left, right) = nodes.split_at_mut(middle);
        join_block(tree[global.index()], &mut left[begin], &right[0]);
        if rounded {
            with_typed!(Slice, vectors[0], data => round(&mut left[begin], storage(data)));
        }
    }
    nodes[0]
}

/// Rounds a block to the dtype of a vector.
fn round<T: Formula>(block: &mut Block, _vector: &[T]) {
    let mut narrow = [T::from_f64(0.0); BLOCK_LEN];
    cast_near(&mut narrow, block);
    cast_near(block, &narrow);
}

/// Computes one block of a node in twice the precision of `f64`, for the elements of the block alone.
fn precise_node(
    vectors: &[Slice<'_>],
    block: Range<usize>,
    ranks: Range<usize>,
    tree: &[precise::Coefficients],
) -> Vec<Wide> {
    let values = |vector: &Slice<'_>| -> Vec<Wide> {
        with_typed!(Slice, vector.range(block.clone()), data => {
            storage(data).iter().map(|value| value.to_f64().into()).collect()
        })
    };
    let mut nodes: Vec<Vec<Wide>> = vectors[ranks.clone()].iter().map(values).collect();
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
            Some(kind @ (Tree::Plain(tree) | Tree::Rounded(tree))) => {
                let rounded = matches!(kind, Tree::Rounded(_));
                let mut lanes = [[0.0; LANES]; 3];
                for block in blocks(chunk.range.clone()) {
                    let left = node(vectors, block.clone(), left.clone(), tree, rounded);
                    let right = node(vectors, block, right.clone(), tree, rounded);
                    add_dot(&mut lanes[0], &left, &right);
                    add_dot(&mut lanes[1], &left, &left);
                    add_dot(&mut lanes[2], &right, &right);
                }
                sums.copy_from_slice(&lanes.map(lane_sum));
            }
            Some(Tree::Precise(tree, squared_norms)) => {
                let mut terms = [0.0; precise::SUMS];
                let scales = Scales::of(pair, |rank| squared_norms[rank]);
                for block in blocks(chunk.range.clone()) {
                    let left = precise_node(vectors, block.clone(), left.clone(), tree);
                    let right = precise_node(vectors, block, right.clone(), tree);
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
/// The errors of [`combine`](super::combine), and [`Error::LengthMismatch`] for trees of another number of ranks or layers.
pub fn tree_combine(
    dst: SliceMut<'_>,
    vectors: &[Slice<'_>],
    segments: &[Range<usize>],
    trees: &Trees,
    factor: f64,
) -> Result<()> {
    trees.check("tree_combine", vectors, segments)?;
    same_len("tree_combine", ("destination", dst.len()), ("each vector", vectors[0].len()))?;
    let mut parts = parts(dst, segments);
    parts.retain(|(segment, ..)| trees.wanted[*segment]);
    for_each(parts, elements(vectors.len(), segments), |(segment, range, part)| {
        let Some(tree) = trees.wanted(segment) else { return };
        with_typed!(SliceMut, part, part => {
            for (block, part) in blocks(range).zip(storage_mut(part).chunks_mut(BLOCK_LEN)) {
                cast_near(part, &root(vectors, block, tree, factor));
            }
        });
    });
    Ok(())
}
