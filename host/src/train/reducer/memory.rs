//! [`ReducerMemory`]: the functions of a memory that a reducer needs besides kernels: buckets, and the order of work in two queues.

use std::convert::Infallible;
use std::fmt::Debug;
use std::time::Instant;

use super::OPERATION;
use super::options::BucketMemory;
use crate::buffer::GradientBuffer;
use crate::call_comparison::gather;
use crate::comm::{Communicator, ReduceOp};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::cpu;
use crate::memory::Host;
use crate::ops::AdasumMemory;
use crate::slice::{Slice, SliceMut};

/// The work that a moment is the end of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    Gradients,
    Reductions,
}

/// A kind of memory for gradients of a [`Reducer`](super::Reducer): [`Host`] and `Cuda`.
#[allow(missing_docs)] // for this module alone
pub trait ReducerMemory: AdasumMemory {
    /// The queues in which gradients are computed and reduced.
    type Lanes: Debug;
    /// A point in time of a lane.
    type Moment: Debug;
    /// Whether the host waits for each reduction.
    const HOST_WAITS: bool;
    /// The check of a bucket for NaN and infinities, where the host does not wait for its gradients.
    type Check: Debug;
    /// A reduction in rank order, prepared for one bucket.
    type Ordered<'c>: Debug;

    /// Allocates a buffer of zeros, in the lane of reductions: a bucket, which `is_reduced`, or sums that only this rank uses.
    fn bucket<'n>(
        lanes: &Self::Lanes,
        dtype: DType,
        world_size: usize,
        tensors: &mut dyn Iterator<Item = (&'n str, &'n [usize])>,
        is_reduced: bool,
    ) -> Result<GradientBuffer<Self>>;

    /// Agrees with all ranks on the memory of new buckets, which must be of one kind: moves this rank's buckets to memory of its own if
    /// another rank's are not shared. All ranks must call it.
    fn agree_on_memory(
        comm: &dyn Communicator<Self>,
        lanes: &mut Self::Lanes,
        buckets: &mut dyn Iterator<Item = &mut GradientBuffer<Self>>,
    ) -> Result<()>;

    /// The elements of a bucket, ordered in the lane that computes gradients.
    fn arena<'a>(lanes: &'a Self::Lanes, bucket: &'a GradientBuffer<Self>) -> Self::Slice<'a>;

    /// The elements of a bucket, to write, ordered in the lane that computes gradients.
    fn arena_mut<'a>(lanes: &'a Self::Lanes, bucket: &'a mut GradientBuffer<Self>) -> Self::SliceMut<'a>;

    /// Makes later reductions wait for all work that computes gradients now.
    fn fork(lanes: &Self::Lanes) -> Result<()>;

    /// Makes later work on gradients wait for the reductions so far.
    fn join(lanes: &Self::Lanes) -> Result<()>;

    /// The moment at which the present work of a lane has ended.
    fn moment(lanes: &Self::Lanes, lane: Lane) -> Result<Self::Moment>;

    /// The seconds from one moment to another; on a GPU it waits for both.
    fn seconds(from: &Self::Moment, to: &Self::Moment) -> Result<f64>;

    /// Copies sources into an arena, like `pack`; returns the first source that is not finite there. On a GPU it returns none: nothing waits
    /// for the copies.
    fn pack_checked(arena: Self::SliceMut<'_>, offsets: &[usize], sources: &[Self::Slice<'_>])
    -> Result<Option<usize>>;

    /// Prepares the check of a bucket, if gradients are not checked where they are copied.
    fn check_of(lanes: &Self::Lanes, bucket: &GradientBuffer<Self>) -> Result<Option<Self::Check>>;

    /// Begins to check a bucket in the step of this number, in the lane of reductions.
    fn begin_check(
        check: &mut Self::Check,
        lanes: &Self::Lanes,
        bucket: &GradientBuffer<Self>,
        step: u64,
    ) -> Result<()>;

    /// The step and the tensor of the first gradient found since the last call; with `waits`, all checks are over then.
    fn end_check(check: &mut Self::Check, lanes: &Self::Lanes, waits: bool) -> Result<Option<(u64, usize)>>;

    /// Prepares a reduction of a bucket in rank order, where the transport's own reductions are in another order. All ranks must call it.
    fn ordered<'c>(
        comm: &'c dyn Communicator<Self>,
        bucket: &GradientBuffer<Self>,
        op: ReduceOp,
    ) -> Result<Option<Self::Ordered<'c>>>;

    /// Replaces every rank's bucket by its reduction in rank order; a mean has these weights of the ranks, if there are any.
    fn reduce_ordered(
        ordered: &mut Self::Ordered<'_>,
        bucket: &mut GradientBuffer<Self>,
        weights: &[f64],
    ) -> Result<()>;
}

