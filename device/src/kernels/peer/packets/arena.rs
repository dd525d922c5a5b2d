//! An arena that Adasum reduces by packets, from the view of a thread: its tables, the packets of the common area, and the sums over a layer's
//! chunks.

use super::super::super::adasum::{Exact, criterion};
use super::{CallView, Data, sendable, with_own};
use crate::abi::{
    PACKET_BYTES, PacketArena, PacketChunk, PacketChunks, WARP, packet_adasum_is_full, packet_adasum_threads,
};
use crate::math::Element;
use crate::math::adasum::Criterion;
use crate::reduce::{self, FoldingLanes};
use crate::shared::SHARED_SLOTS;
use crate::{arch, memory, thread};

/// The arena of one call, from the view of a thread. `W` is the width of the kernel, `E` the number of elements of a packet, and `K` the
/// number of products of `W` vectors.
#[derive(Clone, Copy)]
pub(super) struct Arena<'a, T, const W: usize, const E: usize, const K: usize> {
    pub(super) call: CallView<'a>,
    pub(super) plan: ArenaRegisters,
    pub(super) elements: *mut T,
    pub(super) blocks: u32,
}

/// A [`PacketArena`]: in registers as far as the whole kernel uses it.
#[derive(Clone, Copy)]
pub(super) struct ArenaRegisters {
    arena: *const PacketArena,
    shard_len: u32,
    products: u32,
    /// The chunk behind the last one that this rank reduces.
    end: u32,
    moving_log2: u32,
}

