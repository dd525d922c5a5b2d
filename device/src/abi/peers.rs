//! What the host and the kernels over peers' memory agree on: who is where in a group, and what lies where in a mailbox.
//!
//! Addresses and numbers only; nothing here follows an address.

use super::LaunchBounds;
use crate::math::adasum::products;
use crate::math::precise::SUMS;

/// Most ranks of a group whose kernels reach into each other's memory.
pub const MOST_PEERS: usize = 8;
/// Layers whose weights one block of `peer_adasum` or `peer_tree` finds.
pub const PEER_LAYERS: usize = 4;
/// Most jobs of a launch of that width that send, where it has all of an H200. By measurement on two and four: 66 for each peer, but never so
/// many that the blocks that work on what has arrived find no places beside them on its 132 multiprocessors.
pub const fn peer_senders(width: usize, world_size: u64) -> u64 {
    let (wanted, places) = (66 * (world_size - 1), 99 * LaunchBounds::of_peers(width).blocks as u64);
    if wanted < places { wanted } else { places }
}

/// The binary logarithm of the bytes of a tile, for windows of so many bytes: about 256 tiles, of 4 KiB to 64 KiB. A tile ends with a
/// fence, which costs as much as a few KiB.
pub const fn peer_tile_shift(window_bytes: u64) -> u32 {
    let shift = (window_bytes >> 8).next_power_of_two().ilog2();
    if shift < 12 {
        12
    } else if shift > 16 {
        16
    } else {
        shift
    }
}

/// What the kernels of one rank know of its peers, all of whose memory they reach. Addresses are as this rank sees them; those
/// past `world_size` are never followed.
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
    /// Address of a u32 that becomes nonzero when a peer is not to be waited for any more.
    pub abort: u64,
    /// Bytes of a window, a multiple of 16.
    pub window_bytes: u64,
    /// Windows travel in tiles of two to the power of so many bytes; the last one may be shorter.
    pub tile_shift: u64,
    /// Number of layers: one a span of a launch, or one in all.
    pub layers: u64,
    /// Where in a mailbox the flags of tiles begin, in bytes as the next two; in front of them are the other flags.
    pub tile_flags: u64,
    /// Where the products begin.
    pub products: u64,
    /// Where the sums of pairs begin.
    pub pairs: u64,
    /// Number of rows for chunks of divided layers; those of a table come behind its rows of layers.
    pub rows: u64,
    /// Where the rows of products begin.
    pub product_rows: u64,
    /// Where the rows of sums of pairs begin.
    pub pair_rows: u64,
    /// Each rank's mailbox: rows of flags ([`Row`]), and numbers.
    pub mailboxes: [u64; MOST_PEERS],
    /// This rank's window of each rank's arena, which it writes at the end.
    pub windows: [u64; MOST_PEERS],
    /// Each rank's window of this rank's arena, which this rank sends.
    pub sources: [u64; MOST_PEERS],
    /// Where each rank receives what this rank sends it; nothing at this rank's own place.
    pub slots: [u64; MOST_PEERS],
    /// This rank's window as each rank has it: its own where it lies, the others where they are received.
    pub copies: [u64; MOST_PEERS],
}

impl Peers {
    /// A group of so many ranks with windows of so many bytes, sums of so many layers and so many rows for chunks of divided layers, without ranks
    /// or addresses.
    pub const fn of(layers: usize, rows: usize, world_size: usize, window_bytes: usize) -> Self {
        const NOWHERE: [u64; MOST_PEERS] = [0; MOST_PEERS];
        let mut peers = Self {
            rank: 0,
            world_size: world_size as u64,
            runs: 0,
            abort: 0,
            window_bytes: window_bytes as u64,
            tile_shift: peer_tile_shift(window_bytes as u64) as u64,
            layers: layers as u64,
            tile_flags: 0,
            products: 0,
            pairs: 0,
            rows: rows as u64,
            product_rows: 0,
            pair_rows: 0,
            mailboxes: NOWHERE,
            windows: NOWHERE,
            sources: NOWHERE,
            slots: NOWHERE,
            copies: NOWHERE,
        };
        peers.tile_flags = peers.flag(Row::Weights(peers.teams()), 0) as u64;
        peers.products = peers.flag(Row::Tile(peers.tiles() as usize), 0).next_multiple_of(256) as u64;
        peers.pairs = peers.products_of(world_size) as u64;
        peers.product_rows = peers.pairs_of(world_size) as u64;
        peers.pair_rows = peers.product_rows + (rows * products(world_size) * 8) as u64;
        peers
    }