/// The memory of buckets; the host needs no ordering of queues.
#[derive(Debug)]
pub struct HostLanes {
    /// The option, which is equal on all ranks.
    wanted: BucketMemory,
    /// Whether this rank shares the buckets that it allocates.
    is_shared: bool,
}

impl HostLanes {
    pub(super) fn new(comm: &dyn Communicator, wanted: BucketMemory) -> Result<Self> {
        let sharing = comm.sharing();
        if wanted == BucketMemory::Shared && comm.world_size() > 1 && sharing.is_none() {
            let reason = "`shared_memory` is `Shared`, and these ranks share no memory: they are not all processes of one machine that can \
                          open each other's memory, or use messages only"
                .into();
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        let needs_shared = sharing.is_some_and(|ranks| ranks.needs_shared_buffers());
        Ok(Self { wanted, is_shared: needs_shared && wanted != BucketMemory::Own })
    }

    pub(super) fn is_shared(&self) -> bool {
        self.is_shared
    }
}

impl ReducerMemory for Host {
    type Lanes = HostLanes;
    type Moment = Instant;
    type Check = Infallible;
    type Ordered<'c> = Infallible;
    const HOST_WAITS: bool = true;

    fn bucket<'n>(
        lanes: &HostLanes,
        dtype: DType,
        world_size: usize,
        tensors: &mut dyn Iterator<Item = (&'n str, &'n [usize])>,
        is_reduced: bool,
    ) -> Result<GradientBuffer> {
        if !(is_reduced && lanes.is_shared) {
            return GradientBuffer::new(dtype, world_size, tensors);
        }
        let tensors: Vec<_> = tensors.collect();
        match GradientBuffer::new_shared(dtype, world_size, tensors.iter().copied()) {
            Err(error @ Error::MemoryFile { .. }) if lanes.wanted == BucketMemory::Automatic => {
                tracing::info!(%error, "no rank shares its buckets");
                GradientBuffer::new(dtype, world_size, tensors)
            }
            outcome => outcome,
        }
    }

    fn agree_on_memory(
        comm: &dyn Communicator,
        lanes: &mut HostLanes,
        buckets: &mut dyn Iterator<Item = &mut GradientBuffer>,
    ) -> Result<()> {
        if lanes.wanted != BucketMemory::Automatic {
            return Ok(());
        }
        let buckets: Vec<_> = buckets.collect();
        let is_shared = lanes.is_shared && buckets.iter().all(|bucket| bucket.is_shared());
        lanes.is_shared = !gather(comm, &[is_shared.into()])?.contains(&0);
        if lanes.is_shared { Ok(()) } else { buckets.into_iter().try_for_each(GradientBuffer::unshare) }
    }

    fn arena<'a>(_: &'a HostLanes, bucket: &'a GradientBuffer) -> Slice<'a> {
        bucket.as_slice()
    }

    fn arena_mut<'a>(_: &'a HostLanes, bucket: &'a mut GradientBuffer) -> SliceMut<'a> {
        bucket.as_mut_slice()
    }

    fn fork(_: &HostLanes) -> Result<()> {
        Ok(())
    }

    fn join(_: &HostLanes) -> Result<()> {
        Ok(())
    }

    fn moment(_: &HostLanes, _: Lane) -> Result<Instant> {
        Ok(Instant::now())
    }

    fn seconds(from: &Instant, to: &Instant) -> Result<f64> {
        Ok(to.duration_since(*from).as_secs_f64())
    }

    fn pack_checked(arena: SliceMut<'_>, offsets: &[usize], sources: &[Slice<'_>]) -> Result<Option<usize>> {
        cpu::pack_checked(arena, offsets, sources)
    }

    fn check_of(_: &HostLanes, _: &GradientBuffer) -> Result<Option<Infallible>> {
        Ok(None)
    }

    fn begin_check(check: &mut Infallible, _: &HostLanes, _: &GradientBuffer, _: u64) -> Result<()> {
        match *check {}
    }

    fn end_check(check: &mut Infallible, _: &HostLanes, _: bool) -> Result<Option<(u64, usize)>> {
        match *check {}
    }

    /// Sums on the host are always in rank order.
    fn ordered(_: &dyn Communicator, _: &GradientBuffer, _: ReduceOp) -> Result<Option<Infallible>> {
        Ok(None)
    }

    fn reduce_ordered(ordered: &mut Infallible, _: &mut GradientBuffer, _: &[f64]) -> Result<()> {
        match *ordered {}
    }
}
