//! All-reduces, gathers and scatters of tensors in separate memory.

use std::rc::Rc;

use gradsync::Error;
use gradsync::comm::{ReduceOp, Scaling};
use gradsync::driver::DeviceSliceMut;
use gradsync::ops::{all_gather_tensors, all_reduce_tensors, all_reduce_tensors_into, reduce_scatter_tensors};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;

use super::{World, of_all, slices, slices_mut};
use crate::checks::{Checks, Expected, reduced};
use crate::placed::Placed;
use crate::report::Report;

/// The shapes of upstream's test: {2,3}, {128}, {512}, {7,13}, {1024,3}.
const UPSTREAM: [usize; 5] = [6, 128, 512, 91, 3072];
const WITH_EMPTY: [usize; 8] = [0, 33, 0, 0, 1, 257, 4097, 0];

pub(super) fn run(world: &World<'_>, report: &mut Report) {
    report.case("upstream's all-reduce", || upstream(world));
    for format in Format::ALL {
        report.case(&format!("all_reduce of tensors in a row {}", format.name()), || in_a_row(world, format));
        report.case(&format!("all_reduce of scattered tensors {}", format.name()), || scattered(world, format));
        report.case(&format!("all_reduce where ranks' memory differs {}", format.name()), || apart_here(world, format));
        report.case(&format!("all_gather of tensors {}", format.name()), || all_gather(world, format));
        report.case(&format!("reduce_scatter of tensors {}", format.name()), || reduce_scatter(world, format));
    }
    report.case("no tensors, and tensors without elements", || empty(world));
    report.case("mixed dtypes", || mixed(world));
    report.case("shapes that do not divide", || indivisible(world));
}

const CHOICES: [(ReduceOp, Scaling); 4] = [
    (ReduceOp::Sum, Scaling::NONE),
    (ReduceOp::Mean, Scaling { before: 1.0, after: 0.1 }),
    (ReduceOp::Sum, Scaling { before: 0.3, after: 1.0 }),
    (ReduceOp::Max, Scaling::NONE),
];

/// Every rank has the same tensors, so the result is the tensor times the number of ranks.
fn upstream(world: &World<'_>) {
    let mut checks = Checks::new(world.comm);
    for format in [Format::F16, Format::F32, Format::F64] {
        let tensors = super::uniform(format, &UPSTREAM, 5);
        let ranks = vec![tensors.clone(); world.size()];
        let mut placed = world.place(format, &tensors);
        all_reduce_tensors(world.comm, &mut slices_mut(&mut placed), ReduceOp::Sum, Scaling::NONE).unwrap();
        for (index, tensor) in placed.iter().enumerate() {
            let expected = reduced(ReduceOp::Sum, format, Scaling::NONE, &of_all(&ranks, index));
            checks.same(format!("tensor {index} of {format:?}"), tensor.read(world.comm), &expected);
        }
    }
    checks.finish();
}

/// Tensors that are contiguous in one buffer, empty ones among them, are reduced in place.
fn in_a_row(world: &World<'_>, format: Format) {
    let mut checks = Checks::new(world.comm);
    for lens in [&UPSTREAM[..], &WITH_EMPTY] {
        let ranks = world.tensors(format, lens, 1);
        let inputs: Vec<Vec<f64>> = ranks.iter().map(|tensors| tensors.concat()).collect();
        for (op, scaling) in CHOICES {
            let own = Array::new(format, &inputs[world.rank()]);
            let mut data = Placed::new(&world.context.queue, &own, 1);
            let mut rest = data.slice_mut();
            let mut tensors: Vec<DeviceSliceMut<'_>> = Vec::new();
            for &len in lens {
                let (tensor, others) = rest.split_at_mut(len);
                tensors.push(tensor);
                rest = others;
            }
            all_reduce_tensors(world.comm, &mut tensors, op, scaling).unwrap();
            let expected = reduced(op, format, scaling, &inputs);
            checks.same(format!("{op}, {scaling:?} of {lens:?}"), data.read(world.comm), &expected);
        }
    }
    checks.finish();
}

/// Tensors with memory of their own are packed into an arena.
fn scattered(world: &World<'_>, format: Format) {
    let mut checks = Checks::new(world.comm);
    for lens in [&UPSTREAM[..], &WITH_EMPTY] {
        let ranks = world.tensors(format, lens, 2);
        for (op, scaling) in CHOICES {
            let mut placed = world.place(format, &ranks[world.rank()]);
            all_reduce_tensors(world.comm, &mut slices_mut(&mut placed), op, scaling).unwrap();
            for (index, tensor) in placed.iter().enumerate() {
                let expected = reduced(op, format, scaling, &of_all(&ranks, index));
                let what = format!("tensor {index} of {lens:?}, {op}, {scaling:?}");
                checks.same(what, tensor.read(world.comm), &expected);
            }
            into_others(world, format, &ranks, (op, scaling), &mut checks);
        }
    }
    checks.finish();
}

