//! Adasum by kernels that access the gradient buffers of all ranks, without a transport.

use std::sync::Arc;

use super::{OPERATION, gram, layers};
use crate::buffer::GradientBuffer;
use crate::comm::{Call, Communicator, Operation};
use crate::error::Result;
use crate::kernels::cuda::{PeerKernel, PeerSums, SegmentWorkspace};
use crate::memory::Cuda;
use crate::ops::peers::{Connection, peers};
use crate::ops::{AdasumReport, Granularity};

/// Adasum by kernels that access the peers' memory.
#[derive(Debug)]
pub(super) struct Peers {
    layers: SegmentWorkspace,
    connection: Arc<Connection>,
}

impl Peers {
    /// Connects the ranks; `None` on every rank if the memory of some rank is not accessible.
    pub(super) fn connect(
        comm: &dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        (operation, granularity): (Operation, Granularity),
    ) -> Result<Option<Self>> {
        let (rank, table, queue) = (comm.rank(), buffer.table(), buffer.queue());
        if !Connection::is_possible(comm, buffer) {
            return Ok(None);
        }
        let (len, world_size) = (table.shard_len(), comm.world_size());
        let layers = layers(buffer, granularity, len);
        let workspace = || SegmentWorkspace::for_peers(queue, &layers, rank * len..(rank + 1) * len, world_size);
        let connected =
            Connection::new(operation, comm, buffer, (PeerKernel::Adasum, PeerSums::of(&layers)), workspace)?;
        Ok(connected.map(|(connection, layers)| Self { layers, connection }))
    }

    pub(super) fn run(&mut self, comm: &dyn Communicator<Cuda>, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        self.connection.check(OPERATION, buffer)?;
        let _held = buffer.queue().hold();
        self.connection.keep_for_recording(buffer.queue())?;
        let (len, dtype) = (buffer.table().arena_len(), buffer.table().dtype());
        let (layers, group) = (&mut self.layers, &self.connection.group);
        let call = Call::new(Operation::Adasum, len, dtype);
        peers(comm).run_kernels(call, buffer.queue(), &mut || layers.adasum_of_peers(group, dtype))
    }

    /// The report of the last run; waits for the queue.
    pub(super) fn report(&self) -> Result<AdasumReport> {
        gram::report(&self.layers)
    }
}
