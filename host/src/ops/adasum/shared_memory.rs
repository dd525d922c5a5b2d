//! The Gram form of Adasum in shared memory: every rank processes its shard of all ranks' vectors in windows of their
//! memory, reads the operands in place, and writes its shard of the result into every vector.
//!
//! Only products are exchanged, and no vector is copied. Sums run in the same order as in `gram`, so the bits are the same. A layer that is
//! entirely in one shard needs no products of the other ranks: its result is written while the operands are in the caches.

use std::ops::Range;

use gradsync_device::math::adasum;

use super::AdasumReport;
use super::gram::{Gram, Shard, Solution};
use crate::error::Result;
use crate::kernels::cpu;
use crate::memory::SharedWindows;
use crate::plan::chunks::Chunk;
use crate::slice::{Slice, SliceMut};

/// The size of a tile in bytes, over all vectors. A tile is read and replaced before the next, and fits into the caches of most CPUs.
const TILE_BYTES: usize = 4 << 20;

/// Consecutive layers that are processed together.
#[derive(Debug, PartialEq)]
struct Tile {
    layers: Range<usize>,
    /// Whether each layer is entirely in this rank's shard.
    are_whole: bool,
}

impl Gram<'_> {
    /// Like [`run`](Self::run), on windows of shared memory; `across` and `all` are the ranks that share it. `are_whole` has a flag for
    /// each layer: whether it is one tensor, which is entirely in this rank's shard. `None`, on every rank, if the vectors are not in shared memory.
    pub(super) fn run_in_shared_memory(
        &self,
        ranks: &dyn SharedWindows,
        vector: SliceMut<'_>,
        are_whole: &[bool],
    ) -> Result<Option<AdasumReport>> {
        let mut report = None;
        ranks.with_windows(vector, &mut |windows| {
            report = Some(self.replace(windows, are_whole)?);
            Ok(())
        })?;
        Ok(report)
    }

    /// Replaces this rank's shard of every vector by its shard of the result.
    fn replace(&self, mut windows: Vec<SliceMut<'_>>, are_whole: &[bool]) -> Result<AdasumReport> {
        let (vectors, size) = (windows.len(), windows[0].dtype().size_bytes());
        let count = adasum::products(vectors);
        let Shard { division, table, criteria, tensors, .. } = self.shard;
        let mut products = self.shard.no_products();
        let chunks = self.shard.chunks_in(0..windows[0].len());
        // The ranges of each tensor that are not yet replaced.
        let mut left: Vec<Range<usize>> = tensors.clone();
        for Tile { layers, are_whole } in tiles(&lens(&chunks, are_whole.len()), are_whole, TILE_BYTES / size / vectors)
        {
            let of_tile = chunks.partition_point(|chunk| chunk.layer < layers.start)
                ..chunks.partition_point(|chunk| chunk.layer < layers.end);
            cpu::add_gram(&mut products, &views(&windows), &chunks[of_tile]);
            if !are_whole {
                continue;
            }
            let rows = table.rows(layers.clone());
            let cpu::Coefficients { weights, cancelled } =
                cpu::coefficients_by(&products[rows.start * count..rows.end * count], vectors, |layer| {
                    criteria[layers.start + layer]
                })?;
            // Layers on the exact path wait for the sums of all ranks.
            let mut ready = tensors[layers.clone()].to_vec();
            let states = ready.iter_mut().zip(&mut left[layers]).zip(&cancelled);
            states.for_each(|((ready, left), &is_cancelled)| truncate(if is_cancelled { ready } else { left }));
            cpu::combine_in_place(&mut operands(&mut windows), &weights, None, &ready)?;
        }
        let vectors = views(&windows);
        let vectors_of = |step: usize| vectors.iter().map(|vector| vector.range(division.of_shard(step))).collect();
        let Solution { report, of_tensors, trees } = self.solve(products, &vectors_of)?;
        cpu::combine_in_place(&mut operands(&mut windows), &of_tensors, trees.as_ref(), &left)?;
        Ok(report)
    }
}

/// The number of elements of each layer in a shard with these chunks.
fn lens(chunks: &[Chunk], layers: usize) -> Vec<usize> {
    let mut lens = vec![0; layers];
    chunks.iter().for_each(|chunk| lens[chunk.layer] += chunk.range.len());
    lens
}

fn views<'a>(windows: &'a [SliceMut<'_>]) -> Vec<Slice<'a>> {
    windows.iter().map(SliceMut::as_slice).collect()
}

fn operands<'a>(windows: &'a mut [SliceMut<'_>]) -> Vec<cpu::Operand<'a>> {
    windows.iter_mut().map(|window| cpu::Operand::Replaced(window.reborrow())).collect()
}

/// Truncates to empty, keeping the start.
fn truncate(range: &mut Range<usize>) {
    range.end = range.start;
}

/// Groups all layers, of these lengths, into tiles, in order: whole layers with at most `most` elements together, or a single one, and runs
/// of layers that are not whole.
fn tiles(lens: &[usize], are_whole: &[bool], most: usize) -> Vec<Tile> {
    let mut tiles: Vec<Tile> = Vec::new();
    let mut of_tile = 0;
    for (index, (&len, &is_whole)) in lens.iter().zip(are_whole).enumerate() {
        match tiles.last_mut() {
            Some(tile) if tile.are_whole == is_whole && (!is_whole || of_tile + len <= most) => {
                tile.layers.end = index + 1;
                of_tile += len;
            }
            _ => {
                tiles.push(Tile { layers: index..index + 1, are_whole: is_whole });
                of_tile = len;
            }
        }
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_hold_every_layer_once_and_no_more_than_fits() {
        let lens = [10, 20, 0, 10, 50, 1, 2];
        let tile = |layers, are_whole| Tile { layers, are_whole };
        let are_whole = [false, true, true, true, true, true, false];
        assert_eq!(
            tiles(&lens, &are_whole, 30),
            [tile(0..1, false), tile(1..4, true), tile(4..5, true), tile(5..6, true), tile(6..7, false)]
        );
        assert_eq!(tiles(&lens, &[false; 7], 1), [tile(0..7, false)]);
        assert_eq!(tiles(&lens, &[true; 7], 1000), [tile(0..7, true)]);
        assert_eq!(tiles(&lens, &[true; 7], 20).len(), 5, "an empty layer has room anywhere");
        assert_eq!(tiles(&[], &[], 30), []);
    }
}
