//! Test cases for collectives with scaling factors, with separate outputs, and on tensors at arbitrary addresses, shared by every transport
//! of host memory.
//!
//! All ranks of a communicator run a case, which leaves the communicator usable.

use gradsync::comm::{Collectives, Communicator, ReduceOp, Scaling};
use gradsync::onnx::{nccl_all_gather, nccl_all_gather_into, nccl_reduce_scatter, nccl_reduce_scatter_into};
use gradsync::ops::{
    Adasum, AdasumOptions, ZeroPartition, adasum_all_reduce, all_reduce_tensors, all_reduce_tensors_into, pack,
    reduce_scatter_tensors, unpack,
};
use gradsync::{DType, Error, GradientBuffer, Slice, SliceMut};

use crate::array::{Array, patterns_of};
use crate::oracle::Format;
use crate::suite::collectives::inputs;
use crate::tolerance::assert_equal;

/// A test case that all ranks run.
pub struct Case {
    /// The name, for messages.
    pub name: &'static str,
    /// The function to run.
    pub run: fn(&dyn Communicator),
}

const fn case(name: &'static str, run: fn(&dyn Communicator)) -> Case {
    Case { name, run }
}

/// All cases.
pub const ALL: &[Case] = &[
    case("Adasum of tensors that lie anywhere", adasum_of_loose),
    case("a partition by ranks", partition),
    case("tensors that do not fit", misfits),
    case("owned tensors that do not fit on one rank", misfits_of_one_rank),
];

fn own(comm: &dyn Communicator, format: Format, len: usize) -> (Vec<Vec<f64>>, Array) {
    let inputs = inputs(format, comm.world_size(), len);
    let own = Array::new(format, &inputs[comm.rank()]);
    (inputs, own)
}

/// Tensors of this rank, each in a separate allocation.
fn tensors(comm: &dyn Communicator, format: Format, lens: &[usize]) -> Vec<Array> {
    lens.iter().map(|&len| own(comm, format, len).1).collect()
}

/// Tensors in which unwritten elements are visible.
fn unwritten(format: Format, lens: &[usize]) -> Vec<Array> {
    lens.iter().map(|&len| Array::unwritten(format, len)).collect()
}

fn slices(tensors: &[Array]) -> Vec<Slice<'_>> {
    tensors.iter().map(Array::slice).collect()
}

fn slices_mut(tensors: &mut [Array]) -> Vec<SliceMut<'_>> {
    tensors.iter_mut().map(Array::slice_mut).collect()
}

fn patterns(tensors: &[Array]) -> Vec<Vec<u64>> {
    tensors.iter().map(Array::patterns).collect()
}

/// Tensors are packed, reduced and unpacked into other tensors of another dtype: the result is a manually filled buffer's, rounded once
/// more.
fn adasum_of_loose(comm: &dyn Communicator) {
    let lens = [9, 0, 130];
    let table = || ["a", "b", "c"].into_iter().zip(lens.map(|len| vec![len]));
    let inputs = tensors(comm, Format::F32, &lens);
    let mut expected = GradientBuffer::new(DType::F32, comm.world_size(), table()).unwrap();
    for ((_, mut tensor), input) in expected.tensors_mut().zip(&inputs) {
        tensor.copy_from_slice(input.slice()).unwrap();
    }
    let mut packed = GradientBuffer::new(DType::F32, comm.world_size(), table()).unwrap();
    pack(&mut packed, &slices(&inputs)).unwrap();
    for buffer in [&mut expected, &mut packed] {
        adasum_all_reduce(comm, buffer, AdasumOptions::default()).unwrap();
    }
    let mut outputs: Vec<Array> = lens.iter().map(|&len| Array::unwritten(Format::BF16, len)).collect();
    unpack(&packed, &mut slices_mut(&mut outputs)).unwrap();
    for ((_, tensor), output) in expected.tensors().zip(&outputs) {
        let rounded: Vec<f64> = tensor.data().to_f64_vec().into_iter().map(|value| Format::BF16.round(value)).collect();
        assert_equal("Adasum of loose tensors", &output.values(), &rounded);
    }
    assert_eq!(patterns(&inputs), patterns(&tensors(comm, Format::F32, &lens)), "the inputs");

    let mut adasum = Adasum::new(comm, &packed, AdasumOptions::default()).unwrap();
    let mut by_object = unwritten(Format::BF16, &lens);
    adasum.all_reduce_tensors_into(&mut packed, &slices(&inputs), &mut slices_mut(&mut by_object)).unwrap();
    assert_eq!(patterns(&by_object), patterns(&outputs), "into others");
    assert_eq!(patterns(&inputs), patterns(&tensors(comm, Format::F32, &lens)), "the inputs");
    let mut in_place = inputs.clone();
    adasum.all_reduce_tensors(&mut packed, &mut slices_mut(&mut in_place)).unwrap();
    for ((_, tensor), output) in expected.tensors().zip(&in_place) {
        assert_eq!(output.patterns(), patterns_of(tensor.data()), "in place");
    }
    let mut short = unwritten(Format::F32, &[9, 0, 129]);
    let message = adasum.all_reduce_tensors(&mut packed, &mut slices_mut(&mut short)).unwrap_err().to_string();
    assert!(message.contains("\"c\" of the buffer") && message.contains("129"), "{message}");
    let (from, into) = (slices(&inputs), &mut slices_mut(&mut short));
    let message = adasum.all_reduce_tensors_into(&mut packed, &from, into).unwrap_err().to_string();
    assert!(message.contains("output 2") && message.contains("129"), "{message}");
    assert_eq!(patterns(&short), patterns(&unwritten(Format::F32, &[9, 0, 129])), "nothing was written");
}

