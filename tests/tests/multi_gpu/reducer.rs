//! Reducers of gradients on GPUs: bits that do not depend on buckets, two queues that wait for each other, votes, recorded steps, and
//! identical initial values.

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Communicator, Ranks};
use gradsync::driver::{DeviceBuffer, Graph, Queue};
use gradsync::memory::Cuda;
use gradsync::ops::{AdasumOptions, Algorithm};
use gradsync::train::{
    AbsentGradients, GradientState, NonFinite, Parameter, Reducer, ReducerOptions, Reduction, RunningMean,
    broadcast_parameters, compare_parameters,
};
use gradsync::{DType, Error, TensorView};
use gradsync_tests::array::{Array, dtype};
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::Checks;
use gradsync_tests::tolerance::assert_equal;

use crate::context::Context;
use crate::report::Report;
use crate::updates;

pub(crate) const SHAPES: [&[usize]; 7] = [&[5], &[40, 13], &[], &[0, 3], &[70_001], &[3, 3, 3], &[513]];
/// The sizes of the first bucket and of the others in bytes: one gradient per bucket, all gradients in one bucket, and a size between.
pub(crate) const BYTES: [(usize, usize); 3] = [(0, 0), (usize::MAX, usize::MAX), (100, 3000)];

pub(crate) type Reducing<'c> = Reducer<'c, Cuda>;

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = context.first(report) else { return };
    let queue = &context.queue;
    report.case("sums by NCCL, of any buckets and orders", || plain_sums(queue, &comm));
    report.case("ordered sums as on the host", || ordered_sums(queue, &comm));
    let means = ReducerOptions::from(Reduction::Mean).with_ordered_sums(true);
    report.case("ordered means of any buckets and orders", || same_bits(queue, &comm, "ordered means", means));
    for algorithm in [Algorithm::Auto, Algorithm::Gram, Algorithm::Tree] {
        if algorithm != Algorithm::Tree || comm.world_size().is_power_of_two() {
            let adasum = Reduction::Adasum(AdasumOptions::default().with_algorithm(algorithm));
            let what = format!("Adasum by {algorithm:?} of any buckets and orders");
            report.case(&what, || same_bits(queue, &comm, &what, adasum.into()));
        }
    }
    report.case("queues that wait for each other", || waits(queue, &comm));
    report.case("sums over micro-batches", || micro_batches(queue, &comm));
    report.case("absent gradients, and unequal numbers of examples", || absent(queue, &comm));
    report.case("refused gradients are errors of all ranks", || refusals(queue, &comm));
    report.case("gradients that are not finite", || non_finite(queue, &comm));
    report.case("a recorded step", || recorded(queue, &comm));
    report.case("optimizers that read buckets have the bits of the host", || updates::from_buckets(queue, &comm));
    report.case("an optimizer's steps that every rank skips", || updates::skipped(queue, &comm));
    report.case("recorded steps of an optimizer", || updates::recorded(queue, &comm));
    report.case("the same start, and means over ranks", || start(queue, &comm));
}

pub(crate) fn parameters(format: Format) -> Vec<Parameter> {
    let parameter = |(index, shape): (usize, &&[usize])| Parameter::new(format!("{index}"), *shape, dtype(format));
    SHAPES.iter().enumerate().map(parameter).collect()
}

fn len(index: usize) -> usize {
    SHAPES[index].iter().product()
}

/// The values of gradients: small integers, whose sums over ranks are exact in every dtype, or ordinary numbers.
#[derive(Clone, Copy)]
pub(crate) enum Numbers {
    Integers,
    Ordinary,
}

pub(crate) fn values(numbers: Numbers, format: Format, (index, rank, step): (usize, usize, usize)) -> Vec<f64> {
    match numbers {
        Numbers::Integers => (0..len(index)).map(|at| ((at + 3 * rank + 5 * step + index) % 17) as f64 - 8.0).collect(),
        Numbers::Ordinary => vector(format, len(index), (1000 * step + 100 * rank + index) as u64),
    }
}

/// The sum of all ranks' numbers, in rank order and rounded once.
pub(crate) fn total(numbers: Numbers, format: Format, world_size: usize, (index, step): (usize, usize)) -> Vec<f64> {
    let of_ranks: Vec<Vec<f64>> = (0..world_size).map(|rank| values(numbers, format, (index, rank, step))).collect();
    (0..len(index)).map(|at| format.round(of_ranks.iter().map(|values| values[at]).sum())).collect()
}

