//! Reductions of layers by kernels: the assignment of a shard's chunks to blocks, and the rows of their sums.
//!
//! The chunks are the chunks of [`chunks`](super::chunks): a chunk's offset and length depend only on its tensor, not on the device, the
//! arena or the shard. The assignment to blocks changes no bit of the result, so it may depend on the shard's length.

use std::ops::Range;

use gradsync_device::abi::ChunkedSpan;

use super::chunks::{SumTable, chunk_len};
use super::segments;

/// The layers of an arena that is divided into shards, one per rank.
///
/// The table of their sums has a row for each layer, followed by a row for each chunk of every layer that several shards divide. A rank
/// fills the rows of the chunks in its shard, and leaves the other rows zero: adding zeros is exact in any order.
#[derive(Clone, Debug)]
pub(crate) struct DividedLayers {
    tensors: Vec<Range<usize>>,
    table: SumTable,
    /// For each layer the first row of its chunks, or `None` if the layer is not divided.
    first_rows: Vec<Option<usize>>,
    rows: usize,
}

/// The chunks of a shard, with their assignment to blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) struct ShardBlocks {
    /// The elements of each tensor inside the shard.
    pub(crate) spans: Vec<ChunkedSpan>,
    /// The number of blocks.
    pub(crate) blocks: u64,
    /// The number of chunks.
    pub(crate) chunks: u64,
}

impl DividedLayers {
    /// Creates the table for `layers` layers of equally many consecutive tensors, in an arena that is divided into shards of `shard_len`
    /// elements, or undivided for 0.
    pub(crate) fn new(tensors: &[Range<usize>], layers: usize, shard_len: usize) -> Self {
        let table = SumTable::new(tensors, layers, shard_len);
        let mut rows = layers;
        let mut rows_of_chunks = |layer: usize| {
            let count = table.rows(layer..layer + 1).len();
            let first = rows;
            (count > 1).then(|| {
                rows += count;
                first
            })
        };
        let first_rows = (0..layers).map(&mut rows_of_chunks).collect();
        Self { tensors: tensors.to_vec(), table, first_rows, rows }
    }

    /// The number of layers.
    pub(crate) fn layers(&self) -> usize {
        self.table.layers()
    }

    /// The number of tensors.
    #[cfg(feature = "cuda")]
    pub(crate) fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// The length of each layer in elements, over all shards, without gaps.
    #[cfg(feature = "cuda")]
    pub(crate) fn lens(&self) -> Vec<usize> {
        let each = self.tensors.len().checked_div(self.layers()).unwrap_or(0);
        let of_layer = |layer: usize| self.tensors[layer * each..(layer + 1) * each].iter().map(Range::len).sum();
        (0..self.layers()).map(of_layer).collect()
    }

