//! Steps that a rank has left, ranks without any gradient, and gradients that are not finite: errors of all ranks that name the rank.

use std::panic::{AssertUnwindSafe, catch_unwind};

use gradsync::comm::Communicator;
use gradsync::ops::AdasumOptions;
use gradsync::train::{AbsentGradients, NonFinite, NonFiniteGradient, Parameter, Reducer, ReducerOptions, Reduction};
use gradsync::{DType, Error, TensorView};

use super::text;

/// Four parameters of one element, each in a bucket of its own, so that all calls have the same length.
fn elements(dtype: DType) -> [Parameter; 4] {
    ["a", "b", "c", "d"].map(|name| Parameter::new(name, [1], dtype))
}

fn options() -> ReducerOptions {
    ReducerOptions::default().with_first_bucket_bytes(0).with_bucket_bytes(0)
}

/// One step with the gradients 1, 10, 100 and 1000 on every rank, which are their means.
fn means(reducer: &mut Reducer<'_>) {
    let mut step = reducer.step().unwrap();
    for index in 0..4 {
        step.ready(index, &[10f32.powi(index as i32)]).unwrap();
    }
    let reduced = step.finish().unwrap();
    for index in (0..4).filter(|&index| reduced.state(index) == gradsync::train::GradientState::Reduced) {
        assert_eq!(reducer.gradient(index).unwrap().to_vec::<f32>().unwrap(), [10f32.powi(index as i32)]);
    }
}

/// A rank leaves its third step after the first gradient, and begins again.
pub(super) fn left_steps(comm: &dyn Communicator) {
    let (rank, leaver) = (comm.rank(), comm.world_size() - 1);
    for is_alike in [false, true] {
        for panics in [false, true] {
            let mut reducer = Reducer::new(comm, elements(DType::F32), options().with_static_graph(is_alike)).unwrap();
            means(&mut reducer);
            means(&mut reducer);
            let expected = "step 3 was left without `finish`";
            if rank == leaver {
                if panics {
                    let outcome = catch_unwind(AssertUnwindSafe(|| {
                        let mut step = reducer.step().unwrap();
                        step.ready(0, &[1.0f32]).unwrap();
                        std::panic::resume_unwind(Box::new("in the middle of a step"));
                    }));
                    assert!(outcome.is_err());
                } else {
                    let mut step = reducer.step().unwrap();
                    step.ready(0, &[1.0f32]).unwrap();
                    std::mem::forget(step);
                }
                assert!(reducer.gradient(0).is_none(), "nothing was reduced");
                let value = [1.0f32];
                let view = TensorView::new(&value, &[1usize][..]).unwrap();
                let refused = reducer.accumulate(&[(1, view)]).unwrap_err().to_string();
                assert!(refused.contains(expected), "{refused}");
                let error = reducer.step().map(drop).unwrap_err().to_string();
                assert!(error.contains(expected), "{error}");
            } else {
                let mut step = reducer.step().unwrap();
                (0..4).for_each(|index| step.ready(index, &[10f32.powi(index as i32)]).unwrap());
                let error = text(step.finish());
                assert!(
                    error.contains(&format!("in step 3 rank {leaver} refuses")) && error.contains(expected),
                    "{error}"
                );
            }
            means(&mut reducer);
            means(&mut reducer);
        }
    }
}

