//! Adasum by one Gram matrix: `peer_adasum`.
//!
//! The exact path of a layer whose norms have cancelled is walked by the block that finds its weights.

use super::super::adasum::{LayerWeights, Tree, keep};
use super::super::kernel;
use super::super::products::{add_dots, add_triangle, gram_vector_len, partial_place, triangle};
use super::team::Team;
use super::{hand_out, pick, weighted, write_each};
use crate::abi::{LaunchBounds, MOST_PEERS, PEER_LAYERS, PEER_THREADS, Peers, Span};
use crate::half::{BF16, F16};
use crate::math::Element;
use crate::math::adasum::{Pair, Weights, coefficients, combine_pair, product_index, products, start_tree, weights};
use crate::peers::{Group, Progress, Stage};
use crate::shared::{Partials, SHARED_SLOTS};
use crate::{reduce, thread};

/// Adds up the products of the copies over a chunk.
#[inline(always)]
unsafe fn multiply<T: Element, const W: usize, const N: usize, const K: usize>(
    peers: &Peers,
    chunk: reduce::Chunk,
) -> [f64; K] {
    let copies = pick(&peers.copies, peers.world_size as usize).map(|copy: *mut T| copy.cast_const());
    let add = add_triangle::<T, W, K>;
    // SAFETY: the launch provides every copy over the chunk, aligned.
    unsafe {
        match W {
            // Two steps at once, where there are registers for them.
            ..=4 => reduce::accumulate::<T, W, N, K, 2, PEER_THREADS>(copies, chunk, add),
            _ => reduce::accumulate::<T, W, N, K, 1, PEER_THREADS>(copies, chunk, add),
        }
    }
}

/// Slots of the [`Tree`] of a group of up to `width` ranks.
const fn slots(width: usize) -> usize {
    width.ilog2() as usize + 1
}

macro_rules! of_width {
    ($name:literal $T:ident $width:literal $suffix:literal) => {
        kernel!(concat!("peer_adasum_", $name, $suffix), LaunchBounds::of_peers($width), fn (
            peers: *const Peers, weights: *mut f64, tree: *mut f64, cancelled: *mut u32, totals: *mut f64, partials: *mut f64,
            spans: *const Span, span_count: u64, chunks: u64, chunk_len: u64, senders: u64,
        ) {
            const N: usize = gram_vector_len(<$T>::DTYPE, $width);
            const K: usize = products($width);
            // One pair joins two ranks, and cancels nothing.
            const HAS_EXACT_PATH: bool = $width > 2;
            let group = Group::of(peers);
            let mut block = thread::block_idx_x() as u64;
            if block < senders {
                group.send(block, senders);
                return;
            }
            block -= senders;
            let ranks = group.peers.world_size as usize;
            let layer_of = |chunk: reduce::Chunk| group.peers.layer(chunk.span, span_count) as usize;
            if block < chunks {
                let chunk = reduce::chunk(block, spans, span_count, chunk_len);
                let size = size_of::<$T>() as u64;
                group.receive(chunk.begin * size, chunk.end * size);
                let sums = multiply::<$T, $width, N, K>(group.peers, chunk);
                reduce::block_sum::<K, PEER_THREADS>(sums, |product, sum| {
                    let (row, column) = const { triangle::<$width, K>() }[product];
                    if column < ranks {
                        partials.add(partial_place(product_index(row, column, ranks), chunks, block)).write(sum);
                    }
                });
                group.count(layer_of(chunk) / PEER_LAYERS, Progress::Multiplied);
                return;
            }
            block -= chunks;
            let teams = group.peers.mailbox().teams() as u64;
            if block < teams {
                let team = Team::new(group, block as usize);
                let multiplied = team.chunks(spans, chunks);
                group.wait_for_count(team.number, Progress::Multiplied, multiplied, multiplied);
                let width = products(ranks);
                let offset = team.mailbox.products(group.peers.rank as usize);
                let place = |layer, product| layer * width + product;
                team.add_up_and_hand_out(partials, spans, chunks, width, offset, place);
                team.meet(Stage::PRODUCTS);
                team.find_weights(weights, tree, cancelled, totals);
                if HAS_EXACT_PATH {
                    thread::sync_threads();
                    team.recompute::<$T, { slots($width) }>(weights, tree, cancelled, spans, span_count);
                }
                group.count(team.number, Progress::Weights);
                return;
            }
            block -= teams;
            let chunk = reduce::chunk(block, spans, span_count, chunk_len);
            let layer = layer_of(chunk);
            group.wait_for_count(layer / PEER_LAYERS, Progress::Weights, 1, 1);
            if !HAS_EXACT_PATH || *cancelled.add(layer) == 0 {
                let weights = weights.add(layer * ranks);
                let weights = core::array::from_fn(|rank| *weights.add(if rank < ranks { rank } else { 0 }));
                write_each::<$T, $width, N>(group.peers, chunk, |values| <$T>::from_f64(weighted(values, weights, ranks)));
                return;
            }
            let table = group.peers.copies.as_ptr().cast::<*const $T>();
            let tree = Tree::<$T, { slots($width) }>::of_layer(table, tree, layer as u64, group.peers.world_size);
            let windows: [*mut $T; $width] = pick(&group.peers.windows, ranks);
            reduce::walk::<1, PEER_THREADS>(chunk, |index, _| {
                let value = tree.value(index, 0, ranks);
                hand_out(windows, ranks, index as usize, [<$T>::from_f64(value)]);
            });
        });
    };
}

