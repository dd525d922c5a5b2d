//! Vectors in host memory, several of each so that iterations can alternate between them, and the copy that is their baseline.

use gradsync::{DType, Error, GradientBuffer, Slice, SliceMut};
use rayon::prelude::*;

use crate::perf::PerfError;
use crate::perf::record::BaselineName;

/// The alignment of vectors in bytes.
const ALIGNMENT: usize = 256;

/// Equal vectors, one after the other.
pub(super) struct Vectors {
    buffer: GradientBuffer,
    len: usize,
    stride: usize,
    slots: usize,
}

/// The number of vectors of `bytes` bytes in a working set.
pub(super) fn slots(working_set: Option<usize>, bytes: usize) -> usize {
    working_set.map_or(1, |set| set.div_ceil(bytes.max(1)).max(1))
}

impl Vectors {
    pub(super) fn new(dtype: DType, len: usize, slots: usize) -> Result<Self, PerfError> {
        let stride = len.next_multiple_of(ALIGNMENT / dtype.size_bytes());
        let buffer = GradientBuffer::new(dtype, 1, [("vectors", [stride * slots])])?;
        Ok(Self { buffer, len, stride, slots })
    }

    /// The vector that a round uses.
    pub(super) fn slice(&self, round: usize) -> Slice<'_> {
        let begin = round % self.slots * self.stride;
        self.buffer.as_slice().range(begin..begin + self.len)
    }

    pub(super) fn slice_mut(&mut self, round: usize) -> SliceMut<'_> {
        let begin = round % self.slots * self.stride;
        self.buffer.as_mut_slice().range_mut(begin..begin + self.len)
    }

    /// Writes values to every vector.
    pub(super) fn fill(&mut self, value: impl Fn(usize) -> f64 + Sync) {
        for slot in 0..self.slots {
            crate::perf::data::fill(self.slice_mut(slot), &value);
        }
    }
}

/// `len` elements of one value; all are written, so that their pages are mapped.
pub(crate) fn filled<T: Clone>(len: usize, value: T) -> Result<Vec<T>, PerfError> {
    let mut elements = Vec::new();
    let refused = |_| Error::OutOfMemory { operation: "baseline", bytes: len.saturating_mul(size_of::<T>()) };
    elements.try_reserve_exact(len).map_err(refused)?;
    elements.resize(len, value);
    Ok(elements)
}

/// A copy by all threads, which moves as many bytes as an operation must.
pub(crate) struct Copy {
    from: Vec<u8>,
    to: Vec<u8>,
    /// Bytes per copy.
    bytes: usize,
}

impl Copy {
    pub(crate) const NAME: BaselineName =
        BaselineName { column: "parallel memcpy", full: "a parallel memcpy that moves as many bytes" };

    /// A copy that reads and writes `traffic` bytes in total, with as many pairs of buffers as the operation has.
    pub(crate) fn new(traffic: f64, slots: usize) -> Result<Self, PerfError> {
        let bytes = ((traffic / 2.0) as usize).max(1);
        Ok(Self { from: filled(bytes * slots, 1)?, to: filled(bytes * slots, 2)?, bytes })
    }

    pub(crate) fn call(&mut self, round: usize) {
        let begin = round * self.bytes % self.from.len();
        let range = begin..begin + self.bytes;
        parallel_copy(&mut self.to[range.clone()], &self.from[range]);
    }
}

/// Up to this many bytes, one thread copies faster than several could be woken.
const ALONE_BYTES: usize = 1 << 20;

/// Copies a contiguous part with every thread of the pool: the C library bypasses the caches only if one call is larger than the caches.
/// One thread copies alone if that is faster.
fn parallel_copy(to: &mut [u8], from: &[u8]) {
    let part = to.len().div_ceil(rayon::current_num_threads()).next_multiple_of(4096);
    if to.len() <= part.max(ALONE_BYTES) {
        to.copy_from_slice(from);
    } else {
        to.par_chunks_mut(part).zip(from.par_chunks(part)).for_each(|(to, from)| to.copy_from_slice(from));
    }
}

/// The best bandwidth, in bytes per second read and written, of a copy of `bytes` bytes by all threads.
pub(crate) fn copy_rate(bytes: usize) -> Result<f64, PerfError> {
    let mut copy = Copy::new(2.0 * bytes as f64, 1)?;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = std::time::Instant::now();
        copy.call(0);
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * bytes as f64 / best)
}
