//! Adasum by one Gram matrix: `peer_adasum`.
//!
//! The block that computes the weights of a layer whose norms have cancelled also evaluates its exact path.

use super::super::adasum::{self, Exact, criterion, keep, keep_scaling_norms};
use super::super::products::{add_triangle, gram_vector_len};
use super::super::{for_each_dtype_and_width, kernel};
use super::team::{ExactSums, Partials, Products, Team, is_divided};
use super::{nodes, pick, weighted, write_each};
use crate::abi::{
    ChunkedSpan, DType, LaunchBounds, MOST_PEERS, PEER_LAYERS, PEER_THREADS, Peers, Span, WARP, tree_row, vector_len,
};
use crate::dialect::shared::Array;
use crate::half::*;
use crate::math::Element;
use crate::math::adasum::{Pair, Weights, pairs_of_level, product_index, products, weight_by_tree, weights};
use crate::math::precise::NUMBERS;
use crate::math::product_part::triangle;
use crate::peers::{GroupView, Progress, Stage};
use crate::shared::{self, SHARED_SLOTS};
use crate::{arch, reduce, thread};

/// Adds the products of the copies over a chunk.
#[inline(always)]
unsafe fn multiply<T: Element, const W: usize, const N: usize, const K: usize>(
    peers: &Peers,
    chunk: reduce::ElementRange,
) -> [f64; K] {
    let copies = pick(&peers.copies, peers.world_size as usize).map(|copy: *mut T| copy.cast_const());
    // One step at a time: the links are slower than that, and every additional step is compiled at first use.
    // SAFETY: the launch provides every copy over the chunk, aligned.
    unsafe { reduce::accumulate_aligned::<T, W, N, K, 1, 2>(copies, chunk, add_triangle::<T, W, K>) }
}

/// The combination tree of a cancelled layer over `count` consecutive ranks, up to a level, at most `MOST`.
struct Subtree<const W: usize, const MOST: usize> {
    count: usize,
    level: usize,
    /// The coefficients of the first of these ranks' pairs, in the layer's row; for `f64` the row itself, of all ranks.
    row: *const f64,
}

impl<const W: usize, const MOST: usize> Subtree<W, MOST> {
    /// The tree over the ranks `begin..end`, below the pairs of `level`, which are not joined. `row` is the layer's.
    #[inline(always)]
    fn of(row: *const f64, (begin, end): (usize, usize), level: usize) -> Self {
        Self { count: end - begin, level, row: row.wrapping_add(NUMBERS * begin) }
    }

    /// The row, from which numbers of `f64`'s exact path are loaded again.
    #[inline(always)]
    fn row_again<T: Exact>(&self) -> *const f64 {
        if T::IS_DOUBLE { arch::forget(self.row as u64) as *const f64 } else { self.row }
    }

    /// The nodes of that level over one element of the ranks' vectors, each at the index of its first rank, with the values of combining
    /// whole vectors in `f64`, or for `f64` in twice that precision. Coefficients are loaded again for every element: those of `f64` would
    /// not all fit into the registers.
    #[inline(always)]
    unsafe fn nodes<T: Exact>(&self, values: [T; W]) -> [T::Value; W] {
        let leaf = |place: usize| {
            let rank = if place < self.count { place } else { 0 };
            // SAFETY: the launch provides memory for each layer's row, whose scaling norms have been set.
            unsafe { values[place].leaf(self.row_again::<T>(), rank, self.count) }
        };
        nodes::<_, W, MOST>(core::array::from_fn(leaf), self.count, self.level, |pair, left, right| {
            // SAFETY: the launch provides memory for each pair of a layer, and the pairs of lower levels have been set.
            let both = unsafe { T::kept((arch::forget(self.row as u64) as *const f64).add(NUMBERS * pair.index())) };
            T::join(both, left, right)
        })
    }
}

