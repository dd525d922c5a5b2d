//! Steps that a rank has left out, ranks whose loss depends on nothing, and gradients that are not finite.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer};
use gradsync::comm::Communicator;
use gradsync::train::{AbsentGradients, NonFinite, ReducerOptions};
use gradsync_candle::{DataParallel, TensorMemory, Variables};

use crate::data_parallel::values;
use crate::{Case, is_last, names_last};

/// The cases of any memory.
pub(crate) fn all<M: TensorMemory>() -> Vec<Case<M>> {
    vec![
        Case { name: "backward: a rank without any gradient", run: without_gradient },
        Case { name: "NonFinite::Error", run: refused },
        Case { name: "NonFinite::Skip", run: skipped },
    ]
}

/// The cases of the host, which knows at the end of a step what is not finite, and one after which the communicator has ended.
pub(crate) fn on_host() -> Vec<Case> {
    let more = [
        Case { name: "NonFinite::Report", run: reported },
        Case { name: "at: a step that a rank has left out", run: left_out },
    ];
    all().into_iter().chain(more).collect()
}

fn variables(device: &Device) -> ([Var; 2], Variables) {
    let vars = [2, 3].map(|len| Var::ones(len, DType::F32, device).unwrap());
    let all = ["first", "second"].into_iter().zip(vars.clone()).collect();
    (vars, all)
}

/// A loss whose gradients are ones, but of the second variable.
fn loss([first, second]: &[Var; 2], factor: f64) -> Tensor {
    (first.sum_all().unwrap() + (second.sum_all().unwrap() * factor).unwrap()).unwrap()
}

fn without_gradient<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let (vars, all) = variables(device);
    let constant = || Tensor::ones(2, DType::F32, device).unwrap().sum_all().unwrap();
    let own = || if is_last(comm) { constant() } else { loss(&vars, 1.0) };
    let ranks = comm.world_size();
    let mut parallel = DataParallel::new(all.clone(), comm, ReducerOptions::default()).unwrap();
    for _ in 0..3 {
        if ranks > 1 {
            for text in [
                parallel.backward(&own()).map(drop).unwrap_err().to_string(),
                parallel.backward_of(Some((&own(), 2))).map(drop).unwrap_err().to_string(),
            ] {
                assert!(names_last(comm, &text), "{text}");
            }
            // A rank without examples has no gradient.
            let batch = loss(&vars, 1.0);
            let reduced = parallel.backward_of((!is_last(comm)).then_some((&batch, 2))).unwrap().unwrap();
            assert_eq!(values(reduced.get(&vars[0]).unwrap()), [1.0; 2]);
        }
        let reduced = parallel.backward(&loss(&vars, 1.0)).unwrap();
        assert_eq!(values(reduced.get(&vars[1]).unwrap()), [1.0; 3]);
        // No rank has one.
        let reduced = parallel.backward(&constant()).unwrap();
        assert!(vars.iter().all(|var| reduced.get(var).is_none()));
    }
    let options = ReducerOptions::default().with_absent(AbsentGradients::ZerosOfWholeRanks);
    let mut parallel = DataParallel::new(all, comm, options).unwrap();
    let reduced = parallel.backward(&own()).unwrap();
    let found = reduced.get(&vars[0]).map_or(0.0, |gradient| values(gradient)[0]);
    assert!((found - (ranks - 1) as f64 / ranks as f64).abs() < 1e-7);
}

/// The last rank's gradient of the second variable is not finite in every other step.
fn factor<M: TensorMemory>(comm: &dyn Communicator<M>, step: usize) -> f64 {
    let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY][step % 3];
    if step.is_multiple_of(2) && is_last(comm) { odd } else { 1.0 }
}

fn names<M: TensorMemory>(comm: &dyn Communicator<M>, text: &str, step: usize) -> bool {
    names_last(comm, text) && text.contains("\"second\"") && text.contains(&format!("step {step}"))
}

fn refused<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let (vars, all) = variables(device);
    let options = ReducerOptions::default().with_non_finite(NonFinite::Error);
    let mut parallel = DataParallel::new(all, comm, options).unwrap();
    for step in 0..6 {
        let outcome = parallel.at(step as u64).backward(&loss(&vars, factor(comm, step)));
        match step.is_multiple_of(2) {
            true => {
                let text = outcome.unwrap_err().to_string();
                assert!(names(comm, &text, step), "{text}");
            }
            false => assert_eq!(values(outcome.unwrap().get(&vars[1]).unwrap()), [1.0; 3]),
        }
    }
}

/// A skipped step changes no variable, on any rank.
fn skipped<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let (vars, all) = variables(device);
    let options = ReducerOptions::default().with_non_finite(NonFinite::Skip);
    let mut optimizer = AdamW::new_lr(vars.to_vec(), 0.1).unwrap();
    let mut parallel = DataParallel::new(all, comm, options).unwrap();
    for step in 0..6 {
        let before = vars.each_ref().map(|var| values(var));
        let reduced = parallel.at(step as u64).backward(&loss(&vars, factor(comm, step))).unwrap();
        optimizer.step(&reduced).unwrap();
        let after = vars.each_ref().map(|var| values(var));
        let is_skipped = step.is_multiple_of(2);
        assert_eq!(after == before, is_skipped);
        assert!(vars.iter().all(|var| reduced.get(var).is_none() == is_skipped));
        assert_eq!(parallel.non_finite().is_some(), is_skipped);
        if let Some(found) = parallel.non_finite() {
            assert_eq!((found.step, found.rank), (step as u64, Some(comm.world_size() - 1)));
            assert_eq!(parallel.variables().iter().nth(found.parameter).unwrap().0, "second");
        }
    }
    parallel.compare().unwrap();
}

fn reported(comm: &dyn Communicator, device: &Device) {
    let (vars, all) = variables(device);
    let mut parallel = DataParallel::new(all, comm, ReducerOptions::default()).unwrap();
    for step in [0, 2, 4] {
        let reduced = parallel.at(step as u64).backward(&loss(&vars, factor(comm, step))).unwrap();
        assert!(values(reduced.get(&vars[1]).unwrap()).iter().all(|value| !value.is_finite()));
        let text = parallel.backward(&loss(&vars, 1.0)).unwrap_err().to_string();
        assert!(names(comm, &text, step), "{text}");
        let reduced = parallel.backward(&loss(&vars, 1.0)).unwrap();
        assert_eq!(values(reduced.get(&vars[1]).unwrap()), [1.0; 3]);
    }
}

fn left_out(comm: &dyn Communicator, device: &Device) {
    let (vars, all) = variables(device);
    let mut parallel = DataParallel::new(all, comm, ReducerOptions::default()).unwrap();
    for step in 10..13 {
        parallel.at(step).backward(&loss(&vars, 1.0)).unwrap();
    }
    if comm.world_size() > 1 {
        let own = if is_last(comm) { 14 } else { 13 };
        let text = parallel.at(own).backward(&loss(&vars, 1.0)).unwrap_err().to_string();
        assert!(text.contains("13") && text.contains("14"), "{text}");
    }
}
