//! ONNX Runtime's vector halving, distance doubling: at every level of the tree two ranks halve their current range, and each combines one
//! half and continues with it; then they exchange the results. Vectors may be divided among the ranks of a node, each of which processes
//! its shard in this way.
//!
//! Intermediate results are rounded to the dtype. Where squared norms of `f64` overflow, a pair is combined by the exact path of the Gram
//! form, which scales large vectors. The number of vectors must be a power of two, which the caller has checked.

use std::ops::Range;

use gradsync_device::math::adasum::{self, Criterion, Pair};

use super::gram::for_tensors;
use super::{AdasumReport, Granularity, OPERATION};
use crate::buffer::{BufferParts, Scratch};
use crate::comm::{Collectives, Communicator, ReduceOp};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cpu;
use crate::memory::HostBuffer;
use crate::plan::chunks::SumTable;
use crate::plan::{segments, tree};
use crate::slice::{Slice, SliceMut};

/// Replaces the arena by the Adasum of all ranks' arenas.
pub(super) fn in_place(
    comm: &dyn Communicator,
    parts: BufferParts<'_>,
    granularity: Granularity,
) -> Result<AdasumReport> {
    let BufferParts { arena, tensors, scratch } = parts;
    HostTree::new(comm, None, tensors, granularity, 0..arena.len()).run(arena, scratch)?;
    Ok(AdasumReport::of_tree())
}

/// One reduction.
pub(super) struct HostTree<'a> {
    /// The ranks with the vectors, one rank per vector.
    across: &'a dyn Communicator,
    /// The ranks with the other shards of the vectors, if they are divided: the same number of ranks for every vector.
    node: Option<&'a dyn Communicator>,
    /// The table of products of all layers in the shards that the ranks have at the last level.
    table: SumTable,
    /// The begin of this rank's range in the arena of the table.
    begin: usize,
    /// The tensors of this rank's range: each is a layer, or all together are one.
    tensors: Vec<Range<usize>>,
}

impl<'a> HostTree<'a> {
    /// A reduction of the vectors of `across`, or where `node` has the ranks with their other shards, of the elements in `range` of an arena
    /// with these tensors.
    pub(super) fn new(
        across: &'a dyn Communicator,
        node: Option<&'a dyn Communicator>,
        tensors: &[Range<usize>],
        granularity: Granularity,
        range: Range<usize>,
    ) -> Self {
        let table = granularity.table(tensors, range.len() / across.world_size());
        Self { across, node, table, begin: range.start, tensors: segments::clip(tensors, range) }
    }

    /// Allocates the memory for reductions of vectors of `len` elements in advance.
    #[cfg(feature = "cuda")]
    pub(super) fn prepare(scratch: &mut Scratch, dtype: DType, len: usize) -> Result<()> {
        let halves = Self::halves(scratch, dtype, len)?;
        scratch.give(halves);
        Ok(())
    }

    fn halves(scratch: &mut Scratch, dtype: DType, len: usize) -> Result<[HostBuffer; 2]> {
        let mut half = || scratch.take(OPERATION, dtype, len.div_ceil(2));
        Ok([half()?, half()?])
    }

    /// Replaces this rank's shard of its vector by its shard of the Adasum of all vectors.
    pub(super) fn run(&self, mut arena: SliceMut<'_>, scratch: &mut Scratch) -> Result<()> {
        let HostTree { across, table, begin, tensors, .. } = self;
        let [mut mine, mut theirs] = Self::halves(scratch, arena.dtype(), arena.len())?;
        let steps = tree::steps(across.rank(), across.world_size(), arena.len());
        let criterion = if arena.dtype() == DType::F64 { Criterion::Overflow } else { Criterion::Narrow };

        for step in &steps {
            let kept = 0..step.keep.len();
            let theirs = &mut theirs.as_mut_slice().range_mut(kept.clone());
            let given = arena.as_slice().range(step.give.clone());
            across.send_recv(given, step.peer, theirs.reborrow(), step.peer)?;
            let mut mine = mine.as_mut_slice().range_mut(kept);
            cpu::cast(mine.reborrow(), arena.as_slice().range(step.keep.clone()))?;

            let (left, right) =
                if step.is_left { (mine.as_slice(), theirs.as_slice()) } else { (theirs.as_slice(), mine.as_slice()) };
            let mut sums = vec![0.0; table.row_count() * adasum::products(2)];
            cpu::add_gram(&mut sums, &[left, right], &table.within(begin + step.keep.start..begin + step.keep.end));
            self.sum(step.group.len(), &mut sums)?;
            let sums = table.fold(&sums, adasum::products(2));
            let cpu::Coefficients { weights, cancelled } = cpu::coefficients_by(&sums, 2, |_| criterion)?;
            let weights = for_tensors(&weights, 2, tensors.len());
            let parts = segments::clip(tensors, step.keep.clone());
            let mut kept = arena.reborrow().range_mut(step.keep.clone());
            cpu::combine(kept.reborrow(), &[left, right], &weights, &parts)?;
            if cancelled.contains(&true) {
                let trees = self.scaled(step, &[left, right], &sums, cancelled)?;
                let trees = if table.layers() == tensors.len() { trees } else { trees.repeated(tensors.len()) };
                cpu::tree_combine(kept, &[left, right], &parts, &trees, 1.0)?;
            }
        }
        for step in steps.iter().rev() {
            let mut kept = mine.as_mut_slice().range_mut(0..step.keep.len());
            cpu::cast(kept.reborrow(), arena.as_slice().range(step.keep.clone()))?;
            let given = arena.reborrow().range_mut(step.give.clone());
            across.send_recv(kept.as_slice(), step.peer, given, step.peer)?;
        }
        scratch.give([mine, theirs]);
        Ok(())
    }

    /// Computes the coefficients of the layers whose squared norms have overflowed, as trees of one pair, from the two vectors of a step and
    /// their products over all ranks of its group. These ranks have the same products, and all call this or none.
    fn scaled(
        &self,
        step: &tree::HalvingStep,
        vectors: &[Slice<'_>],
        products: &[f64],
        overflowed: Vec<bool>,
    ) -> Result<cpu::Trees> {
        let (table, pair) = (&self.table, Pair { begin: 0, middle: 1, end: 2 });
        let mut unused_weights = vec![1.0; 2 * overflowed.len()];
        let mut trees = cpu::Trees::precise(2, overflowed, products)?;
        let mut sums = vec![0.0; table.row_count() * trees.sums()];
        let chunks = table.within(self.begin + step.keep.start..self.begin + step.keep.end);
        cpu::add_tree_dots(&mut sums, vectors, &chunks, &trees, pair);
        self.sum(step.group.len(), &mut sums)?;
        trees.set_pair(pair, &table.fold(&sums, trees.sums()), &mut unused_weights)?;
        Ok(trees)
    }

    /// Adds `values` over the ranks of this node, and then over the aligned group of `group_size` vectors to which this rank's vector
    /// belongs, by recursive doubling.
    fn sum(&self, group_size: usize, values: &mut [f64]) -> Result<()> {
        if let Some(node) = self.node {
            node.all_reduce(&mut *values, ReduceOp::Sum)?;
        }
        let mut received = vec![0.0; values.len()];
        let mut distance = 1;
        while distance < group_size {
            let peer = self.across.rank() ^ distance;
            self.across.send_recv(&*values, peer, &mut received, peer)?;
            values.iter_mut().zip(&received).for_each(|(value, received)| *value += received);
            distance *= 2;
        }
        Ok(())
    }
}
