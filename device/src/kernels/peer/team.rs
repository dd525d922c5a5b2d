//! [`Team`]: how the blocks that find a few layers' weights, one on each rank, add up and exchange what the weights are made of.
//!
//! What the numbers mean is the algorithms' business.

use crate::abi::{ChunkedSpan, PEER_LAYERS, PEER_THREADS, Peers, Row};
use crate::math::adasum::{Coefficients, Pair, coefficients, products};
use crate::peers::{Group, Stage};
use crate::{arch, reduce, thread};

/// The blocks of that number, one on each rank, that find the weights of the same layers, as this rank's sees it.
#[derive(Clone, Copy)]
pub(super) struct Team<'a> {
    pub(super) group: Group<'a>,
    pub(super) number: u32,
    pub(super) ranks: usize,
}

impl<'a> Team<'a> {
    #[inline(always)]
    pub(super) fn new(group: Group<'a>, number: u64, ranks: usize) -> Self {
        Team { group, number: number as u32, ranks }
    }

    /// The first of the layers.
    #[inline(always)]
    pub(super) fn first(self) -> usize {
        self.number as usize * PEER_LAYERS
    }

    /// How many they are.
    #[inline(always)]
    pub(super) fn count(self) -> usize {
        let rest = self.group.peers.layers as usize - self.first();
        if rest < PEER_LAYERS { rest } else { PEER_LAYERS }
    }

    /// The same team. What follows from its numbers is computed anew from there on, and is not kept in registers around a loop.
    #[inline(always)]
    pub(super) fn again(self) -> Self {
        Team { group: self.group.again(), number: arch::forget(self.number as u64) as u32, ..self }
    }

    /// Blocks that multiply chunks of these layers, of the `blocks` of all.
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
    /// As [`blocks`](Self::blocks).
    #[inline(always)]
    pub(super) unsafe fn chunks_of(self, layer: usize, partials: Partials) -> (u64, u64) {
        // SAFETY: the caller's promise.
        unsafe {
            let first_chunk = |layer: usize| (*partials.spans.add(layer)).first_chunk;
            let is_last = layer + 1 == self.group.peers.layers as usize;
            (first_chunk(layer), if is_last { partials.chunks } else { first_chunk(layer + 1) })
        }
    }

    /// The number of a layer's chunk that is `place` chunks behind its first, if it has so many. Computed anew each time: registers are short where
    /// chunks are walked.
    ///
    /// # Safety
    /// As [`blocks`](Self::blocks).
    #[inline(always)]
    pub(super) unsafe fn chunk_at(self, layer: usize, place: u32, partials: Partials) -> Option<u64> {
        let spans = arch::forget(partials.spans as u64) as *const ChunkedSpan;
        // SAFETY: the caller's promise.
        let (first, end) = unsafe { self.again().chunks_of(layer, Partials { spans, ..partials }) };
        let number = first + place as u64;
        (number < end).then_some(number)
    }

    /// # Safety
    /// Every thread of the block must get here.
    #[inline(always)]
    pub(super) unsafe fn meet(self, stage: Stage) {
        let row = Row::Weights(self.number as usize);
        // SAFETY: the mailboxes have a row for each team.
        unsafe {
            self.group.signal(row, stage);
            self.group.wait(row, stage);
        }
    }

    /// Number `place` of what lies at `offset` in the mailbox of `reader`.
    ///
    /// # Safety
    /// `reader` is below the world size.
    #[inline(always)]
    pub(super) unsafe fn slot(self, reader: usize, offset: usize, place: usize) -> *mut f64 {
        // SAFETY: the caller's promise.
        let mailbox = unsafe { self.group.mailbox(reader) };
        (mailbox + (offset + place * 8) as u64) as *mut f64
    }

    /// The place of a pair's sums, of which each has so many, behind [`Peers::pairs_of`](crate::abi::Peers::pairs_of).
    #[inline(always)]
    pub(super) fn sums_place(self, layer: usize, pair: Pair, count: usize) -> usize {
        (layer * (self.ranks - 1) + pair.index()) * count
    }