macro_rules! of_width {
    ($name:literal $T:ident $width:literal $suffix:literal) => {
        kernel!(["peer_adasum_" $name $suffix], LaunchBounds::of_peers($width), fn (
            peers: *const Peers, weights: *mut f64, tree: *mut f64, cancelled: *mut u32, short: *const u32, totals: *mut f64,
            partials: *mut f64, chunked: *const ChunkedSpan, span_count: u64, blocks: u64, chunks: u64,
            spans: *const Span, writers: u64, block_len: u64, senders: u64,
        ) {
            // The vector length of the kernels that multiply as many vectors on one rank, so that the bits are the same.
            const N: usize = vector_len(<$T>::DTYPE, DType::F16);
            const WRITTEN: usize = gram_vector_len(<$T>::DTYPE, $width);
            const K: usize = products($width);
            const LEVELS: usize = ($width as usize).ilog2() as usize;
            // Two ranks are one pair, which cannot cancel; but short vectors of `f64` always take the exact path.
            const HAS_EXACT_PATH: bool = LEVELS > 1 || <$T>::IS_DOUBLE;
            let partials = Partials { first: partials, spans: chunked, chunks };
            let group = GroupView::of(peers);
            loop {
                let group = group.again();
                // There are at least two ranks, which the compiler does not know.
                let ranks = if $width == 2 { 2 } else { group.peers.world_size as usize };
                let layer_of = |span: u64| group.peers.layer(span, span_count) as usize;
                let teams = group.peers.teams() as u64;
                let Some(ticket) = group.draw(senders + blocks + teams + writers) else { return };
                let Some(mut block) = group.send_or(ticket, senders) else { continue };
                if block < blocks {
                    let mut stretch = reduce::Stretch::of_block(block, chunked, span_count);
                    let size = size_of::<$T>() as u64;
                    let (begin, end) = stretch.rest(stretch.row(chunked));
                    group.receive(begin * size, end * size);
                    while let Some(chunk) = stretch.next::<2>(stretch.row(chunked)) {
                        let sums = multiply::<$T, $width, N, K>(group.peers, chunk);
                        // Other threads may still read the block's shared memory for the preceding chunks.
                        thread::sync_threads();
                        reduce::block_sum::<K, 2>(0, sums, |product, sum| {
                            let (row, column) = const { triangle::<$width, K>() }[product];
                            let (group, number) = (group.again(), stretch.number::<2>(stretch.row_again(chunked)));
                            if let Some(number) = number.filter(|_| column < ranks) {
                                let layer = group.peers.layer(stretch.span(), span_count) as usize;
                                let product = product_index(row, column, ranks);
                                partials.keep(group, ranks, (layer, number, product), &Products(ranks), sum);
                            }
                        });
                    }
                    let layer = layer_of(stretch.span());
                    group.count_multiplied(layer / PEER_LAYERS, is_divided(chunked, layer));
                    continue;
                }
                block -= blocks;
                if block < teams {
                    let team = Team::new(group, block, ranks);
                    let multiplied = team.blocks(chunked, blocks);
                    group.wait_for_count(team.number as usize, Progress::Multiplied, multiplied, multiplied);
                    let table = WeightMemory { weights, tree, cancelled, short, totals, partials, span_count };
                    team.find_weights::<$T, $width, { LEVELS - 1 }>(table);
                    group.count(team.number as usize, Progress::Weights);
                    continue;
                }
                block -= teams;
                let range = reduce::range_of_block(block, spans, span_count, block_len);
                let layer = layer_of(range.span);
                group.wait_for_count(layer / PEER_LAYERS, Progress::Weights, 1, 1);
                let layer_weights = weights.add(layer * ranks);
                let factors = core::array::from_fn(|rank| *layer_weights.add(if rank < ranks { rank } else { 0 }));
                let sum = |values| <$T>::from_f64(weighted(values, factors, ranks));
                let exact = if HAS_EXACT_PATH && *cancelled.add(layer) != 0 {
                    let tree = Subtree::<$width, LEVELS>::of(tree.add(layer * tree_row(ranks)), (0, ranks), LEVELS);
                    Some(move |values| <$T>::from_f64(<$T>::root(tree.nodes::<$T>(values)[0], tree.row_again::<$T>(), tree.count)))
                } else {
                    None
                };
                write_each::<$T, $width, WRITTEN>(group.peers, range, sum, exact);
            }
        });
    };
}

for_each_dtype_and_width!(of_width);

/// One layer's weights in shared memory.
pub(super) struct SharedWeights {
    pub(super) shared: Array<f64>,
    pub(super) first: usize,
}

impl Weights for SharedWeights {
    #[inline(always)]
    fn get(&self, rank: usize) -> f64 {
        // SAFETY: the slots from `first` on belong to this thread, one per rank.
        unsafe { self.shared.read(self.first + rank) }
    }

    #[inline(always)]
    fn set(&mut self, rank: usize, weight: f64) {
        // SAFETY: as above.
        unsafe { self.shared.write(self.first + rank, weight) }
    }
}

