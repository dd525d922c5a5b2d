//! Gradient buffers: the all-reduce of a whole arena, and a training step that is divided over ranks.

use gradsync::comm::{Communicator, ReduceOp, Scaling};
use gradsync::memory::Cuda;
use gradsync::ops::{ZeroPartition, all_reduce_scaled as all_reduce};
use gradsync::{DType, Error, GradientBuffer};
use gradsync_tests::array::{Array, dtype, patterns_of, write};
use gradsync_tests::inputs::Random;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::Checks;
use gradsync_tests::suite::tensors::of_all;

use super::World;
use crate::checks::reduced;
use crate::report::Report;

/// Tensors of few and of many elements, of no element, and of as many as the alignment.
const SHAPES: [&[usize]; 7] = [&[2, 3], &[], &[64], &[0, 7], &[7, 13], &[1024, 3], &[5]];

pub(super) fn run(world: &World<'_>, report: &mut Report) {
    for format in Format::ALL {
        report.case(&format!("all_reduce of a gradient buffer {}", format.name()), || whole(world, format));
    }
    report.case("a buffer for another world size", || other_world(world));
    report.case("a step shared out over ranks", || zero(world));
}

fn tensors() -> impl Iterator<Item = (String, Vec<usize>)> {
    SHAPES.iter().enumerate().map(|(index, shape)| (format!("tensor {index}"), shape.to_vec()))
}

fn lens() -> Vec<usize> {
    SHAPES.iter().map(|shape| shape.iter().product()).collect()
}

/// A host buffer with these tensors.
fn host(world_size: usize, format: Format, values: &[Vec<f64>]) -> GradientBuffer {
    let mut buffer = GradientBuffer::new(dtype(format), world_size, tensors()).unwrap();
    for (index, values) in values.iter().enumerate() {
        write(buffer.tensor_mut(index).into_data(), 0, values);
    }
    buffer
}

/// A copy on the device.
fn device(world: &World<'_>, host: &GradientBuffer) -> GradientBuffer<Cuda> {
    let mut buffer =
        GradientBuffer::on_queue(&world.context.queue, host.dtype(), host.world_size(), tensors()).unwrap();
    buffer.copy_from_host(host).unwrap();
    buffer
}

/// Asserts that all elements outside tensors are zero.
fn assert_gaps(what: &str, buffer: &GradientBuffer) {
    let values = buffer.as_slice().to_f64_vec();
    let is_inside = |place: usize| buffer.segments().iter().any(|segment| segment.contains(&place));
    let written = values.iter().enumerate().position(|(place, &value)| value != 0.0 && !is_inside(place));
    assert_eq!(written, None, "{what}: a gap is no longer zero");
}

fn whole(world: &World<'_>, format: Format) {
    let ranks = world.tensors(format, &lens(), 21);
    let mut checks = Checks::new(world.comm);
    for (op, scaling) in [
        (ReduceOp::Sum, Scaling::NONE),
        (ReduceOp::Mean, Scaling { before: -0.1, after: 3.0 }),
        (ReduceOp::Max, Scaling { before: 1.0, after: -2.0 }),
    ] {
        let mut result = host(world.size(), format, &ranks[world.rank()]);
        let mut buffer = device(world, &result);
        all_reduce(world.comm, &mut buffer, op, scaling).unwrap();
        world.comm.synchronize(&world.context.queue).unwrap();
        buffer.copy_to_host(&mut result).unwrap();
        let what = format!("{op}, {scaling:?}");
        for index in 0..SHAPES.len() {
            let got = Array::from_patterns(format, patterns_of(result.tensor(index).data()).into_iter());
            let expected = reduced(op, format, scaling, &of_all(&ranks, index));
            checks.same(format!("tensor {index}, {what}"), got, &expected);
        }
        assert_gaps(&what, &result);
    }
    checks.finish();
}

/// The call is refused on every rank before any communication.
fn other_world(world: &World<'_>) {
    let size = world.size() + 1;
    let mut buffer = device(world, &GradientBuffer::new(DType::F32, size, tensors()).unwrap());
    match all_reduce(world.comm, &mut buffer, ReduceOp::Sum, Scaling::NONE) {
        Err(Error::InvalidArgument { operation: "all_reduce", reason }) => {
            assert!(reason.contains(&format!("a world size of {size}")), "{reason}");
        }
        other => panic!("a buffer for {size} ranks gave {other:?}"),
    }
}

/// Three steps of gradient descent in which each rank updates its own elements, against the same steps on one rank: the bits are equal,
/// because gradients are integers with exact sums.
fn zero(world: &World<'_>) {
    const RATE: f32 = 0.01;
    let (rank, size) = (world.rank(), world.size());
    let begin = super::uniform(Format::F32, &lens(), 31);
    let mut parameters = host(size, Format::F32, &begin);
    let mut on_device = device(world, &parameters);
    let partition = ZeroPartition::new(world.comm, &on_device).unwrap();
    let parts = partition.all_parts();
    assert_eq!(parts.iter().map(|part| part.within.len()).sum::<usize>(), lens().iter().sum::<usize>());
    assert!(partition.parts().iter().all(|part| part.rank == rank));

    let mut whole: Vec<Vec<f32>> = begin.iter().map(|tensor| tensor.iter().map(|&x| x as f32).collect()).collect();
    for step in 0..3 {
        // The gradients are integers on every rank; the reference is one rank that has all of them.
        let gradient = |rank: usize| -> Vec<Vec<f64>> {
            let mut random = Random::new(step * 100 + rank as u64);
            lens().iter().map(|&len| (0..len).map(|_| random.below(2001) as f64 - 1000.0).collect()).collect()
        };
        let gradients: Vec<Vec<Vec<f64>>> = (0..size).map(gradient).collect();
        for (tensor, values) in whole.iter_mut().enumerate() {
            for (index, value) in values.iter_mut().enumerate() {
                *value -= RATE * gradients.iter().map(|tensors| tensors[tensor][index]).sum::<f64>() as f32;
            }
        }

        let mut reduced = host(size, Format::F32, &gradients[rank]);
        let mut buffer = device(world, &reduced);
        partition.reduce_scatter(&mut buffer, ReduceOp::Sum).unwrap();
        world.comm.synchronize(&world.context.queue).unwrap();
        buffer.copy_to_host(&mut reduced).unwrap();
        let reduced = reduced.as_slice().typed::<f32>().unwrap();
        let values = parameters.as_mut_slice().typed::<f32>().unwrap();
        for part in partition.parts() {
            for index in part.range.clone() {
                values[index] -= RATE * reduced[index];
            }
        }
        on_device.copy_from_host(&parameters).unwrap();
        partition.all_gather(&mut on_device).unwrap();
        world.comm.synchronize(&world.context.queue).unwrap();
        on_device.copy_to_host(&mut parameters).unwrap();

        let mut checks = Checks::new(world.comm);
        for (index, expected) in whole.iter().enumerate() {
            let got = parameters.tensor(index).data().typed::<f32>().unwrap();
            let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|value| value.to_bits()).collect() };
            checks.same_list(format!("tensor {index} after step {step}"), bits(got), bits(expected));
        }
        checks.finish();
        assert_gaps(&format!("after step {step}"), &parameters);
    }
}
