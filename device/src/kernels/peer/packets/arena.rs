//! An arena that Adasum reduces by packets, from the view of a thread: its tables, the packets of the common area, and the sums over a layer's
//! chunks.

use super::super::super::adasum::{Exact, criterion};
use super::super::gram::SharedWeights;
use super::{Call, Data, sendable, with_own};
use crate::abi::{PACKET_BYTES, PacketArena, PacketChunk, PacketChunks, THREADS, WARP, packet_adasum_threads};
use crate::math::Element;
use crate::math::adasum::{Pair, product_index, weights, weights_of};
use crate::reduce::{self, FoldingLanes};
use crate::shared::{self, SHARED_SLOTS};
use crate::{memory, thread};

/// The arena of one call, from the view of a thread. `W` is the width of the kernel, `E` the number of elements of a packet, and `K` the
/// number of products of `W` vectors.
#[derive(Clone, Copy)]
pub(super) struct Arena<'a, T, const W: usize, const E: usize, const K: usize> {
    pub(super) call: Call<'a>,
    pub(super) plan: Plan,
    pub(super) elements: *mut T,
    pub(super) blocks: u32,
    /// The chunk behind the last one that this rank reduces.
    pub(super) end: u32,
}

/// A [`PacketArena`]: in registers as far as the whole kernel uses it.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    arena: *const PacketArena,
    window_len: u32,
    products: u32,
    team_log2: u32,
}

impl Plan {
    /// # Safety
    /// The tables follow the arena, and both are there for as long as the kernel runs.
    #[inline(always)]
    pub(super) unsafe fn of(arena: *const PacketArena) -> Self {
        // SAFETY: the caller's promise.
        let plan = unsafe { *arena };
        Self {
            arena,
            window_len: plan.window_len as u32,
            products: plan.products as u32,
            team_log2: plan.team_log2 as u32,
        }
    }

    /// The arena in memory, for numbers that only a part of the kernel needs: kept from the beginning, they would take registers from the
    /// loops before.
    #[inline(always)]
    pub(super) fn in_memory(&self) -> &PacketArena {
        // SAFETY: the promise of `of`.
        unsafe { &*self.arena }
    }
}

/// A division of a block's threads.
#[derive(Clone, Copy)]
pub(super) struct Teams {
    /// The binary logarithm of the number of threads of a team.
    pub(super) log2: u32,
}

impl Teams {
    /// The number of teams.
    #[inline(always)]
    pub(super) fn count(self) -> u32 {
        thread::block_dim_x() as u32 >> self.log2
    }

    /// The number of this thread's team.
    #[inline(always)]
    pub(super) fn team(self) -> u32 {
        reduce::thread_of_block() >> self.log2
    }

    /// The number of this thread in its team.
    #[inline(always)]
    pub(super) fn thread(self) -> u32 {
        reduce::thread_of_block() & ((1 << self.log2) - 1)
    }
}

/// The elements of a chunk in some rank's vector, in units of a packet, of `E` elements each. Unlike [`Tensor`](super::Tensor), its packets are
/// read at once, the last one too: chunks begin at whole packets, of which vectors consist.
#[derive(Clone, Copy)]
pub(super) struct Elements<T, const E: usize> {
    first: *mut T,
    len: u32,
}

impl<T: Element, const E: usize> Elements<T, E> {
    /// The elements of a chunk in a vector.
    #[inline(always)]
    pub(super) fn of(vector: *mut T, chunk: PacketChunk) -> Self {
        Self { first: vector.wrapping_add(chunk.begin as usize), len: chunk.len }
    }

    #[inline(always)]
    pub(super) fn packets(self) -> u32 {
        self.len.div_ceil(E as u32)
    }

    /// The number of elements of a packet, if it is not full.
    #[inline(always)]
    fn rest(self, packet: u32) -> Option<u32> {
        let rest = self.len - packet * E as u32;
        (rest < E as u32).then_some(rest)
    }

