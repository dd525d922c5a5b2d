//! Reducers of gradients in the memory of GPUs, with a queue for reductions besides the queue that computes gradients.

use std::collections::VecDeque;

use super::memory::{Lane, ReducerMemory};
use super::{Parameter, Reducer, ReducerOptions};
use crate::buffer::GradientBuffer;
use crate::comm::{Communicator, ReduceOp};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Event, Pinned, Queue};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cuda::{self, SegmentWorkspace};
use crate::memory::Cuda;
use crate::ops::OrderedAllReduce;

/// The queue that computes gradients, and the queue that reduces them.
#[derive(Debug)]
pub struct CudaLanes {
    compute: Queue,
    /// None where both are the same queue.
    reductions: Option<Queue>,
}

impl CudaLanes {
    fn new(compute: &Queue, has_two: bool) -> Result<Self> {
        let reductions = has_two.then(|| Queue::new(compute.ordinal())).transpose()?;
        Ok(Self { compute: compute.clone(), reductions })
    }

    fn reductions(&self) -> &Queue {
        self.reductions.as_ref().unwrap_or(&self.compute)
    }
}

impl Drop for CudaLanes {
    /// The memory of buckets returns to the queue of reductions, so that queue must be behind all work of the other queue on it.
    fn drop(&mut self) {
        if let Err(error) = Cuda::fork(self) {
            tracing::error!(%error, "the queue of a reducer is not ordered behind that of its gradients");
        }
    }
}

/// The check of a bucket for NaN and infinities: the squared norms of its tensors, computed before each reduction and copied to the host
/// behind it. The squares of f16, bf16 and f32 cannot leave the range of f64; gradients of f64 are multiplied by zeros instead.
#[derive(Debug)]
pub struct NormCheck {
    norms: SegmentWorkspace,
    /// As many zeros as the bucket has elements of f64.
    zeros: Option<DeviceBuffer>,
    /// The norms of some steps, so that the host can be that many steps ahead of the device.
    copies: Pinned,
    /// The blocks in use with the numbers of their steps, oldest first.
    pending: VecDeque<(usize, u64)>,
    next: usize,
}

impl NormCheck {
    /// The steps by which a host can be ahead of its device.
    const AHEAD: usize = 4;

    fn new(queue: &Queue, bucket: &GradientBuffer<Cuda>) -> Result<Self> {
        let len = bucket.as_slice().len();
        let zeros = (bucket.dtype() == DType::F64).then(|| DeviceBuffer::zeroed(queue, DType::F64, len)).transpose()?;
        let bytes = bucket.segments().len() * Self::sums(zeros.is_some()) * size_of::<f64>();
        let copies = Pinned::new(queue, Self::AHEAD, bytes.max(1))?;
        let norms = SegmentWorkspace::new(queue, len, bucket.segments(), 1)?;
        Ok(Self { norms, zeros, copies, pending: VecDeque::new(), next: 0 })
    }

    /// The sums of each tensor.
    fn sums(is_product: bool) -> usize {
        if is_product { 3 } else { 1 }
    }

    /// Waits for the oldest check; returns its first tensor with a sum that is not finite.
    fn oldest(&mut self) -> Result<Option<(u64, usize)>> {
        let Some(&(block, step)) = self.pending.front() else { return Ok(None) };
        self.copies.wait(block)?;
        self.pending.pop_front();
        let sums = Self::sums(self.zeros.is_some());
        // SAFETY: the block has as many sums for each layer, aligned as pages are; its copies are over.
        let block = unsafe {
            std::slice::from_raw_parts(self.copies.block(block).cast::<f64>(), self.norms.layer_count() * sums)
        };
        let found = block.chunks_exact(sums).position(|sums| !sums[0].is_finite());
        Ok(found.map(|tensor| (step, tensor)))
    }
}

impl<'c> Reducer<'c, Cuda> {
    /// Creates a reducer of gradients on a GPU, which belong to this queue. Buckets are reduced in a separate queue, unless there is one
    /// rank or the options disable that. All ranks must call it, with the same parameters in the same order.
    ///
    /// Each bucket is read once more before its reduction, to find gradients that are not finite ([`NonFinite`](super::NonFinite)); not
    /// within a recorded graph.
    ///
    /// Steps can be recorded as a graph ([`Queue::capture`]) from the third step on, if steps are [alike](ReducerOptions::static_graph) and
    /// gradients keep the addresses that they had in the recording.
    ///
    /// # Errors
    /// The errors of [`new`](Reducer::new), and `Error::Cuda`.
    pub fn on_queue(
        queue: &Queue,
        comm: &'c dyn Communicator<Cuda>,
        parameters: impl IntoIterator<Item = Parameter>,
        options: impl Into<ReducerOptions>,
    ) -> Result<Self> {
        let options = options.into();
        let lanes = CudaLanes::new(queue, options.overlap && comm.world_size() > 1);
        Self::with_lanes(comm, lanes, parameters, options)
    }

    /// The queue of the gradients.
    pub fn queue(&self) -> &Queue {
        &self.lanes.compute
    }
}

impl ReducerMemory for Cuda {
    type Lanes = CudaLanes;
    type Moment = Event;
    type Check = NormCheck;
    type Ordered<'c> = OrderedAllReduce<'c>;
    const HOST_WAITS: bool = false;

