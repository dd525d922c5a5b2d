//! Synchronisation of blocks, on one GPU and on several: flags in each other's mailboxes, written with release and read with acquire.
//!
//! A flag only counts up: each run of a group has its own values, so that flags are never cleared. A waiting thread also checks the host's
//! abort flag; once that is set, no thread waits for a peer, and results are unspecified.
//!
//! A launch has its kinds of jobs in order: sending jobs, jobs that multiply, jobs that compute weights, and jobs that write. A job waits only for earlier kinds, on any rank, or for the job with its own number on other ranks. Blocks draw the numbers
//! of jobs from a counter ([`GroupView::draw`]), so that every job before a waiting one has a block that runs it: a launch completes with any
//! number of blocks, at least one on each rank, in any order in which the device makes them resident. Besides flags, ranks send tiles,
//! whose contents this file ignores.

use core::sync::atomic::Ordering;

use crate::abi::{MOST_PEERS, PEER_THREADS, Peers, Row, VECTOR_BYTES};
use crate::dialect::atomic::{atomic_fetch_add_u32_device, atomic_load_32_system, atomic_store_32_system};
use crate::{arch, memory, shared, thread};

/// A point of synchronisation in a run; the value of a flag is the number of earlier runs times [`STAGES`], plus this.
#[derive(Clone, Copy)]
pub(crate) struct Stage(pub(crate) u32);

const STAGES: u32 = 8;

const _: () = {
    // There are as many stages as levels of a tree of the largest number of ranks.
    let levels = MOST_PEERS.ilog2();
    assert!(Stage::PRODUCTS.0 + levels <= Stage::END.0);
};

impl Stage {
    /// A tile has arrived.
    pub(crate) const ARRIVED: Stage = Stage(1);
    /// Every rank's products have been sent.
    const PRODUCTS: Stage = Stage(2);
    /// Every rank's results have been sent.
    pub(crate) const END: Stage = Stage(STAGES - 1);

    /// Every rank's sums of a level of the exact path have been sent; the stage of level 0 stands for all products.
    #[inline(always)]
    pub(crate) const fn of_level(level: usize) -> Self {
        Stage(Stage::PRODUCTS.0 + level as u32)
    }
}

/// The events that the blocks of one rank count for each other.
#[derive(Clone, Copy)]
pub(crate) enum Progress {
    /// The number of chunks that have been multiplied.
    Multiplied = 0,
    /// The number of times that weights have been computed.
    Weights = 1,
}

/// The group from the view of a block.
#[derive(Clone, Copy)]
pub(crate) struct GroupView<'a> {
    pub(crate) peers: &'a Peers,
    /// Runs completed before this one.
    runs: u32,
}