    /// A packet, [`sendable`], so that its own rank computes with the same bits as its peers; elements behind the end are zero, and packets
    /// behind the end too.
    ///
    /// # Safety
    /// The packets are readable.
    #[inline(always)]
    pub(super) unsafe fn read(self, packet: u32) -> Data {
        if packet >= self.packets() {
            return [0; 2];
        }
        // SAFETY: the caller's promise.
        let [low, high]: Data = unsafe {
            let elements: [T; E] = memory::load(self.first.add(packet as usize * E));
            memory::reinterpret(elements)
        };
        let bits = self.rest(packet).map_or(2 * u64::BITS, |rest| rest * size_of::<T>() as u32 * 8);
        let lowest = |bits: u32| if bits < u64::BITS { (1 << bits) - 1 } else { u64::MAX };
        sendable([low & lowest(bits), high & lowest(bits.saturating_sub(u64::BITS))])
    }

    /// Writes a packet, but no element behind the end.
    ///
    /// # Safety
    /// The packet is writable.
    #[inline(always)]
    pub(super) unsafe fn write(self, packet: u32, data: Data) {
        // SAFETY: the caller's promise.
        unsafe {
            let (first, elements): (_, [T; E]) = (self.first.add(packet as usize * E), memory::reinterpret(data));
            let Some(rest) = self.rest(packet) else { return memory::store(first, elements) };
            let mut lane = 0;
            while lane < E - 1 {
                if (lane as u32) < rest {
                    first.add(lane).write(elements[lane]);
                }
                lane += 1;
            }
        }
    }
}

/// The results of a layer: `[layer][rank]` and `[layer]`.
#[derive(Clone, Copy)]
pub(super) struct Results {
    pub(super) weights: *mut f64,
    pub(super) cancelled: *mut u32,
    pub(super) short: *const u32,
}

impl<'a, T: Exact, const W: usize, const E: usize, const K: usize> Arena<'a, T, W, E, K> {
    /// The number of chunks whose weights a block computes at a time: their products, weights and flags are in shared memory.
    pub(super) const BATCH: u32 = {
        let slots = SHARED_SLOTS / (K + W + 1);
        if slots > 16 { 16 } else { slots as u32 }
    };

    /// The limit of the threads of a block. A block has as many if chunks have more packets.
    pub(super) const MOST_THREADS: u32 = packet_adasum_threads(W, size_of::<T>());

    /// Two ranks are one pair, which cannot cancel; but short vectors of `f64` always take the exact path.
    pub(super) const HAS_EXACT_PATH: bool = W > 2 || T::IS_DOUBLE;

    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    pub(super) unsafe fn new(call: Call<'a>, plan: *const PacketArena, elements: *mut T, blocks: u64) -> Self {
        const { assert!(K * Self::MOST_WARPS <= SHARED_SLOTS && T::COUNT * Self::MOST_WARPS <= SHARED_SLOTS) };
        // SAFETY: the launch provides the plan, and the tables behind it.
        unsafe {
            let end = (*plan).reduced[0].end();
            Self { call, plan: Plan::of(plan), elements, blocks: blocks as u32, end }
        }
    }

    /// This block's first chunk among those that this rank reduces. The others are a number of blocks apart, up to `end`.
    #[inline(always)]
    pub(super) fn first(self) -> u32 {
        // 0 in one shot, as the table says too: with this branch the assembler keeps one counter less for loops over these chunks, so that no
        // register spills.
        let first = if self.is_divided() { self.plan.in_memory().reduced[0].first } else { 0 };
        first + Self::block()
    }

