//! Test cases for collectives with scaling factors, with separate outputs, and on tensors at arbitrary addresses, shared by every transport
//! of host memory.
//!
//! All ranks of a communicator run a case, which leaves the communicator usable.

use gradsync::comm::{Collectives, Communicator, ReduceOp, Scaling};
use gradsync::ops::{
    Adasum, AdasumOptions, ZeroPartition, adasum_all_reduce, all_gather_owned, all_gather_owned_into,
    all_gather_tensors, all_reduce_tensors, all_reduce_tensors_into, pack, reduce_scatter_owned,
    reduce_scatter_owned_into, reduce_scatter_tensors, unpack,
};
use gradsync::{DType, Error, GradientBuffer, Slice, SliceMut};

use crate::array::{Array, patterns_of};
use crate::collectives::inputs;
use crate::oracle::Format;
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
    case("factors before and after a reduction", factors),
    case("a reduction into another vector", apart),
    case("a reduce-scatter in place", scatter_in_place),
    case("tensors that lie anywhere, reduced at once", loose),
    case("tensors gathered and scattered one by one", one_by_one),
    case("tensors that belong to ranks", owned),
    case("tensors that belong to ranks, into others", owned_apart),
    case("Adasum of tensors that lie anywhere", adasum_of_loose),
    case("a partition by ranks", partition),
    case("tensors that do not fit", misfits),
];

/// Lengths on both sides of the boundaries at which transports change their algorithm.
const LENS: [usize; 4] = [0, 5, 1000, 150_001];

fn own(comm: &dyn Communicator, format: Format, len: usize) -> (Vec<Vec<f64>>, Array) {
    let inputs = inputs(format, comm.world_size(), len);
    let own = Array::new(format, &inputs[comm.rank()]);
    (inputs, own)
}

/// The expected result, in f64 and in rank order: every element times the first factor, their sum times the second, rounded once.
fn factors(comm: &dyn Communicator) {
    for format in Format::ALL {
        for len in LENS {
            let (inputs, own) = own(comm, format, len);
            for (op, before, after) in
                [(ReduceOp::Sum, 0.3, -2.5), (ReduceOp::Max, -1.5, 1.0), (ReduceOp::Min, 1.0, 3.0)]
            {
                let mut data = own.clone();
                comm.all_reduce_scaled(data.slice_mut(), op, Scaling { before, after }).unwrap();
                let total = |index: usize| {
                    let scaled = inputs.iter().map(|input| input[index] * before);
                    match op {
                        ReduceOp::Max => scaled.fold(f64::NEG_INFINITY, f64::max),
                        ReduceOp::Min => scaled.fold(f64::INFINITY, f64::min),
                        _ => scaled.fold(0.0, |sum, value| sum + value),
                    }
                };
                let expected: Vec<f64> = (0..len).map(|index| format.round(total(index) * after)).collect();
                assert_equal(&format!("{op} of {len} {format:?} with {before} and {after}"), &data.values(), &expected);
            }
        }
    }
}

fn apart(comm: &dyn Communicator) {
    for format in Format::ALL {
        for len in LENS {
            let (_, own) = own(comm, format, len);
            for (op, scaling) in [(ReduceOp::Mean, Scaling::NONE), (ReduceOp::Sum, Scaling { before: 0.5, after: 3.0 })]
            {
                let (mut in_place, mut output) = (own.clone(), Array::unwritten(format, len));
                comm.all_reduce_scaled(in_place.slice_mut(), op, scaling).unwrap();
                comm.all_reduce_into(own.slice(), output.slice_mut(), op, scaling).unwrap();
                assert_eq!(output.patterns(), in_place.patterns(), "{op} of {len} {format:?}");
                assert_eq!(own.patterns(), self::own(comm, format, len).1.patterns(), "the input of {op}");
            }
        }
    }
}

