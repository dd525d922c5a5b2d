//! Adasum of small arenas by packets: `packet_adasum`.
//!
//! Ranks send the elements of each chunk to the ranks that reduce it: to all in one shot, or in two shots to the rank that has the chunk in
//! its shard. A rank multiplies the chunks that it reduces, and sends the products, again as packets, to its other blocks in one shot, to
//! all ranks in two. Whoever needs a layer's weights waits for the products of the layer's chunks and adds them in the order of the chunks,
//! so that all get the same weights. Weighted sums of two shots are sent to all ranks. Chunks, the thread of an element and the order of
//! additions are those of the other forms of Adasum, with the same bits.
//!
//! Unlike sums, blocks wait for other blocks of the same launch, so that all must be resident at a time. They are few, and have many threads
//! instead: a block processes several short chunks at a time, each by a team of its threads. The products of eight vectors are computed by two
//! teams for each chunk, each half of them ([`ProductPart`](crate::math::product_part::ProductPart)).

use super::super::super::adasum::Exact;
use super::super::super::{for_each_dtype_and_width, kernel};
use super::arena::{Arena, Results};
use super::exact::{Cancelled, ExactMemory};
use super::{CallView, Data, Tensor, sum};
use crate::abi::{
    LaunchBounds, Mailboxes, PACKET_BYTES, PEER_THREADS, PacketArena, PacketChunk, PacketChunks, packet_adasum_is_full,
    packet_adasum_parts,
};
use crate::half::*;
use crate::math::adasum::{self, Criterion, product_index, step, takes_exact_path};
use crate::{arch, reduce, shared, thread};

// Few packets are processed at a time, and short chunks by loops without unrolled steps: a launch loads the code that it runs, from the L2
// cache or beyond, which takes longer than the memory's latency.

/// The number of chunks of which a thread moves a packet at a time, if there are enough.
const fn moved_at_once(width: usize, element_bytes: usize) -> usize {
    if packet_adasum_is_full(width, element_bytes) { 2 } else { 4 }
}

/// The number of packets of each writer that a thread multiplies at a time, as many as there are registers for.
const fn multiplied_at_once(width: usize, element_bytes: usize) -> usize {
    if width == 2 && element_bytes < 8 { 2 } else { 1 }
}

/// The flags of a batch's place: its layer is combined,
const COMBINED: f64 = 0.0;
/// or takes the exact path, which has begun with another chunk of the block,
const RECOMPUTED: f64 = 1.0;
/// or begins with this one.
const BEGINS: f64 = 2.0;

