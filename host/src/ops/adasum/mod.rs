//! Adasum all-reduce over any communicator (ONNX Runtime's AdasumAllReduce, Horovod's `op=Adasum`).
//!
//! Two algorithms with the same result up to rounding. *Gram* exchanges the vectors once: each rank gets its shard of all of
//! them, forms partial inner products, and after one small all-reduce every rank computes the same weights and its shard of the
//! weighted sum. *Tree* is upstream's vector halving, distance doubling. Arithmetic is in `kernels`, the steps are in `plan`;
//! nothing here depends on a transport.

use std::ops::Range;

use gradsync_device::math::adasum::{self, Pair};

use crate::buffer::{Arena, GradientBuffer};
use crate::comm::{Communicator, ReduceOp};
use crate::error::{Error, Result};
use crate::kernels::cpu;
use crate::ops::same_plan;
use crate::plan::{segments, tree};
use crate::slice::{Slice, SliceMut};

const OPERATION: &str = "adasum_all_reduce";

/// How the ranks' vectors are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// The best for the world at hand; at present always [`Gram`](Self::Gram).
    #[default]
    Auto,
    /// Weights from the inner products of all vectors; any number of ranks; the result is rounded once.
    Gram,
    /// Pair by pair along the tree; powers of two; intermediate results are rounded to the dtype at every level.
    Tree,
}

/// What shares one set of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// Each tensor on its own ("per layer"), as upstream has it.
    #[default]
    Tensor,
    /// All tensors together, as one vector.
    Whole,
}

/// Choices of an Adasum all-reduce; equal on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AdasumOptions {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// What shares one set of weights.
    pub granularity: Granularity,
}

/// What an Adasum all-reduce did.
#[derive(Clone, Debug, PartialEq)]
pub struct AdasumReport {
    /// The algorithm that ran; never [`Algorithm::Auto`].
    pub algorithm: Algorithm,
    /// `layers × P` weights of the ranks' vectors in the result. `None` for [`Algorithm::Tree`], where no rank knows them all.
    pub weights: Option<Vec<f64>>,
    /// Layers that lost digits to cancellation and were computed again from the vectors; their weights are exact as well.
    pub recomputed: usize,
}

/// Replaces every rank's buffer by the Adasum of all ranks', in place: bitwise the same on every rank and in every run.
///
/// Ranks combine as a tree of adjacent pairs, `(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b`, a coefficient being 1 where the squared
/// norm is below the square root of the smallest normal `f64`; an odd rank out moves up unchanged. Inner products and weighted
/// sums are `f64`; the result is rounded once ([`Algorithm::Gram`]) or once a level ([`Algorithm::Tree`]). A NaN or an infinity
/// spreads over its layer as the formula says. Squares of `f64` elements beyond about 1e154 overflow, and their layer becomes NaN.
///
/// # Errors
/// [`Error::InvalidArgument`] if the buffer was made for another world size, or ranks have other tensors or options (on every
/// rank, naming two that differ); [`Error::UnsupportedWorldSize`] for `Tree` on a
/// number of ranks that is no power of two, and those of the communicator. After a communicator's error the contents of the
/// buffer are unspecified; the other errors leave it alone.
pub fn adasum_all_reduce(
    comm: &dyn Communicator,
    buffer: &mut GradientBuffer,
    options: AdasumOptions,
) -> Result<AdasumReport> {
    let world_size = comm.world_size();
    same_plan(OPERATION, comm, buffer, options)?;
    if options.algorithm == Algorithm::Tree && !world_size.is_power_of_two() {
        let needs = "a power of two";
        return Err(Error::UnsupportedWorldSize { operation: OPERATION, algorithm: "tree", needs, world_size });
    }
    let _span = tracing::debug_span!(OPERATION, rank = comm.rank(), ?options, len = buffer.len()).entered();
    let whole = [0..buffer.len()];
    let (arena, tensors) = buffer.parts_mut();
    let layers = match options.granularity {
        Granularity::Tensor => tensors,
        Granularity::Whole => &whole[..],
    };
    match options.algorithm {
        Algorithm::Auto | Algorithm::Gram => gram(comm, arena, layers, tensors),
        Algorithm::Tree => tree(comm, arena, layers, tensors),
    }
}

/// The weights of each tensor, `width` numbers each, from those of each layer: one for one, or one for all.
fn for_tensors(of_layers: &[f64], width: usize, tensors: usize) -> Vec<f64> {
    if of_layers.len() == width * tensors { of_layers.to_vec() } else { of_layers.repeat(tensors) }
}

fn gram(
    comm: &dyn Communicator,
    mut arena: SliceMut<'_>,
    layers: &[Range<usize>],
    tensors: &[Range<usize>],
) -> Result<AdasumReport> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let shard_len = arena.len() / world_size;
    let window = rank * shard_len..(rank + 1) * shard_len;

    let mut exchanged = Arena::zeroed(OPERATION, arena.dtype(), arena.len())?;
    comm.all_to_all(arena.as_slice(), exchanged.as_mut_slice())?;
    let vectors: Vec<Slice<'_>> =
        (0..world_size).map(|peer| exchanged.as_slice().range(peer * shard_len..(peer + 1) * shard_len)).collect();
    let layer_parts = segments::clip(layers, window.clone());

    let mut products = cpu::gram(&vectors, &layer_parts)?;
    comm.all_reduce((&mut products).into(), ReduceOp::Sum)?;
    let cpu::Coefficients { mut weights, cancelled } = cpu::coefficients(&products, world_size)?;
    let recomputed = cancelled.iter().filter(|&&cancelled| cancelled).count();

    // Weights belong to layers, results to tensors: the gaps between tensors stay what they are.
    let tensor_parts = segments::clip(tensors, window.clone());
    let mut shard = arena.reborrow().range_mut(window);
    let of_tensors = for_tensors(&weights, world_size, tensors.len());
    cpu::combine(shard.reborrow(), &vectors, &of_tensors, &tensor_parts)?;
    if recomputed > 0 {
        tracing::debug!(recomputed, "norms cancelled: computing their layers from the vectors");
        let trees = recompute(comm, &vectors, &layer_parts, &products, cancelled, &mut weights)?;
        let trees = if layers.len() == tensors.len() { trees } else { trees.repeated(tensors.len()) };
        cpu::tree_combine(shard, &vectors, &tensor_parts, &trees, 1.0)?;
    }
    comm.all_gather_in_place(arena)?;
    Ok(AdasumReport { algorithm: Algorithm::Gram, weights: Some(weights), recomputed })
}

