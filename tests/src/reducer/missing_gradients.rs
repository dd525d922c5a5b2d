//! Missing gradients, parameters under several names, and ranks with unequal numbers of examples.

use gradsync::DType;
use gradsync::comm::Communicator;
use gradsync::ops::AdasumOptions;
use gradsync::train::{AbsentGradients, GradientState, Parameter, Reducer, ReducerOptions, Reduction, UnevenEnds};

use super::{SHAPES, Way, all_reduce, gradient, hand_in, len, parameters, results, text, train, view, works};
use crate::array::{Array, values_of};
use crate::oracle::{Format, reduce};
use crate::tolerance::{assert_equal, assert_within};

/// Parameters that are not trained on any rank, that no rank uses, and that one rank alone uses.
pub(super) fn absent(comm: &dyn Communicator) {
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
                // The reduction of one rank's gradient and of zeros is that gradient, both for the sum and for Adasum.
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

pub(super) fn absent_errors(comm: &dyn Communicator) {
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
        assert!(
            error.contains(&format!(r#"parameter 4, "layer.4", has no gradient on rank {last} in step"#)),
            "{error}"
        );
        assert!(reducer.gradient(0).is_none(), "no result after an error");
        works(&mut reducer, rank);
    }
}

/// Three names of one storage: a gradient may be passed under any of the names, and counts once.
pub(super) fn tied(comm: &dyn Communicator) {
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
        // Each rank passes the gradient under a different name.
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

/// The mean over the examples of all ranks, where the number of examples differs by rank and step and may be 0.
///
/// The reference is the mean of all examples' gradients, as a single rank with all examples would compute it. The reducer's result differs
/// from it by four roundings to f32: of a rank's mean, of its weight, of their product, and of the mean over ranks. Each is relative to its
/// term, so that the total error is at most that relative error times the sum of the absolute terms.
pub(super) fn uneven(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let index = 1;
    let options = ReducerOptions::default().with_bucket_bytes(100);
    let mut reducer = Reducer::new(comm, parameters(&[Format::F32]), options).unwrap();
    // Rank r has 4 examples in each of r + 1 steps, then one step with r + 1 examples, then none.
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
            |element: usize| gamma_f32(4) * all.iter().map(|values| values[element].abs()).sum::<f64>() / count as f64;
        let (expected, bounds): (Vec<f64>, Vec<f64>) = (0..len(index)).map(|at| (joined(at), bound(at))).unzip();
        assert_within(&format!("step {number}"), Format::F32, &found, &expected, &bounds);
        number += 1;
    }
    assert_eq!(number, world_size + 1, "all end with the last batch");
    // The reducer stays usable: steps with equal numbers of examples are bit-identical to steps without numbers.
    let own = gradient(Format::F32, index, rank, 0);
    let mut bits = Vec::new();
    for counted in [false, true] {
        let mut step = if counted { reducer.step_of(3).unwrap().expect("data") } else { reducer.step().unwrap() };
        step.ready(index, view(&own, index)).unwrap();
        let reduced = step.finish().unwrap();
        bits.push(results(&reducer, &reduced, |index| gradient(Format::F32, index, rank, 0)));
    }
    assert_eq!(bits[0], bits[1]);
    // A rank that has accumulated micro-batches must not declare that it has no examples.
    let is_wrong = rank > 0;
    if is_wrong {
        reducer.accumulate(&[(index, view(&own, index))]).unwrap();
    }
    let step = reducer.step_of(usize::from(!is_wrong)).unwrap().expect("rank 0 has data");
    match world_size {
        1 => assert_eq!(step.finish().unwrap().skipped().count(), SHAPES.len()),
        _ => assert!(text(step.finish()).contains("passes 0 examples to `step_of`, and has sums over micro-batches")),
    }
    // A rank without examples must not pass a gradient.
    let has_data = rank == 0;
    let mut step = reducer.step_of(usize::from(has_data)).unwrap().expect("rank 0 has data");
    assert_eq!(step.ready(index, view(&own, index)).is_ok(), has_data);
    match world_size {
        1 => drop(step.finish().unwrap()),
        _ => assert!(text(step.finish()).contains(r#""layer.1", has a gradient on a rank without examples"#)),
    }
}

/// The relative error of `roundings` successive roundings to f32.
fn gamma_f32(roundings: usize) -> f64 {
    let each = roundings as f64 * 2f64.powi(-Format::F32.precision());
    each / (1.0 - each)
}

pub(super) fn stop(comm: &dyn Communicator) {
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

/// The votes of the first step apply to all later steps; results are bit-identical to the results without a static graph.
pub(super) fn alike(comm: &dyn Communicator) {
    let options = ReducerOptions::default().with_bucket_bytes(1000);
    let plain = train(comm, options, &[Format::F32], Way::Each, 1);
    assert!(train(comm, options.with_static_graph(true), &[Format::F32], Way::Each, 1) == plain);
    // One parameter is never used, and another is used by rank 0 alone.
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
