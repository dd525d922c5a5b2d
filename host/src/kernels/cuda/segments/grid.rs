//! [`Grids`]: the distribution of the segments of an arena among the blocks of kernels, chunk by chunk.
//!
//! A chunk's length follows from the arena's length, the dtype and the number of vectors alone, never from the device, so that results do not
//! depend on it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use gradsync_device::abi::{combine_chunk_len, peer_chunk_len, reduce_chunk_len};

use crate::driver::{Argument, DeviceBuffer, Queue};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cuda::{pointer, upload_words};
use crate::plan::segments;

/// Segments cut into chunks of one length, a block for each.
#[derive(Debug)]
pub(super) struct Grid {
    /// Elements of a chunk; the last one of a segment may be shorter.
    pub(super) chunk_len: usize,
    /// Number of chunks, and of blocks.
    pub(super) chunks: u64,
    /// A `Span` for each segment.
    spans: DeviceBuffer,
}

impl Grid {
    fn new(queue: &Queue, segments: &[Range<usize>], chunk_len: usize) -> Result<Self> {
        let (spans, chunks) = segments::spans(segments, chunk_len);
        let words: Vec<u64> = spans.iter().flat_map(|span| [span.begin, span.len, span.first_block]).collect();
        Ok(Self { chunk_len, chunks, spans: upload_words(queue, &words)? })
    }

    /// The segments as kernels find their chunks in them.
    pub(super) fn spans(&self) -> Argument {
        pointer(self.spans.as_slice())
    }
}

/// The grids over one list of segments that a kind of kernels runs on.
#[derive(Debug)]
pub(super) struct Grids {
    by_chunk_len: BTreeMap<usize, Grid>,
    /// The lengths of chunks, in the order of [`DType::ALL`].
    chunk_lens: [ChunkLens; 4],
}

/// Elements of a chunk.
#[derive(Clone, Copy, Debug)]
struct ChunkLens {
    reduce: usize,
    combine: usize,
}

impl Grids {
    /// For kernels on `vectors` vectors of this device.
    pub(super) fn new(queue: &Queue, segments: &[Range<usize>], vectors: usize) -> Result<Self> {
        Self::of(queue, segments, |total, dtype| ChunkLens {
            reduce: reduce_chunk_len(total),
            combine: combine_chunk_len(total, dtype, vectors),
        })
    }

    /// For kernels on the memory of peers.
    pub(super) fn for_peers(queue: &Queue, segments: &[Range<usize>]) -> Result<Self> {
        Self::of(queue, segments, |total, dtype| ChunkLens {
            reduce: peer_chunk_len(total, dtype),
            combine: peer_chunk_len(total, dtype),
        })
    }

    fn of(queue: &Queue, segments: &[Range<usize>], lens: impl Fn(usize, DType) -> ChunkLens) -> Result<Self> {
        let total = segments.iter().map(Range::len).sum();
        let chunk_lens = DType::ALL.map(|dtype| lens(total, dtype));
        let distinct: BTreeSet<usize> = chunk_lens.iter().flat_map(|lens| [lens.reduce, lens.combine]).collect();
        let grids = distinct.into_iter().map(|len| Ok((len, Grid::new(queue, segments, len)?)));
        Ok(Self { by_chunk_len: grids.collect::<Result<_>>()?, chunk_lens })
    }

    /// The grid of reductions of vectors of a dtype.
    pub(super) fn of_reductions(&self, dtype: DType) -> &Grid {
        &self.by_chunk_len[&self.chunk_lens[dtype as usize].reduce]
    }

    /// The grid of weighted sums of vectors of a dtype.
    pub(super) fn of_sums(&self, dtype: DType) -> &Grid {
        &self.by_chunk_len[&self.chunk_lens[dtype as usize].combine]
    }

    /// The largest number of chunks that any reduction leaves partial sums of.
    pub(super) fn most_partials(&self) -> usize {
        DType::ALL.map(|dtype| self.of_reductions(dtype).chunks as usize).into_iter().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_grow_with_the_arena() {
        for (total, reduce, combine) in [
            (0, 2048, [2048; 4]),
            (1 << 24, 2048, [2048; 4]),
            ((1 << 24) + (1 << 13), 4096, [2048, 2048, 2048, 4096]),
            (1 << 25, 4096, [2048, 2048, 2048, 4096]),
            (335_000_000, 40_960, [2048, 2048, 2048, 4096]),
            (1 << 33, 1 << 20, [2048, 2048, 2048, 4096]),
        ] {
            assert_eq!(reduce_chunk_len(total), reduce, "{total} elements");
            assert_eq!(DType::ALL.map(|dtype| combine_chunk_len(total, dtype, 4)), combine, "{total} elements");
            assert_eq!(DType::ALL.map(|dtype| combine_chunk_len(total, dtype, 5)), [2048; 4], "{total} elements");
        }
        for (total, lens) in [
            (0, [2048; 4]),
            (1 << 20, [2048; 4]),
            ((1 << 20) + (1 << 9), [4096; 4]),
            (1 << 23, [8192, 16384, 16384, 16384]),
            (1 << 33, [8192, 16384, 32768, 32768]),
        ] {
            assert_eq!(DType::ALL.map(|dtype| peer_chunk_len(total, dtype)), lens, "{total} elements");
        }
    }
}
