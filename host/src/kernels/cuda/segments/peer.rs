//! Adasum and ordered sums by kernels that write to the peers' memory ([`PeerGroup`]), without transfers by a transport.
//!
//! This module only launches kernels; the transport knows the peers, and monitors them.

use std::ops::Range;

use gradsync_device::abi::{GRAM_WIDTHS, LaunchBounds, MOST_PEERS, Peers, peer_senders};

use super::SegmentWorkspace;
use super::grid::Grids;
use crate::driver::{Argument, Claim, DeviceBuffer, Queue};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::cuda::{pointer, pointer_mut, upload_words, words_of};
use crate::plan::divided_layers::DividedLayers;

/// One rank's view of a group whose kernels access each other's memory, on the device.
#[derive(Debug)]
pub(crate) struct PeerGroup {
    queue: Queue,
    /// The name of its kernel.
    entry: String,
    /// The number of ranks that the kernel is compiled for.
    width: usize,
    peers: Peers,
    /// This group's share of the GPU.
    claim: Claim,
    table: DeviceBuffer,
    /// The counter of runs.
    _runs: DeviceBuffer,
}

/// The addresses of a [`PeerGroup`]: each list has one address per rank, in rank order; see `gradsync_device::abi::Peers`.
#[derive(Debug)]
pub(crate) struct PeerAddresses {
    pub(crate) rank: usize,
    pub(crate) abort: u64,
    pub(crate) shard_bytes: usize,
    pub(crate) mailboxes: Vec<u64>,
    pub(crate) shards: Vec<u64>,
    pub(crate) sources: Vec<u64>,
    pub(crate) slots: Vec<u64>,
    pub(crate) copies: Vec<u64>,
}

/// The limit of ranks of such a group.
pub(crate) const MOST_RANKS: usize = MOST_PEERS;

/// The width of the narrowest kernels that support all ranks.
pub(in crate::kernels::cuda) fn width(world_size: usize) -> usize {
    GRAM_WIDTHS.into_iter().find(|&width| width >= world_size).expect("at most eight ranks")
}

/// The kernel that ends on every rank once all ranks have written their results.
const BARRIER: &str = "peer_barrier";

/// The operation of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerKernel {
    /// Sums in rank order: [`PeerGroup::reduce`].
    Reduce,
    /// Adasum: [`SegmentWorkspace::adasum_of_peers`].
    Adasum,
}

/// The numbers of layers, and of chunks of divided layers, whose sums the ranks of a group exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PeerSums {
    layers: usize,
    rows: usize,
    /// The largest number of chunks of a layer.
    most_chunks: usize,
}

impl PeerSums {
    /// The numbers for these layers, divided into shards.
    pub(crate) fn of(layers: &DividedLayers) -> Self {
        Self { layers: layers.layers(), rows: layers.rows() - layers.layers(), most_chunks: layers.most_chunks() }
    }
}

impl PeerKernel {
    /// The name of the entry point of this width.
    fn entry(self, dtype: DType, width: usize) -> String {
        let family = match self {
            Self::Reduce => "peer_reduce",
            Self::Adasum => "peer_adasum",
        };
        format!("{family}_{dtype}_p{width}")
    }
}

impl PeerGroup {
    /// The number of `f64` elements in the mailbox of a rank of a group with these sums and shards of `shard_bytes` bytes.
    pub(crate) fn mailbox_len(sums: PeerSums, world_size: usize, shard_bytes: usize) -> usize {
        Peers::of(sums.layers, sums.rows, world_size, shard_bytes).mailbox_bytes() / DType::F64.size_bytes()
    }

