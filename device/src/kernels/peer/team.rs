//! [`Team`]: addition and exchange of the sums for the weights, by the blocks, one on each rank, that compute a few layers' weights.
//!
//! The algorithms define the meaning of the sums.

use crate::abi::{ChunkedSpan, PEER_LAYERS, PEER_THREADS, Peers, Row};
use crate::math::adasum::{Pair, products};
use crate::peers::{GroupView, Stage};
use crate::reduce::{self, FoldingLanes};
use crate::{arch, thread};

/// The blocks with this number, one on each rank, that compute the weights of the same layers, from the view of this rank's block.
#[derive(Clone, Copy)]
pub(super) struct Team<'a> {
    pub(super) group: GroupView<'a>,
    pub(super) number: u32,
    pub(super) ranks: usize,
}

impl<'a> Team<'a> {
    #[inline(always)]
    pub(super) fn new(group: GroupView<'a>, number: u64, ranks: usize) -> Self {
        Team { group, number: number as u32, ranks }
    }

    /// The first of the layers.
    #[inline(always)]
    pub(super) fn first(self) -> usize {
        self.number as usize * PEER_LAYERS
    }

    /// The number of layers.
    #[inline(always)]
    pub(super) fn count(self) -> usize {
        let rest = self.group.peers.layers as usize - self.first();
        if rest < PEER_LAYERS { rest } else { PEER_LAYERS }
    }

    /// The same team. Values derived from its numbers are recomputed from here on, and not kept in registers around a loop.
    #[inline(always)]
    pub(super) fn again(self) -> Self {
        Team { group: self.group.again(), number: arch::forget(self.number as u64) as u32, ..self }
    }

    /// The number of blocks that multiply chunks of these layers, among `blocks` blocks in all.
    ///
    /// # Safety
    /// `spans` has a row for each layer.
    #[inline(always)]
    pub(super) unsafe fn blocks(self, spans: *const ChunkedSpan, blocks: u64) -> u32 {
        let end = self.first() + self.count();
        // SAFETY: the caller's promise.
        unsafe {
            let first_block = |layer: usize| (*spans.add(layer)).first_block;
            let end = if end == self.group.peers.layers as usize { blocks } else { first_block(end) };
            (end - first_block(self.first())) as u32
        }
    }

    /// The numbers of a layer's first chunk, and of the one behind its last.
    ///
    /// # Safety
    /// The condition of [`blocks`](Self::blocks).
    #[inline(always)]
    pub(super) unsafe fn chunks_of(self, layer: usize, partials: Partials) -> (u64, u64) {
        // SAFETY: the caller's promise.
        unsafe {
            let first_chunk = |layer: usize| (*partials.spans.add(layer)).first_chunk;
            let is_last = layer + 1 == self.group.peers.layers as usize;
            (first_chunk(layer), if is_last { partials.chunks } else { first_chunk(layer + 1) })
        }
    }

    /// The number of a layer's chunk that is `place` chunks behind its first, if it exists. Recomputed each time, since registers are short
    /// where chunks are walked.
    ///
    /// # Safety
    /// The condition of [`blocks`](Self::blocks).
    #[inline(always)]
    pub(super) unsafe fn chunk_at(self, layer: usize, place: u32, partials: Partials) -> Option<u64> {
        let spans = arch::forget(partials.spans as u64) as *const ChunkedSpan;
        // SAFETY: the caller's promise.
        let (first, end) = unsafe { self.again().chunks_of(layer, Partials { spans, ..partials }) };
        let number = first + place as u64;
        (number < end).then_some(number)
    }

    /// # Safety
    /// Every thread of the block must call this.
    #[inline(always)]
    pub(super) unsafe fn meet(self, stage: Stage) {
        let row = Row::Weights(self.number as usize);
        // SAFETY: the mailboxes have a row for each team.
        unsafe {
            self.group.signal(row, stage);
            self.group.wait(row, stage);
        }
    }

    /// The address of number `place` behind `offset` in the mailbox of `reader`.
    ///
    /// # Safety
    /// `reader` is below the world size.
    #[inline(always)]
    pub(super) unsafe fn slot(self, reader: usize, offset: usize, place: usize) -> *mut f64 {
        // SAFETY: the caller's promise.
        let mailbox = unsafe { self.group.mailbox(reader) };
        (mailbox + (offset + place * 8) as u64) as *mut f64
    }

    /// The index of a pair's sums, `count` per pair, behind [`Peers::pairs_of`](crate::abi::Peers::pairs_of).
    #[inline(always)]
    pub(super) fn sums_place(self, layer: usize, pair: Pair, count: usize) -> usize {
        (layer * (self.ranks - 1) + pair.index()) * count
    }

