//! [`Bucket`]: the memory of gradients that are reduced together.

use super::memory::ReducerMemory;
use super::parameter::Parameter;
use crate::buffer::GradientBuffer;
use crate::comm::{Collectives, Communicator, ReduceOp};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::KernelMemory;
use crate::memory::{Memory, TensorView};
use crate::ops::{Adasum, reduce_in_windows};
use crate::plan::buckets;
use crate::train::Reduction;

/// The position of a gradient: bucket, and tensor in the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GradientPlace {
    pub(super) bucket: usize,
    pub(super) tensor: usize,
}

/// The dtypes that the gradients of one bucket share: the dtype on the wire, and the dtype of sums over micro-batches. The sum of a
/// parameter must not depend on the other parameters of its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BucketKind {
    pub(super) dtype: DType,
    pub(super) sum_dtype: DType,
}

impl BucketKind {
    /// The kind of gradients of dtype `gradient` that are sent in `dtype`: sums are `f32`, or `f64` for `f64`.
    pub(super) fn new(gradient: DType, dtype: DType) -> Self {
        let sum_dtype = if gradient == DType::F64 { DType::F64 } else { DType::F32 };
        Self { dtype, sum_dtype }
    }
}

/// A reduction that the ranks have prepared for one bucket.
#[derive(Debug)]
enum BucketReduction<'c, M: ReducerMemory> {
    /// By the transport.
    Transport(&'c dyn Communicator<M>, ReduceOp),
    Ordered(M::Ordered<'c>),
    Adasum(Adasum<'c, M>),
}

/// Gradients that are reduced together, with their memory and their reduction.
#[derive(Debug)]
pub(super) struct Bucket<'c, M: ReducerMemory> {
    kind: BucketKind,
    /// The numbers of the parameters.
    pub(super) members: Vec<usize>,
    /// The buffer that is reduced; with one rank, none until it is needed.
    pub(super) buffer: Option<GradientBuffer<M>>,
    /// The sums over micro-batches, where their dtype is wider than the buffer's.
    sums: Option<GradientBuffer<M>>,
    reduction: Option<BucketReduction<'c, M>>,
    check: Option<M::Check>,
}

impl<'c, M: ReducerMemory> Bucket<'c, M> {
    pub(super) fn new(plan: buckets::Bucket<BucketKind>) -> Self {
        Self { kind: plan.kind, members: plan.members, buffer: None, sums: None, reduction: None, check: None }
    }

    /// Allocates a buffer of these gradients, if there is none: one that is reduced, or sums.
    fn fill<'b>(
        buffer: &'b mut Option<GradientBuffer<M>>,
        (lanes, world_size): (&M::Lanes, usize),
        parameters: &[Parameter],
        (members, dtype, is_reduced): (&[usize], DType, bool),
    ) -> Result<&'b mut GradientBuffer<M>> {
        if buffer.is_none() {
            let mut tensors =
                members.iter().map(|&member| (&parameters[member].name[..], &parameters[member].shape[..]));
            *buffer = Some(M::bucket(lanes, dtype, world_size, &mut tensors, is_reduced)?);
            // The lane of reductions clears the buffer.
            M::join(lanes)?;
        }
        Ok(buffer.as_mut().expect("just allocated"))
    }

    /// The buffer that is reduced; allocates it if there is none.
    pub(super) fn allocated(
        &mut self,
        (lanes, world_size): (&M::Lanes, usize),
        parameters: &[Parameter],
    ) -> Result<&mut GradientBuffer<M>> {
        Self::fill(&mut self.buffer, (lanes, world_size), parameters, (&self.members, self.kind.dtype, true))
    }

    /// Adds gradients to the sums over micro-batches; the first gradient of each parameter replaces the sum. Tensors ascend.
    pub(super) fn accumulate(
        &mut self,
        (lanes, world_size): (&M::Lanes, usize),
        parameters: &[Parameter],
        gradients: &[(usize, bool, M::Slice<'_>)],
    ) -> Result<()> {
        let BucketKind { dtype, sum_dtype } = self.kind;
        let is_reduced = sum_dtype == dtype;
        let sums = if is_reduced { &mut self.buffer } else { &mut self.sums };
        let buffer = Self::fill(sums, (lanes, world_size), parameters, (&self.members, sum_dtype, is_reduced))?;
        let ranges: Vec<_> = gradients.iter().map(|(tensor, ..)| buffer.segments()[*tensor].clone()).collect();
        let (mut first, mut first_sources, mut later, mut later_sources) = (vec![], vec![], vec![], vec![]);
        for (sum, (_, is_first, gradient)) in
            M::ranges_mut(M::arena_mut(lanes, buffer), &ranges).into_iter().zip(gradients)
        {
            let (sums, sources) =
                if *is_first { (&mut first, &mut first_sources) } else { (&mut later, &mut later_sources) };
            sums.push(sum);
            sources.push(*gradient);
        }
        M::cast_all(&mut first, &first_sources)?;
        M::accumulate_all(&mut later, &later_sources)
    }

    /// Moves sums over micro-batches into the buffer that is reduced, each rounded once.
    pub(super) fn take_sums(
        &mut self,
        (lanes, world_size): (&M::Lanes, usize),
        parameters: &[Parameter],
        tensors: &[usize],
    ) -> Result<()> {
        let Some(sums) = self.sums.take() else { return Ok(()) };
        let outcome = self.allocated((lanes, world_size), parameters).and_then(|buffer| {
            let segments = |buffer: &GradientBuffer<M>| -> Vec<_> {
                tensors.iter().map(|&tensor| buffer.segments()[tensor].clone()).collect()
            };
            let sources: Vec<_> =
                segments(&sums).into_iter().map(|range| M::range(M::arena(lanes, &sums), range)).collect();
            let ranges = segments(buffer);
            M::cast_all(&mut M::ranges_mut(M::arena_mut(lanes, buffer), &ranges), &sources)
        });
        self.sums = Some(sums);
        outcome
    }

    /// Copies gradients into the buffer that is reduced; returns the first parameter whose gradient is not finite there, where the memory
    /// knows at once.
    pub(super) fn pack(&mut self, lanes: &M::Lanes, gradients: &[(usize, M::Slice<'_>)]) -> Result<Option<usize>> {
        let buffer = self.buffer.as_mut().expect("allocated where there are several ranks");
        let offsets: Vec<usize> = gradients.iter().map(|(tensor, _)| buffer.segments()[*tensor].start).collect();
        let sources: Vec<_> = gradients.iter().map(|(_, gradient)| *gradient).collect();
        let found = M::pack_checked(M::arena_mut(lanes, buffer), &offsets, &sources)?;
        Ok(found.map(|index| self.members[gradients[index].0]))
    }

    /// The first parameter of these tensors whose gradient in the buffer is not finite; on a GPU it waits for the queue.
    pub(super) fn find_non_finite(&self, lanes: &M::Lanes, tensors: &[usize]) -> Result<Option<usize>> {
        let Some(buffer) = &self.buffer else { return Ok(None) };
        for &tensor in tensors {
            if !M::all_finite(M::range(M::arena(lanes, buffer), buffer.segments()[tensor].clone()))? {
                return Ok(Some(self.members[tensor]));
            }
        }
        Ok(None)
    }

    /// Prepares the reduction, with all ranks, and the check for gradients that are not finite.
    pub(super) fn prepare(
        &mut self,
        comm: &'c dyn Communicator<M>,
        lanes: &M::Lanes,
        (reduction, ordered): (Reduction, bool),
        is_checked: bool,
    ) -> Result<()> {
        let buffer = self.buffer.as_ref().expect("allocated");
        let by_op = |op| {
            let ordered = if ordered { M::ordered(comm, buffer, op)? } else { None };
            Ok(ordered.map_or(BucketReduction::Transport(comm, op), BucketReduction::Ordered))
        };
        self.reduction = Some(match reduction {
            Reduction::Mean => by_op(ReduceOp::Mean),
            Reduction::Sum => by_op(ReduceOp::Sum),
            Reduction::Adasum(options) => Adasum::new(comm, buffer, options).map(BucketReduction::Adasum),
        }?);
        self.check = if is_checked { M::check_of(lanes, buffer)? } else { None };
        Ok(())
    }

    /// Replaces every rank's buffer by the reduction, in the step of this number; a mean has these weights of the ranks, or none.
    pub(super) fn reduce(&mut self, lanes: &M::Lanes, step: u64, weights: &[f64]) -> Result<()> {
        let buffer = self.buffer.as_mut().expect("allocated where there are several ranks");
        if let Some(check) = &mut self.check {
            M::begin_check(check, lanes, buffer, step)?;
        }
        match self.reduction.as_mut().expect("prepared") {
            BucketReduction::Adasum(adasum) => adasum.all_reduce(buffer),
            BucketReduction::Ordered(ordered) => M::reduce_ordered(ordered, buffer, weights),
            BucketReduction::Transport(comm, op) => {
                if reduce_in_windows(*comm, buffer, *op, weights)? {
                    return Ok(());
                }
                match weights {
                    [] => comm.all_reduce(buffer.as_mut_slice(), *op),
                    weights => comm.all_reduce_weighted(buffer.as_mut_slice(), weights),
                }
            }
        }
    }

    /// The step and the parameter of the first gradient that a check has found since the last call; with `waits`, all checks are over then.
    pub(super) fn end_check(&mut self, lanes: &M::Lanes, waits: bool) -> Result<Option<(u64, usize)>> {
        let Some(check) = &mut self.check else { return Ok(None) };
        Ok(M::end_check(check, lanes, waits)?.map(|(step, tensor)| (step, self.members[tensor])))
    }

    /// The size of the buffer in bytes, with the gaps between its tensors.
    pub(super) fn bytes(&self) -> usize {
        self.buffer.as_ref().map_or(0, |buffer| buffer.table().arena_len() * buffer.dtype().size_bytes())
    }

    /// Sets gradients to zero. Tensors ascend.
    pub(super) fn clear(&mut self, lanes: &M::Lanes, tensors: &[usize]) -> Result<()> {
        let Some(buffer) = self.buffer.as_mut().filter(|_| !tensors.is_empty()) else { return Ok(()) };
        let ranges: Vec<_> = tensors.iter().map(|&tensor| buffer.segments()[tensor].clone()).collect();
        M::zero_all(&mut M::ranges_mut(M::arena_mut(lanes, buffer), &ranges))
    }

    /// A gradient in place in the bucket.
    pub(super) fn gradient<'a>(&'a self, lanes: &'a M::Lanes, tensor: usize) -> Option<TensorView<'a, M>> {
        let buffer = self.buffer.as_ref()?;
        let data = <M as Memory>::range(M::arena(lanes, buffer), buffer.segments()[tensor].clone());
        TensorView::of(data, buffer.shape(tensor).into()).ok()
    }
}

/// Copies gradients from a bucket to their destinations.
pub(super) fn unpack<M: ReducerMemory>(
    lanes: &M::Lanes,
    buffer: &GradientBuffer<M>,
    destinations: &mut [M::SliceMut<'_>],
    tensors: &[usize],
) -> Result<()> {
    let offsets: Vec<usize> = tensors.iter().map(|&tensor| buffer.segments()[tensor].start).collect();
    <M as KernelMemory>::unpack(destinations, M::arena(lanes, buffer), &offsets)
}

#[cfg(test)]
mod tests {
    use super::super::{Reducer, ReducerOptions};
    use super::*;
    use crate::comm::local;
    use crate::plan::chunks::chunk_len;

    const LENS: [usize; 6] = [1, 700, 40_000, 300_000, 0, 1_500_000];

    /// The bytes of buckets and of sums after some steps, with micro-batches or without, checked against the documented formula.
    fn bytes_of(wire: Option<DType>, ranks: usize, accumulates: bool) -> (usize, usize) {
        let taken = local::run(ranks, |comm| {
            let parameters = LENS.map(|len| Parameter::new(format!("of {len}"), [len], DType::F32));
            let mut reducer = Reducer::new(&comm, parameters, ReducerOptions::default().with_wire_dtype(wire))?;
            let gradients = LENS.map(|len| vec![1f32; len]);
            for _ in 0..3 {
                if accumulates {
                    let views = gradients.iter().enumerate().map(|(index, gradient)| (index, gradient.into()));
                    reducer.accumulate(&views.collect::<Vec<_>>())?;
                }
                let mut step = reducer.step()?;
                gradients.iter().enumerate().try_for_each(|(index, gradient)| step.ready(index, gradient))?;
                assert_eq!(step.finish()?.skipped().count(), 0);
            }
            let bytes =
                |buffer: Option<&GradientBuffer>| buffer.map_or(0, |buffer| buffer.len() * buffer.dtype().size_bytes());
            let buckets: usize = reducer.buckets.iter().map(|bucket| bytes(bucket.buffer.as_ref())).sum();
            let sums: usize = reducer.buckets.iter().map(|bucket| bytes(bucket.sums.as_ref())).sum();
            Ok((buckets, sums, reducer.buckets.len()))
        });
        let taken = taken.unwrap();
        assert!(taken.iter().all(|of| *of == taken[0]), "{taken:?}");
        let (buckets, sums, count) = taken[0];
        let elements: usize = LENS.iter().sum();
        let chunks: usize = LENS.iter().map(|&len| chunk_len(len)).sum();
        let most = elements + chunks + count * ranks * chunk_len(1_500_000);
        let size = wire.unwrap_or(DType::F32).size_bytes();
        for (bytes, size) in [(buckets, size), (sums, 4)] {
            assert!(
                bytes == 0 || (elements * size..most * size).contains(&bytes),
                "{bytes} bytes of {elements} elements"
            );
        }
        (buckets, sums)
    }

    /// The table in the documentation of [`Reducer`].
    #[test]
    fn bucket_and_sums_take_the_documented_memory() {
        for (wire, is_narrower) in [(None, false), (Some(DType::BF16), true)] {
            let (buckets, sums) = bytes_of(wire, 3, false);
            assert!(buckets > 0 && sums == 0);
            let (buckets, sums) = bytes_of(wire, 3, true);
            assert!(buckets > 0 && (sums > 0) == is_narrower);
        }
        assert_eq!(bytes_of(None, 1, false), (0, 0));
        let (sums_in_buckets, sums) = bytes_of(None, 1, true);
        assert!(sums_in_buckets > 0 && sums == 0);
    }
}