for_each_dtype_and_width!(of_width);

/// One layer's weights in shared memory.
struct SharedWeights {
    shared: Partials,
    first: usize,
}

impl Weights for SharedWeights {
    #[inline(always)]
    fn get(&self, rank: usize) -> f64 {
        // SAFETY: the slots behind `first` are this thread's, one a rank.
        unsafe { self.shared.read(self.first + rank) }
    }

    #[inline(always)]
    fn set(&mut self, rank: usize, weight: f64) {
        // SAFETY: as above.
        unsafe { self.shared.write(self.first + rank, weight) }
    }
}

impl Team<'_> {
    /// Adds the ranks' totals up, in rank order, and computes the weights of each layer, in shared memory: each step of it depends on
    /// the one before.
    #[inline(always)]
    unsafe fn find_weights(self, out: *mut f64, tree: *mut f64, cancelled: *mut u32, totals: *mut f64) {
        const { assert!(PEER_LAYERS * (products(MOST_PEERS) + MOST_PEERS) <= SHARED_SLOTS) };
        let (own, width) = (self.group.peers.rank as usize, products(self.ranks));
        let thread = thread::thread_idx_x() as usize;
        let shared = Partials::of_block();
        // SAFETY: the launch provides room for every layer; every rank's totals have arrived; slots are within the array, each used by
        // one thread until the barrier.
        unsafe {
            let mut item = thread;
            while item < self.count * width {
                let place = self.first * width + item;
                let mut total = 0.0;
                for rank in 0..self.ranks {
                    total += *self.slot(own, self.mailbox.products(rank), place);
                }
                totals.add(place).write(total);
                shared.write(item, total);
                item += PEER_THREADS as usize;
            }
            thread::sync_threads();
            if thread >= self.count {
                return;
            }
            let layer = self.first + thread;
            let product = |i, j| shared.read(thread * width + product_index(i, j, self.ranks));
            let mut layer_weights = SharedWeights { shared, first: self.count * width + thread * self.ranks };
            let lost = weights(&mut layer_weights, self.ranks, product);
            if lost {
                let tree = tree.add(layer * 2 * (self.ranks - 1));
                start_tree(&mut layer_weights, self.ranks, product, |pair, both| keep(tree, pair, both));
            }
            for rank in 0..self.ranks {
                out.add(layer * self.ranks + rank).write(layer_weights.get(rank));
            }
            cancelled.add(layer).write(lost as u32);
        }
    }

    /// The exact path of this block's cancelled layers, level by level. All ranks have the same, because they have the same totals.
    #[inline(always)]
    unsafe fn recompute<T: Element, const SLOTS: usize>(
        self,
        out: *mut f64,
        tree: *mut f64,
        cancelled: *const u32,
        spans: *const Span,
        span_count: u64,
    ) {
        // SAFETY: as above; the branches are the same for the whole block and on every rank.
        unsafe {
            let mut any = false;
            for place in 0..self.count {
                any |= *cancelled.add(self.first + place) != 0;
            }
            if !any {
                return;
            }
            let mut stage = Stage::TREE;
            let mut next = Pair::first(self.ranks);
            while let Some(first_of_level) = next {
                let half = first_of_level.middle - first_of_level.begin;
                let mut pair = Some(first_of_level);
                next = None;
                while let Some(one) = pair {
                    if one.middle - one.begin != half {
                        next = Some(one);
                        break;
                    }
                    if !one.joins_ranks() {
                        self.hand_out_pair::<T, SLOTS>(one, tree, cancelled, spans, span_count);
                    }
                    pair = one.next(self.ranks);
                }
                if half == 1 {
                    continue;
                }
                self.meet(stage);
                stage = Stage(stage.0 + 1);
                let mut pair = Some(first_of_level);
                while let Some(one) = pair {
                    if one.middle - one.begin != half {
                        break;
                    }
                    self.set_pair(one, out, tree, cancelled);
                    pair = one.next(self.ranks);
                }
                thread::sync_threads();
            }
        }
    }

    /// Puts the sums of one pair over this rank's window into every mailbox, for each cancelled layer.
    #[inline(always)]
    unsafe fn hand_out_pair<T: Element, const SLOTS: usize>(
        self,
        pair: Pair,
        tree: *const f64,
        cancelled: *const u32,
        spans: *const Span,
        span_count: u64,
    ) {
        let peers = self.group.peers;
        let offset = self.mailbox.tree(peers.rank as usize);
        // SAFETY: as above; every thread of the block comes here, and takes part in each sum.
        unsafe {
            for layer in self.first..self.first + self.count {
                if *cancelled.add(layer) == 0 {
                    continue;
                }
                let tree =
                    Tree::<T, SLOTS>::of_layer(peers.copies.as_ptr().cast(), tree, layer as u64, peers.world_size);
                // Spans that are one layer lie in order, with nothing but zeros between them.
                let last = *spans.add(layer + peers.spans_of_a_layer(span_count) as usize - 1);
                let begin = (*spans.add(layer)).begin;
                let chunk = reduce::Chunk { span: layer as u64, begin, end: last.begin + last.len };
                let mut totals = [0.0; 3];
                reduce::walk::<1, PEER_THREADS>(chunk, |element, _| {
                    let left = tree.value(element, pair.begin, pair.middle);
                    let right = tree.value(element, pair.middle, pair.end);
                    totals = add_dots(totals, left, right);
                });
                // The block's shared memory may still be read for the sums before these.
                thread::sync_threads();
                let place = self.sums_place(layer, pair);
                reduce::block_sum::<3, PEER_THREADS>(totals, |sum_index, sum| {
                    for reader in 0..self.ranks {
                        self.slot(reader, offset, place + sum_index).write(sum);
                    }
                });
            }
        }
    }

    /// Adds the ranks' sums of one pair up, in rank order, and applies its coefficients.
    #[inline(always)]
    unsafe fn set_pair(self, pair: Pair, out: *mut f64, tree: *mut f64, cancelled: *const u32) {
        let (own, thread) = (self.group.peers.rank as usize, thread::thread_idx_x() as usize);
        if thread >= self.count {
            return;
        }
        let layer = self.first + thread;
        // SAFETY: as above; every rank's sums have arrived.
        unsafe {
            if *cancelled.add(layer) == 0 {
                return;
            }
            let place = self.sums_place(layer, pair);
            let mut sums = [0.0; 3];
            for rank in 0..self.ranks {
                let offset = self.mailbox.tree(rank);
                sums[0] += *self.slot(own, offset, place);
                sums[1] += *self.slot(own, offset, place + 1);
                sums[2] += *self.slot(own, offset, place + 2);
            }
            let both = coefficients(sums[0], sums[1], sums[2]);
            combine_pair(&mut LayerWeights(out.add(layer * self.ranks)), pair, both);
            keep(tree.add(layer * 2 * (self.ranks - 1)), pair, both);
        }
    }
}
