//! All-reduces, gathers and scatters of tensors in separate memory, in any memory.

use gradsync::Error;
use gradsync::comm::{ReduceOp, Scaling};
use gradsync::memory::Memory;
use gradsync::ops::{all_gather_tensors, all_reduce_tensors, all_reduce_tensors_into, reduce_scatter_tensors};

use super::Report;
use super::checks::{Checks, Expected};
use super::operands::Operands;
use crate::array::Array;
use crate::inputs::Random;
use crate::oracle::Format;

type Slice<'a, O> = <<O as Operands>::Memory as Memory>::Slice<'a>;
pub(super) type SliceMut<'a, O> = <<O as Operands>::Memory as Memory>::SliceMut<'a>;

/// Every rank's tensors, `[rank][tensor]`, uniform between -10 and 10; all ranks compute the same list.
pub(super) fn tensors<O: Operands>(operands: &O, format: Format, lens: &[usize], seed: u64) -> Vec<Vec<Vec<f64>>> {
    (0..operands.comm().world_size()).map(|rank| uniform(format, lens, seed * 100 + rank as u64)).collect()
}

/// Tensors in memory of their own.
pub(super) fn place<O: Operands>(operands: &O, format: Format, tensors: &[Vec<f64>]) -> Vec<O::Placed> {
    let place = |(index, tensor): (usize, &Vec<f64>)| operands.place(&Array::new(format, tensor), index % 2);
    tensors.iter().enumerate().map(place).collect()
}

/// Tensors of numbers between -10 and 10.
pub fn uniform(format: Format, lens: &[usize], seed: u64) -> Vec<Vec<f64>> {
    let mut random = Random::new(seed);
    lens.iter().map(|&len| (0..len).map(|_| format.round(20.0 * random.unit() - 10.0)).collect()).collect()
}

/// One of the tensors, on every rank.
pub fn of_all(ranks: &[Vec<Vec<f64>>], tensor: usize) -> Vec<Vec<f64>> {
    ranks.iter().map(|tensors| tensors[tensor].clone()).collect()
}

pub(super) fn slices<O: Operands>(tensors: &[O::Placed]) -> Vec<Slice<'_, O>> {
    tensors.iter().map(O::slice).collect()
}

pub(super) fn slices_mut<O: Operands>(tensors: &mut [O::Placed]) -> Vec<SliceMut<'_, O>> {
    tensors.iter_mut().map(O::slice_mut).collect()
}

/// Tensors of these lengths, one after the other.
fn split<'a, O: Operands>(data: &'a mut O::Placed, lens: &[usize]) -> Vec<SliceMut<'a, O>> {
    let mut end = 0;
    let range = |len: &usize| {
        end += len;
        end - len..end
    };
    O::Memory::ranges_mut(O::slice_mut(data), &lens.iter().map(range).collect::<Vec<_>>())
}

/// The shapes of upstream's test: {2,3}, {128}, {512}, {7,13}, {1024,3}.
const UPSTREAM: [usize; 5] = [6, 128, 512, 91, 3072];
/// More elements than transports move at once.
const LONG: [usize; 3] = [90_000, 3, 70_001];
const WITH_EMPTY: [usize; 8] = [0, 33, 0, 0, 1, 257, 4097, 0];

/// All cases.
pub fn run<O: Operands>(operands: &O, report: &mut impl Report) {
    report.case("upstream's all-reduce", || upstream(operands));
    for format in Format::ALL {
        report.case(&format!("all_reduce of tensors in a row {}", format.name()), || in_a_row(operands, format));
        report.case(&format!("all_reduce of scattered tensors {}", format.name()), || scattered(operands, format));
        report.case(&format!("all_reduce where ranks' memory differs {}", format.name()), || {
            apart_here(operands, format)
        });
        report.case(&format!("all_gather of tensors {}", format.name()), || all_gather(operands, format));
        report.case(&format!("reduce_scatter of tensors {}", format.name()), || reduce_scatter(operands, format));
    }
    report.case("no tensors, and tensors without elements", || empty(operands));
    report.case("mixed dtypes", || mixed(operands));
    report.case("shapes that do not divide", || indivisible(operands));
}

const CHOICES: [(ReduceOp, Scaling); 4] = [
    (ReduceOp::Sum, Scaling::NONE),
    (ReduceOp::Mean, Scaling { before: 1.0, after: 0.1 }),
    (ReduceOp::Sum, Scaling { before: 0.3, after: 1.0 }),
    (ReduceOp::Max, Scaling::NONE),
];