pub(crate) fn on_device(queue: &Queue, format: Format, values: &[f64]) -> DeviceBuffer {
    DeviceBuffer::from_host(queue, Array::new(format, values).slice()).unwrap()
}

pub(crate) fn view(buffer: &DeviceBuffer, index: usize) -> TensorView<'_, Cuda> {
    TensorView::of(buffer.as_slice(), SHAPES[index].into()).unwrap()
}

pub(crate) fn read(format: Format, buffer: &DeviceBuffer) -> Array {
    let mut array = Array::unwritten(format, buffer.as_slice().len());
    buffer.as_slice().copy_to_host(array.slice_mut()).unwrap();
    array
}

/// Three steps; gradients appear in another order on every rank, one by one, at once, or in place. The results replace the gradients.
fn train(
    queue: &Queue,
    comm: &NcclCommunicator,
    (format, numbers): (Format, Numbers),
    options: ReducerOptions,
    turn: usize,
) -> Vec<Array> {
    let mut reducer = Reducing::on_queue(queue, comm, parameters(format), options).unwrap();
    let (rank, count) = (comm.rank(), SHAPES.len());
    let mut found = Vec::new();
    for number in 0..3 {
        let of = |index| on_device(queue, format, &values(numbers, format, (index, rank, number)));
        let mut gradients: Vec<DeviceBuffer> = (0..count).map(of).collect();
        let mut order: Vec<usize> = (0..count).collect();
        order.rotate_left((turn * (1 + rank + number)) % count);
        let mut step = reducer.step().unwrap();
        match number {
            0 => order.iter().for_each(|&index| step.ready(index, view(&gradients[index], index)).unwrap()),
            1 => {
                let views: Vec<_> = order.iter().map(|&index| (index, view(&gradients[index], index))).collect();
                step.ready_all(&views).unwrap();
            }
            _ => {
                for &index in &order {
                    let place = step.gradient_mut(index).unwrap();
                    place.into_data().copy_from_device(gradients[index].as_slice()).unwrap();
                    step.ready_in_place(index).unwrap();
                }
            }
        }
        let reduced = step.finish().unwrap();
        assert!((0..count).all(|index| reduced.state(index).has_gradient()));
        let mut wanted: Vec<_> = gradients.iter_mut().map(DeviceBuffer::as_mut_slice).enumerate().collect();
        reducer.copy_gradients(&mut wanted).unwrap();
        comm.synchronize(queue).unwrap();
        found.extend(gradients.iter().map(|gradient| read(format, gradient)));
    }
    found
}

fn options(reduction: Reduction, (first, others): (usize, usize), overlap: bool) -> ReducerOptions {
    let options = ReducerOptions::from(reduction).with_overlap(overlap);
    options.with_first_bucket_bytes(first).with_bucket_bytes(others)
}

fn sums(queue: &Queue, comm: &NcclCommunicator, (format, numbers): (Format, Numbers), ordered: bool) {
    for (turn, bytes) in BYTES.into_iter().enumerate() {
        for overlap in [true, false] {
            let options = options(Reduction::Sum, bytes, overlap).with_ordered_sums(ordered);
            let found = train(queue, comm, (format, numbers), options, turn);
            for (place, found) in found.into_iter().enumerate() {
                let (number, index) = (place / SHAPES.len(), place % SHAPES.len());
                let expected = total(numbers, format, comm.world_size(), (index, number));
                assert_equal(&format!("{format:?} {index} in step {number}, {bytes:?}"), &found.values(), &expected);
            }
        }
    }
}

fn plain_sums(queue: &Queue, comm: &NcclCommunicator) {
    Format::ALL.into_iter().for_each(|format| sums(queue, comm, (format, Numbers::Integers), false));
}

fn ordered_sums(queue: &Queue, comm: &NcclCommunicator) {
    Format::ALL.into_iter().for_each(|format| sums(queue, comm, (format, Numbers::Ordinary), true));
}

