//! The limit of resident blocks of a launch whose blocks wait for blocks of other ranks.
//!
//! Waiting blocks stay resident on the GPU's multiprocessors. If all residency slots are taken by launches that wait for a launch which
//! gets none, all of them deadlock. A launch of this crate completes on any number of slots, one at least (`gradsync_device`'s `peers.rs`),
//! so it is enough that no launch takes the slots of another: each communicator whose kernels wait gets a part of the slots, and launches of
//! one communicator run one after the other. The parts are in proportion to the weights of the [`Kernels`] of this process's communicators
//! on the GPU, times the number of processes that share the GPU. CUDA's cooperative launch checks the same bound for a single launch only,
//! and not for concurrent launches.
//!
//! The kernels of Adasum over packets are an exception: their blocks wait for each other, and all must be resident at a time. Their launches
//! have at most a block for every second multiprocessor ([`Claim::most_blocks_that_wait`]), so that the blocks of another library's launch
//! that waits for other ranks, NCCL's above all, find room beside them, wherever the first of both were placed. Such a block may fill a
//! multiprocessor, while the blocks of other kernels spread over all free multiprocessors, and CUDA does not say whether a launch that finds
//! no room keeps later launches of other queues waiting. So beside such a kernel of one communicator, each block of the others counts as a
//! whole multiprocessor.
//!
//! A recorded launch keeps the number of blocks that it was recorded with. So a communicator is refused as long as a graph lives whose
//! blocks would not fit any more beside that communicator's, and a graph that is recorded afterwards has fewer.
//!
//! Where ranks share a GPU, the blocks of ranks that wait must also leave room for the other kernels of a rank that is still on its way to
//! the launch: kernels of any size, and those of NCCL, which wait too. A waiting block can keep such a kernel off its multiprocessor, for
//! example because a multiprocessor changes the size of its shared memory only while it is idle. So a quarter of the multiprocessors is
//! left to them, for `NCCL_MAX_NCHANNELS` to stay within, and each block counts as a whole multiprocessor. The launches of all ranks have
//! the other multiprocessors together. A multiprocessor holds [`PACKET_BLOCKS`] or more blocks of a small kernel. So the launches of small
//! kernels share those multiprocessors as if there were one launch less: the blocks of the smallest launch find room beside the blocks of
//! the others, and no launch waits for another one to end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gradsync_device::abi::PACKET_BLOCKS;

use super::{CudaError, Device, DeviceAttribute, Queue};
use crate::sys::cuda::Status;

/// The ranks of a communicator on one GPU, together with the ranks of the communicators that it was split from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sharers {
    /// The number of ranks.
    pub(crate) ranks: usize,
    /// The number of processes that they are in.
    pub(crate) processes: usize,
}

impl Sharers {
    /// A rank with a GPU of its own.
    pub(crate) const ONE: Self = Self { ranks: 1, processes: 1 };

    /// The larger of both numbers, this communicator's and its parent's: the parent's ranks on the GPU need residency slots too, whichever
    /// group they are in.
    pub(crate) fn and_of_parent(self, parent: Self) -> Self {
        Self { ranks: self.ranks.max(parent.ranks), processes: self.processes.max(parent.processes) }
    }
}

/// The kernels of a claim, whose blocks wait for those of other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernels {
    /// Kernels of small tensors, which every communicator has.
    Small,
    /// Kernels whose blocks also wait for each other.
    Together,
    /// Kernels of whole buffers, whose speed depends on the number of blocks.
    Large,
}

impl Kernels {
    /// The part of the residency slots that they need, relative to the others.
    fn weight(self) -> u64 {
        if self == Self::Large { 4 } else { 1 }
    }
}