    /// Tiles of a window.
    #[inline(always)]
    pub const fn tiles(&self) -> u64 {
        (self.window_bytes + (1 << self.tile_shift) - 1) >> self.tile_shift
    }

    /// The bytes of a tile in its window: its first one, and one past its last.
    #[inline(always)]
    pub fn tile(&self, number: u64) -> (u64, u64) {
        let begin = number << self.tile_shift;
        (begin, (begin + (1 << self.tile_shift)).min(self.window_bytes))
    }

    /// The layer of a span: its own, or the first where all of `span_count` spans are one layer together.
    #[inline(always)]
    pub const fn layer(&self, span: u64, span_count: u64) -> u64 {
        if self.layers == span_count { span } else { 0 }
    }

    /// Spans of each layer.
    #[inline(always)]
    pub const fn spans_of_a_layer(&self, span_count: u64) -> u64 {
        if self.layers == span_count { 1 } else { span_count }
    }

    /// Blocks that find weights.
    #[inline(always)]
    pub const fn teams(&self) -> usize {
        (self.layers as usize).div_ceil(PEER_LAYERS)
    }

    /// Where in a mailbox the flag of a row is that `rank` writes.
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

    /// Where in a mailbox the products of all layers are, as `rank` has summed them over its window: `[layer][product]`.
    #[inline(always)]
    pub const fn products_of(&self, rank: usize) -> usize {
        self.products as usize + rank * self.products_of_all() * 8
    }

    /// Where in a mailbox the sums of pairs are, of the exact path or along the tree, as `rank` has summed them over its window:
    /// `[layer][pair][3]`.
    #[inline(always)]
    pub const fn pairs_of(&self, rank: usize) -> usize {
        self.pairs as usize + rank * self.sums_of_pairs() * 8
    }

    /// Where in a mailbox a number of the rows that begin at `rows` is, [`product_rows`](Self::product_rows) or
    /// [`pair_rows`](Self::pair_rows): `[sum][row]`. The rank writes it that has the chunk in its window.
    #[inline(always)]
    pub const fn in_rows(&self, rows: u64, sum: usize, row: u64) -> u64 {
        rows + (sum as u64 * self.rows + row) * 8
    }

    /// Products of all layers.
    #[inline(always)]
    const fn products_of_all(&self) -> usize {
        self.layers as usize * products(self.world_size as usize)
    }

    /// Sums of all layers' pairs: as many as vectors of `f64` have on the exact path, other dtypes have fewer.
    #[inline(always)]
    const fn sums_of_pairs(&self) -> usize {
        self.layers as usize * SUMS * (self.world_size as usize - 1)
    }

    /// Bytes of a mailbox.
    pub const fn mailbox_bytes(&self) -> usize {
        self.pair_rows as usize + self.rows as usize * SUMS * (self.world_size as usize - 1) * 8
    }
}

/// A row of flags in a rank's mailbox, by what it is for. In it rank `p` writes the `p`-th u32 of every mailbox, which counts up and is never
/// cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// The end of a run.
    End,
    /// The blocks of that number, one on each rank, that find the weights of the same layers.
    Weights(usize),
    /// What the blocks of one rank tell each other of these layers: first how many chunks have been multiplied, then how often the weights
    /// have been found. Its ranks are no ranks.
    Progress(usize),
    /// A tile of the mailbox's owner's window.
    Tile(usize),
}
