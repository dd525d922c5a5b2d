//! Optimizers that read reduced gradients in their buckets on GPUs: the bits of the host, steps that every rank skips, and whole steps in a
//! graph.

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Communicator, Ranks};
use gradsync::driver::{DeviceBuffer, Graph, Queue};
use gradsync::memory::Cuda;
use gradsync::train::{
    AdamW, AdamWOptions, LossScaler, NonFinite, Optimizer, OptimizerMemory, Reducer, ReducerOptions, Reduction,
    Schedule, TensorStep, UpdateOutcome,
};
use gradsync_tests::array::{Array, dtype};
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::Checks;

use crate::reducer::{Numbers, Reducing, SHAPES, on_device, parameters, read, total, values, view};

const STEPS: usize = 6;

fn optimizer<M: OptimizerMemory>() -> AdamW<M> {
    Optimizer::new(AdamWOptions::from(0.01))
        .unwrap()
        .with_max_norm(2.0)
        .unwrap()
        .with_schedule(Schedule::cosine(10).with_warm_up(2))
        .unwrap()
        .with_scaler(LossScaler::default().with_initial(64.0).with_growth_interval(3))
        .unwrap()
}

fn weights(format: Format) -> Vec<Array> {
    (0..SHAPES.len()).map(|index| Array::new(format, &values(Numbers::Ordinary, format, (index, 77, 0)))).collect()
}

fn weights_on_device(queue: &Queue, format: Format) -> Vec<DeviceBuffer> {
    weights(format).iter().map(|weights| on_device(queue, format, &weights.values())).collect()
}

/// Reduces these gradients, and updates the weights from the buckets.
fn step(
    reducer: &mut Reducer<'_, Cuda>,
    optimizer: &mut AdamW<Cuda>,
    names: &[String],
    (weights, gradients): (&mut [DeviceBuffer], &[DeviceBuffer]),
) -> gradsync::Result<()> {
    let mut step = reducer.step()?;
    let views: Vec<_> = gradients.iter().enumerate().map(|(index, buffer)| (index, view(buffer, index))).collect();
    step.ready_all(&views)?;
    let _reduced = step.finish()?;
    let tensors = weights.iter_mut().zip(names).enumerate().map(|(index, (weights, name))| TensorStep {
        name,
        weights: weights.into(),
        gradient: Some(view(&gradients[index], index)),
    });
    reducer.update(optimizer, tensors)
}

fn names() -> Vec<String> {
    parameters(Format::F32).into_iter().map(|parameter| parameter.name).collect()
}

/// Ordered sums have the host's bits, so that weights after several steps do too.
pub(crate) fn from_buckets(queue: &Queue, comm: &NcclCommunicator) {
    let names = names();
    for format in [Format::F32, Format::BF16] {
        for (first, others) in crate::reducer::BYTES {
            let options = ReducerOptions::from(Reduction::Sum)
                .with_ordered_sums(true)
                .with_first_bucket_bytes(first)
                .with_bucket_bytes(others);
            let mut reducer = Reducing::on_queue(queue, comm, parameters(format), options).unwrap();
            let (mut device, mut host) = (optimizer::<Cuda>(), optimizer());
            let (mut updated, mut expected) = (weights_on_device(queue, format), weights(format));
            for number in 0..STEPS {
                let own = |index| values(Numbers::Ordinary, format, (index, comm.rank(), number));
                let gradients: Vec<_> = (0..SHAPES.len()).map(|index| on_device(queue, format, &own(index))).collect();
                step(&mut reducer, &mut device, &names, (&mut updated, &gradients)).unwrap();
                let sums = |index| total(Numbers::Ordinary, format, comm.world_size(), (index, number));
                let sums: Vec<Array> = (0..SHAPES.len()).map(|index| Array::new(format, &sums(index))).collect();
                host.step_tensors(expected.iter_mut().zip(&sums).zip(&names).map(|((weights, sum), name)| {
                    TensorStep { name, weights: weights.slice_mut().into(), gradient: Some(sum.slice().into()) }
                }))
                .unwrap();
            }
            comm.synchronize(queue).unwrap();
            let mut checks = Checks::new(comm);
            for (index, (updated, expected)) in updated.iter().zip(&expected).enumerate() {
                let what = format!("{:?} weights {index}, buckets of {others} bytes", dtype(format));
                checks.same_list(what, read(format, updated).patterns(), expected.patterns());
            }
            let bits = |numbers: Vec<f64>| numbers.into_iter().map(f64::to_bits).collect::<Vec<_>>();
            checks.same_list(
                "the numbers of the steps",
                bits(device.numbers().unwrap()),
                bits(host.numbers().unwrap()),
            );
            checks.finish();
        }
    }
}