/// The outputs are separate from the inputs: scattered on even ranks and contiguous on odd ranks. The inputs stay unchanged.
fn into_others(
    world: &World<'_>,
    format: Format,
    ranks: &[Vec<Vec<f64>>],
    (op, scaling): (ReduceOp, Scaling),
    checks: &mut Checks<'_>,
) {
    let (queue, own) = (&world.context.queue, &ranks[world.rank()]);
    let inputs = world.place(format, own);
    let lens: Vec<usize> = own.iter().map(Vec::len).collect();
    let pieces: Vec<usize> = if world.rank() % 2 == 0 { lens.clone() } else { vec![lens.iter().sum()] };
    let mut outputs: Vec<Placed> = pieces.iter().map(|&len| Placed::unwritten(queue, format, len, 1)).collect();
    let mut tensors: Vec<DeviceSliceMut<'_>> = slices_mut(&mut outputs);
    if world.rank() % 2 == 1 {
        let mut rest = tensors.remove(0);
        for &len in &lens {
            let (tensor, others) = rest.split_at_mut(len);
            tensors.push(tensor);
            rest = others;
        }
    }
    all_reduce_tensors_into(world.comm, &slices(&inputs), &mut tensors, op, scaling).unwrap();
    let got: Vec<u64> = outputs.iter().flat_map(|piece| piece.read(world.comm).patterns()).collect();
    let whole: Vec<Vec<f64>> = ranks.iter().map(|tensors| tensors.concat()).collect();
    let case = format!("{op}, {scaling:?} of {lens:?} into others");
    checks.same(case, Array::from_patterns(format, got.into_iter()), &reduced(op, format, scaling, &whole));
    for (input, before) in inputs.iter().zip(own) {
        assert_eq!(input.read(world.comm), Array::new(format, before), "the inputs");
    }
}

/// Tensors that are contiguous on some ranks and separate on others, wholly or in part: every rank sends the same number of elements.
fn apart_here(world: &World<'_>, format: Format) {
    /// The number of contiguous tensors before a gap.
    const WHOLE: usize = usize::MAX;
    let (rank, last) = (world.rank(), world.size() - 1);
    // The numbers are for rank 0, for the last rank, and for the ranks between.
    let runs = [(WHOLE, 1, 1), (1, WHOLE, WHOLE), (WHOLE, 2, 1), (2, 3, WHOLE), (1, 2, 3)];
    let mut checks = Checks::new(world.comm);
    for lens in [&UPSTREAM[..], &WITH_EMPTY, &[7], &[0, 5], &[0, 0, 0]] {
        let ranks = world.tensors(format, lens, 6);
        for (of_first, of_last, of_others) in runs {
            let run = match rank {
                0 => of_first,
                _ if rank == last => of_last,
                _ => of_others,
            };
            // Each run of tensors has memory of its own.
            let pieces = ranks[rank].chunks(run.min(lens.len())).map(|tensors| Array::new(format, &tensors.concat()));
            let mut placed: Vec<Placed> = pieces.map(|piece| Placed::new(&world.context.queue, &piece, 1)).collect();
            let mut tensors: Vec<DeviceSliceMut<'_>> = Vec::new();
            for (piece, lens) in placed.iter_mut().zip(lens.chunks(run.min(lens.len()))) {
                let mut rest = piece.slice_mut();
                for &len in lens {
                    let (tensor, others) = rest.split_at_mut(len);
                    tensors.push(tensor);
                    rest = others;
                }
            }
            all_reduce_tensors(world.comm, &mut tensors, ReduceOp::Sum, Scaling::NONE).unwrap();
            let got: Vec<u64> = placed.iter().flat_map(|piece| piece.read(world.comm).patterns()).collect();
            let inputs: Vec<Vec<f64>> = ranks.iter().map(|tensors| tensors.concat()).collect();
            let expected = reduced(ReduceOp::Sum, format, Scaling::NONE, &inputs);
            let what = format!("runs of {of_first}, {of_last} and {of_others} tensors of {lens:?}");
            checks.same(what, Array::from_patterns(format, got.into_iter()), &expected);
        }
    }
    checks.finish();
}

fn all_gather(world: &World<'_>, format: Format) {
    let mut checks = Checks::new(world.comm);
    for lens in [&UPSTREAM[..], &WITH_EMPTY] {
        let ranks = world.tensors(format, lens, 3);
        let inputs = world.place(format, &ranks[world.rank()]);
        let mut outputs: Vec<Placed> =
            lens.iter().map(|&len| Placed::unwritten(&world.context.queue, format, len * world.size(), 1)).collect();
        all_gather_tensors(world.comm, &slices(&inputs), &mut slices_mut(&mut outputs)).unwrap();
        for (index, output) in outputs.iter().enumerate() {
            let expected = Rc::new(Expected::Bits(Array::new(format, &of_all(&ranks, index).concat())));
            checks.same(format!("tensor {index} of {lens:?}"), output.read(world.comm), &expected);
        }
    }
    checks.finish();
}

