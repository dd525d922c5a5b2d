//! [`Team`]: how the blocks that find a few layers' weights, one on each rank, add up and exchange what the weights are made of.
//!
//! What the numbers mean is the algorithms' business.

use crate::abi::{PEER_LAYERS, PEER_THREADS, Row, Span};
use crate::math::adasum::{Coefficients, Pair, coefficients};
use crate::peers::{Group, Stage};
use crate::{arch, lanes, reduce, thread};

/// The blocks of that number, one on each rank, that find the weights of the same layers, as this rank's sees it.
#[derive(Clone, Copy)]
pub(super) struct Team<'a> {
    pub(super) group: Group<'a>,
    pub(super) number: usize,
    pub(super) ranks: usize,
    /// The first of the layers.
    pub(super) first: usize,
    /// How many they are.
    pub(super) count: usize,
}

impl<'a> Team<'a> {
    #[inline(always)]
    pub(super) fn new(group: Group<'a>, number: usize, ranks: usize) -> Self {
        let first = number * PEER_LAYERS;
        let rest = group.peers.layers as usize - first;
        let count = if rest < PEER_LAYERS { rest } else { PEER_LAYERS };
        Team { group, number, ranks, first, count }
    }

    /// The same team. What follows from its numbers is computed anew from there on, and is not kept in registers around a loop.
    #[inline(always)]
    pub(super) fn again(self) -> Self {
        Team { group: self.group.again(), first: arch::forget(self.first as u64) as usize, ..self }
    }

    /// Chunks of these layers, of `chunks` of all.
    ///
    /// # Safety
    /// `spans` has a row for each layer.
    #[inline(always)]
    pub(super) unsafe fn chunks(self, spans: *const Span, chunks: u64) -> u32 {
        // SAFETY: the caller's promise.
        unsafe {
            (self.end_of(self.first + self.count - 1, spans, chunks) - (*spans.add(self.first)).first_block) as u32
        }
    }

    /// One past the last chunk of a layer.
    ///
    /// # Safety
    /// As [`chunks`](Self::chunks).
    #[inline(always)]
    unsafe fn end_of(self, layer: usize, spans: *const Span, chunks: u64) -> u64 {
        if layer + 1 == self.group.peers.layers as usize {
            chunks
        } else {
            // SAFETY: the caller's promise.
            unsafe { (*spans.add(layer + 1)).first_block }
        }
    }

    /// # Safety
    /// Every thread of the block must get here.
    #[inline(always)]
    pub(super) unsafe fn meet(self, stage: Stage) {
        let row = Row::Weights(self.number);
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

    /// A pair's coefficients in a layer, from the sums that all ranks have handed out, added in rank order.
    ///
    /// # Safety
    /// Every rank's sums of that pair have arrived.
    #[inline(always)]
    pub(super) unsafe fn coefficients_of(self, layer: usize, pair: Pair) -> Coefficients {
        let (own, place) = (self.group.peers.rank as usize, self.sums_place(layer, pair, 3));
        let mut sums = [0.0; 3];
        for rank in 0..self.ranks {
            let offset = self.group.peers.pairs_of(rank);
            let mut sum = 0;
            while sum < 3 {
                // SAFETY: the caller's promise.
                sums[sum] += unsafe { *self.slot(own, offset, place + sum) };
                sum += 1;
            }
        }
        coefficients(sums[0], sums[1], sums[2])
    }

    /// Adds each layer's partials of `width` products up, eight lanes a product, and puts the totals into every mailbox: that of a layer's
    /// product at `place(layer, product)` behind `offset`.
    ///
    /// # Safety
    /// The partials of every layer, and mailboxes with room for all totals. All threads of the block must get here.
    #[inline(always)]
    pub(super) unsafe fn add_up_and_hand_out(
        self,
        partials: *const f64,
        spans: *const Span,
        chunks: u64,
        width: usize,
        offset: usize,
        place: impl Fn(usize, usize) -> usize,
    ) {
        const LANES: u32 = 8;
        const ITEMS: u32 = PEER_THREADS / LANES;
        let thread = thread::thread_idx_x();
        let (own_item, lane) = (thread / LANES, (thread % LANES) as usize);
        // Never less than 1, which the compiler does not know: a check of divisions would compile a panic into the kernel. Few enough for
        // 32 bits, in which they are short.
        let width = (width as u32).max(1);
        let items = self.count as u32 * width;
        let mut round = 0;
        // SAFETY: the caller's promise. All threads take part in every round.
        unsafe {
            while round < items {
                let item = round + own_item;
                let mut sum = 0.0;
                let (layer, product) = (self.first + (item / width) as usize, (item % width) as usize);
                if item < items {
                    let row = partials.add(reduce::partial_place(product, chunks, 0));
                    let end = self.end_of(layer, spans, chunks);
                    let mut chunk = (*spans.add(layer)).first_block + lane as u64;
                    while chunk < end {
                        sum += *row.add(chunk as usize);
                        chunk += LANES as u64;
                    }
                }
                let sum = lanes::sum_of::<LANES>(sum);
                if item < items && lane < self.ranks {
                    self.slot(lane, offset, place(layer, product)).write(sum);
                }
                round += ITEMS;
            }
        }
    }
}
