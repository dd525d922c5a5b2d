//! Adasum and ordered sums where ranks reach each other's memory: one launch reads the peers' windows, the next hands out what this
//! rank knows, the third writes the result into every rank's arena.
//!
//! `peer_gram`, `peer_coefficients`, `peer_combine`, `peer_barrier` make one Adasum; `peer_reduce`, `peer_barrier` one sum. Only this
//! rank touches its window of anybody's arena, between the start, where all ranks have come to the first launch, and the end, where
//! all have written their results. Totals are added in rank order, so that all ranks get the same bits.

use super::adasum::{LayerWeights, Tree, keep};
use super::products::{add_dots, add_triangle, gram_vector_len, partial_slot};
use super::{for_each_dtype, kernel};
use crate::abi::{DType, LaunchBounds, MOST_PEERS, Mailbox, PEER_LAYERS, PEER_THREADS, Peers, Span, vector_len};
use crate::half::{BF16, F16};
use crate::math::adasum::{Pair, Weights, coefficients, combine_pair, product_index, products, start_tree, weights};
use crate::math::{Element, elementwise};
use crate::peers::{Group, Stage};
use crate::shared::{Partials, SHARED_SLOTS};
use crate::{memory, reduce, thread, warp};

/// The first `W` of some addresses; those past `count` repeat the first, which costs no memory traffic.
#[inline(always)]
fn pick<T, const W: usize>(addresses: &[u64; 8], count: usize) -> [*mut T; W] {
    core::array::from_fn(|index| addresses[if index < count { index } else { 0 }] as *mut T)
}

/// Waits until every rank's input is ready; the first block says that this rank's is.
#[inline(always)]
unsafe fn start(group: Group<'_>) {
    // SAFETY: called by every thread of every block at the start of a kernel.
    unsafe {
        if thread::block_idx_x() == 0 {
            group.signal(0, Stage::START);
        }
        group.wait(0, Stage::START);
    }
}

/// Copies the peers' windows of a chunk, and adds up the products of all windows.
#[inline(always)]
unsafe fn copy_and_multiply<T: Element, const W: usize, const N: usize, const K: usize>(
    peers: &Peers,
    chunk: reduce::Chunk,
) -> [f64; K] {
    let (rank, count) = (peers.rank as usize, peers.world_size as usize);
    let windows: [*mut T; W] = pick(&peers.windows, count);
    let copies: [*mut T; W] = pick(&peers.copies, count);
    let mut totals = [0.0; K];
    // SAFETY: the launch provides every window and its copy over the chunk, aligned.
    unsafe {
        let load =
            |index: usize| -> [[T; N]; W] { core::array::from_fn(|vector| memory::load(windows[vector].add(index))) };
        let take = |totals: &mut [f64; K], index: usize, loaded: [[T; N]; W]| {
            let mut vector = 0;
            while vector < W {
                if vector < count && vector != rank {
                    memory::store(copies[vector].add(index), loaded[vector]);
                }
                vector += 1;
            }
            let mut lane = 0;
            while lane < N {
                let values = core::array::from_fn(|vector| loaded[vector][lane]);
                add_triangle::<T, W, K>(totals, values);
                lane += 1;
            }
        };
        // Two steps at once, where there are registers for them: more of the peers' memory is under way.
        let stride = PEER_THREADS as u64 * N as u64;
        let mut chunk = chunk;
        while W <= 4 && chunk.begin + 2 * stride <= chunk.end {
            let index = (chunk.begin + thread::thread_idx_x() as u64 * N as u64) as usize;
            let (first, second) = (load(index), load(index + stride as usize));
            take(&mut totals, index, first);
            take(&mut totals, index + stride as usize, second);
            chunk.begin += 2 * stride;
        }
        reduce::walk::<N, PEER_THREADS>(chunk, |index, found| {
            let index = index as usize;
            if found == N {
                take(&mut totals, index, load(index));
            } else {
                let values: [T; W] = core::array::from_fn(|vector| windows[vector].add(index).read());
                let mut vector = 0;
                while vector < W {
                    if vector < count && vector != rank {
                        copies[vector].add(index).write(values[vector]);
                    }
                    vector += 1;
                }
                add_triangle::<T, W, K>(&mut totals, values);
            }
        });
    }
    totals
}

