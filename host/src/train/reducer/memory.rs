//! [`ReducerMemory`]: the functions of a memory that a reducer needs besides kernels and reductions: buckets, and the order of work in two
//! queues.

use std::convert::Infallible;
use std::fmt::Debug;
use std::time::Instant;

use super::OPERATION;
use super::options::BucketMemory;
use crate::agreement::gather;
use crate::buffer::GradientBuffer;
use crate::call::scope;
use crate::comm::{Collectives, Communicator, ReduceOp};
use crate::dtype::DType;
use crate::error::{Error, Operation, Result};
use crate::kernels::KernelMemory;
use crate::kernels::cpu::{self, Fingerprint};
use crate::memory::Host;
use crate::ops::{Adasum, AdasumMemory, ReducibleMemory};
use crate::slice::{Slice, SliceMut};
use crate::train::Reduction;

/// The work that a moment is the end of.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    Gradients,
    Reductions,
}

/// A kind of memory for gradients of a [`Reducer`](super::Reducer): [`Host`] and `Cuda`.
#[doc(hidden)]
#[allow(missing_docs)] // for this module alone
pub trait ReducerMemory: KernelMemory + ReducibleMemory + AdasumMemory {
    /// The queues in which gradients are computed and reduced.
    type Lanes: Debug;
    /// A point in time of a lane.
    type Moment: Debug;
    /// Whether the host waits for each reduction.
    const HOST_WAITS: bool;
    /// The check of a bucket for NaN and infinities, where the host does not wait for its gradients.
    type Check: Debug;

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

    /// Multiplies all elements by a factor, each rounded once.
    fn scale_in_place(data: Self::SliceMut<'_>, factor: f64) -> Result<()>;

    /// A hash of all bits, and the first element that is not finite; on a GPU it waits for the queue.
    fn fingerprint(data: Self::Slice<'_>) -> Result<Fingerprint>;

    /// The only element, an `f64`; on a GPU it waits for the queue.
    fn read_f64(data: Self::Slice<'_>) -> Result<f64>;

    /// Prepares the reduction of a bucket. All ranks must call it.
    fn reduction<'c>(
        comm: &'c dyn Communicator<Self>,
        bucket: &GradientBuffer<Self>,
        reduction: Reduction,
        ordered: bool,
    ) -> Result<Box<dyn BucketReduction<Self> + 'c>>;
}

/// A reduction that was prepared for one bucket.
#[doc(hidden)]
pub trait BucketReduction<M: ReducerMemory>: Debug {
    /// Replaces every rank's bucket by the reduction; a mean has these weights of the ranks, if there are any.
    ///
    /// # Errors
    /// The errors of a collective.
    fn run(&mut self, bucket: &mut GradientBuffer<M>, weights: &[f64]) -> Result<()>;
}

impl<M: ReducerMemory> BucketReduction<M> for Adasum<'_, M> {
    fn run(&mut self, bucket: &mut GradientBuffer<M>, _: &[f64]) -> Result<()> {
        self.all_reduce(bucket)
    }
}

/// The sum or the mean by the transport. The ranks compared their tensors when the reducer was created.
#[derive(Debug)]
struct ByTransport<'c, M: ReducerMemory> {
    comm: &'c dyn Communicator<M>,
    op: ReduceOp,
}

impl<M: ReducerMemory> BucketReduction<M> for ByTransport<'_, M> {
    fn run(&mut self, bucket: &mut GradientBuffer<M>, weights: &[f64]) -> Result<()> {
        let _scope = scope::within(Operation::AllReduce(self.op));
        if M::reduce_in_windows(self.comm, bucket, self.op, weights)? {
            return Ok(());
        }
        match weights {
            [] => self.comm.all_reduce(bucket.as_mut_slice(), self.op),
            weights => self.comm.all_reduce_weighted(bucket.as_mut_slice(), weights),
        }
    }
}

/// The reduction of a bucket by the transport, or by Adasum.
pub(super) fn plain<'c, M: ReducerMemory>(
    comm: &'c dyn Communicator<M>,
    bucket: &GradientBuffer<M>,
    reduction: Reduction,
) -> Result<Box<dyn BucketReduction<M> + 'c>> {
    Ok(match reduction {
        Reduction::Mean => Box::new(ByTransport { comm, op: ReduceOp::Mean }),
        Reduction::Sum => Box::new(ByTransport { comm, op: ReduceOp::Sum }),
        Reduction::Adasum(options) => Box::new(Adasum::new(comm, bucket, options)?),
    })
}

/// The memory of buckets; the host needs no ordering of queues.
#[doc(hidden)]
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

    fn scale_in_place(data: SliceMut<'_>, factor: f64) -> Result<()> {
        cpu::scale_in_place(data, factor);
        Ok(())
    }

    fn fingerprint(data: Slice<'_>) -> Result<Fingerprint> {
        Ok(Fingerprint::of(data))
    }

    fn read_f64(data: Slice<'_>) -> Result<f64> {
        Ok(data.typed::<f64>().expect("f64")[0])
    }

    /// Sums on the host are always in rank order.
    fn reduction<'c>(
        comm: &'c dyn Communicator,
        bucket: &GradientBuffer,
        reduction: Reduction,
        _ordered: bool,
    ) -> Result<Box<dyn BucketReduction<Self> + 'c>> {
        plain(comm, bucket, reduction)
    }
}