impl ArenaRegisters {
    /// # Safety
    /// The tables follow the arena, and both are there for as long as the kernel runs.
    #[inline(always)]
    pub(super) unsafe fn of(arena: *const PacketArena) -> Self {
        // SAFETY: the caller's promise.
        let plan = unsafe { *arena };
        Self {
            arena,
            shard_len: plan.shard_len as u32,
            products: plan.products as u32,
            end: plan.reduced[0].end(),
            moving_log2: plan.moving_log2 as u32,
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

    /// The number of threads of a team.
    #[inline(always)]
    pub(super) fn threads(self) -> u32 {
        1 << self.log2
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

    /// Whether registers are few, see [`packet_adasum_is_full`]. Without [`anew`](Self::anew) and loads from memory, kernels
    /// of eight vectors spill some 400 bytes (ptxas 12.9); kernels of four vectors would fit.
    pub(super) const IS_FULL: bool = packet_adasum_is_full(W, size_of::<T>());

    /// The limit of the threads of a block. A block has as many if chunks have more packets.
    pub(super) const MOST_THREADS: u32 = packet_adasum_threads(size_of::<T>());

    /// Two ranks are one pair, which cannot cancel; but short vectors of `f64` always take the exact path.
    pub(super) const HAS_EXACT_PATH: bool = W > 2 || T::IS_DOUBLE;

    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    pub(super) unsafe fn new(call: CallView<'a>, plan: *const PacketArena, elements: *mut T, blocks: u64) -> Self {
        const { assert!(T::COUNT * Self::MOST_WARPS <= SHARED_SLOTS) };
        // SAFETY: the launch provides the plan, and the tables behind it.
        unsafe { Self { call, plan: ArenaRegisters::of(plan), elements, blocks: blocks as u32 } }
    }

    /// A copy of the arena. Where registers are few, the compiler cannot see that its numbers equal the first arena's, and keeps no register
    /// with a value that it has computed from them.
    #[inline(always)]
    pub(super) fn anew(self) -> Self {
        if !Self::IS_FULL {
            return self;
        }
        let forget = |number: u32| arch::forget(number as u64) as u32;
        let call = CallView { rank: forget(self.call.rank), ranks: forget(self.call.ranks), ..self.call };
        Self { call, blocks: forget(self.blocks), ..self }
    }

    /// This block's first chunk among those that this rank reduces. The others are a number of blocks apart, up to `end`.
    #[inline(always)]
    pub(super) fn first(self) -> u32 {
        self.plan.in_memory().reduced[0].first + Self::block()
    }

    /// The chunk behind the last one that this rank reduces.
    #[inline(always)]
    pub(super) fn end(self) -> u32 {
        if Self::IS_FULL { self.plan.in_memory().reduced[0].end() } else { self.plan.end }
    }

    /// Calls `process` for each chunk that peers reduce, or once for each chunk in one shot, as far as it is this team's; with `G` chunks at a
    /// time, so that loads of one need not wait for loads of another. Missing ones are empty. The order is that in which each peer's blocks
    /// process its chunks, and begins with the next rank, so that no rank is the destination of all others at a time.
    ///
    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    pub(super) unsafe fn for_chunks_of_peers<const G: usize>(self, process: impl Fn([PacketChunk; G])) {
        // Nothing of it is kept in registers until the next such loop.
        let (teams, arena, blocks) = (self.teams(), self.plan.in_memory(), arch::forget(self.blocks as u64) as u32);
        // Never 0, which the compiler does not know: a check of divisions would compile a panic into the kernel.
        let peers = if W == 2 { 1 } else { (arena.peers as u32).max(1) };
        let mut item = Self::block() + teams.team() * blocks;
        while item < arena.most_reduced as u32 * peers {
            process(core::array::from_fn(|_| {
                let (peer, place) = (item % peers, item / peers);
                item += teams.count() * blocks;
                // SAFETY: there are numbers for each peer, and chunks below their end.
                unsafe {
                    let reduced = *arena.reduced.get_unchecked(1 + peer as usize);
                    if place < reduced.count { self.chunk(reduced.first + place) } else { PacketChunk::default() }
                }
            }));
        }
    }

    /// Whether threads move packets of several chunks at a time: in two shots, if there are more chunks than teams.
    #[inline(always)]
    pub(super) fn moves_several(self) -> bool {
        let arena = self.plan.in_memory();
        let blocks = arch::forget(self.blocks as u64) as u32;
        self.is_divided() && (arena.most_reduced * arena.peers) as u32 > self.teams().count() * blocks
    }

    /// The number of packets of the longest of these chunks.
    #[inline(always)]
    pub(super) fn most_packets<const G: usize>(self, chunks: [PacketChunk; G]) -> u32 {
        let (mut most, mut place) = (0, 0);
        while place < G {
            let packets = self.own(chunks[place]).packets();
            most = if packets > most { packets } else { most };
            place += 1;
        }
        most
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

    /// The lanes that add the numbers of one sum, of one layer or of several.
    #[inline(always)]
    pub(super) fn lanes(self, is_one_layer: bool) -> FoldingLanes {
        let most = self.plan.in_memory().most_chunks;
        if is_one_layer { FoldingLanes::of(most) } else { FoldingLanes::groups(most) }
    }

    /// Whether a chunk is reduced by one rank, in two shots, and not by all.
    #[inline(always)]
    pub(super) fn is_divided(self) -> bool {
        self.plan.shard_len != 0
    }

    #[inline(always)]
    pub(super) fn block() -> u32 {
        thread::block_idx_x() as u32
    }

    /// The teams into which a block's threads are divided, each of which sends, combines or receives a chunk at a time.
    #[inline(always)]
    pub(super) fn teams(self) -> Teams {
        Teams { log2: if Self::IS_FULL { self.plan.in_memory().moving_log2 as u32 } else { self.plan.moving_log2 } }
    }

    /// The teams that multiply chunks, of at most [`THREADS`](crate::abi::THREADS).
    #[inline(always)]
    pub(super) fn multiplying_teams(self) -> Teams {
        Teams { log2: self.plan.in_memory().multiplying_log2 as u32 }
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
        (chunk.begin - chunk.owner * self.plan.shard_len) / E as u32
    }

    /// The first packet of a chunk's results in the common area, in two shots.
    #[inline(always)]
    pub(super) fn first_result(chunk: PacketChunk) -> u32 {
        chunk.begin / E as u32
    }

    /// The first of the packets of products, of which each chunk has `K`.
    #[inline(always)]
    pub(super) fn products(self) -> u32 {
        if Self::IS_FULL { self.plan.in_memory().products as u32 } else { self.plan.products }
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

    /// Waits for `M` packets of a chunk that this rank reduces. Returns the elements of the rank of each place, of all ranks; elements behind
    /// the end are zero.
    ///
    /// # Safety
    /// This rank reduces the chunk, and its packets are not empty again.
    #[inline(always)]
    pub(super) unsafe fn gather<const M: usize>(
        self,
        chunk: PacketChunk,
        packet: impl Fn(usize) -> u32,
        rank: impl Fn(usize) -> usize,
    ) -> [[Data; W]; M] {
        // SAFETY: the caller's promise.
        unsafe {
            let own: [Data; M] = core::array::from_fn(|m| self.own(chunk).read(packet(m)));
            let of_peers = self.call.receive::<M, W>(|m, place| self.packet_of_peer(chunk, packet(m), rank(place)));
            core::array::from_fn(|m| {
                let of_peers = if W == 2 { [of_peers[m][0]; W] } else { of_peers[m] };
                with_own(of_peers, |place| rank(place) == self.call.rank as usize, own[m])
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
            let [of_ranks] = self.gather::<1>(chunk, |_| packet, |place| place);
            CallView::empty::<W>(|place| self.packet_of_peer(chunk, packet, place));
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

    /// Waits for a packet of other ranks' results for each of these chunks that has it, which it leaves empty; the other data are 0.
    ///
    /// # Safety
    /// Other ranks reduce the chunks; nobody else reads the packets.
    #[inline(always)]
    pub(super) unsafe fn take_results<const G: usize>(self, chunks: [PacketChunk; G], packet: u32) -> [Data; G] {
        let address = |place: usize| {
            let is_there = packet < self.own(chunks[place]).packets();
            is_there.then(|| self.common(Self::first_result(chunks[place]) + packet))
        };
        // SAFETY: the caller's promise.
        unsafe {
            let [data] = self.call.receive::<1, G>(|_, place| address(place));
            CallView::empty::<G>(address);
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

    /// Waits for a number of the common area.
    ///
    /// # Safety
    /// `index` is inside the area, behind the results.
    #[inline(always)]
    pub(super) unsafe fn number(self, index: u32) -> u64 {
        // SAFETY: the caller's promise.
        let [[number]] = unsafe { self.call.receive_numbers(|_, _| Some(self.common(index))) };
        number
    }

    /// The sums of the numbers of `M` layers, one for each chunk in the packet `packet(place, chunk)`, on the first of the lanes.
    ///
    /// # Safety
    /// All lanes of the warp must execute this together; each chunk's number is published.
    #[inline(always)]
    pub(super) unsafe fn totals<const M: usize>(
        self,
        lanes: FoldingLanes,
        layers: [PacketChunks; M],
        packet: impl Fn(usize, u32) -> u32,
    ) -> [f64; M] {
        let address = |sum: usize, chunk: u32| (chunk < layers[sum].end()).then(|| self.common(packet(sum, chunk)));
        // SAFETY: the caller's promise.
        unsafe {
            let (mut totals, mut pass) = ([0.0; M], 0);
            while pass < lanes.passes {
                let sums = lanes.sums(pass, layers.map(|layer| (layer.first, layer.end())), |chunks| {
                    let numbers: [[u64; 4]; M] =
                        self.call.receive_numbers(|sum, place| address(sum, chunks[sum][place]));
                    numbers.map(|numbers| numbers.map(f64::from_bits))
                });
                totals = core::array::from_fn(|sum| totals[sum] + sums[sum]);
                pass += 1;
            }
            totals
        }
    }

    /// The criterion of a layer for the exact path.
    ///
    /// # Safety
    /// There is a flag for each layer.
    #[inline(always)]
    pub(super) unsafe fn criterion(layer: u32, short: *const u32) -> Criterion {
        // SAFETY: the caller's promise.
        criterion(T::IS_DOUBLE, if T::IS_DOUBLE { unsafe { *short.add(layer as usize) } } else { 0 })
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