/// A communicator's share of the residency slots of a GPU, for as long as this lives.
#[derive(Debug)]
pub(crate) struct Claim {
    entry: ClaimedSlots,
    multiprocessors: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ClaimedSlots {
    device: u32,
    /// A unique key: the address of the rank's abort flag.
    owner: u64,
    kernels: Kernels,
    sharers: Sharers,
}

/// The blocks of a recorded launch, which every launch of its graph has, for as long as this lives.
#[derive(Debug)]
struct RecordedBlocks(RecordedSlots);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RecordedSlots {
    device: u32,
    owner: u64,
    multiprocessors: u64,
    blocks_of_multiprocessor: u64,
    blocks: u64,
}

#[derive(Debug, Default)]
struct Residents {
    claims: Vec<ClaimedSlots>,
    recorded: Vec<RecordedSlots>,
}

static RESIDENTS: Mutex<Residents> = Mutex::new(Residents { claims: Vec::new(), recorded: Vec::new() });

fn lock() -> MutexGuard<'static, Residents> {
    RESIDENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Residents {
    /// The limit of resident blocks of a launch of `owner` on a device.
    fn residency_slots(&self, (device, owner): (u32, u64), multiprocessors: u64, blocks_of_multiprocessor: u64) -> u64 {
        let claims = self.claims.iter().filter(|entry| entry.device == device);
        residency_slots(owner, multiprocessors, blocks_of_multiprocessor, claims)
    }

    /// Refuses a recorded launch that does not fit any more.
    fn check(&self, launch: &RecordedSlots) -> Result<(), CudaError> {
        let RecordedSlots { device, owner, multiprocessors, blocks_of_multiprocessor, blocks } = *launch;
        let slots = self.residency_slots((device, owner), multiprocessors, blocks_of_multiprocessor);
        if blocks <= slots {
            return Ok(());
        }
        Err(CudaError {
            call: format!("a claim of resident blocks of device {device}"),
            code: Status::COOPERATIVE_LAUNCH_TOO_LARGE.0,
            text: format!(
                "a graph was recorded with kernels of {blocks} blocks that wait for other ranks, and {slots} are left to them if another communicator \
                 shares the device; drop the graph, and record it again once all communicators and their operations are made"
            ),
        })
    }

    fn claim(&mut self, entry: ClaimedSlots) -> Result<(), CudaError> {
        self.claims.push(entry);
        let fits = self
            .recorded
            .iter()
            .filter(|launch| launch.device == entry.device)
            .try_for_each(|launch| self.check(launch));
        fits.inspect_err(|_| {
            self.claims.pop();
        })
    }

    fn record(&mut self, launch: RecordedSlots) -> Result<(), CudaError> {
        self.check(&launch)?;
        self.recorded.push(launch);
        Ok(())
    }
}

impl Claim {
    /// Claims a share of the slots on `queue`'s device for the communicator identified by `owner`; all claims of one owner are one share,
    /// of the largest weight.
    ///
    /// # Errors
    /// [`CudaError`] with code 720 where a graph would keep fewer slots than the blocks that it was recorded with.
    pub(crate) fn new(queue: &Queue, owner: u64, kernels: Kernels, sharers: Sharers) -> Result<Self, CudaError> {
        let device = queue.ordinal();
        let multiprocessors = Device::new(device)?.attribute(DeviceAttribute::MultiprocessorCount)?;
        let entry = ClaimedSlots { device, owner, kernels, sharers };
        lock().claim(entry)?;
        Ok(Self { entry, multiprocessors: u64::try_from(multiprocessors).unwrap_or(1) })
    }

    /// The current limit of blocks of a launch, for a kernel with `blocks_of_multiprocessor` resident blocks per multiprocessor.
    pub(crate) fn residency_slots(&self, blocks_of_multiprocessor: u64) -> u64 {
        lock().residency_slots((self.entry.device, self.entry.owner), self.multiprocessors, blocks_of_multiprocessor)
    }

    /// The limit of blocks of any launch whose blocks wait for each other, on `queue`'s device.
    ///
    /// # Errors
    /// [`CudaError`].
    pub(crate) fn most_blocks_that_wait(queue: &Queue) -> Result<u64, CudaError> {
        let multiprocessors = Device::new(queue.ordinal())?.attribute(DeviceAttribute::MultiprocessorCount)?;
        Ok(u64::try_from(multiprocessors / 2).unwrap_or(1).max(1))
    }