/// The bits on all ranks do not depend on buckets, queues or the order of gradients.
fn same_bits(queue: &Queue, comm: &NcclCommunicator, what: &str, chosen: ReducerOptions) {
    for format in [Format::F32, Format::BF16] {
        let mut runs = Vec::new();
        for (turn, (first, others)) in BYTES.into_iter().enumerate() {
            for overlap in [true, false] {
                let options = chosen.with_first_bucket_bytes(first).with_bucket_bytes(others).with_overlap(overlap);
                let found = train(queue, comm, (format, Numbers::Ordinary), options, turn);
                runs.push(found.iter().flat_map(Array::patterns).collect::<Vec<u64>>());
            }
        }
        let mut checks = Checks::new(comm);
        for run in &runs {
            checks.same_list(format!("{what} of {format:?}"), run.clone(), runs[0].clone());
        }
        checks.finish();
    }
}

/// The queue of the gradients is busy before it computes them, overwrites them right after they are handed in, and reads results right
/// after the step.
fn waits(queue: &Queue, comm: &NcclCommunicator) {
    const LEN: usize = 1 << 20;
    let zeros = || DeviceBuffer::zeroed(queue, DType::F32, 64 << 20).unwrap();
    let (from, mut to) = (zeros(), zeros());
    let declared = (0..4).map(|index| Parameter::new(format!("{index}"), [LEN], DType::F32));
    let options = options(Reduction::Sum, (1, 1), true);
    let mut reducer = Reducing::on_queue(queue, comm, declared, options).unwrap();
    let ready = |value: usize| on_device(queue, Format::F32, &vec![value as f64; LEN]);
    let sources: Vec<DeviceBuffer> = (0..4).map(|index| ready(10 * index + comm.rank())).collect();
    let (mut gradient, mut results) = (ready(0), ready(0));
    reducer.record_times(true);
    for number in 0..4 {
        let mut step = reducer.step().unwrap();
        for (index, source) in sources.iter().enumerate() {
            (0..20).for_each(|_| to.as_mut_slice().copy_from_device(from.as_slice()).unwrap());
            gradient.as_mut_slice().copy_from_device(source.as_slice()).unwrap();
            step.ready(index, TensorView::of(gradient.as_slice(), [LEN][..].to_vec().into()).unwrap()).unwrap();
        }
        gradient.as_mut_slice().copy_from_device(from.as_slice().range(0..LEN)).unwrap();
        let _reduced = step.finish().unwrap();
        for index in 0..4 {
            let expected: usize = (0..comm.world_size()).map(|rank| 10 * index + rank).sum();
            reducer.copy_gradients(&mut [(index, results.as_mut_slice())]).unwrap();
            if comm.world_size() > 1 {
                let found = read(Format::F32, &results).values();
                assert!(found.iter().all(|value| *value == expected as f64), "{index} in step {number}: {}", found[0]);
            }
        }
    }
    comm.synchronize(queue).unwrap();
    // A sum begins before the later gradients are computed. It ends when the slowest rank has its gradient.
    let times = reducer.times().unwrap().expect("recorded");
    assert_eq!(times.buckets.len(), if comm.world_size() > 1 { 4 } else { 0 });
    let begins = times.buckets.windows(2).all(|pair| pair[0].end <= pair[1].begin);
    assert!(
        begins && times.buckets.iter().all(|bucket| bucket.bytes >= LEN * 4 && bucket.begin < bucket.end),
        "{times:?}"
    );
    assert!(times.buckets.first().is_none_or(|bucket| bucket.begin < times.gradients), "{times:?}");
}