fn partition(comm: &dyn Communicator) {
    let table = || [("a", vec![33usize, 3]), ("b", vec![0]), ("c", vec![1000])];
    let fill = || {
        let mut buffer = GradientBuffer::new(DType::F32, comm.world_size(), table()).unwrap();
        let (_, values) = own(comm, Format::F32, buffer.len());
        buffer.as_mut_slice().as_bytes_mut().copy_from_slice(values.slice().as_bytes());
        buffer
    };
    let (mut expected, mut gradients) = (fill(), fill());
    comm.all_reduce(expected.as_mut_slice(), ReduceOp::Mean).unwrap();
    let zero = ZeroPartition::new(comm, &gradients).unwrap();
    zero.reduce_scatter(&mut gradients, ReduceOp::Mean).unwrap();
    zero.all_gather(&mut gradients).unwrap();
    assert_eq!(patterns_of(gradients.as_slice()), patterns_of(expected.as_slice()));
}

/// These errors are found on every rank before any data move.
fn misfits(comm: &dyn Communicator) {
    let mut mixed = [Array::unwritten(Format::F32, 2), Array::unwritten(Format::F64, 2)];
    match all_reduce_tensors(comm, &mut slices_mut(&mut mixed), ReduceOp::Sum, Scaling::NONE) {
        Err(Error::DTypeMismatch { what, .. }) => assert_eq!(what, "tensor 0 and tensor 1"),
        other => panic!("{other:?} for two dtypes"),
    }
    outputs_that_do_not_fit(comm);
    let mut buffer = GradientBuffer::new(DType::F32, comm.world_size(), [("a", [3]), ("b", [4])]).unwrap();
    let tensors = [Array::unwritten(Format::F32, 3), Array::unwritten(Format::F32, 5)];
    let message = pack(&mut buffer, &slices(&tensors)).unwrap_err().to_string();
    assert!(message.contains("\"b\"") && message.contains('5'), "{message}");
    assert!(buffer.tensor(0).data().to_f64_vec().iter().all(|&value| value == 0.0), "nothing was written");
    let message = unpack(&buffer, &mut slices_mut(&mut mixed[..1])).unwrap_err().to_string();
    assert!(message.contains("tensors of the buffer"), "{message}");
    if comm.world_size() > 1 {
        let (rows, mut outputs) = (comm.world_size() + 1, [Array::unwritten(Format::F32, 1)]);
        let inputs = [Array::unwritten(Format::F32, rows)];
        let outcome = reduce_scatter_tensors(comm, &slices(&inputs), &[&[rows, 1]], &mut slices_mut(&mut outputs));
        let message = outcome.unwrap_err().to_string();
        assert!(message.contains(&format!("[{rows}, 1] does not divide into {} shards", rows - 1)), "{message}");
    }
}

/// An operation with separate outputs.
type Operation = fn(&dyn Communicator, &[Slice<'_>], &mut [SliceMut<'_>]) -> gradsync::Result<()>;

const OWNED: [(&str, Operation); 2] = [
    ("nccl_all_gather_into", |comm, inputs, outputs| nccl_all_gather_into(comm, inputs, outputs)),
    ("nccl_reduce_scatter_into", |comm, inputs, outputs| {
        nccl_reduce_scatter_into(comm, inputs, outputs, ReduceOp::Sum)
    }),
];

