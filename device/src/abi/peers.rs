//! The contract of the host and the kernels over peers' memory: the addresses of a group, and the layout of its mailboxes.
//!
//! Addresses and numbers only; nothing here follows an address.

use super::{DType, LaunchBounds, tree_row};
use crate::math::adasum::products;
use crate::math::precise::SUMS;

/// The limit of ranks of a group whose kernels access each other's memory.
pub const MOST_PEERS: usize = 8;
/// The number of layers whose weights one block of `peer_adasum` computes.
pub const PEER_LAYERS: usize = 4;
/// The limit of sending jobs of a launch of this width that has all of an H200. Measured on two and four: 66 for each peer, but few enough
/// that the blocks that process received tiles are resident beside them on its 132 multiprocessors.
pub const fn peer_senders(width: usize, world_size: u64) -> u64 {
    let (wanted, places) = (66 * (world_size - 1), 99 * LaunchBounds::of_peers(width).blocks as u64);
    if wanted < places { wanted } else { places }
}

/// The binary logarithm of a tile's size in bytes, for shards of `shard_bytes` bytes: about 256 tiles, of 4 KiB to 64 KiB. A tile ends
/// with a fence, which costs as much as a few KiB.
pub const fn peer_tile_shift(shard_bytes: u64) -> u32 {
    let shift = (shard_bytes >> 8).next_power_of_two().ilog2();
    if shift < 12 {
        12
    } else if shift > 16 {
        16
    } else {
        shift
    }
}

/// The number of blocks of [`THREADS`](super::THREADS) threads of a sum over packets that a multiprocessor can hold.
pub const PACKET_BLOCKS: u32 = 3;
/// The largest number of threads of a block of such a kernel, of which a multiprocessor can hold one.
pub const PACKET_THREADS: u32 = PACKET_BLOCKS * super::THREADS;
/// The limit of the threads of a block of Adasum over packets, for elements of so many bytes: as many as there are registers for. The exact
/// path of `f64` needs more than 128 a thread.
pub const fn packet_adasum_threads(element_bytes: usize) -> u32 {
    if element_bytes < 8 { 512 } else { 256 }
}

/// Whether registers are so few that such a kernel of this width reads numbers from memory that it uses often: a thread has at most 128 of
/// them, of which two vectors leave enough.
pub const fn packet_adasum_is_full(width: usize, element_bytes: usize) -> bool {
    width > 2 && packet_adasum_threads(element_bytes) == 512
}

/// The number of teams of threads that multiply a chunk together in such a kernel: the sums of all products of eight vectors would need too
/// many registers, so that each of two teams computes half of them.
pub const fn packet_adasum_parts(width: usize, element_bytes: usize) -> u32 {
    if width == 8 && packet_adasum_is_full(width, element_bytes) { 2 } else { 1 }
}

/// Bytes of a packet in a mailbox: a vector of elements, or a number of 8 bytes in two halves, each beside a flag.
pub const PACKET_BYTES: usize = super::VECTOR_BYTES;

/// The mailboxes of a group of ranks whose kernels send each other packets, which need no fence and no barrier.
///
/// A mailbox has for each parity of the call a slot for each writer, of [`slot_packets`](Self::slot_packets) packets of elements, and behind
/// them an area of [`common_packets`](Self::common_packets) packets, each of which has a writer of its own.
///
/// A word of 8 bytes of a packet of elements is [`EMPTY`](super::EMPTY) until its elements arrive, so that a reader that finds another word
/// has them. Its last reader empties it. A packet of a number has the flag of its call beside each half, so that a reader that finds the
/// flag has the half too (the protocol that NCCL calls LL). Flags are odd numbers that differ from call to call; all ranks' calls have the
/// same number.
///
/// All bytes are [`EMPTY_BYTE`](super::EMPTY_BYTE) before the first call. Read as a flag, such bytes are the flag of call 2³¹, after which
/// flags repeat. No packet of a number is that old: every call writes all packets of its parity but the sums of Adasum's exact path, and of
/// these sums each call clears [`PEER_THREADS`](super::PEER_THREADS), in turn.
///
/// Two u32 of the rank follow in memory, which its kernels count: the completed calls, and the blocks of the call under way that have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Mailboxes {
    /// The number of this rank.
    pub rank: u64,
    /// Number of ranks.
    pub world_size: u64,
    /// Address of a u32 that becomes nonzero when kernels must not wait for a peer any more.
    pub abort: u64,
    /// Packets of a slot, an even number.
    pub slot_packets: u64,
    /// Packets of the common area: see [`PacketArena`].
    pub common_packets: u64,
    /// The address of each rank's mailbox in this rank's address space.
    pub mailboxes: [u64; MOST_PEERS],
}