fn micro_batches(queue: &Queue, comm: &NcclCommunicator) {
    let format = Format::BF16;
    let options = options(Reduction::Sum, (100, 3000), true);
    let mut reducer = Reducing::on_queue(queue, comm, parameters(format), options).unwrap();
    for number in 0..3 {
        let of = |micro: usize| {
            let gradient = |index| values(Numbers::Integers, format, (index, comm.rank(), 3 * number + micro));
            (0..SHAPES.len()).map(|index| on_device(queue, format, &gradient(index))).collect::<Vec<_>>()
        };
        let micros: Vec<Vec<DeviceBuffer>> = (0..3).map(of).collect();
        let views = |micro: usize| {
            micros[micro].iter().enumerate().map(|(index, buffer)| (index, view(buffer, index))).collect::<Vec<_>>()
        };
        reducer.accumulate(&views(0)).unwrap();
        reducer.accumulate(&views(1)).unwrap();
        let mut step = reducer.step().unwrap();
        step.ready_all(&views(2)).unwrap();
        let reduced = step.finish().unwrap();
        for index in 0..SHAPES.len() {
            // Sums that use the reducer's memory are reduced there, even with one rank.
            assert_eq!(reduced.state(index), GradientState::Reduced);
            let mut found = on_device(queue, format, &vec![7.0; len(index)]);
            reducer.copy_gradients(&mut [(index, found.as_mut_slice())]).unwrap();
            let sum = |micro: usize| total(Numbers::Integers, format, comm.world_size(), (index, 3 * number + micro));
            let sums: Vec<Vec<f64>> = (0..3).map(sum).collect();
            let expected: Vec<f64> = (0..len(index)).map(|at| sums.iter().map(|sum| sum[at]).sum()).collect();
            // The sums are at most 8 ranks × 3 × 8, which are integers that bf16 represents.
            assert_equal(&format!("{index} in step {number}"), &read(format, &found).values(), &expected);
        }
    }
    comm.synchronize(queue).unwrap();
}

fn absent(queue: &Queue, comm: &NcclCommunicator) {
    let format = Format::F32;
    let mut reducer = Reducing::on_queue(queue, comm, parameters(format), ReducerOptions::default()).unwrap();
    for number in 0..3 {
        // Rank r has gradients in r + 1 steps: gradient 1 appears on no rank, and gradient 4 on rank 0 alone.
        let has_data = number <= comm.rank();
        let Some(mut step) = reducer.step_of(if has_data { 4 } else { 0 }).unwrap() else {
            assert_eq!(number, comm.world_size());
            break;
        };
        let numbers: Vec<_> =
            (0..SHAPES.len()).filter(|index| *index != 1 && (*index != 4 || comm.rank() == 0)).collect();
        let own =
            |index: usize| on_device(queue, format, &values(Numbers::Integers, format, (index, comm.rank(), number)));
        for index in numbers.into_iter().filter(|_| has_data) {
            step.ready(index, view(&own(index), index)).unwrap();
        }
        let reduced = step.finish().unwrap();
        let with_data = comm.world_size() - number;
        assert_eq!(reduced.examples(), Some(4 * with_data));
        let expected: &[usize] = if number == 0 { &[1] } else { &[1, 4] };
        assert_eq!(reduced.skipped().collect::<Vec<_>>(), expected);
        if comm.world_size() > 1 {
            let mut found = own(6);
            reducer.copy_gradients(&mut [(6, found.as_mut_slice())]).unwrap();
            let sum = |at: usize| {
                (number..comm.world_size())
                    .map(|rank| values(Numbers::Integers, format, (6, rank, number))[at])
                    .sum::<f64>()
            };
            let bound = 8.0 * 4.0 * f64::from(f32::EPSILON);
            for (at, value) in read(format, &found).values().into_iter().enumerate() {
                assert!(
                    (value - sum(at) / with_data as f64).abs() <= bound,
                    "element {at} in step {number} is {value}"
                );
            }
        }
    }
    comm.synchronize(queue).unwrap();
}

fn refusals(queue: &Queue, comm: &NcclCommunicator) {
    let wrong = comm.world_size() - 1;
    let options = ReducerOptions::default().with_absent(AbsentGradients::Error).with_bucket_bytes(1000);
    let mut reducer = Reducing::on_queue(queue, comm, parameters(Format::F32), options).unwrap();
    let other = Queue::new(queue.ordinal()).unwrap();
    for mistake in 0..4 {
        let gradients: Vec<DeviceBuffer> =
            (0..SHAPES.len()).map(|index| on_device(queue, Format::F32, &vec![1.0; len(index)])).collect();
        let elsewhere = on_device(&other, Format::F32, &vec![1.0; len(4)]);
        let mut step = reducer.step().unwrap();
        let mut refused = Ok(());
        for index in 0..SHAPES.len() {
            let gradient = match (comm.rank() == wrong && index == 4, mistake) {
                (true, 0) => view(&elsewhere, 4),
                (true, 1) => view(&gradients[6], 6),
                (true, 2) => continue,
                _ => view(&gradients[index], index),
            };
            refused = refused.and(step.ready(index, gradient));
        }
        assert_eq!(refused.is_err(), comm.rank() == wrong && mistake < 2 && (mistake > 0 || comm.world_size() > 1));
        let expected = match mistake {
            0 if comm.world_size() > 1 => "different queues",
            1 => r#"parameter 4, "4", has a gradient of shape [513], and was declared with [70001]"#,
            2 => r#"parameter 4, "4", has no gradient on rank"#,
            _ => {
                let _reduced = step.finish().unwrap();
                continue;
            }
        };
        match step.finish() {
            Err(error @ Error::InvalidArgument { .. }) => assert!(error.to_string().contains(expected), "{error}"),
            other => panic!("{other:?}"),
        }
    }
    comm.synchronize(queue).unwrap();
}

