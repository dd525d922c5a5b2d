//! Adasum by kernels that access the memory of all ranks, without a transport: by packets for small arenas, otherwise in the gradient buffers.

use std::sync::Arc;

use super::transport::report_of;
use super::{OPERATION, layers};
use crate::buffer::GradientBuffer;
use crate::call_comparison::all_prepared;
use crate::comm::{Call, Communicator, Operation, PacketConnection};
use crate::driver::Kernels;
use crate::error::Result;
use crate::kernels::cuda::{
    MOST_RANKS, PacketAdasum, PacketLimits, PacketPlan, PeerKernel, PeerSums, SegmentWorkspace, Shots,
};
use crate::memory::Cuda;
use crate::ops::adasum::Strategy;
use crate::ops::peer_connection::{PeerConnection, peers};
use crate::ops::{AdasumReport, Granularity};

/// Adasum by kernels that access the peers' memory.
#[derive(Debug)]
pub(super) struct Peers<'c> {
    comm: &'c dyn Communicator<Cuda>,
    layers: SegmentWorkspace,
    connection: Arc<PeerConnection>,
}

impl<'c> Peers<'c> {
    /// Connects the ranks; `None` on every rank if the memory of some rank is not accessible.
    pub(super) fn connect(
        comm: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        (operation, granularity): (Operation, Granularity),
    ) -> Result<Option<Self>> {
        let (rank, table, queue) = (comm.rank(), buffer.table(), buffer.queue());
        if !PeerConnection::is_possible(comm, buffer) {
            return Ok(None);
        }
        let (len, world_size) = (table.shard_len(), comm.world_size());
        let layers = layers(buffer, granularity, len);
        let workspace = || SegmentWorkspace::for_peers(queue, &layers, rank * len..(rank + 1) * len, world_size);
        let connected =
            PeerConnection::new(operation, comm, buffer, (PeerKernel::Adasum, PeerSums::of(&layers)), workspace)?;
        Ok(connected.map(|(connection, layers)| Self { comm, layers, connection }))
    }
}

impl Strategy<Cuda> for Peers<'_> {
    fn run(&mut self, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        self.connection.check(OPERATION, buffer)?;
        let _held = buffer.queue().hold();
        self.connection.keep_for_recording(buffer.queue())?;
        let (len, dtype) = (buffer.table().arena_len(), buffer.table().dtype());
        let (layers, group) = (&mut self.layers, &self.connection.group);
        let call = Call::new(Operation::Adasum, len, dtype);
        peers(self.comm).run_kernels(call, buffer.queue(), &mut || layers.adasum_of_peers(group, dtype))
    }

    fn report(&self) -> Result<AdasumReport> {
        report_of(self.layers.read_coefficients()?)
    }

    fn uses_peers(&self) -> bool {
        true
    }
}

/// The sizes of arenas up to which packets were faster than the other kernels over peers' memory, and one shot faster than two: in graphs, on
/// two and four H100 with NVLink, and with two to eight ranks on one, where the other kernels have few places for their blocks.
pub(super) fn measured_limits(world_size: usize) -> PacketLimits {
    let one_shot_bytes = match world_size {
        2 => 512 << 10,
        3 => 256 << 10,
        4 => 128 << 10,
        _ => 64 << 10,
    };
    PacketLimits { most_bytes: 8 << 20, one_shot_bytes }
}

/// The limit of the size of arenas that packets carry, in bytes.
pub(super) const MOST_BYTES: usize = 16 << 20;

/// Adasum by one Gram matrix, of which packets carry the vectors, the products and the results.
#[derive(Debug)]
pub(super) struct Packets<'c> {
    comm: &'c dyn Communicator<Cuda>,
    adasum: PacketAdasum,
    packets: Arc<PacketConnection>,
}

impl<'c> Packets<'c> {
    /// Connects the ranks, and prepares the workspace; `None` on every rank if the memory of some rank is not accessible, or if there are no
    /// elements.
    pub(super) fn connect(
        comm: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        (operation, granularity): (Operation, Granularity),
        shots: Shots,
    ) -> Result<Option<Self>> {
        let (table, queue, ranks) = (buffer.table(), buffer.queue(), (comm.rank(), comm.world_size()));
        let Some(sharing) = comm.sharing() else { return Ok(None) };
        if !(2..=MOST_RANKS).contains(&ranks.1) {
            return Ok(None);
        }
        let plan = PacketPlan::new(&layers(buffer, granularity, 0), table.dtype(), ranks, table.shard_len(), shots);
        if plan.is_empty() {
            return Ok(None);
        }
        let agree = |outcome| all_prepared(operation, comm, outcome).map(|()| true);
        let kernels = (Kernels::Together, &[plan.entry()][..]);
        let packets = PacketConnection::new(ranks, sharing, queue, plan.mailboxes(), kernels, &agree)?;
        let Some(packets) = packets else { return Ok(None) };
        let adasum = all_prepared(operation, comm, PacketAdasum::new(queue, plan))?;
        Ok(Some(Self { comm, adasum, packets: Arc::new(packets) }))
    }
}

impl Strategy<Cuda> for Packets<'_> {
    fn run(&mut self, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        let queue = buffer.queue().clone();
        self.adasum.check_queue(OPERATION, &queue)?;
        let _held = queue.hold();
        self.packets.keep_for_recording(&queue)?;
        let mut arena = buffer.as_mut_slice();
        let call = Call::new(Operation::Adasum, arena.as_slice().len(), arena.as_slice().dtype());
        let Self { comm, adasum, packets } = self;
        peers(*comm).run_kernels(call, &queue, &mut || {
            // SAFETY: the arena has the layout for which this was made, as was checked, and the ranks' tables were compared; the connection
            // was made for this plan and is used by nothing else.
            unsafe { adasum.run(&packets.group, &arena.reborrow()) }
        })
    }

    fn report(&self) -> Result<AdasumReport> {
        report_of(self.adasum.read_coefficients()?)
    }

    fn uses_peers(&self) -> bool {
        true
    }
}
