//! Setup of operations whose kernels access the gradient buffers of all ranks.
//!
//! It maps and describes memory; the operations define the kernels that use it.

use std::sync::Arc;

use crate::buffer::GradientBuffer;
use crate::call_comparison::all_prepared;
use crate::comm::Communicator;
use crate::driver::{Claim, DeviceBuffer, DeviceMemory, FlagList, HostFlag, Kernels, PeerSharedMemory, Queue};
use crate::dtype::DType;
use crate::error::{Error, Operation, Result};
use crate::kernels::cuda::{MOST_RANKS, PeerAddresses, PeerGroup, PeerKernel, PeerSums};
use crate::memory::{Cuda, PeerMemory, expose, share};

/// The gradient buffers of all ranks, mapped for the kernels of this one.
///
/// It shares ownership of this rank's buffer with the user: if the buffer is dropped first, or this object while the peers continue, the
/// memory stays in place until every rank has dropped its own connection ([`PeerSharedMemory`]).
#[derive(Debug)]
pub(super) struct PeerConnection {
    pub(super) group: PeerGroup,
    /// This rank's arena, which the peers have mapped.
    arena: Arc<DeviceMemory>,
    /// The memory behind the group's addresses.
    _shared_memory: PeerSharedMemory,
    _abort: Arc<HostFlag>,
}

/// The resources whose allocation can fail on one rank alone.
struct PreparedPeer<T> {
    flags: FlagList,
    mailbox: DeviceBuffer,
    received: DeviceBuffer,
    rest: T,
}

impl PeerConnection {
    /// Whether there are at least two ranks and one element, and at most as many ranks as the kernels support; the same on every rank.
    pub(super) fn is_possible(comm: &dyn Communicator<Cuda>, buffer: &GradientBuffer<Cuda>) -> bool {
        (2..=MOST_RANKS).contains(&comm.world_size()) && buffer.table().arena_len() > 0
    }

    /// Maps every rank's buffer; every rank must call it. `None`, on every rank, if there are too many ranks or a buffer cannot be
    /// accessed. The kernels exchange `sums`; they are loaded here. The result of `prepare` is returned too; if it fails on one rank, all
    /// ranks return an error.
    pub(super) fn new<T>(
        operation: Operation,
        comm: &dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        (kernel, sums): (PeerKernel, PeerSums),
        prepare: impl FnOnce() -> Result<T>,
    ) -> Result<Option<(Arc<Self>, T)>> {
        let (rank, world_size, table, queue) = (comm.rank(), comm.world_size(), buffer.table(), buffer.queue());
        let Some(peers) = comm.sharing().filter(|_| Self::is_possible(comm, buffer)) else { return Ok(None) };
        let (dtype, shard_len) = (table.dtype(), table.shard_len());
        let shard_bytes = shard_len * dtype.size_bytes();
        let prepared: Result<_> = (|| {
            let rest = prepare()?;
            let mailbox_len = PeerGroup::mailbox_len(sums, world_size, shard_bytes);
            let mailbox = DeviceBuffer::zeroed(queue, DType::F64, mailbox_len)?;
            let received = DeviceBuffer::zeroed(queue, dtype, shard_len * (world_size - 1))?;
            let flags = FlagList::new(queue, world_size)?;
            // The mailbox is cleared before any peer can write to it, since mapping comes later.
            queue.synchronize()?;
            Ok(PreparedPeer { flags, mailbox, received, rest })
        })();
        let PreparedPeer { flags, mailbox, received, rest } = all_prepared(operation, comm, prepared)?;

        let Some(mut shared_memory) = expose(peers, queue, rank, flags)? else { return Ok(None) };
        let mut share = |memory: &Arc<DeviceMemory>, data| share(peers, &mut shared_memory, memory, data);
        let Some((mailboxes, ..)) = share(mailbox.memory(), mailbox.as_slice())? else { return Ok(None) };
        let Some((slots, ..)) = share(received.memory(), received.as_slice())? else { return Ok(None) };
        let Some((arenas, abort, sharers)) = share(buffer.memory(), buffer.as_slice())? else { return Ok(None) };

        // A rank has a slot for every peer, in rank order.
        let offset = |owner: usize, peer: usize| (peer - usize::from(peer > owner)) * shard_bytes;
        let own_arena = arenas[rank];
        let of_ranks = |address: &dyn Fn(usize) -> u64| (0..world_size).map(address).collect::<Vec<u64>>();
        let own_shard = own_arena + (rank * shard_bytes) as u64;
        let addresses = PeerAddresses {
            rank,
            abort: abort.address(),
            shard_bytes,
            mailboxes,
            shards: of_ranks(&|peer| arenas[peer] + (rank * shard_bytes) as u64),
            sources: of_ranks(&|peer| own_arena + (peer * shard_bytes) as u64),
            slots: of_ranks(&|peer| if peer == rank { 0 } else { slots[peer] + offset(peer, rank) as u64 }),
            copies: of_ranks(&|peer| {
                if peer == rank { own_shard } else { received.as_slice().address() + offset(rank, peer) as u64 }
            }),
        };
        let group = Claim::new(queue, abort.address(), Kernels::Large, sharers).map_err(Into::into).and_then(|claim| {
            // SAFETY: the shared memory keeps all memory behind the addresses. Shards lie in arenas, slots have the length of a shard, and
            // arenas' shards begin at multiples of 256 bytes.
            unsafe { PeerGroup::new(queue, (kernel, dtype), sums, &addresses, claim) }
        });
        // The peers' kernels write to this memory without waiting, so no rank continues before all have reached this point.
        let group = all_prepared(operation, comm, group)?;
        let arena = buffer.memory().clone();
        Ok(Some((Arc::new(Self { group, arena, _shared_memory: shared_memory, _abort: abort }), rest)))
    }

    /// Adds this connection to the recording of the queue's work, if there is one, so that the graph keeps it.
    pub(super) fn keep_for_recording(self: &Arc<Self>, queue: &Queue) -> Result<()> {
        Ok(queue.keep_for_recording(|| self.clone())?)
    }

    /// Refuses a buffer that the peers have not mapped.
    pub(super) fn check(&self, operation: &'static str, buffer: &GradientBuffer<Cuda>) -> Result<()> {
        if Arc::ptr_eq(buffer.memory(), &self.arena) {
            return Ok(());
        }
        let reason =
            "this is another buffer than the one for which the operation was made, and which the peers have mapped: \
                      pass that one, or make the operation anew for this one"
                .into();
        Err(Error::InvalidArgument { operation, reason })
    }
}

/// The peers of a group whose kernels reach each other's memory.
pub(super) fn peers(comm: &dyn Communicator<Cuda>) -> &dyn PeerMemory {
    comm.sharing().expect("a group of kernels is connected over ranks that share memory")
}