impl<'a> GroupView<'a> {
    /// # Safety
    /// `peers` describes a live group.
    #[inline(always)]
    pub(crate) unsafe fn of(peers: *const Peers) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let peers = &*peers;
            GroupView { peers, runs: atomic_load_32_system(peers.runs as *mut u32, Ordering::Relaxed) }
        }
    }

    /// The mailbox of a rank.
    ///
    /// # Safety
    /// `rank` is below the world size.
    #[inline(always)]
    pub(crate) unsafe fn mailbox(self, rank: usize) -> u64 {
        // SAFETY: the caller's promise; a check would compile a panic into the kernel.
        unsafe { *self.peers.mailboxes.get_unchecked(rank) }
    }

    /// The address of the flag in the mailbox of `reader` that `writer` counts up.
    ///
    /// # Safety
    /// Both are below the world size; `row` is one of the mailboxes' rows.
    #[inline(always)]
    unsafe fn flag(self, reader: usize, row: Row, writer: usize) -> *mut u32 {
        // SAFETY: the caller's promise.
        unsafe { (self.mailbox(reader) + self.peers.flag(row, writer) as u64) as *mut u32 }
    }

    #[inline(always)]
    fn value(self, stage: Stage) -> u32 {
        self.runs.wrapping_mul(STAGES).wrapping_add(stage.0)
    }

    /// Waits, in the calling thread alone, until a flag has reached a value.
    ///
    /// # Safety
    /// `flag` is the address of a flag.
    #[inline(always)]
    unsafe fn reach(self, flag: *mut u32, value: u32) {
        let mut tries = 0u32;
        // SAFETY: the caller's promise. Values wrap around, stages after 2^29 runs; the comparison uses the distance.
        unsafe {
            while (atomic_load_32_system(flag, Ordering::Acquire).wrapping_sub(value) as i32) < 0 {
                tries = tries.wrapping_add(1);
                if tries % 4096 == 0 && atomic_load_32_system(self.peers.abort as *mut u32, Ordering::Relaxed) != 0 {
                    break;
                }
            }
        }
    }

    /// Signals every rank that this block has reached a stage; all earlier writes of the block are visible to threads that wait for it.
    ///
    /// # Safety
    /// Every thread of the block must call this; `row` is one of the mailboxes' rows.
    #[inline(always)]
    pub(crate) unsafe fn signal(self, row: Row, stage: Stage) {
        let peer = thread::thread_idx_x() as usize;
        // SAFETY: the caller's promise; mailboxes of ranks below the world size are mapped.
        unsafe {
            thread::sync_threads();
            if (peer as u64) < self.peers.world_size {
                let flag = self.flag(peer, row, self.peers.rank as usize);
                atomic_store_32_system(flag, Ordering::Release, self.value(stage));
            }
        }
    }

    /// Waits until every rank has reached a stage.
    ///
    /// # Safety
    /// The conditions of [`signal`](Self::signal).
    #[inline(always)]
    pub(crate) unsafe fn wait(self, row: Row, stage: Stage) {
        let peer = thread::thread_idx_x() as usize;
        // SAFETY: as above.
        unsafe {
            if (peer as u64) < self.peers.world_size {
                self.reach(self.flag(self.peers.rank as usize, row, peer), self.value(stage));
            }
            thread::sync_threads();
        }
    }

    /// The same group, for another job. Registers are short, so values that are not needed at once should not be kept from job to job.
    #[inline(always)]
    pub(crate) fn again(self) -> Self {
        // SAFETY: the same reference.
        let peers = unsafe { &*(arch::forget(self.peers as *const Peers as u64) as *const Peers) };
        GroupView { peers, runs: arch::forget(self.runs as u64) as u32 }
    }

    /// The number of the next job of a launch that has `jobs` of them, for the whole block; `None` if all have been drawn.
    ///
    /// # Safety
    /// Every thread of the block must call this.
    #[inline(always)]
    pub(crate) unsafe fn draw(self, jobs: u64) -> Option<u64> {
        let drawn = shared::ticket();
        // SAFETY: the caller's promise. The first barrier lets all threads read the preceding ticket, the second this one.
        unsafe {
            thread::sync_threads();
            if thread::thread_idx_x() == 0 {
                drawn.write(0, atomic_fetch_add_u32_device((self.peers.runs + 4) as *mut u32, Ordering::Relaxed, 1));
            }
            thread::sync_threads();
            let ticket = drawn.read(0) as u64;
            (ticket < jobs).then_some(ticket)
        }
    }

    /// Sends, if the job is one of the first `senders`; returns the numbers of other jobs, counted behind those.
    ///
    /// # Safety
    /// The conditions of [`send`](Self::send).
    #[inline(always)]
    pub(crate) unsafe fn send_or(self, job: u64, senders: u64) -> Option<u64> {
        if job >= senders {
            return Some(job - senders);
        }
        // SAFETY: the caller's promise; the whole block takes this branch.
        unsafe { self.send(job, senders) };
        None
    }

    /// Sends every peer its shard of this rank's arena; the sending blocks take turns tile by tile, and this is number `sender` of them.
    /// It does not wait: in the preceding run the peers have finished reading the memory to which this writes.
    ///
    /// # Safety
    /// Every thread of the block must call this; sources and slots are of whole shards, at multiples of 16 bytes.
    #[inline(always)]
    unsafe fn send(self, sender: u64, senders: u64) {
        const STRIDE: u64 = PEER_THREADS as u64 * VECTOR_BYTES as u64;
        /// The number of vectors in flight.
        const STEPS: usize = 4;
        type Vector = [u32; 4];
        let peers = self.peers;
        // Never less than 1, which the compiler does not know: a check of divisions would compile a panic into the kernel. 64-bit divisions
        // take twenty times as long as these; tiles times peers reach 2^32 only at 36 TiB per shard.
        let others = (peers.world_size as u32 - 1).max(1);
        let units = peers.tiles() as u32 * others;
        let mut unit = sender as u32;
        while unit < units {
            // Every rank begins with a different peer.
            let (tile, mut peer) = ((unit / others) as u64, peers.rank + 1 + (unit % others) as u64);
            if peer >= peers.world_size {
                peer -= peers.world_size;
            }
            let (begin, end) = peers.tile(tile);
            let mut at = begin + thread::thread_idx_x() as u64 * VECTOR_BYTES as u64;
            // SAFETY: the caller's promise; a peer's number is below the world size, and the tile lies within the shard.
            unsafe {
                let source = *peers.sources.get_unchecked(peer as usize);
                let slot = *peers.slots.get_unchecked(peer as usize);
                let load = |at: u64| -> Vector { memory::load((source + at) as *const u32) };
                let store = |at: u64, vector: Vector| memory::store((slot + at) as *mut u32, vector);
                while at + (STEPS as u64 - 1) * STRIDE < end {
                    let vectors: [Vector; STEPS] = core::array::from_fn(|step| load(at + step as u64 * STRIDE));
                    let mut step = 0;
                    while step < STEPS {
                        store(at + step as u64 * STRIDE, vectors[step]);
                        step += 1;
                    }
                    at += STEPS as u64 * STRIDE;
                }
                while at < end {
                    store(at, load(at));
                    at += STRIDE;
                }
                thread::sync_threads();
                if thread::thread_idx_x() == 0 {
                    let flag = self.flag(peer as usize, Row::Tile(tile as usize), peers.rank as usize);
                    atomic_store_32_system(flag, Ordering::Release, self.value(Stage::ARRIVED));
                }
            }
            unit += senders as u32;
        }
    }

    /// Waits until the peers' tiles with the bytes from `begin` to `end` of this rank's shard have arrived.
    ///
    /// # Safety
    /// Every thread of the block must call this; the range is not empty and lies within the shard.
    #[inline(always)]
    pub(crate) unsafe fn receive(self, begin: u64, end: u64) {
        const PEERS: u32 = MOST_PEERS as u32;
        // Derived from the thread's number again in each job, since registers are short.
        let (peers, thread) = (self.peers, arch::forget(thread::thread_idx_x() as u64) as u32);
        let peer = (thread % PEERS) as u64;
        let mut tile = (begin >> peers.tile_shift) + (thread / PEERS) as u64;
        // SAFETY: the caller's promise.
        unsafe {
            while tile <= (end - 1) >> peers.tile_shift {
                if peer < peers.world_size && peer != peers.rank {
                    let flag = self.flag(peers.rank as usize, Row::Tile(tile as usize), peer as usize);
                    self.reach(flag, self.value(Stage::ARRIVED));
                }
                tile += (PEER_THREADS / PEERS) as u64;
            }
            thread::sync_threads();
        }
    }

    /// Counts for this rank's other blocks; all earlier writes of the block are visible to threads that wait for the count.
    ///
    /// # Safety
    /// Every thread of the block must call this; `team` is one of the mailboxes' rows.
    #[inline(always)]
    pub(crate) unsafe fn count(self, team: usize, what: Progress) {
        // SAFETY: the caller's promise.
        unsafe {
            thread::sync_threads();
            if thread::thread_idx_x() == 0 {
                arch::count_release(self.flag(self.peers.rank as usize, Row::Progress(team), what as usize));
            }
        }
    }

    /// Counts a block's chunks of a layer as multiplied. For a divided layer, their sums are in the mailboxes of all ranks, which another
    /// block of this rank will signal.
    ///
    /// # Safety
    /// The conditions of [`count`](Self::count).
    #[inline(always)]
    pub(crate) unsafe fn count_multiplied(self, team: usize, is_divided: bool) {
        // SAFETY: the caller's promise; the branch is the same for the whole block.
        unsafe {
            if is_divided {
                thread::sync_threads();
                if thread::thread_idx_x() == 0 {
                    arch::fence_system();
                }
            }
            self.count(team, Progress::Multiplied);
        }
    }

    /// Waits until this rank's other blocks have counted `count` of the `each_run` events that they count in every run.
    ///
    /// # Safety
    /// The conditions of [`count`](Self::count).
    #[inline(always)]
    pub(crate) unsafe fn wait_for_count(self, team: usize, what: Progress, count: u32, each_run: u32) {
        // SAFETY: the caller's promise.
        unsafe {
            if thread::thread_idx_x() == 0 {
                let flag = self.flag(self.peers.rank as usize, Row::Progress(team), what as usize);
                self.reach(flag, self.runs.wrapping_mul(each_run).wrapping_add(count));
            }
            thread::sync_threads();
        }
    }
}
