//! Setup of operations whose kernels send packets to the mailboxes of all ranks.

use std::sync::Arc;

use super::peers::{expose, share};
use crate::agreement::all_prepared;
use crate::comm::{Communicator, Operation};
use crate::driver::{Claim, DeviceBuffer, Exposure, FlagList, HostFlag, Queue};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cuda::{MOST_RANKS, PacketGroup, PacketKernels};
use crate::memory::Cuda;

/// A group of kernels with the mailboxes of all ranks, mapped for the kernels of this one. Mailboxes stay in place until every rank has
/// dropped its own connection ([`Exposure`]).
#[derive(Debug)]
pub(super) struct PacketConnection {
    pub(super) group: PacketGroup,
    _exposure: Exposure,
    _abort: Arc<HostFlag>,
}

impl PacketConnection {
    /// Maps mailboxes for tensors of up to `bytes` bytes, and loads the kernels; every rank must call it. `None`, on every rank, unless
    /// there are two to eight ranks, whose memory the kernels of all can access.
    pub(super) fn new(
        of: Operation,
        comm: &dyn Communicator<Cuda>,
        queue: &Queue,
        (bytes, kernels): (usize, PacketKernels),
    ) -> Result<Option<Self>> {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let Some(sharing) = comm.sharing().filter(|_| (2..=MOST_RANKS).contains(&world_size)) else { return Ok(None) };
        let prepared = (|| {
            let mailbox = DeviceBuffer::zeroed(queue, DType::F64, PacketGroup::mailbox_len(bytes, world_size))?;
            let flags = FlagList::new(queue, world_size)?;
            // The mailbox is cleared before any peer can write to it, since mapping comes later.
            queue.synchronize()?;
            Ok((mailbox, flags))
        })();
        let (mailbox, flags) = all_prepared(of, comm, prepared)?;
        let Some(mut exposure) = expose(sharing, queue, rank, flags)? else { return Ok(None) };
        let shared = share(sharing, &mut exposure, mailbox.memory(), mailbox.as_slice())?;
        let Some((mailboxes, abort, sharers)) = shared else { return Ok(None) };
        let group = Claim::new(queue, abort.address(), sharers).map_err(Into::into).and_then(|claim| {
            // SAFETY: the exposure keeps the mailboxes of all ranks, which have the length for these bytes and are cleared; the flag lives as
            // long.
            unsafe { PacketGroup::new(queue, kernels, (rank, abort.address()), (&mailboxes, bytes), claim) }
        });
        // The peers' kernels write to this memory without waiting, so no rank continues before all have reached this point.
        let group = all_prepared(of, comm, group)?;
        Ok(Some(Self { group, _exposure: exposure, _abort: abort }))
    }

    /// Adds this connection to the recording of the queue's work, if there is one, so that the graph keeps it.
    pub(super) fn keep_for_recording(self: &Arc<Self>, queue: &Queue) -> Result<()> {
        Ok(queue.keep_for_recording(|| self.clone())?)
    }
}