/// Every rank has the same tensors, so the result is the tensor times the number of ranks.
fn upstream<O: Operands>(operands: &O) {
    let mut checks = Checks::new(operands.comm());
    for format in [Format::F16, Format::F32, Format::F64] {
        let tensors = uniform(format, &UPSTREAM, 5);
        let ranks = vec![tensors.clone(); operands.comm().world_size()];
        let mut placed = place(operands, format, &tensors);
        all_reduce_tensors(operands.comm(), &mut slices_mut::<O>(&mut placed), ReduceOp::Sum, Scaling::NONE).unwrap();
        for (index, tensor) in placed.iter().enumerate() {
            let expected = operands.reduced(ReduceOp::Sum, format, Scaling::NONE, &of_all(&ranks, index));
            checks.same(format!("tensor {index} of {format:?}"), operands.read(tensor), &expected);
        }
    }
    checks.finish();
}

/// Tensors that are contiguous in one buffer, empty ones among them, are reduced in place.
fn in_a_row<O: Operands>(operands: &O, format: Format) {
    let mut checks = Checks::new(operands.comm());
    for lens in [&UPSTREAM[..], &WITH_EMPTY] {
        let ranks = tensors(operands, format, lens, 1);
        let inputs: Vec<Vec<f64>> = ranks.iter().map(|tensors| tensors.concat()).collect();
        for (op, scaling) in CHOICES {
            let own = Array::new(format, &inputs[operands.comm().rank()]);
            let mut data = operands.place(&own, 1);
            let mut tensors = split::<O>(&mut data, lens);
            all_reduce_tensors(operands.comm(), &mut tensors, op, scaling).unwrap();
            drop(tensors);
            let expected = operands.reduced(op, format, scaling, &inputs);
            checks.same(format!("{op}, {scaling:?} of {lens:?}"), operands.read(&data), &expected);
        }
    }
    checks.finish();
}

/// Tensors with memory of their own are packed into an arena.
fn scattered<O: Operands>(operands: &O, format: Format) {
    let mut checks = Checks::new(operands.comm());
    for lens in [&UPSTREAM[..], &WITH_EMPTY] {
        let ranks = tensors(operands, format, lens, 2);
        for (op, scaling) in CHOICES {
            let mut placed = place(operands, format, &ranks[operands.comm().rank()]);
            all_reduce_tensors(operands.comm(), &mut slices_mut::<O>(&mut placed), op, scaling).unwrap();
            for (index, tensor) in placed.iter().enumerate() {
                let expected = operands.reduced(op, format, scaling, &of_all(&ranks, index));
                let what = format!("tensor {index} of {lens:?}, {op}, {scaling:?}");
                checks.same(what, operands.read(tensor), &expected);
            }
            into_others(operands, format, &ranks, (op, scaling), &mut checks);
        }
    }
    checks.finish();
}

/// The outputs are separate from the inputs: scattered on even ranks and contiguous on odd ranks. The inputs stay unchanged.
fn into_others<O: Operands>(
    operands: &O,
    format: Format,
    ranks: &[Vec<Vec<f64>>],
    (op, scaling): (ReduceOp, Scaling),
    checks: &mut Checks<'_>,
) {
    let own = &ranks[operands.comm().rank()];
    let inputs = place(operands, format, own);
    let lens: Vec<usize> = own.iter().map(Vec::len).collect();
    let pieces: Vec<usize> = if operands.comm().rank() % 2 == 0 { lens.clone() } else { vec![lens.iter().sum()] };
    let mut outputs: Vec<O::Placed> = pieces.iter().map(|&len| operands.room(format, len, 1)).collect();
    let mut tensors = match operands.comm().rank() % 2 {
        0 => slices_mut::<O>(&mut outputs),
        _ => split::<O>(&mut outputs[0], &lens),
    };
    all_reduce_tensors_into(operands.comm(), &slices::<O>(&inputs), &mut tensors, op, scaling).unwrap();
    drop(tensors);
    let got: Vec<u64> = outputs.iter().flat_map(|piece| operands.read(piece).patterns()).collect();
    let whole: Vec<Vec<f64>> = ranks.iter().map(|tensors| tensors.concat()).collect();
    let case = format!("{op}, {scaling:?} of {lens:?} into others");
    checks.same(case, Array::from_patterns(format, got.into_iter()), &operands.reduced(op, format, scaling, &whole));
    for (input, before) in inputs.iter().zip(own) {
        assert_eq!(operands.read(input), Array::new(format, before), "the inputs");
    }
}

