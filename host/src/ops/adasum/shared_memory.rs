//! The Gram form of Adasum in shared memory: every rank works alone on its window of all ranks' vectors, reads the operands
//! where they lie, and writes its part of the result into every vector.
//!
//! Only products are exchanged, and no vector is copied. Sums run in the same order as in `gram`, so the bits are the same. A layer that
//! lies in one window needs no products of the other ranks: its result is written while the operands are in the caches.

use std::ops::Range;

use gradsync_device::math::adasum;

use super::AdasumReport;
use super::gram::{Gram, Solution};
use crate::error::Result;
use crate::kernels::cpu;
use crate::memory::SharedWindows;
use crate::slice::{Slice, SliceMut};

/// Bytes of a tile, of all vectors together: a tile is read and replaced before the next, and fits into the caches of most processors.
const TILE_BYTES: usize = 4 << 20;

/// Consecutive layers that are processed together.
#[derive(Debug, PartialEq)]
struct Tile {
    layers: Range<usize>,
    /// Whether each of them lies in this rank's window as a whole.
    are_whole: bool,
}

impl Gram<'_> {
    /// Like [`run`](Self::run), on windows of shared memory; `across` and `all` are the ranks that share it. `are_whole` says for each layer whether
    /// it lies in this rank's window as a whole. `None`, on every rank, if the vectors are not in shared memory.
    pub(super) fn run_in_shared_memory(
        &self,
        ranks: &dyn SharedWindows,
        vector: SliceMut<'_>,
        are_whole: &[bool],
    ) -> Result<Option<AdasumReport>> {
        let mut report = None;
        ranks.with_windows(vector, &mut |parts| {
            report = Some(self.replace(parts, are_whole)?);
            Ok(())
        })?;
        Ok(report)
    }

    /// Replaces this rank's window of every vector by its window of the result.
    fn replace(&self, mut parts: Vec<SliceMut<'_>>, are_whole: &[bool]) -> Result<AdasumReport> {
        let (vectors, size) = (parts.len(), parts[0].dtype().size_bytes());
        let count = adasum::products(vectors);
        let mut products = vec![0.0; self.layers.len() * count];
        // The elements of each tensor that are still to be replaced.
        let mut left: Vec<Range<usize>> = self.tensors.to_vec();
        for Tile { layers, are_whole } in tiles(self.layers, are_whole, TILE_BYTES / size / vectors) {
            let of_tile = &mut products[layers.start * count..layers.end * count];
            self.add_products(&views(&parts), layers.clone(), of_tile)?;
            if !are_whole {
                continue;
            }
            let cpu::Coefficients { weights, cancelled } =
                cpu::coefficients_by(of_tile, vectors, |layer| self.criteria[layers.start + layer])?;
            // Layers on the exact path wait for the sums of all ranks.
            let mut ready = self.tensors[layers.clone()].to_vec();
            let states = ready.iter_mut().zip(&mut left[layers]).zip(&cancelled);
            states.for_each(|((ready, left), &is_cancelled)| truncate(if is_cancelled { ready } else { left }));
            cpu::combine_in_place(&mut operands(&mut parts), &weights, None, &ready)?;
        }
        let vectors = views(&parts);
        let chunk_of = |chunk: usize| vectors.iter().map(|vector| vector.range(self.cut.chunk(chunk))).collect();
        let Solution { report, of_tensors, trees } = self.solve(products, &chunk_of)?;
        cpu::combine_in_place(&mut operands(&mut parts), &of_tensors, trees.as_ref(), &left)?;
        Ok(report)
    }

    /// Adds the products of some layers: each chunk's products are summed first, and then added to the sums of the earlier chunks.
    fn add_products(&self, vectors: &[Slice<'_>], layers: Range<usize>, products: &mut [f64]) -> Result<()> {
        let count = adasum::products(vectors.len());
        let pieces: Vec<(usize, Range<usize>)> = self.pieces(&self.layers[layers]).collect();
        let ranges: Vec<Range<usize>> = pieces.iter().map(|(_, range)| range.clone()).collect();
        for ((layer, _), sums) in pieces.into_iter().zip(cpu::gram(vectors, &ranges)?.chunks_exact(count)) {
            products[layer * count..].iter_mut().zip(sums).for_each(|(product, sum)| *product += sum);
        }
        Ok(())
    }

    /// The intersections of each chunk with each of these layers, without the empty ones.
    fn pieces<'l>(&'l self, layers: &'l [Range<usize>]) -> impl Iterator<Item = (usize, Range<usize>)> + 'l {
        (0..self.cut.chunks()).flat_map(move |chunk| {
            let chunk = self.cut.chunk(chunk);
            let within = move |layer: &Range<usize>| layer.start.max(chunk.start)..layer.end.min(chunk.end);
            layers.iter().map(within).enumerate().filter(|(_, piece)| !piece.is_empty())
        })
    }
}

fn views<'a>(parts: &'a [SliceMut<'_>]) -> Vec<Slice<'a>> {
    parts.iter().map(SliceMut::as_slice).collect()
}

fn operands<'a>(parts: &'a mut [SliceMut<'_>]) -> Vec<cpu::Operand<'a>> {
    parts.iter_mut().map(|part| cpu::Operand::Replaced(part.reborrow())).collect()
}

/// Truncates to empty, keeping the start.
fn truncate(range: &mut Range<usize>) {
    range.end = range.start;
}

/// Groups all layers into tiles, in order: whole layers with at most `most` elements together, or a single one, and runs of layers that are not whole.
fn tiles(layers: &[Range<usize>], are_whole: &[bool], most: usize) -> Vec<Tile> {
    let mut tiles: Vec<Tile> = Vec::new();
    let mut len = 0;
    for (index, (layer, &is_whole)) in layers.iter().zip(are_whole).enumerate() {
        match tiles.last_mut() {
            Some(tile) if tile.are_whole == is_whole && (!is_whole || len + layer.len() <= most) => {
                tile.layers.end = index + 1;
                len += layer.len();
            }
            _ => {
                tiles.push(Tile { layers: index..index + 1, are_whole: is_whole });
                len = layer.len();
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
        let layers = [0..10, 10..30, 30..30, 32..42, 42..92, 92..93, 93..95];
        let tile = |layers, are_whole| Tile { layers, are_whole };
        let are_whole = [false, true, true, true, true, true, false];
        assert_eq!(
            tiles(&layers, &are_whole, 30),
            [tile(0..1, false), tile(1..4, true), tile(4..5, true), tile(5..6, true), tile(6..7, false)]
        );
        assert_eq!(tiles(&layers, &[false; 7], 1), [tile(0..7, false)]);
        assert_eq!(tiles(&layers, &[true; 7], 1000), [tile(0..7, true)]);
        assert_eq!(tiles(&layers, &[true; 7], 20).len(), 5, "an empty layer has room anywhere");
        assert_eq!(tiles(&[], &[], 30), []);
    }
}
