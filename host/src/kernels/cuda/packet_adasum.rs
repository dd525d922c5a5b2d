//! Adasum of small arenas by kernels that send packets to the mailboxes of peers, in one launch ([`PacketAdasum`]).
//!
//! This module only launches kernels; the operation knows the peers.

use std::array::from_fn;

use gradsync_device::abi::{
    PACKET_BYTES, PacketArena, PacketChunk, PacketChunks, THREADS, packet_adasum_threads, packet_tree,
};

use super::packet_group::{MailboxSize, PacketGroup, Shots};
use super::segments::{short_flags, width};
use super::{pointer, pointer_mut, upload_words, words_of};
use crate::driver::{Claim, DeviceBuffer, DeviceSliceMut, Grid, Queue};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cpu::Coefficients;
use crate::plan::chunks::Chunk;
use crate::plan::divided_layers::DividedLayers;

/// The division of an arena among the ranks, before there is device memory.
#[derive(Clone, Debug)]
pub(crate) struct PacketPlan {
    dtype: DType,
    world_size: usize,
    arena_len: usize,
    chunks: Vec<PacketChunk>,
    layers: Vec<PacketChunks>,
    /// The lengths of the layers in elements.
    lens: Vec<usize>,
    arena: PacketArena,
}

impl PacketPlan {
    /// A rank's plan, of a rank and the world size, for an arena with these layers that consists of a shard for each rank. In two shots each
    /// rank reduces its shard.
    pub(crate) fn new(
        layers: &DividedLayers,
        dtype: DType,
        (rank, world_size): (usize, usize),
        shard_len: usize,
        shots: Shots,
    ) -> Self {
        let arena_len = shard_len * world_size;
        let reduced_len = if shots == Shots::One { 0 } else { shard_len };
        let short = |number: usize| u32::try_from(number).expect("small arenas have less than 2^32 elements");
        let found = layers.chunks();
        let consecutive = |first, end| PacketChunks { first: short(first), count: short(end - first) };
        let of_layer = |layer: usize| {
            let first = found.partition_point(|chunk| chunk.layer < layer);
            consecutive(first, found.partition_point(|chunk| chunk.layer <= layer))
        };
        let table: Vec<PacketChunks> = (0..layers.layers()).map(of_layer).collect();
        let packet_chunk = |chunk: &Chunk| PacketChunk {
            begin: short(chunk.range.start),
            len: short(chunk.range.len()),
            owner: short(chunk.range.start.checked_div(reduced_len).unwrap_or(0)),
            layer: short(chunk.layer),
            of_layer: table[chunk.layer],
        };
        let chunks: Vec<PacketChunk> = found.iter().map(packet_chunk).collect();
        let of_rank = |rank: usize| {
            let first = chunks.partition_point(|chunk| (chunk.owner as usize) < rank);
            consecutive(first, chunks.partition_point(|chunk| chunk.owner as usize <= rank))
        };
        let reduced: Vec<PacketChunks> = match shots {
            Shots::One => vec![consecutive(0, chunks.len()); 2],
            Shots::Two => (0..world_size).map(|index| of_rank((rank + index) % world_size)).collect(),
        };
        let counts = (chunks.len(), layers.layers());
        let bytes = arena_len * dtype.size_bytes();
        let arena = PacketArena {
            reduced: from_fn(|index| reduced.get(index).copied().unwrap_or_default()),
            peers: reduced.len() as u64 - 1,
            most_reduced: reduced.iter().map(|chunks| u64::from(chunks.count)).max().unwrap_or(0),
            multiplying_log2: longest_log2(&chunks, dtype).min(THREADS.ilog2()).into(),
            most_chunks: table.iter().map(|layer| u64::from(layer.count)).max().unwrap_or(0),
            ..PacketArena::of(counts, width(world_size), dtype, bytes, reduced_len)
        };
        Self { dtype, world_size, arena_len, chunks, layers: table, lens: layers.lens(), arena }
    }

    /// Whether there is anything to reduce.
    pub(crate) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// The size of the mailboxes that the kernels need.
    pub(crate) fn mailboxes(&self) -> MailboxSize {
        let sent = if self.arena.shard_len == 0 { self.arena_len } else { self.arena.shard_len as usize };
        MailboxSize {
            slot_packets: (sent * self.dtype.size_bytes()).div_ceil(PACKET_BYTES),
            common_packets: self.arena.end_of_area as usize,
        }
    }

    /// Whether layers may take the exact path: two ranks are one pair, whose norms cannot cancel.
    fn has_exact_path(&self) -> bool {
        self.world_size > 2 || self.dtype == DType::F64
    }

