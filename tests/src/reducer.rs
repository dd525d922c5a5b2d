//! Reducers of gradients as test cases: the same for every transport of host memory.
//!
//! A case is run by all ranks of a communicator, which works as before afterwards.

use gradsync::comm::Communicator;
use gradsync::ops::{AdasumOptions, Algorithm, adasum_all_reduce};
use gradsync::train::{
    AbsentGradients, GradientState, Parameter, Reduced, Reducer, ReducerOptions, Reduction, Step, UnevenEnds,
};
use gradsync::{DType, Error, GradientBuffer, TensorView};

use crate::array::{Array, dtype, patterns_of, values_of, write};
use crate::inputs::vector;
use crate::oracle::{Format, elementwise, reduce};
use crate::tensors::Case;
use crate::tolerance::{assert_equal, assert_within, gamma};

/// All of them.
pub const ALL: &[Case] = &[
    Case { name: "means and sums of any buckets and orders", run: means_and_sums },
    Case { name: "Adasum of any buckets as without buckets", run: adasum },
    Case { name: "a narrow wire", run: narrow },
    Case { name: "buckets follow the first step of rank 0", run: order },
    Case { name: "sums over micro-batches", run: micro_batches },
    Case { name: "absent gradients", run: absent },
    Case { name: "absent gradients as errors", run: absent_errors },
    Case { name: "tied parameters", run: tied },
    Case { name: "unequal numbers of examples", run: uneven },
    Case { name: "ranks that stop together", run: stop },
    Case { name: "steps that are alike", run: alike },
    Case { name: "refused gradients are errors of all ranks", run: refusals },
    Case { name: "ranks that disagree about their parameters", run: disagreements },
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

/// In rank order, in `f64`; a mean is that sum divided, and all is rounded once. The oracle's own mean is correctly rounded, which is more.
fn all_reduce(op: reduce::Op, format: Format, inputs: &[Vec<f64>]) -> Vec<f64> {
    let count = if op == reduce::Op::Mean { inputs.len() as f64 } else { 1.0 };
    let total = |index: usize| inputs.iter().map(|input| input[index]).reduce(|sum, value| sum + value).unwrap_or(0.0);
    (0..inputs[0].len()).map(|index| format.round(total(index) / count)).collect()
}

/// How gradients are handed in.
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

/// What a rank has after a step: its own gradient, with the result where that is reduced.
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

/// Three steps; in each, gradients appear in another order on every rank.
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

/// Bytes of the first bucket and of the others: one gradient each, all in one, and between.
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
                for (number, step) in train(comm, options, formats, way, turn).into_iter().enumerate() {
                    for (index, found) in step.into_iter().enumerate() {
                        let what = format!("{op:?} of {index} in step {number}, buckets of {others} bytes, {way:?}");
                        assert_equal(&what, &found.values(), &expected(number, index));
                    }
                }
            }
        }
    }
}

/// The bits of one buffer with all tensors of a dtype, whatever the buckets.
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

