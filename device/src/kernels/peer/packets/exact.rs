//! The exact path of Adasum by packets, for layers whose norms have cancelled.
//!
//! A layer's pairs are processed in order by all blocks that have chunks of the layer to reduce. A block computes a pair's coefficients itself,
//! from the sums over all chunks of the layer, and keeps them in a row of its own.

use super::super::super::adasum::{self, Exact, Tree};
use super::super::gram::SharedWeights;
use super::arena::{Arena, Elements, Results};
use super::sendable;
use crate::abi::{PacketChunk, PacketChunks, THREADS, packet_tree};
use crate::math::adasum::{Pair, product_index, weight_by_tree, weights};
use crate::math::precise::NUMBERS;
use crate::shared;
use crate::{arch, memory, reduce, thread};

/// The memory of a launch for its exact paths.
#[derive(Clone, Copy)]
pub(super) struct ExactMemory<T> {
    /// The other ranks' vectors of `len` elements, in rank order.
    pub(super) vectors: *mut T,
    pub(super) len: usize,
    /// A [`packet_tree`] for each block.
    pub(super) trees: *mut u64,
}

/// A block's view of a layer. `C` is the number of sums of a pair.
#[derive(Clone, Copy)]
pub(super) struct Cancelled<'a, T, const W: usize, const E: usize, const K: usize, const C: usize, const LEVELS: usize>
{
    arena: Arena<'a, T, W, E, K>,
    /// This block's first chunk of the layer. The others are a number of blocks apart, up to [`end`](Self::end).
    first: u32,
    memory: ExactMemory<T>,
    /// Every rank's vector: this rank's own in its arena, the others unpacked.
    tree: Tree<T, LEVELS>,
    /// The coefficients in the tree's row, which this block writes.
    row: *mut f64,
}

impl<'a, T, const W: usize, const E: usize, const K: usize, const C: usize, const LEVELS: usize>
    Cancelled<'a, T, W, E, K, C, LEVELS>