    fn bucket<'n>(
        lanes: &CudaLanes,
        dtype: DType,
        world_size: usize,
        tensors: &mut dyn Iterator<Item = (&'n str, &'n [usize])>,
        _is_reduced: bool,
    ) -> Result<GradientBuffer<Self>> {
        GradientBuffer::on_queue(lanes.reductions(), dtype, world_size, tensors)
    }

    fn agree_on_memory(
        _: &dyn Communicator<Cuda>,
        _: &mut CudaLanes,
        _: &mut dyn Iterator<Item = &mut GradientBuffer<Self>>,
    ) -> Result<()> {
        Ok(())
    }

    fn arena<'a>(lanes: &'a CudaLanes, bucket: &'a GradientBuffer<Self>) -> DeviceSlice<'a> {
        let data = bucket.as_slice();
        // SAFETY: the memory is borrowed. Work of the other queue on it is between `fork` and `join`, where the reducer returns no view.
        unsafe { DeviceSlice::from_raw_parts(&lanes.compute, data.address(), data.dtype(), data.len()) }
    }

    fn arena_mut<'a>(lanes: &'a CudaLanes, bucket: &'a mut GradientBuffer<Self>) -> DeviceSliceMut<'a> {
        let data = bucket.as_slice();
        // SAFETY: as above, and the memory is borrowed mutably.
        unsafe { DeviceSliceMut::from_raw_parts(&lanes.compute, data.address(), data.dtype(), data.len()) }
    }

    fn fork(lanes: &CudaLanes) -> Result<()> {
        match &lanes.reductions {
            Some(reductions) => Ok(reductions.wait_for_all_of(&lanes.compute)?),
            None => Ok(()),
        }
    }

    fn join(lanes: &CudaLanes) -> Result<()> {
        match &lanes.reductions {
            Some(reductions) => Ok(lanes.compute.wait_for_all_of(reductions)?),
            None => Ok(()),
        }
    }

    fn moment(lanes: &CudaLanes, lane: Lane) -> Result<Event> {
        let queue = if lane == Lane::Gradients { &lanes.compute } else { lanes.reductions() };
        Ok(queue.record()?)
    }

    fn seconds(from: &Event, to: &Event) -> Result<f64> {
        Ok(to.seconds_since(from)?)
    }

    fn pack_checked(
        arena: DeviceSliceMut<'_>,
        offsets: &[usize],
        sources: &[DeviceSlice<'_>],
    ) -> Result<Option<usize>> {
        cuda::pack(arena, offsets, sources).map(|()| None)
    }

    fn check_of(lanes: &CudaLanes, bucket: &GradientBuffer<Self>) -> Result<Option<NormCheck>> {
        NormCheck::new(lanes.reductions(), bucket).map(Some)
    }

    /// Within a recording nothing is checked: the host does not see the runs of a graph.
    fn begin_check(check: &mut NormCheck, lanes: &CudaLanes, bucket: &GradientBuffer<Self>, step: u64) -> Result<()> {
        let queue = lanes.reductions();
        let _held = queue.hold();
        if queue.capture_id()?.is_some() {
            return Ok(());
        }
        if check.pending.len() == NormCheck::AHEAD {
            // Steps that failed before their end have left their checks.
            check.oldest()?;
        }
        let data = bucket.as_slice();
        match &check.zeros {
            Some(zeros) => check.norms.dots(data, zeros.as_slice())?,
            None => check.norms.squared_norms(data)?,
        }
        let block = check.next;
        check.next = (block + 1) % NormCheck::AHEAD;
        let totals = check.norms.totals(NormCheck::sums(check.zeros.is_some()));
        // SAFETY: the totals live as long as the check, which waits for its copies; a block is used again only when its copy is over.
        unsafe { check.copies.fetch(queue, block, 0, totals.address(), totals.len() * size_of::<f64>()) }?;
        check.copies.mark(queue, block)?;
        check.pending.push_back((block, step));
        Ok(())
    }

    fn end_check(check: &mut NormCheck, lanes: &CudaLanes, waits: bool) -> Result<Option<(u64, usize)>> {
        // A recording allows no question about events.
        if lanes.reductions().capture_id()?.is_some() {
            return Ok(None);
        }
        let mut first = None;
        while let Some(&(block, _)) = check.pending.front() {
            if !waits && check.pending.len() < NormCheck::AHEAD && !check.copies.is_done(block)? {
                break;
            }
            let found = check.oldest()?;
            first = first.or(found);
        }
        Ok(first)
    }

    fn ordered<'c>(
        comm: &'c dyn Communicator<Self>,
        bucket: &GradientBuffer<Self>,
        op: ReduceOp,
    ) -> Result<Option<OrderedAllReduce<'c>>> {
        OrderedAllReduce::new(comm, bucket, op).map(Some)
    }

    fn reduce_ordered(
        ordered: &mut OrderedAllReduce<'_>,
        bucket: &mut GradientBuffer<Self>,
        weights: &[f64],
    ) -> Result<()> {
        match weights {
            [] => ordered.all_reduce(bucket),
            weights => ordered.weighted_mean(bucket, weights),
        }
    }
}