/// The weighted sum of the copies over a chunk, written to every rank's window.
#[inline(always)]
unsafe fn combine<T: Element, const W: usize, const N: usize>(
    peers: &Peers,
    weights: *const f64,
    chunk: reduce::Chunk,
) {
    let count = peers.world_size as usize;
    let windows: [*mut T; W] = pick(&peers.windows, count);
    let copies: [*mut T; W] = pick(&peers.copies, count);
    // SAFETY: the launch provides every window and its copy over the chunk, aligned, and a weight for each rank.
    unsafe {
        let weights: [f64; W] = core::array::from_fn(|rank| *weights.add(if rank < count { rank } else { 0 }));
        reduce::walk::<N, PEER_THREADS>(chunk, |index, found| {
            let index = index as usize;
            if found == N {
                let loaded: [[T; N]; W] = core::array::from_fn(|vector| memory::load(copies[vector].add(index)));
                let sums: [f64; N] = core::array::from_fn(|lane| {
                    weighted(core::array::from_fn(|vector| loaded[vector][lane]), weights, count)
                });
                hand_out(windows, count, index, sums.map(T::from_f64));
            } else {
                let values = core::array::from_fn(|vector| copies[vector].add(index).read());
                hand_out(windows, count, index, [T::from_f64(weighted(values, weights, count))]);
            }
        });
    }
}

/// One element's weighted sum, in rank order.
#[inline(always)]
fn weighted<T: Element, const W: usize>(values: [T; W], weights: [f64; W], count: usize) -> f64 {
    let mut total = -0.0; // the zero that keeps the sign of a zero added to it
    let mut rank = 0;
    while rank < W {
        if rank < count {
            total = elementwise::add_weighted(total, weights[rank], values[rank].to_f64());
        }
        rank += 1;
    }
    total
}

/// Writes the same elements to every rank's window.
#[inline(always)]
unsafe fn hand_out<T: Element, const W: usize, const N: usize>(
    windows: [*mut T; W],
    count: usize,
    index: usize,
    values: [T; N],
) {
    let mut rank = 0;
    while rank < W {
        if rank < count {
            // SAFETY: elements of every window; for N > 1, the caller's index is a multiple of N behind an aligned start.
            unsafe { memory::store(windows[rank].add(index), values) };
        }
        rank += 1;
    }
}

macro_rules! of_width {
    ($name:literal $T:ident $width:literal $suffix:literal) => {
        kernel!(concat!("peer_gram_", $name, $suffix), LaunchBounds::of_peers($width), fn (
            peers: *const Peers, partials: *mut f64, spans: *const Span, span_count: u64, chunks: u64, chunk_len: u64,
        ) {
            const N: usize = gram_vector_len(<$T>::DTYPE, $width);
            const K: usize = products($width);
            let group = Group::of(peers);
            start(group);
            // A window without any element of a layer still has one block, which the other ranks wait for.
            if chunks == 0 {
                return;
            }
            let chunk = reduce::chunk_of_block(spans, span_count, chunk_len);
            let totals = copy_and_multiply::<$T, $width, N, K>(group.peers, chunk);
            let ranks = group.peers.world_size as usize;
            reduce::block_sum::<K, PEER_THREADS>(totals, |product, sum| {
                let (row, column) = const { super::products::triangle::<$width, K>() }[product];
                if column < ranks {
                    partials.add(partial_slot(product_index(row, column, ranks), chunks)).write(sum);
                }
            });
        });
        kernel!(concat!("peer_combine_", $name, $suffix), LaunchBounds::of_peers($width), fn (
            peers: *const Peers, weights: *const f64, tree: *const f64, cancelled: *const u32,
            spans: *const Span, span_count: u64, chunk_len: u64,
        ) {
            const N: usize = gram_vector_len(<$T>::DTYPE, $width);
            let peers = &*peers;
            let chunk = reduce::chunk_of_block(spans, span_count, chunk_len);
            let ranks = peers.world_size;
            if *cancelled.add(chunk.span as usize) == 0 {
                combine::<$T, $width, N>(peers, weights.add((chunk.span * ranks) as usize), chunk);
                return;
            }
            let table = peers.copies.as_ptr().cast::<*const $T>();
            let tree = Tree::<$T>::of_layer(table, tree, chunk.span, ranks);
            let windows: [*mut $T; $width] = pick(&peers.windows, ranks as usize);
            reduce::walk::<1, PEER_THREADS>(chunk, |index, _| {
                let value = tree.value(index, 0, ranks as usize);
                hand_out(windows, ranks as usize, index as usize, [<$T>::from_f64(value)]);
            });
        });
        kernel!(concat!("peer_reduce_", $name, $suffix), LaunchBounds::of_peers($width),
            fn (peers: *const Peers, len: u64, factor: f64) {
            const N: usize = vector_len(<$T>::DTYPE, DType::F16);
            let group = Group::of(peers);
            start(group);
            let count = group.peers.world_size as usize;
            let windows: [*mut $T; $width] = pick(&group.peers.windows, count);
            let tile = PEER_THREADS as u64 * N as u64;
            let begin = thread::block_idx_x() as u64 * tile;
            let chunk = reduce::Chunk { span: 0, begin, end: if len - begin < tile { len } else { begin + tile } };
            let factors = [factor; $width];
            reduce::walk::<N, PEER_THREADS>(chunk, |index, found| {
                let index = index as usize;
                if found == N {
                    let loaded: [[$T; N]; $width] =
                        core::array::from_fn(|vector| memory::load(windows[vector].add(index)));
                    let sums: [f64; N] = core::array::from_fn(|lane| {
                        weighted(core::array::from_fn(|vector| loaded[vector][lane]), factors, count)
                    });
                    hand_out(windows, count, index, sums.map(<$T>::from_f64));
                } else {
                    let values = core::array::from_fn(|vector| windows[vector].add(index).read());
                    hand_out(windows, count, index, [<$T>::from_f64(weighted(values, factors, count))]);
                }
            });
        });
    };
}