impl Mailboxes {
    /// The least slot with which two shots reduce `bytes` bytes: half a slot for the parts of this rank's shard, half for results.
    pub const fn slot_packets_for(bytes: usize, world_size: usize) -> usize {
        2 * bytes.div_ceil(PACKET_BYTES).div_ceil(world_size)
    }

    /// The size of a mailbox in bytes.
    pub const fn mailbox_bytes(slot_packets: usize, common_packets: usize, world_size: usize) -> usize {
        2 * (world_size * slot_packets + common_packets) * PACKET_BYTES
    }

    /// The offset in a mailbox of the slot of a writer, or of the common area for the world size.
    #[inline(always)]
    pub const fn slot(&self, parity: u64, writer: u64) -> u64 {
        let all = self.world_size * self.slot_packets + self.common_packets;
        (parity * all + writer * self.slot_packets) * PACKET_BYTES as u64
    }
}

/// Consecutive chunks: those of a layer, or those that a rank reduces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PacketChunks {
    /// The number of the first.
    pub first: u32,
    /// The number of chunks.
    pub count: u32,
}

impl PacketChunks {
    /// The number of the chunk behind the last one.
    #[inline(always)]
    pub const fn end(self) -> u32 {
        self.first + self.count
    }
}

/// A chunk of an arena that Adasum reduces by packets. Its first element is at a multiple of 16 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PacketChunk {
    /// First element, counted from the start of the arena.
    pub begin: u32,
    /// Elements.
    pub len: u32,
    /// In two shots the rank with the chunk in its shard, otherwise 0.
    pub owner: u32,
    /// The number of its layer.
    pub layer: u32,
    /// The chunks of its layer.
    pub of_layer: PacketChunks,
}

/// An arena that Adasum reduces by packets, and the parts of the common area of its mailboxes. A [`PacketChunk`] for each chunk, in their
/// order in the arena, and a [`PacketChunks`] for each layer follow in memory.
///
/// In the slot of each writer are that rank's elements: of the whole arena in one shot, of the reader's shard in two. The common area has,
/// from its beginning on, the results of the whole arena (in two shots); each chunk's products, those of vectors of the kernel's width; each
/// layer's weights and its flag, which is behind as many weights (in two shots); and for the exact path each chunk's sums of pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PacketArena {
    /// The chunks that this rank reduces, and behind them those that its peers reduce, beginning with the next rank. In one shot all ranks
    /// reduce all chunks, and one peer stands for all.
    pub reduced: [PacketChunks; MOST_PEERS],
    /// The number of peers in `reduced`.
    pub peers: u64,
    /// The largest number of chunks that a rank reduces.
    pub most_reduced: u64,
    /// Number of chunks.
    pub chunk_count: u64,
    /// Number of layers.
    pub layer_count: u64,
    /// Elements of a rank's shard in two shots, 0 in one shot.
    pub shard_len: u64,
    /// The first packet of the products in the common area.
    pub products: u64,
    /// The first packet of the weights.
    pub weights: u64,
    /// The first packet of the exact path's sums.
    pub exact_sums: u64,
    /// Packets of the common area.
    pub end_of_area: u64,
    /// The binary logarithm of the number of threads that send, combine or receive a chunk, 6 to 9. Blocks have as many, or a power of two
    /// times as many.
    pub moving_log2: u64,
    /// The binary logarithm of the number of threads that multiply a chunk, 6 to that of [`THREADS`](super::THREADS): as many as the longest
    /// chunk has packets, or more, as far as possible.
    pub multiplying_log2: u64,
    /// The largest number of chunks of a layer.
    pub most_chunks: u64,
}

