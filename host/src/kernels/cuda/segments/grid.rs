//! [`Grids`]: the distribution of the segments of a shard among the blocks of kernels.
//!
//! Reductions divide tensors into chunks ([`divided_layers`](crate::plan::divided_layers)), a few per block. Weighted sums do not depend on the
//! division; they use blocks of equal length. The shard's length, the dtype and the number of vectors determine the work of a block.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use gradsync_device::abi::{combine_block_len, peer_stretch_len, reduce_stretch_len};

use crate::driver::{Argument, DeviceBuffer, Queue};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cuda::{pointer, upload_words, words_of};
use crate::plan::divided_layers::{DividedLayers, ShardBlocks};
use crate::plan::segments;

/// Segments divided into blocks of equal length.
#[derive(Debug)]
pub(super) struct Grid {
    /// The length of a block in elements; the last block of a segment may be shorter.
    pub(super) block_len: usize,
    /// The number of blocks.
    pub(super) blocks: u64,
    /// A `Span` for each segment.
    spans: DeviceBuffer,
}

impl Grid {
    fn new(queue: &Queue, segments: &[Range<usize>], block_len: usize) -> Result<Self> {
        let (spans, blocks) = segments::spans(segments, block_len);
        Ok(Self { block_len, blocks, spans: upload_words(queue, &words_of(&spans))? })
    }

    /// The table in which kernels look up their blocks.
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
    /// A `ChunkedSpan` for each segment.
    spans: DeviceBuffer,
}

impl ChunkGrid {
    fn new(queue: &Queue, shard: &ShardBlocks) -> Result<Self> {
        let spans = upload_words(queue, &words_of(&shard.spans))?;
        Ok(Self { blocks: shard.blocks, chunks: shard.chunks, spans })
    }

    /// The table in which kernels look up their chunks.
    pub(super) fn spans(&self) -> Argument {
        pointer(self.spans.as_slice())
    }
}

/// The grids over one list of segments, for one kind of kernels.
#[derive(Debug)]
pub(super) struct Grids {
    /// The grids of reductions, by the number of elements per block.
    reductions: BTreeMap<usize, ChunkGrid>,
    /// The grids of weighted sums, by the length of a block in elements.
    sums: BTreeMap<usize, Grid>,
    /// The lengths, in the order of [`DType::FLOATS`].
    lens: [Lens; DType::FLOATS.len()],
}

/// The numbers of elements per block.
#[derive(Clone, Copy, Debug)]
struct Lens {
    reduce: usize,
    combine: usize,
}

impl Grids {
    /// Creates the grids of kernels on `vectors` vectors of this device.
    pub(super) fn new(queue: &Queue, layers: &DividedLayers, shard: Range<usize>, vectors: usize) -> Result<Self> {
        Self::of(queue, layers, shard, 1, |total, dtype| Lens {
            reduce: reduce_stretch_len(total),
            combine: combine_block_len(total, dtype, vectors),
        })
    }

    /// Creates the grids of kernels on the memory of peers, whose blocks multiply two chunks at a time.
    pub(super) fn for_peers(queue: &Queue, layers: &DividedLayers, shard: Range<usize>) -> Result<Self> {
        Self::of(queue, layers, shard, 2, |total, dtype| Lens {
            reduce: peer_stretch_len(total, dtype),
            combine: peer_stretch_len(total, dtype),
        })
    }

    fn of(
        queue: &Queue,
        layers: &DividedLayers,
        shard: Range<usize>,
        least_chunks: usize,
        lens: impl Fn(usize, DType) -> Lens,
    ) -> Result<Self> {
        let tensors = layers.tensors_in(shard.clone());
        let total = tensors.iter().map(Range::len).sum();
        let lens = DType::FLOATS.map(|dtype| lens(total, dtype));
        let distinct = |len: fn(&Lens) -> usize| lens.iter().map(len).collect::<BTreeSet<usize>>().into_iter();
        let reductions = distinct(|lens| lens.reduce)
            .map(|len| Ok((len, ChunkGrid::new(queue, &layers.blocks_of_shard(shard.clone(), len, least_chunks))?)));
        let sums = distinct(|lens| lens.combine).map(|len| Ok((len, Grid::new(queue, &tensors, len)?)));
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
    fn reduce_stretch_len_grows_with_the_shard() {
        for (total, reduce, combine) in [
            (0, 2048, [2048; 4]),
            (1 << 24, 2048, [2048; 4]),
            ((1 << 24) + (1 << 13), 4096, [2048, 2048, 2048, 4096]),
            (1 << 25, 4096, [2048, 2048, 2048, 4096]),
            (335_000_000, 40_960, [2048, 2048, 2048, 4096]),
            (1 << 33, 1 << 20, [2048, 2048, 2048, 4096]),
        ] {
            assert_eq!(reduce_stretch_len(total), reduce, "{total} elements");
            assert_eq!(DType::FLOATS.map(|dtype| combine_block_len(total, dtype, 4)), combine, "{total} elements");
            assert_eq!(DType::FLOATS.map(|dtype| combine_block_len(total, dtype, 5)), [2048; 4], "{total} elements");
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
}
