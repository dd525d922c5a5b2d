//! Sums of small tensors by kernels that send packets to the mailboxes of peers ([`PacketGroup`]), in one launch.
//!
//! This module only launches kernels; the transport knows the peers, and monitors them.

use gradsync_device::abi::{Mailboxes, PACKET_BLOCKS, PACKET_BYTES, PACKET_THREADS, THREADS, WARP};

use super::segments::width;
use super::{pointer, upload_words, words_of};
use crate::driver::{Argument, Claim, DeviceBuffer, DeviceSlice, Grid, Queue};
use crate::dtype::DType;
use crate::error::Result;

/// The number of times that data are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Shots {
    /// Every rank sends all data to all others.
    One,
    /// Every rank sends each other one its shard, and then the sums of its own shard to all.
    Two,
}

impl Shots {
    /// The name of the kernel.
    fn entry(self, dtype: DType, width: usize) -> String {
        let family = if self == Self::One { "one_shot" } else { "two_shot" };
        format!("{family}_{dtype}_p{width}")
    }
}

/// The sizes of tensors, in bytes, up to which packets carry them; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PacketLimits {
    pub(crate) most_bytes: usize,
    /// The largest size at which every rank sends all data to all others.
    pub(crate) one_shot_bytes: usize,
}

impl PacketLimits {
    /// Packets carry nothing.
    pub(crate) const NONE: Self = Self { most_bytes: 0, one_shot_bytes: 0 };

    /// The number of shots for `bytes` bytes, if packets carry them.
    pub(crate) fn shots(self, bytes: usize) -> Option<Shots> {
        let is_carried = (1..=self.most_bytes).contains(&bytes);
        is_carried.then_some(if bytes <= self.one_shot_bytes { Shots::One } else { Shots::Two })
    }

    /// These limits, except where another one is given.
    pub(crate) fn or_given(self, most_bytes: Option<usize>, one_shot_bytes: Option<usize>) -> Self {
        Self {
            most_bytes: most_bytes.unwrap_or(self.most_bytes),
            one_shot_bytes: one_shot_bytes.unwrap_or(self.one_shot_bytes),
        }
    }

    /// The smaller ones of both limits.
    pub(crate) fn min(self, other: Self) -> Self {
        Self {
            most_bytes: self.most_bytes.min(other.most_bytes),
            one_shot_bytes: self.one_shot_bytes.min(other.one_shot_bytes),
        }
    }
}

/// The size of the mailboxes of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MailboxSize {
    pub(super) slot_packets: usize,
    pub(super) common_packets: usize,
}

impl MailboxSize {
    /// For sums of tensors of up to `bytes` bytes.
    pub(crate) fn for_sums(bytes: usize, world_size: usize) -> Self {
        Self { slot_packets: Mailboxes::slot_packets_for(bytes, world_size), common_packets: 0 }
    }

    /// The number of `f64` elements of a mailbox.
    pub(crate) fn len(self, world_size: usize) -> usize {
        Mailboxes::mailbox_bytes(self.slot_packets, self.common_packets, world_size) / DType::F64.size_bytes()
    }
}

/// The names of the kernels of sums of any dtype over so many ranks.
pub(crate) fn sum_entries(world_size: usize) -> Vec<String> {
    let width = width(world_size);
    let both = |dtype| [Shots::One, Shots::Two].map(|shots: Shots| shots.entry(dtype, width));
    DType::FLOATS.into_iter().flat_map(both).collect()
}

/// One rank's view of a group whose kernels send each other packets, on the device.
#[derive(Debug)]
pub(crate) struct PacketGroup {
    queue: Queue,
    world_size: usize,
    slot_packets: usize,
    /// This group's share of the GPU.
    claim: Claim,
    table: DeviceBuffer,
}