/// Tensors that are contiguous on some ranks and separate on others, wholly or in part: every rank sends the same number of elements.
fn apart_here<O: Operands>(operands: &O, format: Format) {
    /// The number of contiguous tensors before a gap.
    const WHOLE: usize = usize::MAX;
    let (rank, last) = (operands.comm().rank(), operands.comm().world_size() - 1);
    // The numbers are for rank 0, for the last rank, and for the ranks between.
    let runs = [(WHOLE, 1, 1), (1, WHOLE, WHOLE), (WHOLE, 2, 1), (2, 3, WHOLE), (1, 2, 3)];
    let mut checks = Checks::new(operands.comm());
    for lens in [&UPSTREAM[..], &WITH_EMPTY, &[7], &[0, 5], &[0, 0, 0], &LONG] {
        let ranks = tensors(operands, format, lens, 6);
        let count = if lens == LONG { 1 } else { runs.len() };
        for (of_first, of_last, of_others) in runs.into_iter().take(count) {
            let run = match rank {
                0 => of_first,
                _ if rank == last => of_last,
                _ => of_others,
            };
            // Each run of tensors has memory of its own.
            let pieces = ranks[rank].chunks(run.min(lens.len())).map(|tensors| Array::new(format, &tensors.concat()));
            let mut placed: Vec<O::Placed> = pieces.map(|piece| operands.place(&piece, 1)).collect();
            let each = placed.iter_mut().zip(lens.chunks(run.min(lens.len())));
            let mut tensors: Vec<_> = each.flat_map(|(piece, lens)| split::<O>(piece, lens)).collect();
            all_reduce_tensors(operands.comm(), &mut tensors, ReduceOp::Sum, Scaling::NONE).unwrap();
            drop(tensors);
            let got: Vec<u64> = placed.iter().flat_map(|piece| operands.read(piece).patterns()).collect();
            let inputs: Vec<Vec<f64>> = ranks.iter().map(|tensors| tensors.concat()).collect();
            let expected = operands.reduced(ReduceOp::Sum, format, Scaling::NONE, &inputs);
            let what = format!("runs of {of_first}, {of_last} and {of_others} tensors of {lens:?}");
            checks.same(what, Array::from_patterns(format, got.into_iter()), &expected);
        }
    }
    checks.finish();
}

fn all_gather<O: Operands>(operands: &O, format: Format) {
    let mut checks = Checks::new(operands.comm());
    for lens in [&UPSTREAM[..], &WITH_EMPTY] {
        let ranks = tensors(operands, format, lens, 3);
        let inputs = place(operands, format, &ranks[operands.comm().rank()]);
        let mut outputs: Vec<O::Placed> =
            lens.iter().map(|&len| operands.room(format, len * operands.comm().world_size(), 1)).collect();
        all_gather_tensors(operands.comm(), &slices::<O>(&inputs), &mut slices_mut::<O>(&mut outputs)).unwrap();
        for (index, output) in outputs.iter().enumerate() {
            let expected = Expected::bits(Array::new(format, &of_all(&ranks, index).concat()));
            checks.same(format!("tensor {index} of {lens:?}"), operands.read(output), &expected);
        }
    }
    checks.finish();
}

/// The first dimension is divisible: each tensor has `rows × P` rows.
fn reduce_scatter<O: Operands>(operands: &O, format: Format) {
    let rows: [(usize, &[usize]); 6] = [(1, &[]), (2, &[3]), (33, &[]), (0, &[5]), (7, &[13, 2]), (4, &[0, 3])];
    let shapes: Vec<Vec<usize>> =
        rows.iter().map(|(rows, others)| [&[rows * operands.comm().world_size()][..], others].concat()).collect();
    let lens: Vec<usize> = shapes.iter().map(|shape| shape.iter().product()).collect();
    let ranks = tensors(operands, format, &lens, 4);
    let inputs = place(operands, format, &ranks[operands.comm().rank()]);
    let mut outputs: Vec<O::Placed> =
        lens.iter().map(|len| operands.room(format, len / operands.comm().world_size(), 1)).collect();
    let shapes: Vec<&[usize]> = shapes.iter().map(Vec::as_slice).collect();
    reduce_scatter_tensors(operands.comm(), &slices::<O>(&inputs), &shapes, &mut slices_mut::<O>(&mut outputs))
        .unwrap();
    let mut checks = Checks::new(operands.comm());
    for (index, output) in outputs.iter().enumerate() {
        let whole = operands.reduced(ReduceOp::Sum, format, Scaling::NONE, &of_all(&ranks, index));
        let shard = whole.shard(operands.comm().rank(), lens[index] / operands.comm().world_size());
        checks.own(format!("tensor {index} of shape {:?}", shapes[index]), operands.read(output), &shard);
    }
    checks.finish();
}

