//! Setup of kernels that send packets to the mailboxes of all ranks (in the manner of NCCL's LL protocol).
//!
//! It maps the mailboxes; the launches are of its users, which also say how ranks tell each other that one of them cannot prepare its part.

use std::sync::Arc;

use gradsync_device::abi::EMPTY_BYTE;

use crate::driver::{Claim, DeviceBuffer, FlagList, HostFlag, Kernels, PeerSharedMemory, Queue};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cuda::{MOST_RANKS, MailboxSize, PacketGroup};
use crate::memory::{PeerMemory, expose, share};

/// A group of kernels with the mailboxes of all ranks, mapped for the kernels of this one. Mailboxes stay in place until every rank has
/// dropped its own connection ([`PeerSharedMemory`]).
#[derive(Debug)]
pub(crate) struct PacketConnection {
    pub(crate) group: PacketGroup,
    _shared_memory: PeerSharedMemory,
    _abort: Arc<HostFlag>,
}

/// Tells the other ranks the outcome of a step that may fail on this rank alone. Returns whether it succeeded on all of them, or the error
/// for every rank, where a failure is one.
pub(crate) type Agree<'a> = dyn Fn(Result<()>) -> Result<bool> + 'a;

impl PacketConnection {
    /// Maps mailboxes of a size, and loads the kernels with these entry points; every rank must call it. `None`, on every rank, unless
    /// there are two to eight ranks, whose memory the kernels of all can access, and all ranks could prepare their parts.
    pub(crate) fn new(
        (rank, world_size): (usize, usize),
        sharing: &dyn PeerMemory,
        queue: &Queue,
        size: MailboxSize,
        (kernels, entries): (Kernels, &[String]),
        agree: &Agree<'_>,
    ) -> Result<Option<Self>> {
        if !(2..=MOST_RANKS).contains(&world_size) {
            return Ok(None);
        }
        let prepared = (|| {
            let mailbox = DeviceBuffer::filled(queue, DType::F64, size.len(world_size), EMPTY_BYTE)?;
            let flags = FlagList::new(queue, world_size)?;
            // The mailbox is emptied before any peer can write to it, since mapping comes later.
            queue.synchronize()?;
            Ok((mailbox, flags))
        })();
        let Some((mailbox, flags)) = on_all(agree, prepared)? else { return Ok(None) };
        let Some(mut shared_memory) = expose(sharing, queue, rank, flags)? else { return Ok(None) };
        let shared = share(sharing, &mut shared_memory, mailbox.memory(), mailbox.as_slice())?;
        let Some((mailboxes, abort, sharers)) = shared else { return Ok(None) };
        let group = Claim::new(queue, abort.address(), kernels, sharers).map_err(Into::into).and_then(|claim| {
            // SAFETY: the shared memory keeps the mailboxes of all ranks, which have this size and are empty; the flag lives as long.
            unsafe { PacketGroup::new(queue, entries, (rank, abort.address()), (&mailboxes, size), claim) }
        });
        // The peers' kernels write to this memory without waiting, so no rank continues before all have reached this point.
        let group = on_all(agree, group)?;
        Ok(group.map(|group| Self { group, _shared_memory: shared_memory, _abort: abort }))
    }

    /// Adds this connection to the recording of the queue's work, if there is one, so that the graph keeps it.
    pub(crate) fn keep_for_recording(self: &Arc<Self>, queue: &Queue) -> Result<()> {
        Ok(queue.keep_for_recording(|| self.clone())?)
    }
}

/// The prepared part, if all ranks have theirs.
fn on_all<T>(agree: &Agree<'_>, prepared: Result<T>) -> Result<Option<T>> {
    let (prepared, outcome) = match prepared {
        Ok(prepared) => (Some(prepared), Ok(())),
        Err(error) => (None, Err(error)),
    };
    Ok(if agree(outcome)? { prepared } else { None })
}