    /// The number of rows: rows of layers and rows of divided layers' chunks.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// The layers that have rows for their chunks.
    pub(crate) fn divided(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.layers()).filter(|&layer| self.first_rows[layer].is_some())
    }

    /// The elements of each tensor inside a shard, counted from the shard's start; empty for tensors outside.
    pub(crate) fn tensors_in(&self, shard: Range<usize>) -> Vec<Range<usize>> {
        segments::clip(&self.tensors, shard)
    }

    /// All chunks, in their order in the arena.
    #[cfg(feature = "cuda")]
    pub(crate) fn chunks(&self) -> Vec<super::chunks::Chunk> {
        let end = self.tensors.last().map_or(0, |tensor| tensor.end);
        self.table.within(0..end)
    }

    /// The largest number of chunks of a layer, over all shards.
    #[cfg(feature = "cuda")]
    pub(crate) fn most_chunks(&self) -> usize {
        self.chunks().chunk_by(|left, right| left.layer == right.layer).map(<[_]>::len).max().unwrap_or(0)
    }

    /// The chunks in a shard. A block takes consecutive chunks of one tensor with `block_len` elements, and at least `least` chunks.
    /// Panics if a chunk crosses the shard's edges.
    pub(crate) fn blocks_of_shard(&self, shard: Range<usize>, block_len: usize, least: usize) -> ShardBlocks {
        let own = self.table.within(shard.clone());
        let (mut chunks, mut blocks) = (0, 0);
        let each = self.tensors.len().checked_div(self.layers()).unwrap_or(0);
        let of_tensor = |(index, (tensor, inside)): (usize, (&Range<usize>, Range<usize>))| {
            let layer = index / each;
            let chunk_len = chunk_len(tensor.len());
            let (first_row, rows, rows_before) = match self.first_rows[layer] {
                None => (0, 0, 0),
                Some(first_row) => {
                    let rows = self.table.rows(layer..layer + 1);
                    let index = own.partition_point(|chunk| chunk.layer < layer);
                    let first = own.get(index).filter(|chunk| chunk.layer == layer);
                    (first_row, rows.len(), first.map_or(0, |chunk| chunk.row - rows.start))
                }
            };
            let chunks_of_block = (block_len / chunk_len).max(least).max(1);
            let span = ChunkedSpan {
                begin: inside.start as u64,
                len: inside.len() as u64,
                chunk_len: chunk_len as u64,
                first_chunk: chunks,
                chunks_of_block: chunks_of_block as u64,
                first_block: blocks,
                first_row: first_row as u64,
                rows: rows as u64,
                rows_before: rows_before as u64,
            };
            let count = inside.len().div_ceil(chunk_len);
            chunks += count as u64;
            blocks += count.div_ceil(chunks_of_block) as u64;
            span
        };
        let inside = self.tensors_in(shard);
        let spans = self.tensors.iter().zip(inside).enumerate().map(of_tensor).collect();
        ShardBlocks { spans, blocks, chunks }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dtype::DType;
    use crate::plan::chunks;
    use crate::plan::layout::Layout;

    /// The chunks of a block, numbers and ranges, computed as in kernels.
    fn of_block(shard: &ShardBlocks, block: u64) -> Vec<(u64, Range<u64>)> {
        let row = shard.spans.partition_point(|span| span.first_block <= block) - 1;
        let span = shard.spans[row];
        let first = (block - span.first_block) * span.chunks_of_block;
        let end = span.len.div_ceil(span.chunk_len).min(first + span.chunks_of_block);
        let offset = |chunk: u64| span.begin + (chunk * span.chunk_len).min(span.len);
        (first..end).map(|chunk| (span.first_chunk + chunk, offset(chunk)..offset(chunk + 1))).collect()
    }

    /// The rows of a layer's own chunks, in the order of their numbers, computed as in kernels.
    fn rows_of(shard: &ShardBlocks, layer: usize, layers: usize) -> Vec<u64> {
        let span = shard.spans[layer];
        let next = if layer + 1 < layers { shard.spans[layer + 1].first_chunk } else { shard.chunks };
        (span.first_chunk..next).map(|chunk| span.first_row + span.rows_before + chunk - span.first_chunk).collect()
    }

    fn lens() -> impl Strategy<Value = Vec<usize>> {
        prop::collection::vec(prop_oneof![0usize..300, 0usize..5000, 0usize..50_000, 0usize..600_000], 1..12)
    }

    proptest! {
        #[test]
        fn blocks_of_shard_take_each_chunk_once(
            lens in lens(), world in 1usize..9, whole in any::<bool>(), block_len in 0usize..50_000, least in 1usize..3,
        ) {
            let Layout { segments, shard_len } = Layout::new(DType::F32, world, &lens).unwrap();
            let layers = DividedLayers::new(&segments, if whole { 1 } else { lens.len() }, shard_len);
            let mut found = Vec::new();
            for rank in 0..world {
                let begin = rank * shard_len;
                let shard = layers.blocks_of_shard(begin..begin + shard_len, block_len, least);
                let numbers: Vec<_> = (0..shard.blocks).flat_map(|block| of_block(&shard, block)).collect();
                let in_order = numbers.iter().map(|(number, _)| *number).eq(0..shard.chunks);
                prop_assert!(in_order, "chunks are taken in order");
                found.extend(numbers.into_iter().map(|(_, range)| {
                    range.start as usize + begin..range.end as usize + begin
                }));
            }
            let expected: Vec<_> = segments.iter().cloned().flat_map(chunks::chunks).collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn divided_layers_have_rows_of_one_shard_each(lens in lens(), world in 1usize..9, whole in any::<bool>()) {
            let Layout { segments, shard_len } = Layout::new(DType::F32, world, &lens).unwrap();
            let count = if whole { 1 } else { lens.len() };
            let layers = DividedLayers::new(&segments, count, shard_len);
            let shards: Vec<_> =
                (0..world).map(|rank| layers.blocks_of_shard(rank * shard_len..(rank + 1) * shard_len, 0, 1)).collect();
            let mut rows: Vec<u64> = Vec::new();
            for layer in layers.divided() {
                let of_layer: Vec<u64> = shards.iter().flat_map(|shard| rows_of(shard, layer, count)).collect();
                // The order of the chunks is the order of the shards.
                let first = shards[0].spans[layer];
                prop_assert!(of_layer.iter().copied().eq(first.first_row..first.first_row + first.rows));
                rows.extend(of_layer);
            }
            prop_assert!(rows.into_iter().eq(count as u64..layers.rows() as u64));
            for layer in (0..count).filter(|layer| !layers.divided().any(|divided| divided == *layer)) {
                let of_shards = shards.iter().map(|shard| rows_of(shard, layer, count).len());
                prop_assert!(of_shards.filter(|&len| len > 0).count() <= 1, "whole layers are in one shard");
            }
        }

        #[test]
        fn divided_layers_give_a_tensor_the_same_chunks_in_every_arena(
            len in 1usize..600_000, others in lens(), world in 1usize..9, at in 0usize..12,
        ) {
            let chunks_in = |lens: &[usize], index: usize, world: usize| {
                let Layout { segments, shard_len } = Layout::new(DType::F32, world, lens).unwrap();
                let layers = DividedLayers::new(&segments, lens.len(), shard_len);
                let mut lens = Vec::new();
                for rank in 0..world {
                    let span = layers.blocks_of_shard(rank * shard_len..(rank + 1) * shard_len, 8192, 1).spans[index];
                    let parts = (0..span.len).step_by(span.chunk_len as usize);
                    lens.extend(parts.map(|begin| span.chunk_len.min(span.len - begin)));
                }
                lens
            };
            let at = at.min(others.len());
            let all = [&others[..at], &[len], &others[at..]].concat();
            prop_assert_eq!(chunks_in(&all, at, world), chunks_in(&[len], 0, 1));
        }
    }

    #[test]
    fn divided_layers_of_nothing_have_no_rows() {
        let layers = DividedLayers::new(&[], 0, 0);
        assert_eq!((layers.rows(), layers.divided().count()), (0, 0));
        assert_eq!(layers.blocks_of_shard(0..0, 2048, 1), ShardBlocks { spans: vec![], blocks: 0, chunks: 0 });
        // A layer without tensors.
        let layers = DividedLayers::new(&[], 1, 0);
        assert_eq!((layers.layers(), layers.rows()), (1, 1));
    }

    #[test]
    fn blocks_of_shard_are_long_for_long_tensors() {
        let tensor = 0..1 << 20;
        let layers = DividedLayers::new(std::slice::from_ref(&tensor), 1, 0);
        let blocks = |block_len, least| layers.blocks_of_shard(tensor.clone(), block_len, least).blocks;
        assert_eq!([blocks(2048, 1), blocks(8192, 1), blocks(40_960, 1), blocks(8192, 4)], [256, 128, 26, 64]);
    }
}
