//! Sums and Adasum of small tensors in one launch: ranks write packets of elements into each other's mailboxes, and each thread waits for the
//! packets of its own elements alone, so that no barrier is needed (as in NCCL's LL protocol, of low latency).
//!
//! A packet of elements has no flag beside them: a word of a mailbox is [`EMPTY`] until a peer's elements arrive, and the last reader makes it
//! so again. As elements [`EMPTY`] is NaN, in whose place ranks send other NaN. Numbers that several threads read are sent beside flags
//! instead, which differ from call to call.
//!
//! In one shot every rank sends all data to all others and adds them up itself: one transfer, fewest steps. In two shots it sends each rank
//! that rank's shard, adds up its own shard and sends the result to all: two transfers, but each link carries the data once or twice,
//! whatever the number of ranks. Both add in rank order in `f64` and round once, like `peer_reduce`, with the same bits but for NaN.
//!
//! A thread first sends all its packets and only then waits. A packet's place is written again two calls later, when its writer has ended the
//! call in between, in which it had packets from its reader, or from a rank that had waited for the reader's. The reader sent these when
//! it had ended the first call and emptied the place. So sends never wait, and a launch of a sum completes as soon as all blocks of all
//! ranks have been resident.

mod adasum;
mod arena;
mod exact;
mod products;

use core::sync::atomic::Ordering;

use super::ZERO;
use crate::abi::{EMPTY, LaunchBounds, Mailboxes, PACKET_BYTES};
use crate::dialect::atomic::{atomic_fetch_add_u32_device, atomic_load_32_system};
use crate::half::*;
use crate::kernels::{for_each_dtype_and_width, kernel};
use crate::math::{Element, elementwise};
use crate::{arch, memory, thread};

/// The elements of a packet.
type Data = [u64; 2];

/// Replaces each word that is [`EMPTY`], which is NaN in every dtype, by other NaN: a reader takes it for one that has not arrived.
#[inline(always)]
fn sendable(data: Data) -> Data {
    const NOT_A_NUMBER: u64 = 0x7fff_7fff_7fff_7fff;
    data.map(|word| if word == EMPTY { NOT_A_NUMBER } else { word })
}

/// One call of a group, from the view of a thread, with the numbers that it needs for every packet.
#[derive(Clone, Copy)]
struct CallView<'a> {
    group: &'a Mailboxes,
    /// The two counters behind the group's description; not derived from the reference, which is to memory that nobody writes.
    counters: *mut u32,
    /// The number of the calls before this one.
    number: u32,
    rank: u32,
    ranks: u32,
    /// The address of this call's slots in this rank's mailbox, by writer.
    received: u64,
    /// The offset of this rank's slot of this call in any mailbox.
    sent: u32,
    /// The offset of this call's common area in any mailbox.
    common: u32,
    /// Bytes of a slot. A mailbox has less than 4 GiB, so that offsets in it are short.
    slot_bytes: u32,
}

impl<'a> CallView<'a> {
    /// The call that this launch makes.
    ///
    /// # Safety
    /// `group` describes a live group, and is followed by its counters.
    #[inline(always)]
    unsafe fn of(group: *const Mailboxes) -> Self {
        // SAFETY: the caller's promise; a rank is below the world size.
        unsafe {
            let counters = group.add(1).cast_mut().cast();
            let number = atomic_load_32_system(counters, Ordering::Relaxed);
            let (group, parity) = (&*group, (number & 1) as u64);
            CallView {
                group,
                counters,
                number,
                rank: group.rank as u32,
                ranks: group.world_size as u32,
                received: *group.mailboxes.get_unchecked(group.rank as usize) + group.slot(parity, 0),
                sent: group.slot(parity, group.rank) as u32,
                // One number in one register, instead of the factors of a product.
                common: arch::opaque(group.slot(parity, group.world_size) as u32),
                slot_bytes: group.slot_packets as u32 * PACKET_BYTES as u32,
            }
        }
    }

    /// The flag of this call's numbers, in the upper half of a word. Cleared packets have an even one.
    #[inline(always)]
    fn flag(self) -> u64 {
        ((self.number << 1 | 1) as u64) << 32
    }

    /// The address of a packet of a writer in this rank's mailbox.
    #[inline(always)]
    fn received(self, writer: usize, index: u32) -> u64 {
        self.received + (writer as u32 * self.slot_bytes + index * PACKET_BYTES as u32) as u64
    }

    /// Writes a packet of [`sendable`] elements into this rank's slot of a peer's mailbox.
    ///
    /// # Safety
    /// `peer` is below the world size, and `index` within a slot.
    #[inline(always)]
    unsafe fn send(self, peer: usize, index: u32, data: Data) {
        // SAFETY: the caller's promise.
        unsafe { self.write(peer, self.sent + index * PACKET_BYTES as u32, data) };
    }

