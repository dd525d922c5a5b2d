//! How blocks of kernels on different GPUs meet: flags in each other's mailboxes, written with release and read with acquire at the
//! scope of the system.
//!
//! A flag counts up and never down: each run of a group has its own values, so that nothing is ever cleared. Whoever waits also
//! looks at the host's abort flag; after that nobody is waited for, and results mean nothing. Nothing here moves data.

use crate::abi::{Mailbox, Peers};
use crate::{arch, thread};

/// What is met for in a run; the value of a flag is the number of runs before times [`STAGES`], plus this.
#[derive(Clone, Copy)]
pub(crate) struct Stage(pub(crate) u32);

const STAGES: u32 = 8;

impl Stage {
    /// Every rank's input is ready.
    pub(crate) const START: Stage = Stage(1);
    /// Every rank's products have been handed out.
    pub(crate) const PRODUCTS: Stage = Stage(2);
    /// Every rank's sums of the exact path's second level have been handed out; the next levels follow.
    pub(crate) const TREE: Stage = Stage(3);
    /// Every rank's results have been handed out.
    pub(crate) const END: Stage = Stage(STAGES - 1);
}

/// The group as a block sees it.
#[derive(Clone, Copy)]
pub(crate) struct Group<'a> {
    pub(crate) peers: &'a Peers,
    /// Runs completed before this one.
    runs: u32,
}

impl<'a> Group<'a> {
    /// # Safety
    /// `peers` describes a live group.
    #[inline(always)]
    pub(crate) unsafe fn of(peers: *const Peers) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let peers = &*peers;
            Group { peers, runs: arch::load_relaxed(peers.runs) }
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

    #[inline(always)]
    fn value(self, stage: Stage) -> u32 {
        self.runs.wrapping_mul(STAGES).wrapping_add(stage.0)
    }

    /// Tells every rank that this block has come to a stage; all that the block did before is seen by those who wait for it.
    ///
    /// # Safety
    /// Every thread of the block must get here; `row` is one of the mailboxes' rows.
    #[inline(always)]
    pub(crate) unsafe fn signal(self, row: usize, stage: Stage) {
        let peer = thread::thread_idx_x() as usize;
        // SAFETY: the caller's promise; mailboxes of ranks below the world size are mapped.
        unsafe {
            thread::sync_threads();
            if (peer as u64) < self.peers.world_size {
                let flag = Mailbox::flag(row, self.peers.rank as usize) as u64;
                arch::store_release(self.mailbox(peer) + flag, self.value(stage));
            }
        }
    }

    /// Waits until every rank has come to a stage.
    ///
    /// # Safety
    /// As [`signal`](Self::signal).
    #[inline(always)]
    pub(crate) unsafe fn wait(self, row: usize, stage: Stage) {
        let peer = thread::thread_idx_x() as usize;
        // SAFETY: as above.
        unsafe {
            if (peer as u64) < self.peers.world_size {
                let own = self.mailbox(self.peers.rank as usize);
                let flag = own + Mailbox::flag(row, peer) as u64;
                let mut tries = 0u32;
                // Values wrap around after 2^29 runs; the distance tells.
                while (arch::load_acquire(flag).wrapping_sub(self.value(stage)) as i32) < 0 {
                    tries = tries.wrapping_add(1);
                    if tries % 4096 == 0 && arch::load_relaxed(self.peers.abort) != 0 {
                        break;
                    }
                }
            }
            thread::sync_threads();
        }
    }
}
