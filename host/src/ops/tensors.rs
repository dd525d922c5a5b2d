//! Collectives on separate tensors, in either memory: ONNX Runtime's NcclAllReduce, NcclAllGather and NcclReduceScatter, and the usual
//! meaning of the latter two.
//!
//! Contiguous tensors of a GPU are reduced in place, by one collective. Others are packed without gaps, on a GPU in one launch, so that a
//! rank whose tensors are scattered sends the same number of elements as a rank whose tensors are contiguous.
//! [`plan::ownership`](crate::plan::ownership) decides which rank owns which tensor.

use crate::buffer::GradientBuffer;
use crate::call::scope;
use crate::comm::{Collective, Collectives, Communicator, Operands, ReduceOp, Scaling};
use crate::dtype::DType;
use crate::error::{Error, Operation, Result, same_len};
use crate::kernels::KernelMemory;
use crate::plan::ownership::{Move, Moves, Ownership};

/// The dtype of all tensors, which must belong to one queue; `None` for no tensors.
fn one_dtype<M: KernelMemory>(operation: &'static str, tensors: &[M::Slice<'_>]) -> Result<Option<DType>> {
    let Some(&first) = tensors.first() else { return Ok(None) };
    for (index, &tensor) in tensors.iter().enumerate().skip(1) {
        check_like_first::<M>(operation, first, (&format!("tensor {index}"), tensor))?;
    }
    Ok(Some(M::dtype(first)))
}

