//! NcclAllGather and NcclReduceScatter: collectives of tensors that belong to one rank each, in either memory.
//!
//! `plan::ownership` decides which rank owns which tensor. Ranks compare their tensors before data move, so that an error of one rank is an
//! error of all.

use crate::call::{Value, scope};
use crate::call_comparison::{ComparedCall, agree_once};
use crate::comm::{Collectives, Communicator, ReduceOp};
use crate::error::{Operation, Result};
use crate::kernels::KernelMemory;
use crate::ops::{check_outputs, one_dtype, views};
use crate::plan::ownership::{Move, Moves, Ownership};

/// Replaces every rank's tensors by the tensors of their owners (NcclAllGather). Tensors are laid out one after another and padded, and a
/// tensor belongs to the rank in whose `1 / world_size` of that length it lies.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming a tensor in two ranks' shards, or for tensors of different queues, and
/// [`Error::DTypeMismatch`](crate::Error::DTypeMismatch) naming the tensor; if only some ranks have such an error, the others get an error
/// that names one of them. [`Error::Disagreement`](crate::Error::Disagreement) on every rank if ranks have different tensors; the errors of
/// [`Collectives::all_gather_in_place`]. Nothing is written, except after an error of the communicator.
#[doc(alias = "NcclAllGather")]
pub fn nccl_all_gather<M: KernelMemory>(comm: &dyn Communicator<M>, tensors: &mut [M::SliceMut<'_>]) -> Result<()> {
    const OPERATION: &str = "nccl_all_gather";
    let _scope = scope::within(Operation::AllGatherTensors).with_tensors(tensors.len());
    let gathered = gathered(OPERATION, comm, &views::<M>(tensors), Ok(()))?;
    let Some(Bundle { moves, scratch, .. }) = gathered else { return Ok(()) };
    copy_out::<M>(tensors, &scratch, &moves.copy_out)
}

/// Like [`nccl_all_gather`], but writes to separate outputs: `outputs[i]` becomes `inputs[i]` of the rank that owns tensor `i`, on the
/// owner as well.
///
/// # Errors
/// The errors of [`nccl_all_gather`], and [`Error::LengthMismatch`](crate::Error::LengthMismatch) or
/// [`Error::DTypeMismatch`](crate::Error::DTypeMismatch) naming an output that does not match.
pub fn nccl_all_gather_into<M: KernelMemory>(
    comm: &dyn Communicator<M>,
    inputs: &[M::Slice<'_>],
    outputs: &mut [M::SliceMut<'_>],
) -> Result<()> {
    const OPERATION: &str = "nccl_all_gather_into";
    let _scope = scope::within(Operation::AllGatherTensors).with_tensors(inputs.len());
    let gathered = gathered(OPERATION, comm, inputs, check_outputs::<M>(OPERATION, inputs, outputs))?;
    let Some(Bundle { ownership, scratch, .. }) = gathered else { return Ok(()) };
    copy_out::<M>(outputs, &scratch, &ownership.all_moves())
}

/// All tensors of a bundle, gathered from their owners into its workspace, if this rank's outputs are `checked`.
fn gathered<M: KernelMemory>(
    operation: &'static str,
    comm: &dyn Communicator<M>,
    tensors: &[M::Slice<'_>],
    checked: Result<()>,
) -> Result<Option<Bundle<M>>> {
    let moves = |ownership: &Ownership| ownership.gather_moves(comm.rank());
    let bundle = checked.and_then(|()| Bundle::of(operation, comm.world_size(), tensors, moves));
    let Some(mut bundle) = agreed(Operation::AllGatherTensors, comm, tensors, bundle)? else { return Ok(None) };
    comm.all_gather_in_place(M::buffer_mut(&mut bundle.scratch))?;
    Ok(Some(bundle))
}

/// Replaces the tensors that this rank owns by their reduction over ranks, and leaves all others unchanged (NcclReduceScatter).
///
/// # Errors
/// The errors of [`nccl_all_gather`].
#[doc(alias = "NcclReduceScatter")]
pub fn nccl_reduce_scatter<M: KernelMemory>(
    comm: &dyn Communicator<M>,
    tensors: &mut [M::SliceMut<'_>],
    op: ReduceOp,
) -> Result<()> {
    const OPERATION: &str = "nccl_reduce_scatter";
    let _scope = scope::within(Operation::ReduceScatterTensors(op)).with_tensors(tensors.len());
    let scattered = scattered(OPERATION, comm, &views::<M>(tensors), op, Ok(()))?;
    let Some(Bundle { moves, scratch, .. }) = scattered else { return Ok(()) };
    copy_out::<M>(tensors, &scratch, &moves.copy_out)
}

/// Like [`nccl_reduce_scatter`], but writes to separate outputs: `outputs[i]` becomes the reduction of all ranks' `inputs[i]` on the rank
/// that owns tensor `i`, and is left unchanged on the others.
///
/// # Errors
/// The errors of [`nccl_all_gather_into`].
pub fn nccl_reduce_scatter_into<M: KernelMemory>(
    comm: &dyn Communicator<M>,
    inputs: &[M::Slice<'_>],
    outputs: &mut [M::SliceMut<'_>],
    op: ReduceOp,
) -> Result<()> {
    const OPERATION: &str = "nccl_reduce_scatter_into";
    let _scope = scope::within(Operation::ReduceScatterTensors(op)).with_tensors(inputs.len());
    let scattered = scattered(OPERATION, comm, inputs, op, check_outputs::<M>(OPERATION, inputs, outputs))?;
    let Some(Bundle { moves, scratch, .. }) = scattered else { return Ok(()) };
    copy_out::<M>(outputs, &scratch, &moves.copy_out)
}

/// The reduction of this rank's tensors, in the workspace of the bundle, if this rank's outputs are `checked`.
fn scattered<M: KernelMemory>(
    operation: &'static str,
    comm: &dyn Communicator<M>,
    tensors: &[M::Slice<'_>],
    op: ReduceOp,
    checked: Result<()>,
) -> Result<Option<Bundle<M>>> {
    let moves = |ownership: &Ownership| ownership.scatter_moves(comm.rank());
    let bundle = checked.and_then(|()| Bundle::of(operation, comm.world_size(), tensors, moves));
    let agreed = agreed(Operation::ReduceScatterTensors(op), comm, tensors, bundle)?;
    let Some(mut bundle) = agreed else { return Ok(None) };
    comm.reduce_scatter_in_place(M::buffer_mut(&mut bundle.scratch), op)?;
    Ok(Some(bundle))
}

/// Returns the bundle if every rank has one, of the same tensors.
fn agreed<M: KernelMemory>(
    operation: Operation,
    comm: &dyn Communicator<M>,
    tensors: &[M::Slice<'_>],
    bundle: Result<Option<Bundle<M>>>,
) -> Result<Option<Bundle<M>>> {
    let number = ("number of tensors", Value::Number(tensors.len()));
    let dtype = tensors.first().map(|tensor| ("dtype", Value::DType(M::dtype(*tensor))));
    let len = |(tensor, slice): (usize, &M::Slice<'_>)| ("lengths", Value::Elements { tensor, len: M::len(*slice) });
    let lens = tensors.iter().enumerate().map(len);
    let lines: Vec<_> = [number].into_iter().chain(dtype).chain(lens).collect();
    agree_once(comm, &ComparedCall { lines: &lines, ..ComparedCall::of(operation) }, bundle)
}

/// Tensors with their owners: the plan, and the workspace of the collective.
struct Bundle<M: KernelMemory> {
    ownership: Ownership,
    moves: Moves,
    scratch: M::Buffer,
}

impl<M: KernelMemory> Bundle<M> {
    /// The bundle of these tensors, copied into zeroed workspace according to the plan; `None` for no tensors.
    fn of(
        operation: &'static str,
        world_size: usize,
        tensors: &[M::Slice<'_>],
        moves: impl FnOnce(&Ownership) -> Moves,
    ) -> Result<Option<Self>> {
        if one_dtype::<M>(operation, tensors)?.is_none() {
            return Ok(None);
        }
        let lens: Vec<usize> = tensors.iter().map(|tensor| M::len(*tensor)).collect();
        let ownership = Ownership::new(operation, world_size, &lens)?;
        let mut scratch = M::zeros_like(operation, tensors[0], ownership.padded_len())?;
        let moves = moves(&ownership);
        let sources: Vec<M::Slice<'_>> = moves.copy_in.iter().map(|one| tensors[one.tensor]).collect();
        let offsets: Vec<usize> = moves.copy_in.iter().map(|one| one.range.start).collect();
        M::pack(M::buffer_mut(&mut scratch), &offsets, &sources)?;
        Ok(Some(Self { ownership, moves, scratch }))
    }
}

fn copy_out<M: KernelMemory>(tensors: &mut [M::SliceMut<'_>], scratch: &M::Buffer, moves: &[Move]) -> Result<()> {
    let mut wanted = moves.iter().peekable();
    let mut destinations = Vec::with_capacity(moves.len());
    let mut offsets = Vec::with_capacity(moves.len());
    // Moves are in the order of tensors.
    for (index, tensor) in tensors.iter_mut().enumerate() {
        if let Some(one) = wanted.next_if(|one| one.tensor == index) {
            offsets.push(one.range.start);
            destinations.push(M::reborrow(tensor));
        }
    }
    M::unpack(&mut destinations, M::buffer(scratch), &offsets)
}
