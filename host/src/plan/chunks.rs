//! Chunks: the ranges of a tensor over which products are added without interruption.
//!
//! A chunk's offset and length depend only on its tensor, no shard of an arena begins inside a chunk ([`Layout`](super::layout::Layout)),
//! and the sums over a tensor's chunks are added in their order. So inner products and norms have the same bits for any other contents of
//! the arena and any number of ranks. This holds in both memories: kernels of GPUs use the same chunks (`plan::divided_layers`).

use std::ops::Range;

use super::segments::pieces;

/// The length of the longest chunks in elements.
pub const LONGEST_CHUNK: usize = 1 << 16;

/// The length of the chunks of a tensor of `len` elements, a power of two; the last of them may be shorter.
///
/// Longer chunks have less overhead and leave fewer sums, each of which is sent if several ranks divide the tensor; shorter ones divide
/// small tensors among more ranks and thread blocks. Tensors of 8,192 elements and more have at least 16 chunks, of 131,072 and more at least
/// 64, and up to 2²⁹ elements at most 8,192.
pub const fn chunk_len(len: usize) -> usize {
    match len {
        0..=0x4000 => 512,
        0x4001..=0x8000 => 1024,
        0x8001..=0x4_0000 => 2048,
        0x4_0001..=0x10_0000 => 4096,
        0x10_0001..=0x400_0000 => 8192,
        0x400_0001..=0x2000_0000 => len.div_ceil(8192).next_power_of_two(),
        _ => LONGEST_CHUNK,
    }
}

/// The chunks of a tensor at this range, in order.
pub fn chunks(tensor: Range<usize>) -> impl Iterator<Item = Range<usize>> + Clone {
    let chunk_len = chunk_len(tensor.len());
    pieces(tensor, chunk_len)
}

/// A chunk, with the row of a [`SumTable`] to which its sums are added.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Chunk {
    /// The layer of the chunk.
    pub layer: usize,
    /// The row of its sums. A layer in several shards has one row for each of its chunks; any other layer has one row for all of them.
    pub row: usize,
    /// The elements of the chunk.
    pub range: Range<usize>,
}

/// The chunks of several tensors, each of which is a layer with one row.
pub fn chunks_of_all(tensors: &[Range<usize>]) -> Vec<Chunk> {
    let of_tensor = |(layer, tensor): (usize, &Range<usize>)| {
        chunks(tensor.clone()).map(move |range| Chunk { layer, row: layer, range })
    };
    tensors.iter().enumerate().flat_map(of_tensor).collect()
}

/// The table in which the ranks of a group add products over the layers of an arena, each over its shard.
///
/// A rank fills the rows of the chunks in its shard, and leaves the others zero. So each number of the sum of all ranks' tables is one
/// number plus zeros, which is exact in any order, and [`fold`](Self::fold) then adds the rows of each layer in the order of its chunks, on
/// every rank.
#[derive(Clone, Debug)]
pub struct SumTable {
    chunks: Vec<Chunk>,
    /// The range of rows of each layer.
    layers: Vec<Range<usize>>,
}

impl SumTable {
    /// Creates the table for `layers` layers of equally many consecutive tensors, in an arena that is divided into shards of `shard_len`
    /// elements, or undivided for 0.
    pub fn new(tensors: &[Range<usize>], layers: usize, shard_len: usize) -> Self {
        let (mut chunks, mut rows_of_layers, mut rows) = (Vec::new(), Vec::with_capacity(layers), 0);
        let each = tensors.len().checked_div(layers).unwrap_or(0);
        for layer in 0..layers {
            let first = chunks.len();
            let of_layer = tensors[layer * each..(layer + 1) * each].iter().cloned().flat_map(self::chunks);
            chunks.extend(of_layer.map(|range| Chunk { layer, row: rows, range }));
            let shard_of = |chunk: &Chunk| chunk.range.start.checked_div(shard_len);
            let own = &mut chunks[first..];
            let is_divided = own.first().map(shard_of) != own.last().map(shard_of);
            let count = if is_divided { own.len() } else { 1 };
            if is_divided {
                own.iter_mut().enumerate().for_each(|(index, chunk)| chunk.row += index);
            }
            rows_of_layers.push(rows..rows + count);
            rows += count;
        }
        Self { chunks, layers: rows_of_layers }
    }