impl PacketGroup {
    /// Loads the kernels with these names, before any rank waits for them in a kernel, and uploads the table of the group of `rank`.
    /// `mailboxes` are the addresses of all ranks' mailboxes, in rank order.
    ///
    /// # Safety
    /// There are two to eight mailboxes of [`MailboxSize::len`] elements, mapped on `queue`'s device as long as this lives and its work is in
    /// the queue. All their bytes are [`EMPTY_BYTE`](gradsync_device::abi::EMPTY_BYTE) before any rank's first call. `abort` is the address
    /// of a flag that lives as long.
    pub(crate) unsafe fn new(
        queue: &Queue,
        kernels: &[String],
        (rank, abort): (usize, u64),
        (mailboxes, size): (&[u64], MailboxSize),
        claim: Claim,
    ) -> Result<Self> {
        let world_size = mailboxes.len();
        kernels.iter().try_for_each(|entry| queue.load(entry))?;
        let group = Mailboxes {
            rank: rank as u64,
            world_size: world_size as u64,
            abort,
            slot_packets: size.slot_packets as u64,
            common_packets: size.common_packets as u64,
            mailboxes: std::array::from_fn(|rank| mailboxes.get(rank).copied().unwrap_or(0)),
        };
        // The counters follow the group.
        let table = upload_words(queue, &[&words_of(&[group])[..], &[0]].concat())?;
        // Launches may be in other queues.
        queue.synchronize()?;
        Ok(Self { queue: queue.clone(), world_size, slot_packets: size.slot_packets, claim, table })
    }

    /// The largest tensor that these shots reduce, in bytes.
    pub(crate) fn most_bytes(&self, shots: Shots) -> usize {
        match shots {
            Shots::One => self.slot_packets * PACKET_BYTES,
            Shots::Two => self.slot_packets / 2 * self.world_size * PACKET_BYTES,
        }
    }

    /// Writes the sum of all ranks' sources times a factor to `destination`, in rank order, in `f64`, rounded once.
    ///
    /// # Safety
    /// The source is not empty and has at most [`most_bytes`](Self::most_bytes) bytes. The destination has its length, belongs to the same
    /// queue, and is either disjoint from it or the same memory. Launches of a group run one after the other. Every rank calls it with a
    /// source of the same length and dtype and with the same shots.
    pub(crate) unsafe fn sum(
        &self,
        destination: u64,
        source: DeviceSlice<'_>,
        factor: f64,
        shots: Shots,
    ) -> Result<()> {
        let packets = (source.len() * source.dtype().size_bytes()).div_ceil(PACKET_BYTES);
        let of_rank = if shots == Shots::One { packets } else { packets.div_ceil(self.world_size) };
        let grid = self.grid(source.queue(), of_rank)?;
        let entry = shots.entry(source.dtype(), width(self.world_size));
        let arguments = [
            self.table(),
            Argument::Pointer(destination),
            pointer(source),
            source.len().into(),
            factor.into(),
            grid.blocks.into(),
        ];
        // SAFETY: the caller's promise, and the promise made to `new`.
        Ok(unsafe { self.queue.launch_into(source.queue(), &entry, grid, &arguments) }?)
    }

    /// The description of the group as a kernel parameter.
    pub(super) fn table(&self) -> Argument {
        pointer(self.table.as_slice())
    }

    /// The blocks, at most so many, of a launch whose blocks wait for each other; a recorded launch keeps their slots.
    pub(super) fn blocks_that_wait(&self, queue: &Queue, most: u64) -> Result<u64> {
        let blocks = most.min(self.claim.residency_slots(1));
        self.claim.keep_for_recording(queue, 1, blocks)?;
        Ok(blocks)
    }

    /// Launches a kernel of the group.
    ///
    /// # Safety
    /// The conditions of [`Queue::launch`]; the kernel was loaded with the group.
    pub(super) unsafe fn launch(&self, queue: &Queue, entry: &str, grid: Grid, arguments: &[Argument]) -> Result<()> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.queue.launch_into(queue, entry, grid, arguments) }?)
    }

    /// The blocks of a launch with this many packets for a thread each; a recorded launch keeps their slots.
    fn grid(&self, queue: &Queue, packets: usize) -> Result<Grid> {
        let slots = [PACKET_BLOCKS, 1].map(|of_multiprocessor| self.claim.residency_slots(of_multiprocessor.into()));
        let (of_multiprocessor, grid) = grid(packets as u64, slots);
        self.claim.keep_for_recording(queue, of_multiprocessor.into(), grid.blocks)?;
        Ok(grid)
    }
}

