//! The example of LoRA: several ranks against candle alone with all examples.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap};
use gradsync::comm::Communicator;
use gradsync_candle::TensorMemory;

use crate::Case;
use crate::data_parallel::values;

#[allow(dead_code)] // the model without the program
#[path = "../../examples/lora.rs"]
mod example;

pub(crate) fn of_losses<M: TensorMemory>() -> Case<M> {
    Case { name: "losses of a LoRA as on one rank", run: losses }
}

const STEPS: u64 = 30;

fn builder<'a>(variables: &VarMap, dtype: DType, device: &Device) -> VarBuilder<'a> {
    VarBuilder::from_varmap(variables, dtype, device)
}

/// Variables with the same values in every call, which both dtypes have.
fn variables(dtype: DType, device: &Device) -> VarMap {
    let variables = VarMap::new();
    example::Model::new(builder(&variables, dtype, device)).unwrap();
    for (name, var) in variables.data().lock().unwrap().iter() {
        let seed: usize = name.bytes().map(usize::from).sum();
        let number = |place: usize| ((place * 37 + seed) % 64) as f64 / 128.0 - 0.25;
        let numbers = Tensor::from_iter((0..var.elem_count()).map(number), device).unwrap();
        let is_zero = name.ends_with(".up");
        let numbers = if is_zero { numbers.zeros_like().unwrap() } else { numbers };
        var.set(&numbers.reshape(var.shape()).unwrap().to_dtype(dtype).unwrap()).unwrap();
    }
    variables
}

/// The variables of this kind, by name.
fn named(variables: &VarMap, kind: &str) -> Vec<(String, Var)> {
    let data = variables.data().lock().unwrap();
    let mut found: Vec<(String, Var)> =
        data.iter().filter(|(name, _)| name.contains(kind)).map(|(name, var)| (name.clone(), var.clone())).collect();
    found.sort_by(|(one, _), (other, _)| one.cmp(other));
    found
}

/// Losses before each step of training by candle alone.
fn alone(dtype: DType, device: &Device) -> Vec<f64> {
    let variables = variables(dtype, device);
    let model = example::Model::new(builder(&variables, dtype, device)).unwrap();
    let adapters = named(&variables, ".adapter.").into_iter().map(|(_, var)| var).collect();
    let mut optimizer = AdamW::new_lr(adapters, 0.02).unwrap();
    let mut step = || {
        let loss = model.loss(0, 1).unwrap();
        optimizer.backward_step(&loss).unwrap();
        values(&loss)[0]
    };
    (0..STEPS).map(|_| step()).collect()
}

/// Sums over the examples are grouped differently, so losses differ by rounding, which each step carries on. Rounding errors are
/// proportional to the unit roundoff: the largest error of the losses in `f32` is measured against `f64`, and an error in `f64` may be 2⁻²⁹
/// of that, times 16 for errors that happen to be small.
fn losses<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let (wide, narrow) = (alone(DType::F64, device), alone(DType::F32, device));
    assert!(wide[STEPS as usize - 1] < wide[0] / 4.0, "{wide:?}");
    let own = variables(DType::F64, device);
    let found = example::train(comm, builder(&own, DType::F64, device), &own, STEPS).unwrap();
    let distance = |other: &[f64]| wide.iter().zip(other).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
    let bound = 16.0 * 2f64.powi(-29) * distance(&narrow);
    assert!(distance(&found) <= bound, "{:e} apart, at most {bound:e}", distance(&found));
    let before = named(&variables(DType::F64, device), "");
    for ((name, var), (_, before)) in named(&own, "").iter().zip(&before) {
        assert_eq!(values(var) == values(before), name.contains(".base."), "{name}");
    }
}
