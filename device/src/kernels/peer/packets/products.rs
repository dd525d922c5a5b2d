//! The products of the ranks' vectors over the chunks that a rank reduces, a step of Adasum by packets.

use super::super::super::adasum::Exact;
use super::super::super::products::add_products;
use super::Data;
use super::arena::Arena;
use crate::abi::{PacketChunk, THREADS};
use crate::math::product_part::ProductPart;
use crate::shared::{self, SHARED_SLOTS, STAGED_PACKETS};
use crate::{arch, memory, reduce, thread};

impl<T: Exact, const W: usize, const E: usize, const K: usize> Arena<'_, T, W, E, K> {
    /// Whether blocks can stage the packets of their only chunk in shared memory. The products of eight vectors leave no registers for it, and
    /// blocks of `f64` have too few threads.
    const CAN_STAGE: bool = W <= 4 && !T::IS_DOUBLE;

    /// Multiplies this block's chunks among those that this rank reduces, one for each team at a time, and publishes the products. Threads
    /// load `M` packets of each writer at a time, or one if all threads load packets of a long chunk for the first team.
    ///
    /// # Safety
    /// The launch's contract.
    #[inline(always)]
    pub(super) unsafe fn multiply<const M: usize, const P: usize>(self) {
        const { assert!(P * Self::MOST_WARPS <= SHARED_SLOTS) };
        let teams = self.multiplying_teams();
        let (part, parts) = (ProductPart::<W, K, P>::of_team(teams.team()), (K / P) as u32);
        let mut number = self.first();
        // SAFETY: chunks of the table, below the end.
        unsafe {
            while number < self.end() {
                let own = number + teams.team() / parts * self.blocks;
                let is_there = own < self.end();
                let chunk = if is_there { self.chunk(own) } else { PacketChunk::default() };
                let sums = if Self::CAN_STAGE && self.is_only_chunk() {
                    self.products_over_only::<P>(self.chunk(number))
                } else {
                    self.products_over::<M, P>(chunk, part)
                };
                // Other threads may still read the block's shared memory for the preceding chunks.
                thread::sync_threads();
                reduce::team_sum::<P>((Self::MOST_WARPS, teams.log2), sums, |product, sum| {
                    let own = number + teams.team() / parts * self.blocks;
                    if own < self.end() {
                        let product = self.products() + own * K as u32 + part.product(product) as u32;
                        self.publish(product, sum.to_bits(), true);
                    }
                });
                number += teams.count() / parts * self.blocks;
            }
        }
    }

    /// Whether no block multiplies more than one chunk, and more than twice as many threads move a chunk as multiply one: the arena's longest
    /// chunk has as many packets. Staging is faster then; shorter chunks of such an arena are staged too.
    #[inline(always)]
    fn is_only_chunk(self) -> bool {
        let arena = self.plan.in_memory();
        arena.most_reduced as u32 <= self.blocks && 1 << self.teams().log2 > 2 * THREADS
    }

    /// A part of the products of the ranks' vectors over a chunk, as far as they are this thread's of its team. Elements behind the end are
    /// zero.
    #[inline(always)]
    unsafe fn products_over<const M: usize, const P: usize>(
        self,
        chunk: PacketChunk,
        part: ProductPart<W, K, P>,
    ) -> [f64; P] {
        let mut totals = [0.0; P];
        let mut place = self.multiplying_teams().thread();
        // SAFETY: packets of the chunk.
        unsafe {
            if M > 1 && self.own(chunk).packets() <= THREADS {
                return self.add_products::<1, P>(totals, chunk, place, part);
            }
            while place < self.own(chunk).packets() {
                totals = self.add_products::<M, P>(totals, chunk, place, part);
                place += M as u32 * THREADS;
            }
        }
        totals
    }

    /// All products over the block's [only chunk](Self::is_only_chunk), as sums of the first team's threads; other threads have zeros. In each
    /// round every thread waits for a packet of each rank and leaves it in shared memory, and the first team adds the round's packets in the
    /// order of [`products_over`](Self::products_over).
    #[inline(always)]
    unsafe fn products_over_only<const P: usize>(self, chunk: PacketChunk) -> [f64; P] {
        const { assert!(!Self::CAN_STAGE || P == K && W * Self::MOST_THREADS as usize <= STAGED_PACKETS) };
        let (staged, thread) = (shared::packets(), reduce::thread_of_block());
        let slot = |packet: u32, rank: usize, word: usize| packet as usize + (rank * 2 + word) * (STAGED_PACKETS / W);
        let (mut totals, mut first) = ([0.0; P], 0);
        // SAFETY: packets of the chunk; each slot is written by one thread, and read between the barriers.
        unsafe {
            while first < self.own(chunk).packets() {
                let [of_ranks] = self.gather::<1>(chunk, |_| first + thread, |place| place);
                let mut rank = 0;
                while rank < W {
                    staged.write(slot(thread, rank, 0), of_ranks[rank][0]);
                    staged.write(slot(thread, rank, 1), of_ranks[rank][1]);
                    rank += 1;
                }
                thread::sync_threads();
                let mut packet = thread;
                while thread < THREADS && packet < Self::threads() {
                    let of_ranks =
                        core::array::from_fn(|rank| [0, 1].map(|word| staged.read(slot(packet, rank, word))));
                    Self::add_packet(&mut totals, of_ranks);
                    packet += THREADS;
                }
                thread::sync_threads();
                first += Self::threads();
            }
        }
        totals
    }

    /// Adds the products over a packet of each place's vector.
    #[inline(always)]
    fn add_packet<const P: usize>(totals: &mut [f64; P], of_places: [Data; W]) {
        // SAFETY: packets consist of elements.
        let elements: [[T; E]; W] = of_places.map(|data| unsafe { memory::reinterpret(data) });
        let mut lane = 0;
        while lane < E {
            let values: [T; W] = core::array::from_fn(|place| elements[place][lane]);
            add_products(totals, values, const { ProductPart::<W, K, P>::places() });
            lane += 1;
        }
    }

    /// Adds the products over the next `M` packets of a thread, from `place` on.
    #[inline(always)]
    unsafe fn add_products<const M: usize, const P: usize>(
        self,
        mut totals: [f64; P],
        chunk: PacketChunk,
        place: u32,
        part: ProductPart<W, K, P>,
    ) -> [f64; P] {
        // Nothing that is derived from the half is kept in registers from packet to packet.
        let part = ProductPart::<W, K, P> { half: arch::forget(part.half as u64) as u32 };
        // SAFETY: packets of the chunk.
        let of_ranks = unsafe { self.gather::<M>(chunk, |m| place + m as u32 * THREADS, |place| part.rank(place)) };
        let mut m = 0;
        while m < M {
            Self::add_packet(&mut totals, of_ranks[m]);
            m += 1;
        }
        totals
    }
}