    /// Claims slots for a launch of `blocks` blocks, if the queue's work is being recorded, for as long as the graph lives.
    ///
    /// # Errors
    /// The error of [`new`](Self::new), where another communicator has been added since the call of [`residency_slots`](Self::residency_slots).
    pub(crate) fn keep_for_recording(
        &self,
        queue: &Queue,
        blocks_of_multiprocessor: u64,
        blocks: u64,
    ) -> Result<(), CudaError> {
        if !queue.is_capturing()? {
            return Ok(());
        }
        let (ClaimedSlots { device, owner, .. }, multiprocessors) = (self.entry, self.multiprocessors);
        let launch = RecordedSlots { device, owner, multiprocessors, blocks_of_multiprocessor, blocks };
        lock().record(launch)?;
        let recorded = Arc::new(RecordedBlocks(launch));
        queue.keep_for_recording(|| recorded)
    }
}

impl Drop for RecordedBlocks {
    fn drop(&mut self) {
        let recorded = &mut lock().recorded;
        let own = recorded.iter().position(|launch| *launch == self.0);
        recorded.swap_remove(own.expect("entered in `record`"));
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let claims = &mut lock().claims;
        let own = claims.iter().position(|entry| *entry == self.entry);
        claims.swap_remove(own.expect("entered in `new`"));
    }
}

fn residency_slots<'a>(
    of: u64,
    multiprocessors: u64,
    blocks: u64,
    claims: impl Iterator<Item = &'a ClaimedSlots>,
) -> u64 {
    let (mut weights, mut processes) = (BTreeMap::from([(of, 1)]), 1);
    let (mut is_shared, mut is_beside_blocks_together) = (false, false);
    for ClaimedSlots { owner, kernels, sharers, .. } in claims {
        let of_owner = weights.entry(*owner).or_default();
        *of_owner = kernels.weight().max(*of_owner);
        processes = processes.max(sharers.processes as u64);
        is_shared |= sharers.ranks > 1;
        is_beside_blocks_together |= *owner != of && *kernels == Kernels::Together;
    }
    let (own, all) = (weights[&of], weights.values().sum::<u64>() * processes);
    let least = weights.into_values().min().unwrap_or(own);
    if !is_shared {
        let blocks = if is_beside_blocks_together { 1 } else { blocks };
        return (multiprocessors * blocks * own / all).max(1);
    }
    let waiting = if blocks < PACKET_BLOCKS.into() { all } else { (all - least).max(own) };
    ((multiprocessors - multiprocessors / 4) * own / waiting).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(owner: u64, ranks: usize, processes: usize) -> ClaimedSlots {
        ClaimedSlots { device: 0, owner, kernels: Kernels::Large, sharers: Sharers { ranks, processes } }
    }

    #[test]
    fn residency_slots_are_all_of_a_communicator_alone() {
        assert_eq!(residency_slots(1, 132, 2, [entry(1, 1, 1)].iter()), 264);
        assert_eq!(residency_slots(1, 132, 2, [entry(1, 1, 1), entry(1, 1, 1)].iter()), 264, "two operations of one");
    }

    #[test]
    fn residency_slots_of_small_tensors_leave_most_to_others() {
        let small = |owner| ClaimedSlots { kernels: Kernels::Small, ..entry(owner, 1, 1) };
        let claims = [entry(1, 1, 1), small(1), small(2)];
        assert_eq!([1, 2].map(|owner| residency_slots(owner, 132, 2, claims.iter())), [211, 52]);
        assert_eq!([2, 3].map(|owner| residency_slots(owner, 132, 2, [small(2), small(3)].iter())), [132, 132]);
        for (ranks, processes) in [(2, 2), (4, 4), (8, 8)] {
            let shared = claims.map(|claim| ClaimedSlots { sharers: Sharers { ranks, processes }, ..claim });
            let of = |owner| residency_slots(owner, 132, PACKET_BLOCKS.into(), shared.iter());
            let all = (of(1) + of(2)) * processes as u64;
            assert!(all - of(2) <= 99 && all - of(1) <= 99, "{} and {} slots of {ranks} ranks", of(1), of(2));
        }
    }

    #[test]
    fn residency_slots_give_waiting_blocks_own_multiprocessors() {
        let of = |owner, kernels| ClaimedSlots { kernels, ..entry(owner, 1, 1) };
        for others in
            [[Kernels::Small, Kernels::Small], [Kernels::Small, Kernels::Large], [Kernels::Together, Kernels::Large]]
        {
            let claims = [of(1, Kernels::Together), of(2, others[0]), of(3, others[1])];
            let beside: u64 =
                [2, 3].map(|owner| residency_slots(owner, 132, PACKET_BLOCKS.into(), claims.iter())).into_iter().sum();
            let own = residency_slots(1, 132, 1, claims.iter());
            assert!(own >= 22 && own + beside <= 132, "{own} multiprocessors beside {beside} blocks of {others:?}");
            assert!(beside >= 88, "{beside} blocks of {others:?}");
        }
        // A communicator's own launches run one after the other.
        let claims = [of(1, Kernels::Together), of(1, Kernels::Small), of(2, Kernels::Small)];
        assert_eq!([1, 2].map(|owner| residency_slots(owner, 132, 2, claims.iter())), [132, 66]);
    }

    #[test]
    fn residency_slots_suffice_for_the_launches_of_all_together() {
        for (ranks, processes) in [(1, 1), (2, 2), (4, 4), (8, 8), (4, 1), (8, 2), (3, 3)] {
            for communicators in 1..20 {
                // Each rank that is a thread of one process has a communicator of its own.
                let owners = communicators * (ranks / processes) as u64;
                let claims: Vec<ClaimedSlots> = (0..owners).map(|owner| entry(owner, ranks, processes)).collect();
                let each = residency_slots(0, 132, 2, claims.iter());
                let launches = owners * processes as u64;
                assert!(each >= 1);
                assert!(each * launches <= 264 || each == 1, "{each} for each of {launches}");
                assert!(ranks == 1 || each * launches <= 99 || each == 1, "{each} for each of {launches}, and NCCL");
                // Small blocks fit on the multiprocessors that large ones of the other communicators leave.
                let small = residency_slots(0, 132, PACKET_BLOCKS.into(), claims.iter()) * processes as u64;
                let large = each * (launches - processes as u64);
                let room = if ranks == 1 { 132 - large / 2 } else { 99 - large.min(99) } * u64::from(PACKET_BLOCKS);
                assert!(small <= room || each == 1, "{small} small blocks beside {large} large ones of {launches}");
                // Small blocks of all launches but one leave multiprocessors free, also beside large blocks; all together find room.
                let small = residency_slots(0, 132, PACKET_BLOCKS.into(), claims.iter());
                if ranks == 1 {
                    assert!(small * launches <= 132 * u64::from(PACKET_BLOCKS), "{small} for each of {launches}");
                } else {
                    assert!(each <= small && (small * (launches - 1) <= 99 || small == 1), "{small} of {launches}");
                    assert!(small * launches <= 132 * u64::from(PACKET_BLOCKS), "{small} for each of {launches}");
                }
            }
        }
    }

    #[test]
    fn claim_is_refused_while_a_graph_needs_the_slots() {
        let recorded = |device, blocks| RecordedSlots {
            device,
            owner: 1,
            multiprocessors: 132,
            blocks_of_multiprocessor: 2,
            blocks,
        };
        let mut residents = Residents::default();
        residents.claim(entry(1, 1, 1)).unwrap();
        residents.record(recorded(0, 264)).unwrap();
        residents.claim(entry(1, 1, 1)).expect("another operation of the same communicator");
        let error = residents.claim(entry(2, 1, 1)).unwrap_err();
        assert_eq!(error.code, 720);
        for part in ["device 0", "264 blocks", "132 are left", "record it again"] {
            assert!(error.to_string().contains(part), "{part}: {error}");
        }
        assert_eq!(residents.claims.len(), 2, "what is refused takes no slot");
        residents.claim(entry(1, 2, 2)).expect_err("another process shares the GPU");
        residents.claim(ClaimedSlots { device: 1, ..entry(2, 1, 1) }).expect("another device");
        // Once the graph is gone, both fit, and a graph that is recorded then has its share.
        residents.recorded.clear();
        residents.claim(entry(2, 1, 1)).unwrap();
        residents.record(recorded(0, 264)).expect_err("another communicator came in between");
        residents.record(recorded(0, 132)).unwrap();
        residents.record(recorded(0, 20)).unwrap();
        assert!(residents.claim(entry(3, 1, 1)).is_err());
        residents.recorded.remove(0);
        residents.claim(entry(3, 1, 1)).expect("few blocks leave room");
        assert_eq!(residents.residency_slots((0, 1), 132, 2), 88);
    }

    /// Two GPUs with two processes each, split into groups with one rank on either GPU: no process knows of its neighbour's claim.
    #[test]
    fn residency_slots_are_shared_among_parts_of_a_communicator() {
        let (world, part) = (Sharers { ranks: 2, processes: 2 }, Sharers::ONE);
        let claim = |sharers| ClaimedSlots { sharers, ..entry(1, 1, 1) };
        let of_both = 2 * residency_slots(1, 132, 2, [claim(part.and_of_parent(world))].iter());
        assert!(of_both <= 99, "{of_both} slots for both");
        assert_eq!(world.and_of_parent(part), world);
    }
}
