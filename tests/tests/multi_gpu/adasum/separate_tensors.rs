//! Tensors in separate memory, in place and into other tensors: the bits are equal to those of the same tensors in a buffer.

use gradsync::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
use gradsync::ops::Granularity;
use gradsync_tests::array::{Array, patterns_of};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;

use super::device::Runner;
use super::gaps::SHAPES;
use super::{Case, Cases};
use crate::report::Report;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    report.case(&cases.name("tensors that lie anywhere"), || {
        for &algorithm in cases.algorithms() {
            for format in [Format::F32, Format::BF16] {
                let case = Case::of(Kind::Random, format, cases.world_size(), &SHAPES, 12);
                check(&cases.runner, &case.with(algorithm, Granularity::Tensor));
            }
        }
    });
}

fn check(runner: &Runner<'_>, case: &Case) {
    let own = case.buffer(runner.comm.rank());
    let mut buffer = runner.buffer(case);
    let mut adasum = runner.way.prepare(runner.comm, &buffer, case.options()).unwrap();
    adasum.all_reduce(&mut buffer).unwrap();
    runner.comm.synchronize(runner.queue).unwrap();
    let mut expected = case.buffer(runner.comm.rank());
    buffer.copy_to_host(&mut expected).unwrap();

    let upload = |index: usize| DeviceBuffer::from_host(runner.queue, own.tensor(index).data()).unwrap();
    let inputs: Vec<DeviceBuffer> = (0..own.tensor_count()).map(upload).collect();
    let mut in_place: Vec<DeviceBuffer> = (0..own.tensor_count()).map(upload).collect();
    let zeros = |input: &DeviceBuffer| {
        let input = input.as_slice();
        DeviceBuffer::zeroed(runner.queue, input.dtype(), input.len()).unwrap()
    };
    let mut outputs: Vec<DeviceBuffer> = inputs.iter().map(zeros).collect();
    adasum.all_reduce_tensors(&mut buffer, &mut slices_mut(&mut in_place)).unwrap();
    adasum.all_reduce_tensors_into(&mut buffer, &slices(&inputs), &mut slices_mut(&mut outputs)).unwrap();
    runner.comm.synchronize(runner.queue).unwrap();
    for index in 0..own.tensor_count() {
        let name = format!("{}, {:?}, tensor {index}", case.name(), runner.way);
        let result = patterns_of(expected.tensor(index).data());
        assert_eq!(downloaded(case, &in_place[index]), result, "{name}, in place");
        assert_eq!(downloaded(case, &outputs[index]), result, "{name}, into another");
        assert_eq!(downloaded(case, &inputs[index]), patterns_of(own.tensor(index).data()), "{name}, the input");
    }
}

fn downloaded(case: &Case, tensor: &DeviceBuffer) -> Vec<u64> {
    let mut host = Array::unwritten(case.format, tensor.as_slice().len());
    tensor.as_slice().copy_to_host(host.slice_mut()).unwrap();
    host.patterns()
}

fn slices(tensors: &[DeviceBuffer]) -> Vec<DeviceSlice<'_>> {
    tensors.iter().map(DeviceBuffer::as_slice).collect()
}

fn slices_mut(tensors: &mut [DeviceBuffer]) -> Vec<DeviceSliceMut<'_>> {
    tensors.iter_mut().map(DeviceBuffer::as_mut_slice).collect()
}
