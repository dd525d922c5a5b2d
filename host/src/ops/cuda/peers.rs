//! Setting up operations whose kernels reach into the gradient buffers of all ranks.
//!
//! It maps and describes memory; what the kernels do with it is the operations' business.

use std::cmp::Ordering;

use crate::buffer::DeviceGradientBuffer;
use crate::comm::{DeviceCommunicator, SharedMemory};
use crate::driver::DeviceBuffer;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::cuda::{MOST_RANKS, PeerAddresses, PeerGroup};

/// The gradient buffers of all ranks, mapped for the kernels of this one.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) group: PeerGroup,
    /// This rank's arena, which the peers have mapped.
    arena: u64,
    /// What the group's addresses lead to.
    _shared: [SharedMemory; 2],
    _mailbox: DeviceBuffer,
    _received: Option<DeviceBuffer>,
}

impl Connection {
    /// Maps every rank's buffer; every rank must call it. `None`, on every rank, if there are too many of them or some cannot be
    /// reached. The kernels hand out sums of `layers` layers; `keeps_windows` says whether they keep the peers' windows.
    pub(super) fn new(
        comm: &dyn DeviceCommunicator,
        buffer: &DeviceGradientBuffer,
        layers: usize,
        keeps_windows: bool,
    ) -> Result<Option<Self>> {
        let (rank, world_size, table, queue) = (comm.rank(), comm.world_size(), buffer.table(), buffer.queue());
        if world_size == 1 || world_size > MOST_RANKS || table.arena_len() == 0 {
            return Ok(None);
        }
        let mailbox = DeviceBuffer::zeroed(queue, DType::F64, PeerGroup::mailbox_len(layers, world_size))?;
        // Cleared before any peer can write to it: mapping it comes after.
        queue.synchronize()?;
        let Some(mailboxes) = comm.share(mailbox.as_slice())? else { return Ok(None) };
        let Some(arenas) = comm.share(buffer.as_slice())? else { return Ok(None) };

        let (dtype, shard_len) = (table.dtype(), table.shard_len());
        let bytes = (shard_len * dtype.size_bytes()) as u64;
        let windows: Vec<u64> = arenas.addresses().iter().map(|arena| arena + rank as u64 * bytes).collect();
        let others = if keeps_windows { world_size - 1 } else { 0 };
        let received = DeviceBuffer::zeroed(queue, dtype, shard_len * others)?;
        let copies = (0..world_size).map(|peer| match peer.cmp(&rank) {
            Ordering::Equal => windows[rank],
            Ordering::Less => received.as_slice().address() + peer as u64 * bytes,
            Ordering::Greater => received.as_slice().address() + (peer as u64 - 1) * bytes,
        });
        let addresses = PeerAddresses {
            rank,
            abort: arenas.abort_flag(),
            mailboxes: mailboxes.addresses().to_vec(),
            copies: if keeps_windows { copies.collect() } else { Vec::new() },
            windows,
        };
        // SAFETY: everything that the addresses lead to is kept in the object returned; windows and copies are shards of arenas, which
        // begin at multiples of 256 bytes.
        let group = unsafe { PeerGroup::new(queue, &addresses) }?;
        Ok(Some(Self {
            group,
            arena: buffer.as_slice().address(),
            _shared: [mailboxes, arenas],
            _mailbox: mailbox,
            _received: keeps_windows.then_some(received),
        }))
    }

    /// Refuses another buffer than the one that the peers have mapped.
    pub(super) fn check(&self, operation: &'static str, buffer: &DeviceGradientBuffer) -> Result<()> {
        if buffer.as_slice().address() == self.arena {
            return Ok(());
        }
        let reason = "the peers have mapped another buffer, the one that this was made for".into();
        Err(Error::InvalidArgument { operation, reason })
    }
}
