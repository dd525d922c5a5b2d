//! Reducers of gradients in the memory of GPUs, with a queue for reductions besides the queue that computes gradients.

use super::memory::{BucketReduction, Lane, ReducerMemory, plain};
use super::{Parameter, Reducer, ReducerOptions};
use crate::buffer::GradientBuffer;
use crate::comm::{Communicator, ReduceOp};
use crate::driver::{DeviceSlice, DeviceSliceMut, Event, Queue};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::{cpu, cuda};
use crate::memory::{Cuda, HostBuffer};
use crate::ops::OrderedAllReduce;
use crate::train::Reduction;

/// The queue that computes gradients, and the queue that reduces them.
#[doc(hidden)]
#[derive(Debug)]
pub struct Lanes {
    compute: Queue,
    /// None where both are the same queue.
    reductions: Option<Queue>,
}

impl Lanes {
    fn new(compute: &Queue, has_two: bool) -> Result<Self> {
        let reductions = has_two.then(|| Queue::new(compute.ordinal())).transpose()?;
        Ok(Self { compute: compute.clone(), reductions })
    }

    fn reductions(&self) -> &Queue {
        self.reductions.as_ref().unwrap_or(&self.compute)
    }
}

impl Drop for Lanes {
    /// The memory of buckets returns to the queue of reductions, so that queue must be behind all work of the other queue on it.
    fn drop(&mut self) {
        if let Err(error) = Cuda::fork(self) {
            tracing::error!(%error, "the queue of a reducer is not ordered behind that of its gradients");
        }
    }
}

impl<'c> Reducer<'c, Cuda> {
    /// Creates a reducer of gradients on a GPU, which belong to this queue. Buckets are reduced in a separate queue, unless there is one
    /// rank or the options disable that. All ranks must call it, with the same parameters in the same order.
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
        let lanes = Lanes::new(queue, options.overlap && comm.world_size() > 1);
        Self::with_lanes(comm, lanes, parameters, options)
    }

    /// The queue of the gradients.
    pub fn queue(&self) -> &Queue {
        &self.lanes.compute
    }
}

impl BucketReduction<Cuda> for OrderedAllReduce<'_> {
    fn run(&mut self, bucket: &mut GradientBuffer<Cuda>, weights: &[f64]) -> Result<()> {
        match weights {
            [] => self.all_reduce(bucket),
            weights => self.weighted_mean(bucket, weights),
        }
    }
}

impl ReducerMemory for Cuda {
    type Lanes = Lanes;
    type Moment = Event;

    fn bucket<'n>(
        lanes: &Lanes,
        dtype: DType,
        world_size: usize,
        tensors: &mut dyn Iterator<Item = (&'n str, &'n [usize])>,
    ) -> Result<GradientBuffer<Self>> {
        GradientBuffer::on_queue(lanes.reductions(), dtype, world_size, tensors)
    }

    fn arena<'a>(lanes: &'a Lanes, bucket: &'a GradientBuffer<Self>) -> DeviceSlice<'a> {
        let data = bucket.as_slice();
        // SAFETY: the memory is borrowed. Work of the other queue on it is between `fork` and `join`, where the reducer returns no view.
        unsafe { DeviceSlice::from_raw_parts(&lanes.compute, data.address(), data.dtype(), data.len()) }
    }

    fn arena_mut<'a>(lanes: &'a Lanes, bucket: &'a mut GradientBuffer<Self>) -> DeviceSliceMut<'a> {
        let data = bucket.as_slice();
        // SAFETY: as above, and the memory is borrowed mutably.
        unsafe { DeviceSliceMut::from_raw_parts(&lanes.compute, data.address(), data.dtype(), data.len()) }
    }

    fn fork(lanes: &Lanes) -> Result<()> {
        match &lanes.reductions {
            Some(reductions) => Ok(reductions.wait_for_all_of(&lanes.compute)?),
            None => Ok(()),
        }
    }

    fn join(lanes: &Lanes) -> Result<()> {
        match &lanes.reductions {
            Some(reductions) => Ok(lanes.compute.wait_for_all_of(reductions)?),
            None => Ok(()),
        }
    }

    fn moment(lanes: &Lanes, lane: Lane) -> Result<Event> {
        let queue = if lane == Lane::Gradients { &lanes.compute } else { lanes.reductions() };
        Ok(queue.record()?)
    }

    fn seconds(from: &Event, to: &Event) -> Result<f64> {
        Ok(to.seconds_since(from)?)
    }

    fn scale_in_place(data: DeviceSliceMut<'_>, factor: f64) -> Result<()> {
        cuda::scale_in_place(data, factor)
    }

    fn fingerprint(data: DeviceSlice<'_>) -> Result<u64> {
        const PIECE_BYTES: usize = 64 * cpu::CHUNK_BYTES;
        let piece_len = PIECE_BYTES / data.dtype().size_bytes();
        let mut piece = HostBuffer::zeroed("fingerprint", data.dtype(), piece_len.min(data.len()))?;
        let mut hashes = Vec::new();
        for begin in (0..data.len()).step_by(piece_len) {
            let range = begin..data.len().min(begin + piece_len);
            let mut read = piece.as_mut_slice().range_mut(0..range.len());
            data.range(range).copy_to_host(read.reborrow())?;
            hashes.extend(cpu::fingerprints_of_chunks(read.as_slice()));
        }
        Ok(cpu::fingerprint_of_words(&hashes))
    }

    fn read_f64(data: DeviceSlice<'_>) -> Result<f64> {
        let mut value = [0.0f64];
        data.copy_to_host((&mut value).into())?;
        Ok(value[0])
    }

    fn reduction<'c>(
        comm: &'c dyn Communicator<Self>,
        bucket: &GradientBuffer<Self>,
        reduction: Reduction,
        ordered: bool,
    ) -> Result<Box<dyn BucketReduction<Self> + 'c>> {
        let op = match reduction {
            Reduction::Mean if ordered => ReduceOp::Mean,
            Reduction::Sum if ordered => ReduceOp::Sum,
            reduction => return plain(comm, bucket, reduction),
        };
        Ok(Box::new(OrderedAllReduce::new(comm, bucket, op)?))
    }
}
