//! A short test of the main features: a communicator, an all-reduce, Adasum.

use gradsync::comm::{Collectives, Communicator, ReduceOp};
use gradsync::driver::DeviceBuffer;
use gradsync::ops::Adasum;
use gradsync::ops::AdasumOptions;
use gradsync::{DType, GradientBuffer};

use crate::context::Context;
use crate::report::Report;

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = context.first(report) else { return };
    let ranks = context.world_size;

    report.case("all_reduce", || {
        let mine: Vec<f32> = (0..1000).map(|index| (index + context.rank) as f32).collect();
        let mut data = DeviceBuffer::from_host(&context.queue, (&mine).into()).unwrap();
        comm.all_reduce(data.as_mut_slice(), ReduceOp::Sum).unwrap();
        comm.synchronize(&context.queue).unwrap();
        let mut sums = vec![0f32; 1000];
        data.as_slice().copy_to_host((&mut sums).into()).unwrap();
        for (index, sum) in sums.into_iter().enumerate() {
            assert_eq!(sum, (index * ranks + ranks * (ranks - 1) / 2) as f32, "element {index}");
        }
    });

    report.case("adasum of equal vectors is the vector", || {
        let tensors = || [("a", vec![3, 5]), ("b", vec![1000])];
        let mut host = GradientBuffer::new(DType::F32, ranks, tensors()).unwrap();
        for index in 0..2 {
            let data = host.tensor_mut(index).into_data().typed::<f32>().unwrap();
            data.iter_mut().enumerate().for_each(|(place, value)| *value = (place % 7) as f32 + 1.0);
        }
        let mut buffer = GradientBuffer::on_queue(&context.queue, DType::F32, ranks, tensors()).unwrap();
        buffer.copy_from_host(&host).unwrap();
        let mut adasum = Adasum::new(&comm, &buffer, AdasumOptions::default()).unwrap();
        adasum.all_reduce(&mut buffer).unwrap();
        comm.synchronize(&context.queue).unwrap();
        let mut result = GradientBuffer::new(DType::F32, ranks, tensors()).unwrap();
        buffer.copy_to_host(&mut result).unwrap();
        assert_eq!(result.as_slice().to_f64_vec(), host.as_slice().to_f64_vec());
    });
}
