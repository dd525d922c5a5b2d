//! The Gram form over a transport: one exchange of the vectors, one small all-reduce of their products, one all-gather of the result.

use std::ops::Range;

use crate::buffer::GradientBuffer;
use crate::comm::{Collectives, Communicator, ReduceOp};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
use crate::error::Result;
use crate::kernels::cpu::Coefficients;
use crate::kernels::cuda::SegmentWorkspace;
use crate::memory::Cuda;
use crate::ops::{AdasumReport, Granularity};

use super::layers;

#[derive(Debug)]
pub(super) struct Gram {
    layers: SegmentWorkspace,
    shard_len: usize,
    /// The other ranks' vectors in this rank's window, in rank order.
    received: DeviceBuffer,
}

impl Gram {
    /// Creates the workspace for vectors with the buffer's elements in `range`, which is as many equal shards as `across` has ranks. All
    /// windows whose products are added are shards of that length.
    pub(super) fn new(
        across: &dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        range: Range<usize>,
        granularity: Granularity,
    ) -> Result<Self> {
        let (queue, dtype, vectors) = (buffer.queue(), buffer.table().dtype(), across.world_size());
        let shard_len = range.len() / vectors;
        let begin = range.start + across.rank() * shard_len;
        let layers = layers(buffer, granularity, shard_len);
        Ok(Self {
            layers: SegmentWorkspace::of_window(queue, &layers, begin..begin + shard_len, vectors)?,
            shard_len,
            received: DeviceBuffer::zeroed(queue, dtype, shard_len * (vectors - 1))?,
        })
    }

    /// Replaces the vectors of the ranks of `across` by their Adasum; products are added over all ranks of `all`, which have the parts of
    /// the vectors.
    pub(super) fn run(
        &mut self,
        across: &dyn Communicator<Cuda>,
        all: &dyn Communicator<Cuda>,
        mut arena: DeviceSliceMut<'_>,
    ) -> Result<()> {
        self.reduce(across, all, arena.reborrow())?;
        across.all_gather_in_place(arena)
    }

    /// Like [`run`](Self::run), but keeps only the local shard.
    pub(super) fn reduce(
        &mut self,
        across: &dyn Communicator<Cuda>,
        all: &dyn Communicator<Cuda>,
        arena: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let view = arena.as_slice();
        let (rank, world_size, len) = (across.rank(), across.world_size(), self.shard_len);
        let shard = |peer: usize| view.range(peer * len..(peer + 1) * len);
        let peers = || (0..world_size).filter(|&peer| peer != rank);

        let mut rest = self.received.as_mut_slice();
        let mut receives = Vec::with_capacity(world_size - 1);
        for peer in peers() {
            let (part, others) = rest.split_at_mut(len);
            receives.push((peer, part.into()));
            rest = others;
        }
        let sends: Vec<_> = peers().map(|peer| (peer, shard(peer).into())).collect();
        across.exchange(&sends, &mut receives)?;

        // This rank's own vector is read in place.
        let received = self.received.as_slice();
        let vectors: Vec<DeviceSlice<'_>> = (0..world_size)
            .map(|peer| match peer {
                _ if peer == rank => shard(rank),
                _ => {
                    let place = if peer < rank { peer } else { peer - 1 };
                    received.range(place * len..(place + 1) * len)
                }
            })
            .collect();
        // SAFETY: the arena is borrowed mutably; the kernels read each element of the shard before they write it, in one thread.
        let result = unsafe { DeviceSliceMut::from_view(shard(rank)) };
        self.layers.adasum_of_parts(result, &vectors, |totals| all.all_reduce(totals, ReduceOp::Sum))
    }

    /// The report of the last run; waits for the queue.
    pub(super) fn report(&self) -> Result<AdasumReport> {
        report(&self.layers)
    }
}

/// The report of the last kernels on these layers; waits for the queue.
pub(super) fn report(layers: &SegmentWorkspace) -> Result<AdasumReport> {
    let Coefficients { weights, cancelled } = layers.read_coefficients()?;
    let recomputed = cancelled.iter().filter(|&&cancelled| cancelled).count();
    Ok(AdasumReport::of_gram(weights, cancelled.len(), recomputed))
}