/// An infinity in the gradient of one rank skips the step on all, halves the scale, and changes nothing else; no host waits for it.
pub(crate) fn skipped(queue: &Queue, comm: &NcclCommunicator) {
    let (names, last) = (names(), comm.world_size() - 1);
    let options = ReducerOptions::from(Reduction::Mean).with_non_finite(NonFinite::Leave).with_static_graph(true);
    let mut reducer = Reducing::on_queue(queue, comm, parameters(Format::F32), options).unwrap();
    let mut optimizer = optimizer::<Cuda>();
    let mut weights = weights_on_device(queue, Format::F32);
    for number in 0..STEPS {
        let own = |index: usize| {
            let mut own = values(Numbers::Ordinary, Format::F32, (index, comm.rank(), number));
            if number == 4 && comm.rank() == last && index == 4 {
                own[69_999] = f64::INFINITY;
            }
            own
        };
        let gradients: Vec<_> = (0..SHAPES.len()).map(|index| on_device(queue, Format::F32, &own(index))).collect();
        let before: Vec<_> = weights.iter().map(|weights| read(Format::F32, weights).patterns()).collect();
        step(&mut reducer, &mut optimizer, &names, (&mut weights, &gradients)).unwrap();
        let report = optimizer.report().unwrap();
        let after: Vec<_> = weights.iter().map(|weights| read(Format::F32, weights).patterns()).collect();
        let found = [
            format!("{:?}", report.outcome),
            format!("nothing has changed: {}", before == after),
            format!("the scale is {}", report.scale),
        ];
        let expected = [
            format!("{:?}", if number == 4 { UpdateOutcome::NotFinite } else { UpdateOutcome::Applied }),
            format!("nothing has changed: {}", number == 4),
            format!("the scale is {}", [64.0, 64.0, 128.0, 128.0, 64.0, 64.0][number]),
        ];
        let mut checks = Checks::new(comm);
        checks.same_list(format!("step {number}"), found.to_vec(), expected.to_vec());
        checks.finish();
    }
}

/// Reduction, norm, schedule and update are recorded once: launches of the graph give the results of plain steps.
pub(crate) fn recorded(queue: &Queue, comm: &NcclCommunicator) {
    let names = names();
    let run = |is_recorded: bool| {
        let options = ReducerOptions::from(Reduction::Sum)
            .with_first_bucket_bytes(100)
            .with_bucket_bytes(3000)
            .with_static_graph(true);
        let mut reducer = Reducing::on_queue(queue, comm, parameters(Format::BF16), options).unwrap();
        let mut optimizer = optimizer::<Cuda>();
        let mut weights = weights_on_device(queue, Format::BF16);
        let own = |index: usize, number| values(Numbers::Integers, Format::BF16, (index, comm.rank(), number));
        let mut gradients: Vec<_> =
            (0..SHAPES.len()).map(|index| on_device(queue, Format::BF16, &own(index, 0))).collect();
        let mut graph: Option<Graph> = None;
        for number in 0..STEPS {
            for (index, buffer) in gradients.iter_mut().enumerate() {
                let own = Array::new(Format::BF16, &own(index, number));
                buffer.as_mut_slice().copy_from_host(own.slice()).unwrap();
            }
            // The first steps choose buckets and upload tables.
            if number < 3 || !is_recorded {
                step(&mut reducer, &mut optimizer, &names, (&mut weights, &gradients)).unwrap();
            } else {
                let graph = graph.get_or_insert_with(|| {
                    let work = || step(&mut reducer, &mut optimizer, &names, (&mut weights, &gradients));
                    queue.capture(work).unwrap()
                });
                comm.launch(graph).unwrap();
            }
            comm.synchronize(queue).unwrap();
        }
        let bits = optimizer.numbers().unwrap().into_iter().map(f64::to_bits).collect::<Vec<_>>();
        (weights.iter().flat_map(|weights| read(Format::BF16, weights).patterns()).collect::<Vec<_>>(), bits)
    };
    let (plain, recorded) = (run(false), run(true));
    let mut checks = Checks::new(comm);
    checks.same_list("weights after recorded steps", recorded.0, plain.0);
    checks.same_list("the numbers of recorded steps", recorded.1, plain.1);
    checks.finish();
}