impl PacketArena {
    /// The parts of the common area for these numbers of chunks and layers, for kernels of this width over elements of a dtype, in arenas of
    /// `bytes` bytes that are reduced in two shots if they have shards of `shard_len` elements. The ranks' chunks, the teams and
    /// the largest number of chunks of a layer remain 0, for the caller to set.
    pub const fn of(
        (chunks, layers): (usize, usize),
        width: usize,
        dtype: DType,
        bytes: usize,
        shard_len: usize,
    ) -> Self {
        let products = if shard_len > 0 { bytes.div_ceil(PACKET_BYTES) } else { 0 };
        let weights = products + chunks * crate::math::adasum::products(width);
        let exact_sums = weights + if shard_len > 0 { layers * (width + 1) } else { 0 };
        let sums_of_pair = if matches!(dtype, DType::F64) { SUMS } else { SUMS_OF_PAIR };
        let has_exact_path = width > 2 || matches!(dtype, DType::F64);
        let end = exact_sums + if has_exact_path { chunks * (width - 1) * sums_of_pair } else { 0 };
        Self {
            reduced: [PacketChunks { first: 0, count: 0 }; MOST_PEERS],
            peers: 0,
            most_reduced: 0,
            chunk_count: chunks as u64,
            layer_count: layers as u64,
            shard_len: shard_len as u64,
            products: products as u64,
            weights: weights as u64,
            exact_sums: exact_sums as u64,
            end_of_area: end as u64,
            moving_log2: 0,
            multiplying_log2: 0,
            most_chunks: 0,
        }
    }
}

/// The number of words of 8 bytes that a block of the exact path needs: the address of each rank's vector, and a [`tree_row`].
pub const fn packet_tree(world_size: usize) -> usize {
    world_size + tree_row(world_size)
}

/// The number of sums of a pair: its dot product and the squared norms of its sides.
const SUMS_OF_PAIR: usize = 3;

/// The description of a rank's peers for its kernels, which can access the memory of all of them. Addresses are in this rank's address
/// space; those beyond `world_size` are never used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Peers {
    /// The number of this rank.
    pub rank: u64,
    /// Number of ranks.
    pub world_size: u64,
    /// Address of two u32 of this rank: the count of completed runs, and the tickets drawn in the run under way. `peer_barrier` increases
    /// the first and clears the second.
    pub runs: u64,
    /// Address of a u32 that becomes nonzero when kernels must not wait for a peer any more.
    pub abort: u64,
    /// Bytes of a shard, a multiple of 16.
    pub shard_bytes: u64,
    /// Shards are sent in tiles of two to the power of this many bytes; the last one may be shorter.
    pub tile_shift: u64,
    /// Number of layers: one per span of a launch, or one in all.
    pub layers: u64,
    /// The offset of the tiles' flags in a mailbox, in bytes like the next two; in front of them are the other flags.
    pub tile_flags: u64,
    /// The offset of the products.
    pub products: u64,
    /// The offset of the sums of pairs.
    pub pairs: u64,
    /// Number of rows for chunks of divided layers; in a table they follow the rows of layers.
    pub rows: u64,
    /// The offset of the rows of products.
    pub product_rows: u64,
    /// The offset of the rows of sums of pairs.
    pub pair_rows: u64,
    /// Each rank's mailbox: rows of flags ([`Row`]), and numbers.
    pub mailboxes: [u64; MOST_PEERS],
    /// This rank's shard of each rank's arena, which it writes at the end.
    pub shards: [u64; MOST_PEERS],
    /// Each rank's shard of this rank's arena, which this rank sends.
    pub sources: [u64; MOST_PEERS],
    /// The address at which each rank receives this rank's tiles; 0 at this rank's own index.
    pub slots: [u64; MOST_PEERS],
    /// This rank's shard of each rank's data: its own in place, the others where they are received.
    pub copies: [u64; MOST_PEERS],
    /// The largest number of chunks of a layer, over all shards.
    pub most_chunks: u64,
}

impl Peers {
    /// A group of `world_size` ranks with shards of `shard_bytes` bytes, sums of `layers` layers and `rows` rows for chunks of divided
    /// layers, without ranks or addresses.
    pub const fn of(layers: usize, rows: usize, world_size: usize, shard_bytes: usize) -> Self {
        const NOWHERE: [u64; MOST_PEERS] = [0; MOST_PEERS];
        let mut peers = Self {
            rank: 0,
            world_size: world_size as u64,
            runs: 0,
            abort: 0,
            shard_bytes: shard_bytes as u64,
            tile_shift: peer_tile_shift(shard_bytes as u64) as u64,
            layers: layers as u64,
            tile_flags: 0,
            products: 0,
            pairs: 0,
            rows: rows as u64,
            product_rows: 0,
            pair_rows: 0,
            mailboxes: NOWHERE,
            shards: NOWHERE,
            sources: NOWHERE,
            slots: NOWHERE,
            copies: NOWHERE,
            most_chunks: 0,
        };
        peers.tile_flags = peers.flag(Row::Weights(peers.teams()), 0) as u64;
        peers.products = peers.flag(Row::Tile(peers.tiles() as usize), 0).next_multiple_of(256) as u64;
        peers.pairs = peers.products_of(world_size) as u64;
        peers.product_rows = peers.pairs_of(world_size) as u64;
        peers.pair_rows = peers.product_rows + (rows * products(world_size) * 8) as u64;
        peers
    }