impl<T: Exact, const W: usize, const E: usize, const K: usize> Arena<'_, T, W, E, K> {
    /// Sends the elements of this block's chunks to the ranks that reduce them.
    ///
    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    unsafe fn send<const G: usize>(self) {
        // SAFETY: packets of chunks.
        unsafe {
            if self.is_divided() {
                let send = |chunk: PacketChunk, packet, data| self.call.send(chunk.owner as usize, packet, data);
                if self.moves_several() {
                    self.send_chunks::<G>(send);
                } else {
                    self.send_chunks::<1>(send);
                }
            } else {
                self.send_chunks::<1>(|_, packet, data| self.call.send_to_all::<W>(packet, data));
            }
        }
    }

    /// Reads the elements of this block's chunks, `G` chunks at a time, and passes each packet to `send`, with its chunk and its place in a slot.
    ///
    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    unsafe fn send_chunks<const G: usize>(self, send: impl Fn(PacketChunk, u32, Data)) {
        // SAFETY: packets of chunks.
        unsafe {
            self.for_chunks_of_peers::<G>(|chunks| {
                let mut packet = self.teams().thread();
                while packet < self.most_packets(chunks) {
                    let data = chunks.map(|chunk| self.own(chunk).read(packet));
                    let mut place = 0;
                    while place < G {
                        if packet < self.own(chunks[place]).packets() {
                            send(chunks[place], self.first_packet(chunks[place]) + packet, data[place]);
                        }
                        place += 1;
                    }
                    packet += self.teams().threads();
                }
            });
        }
    }

    /// Writes the weighted sums of this block's chunks among those that this rank reduces, and publishes them.
    ///
    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    unsafe fn combine<const C: usize, const LEVELS: usize>(self, results: Results, memory: ExactMemory<T>)
    where
        T: Exact<Sums = [f64; C]>,
    {
        let mut begin = self.first();
        // SAFETY: chunks of the table, below the end; every thread of the block has the same cancelled layers.
        unsafe {
            while begin < self.end() {
                // Sums of eight vectors would need several rounds, and `f64` has registers to add several sums at a time.
                if W == 8 && !Self::IS_FULL {
                    self.anew().find_weights::<4>(begin, results)
                } else {
                    self.anew().find_weights::<1>(begin, results)
                }
                thread::sync_threads();
                self.anew().combine_batch(begin);
                // Only now, since the exact path uses the memory of the weights. All blocks process layers in ascending order, so that none
                // waits for one that waits for it.
                let mut cancelled = if Self::HAS_EXACT_PATH { Self::cancelled_of_batch() } else { 0 };
                while Self::HAS_EXACT_PATH && cancelled != 0 {
                    let number = begin + cancelled.trailing_zeros() * self.blocks;
                    cancelled &= cancelled - 1;
                    Cancelled::<_, W, E, K, C, LEVELS>::new(self.anew(), number, memory).run(results);
                }
                begin += Self::BATCH * self.blocks;
            }
        }
    }

    /// Writes the weighted sums of the chunks of a batch whose layers have not cancelled, and publishes them. Each team has a chunk at a time.
    ///
    /// # Safety
    /// The launch's contract; the weights of the batch are in shared memory.
    #[inline(always)]
    unsafe fn combine_batch(self, begin: u32) {
        let teams = self.teams();
        let mut place = teams.team();
        // SAFETY: chunks of the table, below the end.
        unsafe {
            // A loop that must not be unrolled, like those below.
            while place < arch::opaque(Self::BATCH) && begin + place * self.blocks < self.end() {
                let number = begin + place * self.blocks;
                let chunk = self.chunk(number);
                // The place with the weights of the chunk's layer.
                let (mut first, mut earlier) = (place, number);
                while first > 0 && earlier >= chunk.of_layer.first + self.blocks {
                    (first, earlier) = (first - 1, earlier - self.blocks);
                }
                if !Self::HAS_EXACT_PATH || shared::partials().read(Self::first_weight(first) + W) == COMBINED {
                    self.combine_chunk(chunk, first);
                }
                place += teams.count();
            }
        }
    }

    /// A bit for each place of a batch at which a layer begins the exact path.
    #[inline(always)]
    unsafe fn cancelled_of_batch() -> u32 {
        let (mut cancelled, mut place) = (0, 0);
        while place < arch::opaque(Self::BATCH) {
            // SAFETY: a flag of a place.
            if unsafe { shared::partials().read(Self::first_weight(place) + W) } == BEGINS {
                cancelled |= 1 << place;
            }
            place += 1;
        }
        cancelled
    }

    /// Whether a chunk of this block is the block's first one of its layer.
    #[inline(always)]
    fn is_first_of_layer(self, number: u32, layer: PacketChunks) -> bool {
        number < layer.first + self.blocks || number == self.first()
    }

    /// A chunk of a batch, if the preceding chunk of the batch belongs to another layer, otherwise the empty one. An `Option` would keep
    /// registers for a chunk that is not there.
    #[inline(always)]
    unsafe fn first_of_new_layer(self, begin: u32, place: u32) -> PacketChunk {
        let number = begin + place * self.blocks;
        // SAFETY: chunks of the table.
        unsafe {
            if place < Self::BATCH && number < self.end() {
                let chunk = self.chunk(number);
                if place == 0 || self.chunk(number - self.blocks).layer != chunk.layer {
                    return chunk;
                }
            }
        }
        PacketChunk::default()
    }

    /// The number of a batch's places among which its layers begin: one if all its chunks are of one layer, otherwise all.
    #[inline(always)]
    unsafe fn places_of_layers(self, begin: u32) -> u32 {
        // SAFETY: a chunk of the table.
        let end = unsafe { self.chunk(begin) }.of_layer.end();
        let last = begin + (Self::BATCH - 1) * self.blocks;
        if end >= self.end() || end > last { 1 } else { Self::BATCH }
    }

    /// Computes the weights of the layers of a batch of chunks in shared memory: of the layer that begins at each place of the batch, if one
    /// does. Lanes add `S` sums at a time. The block with the first chunk of a layer that has not cancelled stores and publishes them.
    #[inline(always)]
    unsafe fn find_weights<const S: usize>(self, begin: u32, results: Results) {
        let shared = shared::partials();
        // SAFETY: each number has a slot of its own; all threads take part in every round, and reach every barrier.
        unsafe {
            thread::sync_threads();
            let items = self.places_of_layers(begin) * K as u32;
            let lanes = self.lanes(items == K as u32);
            let sums = lanes.sums_of(Self::threads());
            let mut round = 0;
            while round < items && begin + round / K as u32 * self.blocks < self.end() {
                let item = |sum: usize| round + sum as u32 * sums + lanes.sum_of_thread();
                let layers: [PacketChunks; S] =
                    core::array::from_fn(|sum| self.first_of_new_layer(begin, item(sum) / K as u32).of_layer);
                let first: [u32; S] = core::array::from_fn(|sum| self.products() + item(sum) % K as u32);
                let totals = self.totals(lanes, layers, |sum, chunk| first[sum] + chunk * K as u32);
                let mut sum = 0;
                while sum < S {
                    // Unknown to the compiler, which would copy the exchanges between lanes into a branch.
                    if arch::forget(layers[sum].count as u64) > 0 && lanes.lane() == 0 {
                        shared.write(item(sum) as usize, totals[sum]);
                    }
                    sum += 1;
                }
                round += S as u32 * sums;
            }
            thread::sync_threads();
            // A thread for each rank of a place's layer.
            let thread = reduce::thread_of_block();
            let (place, rank) = (thread / W as u32, thread as usize % W);
            let PacketChunk { layer, of_layer, .. } = self.first_of_new_layer(begin, place);
            let (weight, lost) = self.weight(layer, place, of_layer.count > 0, rank, results.short);
            let number = begin + place * self.blocks;
            if Self::HAS_EXACT_PATH && place < Self::BATCH && rank == 0 {
                let flag = match (lost, self.is_first_of_layer(number, of_layer)) {
                    (false, _) => COMBINED,
                    (true, false) => RECOMPUTED,
                    (true, true) => BEGINS,
                };
                shared.write(Self::first_weight(place) + W, flag);
            }
            if of_layer.count > 0 && !lost && number == of_layer.first && rank < self.ranks() {
                self.store_weight(layer, rank, weight, results);
                if rank == 0 {
                    self.store_flag(layer, false, results);
                }
            }
        }
    }

    /// Computes a rank's weight in the layer of a place of the batch, if there is one, from the layer's products in shared memory, and writes
    /// it beside them. Returns it, and whether the layer takes the exact path.
    ///
    /// # Safety
    /// The threads of a layer's ranks are neighbours, and all threads of the block call this.
    #[inline(always)]
    unsafe fn weight(self, layer: u32, place: u32, is_there: bool, rank: usize, short: *const u32) -> (f64, bool) {
        let shared = shared::partials();
        let (products, slot) = (place as usize * K, Self::first_weight(place));
        // The compiler must not know it: threads without a layer would get copies of the barriers below.
        let is_there = || arch::forget(is_there as u64) != 0;
        // SAFETY: the products are there. Where the flags are written, the products are not read any more.
        unsafe {
            let criterion = if is_there() { Self::criterion(layer, short) } else { Criterion::Narrow };
            let gram = |i, j| shared.read(products + product_index(i, j, W));
            let (mut weight, mut lost) = self.level::<1>((rank, 1.0), is_there, slot, criterion, gram);
            let mut cancelled;
            if W > 2 {
                (weight, cancelled) = self.level::<2>((rank, weight), is_there, slot, criterion, gram);
                lost |= cancelled;
            }
            if W > 4 {
                (weight, cancelled) = self.level::<4>((rank, weight), is_there, slot, criterion, gram);
                lost |= cancelled;
            }
            if Self::HAS_EXACT_PATH {
                if is_there() {
                    lost = takes_exact_path(lost, criterion, self.ranks(), gram);
                }
                thread::sync_threads();
                if is_there() {
                    shared.write(products + rank, if lost { 1.0 } else { 0.0 });
                }
            }
            if is_there() {
                shared.write(slot + rank, weight);
            }
            lost = false;
            if Self::HAS_EXACT_PATH {
                thread::sync_threads();
                let mut other = 0;
                while is_there() && other < W {
                    lost |= shared.read(products + other) != 0.0;
                    other += 1;
                }
            }
            (weight, lost)
        }
    }

    /// A level of [`weight`](Self::weight): multiplies the weight of a rank by its coefficient in pairs whose sides have `H` ranks. Returns it,
    /// and whether the norm of the rank's side has cancelled.
    ///
    /// # Safety
    /// The condition of [`weight`](Self::weight).
    #[inline(always)]
    unsafe fn level<const H: usize>(
        self,
        (rank, weight): (usize, f64),
        is_there: impl Fn() -> bool,
        slot: usize,
        criterion: Criterion,
        gram: impl Fn(usize, usize) -> f64,
    ) -> (f64, bool) {
        let shared = shared::partials();
        // SAFETY: barriers are between reading the weights of a level and writing them, and reverse.
        unsafe {
            if H > 1 {
                thread::sync_threads();
                if is_there() {
                    shared.write(slot + rank, weight);
                }
                thread::sync_threads();
            }
            if !is_there() {
                return (weight, false);
            }
            let of = |rank: usize| if H > 1 { shared.read(slot + rank) } else { 1.0 };
            let (coefficient, cancelled) = step::<H>(rank, self.ranks(), criterion, of, gram);
            (weight * coefficient, cancelled)
        }
    }

    /// Writes the weighted sum over a chunk, with the weights of a place of the batch, and publishes it.
    #[inline(always)]
    unsafe fn combine_chunk(self, chunk: PacketChunk, place_of_weights: u32) {
        let (shared, own) = (shared::partials(), self.own(chunk));
        // SAFETY: packets of the chunk; a thread alone reads and writes their elements.
        unsafe {
            let first = Self::first_weight(place_of_weights);
            let weights: [f64; W] = core::array::from_fn(|rank| shared.read(first + rank));
            let mut packet = self.teams().thread();
            while packet < own.packets() {
                let result = sum::<T, W, E>(self.take(chunk, packet), weights, self.ranks());
                self.send_result(chunk, packet, result);
                own.write(packet, result);
                packet += self.teams().threads();
            }
        }
    }

    /// Writes the results that other ranks publish: a part of them by each block.
    ///
    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    unsafe fn receive_results<const G: usize>(self, results: Results) {
        // SAFETY: the launch provides memory for every layer; chunks of the table.
        unsafe {
            if self.moves_several() {
                self.for_chunks_of_peers::<G>(|chunks| self.receive_chunks(chunks));
            } else {
                self.for_chunks_of_peers::<1>(|chunks| self.receive_chunks(chunks));
            }
            let (width, layer_count) = (W as u32 + 1, self.plan.in_memory().layer_count as u32);
            let mut item = Self::block() * Self::threads() + thread::thread_idx_x() as u32;
            while item < layer_count * width {
                let (number, place) = (item / width, (item % width) as usize);
                let layer = self.layer(number);
                let is_wanted = layer.count > 0 && (place < self.ranks() || place == W);
                if is_wanted && self.chunk(layer.first).owner != self.call.rank {
                    let data = self.number(self.result_of(number, place));
                    if place == W {
                        results.cancelled.add(number as usize).write(data as u32);
                    } else {
                        let weight = results.weights.add(number as usize * self.ranks() + place);
                        weight.write(f64::from_bits(data));
                    }
                }
                item += self.blocks * Self::threads();
            }
        }
    }

    /// Writes the elements of other ranks' chunks.
    #[inline(always)]
    unsafe fn receive_chunks<const G: usize>(self, chunks: [PacketChunk; G]) {
        let mut packet = self.teams().thread();
        while packet < self.most_packets(chunks) {
            // SAFETY: packets of the chunks, whose owners publish their results.
            unsafe {
                let data = self.take_results(chunks, packet);
                let mut place = 0;
                while place < G {
                    if packet < self.own(chunks[place]).packets() {
                        self.own(chunks[place]).write(packet, data[place]);
                    }
                    place += 1;
                }
            }
            packet += self.teams().threads();
        }
    }

    /// Clears the next packets of the exact path, of the other parity, and counts the call.
    ///
    /// # Safety
    /// Every thread of all blocks calls this at the end of a launch.
    #[inline(always)]
    unsafe fn finish(self) {
        let plan = self.plan.in_memory();
        let (begin, end) = (plan.exact_sums as u32, plan.end_of_area as u32);
        // Never 0, which the compiler does not know: a check of divisions would compile a panic into the kernel.
        let turns = (end - begin).div_ceil(PEER_THREADS).max(1);
        let first = begin + (self.call.number >> 1) % turns * PEER_THREADS;
        let mut index = first + thread::thread_idx_x() as u32;
        while Self::block() == 0 && index < first + PEER_THREADS && index < end {
            let parity = ((self.call.number + 1) & 1) as u64;
            let rank = self.call.rank as usize;
            // SAFETY: the preceding call has ended on this rank, and no rank begins the exact path of the next call before this rank has sent
            // that call's packets.
            unsafe {
                let area = self.call.group.slot(parity, self.ranks() as u64);
                let mailbox = *self.call.group.mailboxes.get_unchecked(rank);
                arch::store_packet(mailbox + area + (index as usize * PACKET_BYTES) as u64, [0, 0]);
            }
            index += Self::threads();
        }
        // SAFETY: the caller's promise.
        unsafe { self.call.end(self.blocks) };
    }

    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    unsafe fn run<const G: usize, const M: usize, const P: usize, const C: usize, const LEVELS: usize>(
        self,
        results: Results,
        memory: ExactMemory<T>,
    ) where
        T: Exact<Sums = [f64; C]>,
    {
        // SAFETY: the caller's promise.
        unsafe {
            self.send::<G>();
            self.anew().multiply::<M, P>();
            self.anew().combine::<C, LEVELS>(results, memory);
            if self.is_divided() {
                self.anew().receive_results::<G>(results);
            }
            self.anew().finish();
        }
    }
}