    /// A sum over all windows: the ranks' numbers at `place` in rank order, or of a divided layer this rank's alone, which is the sum of its rows;
    /// `offset(rank)` is where a rank's numbers lie in the mailboxes.
    ///
    /// # Safety
    /// [`exchange`](Self::exchange) has been here with these.
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

    /// A pair's coefficients in a layer, from its sums over all windows.
    ///
    /// # Safety
    /// They have been exchanged.
    #[inline(always)]
    pub(super) unsafe fn coefficients_of(self, is_divided: bool, layer: usize, pair: Pair) -> Coefficients {
        let place = self.sums_place(layer, pair, 3);
        // SAFETY: the caller's promise.
        let sum = |sum: usize| unsafe { self.total(is_divided, |rank| self.group.peers.pairs_of(rank), place + sum) };
        coefficients(sum(0), sum(1), sum(2))
    }

    /// Whether any of these layers is divided.
    ///
    /// # Safety
    /// As [`blocks`](Self::blocks).
    #[inline(always)]
    pub(super) unsafe fn has_divided(self, spans: *const ChunkedSpan) -> bool {
        let mut any = false;
        for layer in self.first()..self.first() + self.count() {
            // SAFETY: the caller's promise.
            any |= unsafe { is_divided(spans, layer) };
        }
        any
    }

    /// Exchanges `width` sums of each layer with the other ranks, and meets them: puts the sums over this rank's window into every mailbox, that of a
    /// layer's product at `sums.place(layer, product)`; of divided layers, whose chunks' sums are in the mailboxes already, the sum of all rows
    /// into this rank's own alone. Afterwards [`total`](Self::total) finds them.
    ///
    /// # Safety
    /// The partials of every layer, and mailboxes with room for all sums. All threads of the block must get here.
    #[inline(always)]
    pub(super) unsafe fn exchange(self, partials: Partials, width: usize, sums: impl Sums, stage: Stage) {
        // SAFETY: the caller's promise; what is divided is the same for the whole block.
        unsafe {
            // A loop that stays one: the passes differ in few instructions.
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

    /// Adds up `width` sums of each layer that is divided or each that is not, eight lanes a sum, in the order of
    /// [`Reduction`](crate::reduce::Reduction).
    ///
    /// # Safety
    /// As [`exchange`](Self::exchange).
    #[inline(always)]
    unsafe fn add_up(self, divided: bool, partials: Partials, width: usize, sums: &impl Sums) {
        const LANES: u32 = 8;
        const ITEMS: u32 = PEER_THREADS / LANES;
        let own_item = reduce::thread_of_block() / LANES;
        // Never less than 1, which the compiler does not know: a check of divisions would compile a panic into the kernel. Few enough for
        // 32 bits, in which they are short.
        let width = (width as u32).max(1);
        let items = self.count() as u32 * width;
        let mut round = 0;
        while round < items {
            let item = round + own_item;
            let (layer, product) = (self.first() + (item / width) as usize, (item % width) as usize);
            // SAFETY: the caller's promise. All threads take part in every round.
            unsafe { self.add_up_one(divided, item < items, layer, product, partials, sums) };
            round += ITEMS;
        }
    }

    /// Adds up one sum of a layer, if the lanes have one to add up, and if that layer is divided or is not.
    ///
    /// # Safety
    /// As [`exchange`](Self::exchange); eight neighbouring lanes come here with the same sum.
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
        let (peers, lane) = (self.group.peers, (reduce::thread_of_block() % 8) as usize);
        let own = peers.rank as usize;
        // SAFETY: the caller's promise; of this rank's own mailbox, nobody writes to the rows any more.
        unsafe {
            let is_wanted = is_there && is_divided(partials.spans, layer) == divided;
            let (mut row, mut begin, mut end) = (partials.first as *const f64, 0, 0);
            if is_wanted && divided {
                let span = partials.spans.add(layer);
                row =
                    (self.group.mailbox(own) + peers.in_rows(sums.rows(peers), sums.row_sum(product), 0)) as *const f64;
                begin = (*span).first_row - peers.layers;
                end = begin + (*span).rows;
            } else if is_wanted {
                row = row.add(reduce::partial_place(sums.partial(product), partials.chunks, 0));
                (begin, end) = self.chunks_of(layer, partials);
            }
            let sum = reduce::fold_by_lanes(row, begin, end);
            if is_wanted && lane < self.ranks && (!divided || lane == own) {
                self.slot(lane, sums.offset(peers, own), sums.place(layer, product)).write(sum);
            }
        }
    }
}

/// Whether other windows than this rank's have chunks of a layer too.
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
    /// Keeps the sum of a product over a chunk of that number, which is one of this layer's: here, or in the rows of every mailbox, if the layer is
    /// divided.
    ///
    /// # Safety
    /// There is room for it; the mailboxes are those of `ranks` ranks.
    #[inline(always)]
    pub(super) unsafe fn keep(
        self,
        group: Group<'_>,
        ranks: usize,
        (layer, chunk, product): (usize, u64, usize),
        sums: &impl Sums,
        value: f64,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let span = self.spans.add(layer);
            if (*span).first_row == 0 {
                self.first.add(reduce::partial_place(sums.partial(product), self.chunks, chunk)).write(value);
                return;
            }
            let row = (*span).first_row - group.peers.layers + (*span).rows_before + (chunk - (*span).first_chunk);
            let place = group.peers.in_rows(sums.rows(group.peers), sums.row_sum(product), row);
            // A loop that stays one.
            for reader in 0..arch::opaque(ranks as u32) as usize {
                ((group.mailbox(reader) + place) as *mut f64).write(value);
            }
        }
    }
}