/// Refuses a tensor of another dtype or queue than the first.
fn check_like_first<M: KernelMemory>(
    operation: &'static str,
    first: M::Slice<'_>,
    (name, tensor): (&str, M::Slice<'_>),
) -> Result<()> {
    let (left, right) = (M::dtype(first), M::dtype(tensor));
    if left != right {
        return Err(Error::DTypeMismatch { operation, what: format!("tensor 0 and {name}"), left, right });
    }
    M::check_same_queue(operation, first.into(), tensor.into())
}

/// Refuses outputs that differ from the inputs in number, length, dtype or queue.
fn check_outputs<M: KernelMemory>(
    operation: &'static str,
    inputs: &[M::Slice<'_>],
    outputs: &[M::SliceMut<'_>],
) -> Result<()> {
    same_len(operation, ("inputs", inputs.len()), ("outputs", outputs.len()))?;
    for (index, (input, output)) in inputs.iter().zip(views::<M>(outputs)).enumerate() {
        let (from, to) = (format!("input {index}"), format!("output {index}"));
        same_len(operation, (&from, M::len(*input)), (&to, M::len(output)))?;
        check_like_first::<M>(operation, inputs[0], (&to, output))?;
    }
    Ok(())
}

fn views<'a, M: KernelMemory>(tensors: &'a [M::SliceMut<'_>]) -> Vec<M::Slice<'a>> {
    tensors.iter().map(M::as_slice).collect()
}

/// The offset of each tensor in elements if they are packed without gaps, and the end of the last.
fn offsets<M: KernelMemory>(tensors: &[M::Slice<'_>]) -> (Vec<usize>, usize) {
    let mut end = 0;
    let offset = |tensor: &M::Slice<'_>| {
        let offset = end;
        end += M::len(*tensor);
        offset
    };
    let offsets = tensors.iter().map(offset).collect();
    (offsets, end)
}

/// Copies tensors into a buffer of as many tensors of the same lengths, with casts where dtypes differ.
pub(super) fn copy_into<M: KernelMemory>(
    operation: &'static str,
    buffer: &mut GradientBuffer<M>,
    tensors: &[M::Slice<'_>],
) -> Result<()> {
    buffer.table().check_lens(operation, "tensor", tensors.iter().map(|tensor| M::len(*tensor)))?;
    let offsets = buffer.table().offsets();
    M::pack(buffer.as_mut_slice(), &offsets, tensors)
}

/// Replaces every rank's tensors by their reduction over ranks (ONNX Runtime's NcclAllReduce), by one collective: in place if the tensors
/// are contiguous in order, otherwise on a packed copy. Each rank decides by its own addresses. On a GPU the copy is packed in one launch
/// and unpacked in another, which is fastest where tensors have multiples of 16 bytes. A [`GradientBuffer`] needs no copy: see
/// [`all_reduce`](super::all_reduce()).
///
/// # Errors
/// [`Error::DTypeMismatch`] naming the tensor, [`Error::InvalidArgument`] for tensors of different queues, and the errors of
/// [`Collectives::all_reduce`].
#[doc(alias = "NcclAllReduce")]
pub fn all_reduce_tensors<M: KernelMemory>(
    comm: &dyn Communicator<M>,
    tensors: &mut [M::SliceMut<'_>],
    op: ReduceOp,
    scaling: Scaling,
) -> Result<()> {
    const OPERATION: &str = "all_reduce_tensors";
    let _scope = scope::within(Operation::AllReduceTensors(op)).with_tensors(tensors.len());
    if one_dtype::<M>(OPERATION, &views::<M>(tensors))?.is_none() {
        return Ok(());
    }
    if let Some(whole) = M::joined(tensors) {
        return comm.all_reduce_scaled(whole, op, scaling);
    }
    let (packed, offsets) = reduced_copy(OPERATION, comm, &views::<M>(tensors), op, scaling)?;
    M::unpack(tensors, M::buffer(&packed), &offsets)
}

/// Like [`all_reduce_tensors`], but writes to separate outputs: `outputs[i]` has the length and the dtype of `inputs[i]`.
///
/// # Errors
/// The errors of [`all_reduce_tensors`], and [`Error::LengthMismatch`] or [`Error::DTypeMismatch`] naming an output that does not match.
pub fn all_reduce_tensors_into<M: KernelMemory>(
    comm: &dyn Communicator<M>,
    inputs: &[M::Slice<'_>],
    outputs: &mut [M::SliceMut<'_>],
    op: ReduceOp,
    scaling: Scaling,
) -> Result<()> {
    const OPERATION: &str = "all_reduce_tensors_into";
    let _scope = scope::within(Operation::AllReduceTensors(op)).with_tensors(inputs.len());
    check_outputs::<M>(OPERATION, inputs, outputs)?;
    if one_dtype::<M>(OPERATION, inputs)?.is_none() {
        return Ok(());
    }
    if let Some(mut whole) = M::joined(outputs) {
        let (offsets, _) = offsets::<M>(inputs);
        M::pack(M::reborrow(&mut whole), &offsets, inputs)?;
        return comm.all_reduce_scaled(whole, op, scaling);
    }
    let (packed, offsets) = reduced_copy(OPERATION, comm, inputs, op, scaling)?;
    M::unpack(outputs, M::buffer(&packed), &offsets)
}

/// The reduction of tensors, packed without gaps, and the offset of each in elements.
fn reduced_copy<M: KernelMemory>(
    operation: &'static str,
    comm: &dyn Communicator<M>,
    tensors: &[M::Slice<'_>],
    op: ReduceOp,
    scaling: Scaling,
) -> Result<(M::Buffer, Vec<usize>)> {
    let (offsets, len) = offsets::<M>(tensors);
    let mut packed = M::room_like(operation, tensors[0], len)?;
    M::pack(M::buffer_mut(&mut packed), &offsets, tensors)?;
    comm.all_reduce_scaled(M::buffer_mut(&mut packed), op, scaling)?;
    Ok((packed, offsets))
}

/// Copies separate tensors into a gradient buffer, with casts where dtypes differ; on a GPU in one launch for each of their dtypes.
///
/// Together with [`unpack`], this makes every operation on buffers available for separate tensors, in place or with separate outputs.
///
/// # Errors
/// [`Error::LengthMismatch`] naming a tensor whose length differs from the buffer's, and [`Error::InvalidArgument`] for another queue;
/// nothing is written.
pub fn pack<M: KernelMemory>(buffer: &mut GradientBuffer<M>, tensors: &[M::Slice<'_>]) -> Result<()> {
    buffer.table().check_lens("pack", "tensor", tensors.iter().map(|tensor| M::len(*tensor)))?;
    let offsets = buffer.table().offsets();
    M::pack(buffer.as_mut_slice(), &offsets, tensors)
}

/// Copies all tensors of a gradient buffer to separate tensors, with casts where dtypes differ; on a GPU in one launch for each of their
/// dtypes.
///
/// # Errors
/// The errors of [`pack`].
pub fn unpack<M: KernelMemory>(buffer: &GradientBuffer<M>, tensors: &mut [M::SliceMut<'_>]) -> Result<()> {
    buffer.table().check_lens("unpack", "tensor", views::<M>(tensors).into_iter().map(M::len))?;
    M::unpack(tensors, buffer.as_slice(), &buffer.table().offsets())
}

/// Replaces every rank's tensors by the tensors of their owners (ONNX Runtime's NcclAllGather). Tensors are laid out one after another and
/// padded, and a tensor belongs to the rank in whose `1 / world_size` of that length it lies ([`plan::ownership`](crate::plan::ownership)).
///
/// # Errors
/// [`Error::InvalidArgument`] naming a tensor in two ranks' windows, and the errors of [`all_reduce_tensors`].
#[doc(alias = "NcclAllGather")]
pub fn all_gather_owned<M: KernelMemory>(comm: &dyn Communicator<M>, tensors: &mut [M::SliceMut<'_>]) -> Result<()> {
    const OPERATION: &str = "all_gather_owned";
    let _scope = scope::within(Operation::AllGatherTensors).with_tensors(tensors.len());
    let Some(Bundle { moves, scratch, .. }) = gathered(OPERATION, comm, &views::<M>(tensors))? else { return Ok(()) };
    copy_out::<M>(tensors, &scratch, &moves.copy_out)
}

/// Like [`all_gather_owned`], but writes to separate outputs: `outputs[i]` becomes `inputs[i]` of the rank that owns tensor `i`, on the
/// owner as well.
///
/// # Errors
/// The errors of [`all_gather_owned`], and [`Error::LengthMismatch`] or [`Error::DTypeMismatch`] naming an output that does not match.
pub fn all_gather_owned_into<M: KernelMemory>(
    comm: &dyn Communicator<M>,
    inputs: &[M::Slice<'_>],
    outputs: &mut [M::SliceMut<'_>],
) -> Result<()> {
    const OPERATION: &str = "all_gather_owned_into";
    let _scope = scope::within(Operation::AllGatherTensors).with_tensors(inputs.len());
    check_outputs::<M>(OPERATION, inputs, outputs)?;
    let Some(Bundle { ownership, scratch, .. }) = gathered(OPERATION, comm, inputs)? else { return Ok(()) };
    copy_out::<M>(outputs, &scratch, &ownership.all_moves())
}

/// All tensors of a bundle, gathered from their owners into its workspace.
fn gathered<M: KernelMemory>(
    operation: &'static str,
    comm: &dyn Communicator<M>,
    tensors: &[M::Slice<'_>],
) -> Result<Option<Bundle<M>>> {
    let moves = |ownership: &Ownership| ownership.gather_moves(comm.rank());
    let Some(mut bundle) = Bundle::of(operation, comm, tensors, moves)? else { return Ok(None) };
    comm.all_gather_in_place(M::buffer_mut(&mut bundle.scratch))?;
    Ok(Some(bundle))
}

/// Replaces the tensors that this rank owns by their reduction over ranks, and leaves all others unchanged (ONNX Runtime's
/// NcclReduceScatter).
///
/// # Errors
/// The errors of [`all_gather_owned`].
#[doc(alias = "NcclReduceScatter")]
pub fn reduce_scatter_owned<M: KernelMemory>(
    comm: &dyn Communicator<M>,
    tensors: &mut [M::SliceMut<'_>],
    op: ReduceOp,
) -> Result<()> {
    const OPERATION: &str = "reduce_scatter_owned";
    let _scope = scope::within(Operation::ReduceScatterTensors(op)).with_tensors(tensors.len());
    let Some(Bundle { moves, scratch, .. }) = scattered(OPERATION, comm, &views::<M>(tensors), op)? else {
        return Ok(());
    };
    copy_out::<M>(tensors, &scratch, &moves.copy_out)
}

/// Like [`reduce_scatter_owned`], but writes to separate outputs: `outputs[i]` becomes the reduction of all ranks' `inputs[i]` on the rank
/// that owns tensor `i`, and is left unchanged on the others.
///
/// # Errors
/// The errors of [`all_gather_owned_into`].
pub fn reduce_scatter_owned_into<M: KernelMemory>(
    comm: &dyn Communicator<M>,
    inputs: &[M::Slice<'_>],
    outputs: &mut [M::SliceMut<'_>],
    op: ReduceOp,
) -> Result<()> {
    const OPERATION: &str = "reduce_scatter_owned_into";
    let _scope = scope::within(Operation::ReduceScatterTensors(op)).with_tensors(inputs.len());
    check_outputs::<M>(OPERATION, inputs, outputs)?;
    let Some(Bundle { moves, scratch, .. }) = scattered(OPERATION, comm, inputs, op)? else { return Ok(()) };
    copy_out::<M>(outputs, &scratch, &moves.copy_out)
}

/// The reduction of this rank's tensors, in the workspace of the bundle.
fn scattered<M: KernelMemory>(
    operation: &'static str,
    comm: &dyn Communicator<M>,
    tensors: &[M::Slice<'_>],
    op: ReduceOp,
) -> Result<Option<Bundle<M>>> {
    let moves = |ownership: &Ownership| ownership.scatter_moves(comm.rank());
    let Some(mut bundle) = Bundle::of(operation, comm, tensors, moves)? else { return Ok(None) };
    comm.reduce_scatter_in_place(M::buffer_mut(&mut bundle.scratch), op)?;
    Ok(Some(bundle))
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
        comm: &dyn Communicator<M>,
        tensors: &[M::Slice<'_>],
        moves: impl FnOnce(&Ownership) -> Moves,
    ) -> Result<Option<Self>> {
        if one_dtype::<M>(operation, tensors)?.is_none() {
            return Ok(None);
        }
        let lens: Vec<usize> = tensors.iter().map(|tensor| M::len(*tensor)).collect();
        let ownership = Ownership::new(operation, comm.world_size(), &lens)?;
        let mut scratch = M::zeros_like(operation, tensors[0], ownership.padded_len())?;
        let moves = moves(&ownership);
        let sources: Vec<M::Slice<'_>> = moves.copy_in.iter().map(|one| tensors[one.tensor]).collect();
        let offsets: Vec<usize> = moves.copy_in.iter().map(|one| one.place.start).collect();
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
            offsets.push(one.place.start);
            destinations.push(M::reborrow(tensor));
        }
    }
    M::unpack(&mut destinations, M::buffer(scratch), &offsets)
}

/// Concatenates every rank's tensor along its first dimension, for each tensor of a bundle, at once: `outputs[i]` has `world_size` times
/// the elements of `inputs[i]`.
///
/// # Errors
/// [`Error::LengthMismatch`] or [`Error::DTypeMismatch`] for outputs that do not match, and the errors of [`Collectives::all_gather`].
pub fn all_gather_tensors<M: KernelMemory>(
    comm: &dyn Communicator<M>,
    inputs: &[M::Slice<'_>],
    outputs: &mut [M::SliceMut<'_>],
) -> Result<()> {
    let _scope = scope::within(Operation::AllGatherTensors).with_tensors(inputs.len());
    same_len("all_gather_tensors", ("inputs", inputs.len()), ("outputs", outputs.len()))?;
    let gather = |(input, output)| Collective::AllGather { operands: operands::<M>(input, output) };
    comm.run_all(inputs.iter().zip(outputs).map(gather).collect())
}

/// Sums every rank's tensor and returns to each rank an equal shard of it along the first dimension, for each tensor of a bundle, at once.
/// `shapes` are the shapes of the inputs.
///
/// # Errors
/// [`Error::InvalidArgument`] naming shape and world size if a first dimension is missing or not divisible by the world size;
/// [`Error::LengthMismatch`] or [`Error::DTypeMismatch`] for operands that do not match, and the errors of [`Collectives::reduce_scatter`].
pub fn reduce_scatter_tensors<M: KernelMemory>(
    comm: &dyn Communicator<M>,
    inputs: &[M::Slice<'_>],
    shapes: &[&[usize]],
    outputs: &mut [M::SliceMut<'_>],
) -> Result<()> {
    const OPERATION: &str = "reduce_scatter_tensors";
    let _scope = scope::within(Operation::ReduceScatterTensors(ReduceOp::Sum)).with_tensors(inputs.len());
    same_len(OPERATION, ("inputs", inputs.len()), ("outputs", outputs.len()))?;
    same_len(OPERATION, ("inputs", inputs.len()), ("shapes", shapes.len()))?;
    let world_size = comm.world_size();
    for (index, (input, shape)) in inputs.iter().zip(shapes).enumerate() {
        let len = shape.iter().product();
        same_len(OPERATION, (&format!("shape of input {index}"), len), (&format!("input {index}"), M::len(*input)))?;
        if shape.first().is_none_or(|rows| rows % world_size != 0) {
            let reason = format!(
                "input {index} of shape {shape:?} does not divide into {world_size} shards along its first dimension"
            );
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
    }
    let scatter = |(input, output)| {
        let operands = operands::<M>(input, output);
        Collective::ReduceScatter { operands, op: ReduceOp::Sum }
    };
    comm.run_all(inputs.iter().zip(outputs).map(scatter).collect())
}

fn operands<'a, 'i: 'a, M: KernelMemory>(input: &M::Slice<'i>, output: &'a mut M::SliceMut<'_>) -> Operands<'a, M> {
    Operands::Apart { input: M::shortened(*input), output: M::reborrow(output) }
}