    /// Loads the kernels of the group for shards of `dtype`, before any rank waits for them in a kernel, and uploads their tables to
    /// the device.
    ///
    /// # Safety
    /// Every address is mapped on `queue`'s device as long as this lives and its work is in the queue. Mailboxes have
    /// [`mailbox_len`](Self::mailbox_len) elements, and are cleared before any rank's first run. Shards start at multiples of 16 bytes,
    /// and their length is one too.
    pub(crate) unsafe fn new(
        queue: &Queue,
        (kernel, dtype): (PeerKernel, DType),
        sums: PeerSums,
        addresses: &PeerAddresses,
        claim: Claim,
    ) -> Result<Self> {
        let world_size = addresses.mailboxes.len();
        if !(2..=MOST_RANKS).contains(&world_size) {
            let reason = format!("{world_size} ranks, and their kernels meet in groups of 2 to {MOST_RANKS}");
            return Err(Error::InvalidArgument { operation: "peer group", reason });
        }
        let runs = DeviceBuffer::zeroed(queue, DType::F64, 1)?;
        let eight =
            |of: &[u64]| -> [u64; MOST_PEERS] { std::array::from_fn(|rank| of.get(rank).copied().unwrap_or(0)) };
        let peers = Peers {
            rank: addresses.rank as u64,
            runs: runs.as_slice().address(),
            abort: addresses.abort,
            mailboxes: eight(&addresses.mailboxes),
            shards: eight(&addresses.shards),
            sources: eight(&addresses.sources),
            slots: eight(&addresses.slots),
            copies: eight(&addresses.copies),
            most_chunks: sums.most_chunks as u64,
            ..Peers::of(sums.layers, sums.rows, world_size, addresses.shard_bytes)
        };
        let width = width(world_size);
        let entry = kernel.entry(dtype, width);
        queue.load(&entry)?;
        queue.load(BARRIER)?;
        let table = upload_words(queue, &words_of(&[peers]))?;
        Ok(Self { queue: queue.clone(), entry, width, peers, claim, table, _runs: runs })
    }

    fn table(&self) -> Argument {
        pointer(self.table.as_slice())
    }

    /// The number of resident blocks of the kernel per multiprocessor.
    fn blocks_of_multiprocessor(&self) -> u64 {
        LaunchBounds::of_peers(self.width).blocks.into()
    }

    /// The current number of resident blocks of a launch.
    fn grid(&self) -> PeerGrid {
        PeerGrid::of(self.claim.residency_slots(self.blocks_of_multiprocessor()), self.width, &self.peers)
    }

    /// Replaces every rank's shard by the sum of all shards times a factor, in rank order, in `f64`, rounded once.
    pub(crate) fn reduce(&self, factor: f64) -> Result<()> {
        let PeerGrid { blocks, senders } = self.grid();
        // More reducers would compete with each other for the links.
        let reducers = self.peers.tiles().min(blocks);
        let arguments = [self.table(), factor.into(), senders.into(), reducers.into()];
        // SAFETY: the promise made to `new`.
        unsafe { self.launch(blocks, senders + reducers, &arguments) }
    }

    /// Launches the group's kernel with `jobs` jobs, and makes the queue wait until all ranks have written their results.
    ///
    /// # Safety
    /// The conditions of [`Queue::launch`].
    unsafe fn launch(&self, blocks: u64, jobs: u64, arguments: &[Argument]) -> Result<()> {
        let blocks = blocks.min(jobs);
        self.claim.keep_for_recording(&self.queue, self.blocks_of_multiprocessor(), blocks)?;
        // SAFETY: the caller's promise.
        unsafe { self.queue.launch(&self.entry, blocks, arguments) }?;
        self.barrier()
    }

    /// Makes the queue wait until all ranks have written their results.
    fn barrier(&self) -> Result<()> {
        // SAFETY: the promise made to `new`.
        Ok(unsafe { self.queue.launch(BARRIER, 1, &[self.table()]) }?)
    }
}

/// The number of blocks of a launch, and of its jobs that send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PeerGrid {
    blocks: u64,
    senders: u64,
}

impl PeerGrid {
    /// For a launch of `blocks` resident blocks. Senders get a fixed share of them, which was tuned with all slots of an H200.
    fn of(blocks: u64, width: usize, peers: &Peers) -> Self {
        const MULTIPROCESSORS: u64 = 132;
        let all = MULTIPROCESSORS * u64::from(LaunchBounds::of_peers(width).blocks);
        let most = (peer_senders(width, peers.world_size) * blocks / all).max(1);
        Self { blocks, senders: most.min(peers.tiles() * (peers.world_size - 1)) }
    }
}

impl SegmentWorkspace {
    /// Like [`of_shard`](Self::of_shard), for [`adasum_of_peers`](Self::adasum_of_peers).
    pub(crate) fn for_peers(
        queue: &Queue,
        layers: &DividedLayers,
        shard: Range<usize>,
        world_size: usize,
    ) -> Result<Self> {
        let len = shard.len();
        Self::on(|queue| Grids::for_peers(queue, layers, shard), queue, layers, len, world_size)
    }

