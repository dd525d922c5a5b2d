//! [`Grids`]: the distribution of the segments of a window among the blocks of kernels.
//!
//! Reductions divide tensors into chunks ([`reduction`](crate::plan::reduction)), a few per block. Weighted sums do not depend on the
//! division; they use parts of equal length. The window's length, the dtype and the number of vectors determine the work of a block.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use gradsync_device::abi::{ChunkedSpan, combine_chunk_len, peer_stretch_len, reduce_stretch_len};

use crate::driver::{Argument, DeviceBuffer, Queue};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cuda::{pointer, upload_words};
use crate::plan::reduction::{DividedLayers, Window};
use crate::plan::segments;

/// Segments divided into parts of equal length, one block per part.
#[derive(Debug)]
pub(super) struct Grid {
    /// The length of a part in elements; the last part of a segment may be shorter.
    pub(super) chunk_len: usize,
    /// The number of parts, and of blocks.
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

    /// The table in which kernels look up their parts.
    pub(super) fn spans(&self) -> Argument {
        pointer(self.spans.as_slice())
    }
}

/// The chunks of segments, a few per block.
#[derive(Debug)]
pub(super) struct ChunkGrid {
    /// The number of blocks.
    pub(super) blocks: u64,
    /// The number of chunks.
    pub(super) chunks: u64,
    /// A [`ChunkedSpan`] for each segment.
    spans: DeviceBuffer,
}

impl ChunkGrid {
    fn new(queue: &Queue, window: &Window) -> Result<Self> {
        let words: Vec<u64> = window.spans.iter().flat_map(words).collect();
        Ok(Self { blocks: window.blocks, chunks: window.chunks, spans: upload_words(queue, &words)? })
    }

    /// The table in which kernels look up their chunks.
    pub(super) fn spans(&self) -> Argument {
        pointer(self.spans.as_slice())
    }
}

/// A segment in the layout that kernels read.
fn words(span: &ChunkedSpan) -> [u64; 9] {
    let ChunkedSpan { begin, len, chunk_len, first_chunk, chunks_of_block, first_block, first_row, rows, rows_before } =
        *span;
    [begin, len, chunk_len, first_chunk, chunks_of_block, first_block, first_row, rows, rows_before]
}

/// The grids over one list of segments, for one kind of kernels.
#[derive(Debug)]
pub(super) struct Grids {
    /// The grids of reductions, by the number of elements per block.
    reductions: BTreeMap<usize, ChunkGrid>,
    /// The grids of weighted sums, by the length of a part in elements.
    sums: BTreeMap<usize, Grid>,
    /// The lengths, in the order of [`DType::FLOATS`].
    lens: [Lens; 4],
}

/// The numbers of elements per block.
#[derive(Clone, Copy, Debug)]
struct Lens {
    reduce: usize,
    combine: usize,
}

impl Grids {
    /// Creates the grids of kernels on `vectors` vectors of this device.
    pub(super) fn new(queue: &Queue, layers: &DividedLayers, window: Range<usize>, vectors: usize) -> Result<Self> {
        Self::of(queue, layers, window, 1, |total, dtype| Lens {
            reduce: reduce_stretch_len(total),
            combine: combine_chunk_len(total, dtype, vectors),
        })
    }

    /// Creates the grids of kernels on the memory of peers, whose blocks multiply two chunks at a time.
    pub(super) fn for_peers(queue: &Queue, layers: &DividedLayers, window: Range<usize>) -> Result<Self> {
        Self::of(queue, layers, window, 2, |total, dtype| Lens {
            reduce: peer_stretch_len(total, dtype),
            combine: peer_stretch_len(total, dtype),
        })
    }

    fn of(
        queue: &Queue,
        layers: &DividedLayers,
        window: Range<usize>,
        least_chunks: usize,
        lens: impl Fn(usize, DType) -> Lens,
    ) -> Result<Self> {
        let parts = layers.parts(window.clone());
        let total = parts.iter().map(Range::len).sum();
        let lens = DType::FLOATS.map(|dtype| lens(total, dtype));
        let distinct = |len: fn(&Lens) -> usize| lens.iter().map(len).collect::<BTreeSet<usize>>().into_iter();
        let reductions = distinct(|lens| lens.reduce)
            .map(|len| Ok((len, ChunkGrid::new(queue, &layers.window(window.clone(), len, least_chunks))?)));
        let sums = distinct(|lens| lens.combine).map(|len| Ok((len, Grid::new(queue, &parts, len)?)));
        Ok(Self { reductions: reductions.collect::<Result<_>>()?, sums: sums.collect::<Result<_>>()?, lens })
    }

    /// The grid of reductions of vectors of a dtype.
    pub(super) fn of_reductions(&self, dtype: DType) -> &ChunkGrid {
        &self.reductions[&self.lens[dtype as usize].reduce]
    }

    /// The grid of weighted sums of vectors of a dtype.
    pub(super) fn of_sums(&self, dtype: DType) -> &Grid {
        &self.sums[&self.lens[dtype as usize].combine]
    }

    /// The number of chunks, and of partial sums of a reduction.
    pub(super) fn chunks(&self) -> usize {
        self.of_reductions(DType::F32).chunks as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_take_more_of_longer_windows() {
        for (total, reduce, combine) in [
            (0, 2048, [2048; 4]),
            (1 << 24, 2048, [2048; 4]),
            ((1 << 24) + (1 << 13), 4096, [2048, 2048, 2048, 4096]),
            (1 << 25, 4096, [2048, 2048, 2048, 4096]),
            (335_000_000, 40_960, [2048, 2048, 2048, 4096]),
            (1 << 33, 1 << 20, [2048, 2048, 2048, 4096]),
        ] {
            assert_eq!(reduce_stretch_len(total), reduce, "{total} elements");
            assert_eq!(DType::FLOATS.map(|dtype| combine_chunk_len(total, dtype, 4)), combine, "{total} elements");
            assert_eq!(DType::FLOATS.map(|dtype| combine_chunk_len(total, dtype, 5)), [2048; 4], "{total} elements");
        }
        for (total, lens) in [
            (0, [2048; 4]),
            (1 << 20, [2048; 4]),
            ((1 << 20) + (1 << 9), [4096; 4]),
            (1 << 23, [8192, 16384, 16384, 16384]),
            (1 << 33, [8192, 16384, 32768, 32768]),
        ] {
            assert_eq!(DType::FLOATS.map(|dtype| peer_stretch_len(total, dtype)), lens, "{total} elements");
        }
    }

    #[test]
    fn every_field_is_where_kernels_read_it() {
        let span = ChunkedSpan {
            begin: 1,
            len: 2,
            chunk_len: 3,
            first_chunk: 4,
            chunks_of_block: 5,
            first_block: 6,
            first_row: 7,
            rows: 8,
            rows_before: 9,
        };
        assert_eq!(size_of::<ChunkedSpan>(), size_of_val(&words(&span)));
        macro_rules! assert_fields {
            ($($field:ident)*) => {
                $(assert_eq!(words(&span)[std::mem::offset_of!(ChunkedSpan, $field) / 8], span.$field, stringify!($field));)*
            };
        }
        assert_fields!(begin len chunk_len first_chunk chunks_of_block first_block first_row rows rows_before);
    }
}