macro_rules! of_dtype {
    ($name:literal $T:ident) => {
        of_width!($name $T 2 "_p2");
        of_width!($name $T 4 "_p4");
        of_width!($name $T 8 "_p8");
        kernel!(concat!("peer_coefficients_", $name), LaunchBounds::of_peers(MOST_PEERS), fn (
            peers: *const Peers, out: *mut f64, tree: *mut f64, cancelled: *mut u32, totals: *mut f64,
            partials: *const f64, spans: *const Span, span_count: u64, chunks: u64,
        ) {
            let group = Group::of(peers);
            let block = Block::of(group, span_count);
            block.add_up_and_hand_out(partials, spans, chunks);
            block.meet(Stage::PRODUCTS);
            block.find_weights(out, tree, cancelled, totals);
            thread::sync_threads();
            block.recompute::<$T>(out, tree, cancelled, spans);
        });
    };
}
for_each_dtype!(of_dtype);

kernel!("peer_barrier", LaunchBounds::of_peers(MOST_PEERS), fn (peers: *const Peers) {
    let group = Group::of(peers);
    group.signal(0, Stage::END);
    group.wait(0, Stage::END);
    if thread::thread_idx_x() == 0 {
        let runs = group.peers.runs as *mut u32;
        runs.write(runs.read().wrapping_add(1));
    }
});

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

/// The layers that one block of `peer_coefficients` handles, and where their numbers lie.
#[derive(Clone, Copy)]
struct Block<'a> {
    group: Group<'a>,
    mailbox: Mailbox,
    ranks: usize,
    /// Products of a layer.
    width: usize,
    first: usize,
    count: usize,
}

impl<'a> Block<'a> {
    #[inline(always)]
    fn of(group: Group<'a>, layers: u64) -> Self {
        let (layers, ranks) = (layers as usize, group.peers.world_size as usize);
        let first = thread::block_idx_x() as usize * PEER_LAYERS;
        let rest = layers - first;
        let count = if rest < PEER_LAYERS { rest } else { PEER_LAYERS };
        // Never less than 1, which the compiler does not know: a check of divisions would compile a panic into the kernel.
        let width = products(ranks).max(1);
        Block { group, mailbox: Mailbox { layers, world_size: ranks }, ranks, width, first, count }
    }