    /// Calls `process` for each chunk that peers reduce, or once for each chunk in one shot, as far as it is this team's. The order is that in
    /// which each peer's blocks process its chunks, and begins with the next rank, so that no rank is the destination of all others at a time.
    ///
    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    pub(super) unsafe fn for_chunks_of_peers(self, process: impl Fn(PacketChunk)) {
        let (teams, arena) = (self.teams(), self.plan.in_memory());
        // Never 0, which the compiler does not know: a check of divisions would compile a panic into the kernel.
        let peers = if W == 2 { 1 } else { (arena.peers as u32).max(1) };
        let mut item = Self::block() + teams.team() * self.blocks;
        while item < arena.most_reduced as u32 * peers {
            let (peer, place) = (item % peers, item / peers);
            // SAFETY: chunks of the table.
            unsafe {
                let reduced = *arena.reduced.get_unchecked(1 + peer as usize);
                if place < reduced.count {
                    process(self.chunk(reduced.first + place));
                }
            }
            item += teams.count() * self.blocks;
        }
    }

    /// The number of ranks.
    #[inline(always)]
    pub(super) fn ranks(self) -> usize {
        // There are at least two ranks, which the compiler does not know.
        if W == 2 { 2 } else { self.call.ranks as usize }
    }

    /// The limit of the warps of a block.
    pub(super) const MOST_WARPS: usize = (Self::MOST_THREADS / WARP) as usize;

    /// The number of threads of a block.
    #[inline(always)]
    pub(super) fn threads() -> u32 {
        thread::block_dim_x() as u32
    }

    /// The lanes that add the numbers of one sum.
    #[inline(always)]
    pub(super) fn lanes(self) -> FoldingLanes {
        FoldingLanes::of(self.plan.in_memory().most_chunks)
    }

    /// Whether a chunk is reduced by one rank, in two shots, and not by all.
    #[inline(always)]
    pub(super) fn is_divided(self) -> bool {
        self.plan.window_len != 0
    }

    #[inline(always)]
    pub(super) fn block() -> u32 {
        thread::block_idx_x() as u32
    }

    /// The teams into which a block's threads are divided, each of which has a chunk at a time.
    #[inline(always)]
    pub(super) fn teams(self) -> Teams {
        Teams { log2: self.plan.team_log2 }
    }

    /// The teams that multiply chunks, of at most [`THREADS`].
    #[inline(always)]
    pub(super) fn multiplying_teams(self) -> Teams {
        let log2 = self.plan.team_log2;
        Teams { log2: if log2 < THREADS.ilog2() { log2 } else { THREADS.ilog2() } }
    }

    #[inline(always)]
    fn chunks(self) -> *const PacketChunk {
        self.plan.arena.wrapping_add(1).cast()
    }

    /// # Safety
    /// There is such a chunk.
    #[inline(always)]
    pub(super) unsafe fn chunk(self, number: u32) -> PacketChunk {
        // SAFETY: the caller's promise.
        unsafe { *self.chunks().add(number as usize) }
    }

    /// # Safety
    /// There is such a layer.
    #[inline(always)]
    pub(super) unsafe fn layer(self, number: u32) -> PacketChunks {
        // SAFETY: the caller's promise.
        unsafe {
            *self.chunks().add(self.plan.in_memory().chunk_count as usize).cast::<PacketChunks>().add(number as usize)
        }
    }

    /// The elements of a chunk in this rank's arena.
    #[inline(always)]
    pub(super) fn own(self, chunk: PacketChunk) -> Elements<T, E> {
        Elements::of(self.elements, chunk)
    }

    /// The first packet of a chunk in the slots of the ranks that reduce it.
    #[inline(always)]
    pub(super) fn first_packet(self, chunk: PacketChunk) -> u32 {
        (chunk.begin - chunk.owner * self.plan.window_len) / E as u32
    }

    /// The first packet of a chunk's results in the common area, in two shots.
    #[inline(always)]
    pub(super) fn first_result(chunk: PacketChunk) -> u32 {
        chunk.begin / E as u32
    }

    /// The packet of a product over a chunk.
    #[inline(always)]
    pub(super) fn product_of(self, chunk: u32, product: u32) -> u32 {
        self.plan.products + chunk * K as u32 + product
    }

    /// The packet of a number of a layer's results: its weights, and its flag.
    #[inline(always)]
    pub(super) fn result_of(self, layer: u32, number: usize) -> u32 {
        self.plan.in_memory().weights as u32 + layer * (W as u32 + 1) + number as u32
    }