/// The last rank's own tensors do not fit, or differ from the other ranks'. Every rank gets an error that names them, and can go on.
fn misfits_of_one_rank(comm: &dyn Communicator) {
    let (rank, last) = (comm.rank(), comm.world_size() - 1);
    if last == 0 {
        return;
    }
    let check = |name: &str, outcome: gradsync::Result<()>, words: &[&str]| {
        let message = outcome.expect_err(name).to_string();
        let refuses = format!("rank {last} refuses: ");
        assert_eq!(message.contains(&refuses), rank != last, "{name}: {message}");
        assert!(words.iter().all(|word| message.contains(word)), "{name}: {message}");
    };
    for (name, operation) in OWNED {
        // One tensor of 33 elements is longer than the shards of 32.
        for (inputs, outputs, words) in [
            ((Format::F32, &[2, 3][..]), (Format::F32, &[2, 4][..]), ["input 1", "output 1"]),
            ((Format::F32, &[2, 3]), (Format::F16, &[2, 3]), ["tensor 0", "output 0"]),
            ((Format::F32, &[2, 3]), (Format::F32, &[2]), ["inputs has 2", "outputs has 1"]),
            ((Format::F32, &[33]), (Format::F32, &[33]), ["tensor 0", "0..33"]),
        ] {
            let fitting = (Format::F32, &[2, 3][..]);
            let (inputs, outputs) = if rank == last { (inputs, outputs) } else { (fitting, fitting) };
            let [inputs, mut outputs] = [inputs, outputs].map(|(format, lens)| unwritten(format, lens));
            let before = patterns(&outputs);
            check(name, operation(comm, &slices(&inputs), &mut slices_mut(&mut outputs)), &words);
            assert_eq!(patterns(&outputs), before, "nothing is written");
        }
        let lens = if rank == last { [3, 2] } else { [2, 3] };
        let (inputs, mut outputs) = (unwritten(Format::F32, &lens), unwritten(Format::F32, &lens));
        match operation(comm, &slices(&inputs), &mut slices_mut(&mut outputs)) {
            Err(Error::Disagreement(found)) => {
                assert_eq!((found.left.as_str(), found.right_rank), ("2 elements in tensor 0", last));
                assert_eq!(found.right, "3 elements in tensor 0");
            }
            other => panic!("{name}: {other:?} for tensors that differ"),
        }
    }
    let mixed = |rank| [(Format::F32, 2), (if rank == last { Format::F64 } else { Format::F32 }, 2)];
    let tensors = || mixed(rank).map(|(format, len)| Array::unwritten(format, len));
    let words = ["tensor 0 and tensor 1", "f64"];
    check("nccl_all_gather", nccl_all_gather(comm, &mut slices_mut(&mut tensors())), &words);
    check("nccl_reduce_scatter", nccl_reduce_scatter(comm, &mut slices_mut(&mut tensors()), ReduceOp::Sum), &words);
    let mut other_numbers = unwritten(Format::F32, if rank == last { &[] } else { &[2] });
    let error = nccl_all_gather(comm, &mut slices_mut(&mut other_numbers)).unwrap_err().to_string();
    assert!(error.contains("number of tensors"), "{error}");
}

fn outputs_that_do_not_fit(comm: &dyn Communicator) {
    let all_reduce: (&str, Operation) = ("all_reduce_tensors_into", |comm, inputs, outputs| {
        all_reduce_tensors_into(comm, inputs, outputs, ReduceOp::Sum, Scaling::NONE)
    });
    let operations = [all_reduce].into_iter().chain(OWNED);
    let inputs = unwritten(Format::F32, &[2, 3]);
    for (name, operation) in operations {
        for (mut outputs, words) in [
            (unwritten(Format::F32, &[2, 4]), ["input 1", "output 1"]),
            (unwritten(Format::F16, &[2, 3]), ["tensor 0", "output 0"]),
            (unwritten(Format::F32, &[2]), ["inputs has 2", "outputs has 1"]),
        ] {
            let before = patterns(&outputs);
            let message = operation(comm, &slices(&inputs), &mut slices_mut(&mut outputs)).unwrap_err().to_string();
            assert!(message.contains(name) && words.iter().all(|word| message.contains(word)), "{message}");
            assert_eq!(patterns(&outputs), before, "nothing is written");
        }
        operation(comm, &[], &mut []).unwrap();
    }
}
