//! Vectors in device memory, several of each so that iterations can alternate between them, and the copy that is their baseline.

use gradsync::driver::{Device, DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use gradsync::internal::driver::{self, DeviceAttribute};
use gradsync::{DType, GradientBuffer};

use crate::perf::PerfError;
use crate::perf::data::{PERIOD, count_wrong, fill};
use crate::perf::record::BaselineName;

/// The alignment of vectors in bytes.
const ALIGNMENT: usize = 256;
/// The size of all turns' buffers together, in multiples of the L2 cache.
const CACHES: usize = 3;
/// Elements per transfer through host memory.
const PART_LEN: usize = PERIOD << 18;
/// Elements that the host writes of a repeating vector.
const BLOCK_LEN: usize = PERIOD << 14;

/// The number of sets of buffers in a working set, if each call moves `bytes` bytes: three times the L2 cache and at least two sets, unless
/// the user sets the size.
pub(super) fn slots(queue: &Queue, working_set: Option<usize>, bytes: usize, most: usize) -> Result<usize, PerfError> {
    let (set, least) = match working_set {
        Some(set) => (set, 1),
        None => {
            let device = Device::new(queue.ordinal());
            let cache = device.and_then(|device| driver::attribute(device, DeviceAttribute::L2CacheSize));
            let cache = cache.ok().and_then(|bytes| usize::try_from(bytes).ok());
            (CACHES * cache.unwrap_or(0), 2)
        }
    };
    Ok(set.div_ceil(bytes.max(1)).max(least).min(most))
}

/// Equal vectors, one after the other.
pub(super) struct Vectors {
    buffer: DeviceBuffer,
    dtype: DType,
    len: usize,
    stride: usize,
    slots: usize,
}

impl Vectors {
    pub(super) fn new(queue: &Queue, dtype: DType, len: usize, slots: usize) -> Result<Self, PerfError> {
        let stride = len.next_multiple_of(ALIGNMENT / dtype.size_bytes());
        Ok(Self { buffer: DeviceBuffer::zeroed(queue, dtype, stride * slots)?, dtype, len, stride, slots })
    }

    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    pub(super) fn slice(&self, round: usize) -> DeviceSlice<'_> {
        let begin = round % self.slots * self.stride;
        self.buffer.as_slice().range(begin..begin + self.len)
    }

    pub(super) fn slice_mut(&mut self, round: usize) -> DeviceSliceMut<'_> {
        let begin = round % self.slots * self.stride;
        self.buffer.as_mut_slice().range_mut(begin..begin + self.len)
    }

    /// Writes values to every vector.
    pub(super) fn fill(&mut self, value: impl Fn(usize) -> f64 + Sync) -> Result<(), PerfError> {
        let mut host = GradientBuffer::new(self.dtype, 1, [("part", [self.len.min(PART_LEN)])])?;
        for begin in (0..self.len).step_by(PART_LEN) {
            let end = self.len.min(begin + PART_LEN);
            fill(host.as_mut_slice().range_mut(0..end - begin), |index| value(begin + index));
            self.slice_mut(0).range_mut(begin..end).copy_from_host(host.as_slice().range(0..end - begin))?;
        }
        self.spread()
    }

    /// Writes to every vector values that repeat after [`PERIOD`] elements: the host writes one block, and the device copies it to the
    /// rest.
    pub(super) fn repeat(&mut self, value: impl Fn(usize) -> f64 + Sync) -> Result<(), PerfError> {
        let mut filled = self.len.min(BLOCK_LEN);
        let mut host = GradientBuffer::new(self.dtype, 1, [("block", [filled])])?;
        fill(host.tensor_mut(0).into_data(), value);
        self.slice_mut(0).range_mut(0..filled).copy_from_host(host.tensor(0).data())?;
        while filled < self.len {
            let more = filled.min(self.len - filled);
            let (first, rest) = self.slice_mut(0).split_at_mut(filled);
            rest.range_mut(0..more).copy_from_device(first.as_slice().range(0..more))?;
            filled += more;
        }
        self.spread()
    }

    /// Copies the first vector to the others.
    fn spread(&mut self) -> Result<(), PerfError> {
        for slot in 1..self.slots {
            let (first, rest) = self.buffer.as_mut_slice().split_at_mut(slot * self.stride);
            rest.range_mut(0..self.len).copy_from_device(first.as_slice().range(0..self.len))?;
        }
        Ok(())
    }

    /// Waits for the queue, and counts the wrong elements of the first vector.
    pub(super) fn count_wrong(&self, tolerance: f64, expected: impl Fn(usize) -> f64 + Sync) -> Result<u64, PerfError> {
        wrong(self.slice(0), tolerance, expected)
    }
}

/// Waits for the queue, and counts the wrong elements.
pub(super) fn wrong(
    data: DeviceSlice<'_>,
    tolerance: f64,
    expected: impl Fn(usize) -> f64 + Sync,
) -> Result<u64, PerfError> {
    let len = data.len();
    let mut host = GradientBuffer::new(data.dtype(), 1, [("part", [len.min(PART_LEN)])])?;
    let mut wrong = 0;
    for begin in (0..len).step_by(PART_LEN) {
        let end = len.min(begin + PART_LEN);
        data.range(begin..end).copy_to_host(host.as_mut_slice().range_mut(0..end - begin))?;
        wrong += count_wrong(host.as_slice().range(0..end - begin), tolerance, |index| expected(begin + index));
    }
    Ok(wrong)
}

/// The driver's copy on the device, which moves as many bytes as an operation.
pub(super) struct Copy {
    from: Vectors,
    to: Vectors,
}

impl Copy {
    pub(super) const NAME: BaselineName =
        BaselineName { column: "driver's copy", full: "the driver's copy that moves as many bytes" };

    pub(super) fn new(queue: &Queue, traffic: f64, slots: usize) -> Result<Self, PerfError> {
        let len = ((traffic / 2.0) as usize / DType::F32.size_bytes()).max(1);
        let mut from = Vectors::new(queue, DType::F32, len, slots)?;
        from.repeat(|index| (index % PERIOD) as f64)?;
        Ok(Self { from, to: Vectors::new(queue, DType::F32, len, slots)? })
    }

    pub(super) fn call(&mut self, round: usize) -> Result<(), PerfError> {
        Ok(self.to.slice_mut(round).copy_from_device(self.from.slice(round))?)
    }
}
