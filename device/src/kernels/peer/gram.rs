//! Adasum by one Gram matrix: `peer_adasum`.
//!
//! The exact path of a layer whose norms have cancelled is walked by the block that finds its weights.

use super::super::adasum::{LayerWeights, keep, kept};
use super::super::kernel;
use super::super::products::{add_dots, add_triangle, gram_vector_len, triangle};
use super::team::Team;
use super::{coefficients_below, hand_out, nodes, pick, weighted, write_each};
use crate::abi::{LaunchBounds, MOST_PEERS, PEER_LAYERS, PEER_THREADS, Peers, Span};
use crate::half::{BF16, F16};
use crate::math::Element;
use crate::math::adasum::{
    Coefficients, Weights, combine_pair, join, pairs_of_level, product_index, products, start_tree, weights,
};
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
    // One step at once: the links are slower than that, and every step more is compiled at first use.
    // SAFETY: the launch provides every copy over the chunk, aligned.
    unsafe { reduce::accumulate_aligned::<T, W, N, K, 1, PEER_THREADS>(copies, chunk, add_triangle::<T, W, K>) }
}

/// The combination tree of a cancelled layer over some neighbouring ranks, up to a level, at most `MOST`: their copies and the coefficients of
/// their pairs.
struct Tree<T, const W: usize, const MOST: usize> {
    copies: [*const T; W],
    count: usize,
    level: usize,
    coefficients: [Coefficients; W],
}

impl<T: Element, const W: usize, const MOST: usize> Tree<T, W, MOST> {
    /// Over the ranks `begin..end`, up to where pairs of that level are still to be joined. `tree` is the layer's.
    #[inline(always)]
    unsafe fn of(peers: &Peers, tree: *const f64, (begin, end): (usize, usize), level: usize) -> Self {
        let count = end - begin;
        // SAFETY: ranks are below the world size; the launch provides two numbers for each pair of a layer, and those of lower levels
        // have been set.
        unsafe {
            let copy = |place| *peers.copies.get_unchecked(begin + if place < count { place } else { 0 }) as *const T;
            let coefficients = coefficients_below::<W, MOST>(tree.add(2 * begin), count, level);
            Self { copies: core::array::from_fn(copy), count, level, coefficients }
        }
    }

