//! Test cases for gradient reducers, shared by every transport of host memory.
//!
//! All ranks of a communicator run a case, which leaves the communicator usable.

mod faults;
mod missing_gradients;
mod refusals;
mod updates;
mod weights;

use gradsync::comm::Communicator;
use gradsync::ops::{AdasumOptions, Algorithm, adasum_all_reduce};
use gradsync::train::{BucketMemory, GradientState, Parameter, Reduced, Reducer, ReducerOptions, Reduction, Step};
use gradsync::{DType, Error, GradientBuffer, TensorView};

use crate::array::{Array, dtype, patterns_of, values_of, write};
use crate::inputs::vector;
use crate::oracle::{Format, elementwise, reduce};
use crate::tensors::Case;
use crate::tolerance::assert_equal;

/// All cases.
pub const ALL: &[Case] = &[
    Case { name: "means and sums of any buckets and orders", run: means_and_sums },
    Case { name: "Adasum of any buckets as without buckets", run: adasum },
    Case { name: "a narrow wire", run: narrow },
    Case { name: "buckets follow the first step of rank 0", run: order },
    Case { name: "sums over micro-batches", run: micro_batches },
    Case { name: "the times of buckets", run: times },
    Case { name: "absent gradients", run: missing_gradients::absent },
    Case { name: "absent gradients as errors", run: missing_gradients::absent_errors },
    Case { name: "tied parameters", run: missing_gradients::tied },
    Case { name: "unequal numbers of examples", run: missing_gradients::uneven },
    Case { name: "means over different numbers of examples", run: weights::weighted },
    Case { name: "equal gradients of different numbers of examples", run: weights::equal_gradients },
    Case { name: "ranks that stop together", run: missing_gradients::stop },
    Case { name: "steps that are alike", run: missing_gradients::alike },
    Case { name: "steps that a rank has left", run: faults::left_steps },
    Case { name: "gradients of an earlier step", run: faults::stale_gradients },
    Case { name: "ranks without any gradient", run: faults::whole_ranks },
    Case { name: "gradients that are not finite", run: faults::non_finite },
    Case { name: "numbers out of range", run: faults::out_of_range },
    Case { name: "optimizers that read buckets", run: updates::from_buckets },
    Case { name: "an optimizer's steps that every rank skips", run: updates::skipped },
    Case { name: "refused gradients are errors of all ranks", run: refusals::refusals },
    Case { name: "ranks that disagree about their parameters", run: refusals::disagreements },
];

const SHAPES: [&[usize]; 8] = [&[5], &[40, 13], &[], &[0, 3], &[20_011], &[3, 3, 3], &[129], &[7, 100]];

fn len(index: usize) -> usize {
    SHAPES[index].iter().product()
}

fn parameters(formats: &[Format]) -> Vec<Parameter> {
    let parameter = |(index, shape): (usize, &&[usize])| {
        Parameter::new(format!("layer.{index}"), *shape, dtype(formats[index % formats.len()]))
    };
    SHAPES.iter().enumerate().map(parameter).collect()
}

/// The gradient of a parameter on a rank in a step.
fn gradient(format: Format, index: usize, rank: usize, step: usize) -> Array {
    Array::new(format, &vector(format, len(index), (1000 * step + 100 * rank + index) as u64))
}

fn view(array: &Array, index: usize) -> TensorView<'_> {
    TensorView::new(array.slice(), SHAPES[index]).expect("as many elements")
}

/// The sum in rank order, in `f64`, divided by the number of ranks for a mean, with one rounding at the end. The oracle's own mean is
/// correctly rounded, a stronger property than the reducer guarantees.
fn all_reduce(op: reduce::Op, format: Format, inputs: &[Vec<f64>]) -> Vec<f64> {
    let count = if op == reduce::Op::Mean { inputs.len() as f64 } else { 1.0 };
    let total = |index: usize| inputs.iter().map(|input| input[index]).reduce(|sum, value| sum + value).unwrap_or(0.0);
    (0..inputs[0].len()).map(|index| format.round(total(index) / count)).collect()
}

