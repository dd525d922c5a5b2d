//! Sums in rank order over a communicator: two exchanges around the `combine` kernel.

use std::ops::Range;

use super::factor;
use crate::buffer::GradientBuffer;
use crate::comm::{Communicator, ReduceOp};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cpu::Coefficients;
use crate::kernels::cuda::{SegmentWorkspace, cast};
use crate::memory::Cuda;

/// The workspace of one rank.
#[derive(Debug)]
pub(super) struct Exchange {
    shard_len: usize,
    /// The kernels, with the weights of a mean.
    layers: SegmentWorkspace,
    /// The weights of a sum.
    ones: DeviceBuffer,
    /// This rank's shard of every other rank's data, in rank order.
    received: DeviceBuffer,
    /// The data in the dtype of the wire, if it differs from the dtype of the buffer.
    narrow: Option<DeviceBuffer>,
}

impl Exchange {
    /// Prepares this rank's workspace, without the other ranks.
    pub(super) fn new(comm: &dyn Communicator<Cuda>, buffer: &GradientBuffer<Cuda>, wire: DType) -> Result<Self> {
        let (world_size, table, queue) = (comm.world_size(), buffer.table(), buffer.queue());
        let shard_len = table.shard_len();
        let mut layers = SegmentWorkspace::new(queue, shard_len, &[0..shard_len], world_size)?;
        let weights = |op| vec![factor(op, world_size); world_size];
        layers.write_coefficients(&Coefficients { weights: weights(ReduceOp::Mean), cancelled: vec![false] })?;
        let ones = DeviceBuffer::from_host(queue, (&weights(ReduceOp::Sum)).into())?;
        let narrow =
            (wire != table.dtype()).then(|| DeviceBuffer::zeroed(queue, wire, table.arena_len())).transpose()?;
        let received = DeviceBuffer::zeroed(queue, wire, shard_len * (world_size - 1))?;
        Ok(Self { shard_len, layers, ones, received, narrow })
    }

    /// Replaces every rank's data by their sum or mean.
    pub(super) fn run(
        &mut self,
        comm: &dyn Communicator<Cuda>,
        mut data: DeviceSliceMut<'_>,
        op: ReduceOp,
    ) -> Result<()> {
        let Self { shard_len, layers, ones, received, narrow } = self;
        let mut steps = Steps { shard_len: *shard_len, layers, ones, received };
        let Some(narrow) = narrow else { return steps.reduce(comm, data, op) };
        cast(narrow.as_mut_slice(), data.as_slice())?;
        steps.reduce(comm, narrow.as_mut_slice(), op)?;
        cast(data.reborrow(), narrow.as_slice())
    }
}

/// The workspace of a reduction in the dtype of the wire.
struct Steps<'w> {
    shard_len: usize,
    layers: &'w mut SegmentWorkspace,
    ones: &'w DeviceBuffer,
    received: &'w mut DeviceBuffer,
}

impl Steps<'_> {
    /// Reduces data in the dtype of the wire.
    fn reduce(&mut self, comm: &dyn Communicator<Cuda>, mut data: DeviceSliceMut<'_>, op: ReduceOp) -> Result<()> {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let (before, after) = (0..rank, rank + 1..world_size);
        let peers = || before.clone().chain(after.clone());
        let shard = |rank: usize| rank * self.shard_len..(rank + 1) * self.shard_len;

        let view = data.as_slice();
        let sends: Vec<_> = peers().map(|peer| (peer, view.range(shard(peer)))).collect();
        comm.exchange(&sends, &mut destinations(self.received.as_mut_slice(), peers(), self.shard_len))?;

        let (own, received) = (view.range(shard(rank)), self.received.as_slice());
        let vectors: Vec<DeviceSlice<'_>> = (0..world_size)
            .map(|peer| match peer.cmp(&rank) {
                std::cmp::Ordering::Equal => own,
                std::cmp::Ordering::Less => received.range(shard(peer)),
                std::cmp::Ordering::Greater => received.range(shard(peer - 1)),
            })
            .collect();
        // SAFETY: the data are borrowed mutably; the kernel reads each element of this shard before it writes it, in one thread.
        let sums = unsafe { DeviceSliceMut::from_view(own) };
        match op {
            ReduceOp::Mean => self.layers.combine(sums, &vectors)?,
            _ => self.layers.combine_by(self.ones, sums, &vectors)?,
        }

        // Every shard except this rank's own is written by another rank.
        let Range { start, end } = shard(rank);
        let (of_lower, rest) = data.reborrow().split_at_mut(start);
        let (own, of_higher) = rest.split_at_mut(end - start);
        let sends: Vec<_> = peers().map(|peer| (peer, own.as_slice())).collect();
        let mut receives = destinations(of_lower, before, self.shard_len);
        receives.extend(destinations(of_higher, after, self.shard_len));
        comm.exchange(&sends, &mut receives)
    }
}

/// Consecutive shards of `data`, one for each of the peers, from which they are received.
fn destinations(
    data: DeviceSliceMut<'_>,
    peers: impl Iterator<Item = usize>,
    shard_len: usize,
) -> Vec<(usize, DeviceSliceMut<'_>)> {
    let mut rest = data;
    let mut found = Vec::new();
    for peer in peers {
        let (shard, others) = rest.split_at_mut(shard_len);
        found.push((peer, shard));
        rest = others;
    }
    found
}
