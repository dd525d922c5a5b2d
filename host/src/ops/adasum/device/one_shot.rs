//! Adasum of small arenas: every rank gets all vectors by packets, in one transfer, and computes the whole result itself.

use std::sync::Arc;

use super::{OPERATION, gram, layers};
use crate::agreement::all_prepared;
use crate::buffer::GradientBuffer;
use crate::comm::{Call, Communicator, Operation, PacketConnection};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
use crate::error::Result;
use crate::kernels::cuda::{PacketGroup, PacketKernels, SegmentWorkspace};
use crate::memory::Cuda;
use crate::ops::peers::peers;
use crate::ops::{AdasumReport, Granularity};

/// Adasum by one Gram matrix that every rank computes for itself.
#[derive(Debug)]
pub(super) struct OneShot {
    layers: SegmentWorkspace,
    packets: Arc<PacketConnection>,
    /// A place for every rank's vector; this rank's own vector is read in the arena.
    copies: DeviceBuffer,
}

impl OneShot {
    /// The limit of the size of arenas, in bytes: mailboxes take four times that for each rank, on every rank.
    pub(super) const MOST_BYTES: usize = 16 << 20;

    /// The largest arena that is sent in one shot if no other size is requested, in bytes: measured in graphs on two H100. With more ranks,
    /// each of which would do all ranks' work, it was faster or slower depending on the number of layers.
    pub(super) fn default_bytes(world_size: usize) -> usize {
        if world_size == 2 { 1 << 20 } else { 0 }
    }

    /// Connects the ranks, and prepares the workspace; `None` on every rank if the memory of some rank is not accessible.
    pub(super) fn connect(
        comm: &dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        (operation, granularity): (Operation, Granularity),
    ) -> Result<Option<Self>> {
        let (world_size, table, queue) = (comm.world_size(), buffer.table(), buffer.queue());
        let (dtype, len) = (table.dtype(), table.arena_len());
        let bytes = PacketGroup::bytes_for_one_shot(len * dtype.size_bytes(), world_size);
        let Some(sharing) = comm.sharing() else { return Ok(None) };
        let mailboxes = (bytes, PacketKernels::Gather);
        let agree = |outcome| all_prepared(operation, comm, outcome).map(|()| true);
        let packets = PacketConnection::new((comm.rank(), world_size), sharing, queue, mailboxes, &agree)?;
        let Some(packets) = packets else { return Ok(None) };
        let prepared = (|| {
            let layers = SegmentWorkspace::of_window(queue, &layers(buffer, granularity, 0), 0..len, world_size)?;
            Ok((layers, DeviceBuffer::zeroed(queue, dtype, len * world_size)?))
        })();
        let (layers, copies) = all_prepared(operation, comm, prepared)?;
        Ok(Some(Self { layers, packets: Arc::new(packets), copies }))
    }

    pub(super) fn run(&mut self, comm: &dyn Communicator<Cuda>, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        let queue = buffer.queue().clone();
        let arena = buffer.as_slice();
        self.copies.as_slice().queue().check_same(OPERATION, arena.queue())?;
        self.packets.keep_for_recording(&queue)?;
        let call = Call::new(Operation::Adasum, arena.len(), arena.dtype());
        let (Self { layers, packets, copies }, rank) = (self, comm.rank());
        peers(comm).run_kernels(call, &queue, &mut || {
            // SAFETY: arenas are not empty, as was checked at the preparation, and consist of shards of multiples of 256 bytes; the ranks'
            // tables were compared.
            unsafe { packets.group.gather(&copies.as_mut_slice(), arena)? };
            let copy = |peer: usize| copies.as_slice().range(peer * arena.len()..(peer + 1) * arena.len());
            let vectors: Vec<DeviceSlice<'_>> =
                (0..comm.world_size()).map(|peer| if peer == rank { arena } else { copy(peer) }).collect();
            // SAFETY: the buffer is borrowed mutably; the kernels read each element of the arena before they write it, in one thread.
            let result = unsafe { DeviceSliceMut::from_view(arena) };
            layers.adasum(result, &vectors)
        })
    }

    /// The report of the last run; waits for the queue.
    pub(super) fn report(&self) -> Result<AdasumReport> {
        gram::report(&self.layers)
    }
}