    /// Writes a number beside two flags at an offset in a rank's mailbox.
    ///
    /// # Safety
    /// `reader` is below the world size, and the packet at `offset` is inside its mailbox.
    #[inline(always)]
    unsafe fn write_number(self, reader: usize, offset: u32, number: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.write(reader, offset, [self.flag() | (number & u32::MAX as u64), self.flag() | (number >> 32)]) };
    }

    /// Writes two words at an offset in a rank's mailbox.
    ///
    /// # Safety
    /// `reader` is below the world size, and the packet at `offset` is inside its mailbox.
    #[inline(always)]
    unsafe fn write(self, reader: usize, offset: u32, words: [u64; 2]) {
        // SAFETY: the caller's promise; a check would compile a panic into the kernel.
        unsafe { arch::store_packet(*self.group.mailboxes.get_unchecked(reader) + offset as u64, words) };
    }

    /// The first packet of this thread of the launch.
    #[inline(always)]
    fn first() -> u32 {
        thread::block_idx_x() as u32 * thread::block_dim_x() as u32 + thread::thread_idx_x() as u32
    }

    /// The distance between two packets of a thread.
    #[inline(always)]
    fn stride(blocks: u32) -> u32 {
        blocks * thread::block_dim_x() as u32
    }

    /// Whether a number is the rank of a peer.
    #[inline(always)]
    fn is_peer(self, rank: usize) -> bool {
        rank < self.ranks as usize && rank != self.rank as usize
    }

    /// Writes a packet into this rank's slot of all peers' mailboxes.
    ///
    /// # Safety
    /// There are at most `W` ranks, and `index` is within a slot.
    #[inline(always)]
    unsafe fn send_to_all<const W: usize>(self, index: u32, data: Data) {
        let mut peer = 0;
        while peer < W {
            if self.is_peer(peer) {
                // SAFETY: the caller's promise.
                unsafe { self.send(peer, index, data) };
            }
            peer += 1;
        }
    }

    /// Takes this call's packet of each writer that is `wanted`; the data of others are 0. Unspecified after an abort.
    ///
    /// # Safety
    /// `index` is within a slot, wanted writers are below the world size, and nobody else reads their packets.
    #[inline(always)]
    unsafe fn take<const W: usize>(self, index: u32, wanted: impl Fn(usize) -> bool) -> [Data; W] {
        let address = |writer| wanted(writer).then(|| self.received(writer, index));
        // SAFETY: the caller's promise.
        unsafe {
            let [data] = self.receive::<1, W>(|_, writer| address(writer));
            Self::empty::<W>(address);
            data
        }
    }

    /// Empties the packets at these addresses, where there is one, for the call after the next.
    ///
    /// # Safety
    /// The addresses are of packets in this rank's mailbox, which this call does not read any more.
    #[inline(always)]
    unsafe fn empty<const W: usize>(address: impl Fn(usize) -> Option<u64>) {
        let mut place = 0;
        while place < W {
            if let Some(address) = address(place) {
                // SAFETY: the caller's promise.
                unsafe { arch::store_packet(address, [EMPTY; 2]) };
            }
            place += 1;
        }
    }

    /// Waits for the elements of this call at the addresses of `M` rows, where there is one; the other data are 0. Unspecified after an
    /// abort.
    ///
    /// # Safety
    /// The addresses are of packets of elements in this rank's mailbox, which are not empty again.
    #[inline(always)]
    unsafe fn receive<const M: usize, const W: usize>(
        self,
        address: impl Fn(usize, usize) -> Option<u64>,
    ) -> [[Data; W]; M] {
        // SAFETY: the caller's promise.
        unsafe { self.wait_for(address, |[low, high]| low == EMPTY || high == EMPTY) }
    }

    /// Waits for numbers of this call at the addresses of `M` rows, where there is one; the other numbers are 0. Unspecified after an abort.
    ///
    /// # Safety
    /// The addresses are of packets of numbers in this rank's mailbox.
    #[inline(always)]
    unsafe fn receive_numbers<const M: usize, const W: usize>(
        self,
        address: impl Fn(usize, usize) -> Option<u64>,
    ) -> [[u64; W]; M] {
        const UPPER: u64 = (u32::MAX as u64) << 32;
        let flag = self.flag();
        let is_missing = |[low, high]: [u64; 2]| ((low ^ flag) | (high ^ flag)) & UPPER != 0;
        // SAFETY: the caller's promise.
        let found = unsafe { self.wait_for(address, is_missing) };
        found.map(|row| row.map(|[low, high]| low & u32::MAX as u64 | high << 32))
    }

    /// Waits until no packet is missing at the addresses of `M` rows, where there is one; the other words are 0. Unspecified after an abort.
    ///
    /// # Safety
    /// The addresses are of packets in this rank's mailbox.
    #[inline(always)]
    unsafe fn wait_for<const M: usize, const W: usize>(
        self,
        address: impl Fn(usize, usize) -> Option<u64>,
        is_missing: impl Fn([u64; 2]) -> bool,
    ) -> [[[u64; 2]; W]; M] {
        let mut found = [[[0u64; 2]; W]; M];
        let mut tries = 0u32;
        loop {
            let mut row = 0;
            while row < M {
                let mut place = 0;
                while place < W {
                    if let Some(address) = address(row, place) {
                        // SAFETY: the caller's promise.
                        found[row][place] = unsafe { arch::load_packet(address) };
                    }
                    place += 1;
                }
                row += 1;
            }
            // Checked only now, so that the loads do not wait for each other.
            let mut missing = false;
            row = 0;
            while row < M {
                let mut place = 0;
                while place < W {
                    missing |= address(row, place).is_some() && is_missing(found[row][place]);
                    place += 1;
                }
                row += 1;
            }
            tries = tries.wrapping_add(1);
            // SAFETY: the flag is mapped on this device.
            let is_over = tries % 4096 == 0
                && unsafe { atomic_load_32_system(self.group.abort as *mut u32, Ordering::Relaxed) } != 0;
            if !missing || is_over {
                return found;
            }
        }
    }

    /// Counts the call once every block has ended.
    ///
    /// # Safety
    /// Every thread of all `blocks` blocks calls this at the end of a launch.
    #[inline(always)]
    unsafe fn end(self, blocks: u32) {
        thread::sync_threads();
        // SAFETY: the caller's promise.
        unsafe {
            if thread::thread_idx_x() == 0 {
                let calls = self.counters;
                // A call of one block need not find out which block is the last.
                let is_last =
                    blocks == 1 || atomic_fetch_add_u32_device(calls.add(1), Ordering::Relaxed, 1) + 1 == blocks;
                if is_last {
                    calls.add(1).write(0);
                    calls.write(self.number.wrapping_add(1));
                }
            }
        }
    }
}

