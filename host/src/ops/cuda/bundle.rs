//! ONNX Runtime's NcclAllReduce, NcclAllGather and NcclReduceScatter on bundles of tensors in device memory, and the plain meaning of
//! the latter two.
//!
//! Tensors that follow each other in memory are reduced where they lie, by one collective. Others are packed into an arena by one
//! launch, whose gaps are zero. Who owns which tensor is [`plan::ownership`](crate::plan::ownership)'s business.

use crate::comm::nccl::NcclCommunicator;
use crate::comm::{DeviceCommunicator, ReduceOp, Scaling};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::cuda::{pack, unpack};
use crate::kernels::same_len;
use crate::plan::layout::Layout;
use crate::plan::ownership::{Move, Ownership};

/// The dtype of all tensors of a bundle on one queue; `None` for no tensors.
fn one_dtype<'a>(operation: &'static str, mut tensors: impl Iterator<Item = DeviceSlice<'a>>) -> Result<Option<DType>> {
    let Some(first) = tensors.next() else { return Ok(None) };
    for (index, tensor) in tensors.enumerate() {
        if tensor.dtype() != first.dtype() {
            let what = format!("tensor 0 and tensor {}", index + 1);
            return Err(Error::DTypeMismatch { operation, what, left: first.dtype(), right: tensor.dtype() });
        }
        first.queue().check_same(operation, tensor.queue())?;
    }
    Ok(Some(first.dtype()))
}

