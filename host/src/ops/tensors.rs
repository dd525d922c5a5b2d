//! Collectives on separate tensors, in either memory: all-reduce, all-gather and reduce-scatter.
//!
//! Contiguous tensors of a GPU are reduced in place, by one collective. Others are packed without gaps, on a GPU in one launch, so that a
//! rank whose tensors are scattered sends the same number of elements as a rank whose tensors are contiguous.

use crate::buffer::GradientBuffer;
use crate::call::scope;
use crate::comm::{Collective, Collectives, Communicator, Operands, ReduceOp, Scaling};
use crate::dtype::DType;
use crate::error::{Error, Operation, Result, same_len};
use crate::kernels::KernelMemory;

/// The dtype of all tensors, which must belong to one queue; `None` for no tensors.
pub(crate) fn one_dtype<M: KernelMemory>(operation: &'static str, tensors: &[M::Slice<'_>]) -> Result<Option<DType>> {
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
    M::check_same_queue(operation, first, tensor)
}

/// Refuses outputs that differ from the inputs in number, length, dtype or queue.
pub(crate) fn check_outputs<M: KernelMemory>(
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

pub(crate) fn views<'a, M: KernelMemory>(tensors: &'a [M::SliceMut<'_>]) -> Vec<M::Slice<'a>> {
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
        pack_numbers::<M>(comm, (M::reborrow(&mut whole), &offsets, inputs), op, scaling)?;
        return comm.all_reduce_scaled(whole, op, scaling);
    }
    let (packed, offsets) = reduced_copy(OPERATION, comm, inputs, op, scaling)?;
    M::unpack(outputs, M::buffer(&packed), &offsets)
}

/// Packs tensors that are reduced next. Elements with which nothing can be computed are left to the reduction, which refuses them on every
/// rank: an error of this rank alone would let the others wait.
fn pack_numbers<M: KernelMemory>(
    comm: &dyn Communicator<M>,
    (dst, offsets, tensors): (M::SliceMut<'_>, &[usize], &[M::Slice<'_>]),
    op: ReduceOp,
    scaling: Scaling,
) -> Result<()> {
    if M::check_floats("pack", M::as_slice(&dst)).is_err() {
        return Ok(());
    }
    let Some(refused) = tensors.iter().find(|tensor| M::check_floats("pack", **tensor).is_err()) else {
        return M::pack(dst, offsets, tensors);
    };
    let mut output = M::range_mut(dst, 0..M::len(*refused));
    comm.run(Collective::AllReduce { operands: operands::<M>(refused, &mut output), op, scaling })
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
    pack_numbers::<M>(comm, (M::buffer_mut(&mut packed), &offsets, tensors), op, scaling)?;
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