where
    T: Exact<Sums = [f64; C]>,
{
    /// The layer of this block's chunk `first`, which is the block's first of the layer.
    ///
    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    pub(super) unsafe fn new(arena: Arena<'a, T, W, E, K>, first: u32, memory: ExactMemory<T>) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let table = memory.trees.add(thread::block_idx_x() as usize * packet_tree(arena.ranks()));
            let row = table.add(arena.ranks()).cast();
            let tree = Tree { table: table.cast_const().cast(), row, world_size: arena.ranks() };
            Self { arena, first, memory, tree, row }
        }
    }

    /// Sets the addresses of all ranks' vectors: the arena of this rank, and the unpacked vectors of the others.
    #[inline(always)]
    unsafe fn find_vectors(self) {
        let (thread, own) = (thread::thread_idx_x() as usize, self.arena.call.rank as usize);
        // SAFETY: the launch provides a table for each block, and the vectors.
        unsafe {
            if thread < self.arena.ranks() {
                let place = if thread < own { thread } else { thread - 1 };
                let unpacked = self.memory.vectors.wrapping_add(place * self.memory.len);
                let vector = if thread == own { self.arena.elements } else { unpacked };
                self.tree.table.cast_mut().add(thread).write(vector);
            }
            thread::sync_threads();
        }
    }

    /// Copies all ranks' elements of this block's chunks from the packets of the call to the vectors of the tree, this rank's own as its peers
    /// have received them.
    #[inline(always)]
    unsafe fn unpack(self) {
        let arena = self.arena;
        let mut number = self.first;
        // SAFETY: the launch provides a vector for each rank.
        unsafe {
            while number < self.end() {
                let chunk = arena.chunk(number);
                let mut packet = thread::thread_idx_x() as u32;
                while packet < arena.own(chunk).packets() {
                    let of_ranks = arena.take(chunk, packet);
                    let mut writer = 0;
                    while writer < W {
                        if writer < arena.ranks() {
                            let vector = (*self.tree.table.add(writer)).cast_mut();
                            Elements::<T, E>::of(vector, chunk).write(packet, of_ranks[writer]);
                        }
                        writer += 1;
                    }
                    packet += Arena::<T, W, E, K>::threads();
                }
                number += arena.blocks;
            }
        }
    }

    /// The chunk behind the last one of the layer that this rank reduces.
    ///
    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    unsafe fn end(self) -> u32 {
        // SAFETY: the layer is in the table.
        let (of_layer, of_rank) = (unsafe { self.arena.chunk(self.first).of_layer }.end(), self.arena.end());
        if of_layer < of_rank { of_layer } else { of_rank }
    }

    /// Adds `count` sums of the layer, each over one packet for each chunk, to the block's shared memory.
    #[inline(always)]
    unsafe fn add_up(self, count: u32, packet: impl Fn(u32, u32) -> u32) {
        // SAFETY: each sum has a slot of its own; all threads take part in every round.
        unsafe {
            thread::sync_threads();
            let (lanes, mut round) = (self.arena.lanes(true), 0);
            while round < count {
                let sum = round + lanes.sum_of_thread();
                let layer = if sum < count { self.arena.chunk(self.first).of_layer } else { PacketChunks::default() };
                let [total] = self.arena.totals(lanes, [layer], |_, chunk| packet(chunk, sum));
                // The compiler must not know that it is the condition above, or it would copy the exchanges between lanes into a branch.
                if sum < arch::forget(count as u64) as u32 && lanes.lane() == 0 {
                    shared::partials().write(sum as usize, total);
                }
                round += lanes.sums_of(Arena::<T, W, E, K>::threads());
            }
            thread::sync_threads();
        }
    }

    /// Starts the tree's row from the products of the vectors.
    #[inline(always)]
    unsafe fn start(self, short: *const u32) {
        let (arena, shared) = (self.arena, shared::partials());
        // SAFETY: the products are in the block's shared memory; the row has memory for all pairs, and for the scaling norms.
        unsafe {
            let products = arena.products();
            self.add_up(K as u32, |chunk, product| products + chunk * K as u32 + product);
            if thread::thread_idx_x() == 0 {
                let mut layer_weights = SharedWeights { shared, first: Arena::<T, W, E, K>::first_weight(0) };
                let criterion = Arena::<T, W, E, K>::criterion(arena.chunk(self.first).layer, short);
                let product = |i, j| shared.read(product_index(i, j, W));
                weights(&mut layer_weights, arena.ranks(), criterion, product, |pair, both| {
                    if !T::IS_DOUBLE {
                        adasum::keep(self.row.add(NUMBERS * pair.index()), both);
                    }
                });
                if T::IS_DOUBLE {
                    adasum::keep_scaling_norms(self.row, arena.ranks(), |rank| product(rank, rank));
                }
            }
            thread::sync_threads();
        }
    }

    /// The packet of a sum of a pair over a chunk.
    #[inline(always)]
    fn sum_of(self, pair: Pair, chunk: u32, sum: u32) -> u32 {
        let pairs = W as u32 - 1;
        self.arena.plan.in_memory().exact_sums as u32 + (chunk * pairs + pair.index() as u32) * C as u32 + sum
    }

    /// Computes a pair's coefficients, from its sums over this block's chunks and those of the others.
    #[inline(always)]
    unsafe fn join(self, pair: Pair) {
        let (arena, threads, mut number) = (self.arena, Arena::<T, W, E, K>::threads(), self.first);
        // SAFETY: the coefficients of the pairs below are known; all threads of the block have the same chunks.
        unsafe {
            let scales = T::scales(self.row, pair, arena.ranks());
            while number < self.end() {
                let own = |number: u32| number + reduce::team::<2>() * arena.blocks;
                let mut walked = reduce::ElementRange { span: 0, begin: 0, end: 0 };
                if own(number) < self.end() {
                    let chunk = arena.chunk(own(number));
                    let begin = chunk.begin as u64;
                    walked = reduce::ElementRange { span: 0, begin, end: begin + chunk.len as u64 };
                }
                let mut sums = T::ZEROS;
                reduce::walk::<1, 2>(walked, |element, _| {
                    let (left, right) = self.tree.sides(element, pair);
                    sums = T::add(sums, scales, left, right);
                });
                // Other threads may still read the block's shared memory for the preceding chunks.
                thread::sync_threads();
                reduce::team_sum::<C>((Arena::<T, W, E, K>::MOST_WARPS, THREADS.ilog2()), sums, |sum, total| {
                    if own(number) < self.end() {
                        arena.publish(self.sum_of(pair, own(number), sum as u32), total.to_bits(), true);
                    }
                });
                number += threads / THREADS * arena.blocks;
            }
            self.add_up(C as u32, |chunk, sum| self.sum_of(pair, chunk, sum));
            if thread::thread_idx_x() == 0 {
                let both = T::coefficients(|sum| shared::partials().read(sum), scales);
                T::keep(self.row.add(NUMBERS * pair.index()), both);
            }
            thread::sync_threads();
        }
    }

    /// Writes and publishes the results of this block's chunks. The block with the layer's first chunk stores and publishes the weights.
    #[inline(always)]
    unsafe fn finish(self, results: Results) {
        let (arena, thread) = (self.arena, reduce::thread_of_block());
        let mut number = self.first;
        // SAFETY: all coefficients are known; a thread alone reads and writes the elements of a packet.
        unsafe {
            while number < self.end() {
                let chunk = arena.chunk(number);
                let tensor = arena.own(chunk);
                let mut packet = thread;
                while packet < tensor.packets() {
                    let of_lane = |lane: usize| {
                        let element = packet as usize * E + lane;
                        let place = if element < chunk.len as usize { element } else { packet as usize * E };
                        T::from_f64(self.tree.root(chunk.begin as u64 + place as u64))
                    };
                    let data = sendable(memory::reinterpret::<[T; E], _>(core::array::from_fn(of_lane)));
                    arena.send_result(chunk, packet, data);
                    tensor.write(packet, data);
                    packet += Arena::<T, W, E, K>::threads();
                }
                number += arena.blocks;
            }
            let PacketChunk { layer, of_layer, .. } = arena.chunk(self.first);
            if self.first == of_layer.first && (thread as usize) < arena.ranks() {
                let kept = |pair: Pair| {
                    let scales = T::scales(self.row, pair, arena.ranks());
                    T::rounded_coefficients(T::kept(self.row.add(NUMBERS * pair.index())), scales)
                };
                let weight = weight_by_tree(thread as usize, arena.ranks(), kept);
                arena.store_weight(layer, thread as usize, weight, results);
                if thread == 0 {
                    arena.store_flag(layer, true, results);
                }
            }
        }
    }

    /// # Safety
    /// The launch's contract; every thread of all blocks with chunks of the layer to reduce calls this, for one layer after the other.
    #[inline(always)]
    pub(super) unsafe fn run(self, results: Results) {
        // SAFETY: the caller's promise.
        unsafe {
            self.find_vectors();
            self.unpack();
            // Its barrier is also between the unpacked elements and their use.
            self.start(results.short);
            let mut pair = Pair::first(self.arena.ranks());
            while let Some(this) = pair {
                // Pairs of single ranks have coefficients already, but not with the digits that `f64` needs.
                if T::IS_DOUBLE || !this.joins_ranks() {
                    self.join(this);
                }
                pair = this.next(self.arena.ranks());
            }
            self.finish(results);
        }
    }
}