    /// The address of a packet of the common area, which is behind the slots of all ranks.
    #[inline(always)]
    fn common(self, index: u32) -> u64 {
        self.call.received(self.call.ranks as usize, index)
    }

    /// The address of the packet of the peer at `place`, of `W`, if there is such a packet and peer. The peer of two ranks is at place 0, so
    /// that there is no code for the other place.
    #[inline(always)]
    fn packet_of_peer(self, chunk: PacketChunk, packet: u32, place: usize) -> Option<u64> {
        let is_wanted = if W == 2 { place == 0 } else { self.call.is_peer(place) };
        let writer = if W == 2 { 1 - self.call.rank as usize } else { place };
        let is_there = is_wanted && packet < self.own(chunk).packets();
        is_there.then(|| self.call.received(writer, self.first_packet(chunk) + packet))
    }

    /// Waits for `M` packets of a chunk that this rank reduces. Returns all ranks' elements; those behind the end are zero.
    ///
    /// # Safety
    /// This rank reduces the chunk, and its packets are not empty again.
    #[inline(always)]
    pub(super) unsafe fn gather<const M: usize>(
        self,
        chunk: PacketChunk,
        packet: impl Fn(usize) -> u32,
    ) -> [[Data; W]; M] {
        // SAFETY: the caller's promise.
        unsafe {
            let own: [Data; M] = core::array::from_fn(|m| self.own(chunk).read(packet(m)));
            let of_peers = self.call.receive::<M, W>(|m, place| self.packet_of_peer(chunk, packet(m), place));
            core::array::from_fn(|m| {
                let of_peers = if W == 2 { [of_peers[m][0]; W] } else { of_peers[m] };
                with_own(of_peers, self.call.rank as usize, own[m])
            })
        }
    }

    /// Like [`gather`](Self::gather), for one packet, which it leaves empty.
    ///
    /// # Safety
    /// The conditions of [`gather`](Self::gather); this call does not read the packet any more.
    #[inline(always)]
    pub(super) unsafe fn take(self, chunk: PacketChunk, packet: u32) -> [Data; W] {
        // SAFETY: the caller's promise.
        unsafe {
            let [of_ranks] = self.gather::<1>(chunk, |_| packet);
            Call::empty::<W>(|place| self.packet_of_peer(chunk, packet, place));
            of_ranks
        }
    }

    /// Sends a packet of a chunk's results to all peers, if chunks are divided.
    ///
    /// # Safety
    /// The packet is inside the chunk, which this rank reduces.
    #[inline(always)]
    pub(super) unsafe fn send_result(self, chunk: PacketChunk, packet: u32, data: Data) {
        let mut peer = 0;
        while peer < W {
            if self.is_divided() && self.call.is_peer(peer) {
                let index = Self::first_result(chunk) + packet;
                // SAFETY: the caller's promise.
                unsafe { self.call.write(peer, self.call.common + index * PACKET_BYTES as u32, data) };
            }
            peer += 1;
        }
    }

    /// Waits for a packet of another rank's results for a chunk, which it leaves empty.
    ///
    /// # Safety
    /// The packet is inside the chunk, which another rank reduces; nobody else reads it.
    #[inline(always)]
    pub(super) unsafe fn take_result(self, chunk: PacketChunk, packet: u32) -> Data {
        let address = self.common(Self::first_result(chunk) + packet);
        // SAFETY: the caller's promise.
        unsafe {
            let [[data]] = self.call.receive::<1, 1>(|_, _| Some(address));
            Call::empty::<1>(|_| Some(address));
            data
        }
    }

    /// Writes a number of the common area in the mailboxes of all peers, if chunks are divided, and in this rank's own if `and_own`.
    ///
    /// # Safety
    /// `index` is inside the area, behind the results.
    #[inline(always)]
    pub(super) unsafe fn publish(self, index: u32, number: u64, and_own: bool) {
        let mut rank = 0;
        while rank < W {
            let is_own = rank == self.call.rank as usize;
            if is_own && and_own || self.is_divided() && self.call.is_peer(rank) {
                let offset = self.call.common + index * PACKET_BYTES as u32;
                // SAFETY: the caller's promise.
                unsafe { self.call.write_number(rank, offset, number) };
            }
            rank += 1;
        }
    }

