//! Adasum of small arenas by packets: `packet_adasum`.
//!
//! Ranks send the elements of each chunk to the ranks that reduce it: to all in one shot, or in two shots to the rank that has the chunk in
//! its window. A rank multiplies the chunks that it reduces, and sends the products, again as packets, to its other blocks in one shot, to
//! all ranks in two. Whoever needs a layer's weights waits for the products of the layer's chunks and adds them in the order of the chunks,
//! so that all get the same weights. Weighted sums of two shots are sent to all ranks. Chunks, the thread of an element and the order of
//! additions are those of the other forms of Adasum, with the same bits.
//!
//! Unlike sums, blocks wait for other blocks of the same launch, so that all must be resident at a time. They are few, and have many threads
//! instead: a block processes several short chunks at a time, each by a team of its threads.

use super::super::super::adasum::Exact;
use super::super::super::kernel;
use super::super::super::products::add_triangle;
use super::arena::{Arena, Results};
use super::exact::{Cancelled, Memory};
use super::{Call, Data, Tensor, sum};
use crate::abi::{
    LaunchBounds, Mailboxes, PACKET_BYTES, PEER_THREADS, PacketArena, PacketChunk, PacketChunks, THREADS,
};
use crate::half::{BF16, F16};
use crate::math::adasum::{Criterion, product_index, products, step, takes_exact_path};
use crate::shared;
use crate::{arch, memory, reduce, thread};