    /// A sum over all shards: the ranks' numbers at `place` in rank order, or for a divided layer this rank's number alone, which is the
    /// sum of its rows; `offset(rank)` is the offset of a rank's numbers in the mailboxes.
    ///
    /// # Safety
    /// [`exchange`](Self::exchange) has been called for these sums.
    #[inline(always)]
    pub(super) unsafe fn total(self, is_divided: bool, offset: impl Fn(usize) -> usize, place: usize) -> f64 {
        let own = self.group.peers.rank as usize;
        let (begin, end) = if is_divided { (own, own + 1) } else { (0, self.ranks) };
        let mut total = 0.0;
        for rank in begin..end {
            // SAFETY: the caller's promise.
            total += unsafe { *self.slot(own, offset(rank), place) };
        }
        total
    }

    /// Whether any of these layers is divided.
    ///
    /// # Safety
    /// The condition of [`blocks`](Self::blocks).
    #[inline(always)]
    pub(super) unsafe fn has_divided(self, spans: *const ChunkedSpan) -> bool {
        let mut any = false;
        for layer in self.first()..self.first() + self.count() {
            // SAFETY: the caller's promise.
            any |= unsafe { is_divided(spans, layer) };
        }
        any
    }

    /// Exchanges `width` sums of each layer with the other ranks, and synchronises with them: writes the sums over this rank's shard to
    /// every mailbox, a layer's product at `sums.place(layer, product)`. For divided layers, whose chunks' sums are already in the
    /// mailboxes, writes the sum of all rows to this rank's own mailbox alone. Afterwards [`total`](Self::total) reads them.
    ///
    /// # Safety
    /// There are partials of every layer, and mailboxes with memory for all sums. All threads of the block must call this.
    #[inline(always)]
    pub(super) unsafe fn exchange(self, partials: Partials, width: usize, sums: impl Sums, stage: Stage) {
        // SAFETY: the caller's promise; the division is the same for the whole block.
        unsafe {
            // A loop that must not be unrolled: the passes differ in few instructions.
            let mut pass = 0;
            while pass < arch::opaque(2) {
                let team = self.again();
                if pass == 0 {
                    team.add_up(false, partials, width, &sums);
                    team.meet(stage);
                } else if team.has_divided(partials.spans) {
                    team.add_up(true, partials, width, &sums);
                    thread::sync_threads();
                }
                pass += 1;
            }
        }
    }

    /// The lanes that add the sums of a layer: read again each time, since registers are short.
    #[inline(always)]
    pub(super) fn lanes(self) -> FoldingLanes {
        FoldingLanes::of(self.group.again().peers.most_chunks)
    }

    /// Adds `width` sums of each layer whose division equals `divided`, in the order of [`Reduction`](crate::reduce::Reduction).
    ///
    /// # Safety
    /// The conditions of [`exchange`](Self::exchange).
    #[inline(always)]
    unsafe fn add_up(self, divided: bool, partials: Partials, width: usize, sums: &impl Sums) {
        // Never less than 1, which the compiler does not know: a check of divisions would compile a panic into the kernel. The numbers fit
        // into 32 bits, where divisions are short.
        let width = (width as u32).max(1);
        let items = self.count() as u32 * width;
        let mut round = 0;
        while round < items {
            let item = round + self.lanes().sum_of_thread();
            let (layer, product) = (self.first() + (item / width) as usize, (item % width) as usize);
            // SAFETY: the caller's promise. All threads take part in every round.
            unsafe { self.add_up_one(divided, item < items, layer, product, partials, sums) };
            round += self.lanes().sums_of(PEER_THREADS);
        }
    }

    /// Adds one sum of a layer, if the lanes have one to add (`is_there`), and if the layer's division equals `divided`.
    ///
    /// # Safety
    /// The conditions of [`exchange`](Self::exchange); all lanes of a sum call this.
    #[inline(always)]
    pub(super) unsafe fn add_up_one(
        self,
        divided: bool,
        is_there: bool,
        layer: usize,
        product: usize,
        partials: Partials,
        sums: &impl Sums,
    ) {
        let peers = self.group.peers;
        // SAFETY: the caller's promise; the rows of this rank's own mailbox are not written any more.
        unsafe {
            let is_wanted = is_there && is_divided(partials.spans, layer) == divided;
            let (mut row, mut begin, mut end) = (partials.first as *const f64, 0u32, 0u32);
            if is_wanted && divided {
                let span = partials.spans.add(layer);
                let rows = peers.in_rows(sums.rows(peers), sums.row_sum(product), 0);
                row = (self.group.mailbox(peers.rank as usize) + rows) as *const f64;
                begin = ((*span).first_row - peers.layers) as u32;
                end = begin + (*span).rows as u32;
            } else if is_wanted {
                row = row.add(reduce::partial_place(product, partials.chunks, 0));
                let (first, behind) = self.chunks_of(layer, partials);
                (begin, end) = (first as u32, behind as u32);
            }
            let sum = self
                .lanes()
                .sum(begin, end, |chunk| chunk.map(|chunk| if chunk < end { *row.add(chunk as usize) } else { 0.0 }));
            let team = self.again();
            let (own, lane) = (team.group.peers.rank as usize, team.lanes().lane() as usize);
            if is_wanted && lane < self.ranks && (!divided || lane == own) {
                team.slot(lane, sums.offset(team.group.peers, own), sums.place(layer, product)).write(sum);
            }
        }
    }
}

