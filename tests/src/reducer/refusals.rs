//! An invalid call on one rank is an error on all ranks.

use gradsync::comm::Communicator;
use gradsync::train::{AbsentGradients, Parameter, Reducer, ReducerOptions, Step};
use gradsync::{DType, Error, TensorView};

use super::{gradient, parameters, text, view, works};
use crate::oracle::Format;

/// An invalid gradient is an error at once on the rank that passes it, and at the end of the step an error on all ranks that names this
/// rank; the reducer stays usable.
pub(super) fn refusals(comm: &dyn Communicator) {
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
    // A rank drops its step without an error of its own.
    let mut step = reducer.step().unwrap();
    let own = gradient(Format::F32, 7, rank, 0);
    step.ready(7, view(&own, 7)).unwrap();
    if rank == wrong {
        drop(step);
    } else {
        let error = text(step.finish());
        assert!(error.contains(&format!("rank {wrong} refuses: reducer: step")), "{error}");
        assert!(error.contains("was dropped without `finish`"), "{error}");
    }
    works(&mut reducer, rank);
}

pub(super) fn disagreements(comm: &dyn Communicator) {
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
    // All ranks send gradients as integers.
    let options = ReducerOptions::default().with_wire_dtype(Some(DType::I16));
    let error = Reducer::new(comm, parameters(&[Format::F32]), options).map(drop).unwrap_err().to_string();
    assert!(error.contains("elements of i16"), "{error}");
    // The parameters of one rank are invalid, which only that rank can detect.
    let mut declared = parameters(&[Format::F32]);
    declared[1].storage = Some(0..16);
    if rank == last {
        declared[0].storage = Some(8..24);
    }
    let error = Reducer::new(comm, declared, ReducerOptions::default()).map(drop).unwrap_err().to_string();
    assert!(error.contains(r#""layer.1" at 0x0..0x10"#) && error.contains("overlap"), "{error}");
    assert!(rank == last || error.contains(&format!("rank {last} refuses")), "{error}");
}