    /// Waits for numbers of the common area, where there is an index; the others are 0.
    ///
    /// # Safety
    /// Indices are inside the area, behind the results.
    #[inline(always)]
    pub(super) unsafe fn numbers<const M: usize>(self, index: impl Fn(usize) -> Option<u32>) -> [u64; M] {
        // SAFETY: the caller's promise.
        unsafe { self.call.receive_numbers(|place| index(place).map(|index| self.common(index))) }
    }

    /// The sum of a layer's numbers, one for each chunk in the packet `packet(chunk)`, on the first of the [`lanes`](Self::lanes).
    ///
    /// # Safety
    /// All lanes of the warp must execute this together; each chunk's number is published.
    #[inline(always)]
    pub(super) unsafe fn total(self, layer: PacketChunks, packet: impl Fn(u32) -> u32) -> f64 {
        // SAFETY: the caller's promise.
        unsafe {
            self.lanes().sum(layer.first, layer.end(), |chunk| {
                let numbers: [u64; 4] =
                    self.numbers(|place| (chunk[place] < layer.end()).then(|| packet(chunk[place])));
                numbers.map(f64::from_bits)
            })
        }
    }

    /// Computes a layer's weights from the products in the shared memory of a place of a batch. Returns whether it takes the exact path.
    ///
    /// # Safety
    /// The products are there; one thread computes a place's weights.
    #[inline(always)]
    pub(super) unsafe fn weigh(
        self,
        place: u32,
        layer: u32,
        short: *const u32,
        keep: impl FnMut(Pair, (f64, f64)),
    ) -> bool {
        let (shared, first) = (shared::partials(), Self::first_weight(place));
        // SAFETY: the caller's promise; there is a flag for each layer.
        unsafe {
            let product = |i, j| shared.read(place as usize * K + product_index(i, j, W));
            let criterion = criterion(T::IS_DOUBLE, if T::IS_DOUBLE { *short.add(layer as usize) } else { 0 });
            let lost = if self.ranks() == W {
                let (weights, lost) = weights_of::<W>(criterion, product, keep);
                let mut rank = 0;
                while rank < W {
                    shared.write(first + rank, weights[rank]);
                    rank += 1;
                }
                lost
            } else {
                weights(&mut SharedWeights { shared, first }, self.ranks(), criterion, product, keep)
            };
            lost && Self::HAS_EXACT_PATH
        }
    }

    /// The slot of the first weight of a place of a batch; a flag of the exact path follows the weights.
    #[inline(always)]
    pub(super) fn first_weight(place: u32) -> usize {
        Self::BATCH as usize * K + place as usize * (W + 1)
    }

    /// Stores a layer's weight of a rank, and sends it to the ranks that do not reduce the layer's first chunk.
    ///
    /// # Safety
    /// The launch provides memory for every layer.
    #[inline(always)]
    pub(super) unsafe fn store_weight(self, layer: u32, rank: usize, weight: f64, results: Results) {
        // SAFETY: the caller's promise.
        unsafe {
            results.weights.add(layer as usize * self.ranks() + rank).write(weight);
            self.publish(self.result_of(layer, rank), weight.to_bits(), false);
        }
    }

    /// Stores whether a layer has cancelled, and sends it like the weights.
    ///
    /// # Safety
    /// The condition of [`store_weight`](Self::store_weight).
    #[inline(always)]
    pub(super) unsafe fn store_flag(self, layer: u32, lost: bool, results: Results) {
        // SAFETY: the caller's promise.
        unsafe {
            results.cancelled.add(layer as usize).write(lost as u32);
            self.publish(self.result_of(layer, W), lost as u64, false);
        }
    }
}