/// Whether shards of other ranks have chunks of a layer too.
///
/// # Safety
/// `spans` has a row for each layer.
#[inline(always)]
pub(super) unsafe fn is_divided(spans: *const ChunkedSpan, layer: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { (*spans.add(layer)).first_row != 0 }
}

/// This rank's sums over chunks, `[sum][chunk]`.
#[derive(Clone, Copy)]
pub(super) struct Partials {
    pub(super) first: *mut f64,
    pub(super) spans: *const ChunkedSpan,
    pub(super) chunks: u64,
}

impl Partials {
    /// Stores the sum of a product over chunk `chunk`, which is one of this layer's: here, or in the rows of every mailbox if the layer is
    /// divided.
    ///
    /// # Safety
    /// There is memory for it; the mailboxes belong to `ranks` ranks.
    #[inline(always)]
    pub(super) unsafe fn keep(
        self,
        group: GroupView<'_>,
        ranks: usize,
        (layer, chunk, product): (usize, u64, usize),
        sums: &impl Sums,
        value: f64,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let span = self.spans.add(layer);
            if (*span).first_row == 0 {
                self.first.add(reduce::partial_place(product, self.chunks, chunk)).write(value);
                return;
            }
            let row = (*span).first_row - group.peers.layers + (*span).rows_before + (chunk - (*span).first_chunk);
            let place = group.peers.in_rows(sums.rows(group.peers), sums.row_sum(product), row);
            // A loop that must not be unrolled.
            for reader in 0..arch::opaque(ranks as u32) as usize {
                ((group.mailbox(reader) + place) as *mut f64).write(value);
            }
        }
    }
}

/// The location of sums of one kind.
pub(super) trait Sums: Copy {
    /// The offset of a rank's sums in the mailboxes.
    fn offset(&self, peers: &Peers, rank: usize) -> usize;
    /// The index of a product of a layer behind that offset.
    fn place(&self, layer: usize, product: usize) -> usize;
    /// The offset of the rows in the mailboxes.
    fn rows(&self, peers: &Peers) -> u64;
    /// The index of a product among the sums of a row.
    fn row_sum(&self, product: usize) -> usize;
}

/// The products of the vectors of this many ranks.
#[derive(Clone, Copy)]
pub(super) struct Products(pub(super) usize);

impl Sums for Products {
    #[inline(always)]
    fn offset(&self, peers: &Peers, rank: usize) -> usize {
        peers.products_of(rank)
    }

    #[inline(always)]
    fn place(&self, layer: usize, product: usize) -> usize {
        layer * products(self.0) + product
    }

    #[inline(always)]
    fn rows(&self, peers: &Peers) -> u64 {
        peers.product_rows
    }

    #[inline(always)]
    fn row_sum(&self, product: usize) -> usize {
        product
    }
}

/// A part of one pair's sums on the exact path; each pair has `count` sums.
#[derive(Clone, Copy)]
pub(super) struct ExactSums {
    pub(super) ranks: usize,
    pub(super) pair: usize,
    pub(super) count: usize,
    /// The first sum of the part.
    pub(super) first: usize,
}

impl Sums for ExactSums {
    #[inline(always)]
    fn offset(&self, peers: &Peers, rank: usize) -> usize {
        peers.pairs_of(rank)
    }

    #[inline(always)]
    fn place(&self, layer: usize, product: usize) -> usize {
        (layer * (self.ranks - 1) + self.pair) * self.count + self.first + product
    }

    #[inline(always)]
    fn rows(&self, peers: &Peers) -> u64 {
        peers.pair_rows
    }

    #[inline(always)]
    fn row_sum(&self, product: usize) -> usize {
        self.pair * self.count + self.first + product
    }
}
