//! Adasum's tree as ranks run it that hold a vector each, `ops`' `Algorithm::Tree`: the same numbers, to the bit, from files.
//!
//! Two things make them the same. Every node of the tree is rounded to the vectors' dtype; and the sums over a pair's vectors are added up as
//! ranks add them that have halved a buffer of those tensors between them: each over its part, and then over the ranks as a tree.

use std::ops::Range;

use gradsync::kernels::cpu::{self, CHUNK_LEN, Trees};
use gradsync::plan::layout::Layout;
use gradsync::plan::{segments, tree};
use gradsync::{DType, GradientBuffer, Slice};
use gradsync_device::math::adasum::Pair;

use super::PIECE_LEN;
use crate::checkpoint::Checkpoints;

/// The buffer that every rank would have: the tensors of one dtype, in the files' order.
pub(super) struct Arena<'a> {
    ranks: &'a Checkpoints,
    dtype: DType,
    tensors: Vec<usize>,
    layout: Layout,
}

impl<'a> Arena<'a> {
    /// One for each dtype.
    pub(super) fn of_all(ranks: &'a Checkpoints) -> gradsync::Result<Vec<Self>> {
        let mut arenas = Vec::new();
        for dtype in DType::ALL {
            let of_dtype = ranks.tensors.iter().enumerate().filter(|(_, tensor)| tensor.dtype == dtype);
            let (tensors, lens): (Vec<usize>, Vec<usize>) = of_dtype.map(|(index, tensor)| (index, tensor.len)).unzip();
            let layout = Layout::new(dtype, ranks.len(), &lens)?;
            arenas.push(Self { ranks, dtype, tensors, layout });
        }
        Ok(arenas)
    }

    /// The layers that these tensors are here, which follow each other in the files: one, unless none of them is here.
    pub(super) fn layer(&self, tensors: &Range<usize>) -> Option<Range<usize>> {
        let place = |tensor: usize| self.tensors.partition_point(|&own| own < tensor);
        match self.layout.segments.get(place(tensors.start)..place(tensors.end))? {
            [] => None,
            [tensor] => Some(tensor.clone()),
            // With all that lies between them.
            [first, .., last] => Some(first.start..last.end),
        }
    }

    /// `[u·v, |u|², |v|²]` of the two sides of a pair in a layer. `read` is told how many bytes were.
    pub(super) fn sums(
        &self,
        layer: &Range<usize>,
        trees: &Trees,
        pair: Pair,
        read: impl Fn(usize),
    ) -> gradsync::Result<Vec<f64>> {
        let world_size = self.ranks.len();
        let level = (pair.middle - pair.begin).trailing_zeros() as usize;
        let mut sums = Vec::with_capacity(pair.end - pair.begin);
        for rank in pair.begin..pair.end {
            let keep = tree::steps(rank, world_size, self.layout.shard_len * world_size)[level].keep.clone();
            let part = keep.start.max(layer.start)..keep.end.min(layer.end);
            sums.push(self.sums_of_part(trees, pair, part)?);
        }
        read((pair.end - pair.begin) * layer.len() * self.dtype.size_bytes());
        while sums.len() > 1 {
            let add = |both: &[[f64; 3]]| std::array::from_fn(|sum| both[0][sum] + both[1][sum]);
            sums = sums.chunks_exact(2).map(add).collect();
        }
        Ok(sums.concat())
    }

    fn sums_of_part(&self, trees: &Trees, pair: Pair, part: Range<usize>) -> gradsync::Result<[f64; 3]> {
        let mut sums = [0.0; 3];
        for begin in part.clone().step_by(PIECE_LEN) {
            let piece = begin..part.end.min(begin + PIECE_LEN);
            let chunks: Vec<_> = segments::chunks(&[0..piece.len()], CHUNK_LEN).map(|(_, chunk)| chunk).collect();
            let of_chunks = self
                .with_vectors(piece, |vectors| cpu::tree_dots(vectors, &chunks, &trees.repeated(chunks.len()), pair))?;
            for of_chunk in of_chunks.chunks_exact(sums.len()) {
                sums.iter_mut().zip(of_chunk).for_each(|(sum, of_chunk)| *sum += of_chunk);
            }
        }
        Ok(sums)
    }

    /// Gives `work` every rank's elements of a piece of the buffer.
    fn with_vectors<T>(
        &self,
        piece: Range<usize>,
        work: impl FnOnce(&[Slice<'_>]) -> gradsync::Result<T>,
    ) -> gradsync::Result<T> {
        let places = &self.layout.segments;
        let first = places.partition_point(|place| place.end <= piece.start);
        let mut copies: Vec<Option<GradientBuffer>> = (0..self.ranks.len()).map(|_| None).collect();
        let inside = |place: &Range<usize>, piece: &Range<usize>| {
            piece.start.max(place.start) - place.start..piece.end.min(place.end) - place.start
        };
        if let Some(place) = places.get(first).filter(|place| place.start <= piece.start && piece.end <= place.end) {
            let (tensor, elements) = (self.tensors[first], inside(place, &piece));
            let done = work(&self.ranks.elements(tensor, elements.clone(), &mut copies)?);
            self.ranks.release(tensor, elements);
            return done;
        }
        for copy in &mut copies {
            *copy = Some(GradientBuffer::new(self.dtype, 1, [("piece", [piece.len()])])?);
        }
        let of_piece =
            places[first..].iter().zip(&self.tensors[first..]).take_while(|(place, _)| place.start < piece.end);
        for (place, &tensor) in of_piece.filter(|(place, _)| !place.is_empty()) {
            let (elements, size) = (inside(place, &piece), self.dtype.size_bytes());
            let at = (place.start + elements.start - piece.start) * size;
            for (copy, bytes) in copies.iter_mut().flatten().zip(self.ranks.bytes(tensor, elements.clone())) {
                copy.tensor_mut(0).into_data().as_bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
            }
            self.ranks.release(tensor, elements);
        }
        let vectors: Vec<Slice<'_>> = copies.iter().flatten().map(|copy| copy.tensor(0).data()).collect();
        work(&vectors)
    }
}