    /// The nodes of that level at one element, each at the place of its first rank, as combining whole vectors in `f64` would give them.
    #[inline(always)]
    unsafe fn nodes(&self, element: usize) -> [f64; W] {
        // SAFETY: the launch provides every copy.
        let values = self.copies.map(|copy| unsafe { copy.add(element).read() }.to_f64());
        nodes::<_, W, MOST>(values, self.count, self.level, |pair, left, right| {
            join(self.coefficients[pair.index()], left, right)
        })
    }
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
            const LEVELS: usize = ($width as usize).ilog2() as usize;
            let group = Group::of(peers);
            let Some(mut block) = group.send_or(senders) else { return };
            // Two ranks are the least, which the compiler does not know.
            let ranks = if $width == 2 { 2 } else { group.peers.world_size as usize };
            let layer_of = |chunk: reduce::Chunk| group.peers.layer(chunk.span, span_count) as usize;
            if block < chunks {
                let chunk = reduce::chunk(block, spans, span_count, chunk_len);
                let size = size_of::<$T>() as u64;
                group.receive(chunk.begin * size, chunk.end * size);
                let sums = multiply::<$T, $width, N, K>(group.peers, chunk);
                reduce::block_sum::<K, PEER_THREADS>(sums, |product, sum| {
                    let (row, column) = const { triangle::<$width, K>() }[product];
                    if column < ranks {
                        partials.add(reduce::partial_place(product_index(row, column, ranks), chunks, block)).write(sum);
                    }
                });
                group.count(layer_of(chunk) / PEER_LAYERS, Progress::Multiplied);
                return;
            }
            block -= chunks;
            let teams = group.peers.teams() as u64;
            if block < teams {
                let team = Team::new(group, block as usize, ranks);
                let multiplied = team.chunks(spans, chunks);
                group.wait_for_count(team.number, Progress::Multiplied, multiplied, multiplied);
                let width = products(ranks);
                let offset = group.peers.products_of(group.peers.rank as usize);
                let place = |layer, product| layer * width + product;
                team.add_up_and_hand_out(partials, spans, chunks, width, offset, place);
                team.meet(Stage::PRODUCTS);
                team.find_weights(weights, tree, cancelled, totals);
                if HAS_EXACT_PATH {
                    thread::sync_threads();
                    team.recompute::<$T, $width, { LEVELS - 1 }>(weights, tree, cancelled, spans, span_count);
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
            let tree = Tree::<$T, $width, LEVELS>::of(group.peers, tree.add(layer * 2 * (ranks - 1)), (0, ranks), LEVELS);
            let windows: [*mut $T; $width] = pick(&group.peers.windows, ranks);
            reduce::walk::<1, PEER_THREADS>(chunk, |index, _| {
                let [root, ..] = tree.nodes(index as usize);
                hand_out(windows, ranks, index as usize, [<$T>::from_f64(root)]);
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
                    total += *self.slot(own, self.group.peers.products_of(rank), place);
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
            let tree = tree.add(layer * 2 * (self.ranks - 1));
            let lost = weights(&mut layer_weights, self.ranks, product, |pair, both| keep(tree, pair, both));
            if lost {
                start_tree(&mut layer_weights, self.ranks, |pair| kept(tree, pair));
            }
            for rank in 0..self.ranks {
                out.add(layer * self.ranks + rank).write(layer_weights.get(rank));
            }
            cancelled.add(layer).write(lost as u32);
        }
    }

    /// The exact path of this block's cancelled layers, level by level. All ranks have the same, because they have the same totals.
    #[inline(always)]
    unsafe fn recompute<T: Element, const W: usize, const MOST: usize>(
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
            // Pairs of the first level join single ranks.
            let (mut level, mut stage) = (1, Stage::TREE);
            // Where there can be one level only, the compiler is told so: a loop would need more registers than there are.
            while 1 << level < self.ranks && (level == 1 || MOST > 1) {
                for layer in self.first..self.first + self.count {
                    if *cancelled.add(layer) != 0 {
                        self.hand_out_level::<T, W, MOST>(layer, level, tree, spans, span_count);
                    }
                }
                self.meet(stage);
                stage = Stage(stage.0 + 1);
                let thread = thread::thread_idx_x() as usize;
                let layer = self.first + thread;
                if thread < self.count && *cancelled.add(layer) != 0 {
                    let mut layer_weights = LayerWeights(out.add(layer * self.ranks));
                    for pair in pairs_of_level(level, self.ranks) {
                        let both = self.coefficients_of(layer, pair);
                        combine_pair(&mut layer_weights, pair, both);
                        keep(tree.add(layer * 2 * (self.ranks - 1)), pair, both);
                    }
                }
                thread::sync_threads();
                level += 1;
            }
        }
    }

    /// Puts the sums of one layer's pairs of a level over this rank's window into every mailbox.
    #[inline(always)]
    unsafe fn hand_out_level<T: Element, const W: usize, const MOST: usize>(
        self,
        layer: usize,
        level: usize,
        tree: *const f64,
        spans: *const Span,
        span_count: u64,
    ) {
        let peers = self.group.peers;
        let offset = peers.pairs_of(peers.rank as usize);
        // SAFETY: as above; every thread of the block comes here, and takes part in each sum.
        unsafe {
            // Spans that are one layer lie in order, with nothing but zeros between them.
            let last = *spans.add(layer + peers.spans_of_a_layer(span_count) as usize - 1);
            let begin = (*spans.add(layer)).begin;
            let chunk = reduce::Chunk { span: layer as u64, begin, end: last.begin + last.len };
            for pair in pairs_of_level(level, self.ranks) {
                let layer_tree = tree.add(layer * 2 * (self.ranks - 1));
                let tree = Tree::<T, W, MOST>::of(peers, layer_tree, (pair.begin, pair.end), level);
                let mut totals = [0.0; 3];
                reduce::walk::<1, PEER_THREADS>(chunk, |element, _| {
                    let nodes = tree.nodes(element as usize);
                    // The right side begins two or four ranks behind the left one.
                    const { assert!(W <= 8) };
                    let right = if level == 1 { nodes[2] } else { nodes[W / 2] };
                    totals = add_dots(totals, nodes[0], right);
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
}