fn empty<O: Operands>(operands: &O) {
    all_reduce_tensors(operands.comm(), &mut [], ReduceOp::Sum, Scaling::NONE).unwrap();
    all_gather_tensors(operands.comm(), &[], &mut []).unwrap();
    reduce_scatter_tensors(operands.comm(), &[], &[], &mut []).unwrap();
    let nothing = vec![Vec::new(); 3];
    let mut placed = place(operands, Format::F32, &nothing);
    all_reduce_tensors(operands.comm(), &mut slices_mut::<O>(&mut placed), ReduceOp::Mean, Scaling::NONE).unwrap();
    placed.iter().for_each(|tensor| assert!(operands.read(tensor).is_empty()));
    assert_works(operands);
}

/// The communicator can still be used.
fn assert_works<O: Operands>(operands: &O) {
    let ranks = tensors(operands, Format::F32, &[33], 9);
    let mut placed = place(operands, Format::F32, &ranks[operands.comm().rank()]);
    all_reduce_tensors(operands.comm(), &mut slices_mut::<O>(&mut placed), ReduceOp::Sum, Scaling::NONE).unwrap();
    let expected = operands.reduced(ReduceOp::Sum, Format::F32, Scaling::NONE, &of_all(&ranks, 0));
    let mut checks = Checks::new(operands.comm());
    checks.same("an all-reduce afterwards", operands.read(&placed[0]), &expected);
    checks.finish();
}

/// Mixed dtypes are refused on every rank before any communication, so the communicator stays usable.
fn mixed<O: Operands>(operands: &O) {
    let mut tensors = [Format::F32, Format::F32, Format::BF16].map(|format| operands.room(format, 5, 0));
    match all_reduce_tensors(operands.comm(), &mut slices_mut::<O>(&mut tensors), ReduceOp::Sum, Scaling::NONE) {
        Err(Error::DTypeMismatch { operation: "all_reduce_tensors", what, .. }) => {
            assert!(what.contains("tensor 0") && what.contains("tensor 2"), "{what}");
        }
        other => panic!("mixed dtypes gave {other:?}"),
    }
    assert_works(operands);
}

/// The first dimension must be divisible by the world size: one row too many is refused, and so is a scalar, which has no first dimension.
fn indivisible<O: Operands>(operands: &O) {
    let size = operands.comm().world_size();
    let refused = |shapes: &[&[usize]], wanted: usize| {
        let place = |shape: &&[usize]| operands.room(Format::F32, shape.iter().product(), 0);
        let inputs: Vec<O::Placed> = shapes.iter().map(place).collect();
        let mut outputs: Vec<O::Placed> =
            shapes.iter().map(|shape| operands.room(Format::F32, shape.iter().product::<usize>() / size, 0)).collect();
        match reduce_scatter_tensors(operands.comm(), &slices::<O>(&inputs), shapes, &mut slices_mut::<O>(&mut outputs))
        {
            Err(Error::InvalidArgument { operation: "reduce_scatter_tensors", reason }) => {
                for part in [format!("input {wanted} "), format!("{:?}", shapes[wanted]), format!("{size} shards")] {
                    assert!(reason.contains(&part), "{reason} does not say {part}");
                }
            }
            other => panic!("shapes {shapes:?} gave {other:?}"),
        }
    };
    refused(&[&[]], 0);
    if size > 1 {
        refused(&[&[2 * size, 3], &[size + 1, 2]], 1);
        // The number of elements is divisible, but the first dimension is not.
        refused(&[&[1, size]], 0);
    }
    assert_works(operands);
}