/// Where sums of one kind are.
pub(super) trait Sums: Copy {
    /// Which of the partials of a chunk a product's is.
    fn partial(&self, product: usize) -> usize;
    /// Where a rank's sums lie in the mailboxes.
    fn offset(&self, peers: &Peers, rank: usize) -> usize;
    /// The place of a product of a layer behind that.
    fn place(&self, layer: usize, product: usize) -> usize;
    /// Where the rows lie in the mailboxes.
    fn rows(&self, peers: &Peers) -> u64;
    /// Which of the sums of a row a product's is.
    fn row_sum(&self, product: usize) -> usize;
}

/// The products of all ranks' vectors, of so many ranks.
#[derive(Clone, Copy)]
pub(super) struct Products(pub(super) usize);

impl Sums for Products {
    #[inline(always)]
    fn partial(&self, product: usize) -> usize {
        product
    }

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

/// The three sums of each pair of a level of the tree over so many ranks.
#[derive(Clone, Copy)]
pub(super) struct PairSums {
    pub(super) ranks: usize,
    pub(super) level: usize,
}

impl PairSums {
    /// The place of a product among the sums of all pairs: pair number `n` of a level begins at rank `n × 2^(level + 1)`.
    #[inline(always)]
    fn of_all(&self, product: usize) -> usize {
        let pair = ((product / 3) << (self.level + 1)) + (1 << self.level) - 1;
        pair * 3 + product % 3
    }
}

impl Sums for PairSums {
    #[inline(always)]
    fn partial(&self, product: usize) -> usize {
        product
    }

    #[inline(always)]
    fn offset(&self, peers: &Peers, rank: usize) -> usize {
        peers.pairs_of(rank)
    }

    #[inline(always)]
    fn place(&self, layer: usize, product: usize) -> usize {
        layer * (self.ranks - 1) * 3 + self.of_all(product)
    }

    #[inline(always)]
    fn rows(&self, peers: &Peers) -> u64 {
        peers.pair_rows
    }

    #[inline(always)]
    fn row_sum(&self, product: usize) -> usize {
        self.of_all(product)
    }
}

/// A part of one pair's sums on the exact path, of which each pair has `count`.
#[derive(Clone, Copy)]
pub(super) struct ExactSums {
    pub(super) ranks: usize,
    pub(super) pair: usize,
    pub(super) count: usize,
    /// The first of the part.
    pub(super) first: usize,
}

impl Sums for ExactSums {
    #[inline(always)]
    fn partial(&self, product: usize) -> usize {
        product
    }

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