/// Finds the coefficients of cancelled layers along the tree: of pairs of ranks from their products, above from the vectors.
fn recompute(
    comm: &dyn Communicator,
    vectors: &[Slice<'_>],
    parts: &[Range<usize>],
    products: &[f64],
    cancelled: Vec<bool>,
    weights: &mut [f64],
) -> Result<cpu::Trees> {
    let ranks = vectors.len();
    for (weights, _) in weights.chunks_exact_mut(ranks).zip(&cancelled).filter(|(_, cancelled)| **cancelled) {
        weights.fill(1.0);
    }
    let mut trees = cpu::Trees::new(ranks, cancelled)?;
    let (first, pairs): (Vec<Pair>, Vec<Pair>) = adasum::pairs(ranks).partition(|pair| pair.joins_ranks());
    for pair in first {
        let of_layer = |gram: &[f64]| {
            let product = |i, j| gram[adasum::product_index(i, j, ranks)];
            let (left, right) = (pair.begin, pair.middle);
            [product(left, right), product(left, left), product(right, right)]
        };
        let sums: Vec<[f64; 3]> = products.chunks_exact(adasum::products(ranks)).map(of_layer).collect();
        trees.set_pair(pair, &sums, weights)?;
    }
    // The pairs of one level are independent: their sums travel together.
    for level in pairs.chunk_by(|one, other| one.middle - one.begin == other.middle - other.begin) {
        let mut sums = Vec::with_capacity(level.len() * parts.len());
        for &pair in level {
            sums.extend(cpu::tree_dots(vectors, parts, &trees, pair)?);
        }
        comm.all_reduce(sums.as_flattened_mut().into(), ReduceOp::Sum)?;
        for (&pair, sums) in level.iter().zip(sums.chunks_exact(parts.len())) {
            trees.set_pair(pair, sums, weights)?;
        }
    }
    Ok(trees)
}

fn tree(
    comm: &dyn Communicator,
    mut arena: SliceMut<'_>,
    layers: &[Range<usize>],
    tensors: &[Range<usize>],
) -> Result<AdasumReport> {
    let rank = comm.rank();
    let half = || Arena::zeroed(OPERATION, arena.dtype(), arena.len().div_ceil(2));
    let (mut mine, mut theirs) = (half()?, half()?);
    let steps = tree::steps(rank, comm.world_size(), arena.len());

    for step in &steps {
        let kept = 0..step.keep.len();
        let theirs = &mut theirs.as_mut_slice().range_mut(kept.clone());
        let given = arena.as_slice().range(step.give.clone());
        comm.send_recv(given, step.peer, theirs.reborrow(), step.peer)?;
        let mut mine = mine.as_mut_slice().range_mut(kept);
        cpu::cast(mine.reborrow(), arena.as_slice().range(step.keep.clone()))?;

        let (left, right) =
            if step.is_left { (mine.as_slice(), theirs.as_slice()) } else { (theirs.as_slice(), mine.as_slice()) };
        let mut sums = cpu::dots(left, right, &segments::clip(layers, step.keep.clone()))?;
        group_sum(comm, step.group.len(), sums.as_flattened_mut())?;
        let pairs = sums.iter().map(|&[dot, left, right]| adasum::coefficients(dot, left, right));
        let weights: Vec<f64> = pairs.flat_map(<[f64; 2]>::from).collect();
        let weights = for_tensors(&weights, 2, tensors.len());
        let parts = segments::clip(tensors, step.keep.clone());
        cpu::combine(arena.reborrow().range_mut(step.keep.clone()), &[left, right], &weights, &parts)?;
    }
    for step in steps.iter().rev() {
        let mut kept = mine.as_mut_slice().range_mut(0..step.keep.len());
        cpu::cast(kept.reborrow(), arena.as_slice().range(step.keep.clone()))?;
        let given = arena.reborrow().range_mut(step.give.clone());
        comm.send_recv(kept.as_slice(), step.peer, given, step.peer)?;
    }
    Ok(AdasumReport { algorithm: Algorithm::Tree, weights: None, recomputed: 0 })
}

/// Adds `values` over the aligned group of `group_size` consecutive ranks that this rank is in, by recursive doubling: every
/// rank adds the same numbers in the same tree, and addition commutes, so that all get the same bits.
fn group_sum(comm: &dyn Communicator, group_size: usize, values: &mut [f64]) -> Result<()> {
    let mut received = vec![0.0; values.len()];
    let mut distance = 1;
    while distance < group_size {
        let peer = comm.rank() ^ distance;
        comm.send_recv((&*values).into(), peer, (&mut received).into(), peer)?;
        values.iter_mut().zip(&received).for_each(|(value, received)| *value += received);
        distance *= 2;
    }
    Ok(())
}
