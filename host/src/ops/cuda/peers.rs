//! Setting up operations whose kernels reach into the gradient buffers of all ranks.
//!
//! It maps and describes memory; what the kernels do with it is the operations' business.

use crate::buffer::DeviceGradientBuffer;
use crate::comm::{DeviceCommunicator, SharedMemory};
use crate::driver::DeviceBuffer;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::cuda::{MOST_RANKS, PeerAddresses, PeerGroup, PeerKernel};

/// The gradient buffers of all ranks, mapped for the kernels of this one.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) group: PeerGroup,
    /// This rank's arena, which the peers have mapped.
    arena: u64,
    /// What the group's addresses lead to.
    _shared: [SharedMemory; 3],
    _mailbox: DeviceBuffer,
    _received: DeviceBuffer,
}

impl Connection {
    /// Whether there are ranks and elements enough, and no more ranks than the kernels take; the same on every rank.
    pub(super) fn is_possible(comm: &dyn DeviceCommunicator, buffer: &DeviceGradientBuffer) -> bool {
        (2..=MOST_RANKS).contains(&comm.world_size()) && buffer.table().arena_len() > 0
    }

    /// Maps every rank's buffer; every rank must call it. `None`, on every rank, if there are too many of them or some cannot be
    /// reached. The kernels hand out sums of `layers` layers; they are loaded here.
    pub(super) fn new(
        comm: &dyn DeviceCommunicator,
        buffer: &DeviceGradientBuffer,
        kernel: PeerKernel,
        layers: usize,
    ) -> Result<Option<Self>> {
        let (rank, world_size, table, queue) = (comm.rank(), comm.world_size(), buffer.table(), buffer.queue());
        if !Self::is_possible(comm, buffer) {
            return Ok(None);
        }
        let (dtype, shard_len) = (table.dtype(), table.shard_len());
        let window_bytes = shard_len * dtype.size_bytes();
        let mailbox_len = PeerGroup::mailbox_len(layers, world_size, window_bytes);
        let mailbox = DeviceBuffer::zeroed(queue, DType::F64, mailbox_len)?;
        let received = DeviceBuffer::zeroed(queue, dtype, shard_len * (world_size - 1))?;
        // Cleared before any peer can write to it: mapping it comes after.
        queue.synchronize()?;
        let Some(mailboxes) = comm.share(mailbox.as_slice())? else { return Ok(None) };
        let Some(arenas) = comm.share(buffer.as_slice())? else { return Ok(None) };
        let Some(slots) = comm.share(received.as_slice())? else { return Ok(None) };

        // A rank has a slot for every peer, in rank order.
        let place = |owner: usize, peer: usize| (peer - usize::from(peer > owner)) * window_bytes;
        let own_arena = arenas.addresses()[rank];
        let of_ranks = |address: &dyn Fn(usize) -> u64| (0..world_size).map(address).collect::<Vec<u64>>();
        let own_window = own_arena + (rank * window_bytes) as u64;
        let addresses = PeerAddresses {
            rank,
            abort: arenas.abort_flag(),
            window_bytes,
            mailboxes: mailboxes.addresses().to_vec(),
            windows: of_ranks(&|peer| arenas.addresses()[peer] + (rank * window_bytes) as u64),
            sources: of_ranks(&|peer| own_arena + (peer * window_bytes) as u64),
            slots: of_ranks(&|peer| if peer == rank { 0 } else { slots.addresses()[peer] + place(peer, rank) as u64 }),
            copies: of_ranks(&|peer| {
                if peer == rank { own_window } else { received.as_slice().address() + place(rank, peer) as u64 }
            }),
        };
        // SAFETY: everything that the addresses lead to is kept in the object returned; windows and slots are shards of arenas and as long,
        // which begin at multiples of 256 bytes.
        let group = unsafe { PeerGroup::new(queue, (kernel, dtype), layers, &addresses) }?;
        // The peers' kernels wait for nobody before they write here: no rank goes on unless all have come so far and keep their memory.
        comm.gather_words(&[rank as u64])?;
        Ok(Some(Self {
            group,
            arena: buffer.as_slice().address(),
            _shared: [mailboxes, arenas, slots],
            _mailbox: mailbox,
            _received: received,
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
