//! ONNX Runtime's vector halving, distance doubling, on the device, over whole vectors or over parts that are divided among a node's ranks.

use std::ops::Range;

use gradsync_device::math::adasum::products;
use gradsync_device::math::precise;

use super::layers;
use crate::buffer::GradientBuffer;
use crate::comm::{Collectives, Communicator, ReduceOp};
use crate::driver::{DeviceBuffer, DeviceSliceMut};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cuda::{SegmentWorkspace, accumulate};
use crate::memory::Cuda;
use crate::ops::Granularity;
use crate::plan::tree;

#[derive(Debug)]
pub(super) struct Tree {
    steps: Vec<(tree::Step, SegmentWorkspace)>,
    gathers: Vec<tree::Gather>,
    /// The peer's half.
    theirs: DeviceBuffer,
    /// A peer's sums over its half.
    sums: DeviceBuffer,
}

impl Tree {
    /// Creates the workspace for vectors with the buffer's elements in `range`, one vector for each of a power of two of ranks. At the last
    /// level, the windows of all ranks have the same length, also of ranks with other ranges.
    pub(super) fn new(
        across: &dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        range: Range<usize>,
        granularity: Granularity,
    ) -> Result<Self> {
        let (queue, table) = (buffer.queue(), buffer.table());
        let steps = tree::steps(across.rank(), across.world_size(), range.len());
        let layers = layers(buffer, granularity, range.len() / across.world_size());
        let with_layers = |step: tree::Step| {
            let kept = range.start + step.keep.start..range.start + step.keep.end;
            Ok((step, SegmentWorkspace::of_window(queue, &layers, kept, 2)?.of_tree()?))
        };
        Ok(Self {
            steps: steps.into_iter().map(with_layers).collect::<Result<_>>()?,
            gathers: tree::gathers(across.rank(), across.world_size(), range.len()),
            theirs: DeviceBuffer::zeroed(queue, table.dtype(), range.len().div_ceil(2))?,
            sums: DeviceBuffer::zeroed(queue, DType::F64, products(2).max(precise::SUMS) * layers.rows())?,
        })
    }

    /// Replaces the vectors of the ranks of `across` by their Adasum. Where vectors are divided, `node` has the ranks with the other parts,
    /// the same number for every vector.
    pub(super) fn run(
        &mut self,
        across: &dyn Communicator<Cuda>,
        node: Option<&dyn Communicator<Cuda>>,
        arena: DeviceSliceMut<'_>,
    ) -> Result<()> {
        for (step, layers) in &mut self.steps {
            let theirs = &mut self.theirs.as_mut_slice().range_mut(0..step.keep.len());
            let given = arena.as_slice().range(step.give.clone());
            across.send_recv(given, step.peer, theirs.reborrow(), step.peer)?;

            let kept = arena.as_slice().range(step.keep.clone());
            let vectors = if step.is_left { [kept, theirs.as_slice()] } else { [theirs.as_slice(), kept] };
            // SAFETY: the arena is borrowed mutably; the kernels read each element of `kept` before they write it, in one thread.
            let result = unsafe { DeviceSliceMut::from_view(kept) };
            let sums = &mut self.sums;
            layers.adasum_of_parts(result, &vectors, |mut totals| {
                // Each number is nonzero on one rank only, so the sum does not depend on the order.
                if let Some(node) = node {
                    node.all_reduce(totals.reborrow(), ReduceOp::Sum)?;
                }
                group_sum(across, step.group.len(), totals, sums)
            })?;
        }
        for tree::Gather { held, peers } in &self.gathers {
            let view = arena.as_slice();
            let sends: Vec<_> = peers.iter().map(|&(peer, _)| (peer, view.range(held.clone()).into())).collect();
            // SAFETY: the arena is borrowed mutably, and the ranks' ranges do not overlap.
            let place = |range: &Range<usize>| unsafe { DeviceSliceMut::from_view(view.range(range.clone())) };
            let mut receives: Vec<_> = peers.iter().map(|(peer, range)| (*peer, place(range).into())).collect();
            across.exchange(&sends, &mut receives)?;
        }
        Ok(())
    }
}

/// Adds sums over the aligned group of `group_size` consecutive ranks to which this rank belongs, by recursive doubling.
fn group_sum(
    comm: &dyn Communicator<Cuda>,
    group_size: usize,
    mut totals: DeviceSliceMut<'_>,
    received: &mut DeviceBuffer,
) -> Result<()> {
    let mut received = received.as_mut_slice().range_mut(0..totals.as_slice().len());
    let mut distance = 1;
    while distance < group_size {
        let peer = comm.rank() ^ distance;
        comm.send_recv(totals.as_slice(), peer, received.reborrow(), peer)?;
        accumulate(totals.reborrow(), received.as_slice())?;
        distance *= 2;
    }
    Ok(())
}