/// The ways in which a gradient reaches its bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Copied,
    InPlace,
    AddedUp,
}

/// NaN and infinities of one rank, with each option and in each way. A host that does not wait learns of them in a later step, at most five
/// steps later, also of those in the first step, after which gradients have other buckets.
fn non_finite(queue: &Queue, comm: &NcclCommunicator) {
    let wrong = comm.world_size() - 1;
    let ways = [(Way::Copied, 1), (Way::Copied, 3), (Way::InPlace, 3), (Way::AddedUp, 3)];
    for (format, value) in [(Format::F32, f64::NAN), (Format::F16, f64::INFINITY), (Format::F64, f64::NEG_INFINITY)] {
        let options = [NonFinite::Report, NonFinite::Error, NonFinite::Skip];
        for (option, (way, wrong_step)) in options.into_iter().flat_map(|option| ways.map(|way| (option, way))) {
            if option == NonFinite::Report && comm.world_size() == 1 {
                continue; // One rank has no buckets, and its host does not wait.
            }
            // 1e200 is finite, and its square is not.
            let ordinary = if format == Format::F64 { 1e200 } else { 1.0 };
            let options = ReducerOptions::default().with_bucket_bytes(1000).with_non_finite(option);
            let mut reducer = Reducing::on_queue(queue, comm, parameters(format), options).unwrap();
            let mut run = |number: u64| {
                let own = |index: usize| {
                    let mut own = vec![ordinary; len(index)];
                    if (index, number) == (4, wrong_step) && comm.rank() == wrong {
                        own[69_999] = value;
                    }
                    on_device(queue, format, &own)
                };
                let own: Vec<DeviceBuffer> = (0..SHAPES.len()).map(own).collect();
                if way == Way::AddedUp {
                    let views: Vec<_> = own.iter().enumerate().map(|(index, own)| (index, view(own, index))).collect();
                    reducer.accumulate(&views)?;
                }
                let mut step = reducer.at(number).step()?;
                // Not the order of the first buckets.
                for (index, own) in own.iter().enumerate().rev() {
                    match way {
                        Way::Copied => step.ready(index, view(own, index))?,
                        Way::InPlace => {
                            step.gradient_mut(index)?.into_data().copy_from_device(own.as_slice())?;
                            step.ready_in_place(index)?;
                        }
                        Way::AddedUp => {}
                    }
                }
                step.finish()
            };
            let named = |error: Error| match error {
                Error::NotFinite { step, rank: Some(rank), parameter, .. } => {
                    assert_eq!((step, rank, &parameter[..]), (wrong_step, wrong, "4"), "{way:?}");
                }
                other => panic!("{option:?}, {way:?}: {other}"),
            };
            for number in 1..wrong_step {
                assert!(run(number).unwrap().state(4).has_gradient());
            }
            match option {
                NonFinite::Error => named(run(wrong_step).unwrap_err()),
                NonFinite::Skip => {
                    let reduced = run(wrong_step).unwrap();
                    assert_eq!(reduced.non_finite().map(|found| found.parameter), Some(4));
                    assert!(!reduced.state(0).has_gradient());
                }
                _ => {
                    let reported = (wrong_step..10).find_map(|number| run(number).err());
                    named(reported.expect("the report comes within some steps"));
                }
            }
            assert!(run(20).unwrap().state(4).has_gradient());
        }
    }
    comm.synchronize(queue).unwrap();
}

