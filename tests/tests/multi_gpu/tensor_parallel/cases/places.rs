//! The memory in which operations work: the given tensor, a new tensor, or memory of another owner, and never a tensor that the caller has
//! kept.

use super::RankContext;
use std::sync::Arc;

use gradsync::driver::DeviceBuffer;
use gradsync::memory::Cuda;
use gradsync::ops::tensor_parallel::{
    AllGather, AllReduce, AllReduceGradient, OwnedTensor, OwnedTensorMemory, Pipeline, ReduceScatter, TensorOp,
};
use gradsync::{DType, Error, Result};
use gradsync_tests::array::{Array, format, patterns_of};
use gradsync_tests::oracle::Format;

use super::{GATHERS, IDENTITIES, SCATTERS, SUMS, bits, integers};

fn address(tensor: &OwnedTensor<Cuda>) -> u64 {
    tensor.as_slice().address()
}

/// Passes without work copy nothing, and sums are formed in the memory of the given tensor.
pub(super) fn stay(ranks: &RankContext<'_>) {
    let is_alone = ranks.world_size() == 1;
    for format in Format::ALL {
        let moves = if is_alone { [GATHERS, SCATTERS].concat() } else { Vec::new() };
        for pass in [SUMS, IDENTITIES].concat().into_iter().chain(moves) {
            let given = ranks.integers(format, ranks.rank(), &[4, 3]);
            let place = address(&given);
            let back = pass(given, ranks.comm).unwrap();
            assert_eq!(address(&back), place, "{format:?}");
            assert_eq!(back.into_buffer().expect("a buffer").as_slice().address(), place, "{format:?}");
        }
    }
    if is_alone {
        // Even a scalar is not checked.
        let mut pipeline = everything();
        let scalar = ranks.tensor(Format::F32, &[2.0], &[]);
        let place = address(&scalar);
        let output = pipeline.forward(scalar, ranks.comm).unwrap();
        assert_eq!((address(&output), ranks.seen(&output)), (place, (Vec::new(), bits(Format::F32, &[2.0]))));
        let gradient = pipeline.backward(output, ranks.comm).unwrap();
        assert_eq!((address(&gradient), ranks.seen(&gradient)), (place, (Vec::new(), bits(Format::F32, &[2.0]))));
    }
}

/// A pipeline for any kind of tensor, in the form in which a caller may write it.
fn everything<M: OwnedTensorMemory>() -> Pipeline<M> {
    Pipeline::new().then(AllGather).then(AllReduce).then(ReduceScatter).then(AllReduceGradient)
}

/// The caller keeps a clone, and the operation works in the tensor that it was given.
pub(super) fn kept(ranks: &RankContext<'_>) {
    let shape = [2 * ranks.world_size(), 3];
    for format in Format::ALL {
        for pass in [SUMS, GATHERS, SCATTERS, IDENTITIES].concat() {
            let kept = ranks.integers(format, ranks.rank(), &shape);
            let before = ranks.seen(&kept);
            let given = kept.try_clone().unwrap();
            assert_ne!(address(&given), address(&kept));
            let output = pass(given, ranks.comm).unwrap();
            assert_eq!(ranks.seen(&kept), before, "{format:?}");
            drop(output);
        }
    }
}

/// Stands for another crate's tensor: elements in the middle of memory that may have other owners too.
struct Owner {
    buffer: Arc<DeviceBuffer>,
}

/// The number of elements before and after the tensor.
const MARGIN: usize = 3;

fn lend(ranks: &RankContext<'_>, owner: Owner, dtype: DType, shape: &[usize]) -> OwnedTensor<Cuda> {
    let address = owner.buffer.as_slice().address() + (MARGIN * dtype.size_bytes()) as u64;
    // SAFETY: The elements lie between the margins. The buffer lives as long as its owner, returns to its queue after the work that was
    // enqueued there, and is only read by work that waits for that queue.
    unsafe { OwnedTensor::from_raw_parts(ranks.queue, address, dtype, shape, owner) }.unwrap()
}