/// Every gradient is rounded to the dtype of the wire, and so is the mean of the rounded ones.
fn narrow(comm: &dyn Communicator) {
    let world_size = comm.world_size();
    let options = ReducerOptions::default().with_wire_dtype(Some(DType::BF16)).with_bucket_bytes(2000);
    for (number, step) in train(comm, options, &Format::ALL, Way::Each, 1).into_iter().enumerate() {
        for (index, found) in step.into_iter().enumerate() {
            let format = Format::ALL[index % Format::ALL.len()];
            // f16 is no wider than bf16 and stays; with one rank nothing travels.
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

/// The second step has buckets in the order in which gradients appeared on rank 0 in the first, and keeps their places.
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
    // A bucket is closed by the gradient that fills it: 3 has no bytes, and the bucket that it is in goes on.
    let expected: &[&[usize]] = &[&[7], &[6], &[1], &[0], &[4], &[3, 2], &[5]];
    // One rank has nobody to agree with, and nothing to gain.
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

/// Sums are f32, whatever the gradients are, and are rounded once to what travels.
fn micro_batches(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for formats in [&Format::ALL[..], &[Format::BF16]] {
        let format = |index: usize| formats[index % formats.len()];
        let options = ReducerOptions::from(Reduction::Sum).with_bucket_bytes(2000);
        let mut reducer = Reducer::new(comm, parameters(formats), options).unwrap();
        for number in 0..3 {
            // Two micro-batches without communication, of which the second has all gradients but one; the third is in the step, but for one.
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
                    sum.into_iter().map(|value| elementwise::cast(format(index), value)).collect()
                };
                let inputs: Vec<Vec<f64>> = (0..world_size).map(of_rank).collect();
                let expected = reduce::all_reduce(reduce::Op::Sum, format(index), &inputs);
                let what = format!("{index} of {:?} in step {number}", format(index));
                assert_equal(&what, &found.expect("reduced").values(), &expected);
            }
        }
        // Sums that are discarded, and a parameter twice in a micro-batch.
        let array = gradient(format(0), 0, rank, 0);
        reducer.accumulate(&[(0, view(&array, 0))]).unwrap();
        let error = reducer.accumulate(&[(0, view(&array, 0)), (0, view(&array, 0))]).unwrap_err().to_string();
        assert!(error.contains(r#"parameter 0, "layer.0", has two gradients in one micro-batch"#), "{error}");
        reducer.discard_accumulated();
        let reduced = reducer.step().unwrap().finish().unwrap();
        assert_eq!(reduced.skipped().count(), SHAPES.len());
    }
}

/// Not trained anywhere; used on no rank; used on rank 0 alone.
fn absent(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mut declared = parameters(&[Format::F32]);
    declared[3].is_trained = false;
    declared[5].is_trained = false;
    for reduction in [Reduction::Sum, Reduction::Adasum(AdasumOptions::default())] {
        let options = ReducerOptions::from(reduction).with_bucket_bytes(1000).with_first_bucket_bytes(10);
        let mut reducer = Reducer::new(comm, declared.clone(), options).unwrap();
        for number in 0..4 {
            let is_used = |index: usize| match index {
                3 | 5 => false,
                1 => number == 2,
                6 => rank == 0,
                4 => rank == world_size - 1,
                _ => true,
            };
            let own = |index| gradient(Format::F32, index, rank, number);
            let used = (0..SHAPES.len()).filter(|index| is_used(*index));
            let gradients: Vec<_> = used.map(|index| (index, own(index))).collect();
            let mut step = reducer.step().unwrap();
            hand_in(&mut step, Way::Each, &gradients);
            let reduced = step.finish().unwrap();
            let found = results(&reducer, &reduced, own);
            for (index, found) in found.into_iter().enumerate() {
                let expected = match index {
                    3 | 5 => GradientState::NotTrained,
                    1 if number != 2 => GradientState::Skipped,
                    _ if world_size == 1 => GradientState::Unchanged,
                    _ => GradientState::Reduced,
                };
                assert_eq!(
                    (reduced.state(index), reducer.state(index)),
                    (expected, expected),
                    "{index} in step {number}"
                );
                assert_eq!(found.is_some(), expected.has_gradient());
                // The only rank that had it has the sum, and Adasum of it and zeros.
                let alone = [(6, 0), (4, world_size - 1)].into_iter().find(|(other, _)| *other == index);
                if let (Some(found), Some((_, owner))) = (found, alone) {
                    assert_equal(
                        "the gradient of one rank",
                        &found.values(),
                        &gradient(Format::F32, index, owner, number).values(),
                    );
                }
            }
            let expected: &[usize] = if number == 2 { &[] } else { &[1] };
            assert_eq!(reduced.skipped().collect::<Vec<_>>(), expected);
        }
    }
}

/// The text of a step's error on this rank, which has to be one.
fn text(outcome: gradsync::Result<Reduced>) -> String {
    match outcome {
        Err(error @ Error::InvalidArgument { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// A whole step, which has a result.
fn works(reducer: &mut Reducer<'_>, rank: usize) {
    let gradients: Vec<_> = (0..SHAPES.len()).map(|index| (index, gradient(Format::F32, index, rank, 0))).collect();
    let mut step = reducer.step().unwrap();
    hand_in(&mut step, Way::Each, &gradients);
    assert_eq!(step.finish().unwrap().skipped().count(), 0);
}

fn absent_errors(comm: &dyn Communicator) {
    let (rank, last) = (comm.rank(), comm.world_size() - 1);
    let options = ReducerOptions::default().with_absent(AbsentGradients::Error).with_bucket_bytes(1000);
    let mut reducer = Reducer::new(comm, parameters(&[Format::F32]), options).unwrap();
    for number in 0..3 {
        let has = |index: &usize| rank != last || (*index != 4 && *index != 6);
        let gradients: Vec<_> =
            (0..SHAPES.len()).filter(has).map(|index| (index, gradient(Format::F32, index, rank, number))).collect();
        let mut step = reducer.step().unwrap();
        hand_in(&mut step, Way::Each, &gradients);
        let error = text(step.finish());
        assert!(error.contains(&format!(r#"parameter 4, "layer.4", has no gradient on rank {last}"#)), "{error}");
        assert!(reducer.gradient(0).is_none(), "no result after an error");
        works(&mut reducer, rank);
    }
}

/// Three names of one storage: one gradient, under any of them.
fn tied(comm: &dyn Communicator) {
    let rank = comm.rank();
    let base = 0x1000 * (1 + rank as u64);
    let at = |name: &str, begin: u64| {
        Parameter::new(name, SHAPES[0], DType::F32).with_storage(Some(base + begin..base + begin + 20))
    };
    let declared = [at("head", 0), at("other", 64), at("embedding", 0), at("copy", 0)];
    let mut reducer = Reducer::new(comm, declared, ReducerOptions::default()).unwrap();
    assert_eq!([0, 1, 2, 3].map(|index| reducer.owner(index)), [0, 1, 0, 0]);
    assert_eq!(reducer.buckets().flatten().copied().collect::<Vec<_>>(), [0, 1]);
    for number in 0..3 {
        let own = gradient(Format::F32, 0, rank, number);
        let mut step = reducer.step().unwrap();
        // Another name on every rank.
        step.ready([0, 2, 3][(rank + number) % 3], view(&own, 0)).unwrap();
        let reduced = step.finish().unwrap();
        assert_eq!(reduced.skipped().collect::<Vec<_>>(), [1]);
        let inputs: Vec<Vec<f64>> =
            (0..comm.world_size()).map(|rank| gradient(Format::F32, 0, rank, number).values()).collect();
        let expected = all_reduce(reduce::Op::Mean, Format::F32, &inputs);
        for index in [0, 2, 3] {
            let found = reducer.gradient(index).map_or_else(|| own.values(), |found| values_of(found.data()));
            assert_equal("a tied gradient", &found, &expected);
        }
    }
    let own = gradient(Format::F32, 0, rank, 0);
    let mut step = reducer.step().unwrap();
    step.ready(2, view(&own, 0)).unwrap();
    let error = step.ready(3, view(&own, 0)).unwrap_err().to_string();
    assert!(error.contains(r#"parameter 3, "copy", has two gradients in one step"#), "{error}");
    assert!(text(step.finish()).contains("two gradients in one step"));
}

/// The mean over the examples of all ranks, where each rank has another number of them in every step, down to none.
///
/// One rank with all examples would have the sum of the examples' gradients over their number. Here a rank's mean is rounded once, times its weight
/// once more, and so is the mean of the ranks: three roundings of f32, each relative to the largest term of its sum at most.
fn uneven(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let index = 1;
    let options = ReducerOptions::default().with_bucket_bytes(100);
    let mut reducer = Reducer::new(comm, parameters(&[Format::F32]), options).unwrap();
    // Rank r has batches of 4 in r + 1 steps, and one of r + 1 after them.
    let examples = |rank: usize, number: usize| match number.cmp(&(rank + 1)) {
        std::cmp::Ordering::Less => 4,
        std::cmp::Ordering::Equal => rank + 1,
        std::cmp::Ordering::Greater => 0,
    };
    let of_example = |rank, number, example: usize| gradient(Format::F32, index, rank, 10 * number + example).values();
    let mean = |rank: usize, number: usize| -> Vec<f64> {
        let count = examples(rank, number);
        let element = |element: usize| {
            let sum: f64 = (0..count).map(|example| of_example(rank, number, example)[element]).sum();
            Format::F32.round(sum / count as f64)
        };
        (0..len(index)).map(element).collect()
    };
    let mut number = 0;
    loop {
        let Some(mut step) = reducer.step_of(examples(rank, number)).unwrap() else { break };
        let count: usize = (0..world_size).map(|rank| examples(rank, number)).sum();
        let own = (examples(rank, number) > 0).then(|| Array::new(Format::F32, &mean(rank, number)));
        if let Some(own) = &own {
            step.ready(index, view(own, index)).unwrap();
        }
        let reduced = step.finish().unwrap();
        assert_eq!(reduced.examples(), Some(count));
        let found = reducer.gradient(index).map_or_else(|| own.unwrap().values(), |found| values_of(found.data()));
        let all: Vec<Vec<f64>> = (0..world_size)
            .flat_map(|rank| (0..examples(rank, number)).map(move |example| (rank, example)))
            .map(|(rank, example)| of_example(rank, number, example))
            .collect();
        let joined = |element: usize| all.iter().map(|values| values[element]).sum::<f64>() / count as f64;
        let bound =
            |element: usize| gamma_f32(3) * all.iter().map(|values| values[element].abs()).sum::<f64>() / count as f64;
        let (expected, bounds): (Vec<f64>, Vec<f64>) = (0..len(index)).map(|at| (joined(at), bound(at))).unzip();
        assert_within(&format!("step {number}"), Format::F32, &found, &expected, &bounds);
        number += 1;
    }
    assert_eq!(number, world_size + 1, "all end with the last batch");
    // The reducer goes on: an epoch with equal numbers has the bits of steps without numbers.
    let own = gradient(Format::F32, index, rank, 0);
    let mut bits = Vec::new();
    for counted in [false, true] {
        let mut step = if counted { reducer.step_of(3).unwrap().expect("data") } else { reducer.step().unwrap() };
        step.ready(index, view(&own, index)).unwrap();
        let reduced = step.finish().unwrap();
        bits.push(results(&reducer, &reduced, |index| gradient(Format::F32, index, rank, 0)));
    }
    assert_eq!(bits[0], bits[1]);
    // A gradient of a rank without data.
    let has_data = rank == 0;
    let mut step = reducer.step_of(usize::from(has_data)).unwrap().expect("rank 0 has data");
    assert_eq!(step.ready(index, view(&own, index)).is_ok(), has_data);
    match world_size {
        1 => drop(step.finish().unwrap()),
        _ => assert!(text(step.finish()).contains(r#""layer.1", has a gradient on a rank without examples"#)),
    }
}

/// `roundings` of f32, compounded.
fn gamma_f32(roundings: usize) -> f64 {
    gamma(roundings) * 2f64.powi(Format::F64.precision() - Format::F32.precision())
}

fn stop(comm: &dyn Communicator) {
    let options = ReducerOptions::default().with_uneven(UnevenEnds::Stop);
    let mut reducer = Reducer::new(comm, parameters(&[Format::F32]), options).unwrap();
    let batches = if comm.rank() == comm.world_size() - 1 { 2 } else { 5 };
    let own = gradient(Format::F32, 0, comm.rank(), 0);
    let mut steps = 0;
    while let Some(mut step) = reducer.step_of(if steps < batches { 8 } else { 0 }).unwrap() {
        step.ready(0, view(&own, 0)).unwrap();
        assert_eq!(step.finish().unwrap().examples(), Some(8 * comm.world_size()));
        steps += 1;
    }
    assert_eq!(steps, 2);
}

/// The ranks' votes of the first step hold for all steps; results are the same bits.
fn alike(comm: &dyn Communicator) {
    let options = ReducerOptions::default().with_bucket_bytes(1000);
    let plain = train(comm, options, &[Format::F32], Way::Each, 1);
    assert!(train(comm, options.with_static_graph(true), &[Format::F32], Way::Each, 1) == plain);
    // A parameter that is never used, and one that rank 0 alone uses.
    let mut reducer = Reducer::new(comm, parameters(&[Format::F32]), options.with_static_graph(true)).unwrap();
    for number in 0..3 {
        let used = (0..SHAPES.len()).filter(|index| *index != 2 && (*index != 6 || comm.rank() == 0));
        let gradients: Vec<_> = used.map(|index| (index, gradient(Format::F32, index, comm.rank(), number))).collect();
        let mut step = reducer.step().unwrap();
        hand_in(&mut step, Way::Each, &gradients);
        let reduced = step.finish().unwrap();
        assert_eq!(reduced.skipped().collect::<Vec<_>>(), [2]);
        assert!(reduced.state(6).has_gradient());
    }
}

/// Whatever one rank hands in wrongly is its error at once, and an error of all ranks at the end, which name it; then the reducer goes on.
fn refusals(comm: &dyn Communicator) {
    let (rank, wrong) = (comm.rank(), comm.world_size() - 1);
    let mut declared = parameters(&[Format::F32]);
    declared.push(Parameter::new("frozen", [2], DType::F32).with_trained(false));
    let options = ReducerOptions::default().with_bucket_bytes(1000);
    let mut reducer = Reducer::new(comm, declared, options).unwrap();
    type Mistake = fn(&mut Step<'_, '_>) -> gradsync::Result<()>;
    let mistakes: [(&str, Mistake); 7] = [
        (r#"parameter 0, "layer.0", has a gradient of shape [6], and was declared with [5]"#, |step| {
            step.ready(0, &[0.0f32; 6])
        }),
        (r#"parameter 0, "layer.0", has a gradient of f64, and was declared with f32"#, |step| {
            step.ready(0, &[0.0f64; 5])
        }),
        ("there is no parameter 9; there are 9", |step| step.ready(9, &[0.0f32; 5])),
        (r#"parameter 8, "frozen", has a gradient, and was declared as not trained"#, |step| {
            step.ready(8, &[0.0f32; 2])
        }),
        (r#"parameter 7, "layer.7", has two gradients in one step"#, |step| {
            step.ready(7, TensorView::new(&[0.0f32; 700], &[7usize, 100][..])?)
        }),
        (r#"parameter 7, "layer.7", has two gradients in one step"#, |step| step.gradient_mut(7).map(drop)),
        (r#"parameter 7, "layer.7", has two gradients in one step"#, |step| step.ready_in_place(7)),
    ];
    for (expected, mistake) in mistakes {
        for leaves in [false, true] {
            let mut step = reducer.step().unwrap();
            let own = gradient(Format::F32, 7, rank, 0);
            step.ready(7, view(&own, 7)).unwrap();
            if rank == wrong {
                let error = mistake(&mut step).unwrap_err().to_string();
                assert!(error.contains(expected), "{error}");
            }
            if leaves && rank == wrong {
                drop(step);
            } else {
                let error = text(step.finish());
                assert!(error.contains(expected), "{error}");
                assert!(rank == wrong || error.contains(&format!("rank {wrong} refuses")), "{error}");
            }
            assert!(reducer.gradient(7).is_none());
            works(&mut reducer, rank);
        }
    }
    // A rank that leaves its step without a reason of its own.
    let mut step = reducer.step().unwrap();
    let own = gradient(Format::F32, 7, rank, 0);
    step.ready(7, view(&own, 7)).unwrap();
    if rank == wrong {
        drop(step);
    } else {
        let error = text(step.finish());
        assert!(
            error.contains(&format!("rank {wrong} refuses: reducer: it has left a step without finishing it")),
            "{error}"
        );
    }
    works(&mut reducer, rank);
}

fn disagreements(comm: &dyn Communicator) {
    let (rank, last) = (comm.rank(), comm.world_size() - 1);
    if last == 0 {
        return;
    }
    type Change = fn(&mut Vec<Parameter>, &mut ReducerOptions);
    let changes: [(&str, &str, &str, Change); 9] = [
        ("parameter 1", r#""layer.1""#, r#""weight""#, |parameters, _| parameters[1].name = "weight".into()),
        ("parameter 2", r#""layer.2""#, r#""layer.3""#, |parameters, _| parameters.swap(2, 3)),
        (r#"the shape of parameter 6 "layer.6""#, "shape [129]", "shape [3, 43]", |parameters, _| {
            parameters[6].shape = vec![3, 43];
        }),
        (r#"the dtype of parameter 4 "layer.4""#, "f32", "bf16", |parameters, _| parameters[4].dtype = DType::BF16),
        (
            r#"the kind of parameter 0 "layer.0""#,
            "a trained parameter",
            "a parameter that is not trained",
            |parameters, _| {
                parameters[0].is_trained = false;
            },
        ),
        ("parameter 8", "none", r#""more""#, |parameters, _| parameters.push(Parameter::new("more", [1], DType::F32))),
        (r#"the parameter that parameter 7 "layer.7" is tied to"#, "none", r#""layer.6""#, |parameters, _| {
            parameters[7].shape = vec![129];
            parameters[6].storage = Some(0..516);
            parameters[7].storage = Some(0..516);
        }),
        ("bucket_bytes", "26214400", "17", |_, options| options.bucket_bytes = 17),
        ("absent", "zeros", "an error", |_, options| options.absent = AbsentGradients::Error),
    ];
    for (label, left, right, change) in changes {
        let (mut declared, mut options) = (parameters(&[Format::F32]), ReducerOptions::default());
        declared[7].shape = vec![129];
        if rank == last {
            change(&mut declared, &mut options);
        }
        match Reducer::new(comm, declared, options) {
            Err(Error::Disagreement(found)) => {
                assert_eq!((&found.label[..], &found.left[..], &found.right[..]), (label, left, right));
                assert_eq!((found.left_rank, found.right_rank), (0, last));
            }
            other => panic!("{label}: {:?}", other.map(drop)),
        }
    }
    // What one rank alone can see.
    let mut declared = parameters(&[Format::F32]);
    declared[1].storage = Some(0..16);
    if rank == last {
        declared[0].storage = Some(8..24);
    }
    let error = Reducer::new(comm, declared, ReducerOptions::default()).map(drop).unwrap_err().to_string();
    assert!(error.contains(r#""layer.1" at 0x0..0x10"#) && error.contains("overlap"), "{error}");
    assert!(rank == last || error.contains(&format!("rank {last} refuses")), "{error}");
}