/// The elements of a tensor, in units of a packet.
#[derive(Clone, Copy)]
struct Tensor<T> {
    first: *mut T,
    len: u32,
}

impl<T: Element> Tensor<T> {
    const ELEMENTS: usize = PACKET_BYTES / size_of::<T>();

    #[inline(always)]
    fn packets(self) -> u32 {
        self.len.div_ceil(Self::ELEMENTS as u32)
    }

    /// Whether a packet's elements are read and written together.
    #[inline(always)]
    fn is_whole(self, packet: u32) -> bool {
        self.first as usize % PACKET_BYTES == 0 && (packet + 1) * Self::ELEMENTS as u32 <= self.len
    }

    /// The elements of a packet, [`sendable`], so that their own rank computes with the same bits as its peers.
    ///
    /// # Safety
    /// The elements are readable, and `E` is [`ELEMENTS`](Self::ELEMENTS).
    #[inline(always)]
    unsafe fn read<const E: usize>(self, packet: u32) -> Data {
        let begin = packet as usize * E;
        // SAFETY: the caller's promise; elements behind the end are not read.
        unsafe {
            let elements: [T; E] = if self.is_whole(packet) {
                memory::load(self.first.add(begin))
            } else {
                core::array::from_fn(|index| {
                    if ((begin + index) as u32) < self.len {
                        self.first.add(begin + index).read()
                    } else {
                        T::from_f32(0.0)
                    }
                })
            };
            sendable(memory::reinterpret(elements))
        }
    }

    /// # Safety
    /// The elements are writable, and `E` is [`ELEMENTS`](Self::ELEMENTS).
    #[inline(always)]
    unsafe fn write<const E: usize>(self, packet: u32, data: Data) {
        let begin = packet as usize * E;
        // SAFETY: the caller's promise; elements behind the end are not written.
        unsafe {
            let elements: [T; E] = memory::reinterpret(data);
            if self.is_whole(packet) {
                return memory::store(self.first.add(begin), elements);
            }
            let mut index = 0;
            while index < E {
                if ((begin + index) as u32) < self.len {
                    self.first.add(begin + index).write(elements[index]);
                }
                index += 1;
            }
        }
    }
}

/// The sum of the ranks' elements in rank order, each times its weight; [`sendable`].
///
/// # Safety
/// `E` elements have the size of [`Data`].
#[inline(always)]
unsafe fn sum<T: Element, const W: usize, const E: usize>(
    of_ranks: [Data; W],
    weights: [f64; W],
    ranks: usize,
) -> Data {
    // SAFETY: the caller's promise; every bit pattern is an element.
    unsafe {
        let mut totals = [ZERO; E];
        let mut rank = 0;
        while rank < W {
            if rank < ranks {
                // Only here, since all ranks' elements would need more registers than their words.
                let elements: [T; E] = memory::reinterpret(of_ranks[rank].map(arch::forget));
                let mut element = 0;
                while element < E {
                    totals[element] =
                        elementwise::add_weighted(totals[element], weights[rank], elements[element].to_f64());
                    element += 1;
                }
            }
            rank += 1;
        }
        sendable(memory::reinterpret(totals.map(T::from_f64)))
    }
}