/// From the third step on, a bucket is reduced when its gradients are in, and before the later gradients.
fn times(comm: &dyn Communicator) {
    let options = ReducerOptions::from(Reduction::Sum).with_first_bucket_bytes(0).with_bucket_bytes(3000);
    let mut reducer = Reducer::new(comm, parameters(&[Format::F32]), options).unwrap();
    for number in 0..4 {
        reducer.record_times(number == 2);
        let mut step = reducer.step().unwrap();
        for index in 0..SHAPES.len() {
            step.ready(index, view(&gradient(Format::F32, index, comm.rank(), number), index)).unwrap();
        }
        let _reduced = step.finish().unwrap();
        let times = reducer.times().unwrap();
        assert_eq!(times.is_some(), number == 2);
        let Some(times) = times else { continue };
        let buckets = if comm.world_size() > 1 { reducer.buckets().len() } else { 0 };
        assert_eq!(times.buckets.len(), buckets);
        assert!(times.buckets.iter().all(|bucket| 0.0 <= bucket.begin && bucket.begin <= bucket.end));
        assert!(times.buckets.windows(2).all(|pair| pair[0].end <= pair[1].begin));
        assert!(times.buckets.first().is_none_or(|bucket| bucket.end <= times.gradients && bucket.bytes >= 5 * 4));
    }
}

/// The method of a step that receives the gradients.
#[derive(Clone, Copy, Debug)]
enum Way {
    Each,
    Together,
    InPlace,
}

fn hand_in(step: &mut Step<'_, '_>, way: Way, gradients: &[(usize, Array)]) {
    match way {
        Way::Each => {
            gradients.iter().for_each(|(index, array)| step.ready(*index, view(array, *index)).unwrap());
        }
        Way::Together => {
            let views: Vec<_> = gradients.iter().map(|(index, array)| (*index, view(array, *index))).collect();
            step.ready_all(&views).unwrap();
        }
        Way::InPlace => {
            for (index, array) in gradients {
                step.gradient_mut(*index).unwrap().copy_from_slice(array.slice()).unwrap();
                step.ready_in_place(*index).unwrap();
            }
        }
    }
}

/// The gradients on a rank after a step: reduced ones hold the result, unchanged ones the rank's own values, and all others are `None`.
fn results(reducer: &Reducer<'_>, reduced: &Reduced, own: impl Fn(usize) -> Array) -> Vec<Option<Array>> {
    let result = |index: usize| {
        let mut array = own(index);
        match reduced.state(index) {
            GradientState::Reduced => {
                let found = reducer.gradient(index).expect("reduced");
                assert_eq!(found.shape(), SHAPES[index]);
                reducer.copy_gradients(&mut [(index, array.slice_mut())]).unwrap();
                assert_eq!(values_of(found.data()), array.values(), "a view and a copy");
                Some(array)
            }
            GradientState::Unchanged => {
                let before = array.clone();
                reducer.copy_gradients(&mut [(index, array.slice_mut())]).unwrap();
                assert!(reducer.gradient(index).is_none() && array == before);
                Some(array)
            }
            _ => None,
        }
    };
    (0..reducer.parameters().len()).map(result).collect()
}

/// Runs three steps; in each, gradients appear in a different order on every rank.
fn train(
    comm: &dyn Communicator,
    options: ReducerOptions,
    formats: &[Format],
    way: Way,
    turn: usize,
) -> Vec<Vec<Array>> {
    let mut reducer = Reducer::new(comm, parameters(formats), options).unwrap();
    let (rank, count) = (comm.rank(), SHAPES.len());
    let own = |index: usize, step| gradient(formats[index % formats.len()], index, rank, step);
    let steps = (0..3).map(|number| {
        let mut gradients: Vec<_> = (0..count).map(|index| (index, own(index, number))).collect();
        gradients.rotate_left((turn * (1 + rank + number)) % count);
        if (turn + rank) % 2 == 1 {
            gradients.reverse();
        }
        let mut step = reducer.step().unwrap();
        hand_in(&mut step, way, &gradients);
        let reduced = step.finish().unwrap();
        results(&reducer, &reduced, |index| own(index, number))
            .into_iter()
            .map(|found| found.expect("present"))
            .collect()
    });
    steps.collect()
}