    /// Computes Adasum of the ranks' shards in each layer, in place in every rank's arena. The shards have the length and the segments of
    /// these layers, and the group was created for these layers.
    pub(crate) fn adasum_of_peers(&mut self, group: &PeerGroup, dtype: DType) -> Result<()> {
        let (grid, sums) = (self.grids.of_reductions(dtype), self.grids.of_sums(dtype));
        let PeerGrid { blocks, senders } = group.grid();
        let arguments = [
            group.table(),
            pointer_mut(&self.weights.as_mut_slice()),
            pointer_mut(&self.tree.as_mut_slice()),
            pointer_mut(&self.cancelled.as_mut_slice()),
            pointer(self.short.as_slice()),
            pointer_mut(&self.totals.as_mut_slice()),
            pointer_mut(&self.partials.as_mut_slice()),
            grid.spans(),
            self.count.into(),
            grid.blocks.into(),
            grid.chunks.into(),
            sums.spans(),
            sums.blocks.into(),
            sums.block_len.into(),
            senders.into(),
        ];
        let jobs = senders + grid.blocks + group.peers.teams() as u64 + sums.blocks;
        // SAFETY: the promise made to `PeerGroup::new`; the workspace belongs to these layers.
        unsafe { group.launch(blocks, jobs, &arguments) }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use gradsync_device::abi::Row;
    use gradsync_device::math::adasum::products;
    use gradsync_device::math::precise::SUMS;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn mailbox_len_holds_rows_that_do_not_overlap(
            layers in 0usize..40, rows in 0usize..100, world_size in 2usize..=MOST_RANKS, shard in 0usize..10_000,
        ) {
            let peers = Peers::of(layers, rows, world_size, shard * 16);
            let flags = [Row::End].into_iter()
                .chain((0..peers.teams()).flat_map(|team| [Row::Weights(team), Row::Progress(team)]))
                .chain((0..peers.tiles() as usize).map(Row::Tile));
            let mut parts: Vec<Range<usize>> = flags
                .flat_map(|row| (0..MOST_RANKS).map(move |rank| peers.flag(row, rank)))
                .map(|flag| flag..flag + 4)
                .collect();
            let numbers = |begin: usize, len: usize| begin..begin + len * 8;
            for rank in 0..world_size {
                parts.push(numbers(peers.products_of(rank), layers * products(world_size)));
                parts.push(numbers(peers.pairs_of(rank), layers * SUMS * (world_size - 1)));
            }
            // Each sum of each chunk has an index of its own.
            let in_rows = |begin: u64, sums: usize| {
                (0..sums).flat_map(move |sum| (0..rows).map(move |row| peers.in_rows(begin, sum, row as u64) as usize))
            };
            parts.extend(in_rows(peers.product_rows, products(world_size)).map(|begin| numbers(begin, 1)));
            parts.extend(in_rows(peers.pair_rows, SUMS * (world_size - 1)).map(|begin| numbers(begin, 1)));
            parts.retain(|part| !part.is_empty());
            parts.sort_by_key(|part| part.start);
            prop_assert!(parts.windows(2).all(|pair| pair[0].end <= pair[1].start));
            let end = parts.last().map_or(0, |part| part.end);
            let mailbox = PeerGroup::mailbox_len(PeerSums { layers, rows, most_chunks: 0 }, world_size, shard * 16) * 8;
            prop_assert!(end <= mailbox, "{end} of {mailbox} bytes");
            prop_assert!(peers.mailbox_bytes() % 8 == 0);
        }

        #[test]
        fn tiles_cover_a_shard(shard in 0u64..1 << 40) {
            let bytes = shard * 16;
            let peers = Peers::of(1, 0, 2, bytes as usize);
            let tile = 1u64 << peers.tile_shift;
            prop_assert!((4096..=65536).contains(&tile));
            prop_assert!(peers.tiles() * tile >= bytes);
            prop_assert!(peers.tiles() == 0 || (peers.tiles() - 1) * tile < bytes);
        }
    }

    #[test]
    fn peer_senders_leave_blocks_to_the_others() {
        for world_size in 2..=MOST_RANKS {
            let (width, peers) = (width(world_size), Peers::of(1, 0, world_size, 1 << 26));
            let all = 132 * u64::from(LaunchBounds::of_peers(width).blocks);
            assert_eq!(PeerGrid::of(all, width, &peers).senders, peer_senders(width, world_size as u64));
            for blocks in 2..=all {
                let PeerGrid { senders, .. } = PeerGrid::of(blocks, width, &peers);
                assert!((1..blocks).contains(&senders), "{world_size} ranks on {blocks} blocks: {senders}");
            }
            assert_eq!(PeerGrid::of(1, width, &peers), PeerGrid { blocks: 1, senders: 1 });
            assert_eq!(PeerGrid::of(1, width, &Peers::of(1, 0, world_size, 0)).senders, 0, "nothing to send");
        }
    }
}
