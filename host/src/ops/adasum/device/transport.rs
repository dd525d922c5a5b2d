//! Both algorithms on the device, over a transport: whole vectors, or shards that are divided among a node's ranks.
//!
//! The DeviceGram form has one exchange of the vectors, one small all-reduce of their products and one all-gather of the result; the tree is ONNX
//! Runtime's vector halving, distance doubling.

use std::ops::Range;

use gradsync_device::math::adasum::products;
use gradsync_device::math::precise;

use super::layers;
use crate::buffer::GradientBuffer;
use crate::comm::{Collectives, Communicator, ReduceOp};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cpu::Coefficients;
use crate::kernels::cuda::{SegmentWorkspace, accumulate};
use crate::memory::Cuda;
use crate::ops::adasum::Strategy;
use crate::ops::{AdasumReport, Granularity};
use crate::plan::tree;

/// Adasum by one DeviceGram matrix.
#[derive(Debug)]
pub(super) struct DeviceGram<'c> {
    /// The ranks with the vectors, one rank per vector.
    across: &'c dyn Communicator<Cuda>,
    /// The ranks over which products are added: all ranks that have a shard of the vectors.
    all: &'c dyn Communicator<Cuda>,
    layers: SegmentWorkspace,
    shard_len: usize,
    /// The other ranks' vectors in this rank's shard, in rank order.
    received: DeviceBuffer,
}

impl<'c> DeviceGram<'c> {
    /// Prepares Adasum of vectors with the buffer's elements in `range`, which is as many equal shards as `across` has ranks. Products are
    /// added over all ranks of `all`, whose shards have the same length.
    pub(super) fn new(
        across: &'c dyn Communicator<Cuda>,
        all: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        range: Range<usize>,
        granularity: Granularity,
    ) -> Result<Self> {
        let (queue, dtype, vectors) = (buffer.queue(), buffer.table().dtype(), across.world_size());
        let shard_len = range.len() / vectors;
        let begin = range.start + across.rank() * shard_len;
        let layers = layers(buffer, granularity, shard_len);
        Ok(Self {
            across,
            all,
            layers: SegmentWorkspace::of_shard(queue, &layers, begin..begin + shard_len, vectors)?,
            shard_len,
            received: DeviceBuffer::zeroed(queue, dtype, shard_len * (vectors - 1))?,
        })
    }

    /// Replaces the vectors of all ranks by their Adasum.
    pub(super) fn reduce(&mut self, mut arena: DeviceSliceMut<'_>) -> Result<()> {
        self.reduce_scatter(arena.reborrow())?;
        self.across.all_gather_in_place(arena)
    }

    /// Like [`reduce`](Self::reduce), but keeps only the local shard.
    pub(super) fn reduce_scatter(&mut self, arena: DeviceSliceMut<'_>) -> Result<()> {
        let (across, all) = (self.across, self.all);
        let view = arena.as_slice();
        let (rank, world_size, len) = (across.rank(), across.world_size(), self.shard_len);
        let shard = |peer: usize| view.range(peer * len..(peer + 1) * len);
        let peers = || (0..world_size).filter(|&peer| peer != rank);

        let mut rest = self.received.as_mut_slice();
        let mut receives = Vec::with_capacity(world_size - 1);
        for peer in peers() {
            let (own, others) = rest.split_at_mut(len);
            receives.push((peer, own));
            rest = others;
        }
        let sends: Vec<_> = peers().map(|peer| (peer, shard(peer))).collect();
        across.exchange(&sends, &mut receives)?;

        // This rank's own vector is read in place.
        let received = self.received.as_slice();
        let vectors: Vec<DeviceSlice<'_>> = (0..world_size)
            .map(|peer| match peer {
                _ if peer == rank => shard(rank),
                _ => {
                    let index = if peer < rank { peer } else { peer - 1 };
                    received.range(index * len..(index + 1) * len)
                }
            })
            .collect();
        // SAFETY: the arena is borrowed mutably; the kernels read each element of the shard before they write it, in one thread.
        let result = unsafe { DeviceSliceMut::from_view(shard(rank)) };
        self.layers.adasum_of_shards(result, &vectors, |totals| all.all_reduce(totals, ReduceOp::Sum))
    }
}

impl Strategy<Cuda> for DeviceGram<'_> {
    fn run(&mut self, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        self.reduce(buffer.as_mut_slice())
    }

    fn report(&self) -> Result<AdasumReport> {
        report_of(self.layers.read_coefficients()?)
    }
}