/// `ready_in_place` needs a gradient of this step: the bucket has the last step's result otherwise.
pub(super) fn stale_gradients(comm: &dyn Communicator) {
    let mut reducer = Reducer::new(comm, elements(DType::F32), options()).unwrap();
    for number in 0..4 {
        let mut step = reducer.step().unwrap();
        for index in 0..4 {
            step.gradient_mut(index).unwrap().into_data().typed::<f32>().unwrap()[0] = 2.0;
            step.ready_in_place(index).unwrap();
        }
        let _reduced = step.finish().unwrap();
        assert_eq!(reducer.gradient(0).unwrap().to_vec::<f32>().unwrap(), [2.0], "step {number}");
    }
    let mut step = reducer.step().unwrap();
    let own = step.ready_in_place(2).unwrap_err().to_string();
    for error in [own, text(step.finish())] {
        assert!(error.contains(r#"parameter 2, "c", was not computed in its bucket in this step"#), "{error}");
    }
}

/// A rank with examples whose loss depends on no parameter.
pub(super) fn whole_ranks(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    if world_size == 1 {
        return;
    }
    let idle = 1;
    let run = |reducer: &mut Reducer<'_>, examples: Option<usize>| {
        let mut step = match examples {
            Some(examples) => reducer.step_of(examples).unwrap().expect("another rank has examples"),
            None => reducer.step().unwrap(),
        };
        if rank != idle {
            step.ready(0, &[1.0f32]).unwrap();
        }
        step.finish()
    };
    for absent in [AbsentGradients::Zeros, AbsentGradients::Error] {
        for is_alike in [false, true] {
            let options = options().with_absent(absent).with_static_graph(is_alike);
            let parameters = [Parameter::new("a", [1], DType::F32)];
            let mut reducer = Reducer::new(comm, parameters, options).unwrap();
            for examples in [None, Some(3)] {
                let error = text(run(&mut reducer, examples));
                assert!(error.contains("rank 1 has no gradient in step"), "{error}");
            }
            // A rank without examples is no mistake.
            let reduced = run(&mut reducer, Some(if rank == idle { 0 } else { 3 })).unwrap();
            assert_eq!(reduced.examples(), Some(3 * (world_size - 1)));
            assert_eq!(reducer.gradient(0).unwrap().to_vec::<f32>().unwrap(), [1.0]);
        }
    }
    let mut reducer =
        Reducer::new(comm, elements(DType::F32), options().with_absent(AbsentGradients::ZerosOfWholeRanks)).unwrap();
    let _reduced = run(&mut reducer, None).unwrap();
    let mean = (world_size - 1) as f64 / world_size as f64;
    assert_eq!(reducer.gradient(0).unwrap().to_vec::<f32>().unwrap(), [mean as f32]);
}

/// The ways in which a gradient reaches its bucket.
#[derive(Clone, Copy, Debug)]
enum Way {
    Copied,
    InPlace,
    AddedUp,
}

/// One step in which this rank's gradient of "c" is `value`, and all others are 1.
fn step_with(reducer: &mut Reducer<'_>, way: Way, value: f32) -> gradsync::Result<gradsync::train::Reduced> {
    let of = |index: usize| [if index == 2 { value } else { 1.0 }];
    if let Way::AddedUp = way {
        for index in 0..4 {
            reducer.accumulate(&[(index, TensorView::new(&of(index), &[1usize][..])?)])?;
        }
    }
    let mut step = reducer.step()?;
    for index in 0..4 {
        match way {
            Way::Copied => step.ready(index, &of(index))?,
            Way::InPlace => {
                step.gradient_mut(index)?.into_data().typed::<f32>().expect("f32")[0] = of(index)[0];
                step.ready_in_place(index)?;
            }
            Way::AddedUp => {}
        }
    }
    step.finish()
}

/// NaN and infinities of one rank, in each way and with each option.
pub(super) fn non_finite(comm: &dyn Communicator) {
    let (rank, wrong) = (comm.rank(), comm.world_size() - 1);
    for reduction in [Reduction::Mean, Reduction::Sum, Reduction::Adasum(AdasumOptions::default())] {
        for way in [Way::Copied, Way::InPlace, Way::AddedUp] {
            for (is_alike, value) in [(false, f32::NAN), (true, f32::NEG_INFINITY)] {
                let options = options().with_reduction(reduction).with_static_graph(is_alike);
                let own = if rank == wrong { value } else { 1.0 };
                let named = |error: Error| match error {
                    Error::NotFinite { step, rank, parameter, .. } => {
                        assert_eq!((step, rank, &parameter[..]), (2, Some(wrong), "c"), "{way:?}");
                    }
                    other => panic!("{way:?}: {other}"),
                };

                let mut reducer = Reducer::new(comm, elements(DType::F32), options).unwrap();
                let _reduced = step_with(&mut reducer, way, 1.0).unwrap();
                let reduced = step_with(&mut reducer, way, own).unwrap();
                assert!(reduced.state(2).has_gradient() && reduced.non_finite().is_none());
                named(reducer.step().map(drop).unwrap_err());
                let _reduced = step_with(&mut reducer, way, 1.0).unwrap();

                let mut reducer =
                    Reducer::new(comm, elements(DType::F32), options.with_non_finite(NonFinite::Error)).unwrap();
                let _reduced = step_with(&mut reducer, way, 1.0).unwrap();
                named(step_with(&mut reducer, way, own).unwrap_err());
                assert!(reducer.gradient(0).is_none());
                let _reduced = step_with(&mut reducer, way, 1.0).unwrap();

                let mut reducer =
                    Reducer::new(comm, elements(DType::F32), options.with_non_finite(NonFinite::Skip)).unwrap();
                let _reduced = step_with(&mut reducer, way, 1.0).unwrap();
                let reduced = step_with(&mut reducer, way, own).unwrap();
                let NonFiniteGradient { step, rank, parameter, .. } = reduced.non_finite().unwrap();
                assert_eq!((step, rank, parameter), (2, Some(wrong), 2));
                assert_eq!(reduced.skipped().collect::<Vec<_>>(), [0, 1, 2, 3]);
                assert!(reducer.gradient(0).is_none());
                assert!(step_with(&mut reducer, way, 1.0).unwrap().non_finite().is_none());
            }
        }
    }
}

/// Numbers that leave the range of a dtype: on the wire on one rank, and in the sum of all ranks.
pub(super) fn out_of_range(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    if world_size == 1 {
        return;
    }
    let found = |dtype, wire, reduction, value: f64| {
        let options = options().with_reduction(reduction).with_wire_dtype(wire).with_non_finite(NonFinite::Error);
        let mut reducer = Reducer::new(comm, [Parameter::new("a", [1], dtype)], options).unwrap();
        let mut step = reducer.step().unwrap();
        match dtype {
            DType::F32 => step.ready(0, &[value as f32]).unwrap(),
            _ => step.ready(0, &[half::f16::from_f64(value)]).unwrap(),
        }
        match step.finish() {
            Err(Error::NotFinite { rank, .. }) => Some(rank),
            Ok(_) => None,
            Err(error) => panic!("{error}"),
        }
    };
    let large = if rank == 1 { 1e6 } else { 1.0 };
    assert_eq!(found(DType::F32, Some(DType::F16), Reduction::Mean, large), Some(Some(1)));
    assert_eq!(found(DType::F32, Some(DType::BF16), Reduction::Mean, large), None);
    assert_eq!(found(DType::F16, None, Reduction::Sum, 40_000.0), Some(None));
    assert_eq!(found(DType::F16, None, Reduction::Mean, 40_000.0), None);
    // Orthogonal vectors are added by Adasum; equal ones stay.
    assert_eq!(found(DType::F16, None, Reduction::Adasum(AdasumOptions::default()), 40_000.0), None);
}