/// The first dimension is divisible: each tensor has `rows × P` rows.
fn reduce_scatter(world: &World<'_>, format: Format) {
    let rows: [(usize, &[usize]); 6] = [(1, &[]), (2, &[3]), (33, &[]), (0, &[5]), (7, &[13, 2]), (4, &[0, 3])];
    let shapes: Vec<Vec<usize>> =
        rows.iter().map(|(rows, others)| [&[rows * world.size()][..], others].concat()).collect();
    let lens: Vec<usize> = shapes.iter().map(|shape| shape.iter().product()).collect();
    let ranks = world.tensors(format, &lens, 4);
    let inputs = world.place(format, &ranks[world.rank()]);
    let mut outputs: Vec<Placed> =
        lens.iter().map(|len| Placed::unwritten(&world.context.queue, format, len / world.size(), 1)).collect();
    let shapes: Vec<&[usize]> = shapes.iter().map(Vec::as_slice).collect();
    reduce_scatter_tensors(world.comm, &slices(&inputs), &shapes, &mut slices_mut(&mut outputs)).unwrap();
    let mut checks = Checks::new(world.comm);
    for (index, output) in outputs.iter().enumerate() {
        let whole = reduced(ReduceOp::Sum, format, Scaling::NONE, &of_all(&ranks, index));
        let shard = whole.shard(world.rank(), lens[index] / world.size());
        checks.own(format!("tensor {index} of shape {:?}", shapes[index]), output.read(world.comm), &Rc::new(shard));
    }
    checks.finish();
}

fn empty(world: &World<'_>) {
    all_reduce_tensors(world.comm, &mut [], ReduceOp::Sum, Scaling::NONE).unwrap();
    all_gather_tensors(world.comm, &[], &mut []).unwrap();
    reduce_scatter_tensors(world.comm, &[], &[], &mut []).unwrap();
    let nothing = vec![Vec::new(); 3];
    let mut placed = world.place(Format::F32, &nothing);
    all_reduce_tensors(world.comm, &mut slices_mut(&mut placed), ReduceOp::Mean, Scaling::NONE).unwrap();
    placed.iter().for_each(|tensor| assert!(tensor.read(world.comm).is_empty()));
    assert_works(world);
}

/// The communicator can still be used.
fn assert_works(world: &World<'_>) {
    let ranks = world.tensors(Format::F32, &[33], 9);
    let mut placed = world.place(Format::F32, &ranks[world.rank()]);
    all_reduce_tensors(world.comm, &mut slices_mut(&mut placed), ReduceOp::Sum, Scaling::NONE).unwrap();
    let expected = reduced(ReduceOp::Sum, Format::F32, Scaling::NONE, &of_all(&ranks, 0));
    let mut checks = Checks::new(world.comm);
    checks.same("an all-reduce afterwards", placed[0].read(world.comm), &expected);
    checks.finish();
}

/// Mixed dtypes are refused on every rank before any communication, so the communicator stays usable.
fn mixed(world: &World<'_>) {
    let queue = &world.context.queue;
    let mut tensors = [Format::F32, Format::F32, Format::BF16].map(|format| Placed::unwritten(queue, format, 5, 0));
    match all_reduce_tensors(world.comm, &mut slices_mut(&mut tensors), ReduceOp::Sum, Scaling::NONE) {
        Err(Error::DTypeMismatch { operation: "all_reduce_tensors", what, .. }) => {
            assert!(what.contains("tensor 0") && what.contains("tensor 2"), "{what}");
        }
        other => panic!("mixed dtypes gave {other:?}"),
    }
    assert_works(world);
}

/// The first dimension must be divisible by the world size: one row too many is refused, and so is a scalar, which has no first dimension.
fn indivisible(world: &World<'_>) {
    let queue = &world.context.queue;
    let size = world.size();
    let refused = |shapes: &[&[usize]], wanted: usize| {
        let place = |shape: &&[usize]| Placed::unwritten(queue, Format::F32, shape.iter().product(), 0);
        let inputs: Vec<Placed> = shapes.iter().map(place).collect();
        let mut outputs: Vec<Placed> = shapes
            .iter()
            .map(|shape| Placed::unwritten(queue, Format::F32, shape.iter().product::<usize>() / size, 0))
            .collect();
        match reduce_scatter_tensors(world.comm, &slices(&inputs), shapes, &mut slices_mut(&mut outputs)) {
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
    assert_works(world);
}
