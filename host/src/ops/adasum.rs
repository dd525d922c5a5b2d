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
use crate::plan::{segments, tree};
use crate::slice::{Slice, SliceMut};

/// How the ranks' vectors are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Granularity {
    /// Each tensor on its own ("per layer"), as upstream has it.
    #[default]
    Tensor,
    /// All tensors together, as one vector.
    Whole,
}

/// Choices of an Adasum all-reduce; equal on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
/// spreads over its layer as the formula says.
///
/// # Errors
/// [`Error::InvalidArgument`] if the buffer was made for another world size, [`Error::UnsupportedWorldSize`] for `Tree` on a
/// number of ranks that is no power of two, and those of the communicator. After a communicator's error the contents of the
/// buffer are unspecified; the other errors leave it alone.
pub fn adasum_all_reduce(
    comm: &dyn Communicator,
    buffer: &mut GradientBuffer,
    options: AdasumOptions,
) -> Result<AdasumReport> {
    const OPERATION: &str = "adasum_all_reduce";
    let world_size = comm.world_size();
    if buffer.world_size() != world_size {
        let reason = format!("the buffer is shared out over {} ranks, the world has {world_size}", buffer.world_size());
        return Err(Error::InvalidArgument { operation: OPERATION, reason });
    }
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
        Algorithm::Auto | Algorithm::Gram => gram(comm, arena, layers),
        Algorithm::Tree => tree(comm, arena, layers),
    }
}

fn gram(comm: &dyn Communicator, mut arena: SliceMut<'_>, layers: &[Range<usize>]) -> Result<AdasumReport> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let shard_len = arena.len() / world_size;
    let window = rank * shard_len..(rank + 1) * shard_len;

    let mut exchanged = Arena::zeroed(arena.dtype(), arena.len());
    comm.all_to_all(arena.as_slice(), exchanged.as_mut_slice())?;
    let vectors: Vec<Slice<'_>> =
        (0..world_size).map(|peer| exchanged.as_slice().range(peer * shard_len..(peer + 1) * shard_len)).collect();
    let parts = segments::clip(layers, window.clone());

    let mut products = cpu::gram(&vectors, &parts)?;
    comm.all_reduce((&mut products).into(), ReduceOp::Sum)?;
    let cpu::Coefficients { mut weights, cancelled } = cpu::coefficients(&products, world_size)?;
    let recomputed = cancelled.iter().filter(|&&cancelled| cancelled).count();
    if recomputed > 0 {
        tracing::debug!(recomputed, "norms cancelled: computing their layers from the vectors");
        recompute(comm, &vectors, &parts, &cancelled, &mut weights)?;
    }
    cpu::combine(arena.reborrow().range_mut(window), &vectors, &weights, &parts)?;
    comm.all_gather_in_place(arena)?;
    Ok(AdasumReport { algorithm: Algorithm::Gram, weights: Some(weights), recomputed })
}

/// Computes the weights of cancelled layers along the tree, from the vectors instead of their inner products.
fn recompute(
    comm: &dyn Communicator,
    vectors: &[Slice<'_>],
    parts: &[Range<usize>],
    cancelled: &[bool],
    weights: &mut [f64],
) -> Result<()> {
    let ranks = vectors.len();
    cpu::reset_weights(weights, cancelled, ranks);
    let pairs: Vec<Pair> = adasum::pairs(ranks).collect();
    // The pairs of one level are independent: their sums travel together.
    for level in pairs.chunk_by(|one, other| one.middle - one.begin == other.middle - other.begin) {
        let mut sums = Vec::with_capacity(level.len() * parts.len());
        for &pair in level {
            sums.extend(cpu::pair_dots(vectors, parts, weights, pair, cancelled)?);
        }
        comm.all_reduce(sums.as_flattened_mut().into(), ReduceOp::Sum)?;
        for (&pair, sums) in level.iter().zip(sums.chunks_exact(parts.len())) {
            cpu::combine_pair(weights, cancelled, sums, pair, ranks);
        }
    }
    Ok(())
}

fn tree(comm: &dyn Communicator, mut arena: SliceMut<'_>, layers: &[Range<usize>]) -> Result<AdasumReport> {
    let rank = comm.rank();
    let half = arena.len().div_ceil(2);
    let (mut mine, mut theirs) = (Arena::zeroed(arena.dtype(), half), Arena::zeroed(arena.dtype(), half));
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
        let parts = segments::clip(layers, step.keep.clone());
        let mut sums = cpu::dots(left, right, &parts)?;
        group_sum(comm, step.group.len(), sums.as_flattened_mut())?;
        let weights: Vec<f64> = sums
            .iter()
            .flat_map(|&[dot, left, right]| [adasum::coefficient(dot, left), adasum::coefficient(dot, right)])
            .collect();
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