/// The memory of a launch for the weights.
#[derive(Clone, Copy)]
struct WeightMemory {
    weights: *mut f64,
    tree: *mut f64,
    cancelled: *mut u32,
    short: *const u32,
    totals: *mut f64,
    partials: Partials,
    span_count: u64,
}

/// A part of the sums of one pair of one of a team's layers, packed into one number, since registers are short where it is used.
#[derive(Clone, Copy)]
struct PartNumber(u32);

impl PartNumber {
    /// For each of the team's layers four pairs, with four parts each.
    const OF_A_LEVEL: u32 = PEER_LAYERS as u32 * 16;

    #[inline(always)]
    fn new(level: usize, number: u32) -> Self {
        const { assert!(MOST_PEERS / 2 <= 4 && <f64 as Exact>::PARTS <= 4 && PEER_LAYERS <= 16) };
        PartNumber((level as u32) << 8 | number)
    }

    #[inline(always)]
    fn level(self) -> usize {
        self.0 as usize >> 8
    }

    /// The layer, the pair and the number of the part, recomputed each time.
    #[inline(always)]
    fn unpacked(self, team: Team<'_>) -> (usize, Pair, usize) {
        let part = PartNumber(arch::forget(self.0 as u64) as u32);
        let (level, number) = (part.level(), part.0 as usize);
        let begin = (number >> 2 & 3) << (level + 1);
        let (middle, end) = (begin + (1 << level), begin + (2 << level));
        let pair = Pair { begin, middle, end: if end < team.ranks { end } else { team.ranks } };
        (team.first() + (number >> 4 & 15), pair, number & 3)
    }
}