fn scatter_in_place(comm: &dyn Communicator) {
    for len in LENS {
        let (_, mut data) = own(comm, Format::F32, len * comm.world_size());
        let mut shard = Array::unwritten(Format::F32, len);
        comm.reduce_scatter(data.slice(), shard.slice_mut(), ReduceOp::Sum).unwrap();
        comm.reduce_scatter_in_place(data.slice_mut(), ReduceOp::Sum).unwrap();
        let place = comm.rank() * len..(comm.rank() + 1) * len;
        assert_eq!(patterns_of(data.slice().range(place)), shard.patterns(), "shards of {len}");
    }
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

/// The result of reducing each tensor separately.
fn reduced(comm: &dyn Communicator, mut tensors: Vec<Array>, op: ReduceOp) -> Vec<Array> {
    tensors.iter_mut().for_each(|tensor| comm.all_reduce(tensor.slice_mut(), op).unwrap());
    tensors
}

fn loose(comm: &dyn Communicator) {
    for format in Format::ALL {
        for lens in [&[][..], &[7], &[0, 0], &[1, 0, 33, 4097, 2], &[90_000, 3, 70_001]] {
            let expected = reduced(comm, tensors(comm, format, lens), ReduceOp::Mean);
            let mut got = tensors(comm, format, lens);
            all_reduce_tensors(comm, &mut slices_mut(&mut got), ReduceOp::Mean, Scaling::NONE).unwrap();
            assert_eq!(patterns(&got), patterns(&expected), "{lens:?} of {format:?}");
            let (inputs, mut outputs) = (tensors(comm, format, lens), unwritten(format, lens));
            let (from, into) = (slices(&inputs), &mut slices_mut(&mut outputs));
            all_reduce_tensors_into(comm, &from, into, ReduceOp::Mean, Scaling::NONE).unwrap();
            assert_eq!(patterns(&outputs), patterns(&expected), "{lens:?} of {format:?} into others");
            assert_eq!(patterns(&inputs), patterns(&tensors(comm, format, lens)), "the inputs");
        }
    }
}

fn one_by_one(comm: &dyn Communicator) {
    let (world_size, format) = (comm.world_size(), Format::BF16);
    let lens = [3, 0, 257, 20_000];
    let inputs = tensors(comm, format, &lens);
    let mut whole: Vec<Array> = lens.iter().map(|len| Array::unwritten(format, len * world_size)).collect();
    all_gather_tensors(comm, &slices(&inputs), &mut slices_mut(&mut whole)).unwrap();
    for (input, whole) in inputs.iter().zip(&whole) {
        let mut expected = Array::unwritten(format, whole.len());
        comm.all_gather(input.slice(), expected.slice_mut()).unwrap();
        assert_eq!(whole.patterns(), expected.patterns(), "a gather of {}", input.len());
    }
    let mut parts: Vec<Array> = lens.iter().map(|&len| Array::unwritten(format, len)).collect();
    let shapes: Vec<Vec<usize>> = lens.iter().map(|len| vec![world_size, *len]).collect();
    let shapes: Vec<&[usize]> = shapes.iter().map(Vec::as_slice).collect();
    reduce_scatter_tensors(comm, &slices(&whole), &shapes, &mut slices_mut(&mut parts)).unwrap();
    for (whole, part) in whole.iter().zip(&parts) {
        let mut expected = Array::unwritten(format, part.len());
        comm.reduce_scatter(whole.slice(), expected.slice_mut(), ReduceOp::Sum).unwrap();
        assert_eq!(part.patterns(), expected.patterns(), "a scatter of {}", whole.len());
    }
}

/// A reduce-scatter to owners followed by an all-gather equals an all-reduce; in between, a rank's tensors have changed only where the rank
/// is their owner.
fn owned(comm: &dyn Communicator) {
    // Windows are multiples of 32 elements, and no tensor may cross the boundary of a window.
    let lens: Vec<usize> = [32, 16, 16, 0, 32].into_iter().cycle().take(5 * comm.world_size()).collect();
    let before = tensors(comm, Format::F32, &lens);
    let expected = patterns(&reduced(comm, before.clone(), ReduceOp::Sum));
    let mut got = before.clone();
    reduce_scatter_owned(comm, &mut slices_mut(&mut got), ReduceOp::Sum).unwrap();
    let (now, before) = (patterns(&got), patterns(&before));
    let mut owned = vec![0.0f64; lens.len()];
    for (index, is_owned) in owned.iter_mut().enumerate() {
        assert!(now[index] == expected[index] || now[index] == before[index], "tensor {index}");
        *is_owned = f64::from(now[index] == expected[index] && now[index] != before[index]);
    }
    if comm.world_size() > 1 {
        comm.all_reduce(&mut owned, ReduceOp::Sum).unwrap();
        let has_one = |(index, owners): (usize, &f64)| lens[index] == 0 || *owners == 1.0;
        assert!(owned.iter().enumerate().all(has_one), "{owned:?}");
    }
    all_gather_owned(comm, &mut slices_mut(&mut got)).unwrap();
    assert_eq!(patterns(&got), expected);
}

/// Every rank has different numbers, so that a tensor identifies its owner. Inputs stay unchanged, and a scatter does not write the outputs
/// of other owners.
fn owned_apart(comm: &dyn Communicator) {
    let lens: Vec<usize> = [32, 16, 16, 0, 32].into_iter().cycle().take(5 * comm.world_size()).collect();
    let inputs = tensors(comm, Format::F32, &lens);
    let before = patterns(&inputs);
    let mut in_place = inputs.clone();
    reduce_scatter_owned(comm, &mut slices_mut(&mut in_place), ReduceOp::Sum).unwrap();
    let mut outputs = unwritten(Format::F32, &lens);
    reduce_scatter_owned_into(comm, &slices(&inputs), &mut slices_mut(&mut outputs), ReduceOp::Sum).unwrap();
    let (scattered, unwritten_bits) = (patterns(&in_place), patterns(&unwritten(Format::F32, &lens)));
    let mut owned = vec![0.0f64; lens.len()];
    for (index, output) in patterns(&outputs).iter().enumerate() {
        let is_owned = *output == scattered[index];
        assert!(is_owned || (*output == unwritten_bits[index] && scattered[index] == before[index]), "tensor {index}");
        owned[index] = f64::from(is_owned);
    }
    comm.all_reduce(&mut owned, ReduceOp::Sum).unwrap();
    let has_one = |(index, owners): (usize, &f64)| lens[index] == 0 || *owners == 1.0;
    assert!(owned.iter().enumerate().all(has_one), "{owned:?}");

    let mut in_place = inputs.clone();
    all_gather_owned(comm, &mut slices_mut(&mut in_place)).unwrap();
    let mut outputs = unwritten(Format::F32, &lens);
    all_gather_owned_into(comm, &slices(&inputs), &mut slices_mut(&mut outputs)).unwrap();
    assert_eq!(patterns(&outputs), patterns(&in_place));
    assert_eq!(patterns(&inputs), before, "the inputs");
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

fn outputs_that_do_not_fit(comm: &dyn Communicator) {
    type Operation = fn(&dyn Communicator, &[Slice<'_>], &mut [SliceMut<'_>]) -> gradsync::Result<()>;
    let operations: [(&str, Operation); 3] = [
        ("all_reduce_tensors_into", |comm, inputs, outputs| {
            all_reduce_tensors_into(comm, inputs, outputs, ReduceOp::Sum, Scaling::NONE)
        }),
        ("all_gather_owned_into", |comm, inputs, outputs| all_gather_owned_into(comm, inputs, outputs)),
        ("reduce_scatter_owned_into", |comm, inputs, outputs| {
            reduce_scatter_owned_into(comm, inputs, outputs, ReduceOp::Sum)
        }),
    ];
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