    /// The arena and its tables, as the kernel reads them.
    fn words(&self) -> Vec<u64> {
        [words_of(&[self.arena]), words_of(&self.chunks), words_of(&self.layers)].concat()
    }

    /// Sets the number of threads that move a chunk, for launches of up to so many blocks: as many as the longest chunk has packets, unless
    /// that leaves more than a fifth of the threads' steps without a packet. A block with few chunks has no other use for its threads.
    fn for_blocks(mut self, blocks: u64) -> Self {
        let of_block = self.arena.most_reduced.div_ceil(blocks).next_power_of_two();
        let (most, longest) = (most_threads(self.dtype).ilog2(), longest_log2(&self.chunks, self.dtype));
        let least = most.saturating_sub(of_block.ilog2()).clamp(LEAST_TEAM.ilog2(), longest);
        let steps = |log2: u32| -> usize {
            self.chunks.iter().map(|chunk| packets(chunk, self.dtype).next_multiple_of(1 << log2)).sum()
        };
        let fewest = steps(LEAST_TEAM.ilog2());
        let moving = (least..=longest).rev().find(|&log2| steps(log2) * 4 <= fewest * 5);
        self.arena.moving_log2 = moving.unwrap_or(least).into();
        self
    }

    /// The number of threads of each of so many blocks: enough for its chunks, as far as possible, and at least [`THREADS`], which the exact
    /// path needs for a chunk. More than two ranks have twice as many: for the second half of the products of eight vectors, and to add the
    /// sums over chunks, of which there are ten for four ranks; two ranks with three sums got no faster.
    fn threads(&self, blocks: u64) -> u32 {
        let chunks = u32::try_from(self.arena.chunk_count.div_ceil(blocks)).unwrap_or(u32::MAX);
        let most = most_threads(self.dtype);
        let of_chunk = if self.world_size > 2 { 2 } else { 1 };
        let teams = chunks.min(most).next_power_of_two() * of_chunk;
        teams.saturating_mul(1 << self.arena.moving_log2.max(self.arena.multiplying_log2)).clamp(THREADS, most)
    }

    /// The name of the kernel.
    pub(crate) fn entry(&self) -> String {
        format!("packet_adasum_{}_p{}", self.dtype, width(self.world_size))
    }
}

/// The device memory of a rank's part of the reduction, with the weights of the last run.
#[derive(Debug)]
pub(crate) struct PacketAdasum {
    plan: PacketPlan,
    entry: String,
    /// The limit of blocks of a launch: one for each chunk, and few enough to be resident together.
    most_blocks: u64,
    table: DeviceBuffer,
    weights: DeviceBuffer,
    cancelled: DeviceBuffer,
    short: DeviceBuffer,
    exact: ExactPath,
}

/// The memory of the exact path, empty if there is none.
#[derive(Debug)]
struct ExactPath {
    /// The other ranks' vectors.
    vectors: DeviceBuffer,
    /// A [`packet_tree`] for each block.
    trees: DeviceBuffer,
}

impl PacketAdasum {
    /// Uploads the tables.
    pub(crate) fn new(queue: &Queue, plan: PacketPlan) -> Result<Self> {
        let (ranks, layers) = (plan.world_size, plan.layers.len());
        let most_blocks = Claim::most_blocks_that_wait(queue)?.min(plan.arena.chunk_count);
        let plan = plan.for_blocks(most_blocks);
        let (others, blocks) = if plan.has_exact_path() { (ranks - 1, most_blocks) } else { (0, 0) };
        let exact = ExactPath {
            vectors: DeviceBuffer::zeroed(queue, plan.dtype, plan.arena_len * others)?,
            trees: DeviceBuffer::zeroed(queue, DType::F64, packet_tree(ranks) * usize::try_from(blocks).unwrap_or(1))?,
        };
        // Layers without elements keep the weights of orthogonal vectors.
        let mut weights = DeviceBuffer::zeroed(queue, DType::F64, layers * ranks)?;
        weights.as_mut_slice().copy_from_host((&vec![1.0; layers * ranks]).into())?;
        Ok(Self {
            entry: plan.entry(),
            most_blocks,
            table: upload_words(queue, &plan.words())?,
            weights,
            cancelled: DeviceBuffer::zeroed(queue, DType::F32, layers)?,
            short: short_flags(queue, &plan.lens)?,
            exact,
            plan,
        })
    }

    /// Refuses an arena of another queue.
    pub(crate) fn check_queue(&self, operation: &'static str, queue: &Queue) -> Result<()> {
        self.table.as_slice().queue().check_same(operation, queue)
    }