/// Sums are formed in the borrowed memory, which returns with its owner; operations that make a new tensor leave it unchanged, and release
/// it.
pub(super) fn lent(ranks: &RankContext<'_>) {
    let (rank, world_size) = (ranks.rank(), ranks.world_size());
    let shape = [world_size, 5];
    let len = world_size * 5;
    for format in Format::ALL {
        let outside = [7.0; MARGIN];
        let framed = |values: &[f64]| [&outside[..], values, &outside[..]].concat();
        let own = framed(&integers(rank, len));
        let sum: Vec<f64> =
            (0..len).map(|index| (0..world_size).map(|rank| integers(rank, len)[index]).sum()).collect();
        for (passes, after) in [(SUMS, framed(&sum)), (IDENTITIES, own.clone())] {
            for pass in passes {
                let buffer = Arc::new(DeviceBuffer::from_host(ranks.queue, Array::new(format, &own).slice()).unwrap());
                let tensor = lend(ranks, Owner { buffer }, buffer_dtype(format), &shape);
                let place = address(&tensor);
                let output = pass(tensor, ranks.comm).unwrap();
                assert_eq!(address(&output), place);
                let owner: Owner = output.into_owner().expect("the owner comes back");
                assert_eq!(whole(ranks, &owner.buffer), bits(format, &after), "{format:?}");
            }
        }
        for pass in [GATHERS, SCATTERS].concat() {
            let buffer = Arc::new(DeviceBuffer::from_host(ranks.queue, Array::new(format, &own).slice()).unwrap());
            let tensor = lend(ranks, Owner { buffer: buffer.clone() }, buffer_dtype(format), &shape);
            let output = pass(tensor, ranks.comm).unwrap();
            assert_eq!(whole(ranks, &buffer), bits(format, &own), "{format:?}");
            if world_size > 1 {
                assert_eq!(Arc::strong_count(&buffer), 1, "the owner is kept");
                assert!(output.into_owner::<Owner>().is_none(), "a new tensor has no owner");
            } else {
                assert!(output.into_owner::<DeviceBuffer>().is_none(), "it is another type");
            }
        }
    }
}

fn buffer_dtype(format: Format) -> DType {
    gradsync_tests::array::dtype(format)
}

/// The bits of the whole buffer, margins included.
fn whole(ranks: &RankContext<'_>, buffer: &DeviceBuffer) -> Vec<u64> {
    ranks.comm.synchronize(ranks.queue).unwrap();
    let mut host = Array::unwritten(format(buffer.as_slice().dtype()), buffer.as_slice().len());
    buffer.as_slice().copy_to_host(host.slice_mut()).unwrap();
    patterns_of(host.slice())
}

pub(super) fn fits(ranks: &RankContext<'_>) {
    let buffer = || DeviceBuffer::zeroed(ranks.queue, DType::F32, 6).unwrap();
    let refused = |outcome: Result<OwnedTensor<Cuda>>, shape: &[usize]| {
        let error = outcome.expect_err("6 elements").to_string();
        assert!(error.contains(&format!("{shape:?}")), "\"{error}\" does not name {shape:?}");
    };
    for shape in [&[5][..], &[7], &[2, 2], &[]] {
        let outcome = OwnedTensor::on_device(buffer(), shape);
        assert!(matches!(outcome, Err(Error::LengthMismatch { .. })), "{outcome:?}");
        refused(outcome, shape);
    }
    refused(OwnedTensor::on_device(buffer(), [usize::MAX, 2]), &[usize::MAX, 2]);
    // SAFETY: The tensor is refused, or has no elements.
    let lent = |shape: &[usize]| unsafe { OwnedTensor::from_raw_parts(ranks.queue, 256, DType::F16, shape, ()) };
    refused(lent(&[usize::MAX, 2]), &[usize::MAX, 2]);
    assert!(lent(&[2, 0]).unwrap().into_buffer().is_none(), "there is no buffer");
    let tensor = OwnedTensor::on_device(buffer(), [2, 3]).unwrap();
    let debug = format!("{tensor:?}");
    assert!(debug.contains("[2, 3]") && debug.contains("F32"), "{debug}");
    assert!(tensor.into_owner::<()>().is_none(), "a buffer has no owner");
}