/// Replaces every rank's tensors by their reduction over ranks (NcclAllReduce), by one collective: over the range that they fill, if
/// each begins where the one before it ends; otherwise over a copy with zeros in its gaps, made by one launch and taken apart by
/// another. A [`DeviceGradientBuffer`](crate::DeviceGradientBuffer) needs neither: see [`all_reduce`](super::all_reduce).
///
/// # Errors
/// [`Error::DTypeMismatch`] naming the tensor, [`Error::InvalidArgument`] for tensors of different queues, and those of
/// [`DeviceCommunicator::all_reduce`].
pub fn nccl_all_reduce(
    comm: &NcclCommunicator,
    tensors: &mut [DeviceSliceMut<'_>],
    op: ReduceOp,
    scaling: Scaling,
) -> Result<()> {
    const OPERATION: &str = "nccl_all_reduce";
    let views: Vec<DeviceSlice<'_>> = tensors.iter().map(DeviceSliceMut::as_slice).collect();
    let Some(dtype) = one_dtype(OPERATION, views.iter().copied())? else { return Ok(()) };
    let (queue, size) = (views[0].queue(), dtype.size_bytes());
    let follows = |pair: &[DeviceSlice<'_>]| pair[0].address() + (pair[0].len() * size) as u64 == pair[1].address();
    if views.windows(2).all(follows) {
        let len = views.iter().map(DeviceSlice::len).sum();
        // SAFETY: the tensors are borrowed mutably, belong to this queue, and fill this range without a gap.
        let whole = unsafe { DeviceSliceMut::from_raw_parts(queue, views[0].address(), dtype, len) };
        return comm.all_reduce(whole, op, scaling);
    }
    let lens: Vec<usize> = views.iter().map(DeviceSlice::len).collect();
    let layout = Layout::new(dtype, 1, &lens)?;
    let offsets: Vec<usize> = layout.segments.iter().map(|segment| segment.start).collect();
    let mut arena = DeviceBuffer::zeroed(queue, dtype, layout.shard_len)?;
    pack(arena.as_mut_slice(), &offsets, &views)?;
    comm.all_reduce(arena.as_mut_slice(), op, scaling)?;
    unpack(tensors, arena.as_slice(), &offsets)
}

/// Fills every rank's tensors with what their owners have (ONNX Runtime's NcclAllGather): a tensor belongs to the rank whose window of
/// the padded bundle it lies in.
///
/// # Errors
/// [`Error::InvalidArgument`] naming a tensor that lies in two ranks' windows, and as [`nccl_all_reduce`].
pub fn nccl_all_gather_owned(comm: &NcclCommunicator, tensors: &mut [DeviceSliceMut<'_>]) -> Result<()> {
    const OPERATION: &str = "nccl_all_gather";
    let Some((ownership, mut scratch)) = scratch(OPERATION, comm, tensors)? else { return Ok(()) };
    let moves = ownership.gather_moves(comm.rank());
    copy_in(&mut scratch, tensors, &moves.copy_in)?;
    comm.all_gather_in_place(scratch.as_mut_slice())?;
    copy_out(tensors, &scratch, &moves.copy_out)
}

/// Replaces the tensors that this rank owns by their sum over ranks, and leaves all others alone (ONNX Runtime's NcclReduceScatter).
///
/// # Errors
/// As [`nccl_all_gather_owned`].
pub fn nccl_reduce_scatter_owned(
    comm: &NcclCommunicator,
    tensors: &mut [DeviceSliceMut<'_>],
    op: ReduceOp,
) -> Result<()> {
    const OPERATION: &str = "nccl_reduce_scatter";
    let Some((ownership, mut scratch)) = scratch(OPERATION, comm, tensors)? else { return Ok(()) };
    let moves = ownership.scatter_moves(comm.rank());
    copy_in(&mut scratch, tensors, &moves.copy_in)?;
    comm.reduce_scatter_in_place(scratch.as_mut_slice(), op)?;
    copy_out(tensors, &scratch, &moves.copy_out)
}

/// The plan of a bundle and zeroed memory for it.
fn scratch(
    operation: &'static str,
    comm: &NcclCommunicator,
    tensors: &[DeviceSliceMut<'_>],
) -> Result<Option<(Ownership, DeviceBuffer)>> {
    let Some(dtype) = one_dtype(operation, tensors.iter().map(DeviceSliceMut::as_slice))? else { return Ok(None) };
    let lens: Vec<usize> = tensors.iter().map(|tensor| tensor.as_slice().len()).collect();
    let ownership = Ownership::new(operation, comm.world_size(), &lens)?;
    let queue = tensors[0].as_slice().queue().clone();
    let scratch = DeviceBuffer::zeroed(&queue, dtype, ownership.padded_len())?;
    Ok(Some((ownership, scratch)))
}

fn copy_in(scratch: &mut DeviceBuffer, tensors: &[DeviceSliceMut<'_>], moves: &[Move]) -> Result<()> {
    let sources: Vec<DeviceSlice<'_>> = moves.iter().map(|one| tensors[one.tensor].as_slice()).collect();
    let offsets: Vec<usize> = moves.iter().map(|one| one.place.start).collect();
    pack(scratch.as_mut_slice(), &offsets, &sources)
}

fn copy_out(tensors: &mut [DeviceSliceMut<'_>], scratch: &DeviceBuffer, moves: &[Move]) -> Result<()> {
    let mut wanted = moves.iter().peekable();
    let mut destinations = Vec::with_capacity(moves.len());
    let mut offsets = Vec::with_capacity(moves.len());
    // Moves are in the order of tensors.
    for (index, tensor) in tensors.iter_mut().enumerate() {
        if let Some(one) = wanted.next_if(|one| one.tensor == index) {
            offsets.push(one.place.start);
            destinations.push(tensor.reborrow());
        }
    }
    unpack(&mut destinations, scratch.as_slice(), &offsets)
}

/// Concatenates every rank's tensor along its first dimension, for each tensor of a bundle, as one group: `outputs[i]` holds
/// `world_size` times `inputs[i]`.
///
/// # Errors
/// [`Error::LengthMismatch`] or [`Error::DTypeMismatch`] for outputs that do not fit, and those of
/// [`DeviceCommunicator::all_gather`].
pub fn nccl_all_gather(
    comm: &NcclCommunicator,
    inputs: &[DeviceSlice<'_>],
    outputs: &mut [DeviceSliceMut<'_>],
) -> Result<()> {
    same_len("nccl_all_gather", ("inputs", inputs.len()), ("outputs", outputs.len()))?;
    let mut group = comm.group();
    for (input, output) in inputs.iter().zip(outputs) {
        group.all_gather(*input, output.reborrow())?;
    }
    group.submit()
}

/// Sums every rank's tensor and gives each rank an equal shard of it along the first dimension, for each tensor of a bundle, as one
/// group. `shapes` are those of the inputs.
///
/// # Errors
/// [`Error::InvalidArgument`] naming shape and world size where a first dimension does not divide, or there is none;
/// [`Error::LengthMismatch`] or [`Error::DTypeMismatch`] for operands that do not fit, and those of
/// [`DeviceCommunicator::reduce_scatter`].
pub fn nccl_reduce_scatter(
    comm: &NcclCommunicator,
    inputs: &[DeviceSlice<'_>],
    shapes: &[&[usize]],
    outputs: &mut [DeviceSliceMut<'_>],
) -> Result<()> {
    const OPERATION: &str = "nccl_reduce_scatter";
    same_len(OPERATION, ("inputs", inputs.len()), ("outputs", outputs.len()))?;
    same_len(OPERATION, ("inputs", inputs.len()), ("shapes", shapes.len()))?;
    let world_size = comm.world_size();
    let mut group = comm.group();
    for (index, ((input, shape), output)) in inputs.iter().zip(shapes).zip(outputs).enumerate() {
        let len = shape.iter().product();
        same_len(OPERATION, (&format!("shape of input {index}"), len), (&format!("input {index}"), input.len()))?;
        if shape.first().is_none_or(|rows| rows % world_size != 0) {
            let reason = format!(
                "input {index} of shape {shape:?} does not divide into {world_size} shards along its first dimension"
            );
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        group.reduce_scatter(*input, output.reborrow(), ReduceOp::Sum)?;
    }
    group.submit()
}