impl Team<'_> {
    /// Computes the weights of this team's layers: first from all products, and then, level by level, at most `MOST`, for cancelled layers
    /// by the exact path. All ranks compute the same, because they have the same totals.
    #[inline(always)]
    unsafe fn find_weights<T: Exact, const W: usize, const MOST: usize>(self, table: WeightMemory) {
        // SAFETY: the launch provides memory for every layer; the branches are the same for the whole block and on every rank.
        unsafe {
            self.exchange(table.partials, products(self.ranks), Products(self.ranks), Stage::of_level(0));
            self.find_from_products::<T>(table);
            if MOST == 0 && !T::IS_DOUBLE {
                return;
            }
            thread::sync_threads();
            let mut any = false;
            for layer in self.first()..self.first() + self.count() {
                any |= *table.cancelled.add(layer) != 0;
            }
            if any {
                self.find_by_tree::<T, W, MOST>(table);
            }
        }
    }

    /// Evaluates the exact path of this block's cancelled layers.
    #[inline(always)]
    unsafe fn find_by_tree<T: Exact, const W: usize, const MOST: usize>(self, table: WeightMemory) {
        // SAFETY: as above, except where each layer has its thread.
        unsafe {
            let is_cancelled = |layer: usize| *table.cancelled.add(layer) != 0;
            let own = |team: Self| {
                let layer = team.first() + thread::thread_idx_x() as usize;
                (layer < team.first() + team.count() && is_cancelled(layer)).then_some(layer)
            };
            // Pairs of the first level join single ranks, and have coefficients already, but not with the digits that `f64` needs.
            let first = if T::IS_DOUBLE { 0 } else { 1 };
            let mut level = first;
            // If only one level is possible, the compiler must know it: a loop would need more registers than there are.
            while 1 << level < self.ranks && (level == first || MOST > first) {
                self.for_each_part::<T>(level, table, |team, part| team.hand_out_part::<T, W, MOST>(part, table));
                // The stage of level 0 was used for the products.
                self.again().meet(Stage::of_level(level + 1 - first));
                let team = self.again();
                if team.has_divided(table.partials.spans) {
                    team.for_each_part::<T>(level, table, |team, part| team.fold_part::<T>(part, table.partials));
                    thread::sync_threads();
                }
                if let Some(layer) = own(team) {
                    for pair in pairs_of_level(level, team.ranks) {
                        let is_divided = is_divided(table.partials.spans, layer);
                        team.keep_pair::<T>(team.tree_of(table, layer), is_divided, layer, pair);
                    }
                }
                thread::sync_threads();
                level += 1;
            }
            if let Some(layer) = own(self.again()) {
                for rank in 0..self.ranks {
                    let row = self.tree_of(table, layer);
                    let kept = |pair: Pair| {
                        let scales = T::scales(row, pair, self.ranks);
                        T::rounded_coefficients(T::kept(row.add(NUMBERS * pair.index())), scales)
                    };
                    let weight = weight_by_tree(rank, self.ranks, kept);
                    table.weights.add(layer * self.ranks + rank).write(weight);
                }
            }
        }
    }

    /// The row of a layer's tree.
    #[inline(always)]
    unsafe fn tree_of(self, table: WeightMemory, layer: usize) -> *mut f64 {
        // SAFETY: the launch provides a row for every layer.
        unsafe { table.tree.add(layer * tree_row(self.ranks)) }
    }

    /// Stores a pair's coefficients in the row of a layer's tree, from its sums over all shards.
    #[inline(always)]
    unsafe fn keep_pair<T: Exact>(self, row: *mut f64, is_divided: bool, layer: usize, pair: Pair) {
        let place = self.sums_place(layer, pair, T::COUNT);
        // SAFETY: the launch provides the memory; the pair's sums have been exchanged.
        unsafe {
            let sum = |index: usize| self.total(is_divided, |rank| self.group.peers.pairs_of(rank), place + index);
            let both = T::coefficients(sum, T::scales(row, pair, self.ranks));
            T::keep(row.add(NUMBERS * pair.index()), both);
        }
    }

    /// Visits each part of the sums of each pair of a level, of each cancelled layer.
    #[inline(always)]
    unsafe fn for_each_part<T: Exact>(self, level: usize, table: WeightMemory, visit: impl Fn(Self, PartNumber)) {
        let mut number = 0;
        // A loop that must not be unrolled.
        while number < arch::opaque(PartNumber::OF_A_LEVEL) {
            let (team, part) = (self.again(), PartNumber::new(level, number));
            let (layer, pair, place) = part.unpacked(team);
            let is_there = layer < team.first() + team.count() && pair.middle < team.ranks && place < T::PARTS;
            // SAFETY: the launch provides a flag for each layer.
            if is_there && unsafe { *table.cancelled.add(layer) } != 0 {
                visit(team, part);
            }
            number += 1;
        }
    }

    /// Adds the rows of one part of the sums of a pair, which all ranks have sent, if the layer is divided.
    #[inline(always)]
    unsafe fn fold_part<T: Exact>(self, part: PartNumber, partials: Partials) {
        let (layer, pair, part) = part.unpacked(self);
        // SAFETY: as above; every thread of the block calls this.
        unsafe { self.add_up_part::<T>(true, layer, pair.index(), part, partials) };
    }

    /// Adds one part of the sums of a layer's pair, if the layer's division equals `divided`.
    #[inline(always)]
    unsafe fn add_up_part<T: Exact>(self, divided: bool, layer: usize, pair: usize, part: usize, partials: Partials) {
        const { assert!((T::COUNT / T::PARTS) as u32 <= PEER_THREADS / WARP) };
        let count = T::COUNT / T::PARTS;
        let sums = ExactSums { ranks: self.ranks, pair, count: T::COUNT, first: part * count };
        let item = self.lanes().sum_of_thread() as usize;
        // SAFETY: as above.
        unsafe { self.add_up_one(divided, item < count, layer, item, partials, &sums) };
    }

    /// Adds the products over all shards, and computes the weights of each layer in shared memory: each step depends on the preceding
    /// one.
    #[inline(always)]
    unsafe fn find_from_products<T: Exact>(self, table: WeightMemory) {
        const { assert!(PEER_LAYERS * (products(MOST_PEERS) + MOST_PEERS) <= SHARED_SLOTS) };
        let width = products(self.ranks);
        let thread = thread::thread_idx_x() as usize;
        let shared = shared::partials();
        // SAFETY: the launch provides memory for every layer; every rank's totals have arrived; slots are within the array, each used by
        // one thread until the barrier.
        unsafe {
            let mut item = thread;
            while item < self.count() * width {
                let place = self.first() * width + item;
                let is_divided =
                    is_divided(table.partials.spans, self.first() + (item as u32 / (width as u32).max(1)) as usize);
                let total = self.total(is_divided, |rank| self.group.peers.products_of(rank), place);
                table.totals.add(place).write(total);
                shared.write(item, total);
                item += PEER_THREADS as usize;
            }
            thread::sync_threads();
            if thread >= self.count() {
                return;
            }
            let layer = self.first() + thread;
            let product = |i, j| shared.read(thread * width + product_index(i, j, self.ranks));
            let mut layer_weights = SharedWeights { shared, first: self.count() * width + thread * self.ranks };
            let tree = self.tree_of(table, layer);
            let keep = |pair: Pair, both| keep(tree.add(NUMBERS * pair.index()), both);
            let criterion = criterion(T::IS_DOUBLE, if T::IS_DOUBLE { *table.short.add(layer) } else { 0 });
            let lost = weights(&mut layer_weights, self.ranks, criterion, product, keep);
            if T::IS_DOUBLE && lost {
                keep_scaling_norms(tree, self.ranks, |rank| product(rank, rank));
            }
            for rank in 0..self.ranks {
                table.weights.add(layer * self.ranks + rank).write(layer_weights.get(rank));
            }
            table.cancelled.add(layer).write(lost as u32);
        }
    }

    /// Writes one part of the sums of a layer's pair over this rank's shard to every mailbox.
    #[inline(always)]
    unsafe fn hand_out_part<T: Exact, const W: usize, const MOST: usize>(
        self,
        packed: PartNumber,
        table: WeightMemory,
    ) {
        // SAFETY: as above; every thread of the block calls this, and takes part in each sum.
        unsafe {
            let unpacked = || packed.unpacked(self.again());
            let (layer, pair, part) = unpacked();
            let row = self.tree_of(table, layer);
            let scales = T::scales_of_part(T::scales(row, pair, self.ranks), part);
            let mut done = 0;
            while self.chunk_at(unpacked().0, done, table.partials).is_some() {
                // A chunk for each team of the block.
                let own = |done: u32| self.chunk_at(unpacked().0, done + reduce::team::<2>(), table.partials);
                let mut chunk = reduce::ElementRange { span: 0, begin: 0, end: 0 };
                if let Some(number) = own(done) {
                    let spans = self.group.peers.spans_of_a_layer(table.span_count);
                    chunk = reduce::chunk_of_number(number, table.partials.spans.add(unpacked().0), spans);
                }
                let totals = if T::IS_DOUBLE {
                    let mut totals = T::NO_PART;
                    reduce::walk::<1, 2>(chunk, |element, _| {
                        let (_, pair, part) = unpacked();
                        // Reads one rank's vector after the other, since registers are short.
                        let table = self.group.again().peers.copies.as_ptr().cast();
                        let row = arch::forget(row as u64) as *const f64;
                        let world_size = self.group.again().peers.world_size as usize;
                        let tree = adasum::Tree::<T, MOST> { table, row, world_size };
                        let (left, right) = tree.sides(element, pair);
                        totals = T::add_part(totals, part, scales, left, right);
                    });
                    totals
                } else {
                    let (_, pair, part) = unpacked();
                    let count = pair.end - pair.begin;
                    let level = packed.level();
                    let tree = Subtree::<W, MOST>::of(row, (pair.begin, pair.end), level);
                    let peers = self.group.peers;
                    let copy = |place| *peers.copies.get_unchecked(pair.begin + if place < count { place } else { 0 });
                    let copies: [*const T; W] = core::array::from_fn(|place| copy(place) as *const T);
                    let mut totals = T::NO_PART;
                    reduce::walk::<1, 2>(chunk, |element, _| {
                        let nodes = tree.nodes::<T>(copies.map(|copy| copy.add(element as usize).read()));
                        // The right side begins two or four ranks behind the left one.
                        const { assert!(W <= 8) };
                        let (left, right) = (nodes[0], if level == 1 { nodes[const { 2 % W }] } else { nodes[W / 2] });
                        totals = T::add_part(totals, part, scales, left, right);
                    });
                    totals
                };
                let (count, mut index) = (T::COUNT / T::PARTS, 0);
                while index < arch::opaque(count as u32) as usize {
                    let (team, (layer, pair, part)) = (self.again(), unpacked());
                    let total = T::sum(&totals, index);
                    let sums =
                        ExactSums { ranks: team.ranks, pair: pair.index(), count: T::COUNT, first: part * count };
                    // Other threads may still read the block's shared memory for the preceding sum.
                    thread::sync_threads();
                    reduce::block_sum::<1, 2>(0, [total], |_, sum| {
                        if let Some(number) = own(done) {
                            table.partials.keep(team.group, team.ranks, (layer, number, index), &sums, sum);
                        }
                    });
                    index += 1;
                }
                done += 2;
            }
            let (layer, pair, part) = unpacked();
            // After the barrier all partials are written; they are read before the next part's replace them.
            thread::sync_threads();
            self.again().add_up_part::<T>(false, layer, pair.index(), part, table.partials);
            thread::sync_threads();
        }
    }
}
