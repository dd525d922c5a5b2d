//! Upstream's vector halving, distance doubling: at every level of the tree two ranks halve what they hold, combine, and go on; then
//! they give each other back what they have.
//!
//! Intermediate results are rounded to the dtype. Powers of two only, which the caller has checked.

use gradsync_device::math::adasum;

use super::{AdasumReport, Granularity, OPERATION, for_tensors};
use crate::buffer::Parts;
use crate::comm::Communicator;
use crate::error::Result;
use crate::kernels::cpu;
use crate::plan::{segments, tree};

/// Replaces the arena, which holds `tensors`, by the Adasum of all ranks'.
pub(super) fn in_place(comm: &dyn Communicator, parts: Parts<'_>, granularity: Granularity) -> Result<AdasumReport> {
    let Parts { mut arena, tensors, scratch } = parts;
    let (rank, layers) = (comm.rank(), granularity.layers(arena.len(), tensors));
    let mut half = || scratch.take(OPERATION, arena.dtype(), arena.len().div_ceil(2));
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
        let mut sums = cpu::dots(left, right, &segments::clip(&layers, step.keep.clone()))?;
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
    scratch.give([mine, theirs]);
    Ok(AdasumReport::of_tree())
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