/// Bytes of the first bucket and of the other buckets: one gradient per bucket, all gradients in one bucket, and sizes between these.
const BYTES: [(usize, usize); 3] = [(0, 0), (usize::MAX, usize::MAX), (100, 3000)];

fn means_and_sums(comm: &dyn Communicator) {
    let cases = [(Reduction::Mean, reduce::Op::Mean), (Reduction::Sum, reduce::Op::Sum)];
    for ((reduction, op), formats) in
        cases.into_iter().flat_map(|case| [(case, &Format::ALL[..]), (case, &[Format::F32])])
    {
        let expected = |number: usize, index: usize| {
            let format = formats[index % formats.len()];
            let inputs: Vec<Vec<f64>> =
                (0..comm.world_size()).map(|rank| gradient(format, index, rank, number).values()).collect();
            all_reduce(op, format, &inputs)
        };
        for (turn, (first, others)) in BYTES.into_iter().enumerate() {
            let options = ReducerOptions::from(reduction).with_first_bucket_bytes(first).with_bucket_bytes(others);
            for way in [Way::Each, Way::Together, Way::InPlace] {
                let memory = if turn == 2 { BucketMemory::Automatic } else { BucketMemory::Own };
                let options = options.with_shared_memory(memory);
                for (number, step) in train(comm, options, formats, way, turn).into_iter().enumerate() {
                    for (index, found) in step.into_iter().enumerate() {
                        let label = format!("{op:?} of {index} in step {number}, buckets of {others} bytes, {way:?}");
                        assert_equal(&label, &found.values(), &expected(number, index));
                    }
                }
            }
        }
    }
}

/// Whatever the buckets, the result is bit-identical to an Adasum of one buffer with all tensors of a dtype.
fn adasum(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let algorithms = [Algorithm::Auto, Algorithm::Gram, Algorithm::Tree];
    for algorithm in
        algorithms.into_iter().filter(|algorithm| *algorithm != Algorithm::Tree || world_size.is_power_of_two())
    {
        for format in [Format::F32, Format::BF16, Format::F64] {
            let options = AdasumOptions::default().with_algorithm(algorithm);
            let whole = |number: usize| {
                let tensors = SHAPES.iter().enumerate().map(|(index, shape)| (format!("{index}"), *shape));
                let mut buffer = GradientBuffer::new(dtype(format), world_size, tensors).unwrap();
                for index in 0..SHAPES.len() {
                    write(buffer.tensor_mut(index).into_data(), 0, &gradient(format, index, rank, number).values());
                }
                let _report = adasum_all_reduce(comm, &mut buffer, options).unwrap();
                buffer.tensors().map(|(_, tensor)| patterns_of(tensor.data())).collect::<Vec<_>>()
            };
            let expected: Vec<_> = (0..3).map(whole).collect();
            for (turn, (first, others)) in BYTES.into_iter().enumerate() {
                let options = ReducerOptions::from(Reduction::Adasum(options));
                let options = options.with_first_bucket_bytes(first).with_bucket_bytes(others);
                let found = train(comm, options, &[format], Way::Each, turn + 1);
                let found: Vec<Vec<_>> =
                    found.into_iter().map(|step| step.iter().map(Array::patterns).collect()).collect();
                assert!(found == expected, "{algorithm:?} of {format:?} in buckets of {others} bytes has other bits");
            }
        }
    }
}