/// Copies into buckets, reductions in the other queue and copies of the results are recorded once: three launches give the results of three
/// plain steps.
fn recorded(queue: &Queue, comm: &NcclCommunicator) {
    for reduction in [Reduction::Sum, Reduction::Adasum(AdasumOptions::default())] {
        let options = options(reduction, (100, 3000), true).with_static_graph(true);
        let mut reducer = Reducing::on_queue(queue, comm, parameters(Format::F32), options).unwrap();
        let gradient =
            |number: usize, index: usize| values(Numbers::Ordinary, Format::F32, (index, comm.rank(), number));
        let mut gradients: Vec<DeviceBuffer> =
            (0..SHAPES.len()).map(|index| on_device(queue, Format::F32, &gradient(0, index))).collect();
        let mut step = |gradients: &mut [DeviceBuffer]| {
            let mut step = reducer.step()?;
            let views: Vec<_> =
                gradients.iter().enumerate().map(|(index, buffer)| (index, view(buffer, index))).collect();
            step.ready_all(&views)?;
            let _reduced = step.finish()?;
            let mut wanted: Vec<_> = gradients.iter_mut().map(DeviceBuffer::as_mut_slice).enumerate().collect();
            reducer.copy_gradients(&mut wanted)
        };
        let mut rounds = |step: &mut dyn FnMut(&mut [DeviceBuffer])| {
            let mut found = Vec::new();
            for number in 0..3 {
                for (index, buffer) in gradients.iter_mut().enumerate() {
                    let own = Array::new(Format::F32, &gradient(number, index));
                    buffer.as_mut_slice().copy_from_host(own.slice()).unwrap();
                }
                step(&mut gradients);
                comm.synchronize(queue).unwrap();
                found.extend(gradients.iter().flat_map(|buffer| read(Format::F32, buffer).patterns()));
            }
            found
        };
        let plain = rounds(&mut |gradients| step(gradients).unwrap());
        let mut graph: Option<Graph> = None;
        let found = rounds(&mut |gradients| {
            let graph = graph.get_or_insert_with(|| queue.capture(|| step(gradients)).unwrap());
            comm.launch(graph).unwrap();
        });
        let mut checks = Checks::new(comm);
        checks.same_list(format!("{reduction:?}, recorded"), found, plain);
        checks.finish();
    }
}

fn start(queue: &Queue, comm: &NcclCommunicator) {
    let (rank, last) = (comm.rank(), comm.world_size() - 1);
    let own = |rank: usize, index: usize| values(Numbers::Ordinary, Format::BF16, (index, rank, 0));
    let mut tensors: Vec<(String, DeviceBuffer)> =
        (0..SHAPES.len()).map(|index| (index.to_string(), on_device(queue, Format::BF16, &own(rank, index)))).collect();
    let mut wanted: Vec<_> = tensors.iter_mut().map(|(name, buffer)| (&name[..], buffer.as_mut_slice())).collect();
    broadcast_parameters(comm, &mut wanted, last).unwrap();
    for (index, (_, buffer)) in tensors.iter().enumerate() {
        assert_equal("a broadcast tensor", &read(Format::BF16, buffer).values(), &own(last, index));
    }
    let compare = |tensors: &[(String, DeviceBuffer)]| {
        let tensors: Vec<_> = tensors.iter().map(|(name, buffer)| (&name[..], buffer.as_slice())).collect();
        compare_parameters(comm, &tensors)
    };
    compare(&tensors).unwrap();
    if last > 0 {
        if rank == last {
            tensors[6].1 = on_device(queue, Format::BF16, &own(last + 1, 6));
        }
        let error = compare(&tensors).unwrap_err().to_string();
        assert!(error.contains(&format!(r#"on rank {last} "6" is the first tensor that differs"#)), "{error}");
    }
    let mut loss = RunningMean::<Cuda>::on_queue(queue).unwrap();
    for count in 1..4 {
        loss.add(&on_device(queue, Format::F32, &[rank as f64]), count).unwrap();
    }
    let expected = (0..comm.world_size()).sum::<usize>() as f64 / comm.world_size() as f64;
    assert_eq!(loss.over_ranks(comm).unwrap(), Some(expected));
    comm.synchronize(queue).unwrap();
}
