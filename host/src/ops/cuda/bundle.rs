//! ONNX Runtime's NcclAllReduce, NcclAllGather and NcclReduceScatter on bundles of tensors in device memory, and the plain meaning of
//! the latter two.
//!
//! Tensors that follow each other in memory are reduced where they lie, by one collective. Others are packed by one launch, one right after
//! the other, so that a rank whose tensors lie apart sends as many elements as one whose tensors do not. Who owns which
//! tensor is [`plan::ownership`](crate::plan::ownership)'s business.

use crate::call::scope;
use crate::comm::nccl::NcclCommunicator;
use crate::comm::{Collectives, Communicator, Ranks, ReduceOp, Scaling};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
use crate::dtype::DType;
use crate::error::{Error, Operation, Result, same_len};
use crate::kernels::cuda::{pack, unpack};
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

/// Where the elements of a bundle are reduced: as many of them, in the same order, whatever the addresses, which are each rank's own.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// Where they lie, from this address on.
    InPlace(u64),
    /// In a copy, in which the tensors begin at these elements.
    Packed(Vec<usize>),
}

impl Place {
    /// Of tensors with these addresses and lengths, whose elements have `size` bytes. Tensors without elements lie anywhere.
    fn of(tensors: &[(u64, usize)], size: usize) -> Self {
        let mut filled = tensors.iter().filter(|(_, len)| *len > 0);
        let begin = filled.next().map_or(0, |(address, _)| *address);
        let offsets = tensors.iter().scan(0, |end, (_, len)| {
            let offset = *end;
            *end += len;
            Some(offset)
        });
        let offsets: Vec<usize> = offsets.collect();
        let is_in_row =
            |((address, len), offset): (&(u64, usize), &usize)| *len == 0 || *address == begin + (offset * size) as u64;
        if tensors.iter().zip(&offsets).all(is_in_row) { Place::InPlace(begin) } else { Place::Packed(offsets) }
    }
}

/// Replaces every rank's tensors by their reduction over ranks (NcclAllReduce), by one collective: over the range that they fill, if
/// each begins where the one before it ends; otherwise over a copy, made by one launch and taken apart by another. Each rank does what
/// its own addresses ask for. Packing is fastest where tensors have multiples of 16 bytes. A
/// [`GradientBuffer`](crate::GradientBuffer<Cuda>) needs neither: see [`all_reduce`](super::all_reduce).
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
    let _scope = scope::within(Operation::NcclAllReduce(op));
    let views: Vec<DeviceSlice<'_>> = tensors.iter().map(DeviceSliceMut::as_slice).collect();
    let Some(dtype) = one_dtype(OPERATION, views.iter().copied())? else { return Ok(()) };
    let queue = views[0].queue();
    let len = views.iter().map(DeviceSlice::len).sum();
    let tensors_at: Vec<(u64, usize)> = views.iter().map(|view| (view.address(), view.len())).collect();
    match Place::of(&tensors_at, dtype.size_bytes()) {
        Place::InPlace(address) => {
            // SAFETY: the tensors are borrowed mutably, belong to this queue, and fill this range without a gap.
            let whole = unsafe { DeviceSliceMut::from_raw_parts(queue, address, dtype, len) };
            comm.all_reduce_scaled(whole, op, scaling)
        }
        Place::Packed(offsets) => {
            let mut packed = DeviceBuffer::allocate(queue, dtype, len)?;
            pack(packed.as_mut_slice(), &offsets, &views)?;
            comm.all_reduce_scaled(&mut packed, op, scaling)?;
            unpack(tensors, packed.as_slice(), &offsets)
        }
    }
}

/// Fills every rank's tensors with what their owners have (ONNX Runtime's NcclAllGather): a tensor belongs to the rank whose window of
/// the padded bundle it lies in.
///
/// # Errors
/// [`Error::InvalidArgument`] naming a tensor that lies in two ranks' windows, and as [`nccl_all_reduce`].
pub fn nccl_all_gather_owned(comm: &NcclCommunicator, tensors: &mut [DeviceSliceMut<'_>]) -> Result<()> {
    const OPERATION: &str = "nccl_all_gather";
    let _scope = scope::within(Operation::NcclAllGather);
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
    let _scope = scope::within(Operation::NcclReduceScatter(op));
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
    let _scope = scope::within(Operation::NcclAllGather);
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
    let _scope = scope::within(Operation::NcclReduceScatter(ReduceOp::Sum));
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Place;

    /// Bytes of an element.
    const SIZE: usize = 2;

    /// Addresses that one rank's allocator gives tensors of these lengths: with so many bytes between one and the next.
    fn allocated(lens: &[usize], gaps: &[u64]) -> Vec<(u64, usize)> {
        let mut next = 0x7f00_0000;
        let place = |(&len, gap): (&usize, &u64)| {
            let address = next;
            next += (len * SIZE) as u64 + gap;
            (address, len)
        };
        lens.iter().zip(gaps.iter().chain(std::iter::repeat(&0))).map(place).collect()
    }

    /// The elements of a bundle, by place among those that are sent: a tensor and an element of it.
    fn sent(place: &Place, tensors: &[(u64, usize)]) -> Vec<(usize, usize)> {
        let mut sent = vec![(usize::MAX, 0); tensors.iter().map(|(_, len)| len).sum()];
        for (index, &(address, len)) in tensors.iter().enumerate() {
            let offset = match place {
                Place::InPlace(begin) if len > 0 => (address - begin) as usize / SIZE,
                Place::InPlace(_) => 0,
                Place::Packed(offsets) => offsets[index],
            };
            for element in 0..len {
                sent[offset + element] = (index, element);
            }
        }
        sent
    }

    proptest! {
        #[test]
        fn ranks_send_the_same_elements_whatever_their_addresses(
            lens in prop::collection::vec(prop_oneof![Just(0usize), 1usize..40], 0..8),
            gaps in prop::collection::vec(prop_oneof![3 => Just(0u64), 1 => 1u64..300], 8),
        ) {
            let (dense, apart) = (allocated(&lens, &[]), allocated(&lens, &gaps));
            let place = Place::of(&dense, SIZE);
            prop_assert!(matches!(place, Place::InPlace(_)), "{place:?}");
            prop_assert_eq!(sent(&Place::of(&apart, SIZE), &apart), sent(&place, &dense));
        }
    }

    #[test]
    fn in_place_only_without_gaps_and_in_order() {
        let begin = 1 << 20;
        let of = |tensors: &[(u64, usize)]| Place::of(tensors, SIZE);
        assert_eq!(of(&[]), Place::InPlace(0));
        assert_eq!(of(&[(begin, 7)]), Place::InPlace(begin));
        assert_eq!(of(&[(begin, 7), (begin + 14, 1), (begin + 16, 3)]), Place::InPlace(begin));
        assert_eq!(of(&[(begin, 7), (begin + 14, 1), (begin + 18, 3)]), Place::Packed(vec![0, 7, 8]));
        assert_eq!(of(&[(begin + 14, 1), (begin, 7)]), Place::Packed(vec![0, 1]));
        // Tensors without elements have any address or none.
        assert_eq!(of(&[(0, 0), (0, 0)]), Place::InPlace(0));
        assert_eq!(of(&[(3, 0), (begin, 7), (0, 0), (begin + 14, 1), (9, 0)]), Place::InPlace(begin));
        assert_eq!(of(&[(begin, 7), (0, 0), (begin + 256, 1)]), Place::Packed(vec![0, 7, 7]));
    }
}