/// Every gradient is rounded to the wire dtype, and so is the mean of the rounded gradients.
fn narrow(comm: &dyn Communicator) {
    let world_size = comm.world_size();
    let options = ReducerOptions::default().with_wire_dtype(Some(DType::BF16)).with_bucket_bytes(2000);
    for (number, step) in train(comm, options, &Format::ALL, Way::Each, 1).into_iter().enumerate() {
        for (index, found) in step.into_iter().enumerate() {
            let format = Format::ALL[index % Format::ALL.len()];
            // f16 is not wider than bf16 and stays as it is; with one rank, nothing is sent.
            let wire = if format == Format::F16 || world_size == 1 { format } else { Format::BF16 };
            let rounded = |rank| {
                let own = gradient(format, index, rank, number).values();
                own.into_iter().map(|value| elementwise::cast(wire, value)).collect()
            };
            let inputs: Vec<Vec<f64>> = (0..world_size).map(rounded).collect();
            let expected = all_reduce(reduce::Op::Mean, wire, &inputs);
            assert_equal(&format!("{index} of {format:?} in step {number}"), &found.values(), &expected);
        }
    }
}

/// In the second step, buckets follow the order in which gradients appeared on rank 0 in the first step, and gradients keep their
/// addresses.
fn order(comm: &dyn Communicator) {
    let options = ReducerOptions::default().with_first_bucket_bytes(1).with_bucket_bytes(1);
    let mut reducer = Reducer::new(comm, parameters(&[Format::F32]), options).unwrap();
    let members = |reducer: &Reducer<'_>| reducer.buckets().map(<[usize]>::to_vec).collect::<Vec<_>>();
    let declared = members(&reducer);
    let run = |reducer: &mut Reducer<'_>, order: &[usize]| {
        let gradients: Vec<_> =
            order.iter().map(|&index| (index, gradient(Format::F32, index, comm.rank(), 0))).collect();
        let mut step = reducer.step().unwrap();
        hand_in(&mut step, Way::Each, &gradients);
        let reduced = step.finish().unwrap();
        assert_eq!(reduced.skipped().count(), SHAPES.len() - order.len());
    };
    // Gradient 2 is missing everywhere, and gradient 5 has appeared on other ranks alone.
    let first: &[usize] = if comm.rank() == 0 { &[7, 6, 1, 0, 4, 3] } else { &[0, 1, 3, 4, 5, 6, 7] };
    let mut step = reducer.step().unwrap();
    let gradients: Vec<_> = first.iter().map(|&index| (index, gradient(Format::F32, index, comm.rank(), 0))).collect();
    hand_in(&mut step, Way::Each, &gradients);
    let reduced = step.finish().unwrap();
    let skipped: &[usize] = if comm.world_size() == 1 { &[2, 5] } else { &[2] };
    assert_eq!(reduced.skipped().collect::<Vec<_>>(), skipped);
    assert_eq!(members(&reducer), declared, "results of the first step are where they were");
    run(&mut reducer, &[0, 1, 2, 3, 4, 5, 6, 7]);
    // A bucket is closed by the gradient that fills it: gradient 3 has no bytes, so its bucket also takes the next gradient.
    let expected: &[&[usize]] = &[&[7], &[6], &[1], &[0], &[4], &[3, 2], &[5]];
    // A single rank keeps the initial buckets, because it has no communication to overlap.
    if comm.world_size() > 1 {
        assert_eq!(members(&reducer), expected);
    }
    let places = |reducer: &mut Reducer<'_>| {
        let mut step = reducer.step().unwrap();
        let mut place = |index: usize| step.gradient_mut(index).unwrap().data().as_bytes().as_ptr().addr();
        let places: Vec<usize> = (0..SHAPES.len()).map(&mut place).collect();
        (0..SHAPES.len()).for_each(|index| step.ready_in_place(index).unwrap());
        assert_eq!(step.finish().unwrap().skipped().count(), 0);
        places
    };
    let before = places(&mut reducer);
    run(&mut reducer, &[7, 6, 5, 4, 3, 2, 1, 0]);
    assert_eq!(places(&mut reducer), before);
}

