//! Horovod's Adasum: vector halving and distance doubling over MPI, with plain loops in one thread a rank, as upstream has them for f32 and
//! f64. For f16 it has vector code, and no bf16; here every dtype gets the loops.
//!
//! At each level a rank exchanges half of what it holds, adds up three products for each tensor one element after the other in `f64`,
//! sums them over the pair's ranks by `MPI_Allreduce`, and forms the weighted sum. Neither vector instructions nor threads are asked for.

use std::ops::Range;

use gradsync::comm::mpi::rsmpi::collective::SystemOperation;
use gradsync::comm::mpi::rsmpi::topology::{Color, SimpleCommunicator};
use gradsync::comm::mpi::rsmpi::traits::*;
use gradsync::plan::segments::clip;
use gradsync::plan::tree::{Step, steps};
use gradsync::{Element, GradientBuffer, Slice, SliceMut};

use crate::perf::PerfError;
use crate::perf::host::collectives::{HostBaseline, fill_gradients, gradients};
use crate::perf::operation::Row;
use crate::perf::record::BaselineName;

pub(super) const NAME: BaselineName =
    BaselineName { column: "Horovod's loop", full: "Horovod's algorithm over plain MPI, loops of one thread a rank" };

pub(super) struct Horovod<'a> {
    world: &'a SimpleCommunicator,
    buffer: GradientBuffer,
    /// The steps, each with the communicator of the ranks that share its pair.
    steps: Vec<(Step, Option<SimpleCommunicator>)>,
    /// What the peer gave.
    theirs: GradientBuffer,
}

impl<'a> Horovod<'a> {
    /// For a power of two of ranks, all of which have to call it.
    pub(super) fn new(world: &'a SimpleCommunicator, row: &Row) -> Result<Self, PerfError> {
        let rank = world.rank() as usize;
        let mut buffer = gradients(row)?;
        fill_gradients(&mut buffer, row, rank);
        let with_group = |step: Step| {
            let group = world.split_by_color(Color::with_value(step.group.start as i32));
            (step, group)
        };
        let steps = steps(rank, row.ranks, buffer.len()).into_iter().map(with_group).collect();
        let theirs = GradientBuffer::new(row.types.to, 1, [("half", [buffer.len().div_ceil(2)])])?;
        Ok(Self { world, buffer, steps, theirs })
    }

    fn run(&mut self) {
        let size = self.buffer.dtype().size_bytes();
        let bytes = |range: &Range<usize>| range.start * size..range.end * size;
        let segments = self.buffer.segments().to_vec();
        for (step, group) in &self.steps {
            let given = &self.buffer.as_slice().as_bytes()[bytes(&step.give)];
            let received = &mut self.theirs.as_mut_slice().as_bytes_mut()[..step.keep.len() * size];
            super::exchange(self.world, (step.peer as i32, given), (step.peer as i32, received));
            let theirs = self.theirs.as_slice().range(0..step.keep.len());
            let parts = clip(&segments, step.keep.clone());
            let kept = self.buffer.as_mut_slice().range_mut(step.keep.clone());
            let sum = |products: &[f64], sums: &mut [f64]| match group {
                Some(group) => group.all_reduce_into(products, sums, SystemOperation::sum()),
                None => sums.copy_from_slice(products),
            };
            match (kept, theirs) {
                (SliceMut::F64(kept), Slice::F64(theirs)) => pair(kept, theirs, &parts, step.is_left, sum),
                (SliceMut::F32(kept), Slice::F32(theirs)) => pair(kept, theirs, &parts, step.is_left, sum),
                (SliceMut::F16(kept), Slice::F16(theirs)) => pair(kept, theirs, &parts, step.is_left, sum),
                (SliceMut::BF16(kept), Slice::BF16(theirs)) => pair(kept, theirs, &parts, step.is_left, sum),
                _ => unreachable!("both were made with one dtype"),
            }
        }
        for (step, _) in self.steps.iter().rev() {
            // Two halves, one behind the other: what is kept goes out from where it lies.
            let (keep, give) = (bytes(&step.keep), bytes(&step.give));
            let (low, high) = self.buffer.as_mut_slice().as_bytes_mut().split_at_mut(keep.start.max(give.start));
            let (kept, given) = match keep.start < give.start {
                true => (&low[keep], &mut high[..give.len()]),
                false => (&high[..keep.len()], &mut low[give]),
            };
            super::exchange(self.world, (step.peer as i32, kept), (step.peer as i32, given));
        }
    }
}

/// Combines what a rank holds with what its peer gave, tensor by tensor.
fn pair<T: Element>(
    mine: &mut [T],
    theirs: &[T],
    parts: &[Range<usize>],
    is_left: bool,
    sum: impl FnOnce(&[f64], &mut [f64]),
) {
    let mut products = vec![0.0; 3 * parts.len()];
    for (products, part) in products.chunks_exact_mut(3).zip(parts) {
        let (mut dot, mut own, mut other) = (0.0f64, 0.0f64, 0.0f64);
        for (mine, theirs) in mine[part.clone()].iter().zip(&theirs[part.clone()]) {
            let (mine, theirs) = (mine.to_f64(), theirs.to_f64());
            dot += mine * theirs;
            own += mine * mine;
            other += theirs * theirs;
        }
        // Ranks of a pair add up the same vectors' norms.
        products.copy_from_slice(&if is_left { [dot, own, other] } else { [dot, other, own] });
    }
    let mut sums = vec![0.0; products.len()];
    sum(&products, &mut sums);
    for (sums, part) in sums.chunks_exact(3).zip(parts) {
        let coefficient = |norm: f64| if norm > 1e-8 { 1.0 - sums[0] / (2.0 * norm) } else { 1.0 };
        let (left, right) = (coefficient(sums[1]), coefficient(sums[2]));
        let (own, other) = if is_left { (left, right) } else { (right, left) };
        for (mine, theirs) in mine[part.clone()].iter_mut().zip(&theirs[part.clone()]) {
            *mine = T::from_f64(own * mine.to_f64() + other * theirs.to_f64());
        }
    }
}

impl HostBaseline for Horovod<'_> {
    fn call(&mut self, _: usize) -> Result<(), PerfError> {
        self.run();
        Ok(())
    }
}
