//! The limit of resident blocks of a launch whose blocks wait for blocks of other ranks.
//!
//! Waiting blocks stay resident on the GPU's multiprocessors. If all residency slots are taken by launches that wait for a launch which gets none,
//! all of them deadlock. A launch of this crate completes on any number of slots, one at least (`gradsync_device`'s `peers.rs`), so it is enough
//! that no launch takes the slots of another: each communicator whose kernels wait gets an equal part of the slots, and launches of one communicator run
//! one after the other. The number of parts is the number of such communicators of this process on the GPU, times the processes that share the GPU. CUDA's
//! cooperative launch checks the same bound for a single launch only, and not for concurrent launches.
//!
//! Kernels of NCCL wait too. Where ranks share a GPU, a quarter of the multiprocessors is left to them, for `NCCL_MAX_NCHANNELS` to stay within.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{CudaError, Device, DeviceAttribute, Queue};

/// The ranks of a communicator on one GPU, together with the ranks of the communicators that it was split from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sharers {
    /// How many ranks there are.
    pub(crate) ranks: usize,
    /// How many processes they are in.
    pub(crate) processes: usize,
}

impl Sharers {
    /// A rank with a GPU of its own.
    pub(crate) const ONE: Self = Self { ranks: 1, processes: 1 };

    /// At least as many as of the communicator that this one was split from: its ranks on the GPU need residency slots too, whichever group
    /// they are in.
    pub(crate) fn and_of_parent(self, parent: Self) -> Self {
        Self { ranks: self.ranks.max(parent.ranks), processes: self.processes.max(parent.processes) }
    }
}

/// A communicator's part of the places on a GPU, for as long as this lives.
#[derive(Debug)]
pub(crate) struct Claim {
    entry: Entry,
    multiprocessors: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    device: u32,
    /// A unique key: the address of the rank's abort flag.
    owner: u64,
    sharers: Sharers,
}

static CLAIMS: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

fn lock() -> MutexGuard<'static, Vec<Entry>> {
    CLAIMS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Claim {
    /// Claims a part of the places on `queue`'s device for the communicator that `owner` stands for; all of its claims are one part.
    pub(crate) fn new(queue: &Queue, owner: u64, sharers: Sharers) -> Result<Self, CudaError> {
        let device = queue.ordinal();
        let multiprocessors = Device::new(device)?.attribute(DeviceAttribute::MultiprocessorCount)?;
        let entry = Entry { device, owner, sharers };
        lock().push(entry);
        Ok(Self { entry, multiprocessors: u64::try_from(multiprocessors).unwrap_or(1) })
    }

    /// The limit of blocks of a launch now, for a kernel with so many resident blocks per multiprocessor.
    pub(crate) fn places(&self, blocks_of_multiprocessor: u64) -> u64 {
        places(
            self.multiprocessors,
            blocks_of_multiprocessor,
            lock().iter().filter(|entry| entry.device == self.entry.device),
        )
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claims = lock();
        let own = claims.iter().position(|entry| *entry == self.entry);
        claims.swap_remove(own.expect("entered in `new`"));
    }
}

fn places<'a>(multiprocessors: u64, blocks: u64, claims: impl Iterator<Item = &'a Entry>) -> u64 {
    let (mut owners, mut processes, mut is_shared) = (Vec::new(), 1, false);
    for Entry { owner, sharers, .. } in claims {
        if !owners.contains(owner) {
            owners.push(*owner);
        }
        processes = processes.max(sharers.processes as u64);
        is_shared |= sharers.ranks > 1;
    }
    let all = if is_shared { multiprocessors - multiprocessors / 4 } else { multiprocessors * blocks };
    (all / (owners.len().max(1) as u64 * processes)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(owner: u64, ranks: usize, processes: usize) -> Entry {
        Entry { device: 0, owner, sharers: Sharers { ranks, processes } }
    }

    #[test]
    fn a_communicator_alone_has_all_places() {
        assert_eq!(places(132, 2, [entry(1, 1, 1)].iter()), 264);
        assert_eq!(places(132, 2, [entry(1, 1, 1), entry(1, 1, 1)].iter()), 264, "two operations of one");
    }

    #[test]
    fn the_launches_of_all_have_places_together() {
        for (ranks, processes) in [(1, 1), (2, 2), (4, 4), (8, 8), (4, 1), (8, 2), (3, 3)] {
            for communicators in 1..20 {
                // Ranks that are threads of one process are communicators of it each.
                let owners = communicators * (ranks / processes) as u64;
                let claims: Vec<Entry> = (0..owners).map(|owner| entry(owner, ranks, processes)).collect();
                let each = places(132, 2, claims.iter());
                let launches = owners * processes as u64;
                assert!(each >= 1);
                assert!(each * launches <= 264 || each == 1, "{each} for each of {launches}");
                assert!(ranks == 1 || each * launches <= 99 || each == 1, "{each} for each of {launches}, and NCCL");
            }
        }
    }

    /// Two GPUs with two processes each, split into groups that have one rank on either GPU: no process knows of its neighbour's claim.
    #[test]
    fn parts_of_a_communicator_leave_places_to_each_other() {
        let (world, part) = (Sharers { ranks: 2, processes: 2 }, Sharers::ONE);
        let claim = |sharers| Entry { device: 0, owner: 1, sharers };
        let of_both = 2 * places(132, 2, [claim(part.and_of_parent(world))].iter());
        assert!(of_both <= 99, "{of_both} places for both");
        assert_eq!(world.and_of_parent(part), world);
    }
}