/// Micro-batches are summed in f32, whatever the dtype of the gradients, and a sum is rounded once, to the wire dtype.
fn micro_batches(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let kinds = [(&Format::ALL[..], None), (&[Format::BF16], None), (&Format::ALL[..], Some(Format::BF16))];
    for (formats, wire) in kinds {
        let format = |index: usize| formats[index % formats.len()];
        let travels = |index: usize| match wire {
            Some(wire) if world_size > 1 && wire.size_bytes() < format(index).size_bytes() => wire,
            _ => format(index),
        };
        let options = ReducerOptions::from(Reduction::Sum).with_bucket_bytes(2000).with_wire_dtype(wire.map(dtype));
        let mut reducer = Reducer::new(comm, parameters(formats), options).unwrap();
        for number in 0..3 {
            // Two micro-batches are accumulated without communication, the second of them without one gradient. The step itself has the
            // third micro-batch, also without one gradient.
            for micro in 0..2 {
                let arrays: Vec<_> =
                    (0..SHAPES.len()).map(|index| gradient(format(index), index, rank, 3 * number + micro)).collect();
                let views = arrays.iter().enumerate().map(|(index, array)| (index, view(array, index)));
                let views: Vec<_> = views.filter(|(index, _)| micro == 0 || *index != 1).collect();
                reducer.accumulate(&views).unwrap();
                assert!(reducer.gradient(0).is_none());
            }
            let gradients: Vec<_> = (0..SHAPES.len())
                .filter(|index| *index != 4)
                .map(|index| (index, gradient(format(index), index, rank, 3 * number + 2)))
                .collect();
            let mut step = reducer.step().unwrap();
            hand_in(&mut step, if number == 1 { Way::Together } else { Way::Each }, &gradients);
            let reduced = step.finish().unwrap();
            assert!((0..SHAPES.len()).all(|index| reduced.state(index) == GradientState::Reduced));
            let found = results(&reducer, &reduced, |index| Array::unwritten(format(index), len(index)));
            for (index, found) in found.into_iter().enumerate() {
                let wide = if format(index) == Format::F64 { Format::F64 } else { Format::F32 };
                let of_rank = |rank| {
                    let micros = (0..3).filter(|micro| (index, *micro) != (1, 1) && (index, *micro) != (4, 2));
                    let values = micros.map(|micro| gradient(format(index), index, rank, 3 * number + micro).values());
                    let add = |sum: Vec<f64>, values: Vec<f64>| {
                        let pairs = sum.into_iter().zip(values);
                        pairs.map(|(sum, value)| elementwise::accumulate(wide, sum, format(index), value)).collect()
                    };
                    let sum: Vec<f64> = values.reduce(add).expect("several");
                    sum.into_iter().map(|value| elementwise::cast(travels(index), value)).collect()
                };
                let inputs: Vec<Vec<f64>> = (0..world_size).map(of_rank).collect();
                let expected = reduce::all_reduce(reduce::Op::Sum, travels(index), &inputs);
                let label = format!("{index} of {:?} in step {number}", format(index));
                assert_equal(&label, &found.expect("reduced").values(), &expected);
            }
        }
        // Accumulated sums are discarded when a micro-batch has two gradients of one parameter.
        let array = gradient(format(0), 0, rank, 0);
        reducer.accumulate(&[(0, view(&array, 0))]).unwrap();
        let error = reducer.accumulate(&[(0, view(&array, 0)), (0, view(&array, 0))]).unwrap_err().to_string();
        assert!(error.contains(r#"parameter 0, "layer.0", has two gradients in one micro-batch"#), "{error}");
        reducer.discard_accumulated();
        let reduced = reducer.step().unwrap().finish().unwrap();
        assert_eq!(reduced.skipped().count(), SHAPES.len());
    }
}

/// The text of a step's error on this rank; panics if the step succeeded.
fn text(outcome: gradsync::Result<Reduced>) -> String {
    match outcome {
        Err(error @ Error::InvalidArgument { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// Runs a whole step, which must succeed.
fn works(reducer: &mut Reducer<'_>, rank: usize) {
    let gradients: Vec<_> = (0..SHAPES.len()).map(|index| (index, gradient(Format::F32, index, rank, 0))).collect();
    let mut step = reducer.step().unwrap();
    hand_in(&mut step, Way::Each, &gradients);
    assert_eq!(step.finish().unwrap().skipped().count(), 0);
}