    /// Replaces the elements of the arena by the Adasum of all ranks' arenas.
    ///
    /// # Safety
    /// The arena has the plan's length and dtype. The group has the plan's mailboxes, its kernels were loaded, and it is used for this alone;
    /// its launches run one after the other. Every rank calls it, with its part of the same plan.
    pub(crate) unsafe fn run(&mut self, group: &PacketGroup, arena: &DeviceSliceMut<'_>) -> Result<()> {
        let queue = arena.as_slice().queue().clone();
        let blocks = group.blocks_that_wait(&queue, self.most_blocks)?;
        let threads = self.plan.threads(blocks);
        let arguments = [
            group.table(),
            pointer(self.table.as_slice()),
            pointer_mut(arena),
            pointer_mut(&self.weights.as_mut_slice()),
            pointer_mut(&self.cancelled.as_mut_slice()),
            pointer(self.short.as_slice()),
            pointer_mut(&self.exact.vectors.as_mut_slice()),
            self.plan.arena_len.into(),
            pointer_mut(&self.exact.trees.as_mut_slice()),
            blocks.into(),
        ];
        // SAFETY: the caller's promise; the tables were made for these chunks and layers. If there is an exact path, there is a vector for
        // each other rank, and a tree for each block.
        unsafe { group.launch(&queue, &self.entry, Grid { blocks, threads }, &arguments) }
    }

    /// Waits for the queue, and returns the weights of the last run with the flags of cancelled layers.
    pub(crate) fn read_coefficients(&self) -> Result<Coefficients> {
        let layers = self.plan.layers.len();
        let mut weights = vec![0.0; layers * self.plan.world_size];
        self.weights.as_slice().copy_to_host((&mut weights).into())?;
        let mut flags = vec![0.0f32; layers];
        self.cancelled.as_slice().copy_to_host((&mut flags).into())?;
        Ok(Coefficients { weights, cancelled: flags.into_iter().map(|flag| flag.to_bits() != 0).collect() })
    }
}

/// The limit of the threads of a block.
fn most_threads(dtype: DType) -> u32 {
    packet_adasum_threads(dtype.size_bytes())
}

/// The least number of threads for each chunk: as many as a chunk of 512 elements of two bytes has packets.
const LEAST_TEAM: usize = 64;

/// The number of packets of a chunk.
fn packets(chunk: &PacketChunk, dtype: DType) -> usize {
    (chunk.len as usize * dtype.size_bytes()).div_ceil(PACKET_BYTES)
}

/// The binary logarithm of the number of threads for the longest chunk: all threads of a block if it has as many packets.
fn longest_log2(chunks: &[PacketChunk], dtype: DType) -> u32 {
    let longest = chunks.iter().map(|chunk| packets(chunk, dtype)).max().unwrap_or(0);
    longest.next_power_of_two().clamp(LEAST_TEAM, most_threads(dtype) as usize).ilog2()
}

#[cfg(test)]
mod tests {
    use gradsync_device::abi::packet_adasum_parts;
    use gradsync_device::math::precise::SUMS;
    use proptest::prelude::*;

    use super::*;
    use crate::plan::layout::Layout;

    fn dtypes() -> impl Strategy<Value = DType> {
        prop::sample::select(&DType::FLOATS[..])
    }

