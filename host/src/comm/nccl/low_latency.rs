//! [`LowLatency`]: sums of small tensors by one launch of this crate's kernels, instead of NCCL's.
//!
//! It chooses the sums and the number of shots. `comm::packets` maps the mailboxes, and `kernels::cuda` launches the kernels.

use std::sync::Arc;

use super::primitive::RawSlice;
use super::{NcclCommunicator, peer_memory};
use crate::comm::{PacketConnection, Ranks, ReduceOp, Scaling};
use crate::driver::{DeviceSlice, Kernels, Queue};
use crate::error::{Call, Result};
use crate::kernels::cuda::{MailboxSize, PacketLimits, Shots, sum_entries};
use crate::memory::PeerMemory;

/// The sizes up to which the kernels were faster than NCCL, and one shot faster than two. Measured in graphs, on two and four H100 with
/// NVLink, and for more ranks on one H100 that they share. GPUs of other generations, by the major number of their compute capability, get the
/// sizes that were faster by far.
pub(super) fn measured_limits(generation: i32, world_size: usize) -> PacketLimits {
    const HOPPER: i32 = 9;
    let one_shot_bytes = match world_size {
        2 => 2 << 20,
        3 | 4 => 256 << 10,
        _ => 128 << 10,
    };
    PacketLimits { most_bytes: if generation == HOPPER { 8 << 20 } else { 256 << 10 }, one_shot_bytes }
}

/// The mailboxes of a communicator whose kernels access the memory of all ranks.
#[derive(Debug)]
pub(super) struct LowLatency {
    packets: Arc<PacketConnection>,
    limits: PacketLimits,
    world_size: usize,
}

impl LowLatency {
    /// Maps the mailboxes; every rank must call it. `None`, on every rank, if the kernels cannot access the memory of all ranks, if memory
    /// for mailboxes does not suffice on one of them, or if a recorded graph of another communicator needs the residency slots.
    pub(super) fn connect(comm: &NcclCommunicator, limits: PacketLimits) -> Result<Option<Self>> {
        // On several machines no memory is shared, and none need be allocated to find that out.
        if limits.most_bytes == 0 || !comm.session.neighbours.on_one_host {
            return Ok(None);
        }
        let agree = |outcome: Result<()>| {
            if let Err(error) = &outcome {
                tracing::warn!(rank = comm.rank(), %error, "small sums are left to NCCL");
            }
            let all = peer_memory::exchange(&comm.session, &[u8::from(outcome.is_ok())])?;
            Ok(all.iter().all(|answer| answer[..] == [1]))
        };
        let ranks @ (_, world_size) = (comm.rank(), comm.world_size());
        let size = MailboxSize::for_sums(limits.most_bytes, world_size);
        let kernels = (Kernels::Small, &sum_entries(world_size)[..]);
        let packets = PacketConnection::new(ranks, comm, &comm.session.device, size, kernels, &agree)?;
        Ok(packets.map(|packets| {
            let one_shot_bytes = limits.one_shot_bytes.min(packets.group.most_bytes(Shots::One));
            Self { packets: Arc::new(packets), limits: PacketLimits { one_shot_bytes, ..limits }, world_size }
        }))
    }

    pub(super) fn most_bytes(&self) -> usize {
        self.limits.most_bytes
    }

    /// The factor of all elements, and the number of shots, of an all-reduce that the kernels compute. Its arguments decide, which are
    /// equal on all ranks.
    pub(super) fn takes(&self, data: RawSlice, op: ReduceOp, scaling: Scaling) -> Option<(f64, Shots)> {
        if !data.dtype.is_float() {
            return None;
        }
        let factor = match op {
            ReduceOp::Sum => scaling.before * scaling.after,
            ReduceOp::Mean => scaling.before * scaling.after / self.world_size as f64,
            ReduceOp::Max | ReduceOp::Min => return None,
        };
        // Factors whose product overflows or underflows have to be applied one by one.
        let shots = self.limits.shots(data.len * data.dtype.size_bytes()).filter(|_| factor.is_normal())?;
        Some((factor, shots))
    }
}

impl NcclCommunicator {
    /// An all-reduce by this crate's kernels; `None` for one that is left to NCCL.
    ///
    /// # Safety
    /// The conditions of [`all_reduce_raw`](Self::all_reduce_raw).
    pub(super) unsafe fn all_reduce_small(
        &self,
        queue: &Queue,
        call: Call,
        (input, output): (RawSlice, u64),
        op: ReduceOp,
        scaling: Scaling,
    ) -> Option<Result<()>> {
        let low_latency = self.low_latency.as_ref()?;
        let (factor, shots) = low_latency.takes(input, op, scaling)?;
        let packets = &low_latency.packets;
        // SAFETY: the caller's promise.
        let source = unsafe { DeviceSlice::from_raw_parts(queue, input.address, input.dtype, input.len) };
        let _held = queue.hold();
        let kept = self.recorded(queue).and_then(|_| packets.keep_for_recording(queue));
        Some(kept.and_then(|()| {
            self.run_kernels(call, queue, &mut || {
                // SAFETY: the caller's promise. The source is not empty, and has at most the size for which the mailboxes were made;
                // launches of a communicator follow each other. Ranks' calls may differ, because they are compared later or not at all:
                // kernels write within mailboxes that hold any small tensor, and wait until the communicator is ended.
                unsafe { packets.group.sum(output, source, factor, shots) }
            })
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_limits_follow_the_slowest_gpu_and_the_world_size() {
        let [hopper, older] = [9, 8].map(|generation| measured_limits(generation, 2));
        assert_eq!((hopper.most_bytes, older.most_bytes), (8 << 20, 256 << 10));
        assert_eq!((hopper.min(older), older.min(hopper)), (older, older));
        assert!((2..=8).map(|ranks| measured_limits(9, ranks).one_shot_bytes).is_sorted_by(|a, b| a >= b));
    }
}