/// The report of Adasum by one DeviceGram matrix, from the numbers that kernels have left on the device.
pub(super) fn report_of(Coefficients { weights, cancelled }: Coefficients) -> Result<AdasumReport> {
    let recomputed = cancelled.iter().filter(|&&cancelled| cancelled).count();
    Ok(AdasumReport::of_gram(weights, cancelled.len(), recomputed))
}

/// Adasum by the tree.
#[derive(Debug)]
pub(super) struct DeviceTree<'c> {
    /// The ranks with the vectors, one rank per vector.
    across: &'c dyn Communicator<Cuda>,
    /// The ranks with the other shards of the vectors, if they are divided: the same number of ranks for every vector.
    node: Option<&'c dyn Communicator<Cuda>>,
    steps: Vec<(tree::HalvingStep, SegmentWorkspace)>,
    gathers: Vec<tree::Gather>,
    /// The peer's half.
    theirs: DeviceBuffer,
    /// A peer's sums over its half.
    sums: DeviceBuffer,
}

impl<'c> DeviceTree<'c> {
    /// Prepares Adasum of vectors with the buffer's elements in `range`, one vector for each of a power of two of ranks. At the last level,
    /// the shards of all ranks have the same length, also of ranks with other ranges.
    pub(super) fn new(
        across: &'c dyn Communicator<Cuda>,
        node: Option<&'c dyn Communicator<Cuda>>,
        buffer: &GradientBuffer<Cuda>,
        range: Range<usize>,
        granularity: Granularity,
    ) -> Result<Self> {
        let (queue, table) = (buffer.queue(), buffer.table());
        let steps = tree::steps(across.rank(), across.world_size(), range.len());
        let layers = layers(buffer, granularity, range.len() / across.world_size());
        let with_layers = |step: tree::HalvingStep| {
            let kept = range.start + step.keep.start..range.start + step.keep.end;
            Ok((step, SegmentWorkspace::of_shard(queue, &layers, kept, 2)?.of_tree()?))
        };
        Ok(Self {
            across,
            node,
            steps: steps.into_iter().map(with_layers).collect::<Result<_>>()?,
            gathers: tree::gathers(across.rank(), across.world_size(), range.len()),
            theirs: DeviceBuffer::zeroed(queue, table.dtype(), range.len().div_ceil(2))?,
            sums: DeviceBuffer::zeroed(queue, DType::F64, products(2).max(precise::SUMS) * layers.rows())?,
        })
    }

    /// Replaces the vectors of all ranks by their Adasum.
    pub(super) fn reduce(&mut self, arena: DeviceSliceMut<'_>) -> Result<()> {
        let (across, node) = (self.across, self.node);
        for (step, layers) in &mut self.steps {
            let theirs = &mut self.theirs.as_mut_slice().range_mut(0..step.keep.len());
            let given = arena.as_slice().range(step.give.clone());
            across.send_recv(given, step.peer, theirs.reborrow(), step.peer)?;

            let kept = arena.as_slice().range(step.keep.clone());
            let vectors = if step.is_left { [kept, theirs.as_slice()] } else { [theirs.as_slice(), kept] };
            // SAFETY: the arena is borrowed mutably; the kernels read each element of `kept` before they write it, in one thread.
            let result = unsafe { DeviceSliceMut::from_view(kept) };
            let sums = &mut self.sums;
            layers.adasum_of_shards(result, &vectors, |mut totals| {
                // Each number is nonzero on one rank only, so the sum does not depend on the order.
                if let Some(node) = node {
                    node.all_reduce(totals.reborrow(), ReduceOp::Sum)?;
                }
                group_sum(across, step.group.len(), totals, sums)
            })?;
        }
        for tree::Gather { held, peers } in &self.gathers {
            let view = arena.as_slice();
            let sends: Vec<_> = peers.iter().map(|&(peer, _)| (peer, view.range(held.clone()))).collect();
            // SAFETY: the arena is borrowed mutably, and the ranks' ranges do not overlap.
            let part = |range: &Range<usize>| unsafe { DeviceSliceMut::from_view(view.range(range.clone())) };
            let mut receives: Vec<_> = peers.iter().map(|(peer, range)| (*peer, part(range))).collect();
            across.exchange(&sends, &mut receives)?;
        }
        Ok(())
    }
}

impl Strategy<Cuda> for DeviceTree<'_> {
    fn run(&mut self, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        self.reduce(buffer.as_mut_slice())
    }

    fn report(&self) -> Result<AdasumReport> {
        Ok(AdasumReport::of_tree())
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
