//! The Gram form of Adasum where all ranks reach each other's vectors: every rank has its part of all of them to itself, reads
//! it where it lies, and leaves its part of the result in all of them.
//!
//! Nothing is exchanged but products, and nothing is copied. Sums are those of `gram`, in the same order: the bits are the same.

use std::ops::Range;

use gradsync_device::math::adasum;

use super::AdasumReport;
use super::gram::{Gram, Solution};
use crate::comm::AddressSpace;
use crate::error::Result;
use crate::kernels::cpu;
use crate::plan::segments;
use crate::slice::{Slice, SliceMut};

impl Gram<'_> {
    /// As [`run`](Self::run), for vectors that all ranks reach; `across` and `all` are those ranks. `None`, and on every rank, if they do not.
    pub(super) fn run_in(&self, ranks: &dyn AddressSpace, vector: SliceMut<'_>) -> Result<Option<AdasumReport>> {
        let mut report = None;
        ranks.lend_windows(vector, &mut |parts| {
            report = Some(self.replace(parts)?);
            Ok(())
        })?;
        Ok(report)
    }

    /// Replaces this rank's part of every vector by that of the result.
    fn replace(&self, mut parts: Vec<SliceMut<'_>>) -> Result<AdasumReport> {
        let vectors: Vec<Slice<'_>> = parts.iter().map(SliceMut::as_slice).collect();
        let chunk_of = |chunk: usize| vectors.iter().map(|vector| vector.range(self.cut.chunk(chunk))).collect();
        let Solution { report, of_tensors, trees } = self.solve(self.products(&vectors)?, &chunk_of)?;
        let mut operands: Vec<_> = parts.iter_mut().map(|part| cpu::Operand::Replaced(part.reborrow())).collect();
        cpu::combine_in_place(&mut operands, &of_tensors, trees.as_ref(), self.tensors)?;
        self.fill_gaps(&mut parts);
        Ok(report)
    }

    /// The products of each layer: those of a chunk are added up before they are added to those of the chunks before.
    fn products(&self, vectors: &[Slice<'_>]) -> Result<Vec<f64>> {
        let count = adasum::products(vectors.len());
        let pieces: Vec<(usize, Range<usize>)> = self.pieces().collect();
        let ranges: Vec<Range<usize>> = pieces.iter().map(|(_, range)| range.clone()).collect();
        let mut products = vec![0.0; self.layers.len() * count];
        for ((layer, _), sums) in pieces.into_iter().zip(cpu::gram(vectors, &ranges)?.chunks_exact(count)) {
            products[layer * count..].iter_mut().zip(sums).for_each(|(product, sum)| *product += sum);
        }
        Ok(products)
    }

    /// What each chunk has of each layer, where it has anything.
    fn pieces(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        (0..self.cut.chunks()).flat_map(move |chunk| {
            let chunk = self.cut.chunk(chunk);
            let within = move |layer: &Range<usize>| layer.start.max(chunk.start)..layer.end.min(chunk.end);
            self.layers.iter().map(within).enumerate().filter(|(_, piece)| !piece.is_empty())
        })
    }

    /// What lies between tensors is on every rank what it was on the one whose part it is.
    fn fill_gaps(&self, parts: &mut [SliceMut<'_>]) {
        let len = parts[0].len();
        let (before, rest) = parts.split_at_mut(self.across.rank());
        let Some((own, after)) = rest.split_first_mut() else { return };
        for gap in segments::gaps(self.tensors, len) {
            let own = own.as_slice().range(gap.clone()).as_bytes();
            for other in before.iter_mut().chain(after.iter_mut()) {
                other.reborrow().range_mut(gap.clone()).as_bytes_mut().copy_from_slice(own);
            }
        }
    }
}