    /// The number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The rows of a range of layers.
    pub fn rows(&self, layers: Range<usize>) -> Range<usize> {
        let row = |layer: usize| self.layers.get(layer).map_or(self.row_count(), |rows| rows.start);
        row(layers.start)..row(layers.end)
    }

    /// The number of rows.
    pub fn row_count(&self) -> usize {
        self.layers.last().map_or(0, |rows| rows.end)
    }

    /// The chunks in a range of the arena, with elements counted from the start of the range. No chunk may cross its edges.
    pub fn within(&self, range: Range<usize>) -> Vec<Chunk> {
        let first = self.chunks.partition_point(|chunk| chunk.range.start < range.start);
        let end = self.chunks.partition_point(|chunk| chunk.range.start < range.end);
        let from_start = |chunk: &Chunk| {
            let Range { start, end } = chunk.range;
            assert!(end <= range.end, "the range {range:?} cuts the chunk {start}..{end}");
            Chunk { range: start - range.start..end - range.start, ..chunk.clone() }
        };
        self.chunks[first..end].iter().map(from_start).collect()
    }

    /// Adds the rows of each layer in their order: returns `layers × width` numbers for `rows × width`.
    pub fn fold(&self, rows: &[f64], width: usize) -> Vec<f64> {
        let mut totals = vec![0.0; self.layers() * width];
        for (layer, of_layer) in self.layers.iter().enumerate() {
            let totals = &mut totals[layer * width..][..width];
            for row in rows[of_layer.start * width..of_layer.end * width].chunks_exact(width) {
                totals.iter_mut().zip(row).for_each(|(total, sum)| *total += sum);
            }
        }
        totals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_follow_from_the_tensor() {
        let limits = [(0x4000, 512), (0x8000, 1024), (0x4_0000, 2048), (0x10_0000, 4096), (0x400_0000, 8192)];
        let behind = limits.windows(2).map(|pair| (pair[0].0 + 1, pair[1].1));
        for (len, expected) in behind.chain(limits).chain([(0, 512), (512, 512), (0x400_0001, 16_384)]) {
            assert_eq!(chunk_len(len), expected, "{len} elements");
        }
        assert_eq!(chunks(7..7).count(), 0);
        assert_eq!(chunks(100..1400).collect::<Vec<_>>(), [100..612, 612..1124, 1124..1400]);
    }

    #[test]
    fn sum_table_has_rows_of_chunks_for_divided_layers_alone() {
        let tensors = [0..1300, 1536..1536, 1536..2000, 2048..3072];
        let table = SumTable::new(&tensors, 4, 1024);
        assert_eq!([0..1, 1..2, 2..3, 3..4].map(|layers| table.rows(layers)), [0..3, 3..4, 4..5, 5..6]);
        let rows = |range| table.within(range).into_iter().map(|chunk| (chunk.row, chunk.range)).collect::<Vec<_>>();
        assert_eq!(rows(0..1024), [(0, 0..512), (1, 512..1024)]);
        assert_eq!(rows(1024..2048), [(2, 0..276), (4, 512..976)]);
        assert_eq!(rows(2048..3072), [(5, 0..512), (5, 512..1024)]);
        let sums = [1e16, 1.0, -1e16, 0.0, 5.0, 7.0];
        assert_eq!(table.fold(&sums, 1), [(1e16 + 1.0) - 1e16, 0.0, 5.0, 7.0]);

        let whole = SumTable::new(&tensors, 1, 4096);
        assert_eq!((whole.layers(), whole.row_count(), whole.within(0..4096).len()), (1, 1, 6));
        assert_eq!(SumTable::new(&tensors, 1, 1024).row_count(), 6);
        assert_eq!(SumTable::new(&[], 1, 0).fold(&[0.0], 1), [0.0]);
    }

    #[test]
    #[should_panic(expected = "cuts the chunk")]
    fn sum_table_within_refuses_a_range_that_cuts_a_chunk() {
        SumTable::new(&[0..1024], 1, 256).within(0..256);
    }
}
