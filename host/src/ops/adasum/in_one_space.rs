//! The Gram form of Adasum where all ranks reach each other's vectors: every rank has its part of all of them to itself, reads
//! it where it lies, and leaves its part of the result in all of them.
//!
//! Nothing is exchanged but products, and nothing is copied. Sums are those of `gram`, in the same order: the bits are the same. Layers that
//! lie in one part as a whole need nothing of the other ranks: their result is written while they are in the caches.

use std::ops::Range;

use gradsync_device::math::adasum;

use super::AdasumReport;
use super::gram::{Gram, Solution};
use crate::error::Result;
use crate::kernels::cpu;
use crate::memory::SharedWindows;
use crate::slice::{Slice, SliceMut};

/// Bytes of all vectors' elements that are read and replaced before the next: they fit into the caches of most processors.
const TILE_BYTES: usize = 4 << 20;

/// Layers one behind the other.
#[derive(Debug, PartialEq)]
struct Tile {
    layers: Range<usize>,
    /// Whether all of each lies in this rank's part.
    are_whole: bool,
}

impl Gram<'_> {
    /// As [`run`](Self::run), for vectors that all ranks reach; `across` and `all` are those ranks. `are_whole` says of each layer whether all
    /// of it lies in this rank's part. `None`, and on every rank, if they do not reach each other's.
    pub(super) fn run_in(
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

    /// Replaces this rank's part of every vector by that of the result.
    fn replace(&self, mut parts: Vec<SliceMut<'_>>, are_whole: &[bool]) -> Result<AdasumReport> {
        let (vectors, size) = (parts.len(), parts[0].dtype().size_bytes());
        let count = adasum::products(vectors);
        let mut products = vec![0.0; self.layers.len() * count];
        // What is still to be replaced, of each tensor.
        let mut left: Vec<Range<usize>> = self.tensors.to_vec();
        for Tile { layers, are_whole } in tiles(self.layers, are_whole, TILE_BYTES / size / vectors) {
            let of_tile = &mut products[layers.start * count..layers.end * count];
            self.add_products(&views(&parts), layers.clone(), of_tile)?;
            if !are_whole {
                continue;
            }
            let cpu::Coefficients { weights, cancelled } =
                cpu::coefficients_by(of_tile, vectors, |layer| self.criteria[layers.start + layer])?;
            // Those that take the exact path wait for what all ranks make of them.
            let mut ready = self.tensors[layers.clone()].to_vec();
            let states = ready.iter_mut().zip(&mut left[layers]).zip(&cancelled);
            states.for_each(|((ready, left), &is_cancelled)| clear(if is_cancelled { ready } else { left }));
            cpu::combine_in_place(&mut operands(&mut parts), &weights, None, &ready)?;
        }
        let vectors = views(&parts);
        let chunk_of = |chunk: usize| vectors.iter().map(|vector| vector.range(self.cut.chunk(chunk))).collect();
        let Solution { report, of_tensors, trees } = self.solve(products, &chunk_of)?;
        cpu::combine_in_place(&mut operands(&mut parts), &of_tensors, trees.as_ref(), &left)?;
        Ok(report)
    }

    /// Adds the products of some layers: those of a chunk are added up before they are added to those of the chunks before.
    fn add_products(&self, vectors: &[Slice<'_>], layers: Range<usize>, products: &mut [f64]) -> Result<()> {
        let count = adasum::products(vectors.len());
        let pieces: Vec<(usize, Range<usize>)> = self.pieces(&self.layers[layers]).collect();
        let ranges: Vec<Range<usize>> = pieces.iter().map(|(_, range)| range.clone()).collect();
        for ((layer, _), sums) in pieces.into_iter().zip(cpu::gram(vectors, &ranges)?.chunks_exact(count)) {
            products[layer * count..].iter_mut().zip(sums).for_each(|(product, sum)| *product += sum);
        }
        Ok(())
    }

    /// What each chunk has of each of these layers, where it has anything.
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

/// Nothing of it, at its place.
fn clear(range: &mut Range<usize>) {
    range.end = range.start;
}

/// All layers in order: as many whole ones together as have so many elements, at least one, and between them those that are not whole.
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
