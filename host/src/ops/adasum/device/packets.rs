//! Adasum of small arenas by packets, in one launch.

use std::sync::Arc;

use super::{OPERATION, layers};
use crate::agreement::all_prepared;
use crate::buffer::GradientBuffer;
use crate::comm::{Call, Communicator, Operation, PacketConnection};
use crate::driver::Kernels;
use crate::error::Result;
use crate::kernels::cpu::Coefficients;
use crate::kernels::cuda::{MOST_RANKS, PacketAdasum, PacketPlan, Shots};
use crate::memory::Cuda;
use crate::ops::peers::peers;
use crate::ops::{AdasumReport, Granularity};

/// The sizes of arenas that are reduced by packets, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Thresholds {
    pub(super) most_bytes: usize,
    /// The largest of them whose vectors every rank sends to all others.
    pub(super) one_shot_bytes: usize,
}

impl Thresholds {
    /// The sizes up to which packets were faster than the other kernels over peers' memory, and one shot faster than two: in graphs, on two
    /// and four H100 with NVLink, and with two to eight ranks on one, where the other kernels have few places for their blocks.
    pub(super) fn measured(world_size: usize) -> Self {
        let one_shot_bytes = match world_size {
            2 => 512 << 10,
            3 => 256 << 10,
            4 => 128 << 10,
            _ => 64 << 10,
        };
        Self { most_bytes: 8 << 20, one_shot_bytes }
    }

    /// Nothing is reduced by packets.
    pub(super) const NONE: Self = Self { most_bytes: 0, one_shot_bytes: 0 };

    /// The number of shots for an arena of this size, if it is reduced by packets.
    pub(super) fn shots(self, bytes: usize) -> Option<Shots> {
        let is_small = (1..=self.most_bytes.min(Packets::MOST_BYTES)).contains(&bytes);
        is_small.then_some(if bytes <= self.one_shot_bytes { Shots::One } else { Shots::Two })
    }
}

/// Adasum by one Gram matrix, of which packets carry the vectors, the products and the results.
#[derive(Debug)]
pub(super) struct Packets {
    adasum: PacketAdasum,
    packets: Arc<PacketConnection>,
}

impl Packets {
    /// The limit of the size of arenas, in bytes.
    pub(super) const MOST_BYTES: usize = 16 << 20;

    /// Connects the ranks, and prepares the workspace; `None` on every rank if the memory of some rank is not accessible, or if there are no
    /// elements.
    pub(super) fn connect(
        comm: &dyn Communicator<Cuda>,
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
        Ok(Some(Self { adasum, packets: Arc::new(packets) }))
    }

    pub(super) fn run(&mut self, comm: &dyn Communicator<Cuda>, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        let queue = buffer.queue().clone();
        self.adasum.check_queue(OPERATION, &queue)?;
        let _held = queue.hold();
        self.packets.keep_for_recording(&queue)?;
        let mut arena = buffer.as_mut_slice();
        let call = Call::new(Operation::Adasum, arena.as_slice().len(), arena.as_slice().dtype());
        let Self { adasum, packets } = self;
        peers(comm).run_kernels(call, &queue, &mut || {
            // SAFETY: the arena has the layout for which this was made, as was checked, and the ranks' tables were compared; the connection
            // was made for this plan and is used by nothing else.
            unsafe { adasum.run(&packets.group, &arena.reborrow()) }
        })
    }

    /// The report of the last run; waits for the queue.
    pub(super) fn report(&self) -> Result<AdasumReport> {
        let Coefficients { weights, cancelled } = self.adasum.read_coefficients()?;
        let recomputed = cancelled.iter().filter(|&&cancelled| cancelled).count();
        Ok(AdasumReport::of_gram(weights, cancelled.len(), recomputed))
    }
}
