//! [`Algorithm::Tree`](crate::ops::Algorithm::Tree) without ranks: the bits of ranks that hold the tensors of one dtype in a buffer.
//!
//! Two things make the bits the same. Every node of the tree is rounded to the vectors' dtype. And sums over a pair's vectors are added as ranks add
//! them that have halved a buffer of these tensors between them: each over its part, and then over the ranks as a tree.

use std::ops::Range;

use gradsync_device::math::adasum::Pair;

use super::{PIECE_LEN, RankTensors, add, read};
use crate::buffer::GradientBuffer;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cpu::{self, CHUNK_LEN, Trees};
use crate::plan::layout::Layout;
use crate::plan::{segments, tree};
use crate::slice::Slice;

/// The buffer that every rank would have: the tensors of one dtype, in order.
pub(super) struct Arena<'a> {
    source: &'a dyn RankTensors,
    dtype: DType,
    tensors: Vec<usize>,
    layout: Layout,
}

impl<'a> Arena<'a> {
    /// One arena for each dtype.
    pub(super) fn of_all(source: &'a dyn RankTensors) -> Result<Vec<Self>> {
        let mut arenas = Vec::new();
        for dtype in DType::ALL {
            let all = (0..source.tensor_count()).map(|index| (index, source.tensor(index)));
            let of_dtype = all.filter(|(_, (own, _))| *own == dtype);
            let (tensors, lens): (Vec<usize>, Vec<usize>) = of_dtype.map(|(index, (_, len))| (index, len)).unzip();
            let layout = Layout::new(dtype, source.ranks(), &lens)?;
            arenas.push(Self { source, dtype, tensors, layout });
        }
        Ok(arenas)
    }

    /// The elements of those of some consecutive tensors that this arena has, with the gaps between them; `None` if it has none.
    pub(super) fn layer(&self, tensors: &Range<usize>) -> Option<Range<usize>> {
        let place = |tensor: usize| self.tensors.partition_point(|&own| own < tensor);
        let segments = self.layout.segments.get(place(tensors.start)..place(tensors.end))?;
        Some(segments.first()?.start..segments.last()?.end)
    }

    /// `[u·v, |u|², |v|²]` of the two sides of a pair in a layer.
    pub(super) fn sums(&self, layer: &Range<usize>, trees: &Trees, pair: Pair) -> Result<Vec<f64>> {
        let world_size = self.source.ranks();
        let level = (pair.middle - pair.begin).trailing_zeros() as usize;
        let mut sums = Vec::with_capacity(pair.end - pair.begin);
        for rank in pair.begin..pair.end {
            let keep = tree::steps(rank, world_size, self.layout.shard_len * world_size)[level].keep.clone();
            let part = keep.start.max(layer.start)..keep.end.min(layer.end);
            sums.push(self.sums_of_part(trees, pair, part)?);
        }
        while sums.len() > 1 {
            let add = |both: &[[f64; 3]]| std::array::from_fn(|sum| both[0][sum] + both[1][sum]);
            sums = sums.chunks_exact(2).map(add).collect();
        }
        Ok(sums.concat())
    }

    fn sums_of_part(&self, trees: &Trees, pair: Pair, part: Range<usize>) -> Result<[f64; 3]> {
        let mut sums = [0.0; 3];
        for begin in part.clone().step_by(PIECE_LEN) {
            let piece = begin..part.end.min(begin + PIECE_LEN);
            let chunks: Vec<_> = segments::chunks(&[0..piece.len()], CHUNK_LEN).map(|(_, chunk)| chunk).collect();
            let of_chunks = self
                .with_vectors(piece, |vectors| cpu::tree_dots(vectors, &chunks, &trees.repeated(chunks.len()), pair))?;
            of_chunks.chunks_exact(sums.len()).for_each(|of_chunk| add(&mut sums, of_chunk));
        }
        Ok(sums)
    }

    /// Runs `work` on every rank's elements of a piece of the arena.
    fn with_vectors<T>(&self, piece: Range<usize>, work: impl FnOnce(&[Slice<'_>]) -> Result<T>) -> Result<T> {
        let places = &self.layout.segments;
        let first = places.partition_point(|place| place.end <= piece.start);
        let inside =
            |place: &Range<usize>| piece.start.max(place.start) - place.start..piece.end.min(place.end) - place.start;
        if let Some(place) = places.get(first).filter(|place| place.start <= piece.start && piece.end <= place.end) {
            return read(self.source, self.tensors[first], inside(place), work)?;
        }
        let copy = || GradientBuffer::new(self.dtype, 1, [("piece", [piece.len()])]);
        let mut copies = (0..self.source.ranks()).map(|_| copy()).collect::<Result<Vec<_>>>()?;
        let of_piece =
            places[first..].iter().zip(&self.tensors[first..]).take_while(|(place, _)| place.start < piece.end);
        for (place, &tensor) in of_piece.filter(|(place, _)| !place.is_empty()) {
            let elements = inside(place);
            let begin = place.start + elements.start - piece.start;
            read(self.source, tensor, elements.clone(), |vectors| {
                for (copy, vector) in copies.iter_mut().zip(vectors) {
                    let to = copy.as_mut_slice().range_mut(begin..begin + elements.len());
                    to.as_bytes_mut().copy_from_slice(vector.as_bytes());
                }
            })?;
        }
        let vectors: Vec<Slice<'_>> = copies.iter().map(|copy| copy.tensor(0).data()).collect();
        work(&vectors)
    }
}