    /// # Safety
    /// Every thread of the block must get here.
    #[inline(always)]
    unsafe fn meet(self, stage: Stage) {
        let row = 1 + thread::block_idx_x() as usize;
        // SAFETY: the mailboxes have a row for each block.
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
    unsafe fn slot(self, reader: usize, offset: usize, place: usize) -> *mut f64 {
        // SAFETY: the caller's promise.
        let mailbox = unsafe { self.group.mailbox(reader) };
        (mailbox + (offset + place * 8) as u64) as *mut f64
    }

    /// Adds each layer's partials up, eight lanes a product, and puts the totals into every mailbox.
    #[inline(always)]
    unsafe fn add_up_and_hand_out(self, partials: *const f64, spans: *const Span, chunks: u64) {
        const LANES: u32 = 8;
        const TEAMS: usize = (PEER_THREADS / LANES) as usize;
        let (own, thread) = (self.group.peers.rank as usize, thread::thread_idx_x());
        let (team, lane) = ((thread / LANES) as usize, (thread % LANES) as usize);
        let offset = self.mailbox.products(own);
        let items = self.count * self.width;
        let mut round = 0;
        // SAFETY: the launch provides the partials of every layer, and mailboxes with room for all totals. All threads take part in
        // every round.
        unsafe {
            while round < items {
                let item = round + team;
                let mut sum = 0.0;
                let (layer, product) = (self.first + item / self.width, item % self.width);
                if item < items {
                    let begin = (*spans.add(layer)).first_block;
                    let is_last = layer + 1 == self.mailbox.layers;
                    let end = if is_last { chunks } else { (*spans.add(layer + 1)).first_block };
                    let row = partials.add(product * chunks as usize);
                    let mut chunk = begin + lane as u64;
                    while chunk < end {
                        sum += *row.add(chunk as usize);
                        chunk += LANES as u64;
                    }
                }
                let sum = warp::sum_of::<LANES>(sum);
                if item < items && lane < self.ranks {
                    self.slot(lane, offset, layer * self.width + product).write(sum);
                }
                round += TEAMS;
            }
        }
    }

    /// Adds the ranks' totals up, in rank order, and computes the weights of each layer, in shared memory: each step of it depends on
    /// the one before.
    #[inline(always)]
    unsafe fn find_weights(self, out: *mut f64, tree: *mut f64, cancelled: *mut u32, totals: *mut f64) {
        const { assert!(PEER_LAYERS * (products(MOST_PEERS) + MOST_PEERS) <= SHARED_SLOTS) };
        let own = self.group.peers.rank as usize;
        let thread = thread::thread_idx_x() as usize;
        let shared = Partials::of_block();
        // SAFETY: the launch provides room for every layer; every rank's totals have arrived; slots are within the array, each used by
        // one thread until the barrier.
        unsafe {
            let mut item = thread;
            while item < self.count * self.width {
                let place = self.first * self.width + item;
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
            let product = |i, j| shared.read(thread * self.width + product_index(i, j, self.ranks));
            let mut layer_weights = SharedWeights { shared, first: self.count * self.width + thread * self.ranks };
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
    unsafe fn recompute<T: Element>(self, out: *mut f64, tree: *mut f64, cancelled: *const u32, spans: *const Span) {
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
                        self.hand_out_pair::<T>(one, tree, cancelled, spans);
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
    unsafe fn hand_out_pair<T: Element>(self, pair: Pair, tree: *const f64, cancelled: *const u32, spans: *const Span) {
        let peers = self.group.peers;
        let offset = self.mailbox.tree(peers.rank as usize);
        // SAFETY: as above; every thread of the block comes here, and takes part in each sum.
        unsafe {
            for layer in self.first..self.first + self.count {
                if *cancelled.add(layer) == 0 {
                    continue;
                }
                let span = *spans.add(layer);
                let chunk = reduce::Chunk { span: layer as u64, begin: span.begin, end: span.begin + span.len };
                let tree = Tree::<T>::of_layer(peers.copies.as_ptr().cast(), tree, layer as u64, peers.world_size);
                let mut totals = [0.0; 3];
                reduce::walk::<1, PEER_THREADS>(chunk, |element, _| {
                    let left = tree.value(element, pair.begin, pair.middle);
                    let right = tree.value(element, pair.middle, pair.end);
                    totals = add_dots(totals, left, right);
                });
                // The block's shared memory may still be read for the sums before these.
                thread::sync_threads();
                let place = (layer * (self.ranks - 1) + pair.index()) * 3;
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
            let place = (layer * (self.ranks - 1) + pair.index()) * 3;
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
