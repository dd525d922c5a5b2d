//! Both algorithms by kernels that reach into the gradient buffers of all ranks: no transport moves anything.

use std::sync::Arc;

use super::{OPERATION, clear_gaps, gram, whole_lens};
use crate::buffer::GradientBuffer;
use crate::comm::{Call, Communicator, Operation};
use crate::error::Result;
use crate::kernels::cuda::{PeerKernel, SegmentWorkspace, load_zero_all};
use crate::memory::Cuda;
use crate::ops::peers::{Connection, peers};
use crate::ops::{AdasumOptions, AdasumReport, Algorithm, Granularity};
use crate::plan::segments;

/// Adasum by kernels that reach into the peers' memory.
#[derive(Debug)]
pub(super) struct Peers {
    layers: SegmentWorkspace,
    /// Whether all tensors are one layer.
    is_whole: bool,
    connection: Arc<Connection>,
}

impl Peers {
    /// `None` on every rank if some cannot be reached. For [`Algorithm::Tree`] a power of two of ranks; any other means Gram.
    pub(super) fn connect(
        comm: &dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        (operation, options): (Operation, AdasumOptions),
    ) -> Result<Option<Self>> {
        let (rank, table, queue) = (comm.rank(), buffer.table(), buffer.queue());
        if !Connection::is_possible(comm, buffer) {
            return Ok(None);
        }
        let len = table.shard_len();
        let parts = segments::clip(table.segments(), rank * len..(rank + 1) * len);
        let is_shared = options.granularity == Granularity::Whole;
        let layers = || {
            if is_shared {
                // Loading it later can wait for the peers' kernels, which wait for this rank's.
                load_zero_all(queue)?;
            }
            let layers = SegmentWorkspace::for_peers(queue, len, &parts, comm.world_size(), is_shared)?;
            layers.with_whole_lens(&whole_lens(buffer, options.granularity))
        };
        let kernel = if options.algorithm == Algorithm::Tree { PeerKernel::Tree } else { PeerKernel::Gram };
        let count = options.granularity.layer_count(table.tensor_count());
        let connected = Connection::new(operation, comm, buffer, (kernel, count), layers)?;
        Ok(connected.map(|(connection, layers)| Self { layers, is_whole: is_shared, connection }))
    }

    pub(super) fn run(&mut self, comm: &dyn Communicator<Cuda>, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        self.connection.check(OPERATION, buffer)?;
        self.connection.keep_for_recording(buffer.queue())?;
        let (len, dtype) = (buffer.table().arena_len(), buffer.table().dtype());
        if self.is_whole {
            let tensors = buffer.table().segments().to_vec();
            clear_gaps(buffer.as_mut_slice(), &tensors)?;
        }
        let (layers, group) = (&mut self.layers, &self.connection.group);
        let call = Call::new(Operation::Adasum, len, dtype);
        let run = if group.kernel() == PeerKernel::Tree {
            SegmentWorkspace::tree_of_peers
        } else {
            SegmentWorkspace::adasum_of_peers
        };
        peers(comm).run_kernels(call, buffer.queue(), &mut || run(layers, group, dtype))
    }

    /// The report of the last run; waits for the queue.
    pub(super) fn report(&self) -> Result<AdasumReport> {
        match self.connection.group.kernel() {
            PeerKernel::Tree => Ok(AdasumReport::of_tree()),
            _ => gram::report(&self.layers),
        }
    }
}