    /// The number of tiles of a shard.
    #[inline(always)]
    pub const fn tiles(&self) -> u64 {
        (self.shard_bytes + (1 << self.tile_shift) - 1) >> self.tile_shift
    }

    /// The byte range of a tile in its shard: its first byte, and one past its last.
    #[inline(always)]
    pub fn tile(&self, number: u64) -> (u64, u64) {
        let begin = number << self.tile_shift;
        (begin, (begin + (1 << self.tile_shift)).min(self.shard_bytes))
    }

    /// The layer of a span: its own, or the first if all of `span_count` spans are one layer.
    #[inline(always)]
    pub const fn layer(&self, span: u64, span_count: u64) -> u64 {
        if self.layers == span_count { span } else { 0 }
    }

    /// The number of spans of each layer.
    #[inline(always)]
    pub const fn spans_of_a_layer(&self, span_count: u64) -> u64 {
        if self.layers == span_count { 1 } else { span_count }
    }

    /// The number of blocks that compute weights.
    #[inline(always)]
    pub const fn teams(&self) -> usize {
        (self.layers as usize).div_ceil(PEER_LAYERS)
    }

    /// The offset in a mailbox of the flag of a row that `rank` writes.
    #[inline(always)]
    pub const fn flag(&self, row: Row, rank: usize) -> usize {
        let (begin, row) = match row {
            Row::End => (0, 0),
            Row::Weights(team) => (0, 1 + 2 * team),
            Row::Progress(team) => (0, 2 + 2 * team),
            Row::Tile(tile) => (self.tile_flags as usize, tile),
        };
        begin + (row * MOST_PEERS + rank) * 4
    }

    /// The offset in a mailbox of the products of all layers over the shard of `rank`, which that rank writes: `[layer][product]`.
    #[inline(always)]
    pub const fn products_of(&self, rank: usize) -> usize {
        self.products as usize + rank * self.products_of_all() * 8
    }

    /// The offset in a mailbox of the sums of pairs over the shard of `rank`, of the exact path, which that rank writes:
    /// `[layer][pair][3]`.
    #[inline(always)]
    pub const fn pairs_of(&self, rank: usize) -> usize {
        self.pairs as usize + rank * self.sums_of_pairs() * 8
    }

    /// The offset in a mailbox of a number in the rows that begin at `rows`, [`product_rows`](Self::product_rows) or
    /// [`pair_rows`](Self::pair_rows): `[sum][row]`. The rank with the chunk in its shard writes it.
    #[inline(always)]
    pub const fn in_rows(&self, rows: u64, sum: usize, row: u64) -> u64 {
        rows + (sum as u64 * self.rows + row) * 8
    }

    /// The number of products of all layers.
    #[inline(always)]
    const fn products_of_all(&self) -> usize {
        self.layers as usize * products(self.world_size as usize)
    }

    /// The number of sums of all layers' pairs: as many as vectors of `f64` have on the exact path; other dtypes have fewer.
    #[inline(always)]
    const fn sums_of_pairs(&self) -> usize {
        self.layers as usize * SUMS * (self.world_size as usize - 1)
    }

    /// The size of a mailbox in bytes.
    pub const fn mailbox_bytes(&self) -> usize {
        self.pair_rows as usize + self.rows as usize * SUMS * (self.world_size as usize - 1) * 8
    }
}

/// The purpose of a row of flags in a rank's mailbox. In a row, rank `p` writes the `p`-th u32 of every mailbox, which counts up and is
/// never cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// The end of a run.
    End,
    /// The blocks with this number, one on each rank, that compute the weights of the same layers.
    Weights(usize),
    /// Progress of one rank's blocks on these layers: the first word counts the multiplied chunks, the second how often the weights have
    /// been computed. Its words are not indexed by ranks, and only this rank's blocks use them.
    Progress(usize),
    /// A tile of the mailbox's owner's shard.
    Tile(usize),
}