/// The ranks' data, with this rank's own at the place that `is_own`.
#[inline(always)]
fn with_own<const W: usize>(of_peers: [Data; W], is_own: impl Fn(usize) -> bool, own: Data) -> [Data; W] {
    core::array::from_fn(|place| if is_own(place) { own } else { of_peers[place] })
}

/// # Safety
/// The launch's contract; `E` elements have the size of [`Data`].
#[inline(always)]
unsafe fn one_shot<T: Element, const W: usize, const E: usize>(
    group: *const Mailboxes,
    destination: Tensor<T>,
    source: Tensor<T>,
    factor: f64,
    blocks: u32,
) {
    // SAFETY: the caller's promise; a thread alone reads and writes the elements of its packets.
    unsafe {
        let call = CallView::of(group);
        let (rank, ranks) = (call.rank as usize, call.ranks as usize);
        let (packets, first, stride) = (source.packets(), CallView::first(), CallView::stride(blocks));
        let mut packet = first;
        while packet < packets {
            call.send_to_all::<W>(packet, source.read::<E>(packet));
            packet += stride;
        }
        packet = first;
        while packet < packets {
            let own = source.read::<E>(packet);
            let all = with_own(call.take::<W>(packet, |writer| call.is_peer(writer)), |writer| writer == rank, own);
            destination.write::<E>(packet, sum::<T, W, E>(all, [factor; W], ranks));
            packet += stride;
        }
        call.end(blocks);
    }
}

/// # Safety
/// The conditions of [`one_shot`].
#[inline(always)]
unsafe fn two_shot<T: Element, const W: usize, const E: usize>(
    group: *const Mailboxes,
    destination: Tensor<T>,
    source: Tensor<T>,
    factor: f64,
    blocks: u32,
) {
    // SAFETY: the caller's promise; a thread alone reads and writes the elements of its packets, which have the same place in all shards.
    unsafe {
        let call = CallView::of(group);
        let (rank, ranks) = (call.rank as usize, call.ranks as usize);
        let (packets, first, stride) = (source.packets(), CallView::first(), CallView::stride(blocks));
        // As above, never 0; and 64-bit divisions take twenty times as long.
        let shard = packets.div_ceil(call.ranks.max(1));
        let results = call.group.slot_packets as u32 / 2;
        let in_shard = |owner: usize, place: u32| owner as u32 * shard + place;
        let is_peers = |owner: usize, place: u32| call.is_peer(owner) && in_shard(owner, place) < packets;
        let mut place = first;
        while place < shard {
            let mut peer = 0;
            while peer < W {
                if is_peers(peer, place) {
                    call.send(peer, place, source.read::<E>(in_shard(peer, place)));
                }
                peer += 1;
            }
            place += stride;
        }
        place = first;
        while place < shard && in_shard(rank, place) < packets {
            let own = source.read::<E>(in_shard(rank, place));
            let all = with_own(call.take::<W>(place, |writer| call.is_peer(writer)), |writer| writer == rank, own);
            let result = sum::<T, W, E>(all, [factor; W], ranks);
            call.send_to_all::<W>(results + place, result);
            destination.write::<E>(in_shard(rank, place), result);
            place += stride;
        }
        place = first;
        while place < shard {
            let all = call.take::<W>(results + place, |owner| is_peers(owner, place));
            let mut owner = 0;
            while owner < W {
                if is_peers(owner, place) {
                    destination.write::<E>(in_shard(owner, place), all[owner]);
                }
                owner += 1;
            }
            place += stride;
        }
        call.end(blocks);
    }
}

macro_rules! of_width {
    ($name:literal $T:ident $width:literal $suffix:literal) => {
        of_width!("one_shot_" one_shot $name $T $width $suffix);
        of_width!("two_shot_" two_shot $name $T $width $suffix);
    };
    ($family:literal $way:ident $name:literal $T:ident $width:literal $suffix:literal) => {
        kernel!([$family $name $suffix], LaunchBounds::PACKETS,
            fn (group: *const Mailboxes, destination: *mut $T, source: *const $T, len: u64, factor: f64, blocks: u64) {
            const E: usize = Tensor::<$T>::ELEMENTS;
            let tensor = |first: *mut $T| Tensor { first, len: len as u32 };
            $way::<$T, $width, E>(group, tensor(destination), tensor(source.cast_mut()), factor, blocks as u32)
        });
    };
}

for_each_dtype_and_width!(of_width);