macro_rules! of_width {
    ($name:literal $T:ident $width:literal $suffix:literal) => {
        kernel!(["packet_adasum_" $name $suffix], LaunchBounds::packet_adasum(size_of::<$T>()), fn (
            group: *const Mailboxes, plan: *const PacketArena, elements: *mut $T, weights: *mut f64, cancelled: *mut u32,
            short: *const u32, vectors: *mut $T, len: u64, trees: *mut u64, blocks: u64,
        ) {
            const E: usize = Tensor::<$T>::ELEMENTS;
            const LEVELS: usize = ($width as usize).ilog2() as usize;
            let arena = Arena::<$T, $width, E, { adasum::products($width) }>::new(CallView::of(group), plan, elements, blocks);
            let memory = ExactMemory { vectors, len: len as usize, trees };
            const BYTES: usize = size_of::<$T>();
            const PRODUCTS: usize = adasum::products($width) / packet_adasum_parts($width, BYTES) as usize;
            const MOVED: usize = moved_at_once($width, BYTES);
            const MULTIPLIED: usize = multiplied_at_once($width, BYTES);
            arena.run::<MOVED, MULTIPLIED, PRODUCTS, { <$T>::COUNT }, LEVELS>(Results { weights, cancelled, short }, memory);
        });
    };
}

for_each_dtype_and_width!(of_width);