    proptest! {
        #[test]
        fn packet_plan_reduces_chunks_once_in_two_shots_by_all_in_one(
            lens in prop::collection::vec(prop_oneof![0usize..300, 0usize..5000, 0usize..300_000], 1..12),
            world_size in 2usize..=8, whole in any::<bool>(), dtype in dtypes(),
        ) {
            let Layout { segments, shard_len } = Layout::new(dtype, world_size, &lens).unwrap();
            let layers = DividedLayers::new(&segments, if whole { 1 } else { lens.len() }, 0);
            let plan = |rank, shots| PacketPlan::new(&layers, dtype, (rank, world_size), shard_len, shots);
            let PacketPlan { arena: of_first, chunks, layers, .. } = plan(0, Shots::Two);
            let mut next = 0;
            for rank in 0..world_size {
                let arena = plan(rank, Shots::Two).arena;
                prop_assert_eq!(arena.peers as usize, world_size - 1);
                for index in 0..world_size {
                    prop_assert_eq!(arena.reduced[index], of_first.reduced[(rank + index) % world_size]);
                }
                prop_assert_eq!(arena.reduced[0].first, next);
                next = arena.reduced[0].end();
                prop_assert!(u64::from(arena.reduced[0].count) <= arena.most_reduced);
                let own = &chunks[arena.reduced[0].first as usize..next as usize];
                for chunk in own {
                    prop_assert_eq!(chunk.owner as usize, rank);
                    let (begin, shard) = (chunk.begin as usize, rank * shard_len..(rank + 1) * shard_len);
                    prop_assert!(shard.start <= begin && begin + chunk.len as usize <= shard.end);
                    prop_assert_eq!(begin * dtype.size_bytes() % 16, 0, "kernels move whole packets");
                }
            }
            let of_layers: u32 = layers.iter().map(|layer| layer.count).sum();
            prop_assert_eq!(of_layers as usize, chunks.len());
            for (number, layer) in layers.iter().enumerate() {
                let own = &chunks[layer.first as usize..layer.end() as usize];
                prop_assert!(own.iter().all(|chunk| chunk.layer as usize == number));
            }
            let one = plan(world_size - 1, Shots::One);
            let all = PacketChunks { first: 0, count: one.chunks.len() as u32 };
            prop_assert_eq!((&one.arena.reduced[..2], one.arena.peers), (&[all; 2][..], 1));
            prop_assert_eq!(one.arena.most_reduced as usize, one.chunks.len());
            prop_assert!(one.chunks.iter().all(|chunk| chunk.owner == 0));
            let total: usize = one.chunks.iter().map(|chunk| chunk.len as usize).sum();
            prop_assert_eq!((next as usize, total), (one.chunks.len(), lens.iter().sum()));
        }

        #[test]
        fn for_blocks_has_a_thread_for_each_packet_where_possible(
            lens in prop::collection::vec(prop_oneof![1usize..300, 1usize..300_000], 1..12), world_size in 2usize..=8,
            blocks in 1u64..70, dtype in dtypes(),
        ) {
            let Layout { segments, shard_len } = Layout::new(dtype, world_size, &lens).unwrap();
            let layers = DividedLayers::new(&segments, lens.len(), 0);
            let plan = PacketPlan::new(&layers, dtype, (0, world_size), shard_len, Shots::One).for_blocks(blocks);
            let (most, moving) = (most_threads(dtype), 1u32 << plan.arena.moving_log2);
            let longest = plan.chunks.iter().map(|chunk| packets(chunk, dtype)).max().unwrap();
            let multiplying = 1u32 << plan.arena.multiplying_log2;
            prop_assert!(longest <= multiplying as usize || multiplying == THREADS);
            let has_one_each = plan.chunks.len() as u64 <= blocks;
            let has_equal = plan.chunks.iter().all(|chunk| packets(chunk, dtype) == longest);
            let is_long = longest <= moving as usize || moving == most;
            prop_assert!((LEAST_TEAM as u32..=most).contains(&moving) && (is_long || !has_one_each && !has_equal));
            let (threads, team) = (plan.threads(blocks), moving.max(multiplying));
            prop_assert!(threads % team == 0 && threads.is_power_of_two() && (THREADS..=most).contains(&threads));
            let of_chunk = if world_size > 2 { 2 } else { 1 };
            let reached = u64::from(threads / team) * blocks / of_chunk;
            prop_assert!(reached >= plan.chunks.len() as u64 || threads == most);
            prop_assert!(reached < 2 * (plan.chunks.len() as u64 + blocks), "no more than needed");
            let parts = packet_adasum_parts(width(world_size), dtype.size_bytes());
            prop_assert!(threads / multiplying >= parts, "the teams that multiply a chunk are in one block");
        }

        #[test]
        fn packet_arena_has_parts_that_do_not_overlap(
            chunks in 0usize..300, layers in 0usize..40, world_size in 2usize..=8, dtype in dtypes(),
            shard_len in 0usize..5000,
        ) {
            let (width, bytes) = (width(world_size), shard_len * world_size * dtype.size_bytes());
            let arena = PacketArena::of((chunks, layers), width, dtype, bytes, shard_len);
            prop_assert!([arena.products, arena.weights, arena.exact_sums, arena.end_of_area].is_sorted());
            let results = if shard_len > 0 { bytes.div_ceil(PACKET_BYTES) } else { 0 } as u64;
            prop_assert_eq!(arena.products, results);
            let weights = if shard_len > 0 { layers * (width + 1) } else { 0 } as u64;
            prop_assert_eq!(arena.exact_sums - arena.weights, weights);
            prop_assert_eq!(arena.weights - arena.products, (chunks * width * (width + 1) / 2) as u64);
            let has_exact_path = world_size > 2 || dtype == DType::F64;
            let sums_of_pair = if dtype == DType::F64 { SUMS } else { 3 };
            let sums = if has_exact_path { chunks * (width - 1) * sums_of_pair } else { 0 } as u64;
            prop_assert_eq!(arena.end_of_area - arena.exact_sums, sums);
        }
    }
}