// Few packets are processed at a time, and short chunks by loops without unrolled steps: a launch loads the code that it runs, from the L2
// cache or beyond, which takes longer than the memory's latency.

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
    unsafe fn send(self) {
        // SAFETY: packets of chunks.
        unsafe {
            if self.is_divided() {
                let send = |chunk: PacketChunk, packet, data| self.call.send(chunk.owner as usize, packet, data);
                // Kernels of four ranks have no registers for more.
                match self.moves_several() {
                    true if W == 4 => self.send_chunks::<2>(send),
                    true => self.send_chunks::<4>(send),
                    false => self.send_chunks::<1>(send),
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
                    packet += Self::MOST_THREADS;
                }
            });
        }
    }

    /// Multiplies this block's chunks among those that this rank reduces, one for each team at a time, and publishes the products. Threads
    /// load `M` packets of each writer at a time.
    ///
    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    unsafe fn multiply<const M: usize>(self) {
        let teams = self.multiplying_teams();
        let mut number = self.first();
        // SAFETY: chunks of the table, below the end.
        unsafe {
            while number < self.end() {
                let own = number + teams.team() * self.blocks;
                let is_there = own < self.end();
                let chunk = if is_there { self.chunk(own) } else { PacketChunk::default() };
                let sums = self.products_over::<M>(chunk);
                // Other threads may still read the block's shared memory for the preceding chunks.
                thread::sync_threads();
                reduce::team_sum::<K>((Self::MOST_WARPS, teams.log2), sums, |product, sum| {
                    let own = number + teams.team() * self.blocks;
                    if own < self.end() {
                        self.publish(self.products() + own * K as u32 + product as u32, sum.to_bits(), true);
                    }
                });
                number += teams.count() * self.blocks;
            }
        }
    }

    /// The products of the ranks' vectors over a chunk, as far as they are this thread's of its team. Elements behind the end are zero.
    #[inline(always)]
    unsafe fn products_over<const M: usize>(self, chunk: PacketChunk) -> [f64; K] {
        let mut totals = [0.0; K];
        let mut place = self.multiplying_teams().thread();
        // SAFETY: packets of the chunk.
        unsafe {
            if M > 1 && self.own(chunk).packets() <= THREADS {
                return self.add_products::<1>(totals, chunk, place);
            }
            while place < self.own(chunk).packets() {
                totals = self.add_products::<M>(totals, chunk, place);
                place += M as u32 * THREADS;
            }
        }
        totals
    }

    /// Adds the products over the next `M` packets of a thread, from `place` on.
    #[inline(always)]
    unsafe fn add_products<const M: usize>(self, mut totals: [f64; K], chunk: PacketChunk, place: u32) -> [f64; K] {
        // SAFETY: packets of the chunk.
        let of_ranks = unsafe { self.gather::<M>(chunk, |m| place + m as u32 * THREADS) };
        let mut m = 0;
        while m < M {
            // SAFETY: packets consist of elements.
            let elements: [[T; E]; W] =
                core::array::from_fn(|writer| unsafe { memory::reinterpret(of_ranks[m][writer]) });
            let mut lane = 0;
            while lane < E {
                add_triangle::<T, W, K>(&mut totals, core::array::from_fn(|writer| elements[writer][lane]));
                lane += 1;
            }
            m += 1;
        }
        totals
    }

    /// Writes the weighted sums of this block's chunks among those that this rank reduces, and publishes them.
    ///
    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    unsafe fn combine<const C: usize, const LEVELS: usize>(self, results: Results, memory: Memory<T>)
    where
        T: Exact<Sums = [f64; C]>,
    {
        let (teams, mut begin) = (self.teams(), self.first());
        // SAFETY: chunks of the table, below the end; every thread of the block has the same cancelled layers.
        unsafe {
            while begin < self.end() {
                // Sums of many ranks would need several rounds.
                if W == 8 {
                    self.find_weights::<4>(begin, results)
                } else {
                    self.find_weights::<1>(begin, results)
                }
                thread::sync_threads();
                let mut place = teams.team();
                // A loop that must not be unrolled, like those below.
                while place < arch::opaque(Self::BATCH) && self.chunk_of_batch(begin, place).is_some() {
                    let number = begin + place * self.blocks;
                    let chunk = self.chunk(number);
                    // The place with the weights of the chunk's layer.
                    let mut first = place;
                    while first > 0 && begin + (first - 1) * self.blocks >= chunk.of_layer.first {
                        first -= 1;
                    }
                    if !Self::HAS_EXACT_PATH || shared::partials().read(Self::first_weight(first) + W) == COMBINED {
                        self.combine_chunk(chunk, first);
                    }
                    place += teams.count();
                }
                let mut cancelled = 0u32;
                place = 0;
                while Self::HAS_EXACT_PATH
                    && place < arch::opaque(Self::BATCH)
                    && self.chunk_of_batch(begin, place).is_some()
                {
                    if shared::partials().read(Self::first_weight(place) + W) == BEGINS {
                        cancelled |= 1 << place;
                    }
                    place += 1;
                }
                // Only now, since the exact path uses the memory of the weights. All blocks process layers in ascending order, so that none
                // waits for one that waits for it.
                while Self::HAS_EXACT_PATH && cancelled != 0 {
                    let number = begin + cancelled.trailing_zeros() * self.blocks;
                    cancelled &= cancelled - 1;
                    Cancelled::<_, W, E, K, C, LEVELS>::new(self, number, memory).run(results);
                }
                begin += Self::BATCH * self.blocks;
            }
        }
    }

    /// Whether a chunk of this block is the block's first one of its layer.
    #[inline(always)]
    fn is_first_of_layer(self, number: u32, layer: PacketChunks) -> bool {
        number < layer.first + self.blocks || number == self.first()
    }

    /// A chunk of a batch, if there is one: the chunks of this block from `begin` on.
    #[inline(always)]
    fn chunk_of_batch(self, begin: u32, place: u32) -> Option<u32> {
        let number = begin + place * self.blocks;
        (number < self.end()).then_some(number)
    }

    /// A chunk of a batch, if the preceding chunk of the batch belongs to another layer.
    #[inline(always)]
    unsafe fn first_of_new_layer(self, begin: u32, place: u32) -> Option<PacketChunk> {
        // SAFETY: chunks of the table.
        unsafe {
            let number = self.chunk_of_batch(begin, place)?;
            let chunk = self.chunk(number);
            (place == 0 || self.chunk(number - self.blocks).layer != chunk.layer).then_some(chunk)
        }
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
            let (lanes, items) = (self.lanes(), self.places_of_layers(begin) * K as u32);
            let sums = lanes.sums_of(Self::threads());
            let mut round = 0;
            while round < items && self.chunk_of_batch(begin, round / K as u32).is_some() {
                let item = |sum: usize| round + sum as u32 * sums + lanes.sum_of_thread();
                let layers: [PacketChunks; S] = core::array::from_fn(|sum| {
                    let place = item(sum) / K as u32;
                    let chunk = if place < Self::BATCH { self.first_of_new_layer(begin, place) } else { None };
                    chunk.unwrap_or_default().of_layer
                });
                let first: [u32; S] = core::array::from_fn(|sum| self.products() + item(sum) % K as u32);
                let totals = self.totals(layers, |sum, chunk| first[sum] + chunk * K as u32);
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
            let chunk = if place < Self::BATCH { self.first_of_new_layer(begin, place) } else { None };
            let PacketChunk { layer, of_layer, .. } = chunk.unwrap_or_default();
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
        let (mut weight, mut lost) = (1.0, false);
        // SAFETY: the products are there; barriers are between writing the weights of a level and reading them, and reverse. Where the flags
        // are written, the products are not read any more.
        unsafe {
            let criterion = if is_there() { Self::criterion(layer, short) } else { Criterion::Narrow };
            let gram = |i, j| shared.read(products + product_index(i, j, W));
            let of = |rank: usize| shared.read(slot + rank);
            if is_there() {
                (weight, lost) = step::<1>(rank, self.ranks(), criterion, |_| 1.0, gram);
            }
            if W > 2 {
                thread::sync_threads();
                if is_there() {
                    shared.write(slot + rank, weight);
                }
                thread::sync_threads();
                if is_there() {
                    let (coefficient, cancelled) = step::<2>(rank, self.ranks(), criterion, of, gram);
                    (weight, lost) = (weight * coefficient, lost | cancelled);
                }
            }
            if W > 4 {
                thread::sync_threads();
                if is_there() {
                    shared.write(slot + rank, weight);
                }
                thread::sync_threads();
                if is_there() {
                    let (coefficient, cancelled) = step::<4>(rank, self.ranks(), criterion, of, gram);
                    (weight, lost) = (weight * coefficient, lost | cancelled);
                }
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

    /// Writes the weighted sum over a chunk, with the weights of a place of the batch, and publishes it.
    #[inline(always)]
    unsafe fn combine_chunk(self, chunk: PacketChunk, place_of_weights: u32) {
        let (shared, own) = (shared::partials(), self.own(chunk));
        // SAFETY: packets of the chunk; a thread alone reads and writes their elements.
        unsafe {
            let weights: [f64; W] = core::array::from_fn(|rank| {
                shared.read(Self::first_weight(place_of_weights) + if rank < self.ranks() { rank } else { 0 })
            });
            let mut packet = self.teams().thread();
            while packet < own.packets() {
                let result = sum::<T, W, E>(self.take(chunk, packet), weights, self.ranks());
                self.send_result(chunk, packet, result);
                own.write(packet, result);
                packet += Self::MOST_THREADS;
            }
        }
    }

    /// Writes the results that other ranks publish: a part of them by each block.
    ///
    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    unsafe fn receive_results(self, results: Results) {
        // SAFETY: the launch provides memory for every layer; chunks of the table.
        unsafe {
            match self.moves_several() {
                true if W == 4 => self.for_chunks_of_peers::<2>(|chunks| self.receive_chunks(chunks)),
                true => self.for_chunks_of_peers::<4>(|chunks| self.receive_chunks(chunks)),
                false => self.for_chunks_of_peers::<1>(|chunks| self.receive_chunks(chunks)),
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
            packet += Self::MOST_THREADS;
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
    unsafe fn run<const M: usize, const C: usize, const LEVELS: usize>(self, results: Results, memory: Memory<T>)
    where
        T: Exact<Sums = [f64; C]>,
    {
        // SAFETY: the caller's promise.
        unsafe {
            self.send();
            self.multiply::<M>();
            self.combine::<C, LEVELS>(results, memory);
            if self.is_divided() {
                self.receive_results(results);
            }
            self.finish();
        }
    }
}

macro_rules! of_width {
    ($name:literal $T:ident $width:literal $suffix:literal) => {
        kernel!(["packet_adasum_" $name $suffix], LaunchBounds::packet_adasum($width, size_of::<$T>()), fn (
            group: *const Mailboxes, plan: *const PacketArena, elements: *mut $T, weights: *mut f64, cancelled: *mut u32,
            short: *const u32, vectors: *mut $T, len: u64, trees: *mut u64, blocks: u64,
        ) {
            const E: usize = Tensor::<$T>::ELEMENTS;
            const LEVELS: usize = ($width as usize).ilog2() as usize;
            let arena = Arena::<$T, $width, E, { products($width) }>::new(Call::of(group), plan, elements, blocks);
            let memory = Memory { vectors, len: len as usize, trees };
            arena.run::<{ multiplied_at_once($width, size_of::<$T>()) }, { <$T>::COUNT }, LEVELS>(Results { weights, cancelled, short }, memory);
        });
    };
}

for_each_dtype_and_width!(of_width);