/// The blocks for so many packets, and how many of them a multiprocessor must hold, from the slots of small blocks and of blocks that have a
/// multiprocessor each. Small blocks spread over more multiprocessors. Where ranks share a GPU, the others may be more threads in all;
/// then the packets are divided among all slots, in whole warps.
fn grid(packets: u64, [small, large]: [u64; 2]) -> (u32, Grid) {
    let reach = |threads: u32, slots: u64| (u64::from(threads) * slots).min(packets);
    let (of_multiprocessor, threads, slots) = if reach(PACKET_THREADS, large) > reach(THREADS, small) {
        let share = packets.div_ceil(large).min(PACKET_THREADS.into()) as u32;
        (1, share.next_multiple_of(WARP), large)
    } else {
        (PACKET_BLOCKS, THREADS, small)
    };
    (of_multiprocessor, Grid { blocks: packets.div_ceil(threads.into()).min(slots), threads })
}

#[cfg(test)]
mod tests {
    use gradsync_device::abi::MOST_PEERS;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn mailbox_size_for_sums_holds_a_shard_twice(bytes in 1usize..1 << 24, world_size in 2usize..=MOST_PEERS) {
            let size @ MailboxSize { slot_packets, .. } = MailboxSize::for_sums(bytes, world_size);
            let shard = bytes.div_ceil(PACKET_BYTES).div_ceil(world_size);
            prop_assert!(shard <= slot_packets / 2);
            prop_assert!(slot_packets % 2 == 0);
            let group = Mailboxes {
                rank: 0, world_size: world_size as u64, abort: 0, slot_packets: slot_packets as u64, common_packets: 0,
                mailboxes: [0; MOST_PEERS],
            };
            let slots: Vec<u64> = (0..2).flat_map(|parity| (0..world_size as u64).map(move |writer| (parity, writer)))
                .map(|(parity, writer)| group.slot(parity, writer)).collect();
            let slot_bytes = (slot_packets * PACKET_BYTES) as u64;
            prop_assert!(slots.iter().enumerate().all(|(index, slot)| *slot == index as u64 * slot_bytes));
            let end = slots.len() as u64 * slot_bytes;
            prop_assert_eq!(end as usize, size.len(world_size) * 8);
        }
    }

    proptest! {
        #[test]
        fn grid_has_as_many_threads_as_packets_or_as_fit(packets in 1u64..1 << 18, small in 1u64..400, large in 1u64..133) {
            let (of_multiprocessor, Grid { blocks, threads }) = grid(packets, [small, large]);
            let slots = if of_multiprocessor == 1 { large } else { small };
            prop_assert!(blocks <= slots && threads % WARP == 0 && of_multiprocessor * threads <= PACKET_THREADS);
            let most = (u64::from(THREADS) * small).max(u64::from(PACKET_THREADS) * large);
            prop_assert!(blocks * u64::from(threads) >= packets.min(most), "{blocks} blocks of {threads}");
            let fewer = u64::from(threads - WARP) * slots;
            prop_assert!(threads == THREADS || fewer < packets, "{fewer} threads would have sufficed");
        }
    }

    #[test]
    fn shots_divide_packets_of_large_blocks_among_all_slots() {
        // Eight ranks of an H200, 256 KiB in two shots.
        assert_eq!(grid(2048, [14, 12]), (1, Grid { blocks: 11, threads: 192 }));
        assert_eq!(grid(1024, [14, 12]), (PACKET_BLOCKS, Grid { blocks: 8, threads: THREADS }));
        assert_eq!(grid(1 << 16, [14, 12]), (1, Grid { blocks: 12, threads: PACKET_THREADS }));
        assert_eq!(
            grid(1 << 16, [396, 132]),
            (PACKET_BLOCKS, Grid { blocks: 396, threads: THREADS }),
            "a GPU of its own"
        );
    }
}
