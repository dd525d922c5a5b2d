//! The example's model: several ranks against one on the joined batch.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use gradsync::comm::Communicator;
use gradsync::train::ReducerOptions;
use gradsync_candle::{DataParallel, TensorMemory};

use crate::Case;
use crate::data_parallel::values;

#[allow(dead_code)] // the model without the program
#[path = "../../examples/gpt.rs"]
mod example;

pub(crate) fn model(variables: &VarMap, dtype: DType, device: &Device) -> example::Gpt {
    example::Gpt::new(VarBuilder::from_varmap(variables, dtype, device)).unwrap()
}

pub(crate) fn of_gradients<M: TensorMemory>() -> Case<M> {
    Case { name: "gradients of a GPT as on one rank", run: gradients }
}

pub(crate) fn of_learning<M: TensorMemory>() -> Case<M> {
    Case { name: "a GPT learns, and its ranks agree", run: learns }
}

const BATCH: usize = 4;

pub(crate) fn text() -> Vec<u8> {
    include_bytes!("../../examples/gpt.rs").to_vec()
}

/// Sums over the batch are grouped differently, so results differ by rounding. Rounding errors are proportional to the unit roundoff: for
/// each tensor, the error of the `f32` gradients is measured against `f64`, and the `f64` error may be 2⁻²⁹ of that, times 16 for errors
/// that happen to be small.
fn gradients<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let text = text();
    let (wide, narrow) = (VarMap::new(), VarMap::new());
    let (wide_model, narrow_model) = (model(&wide, DType::F64, device), model(&narrow, DType::F32, device));
    let mut parallel = DataParallel::new(&wide, comm, ReducerOptions::default()).unwrap();
    let named = |variables: &VarMap, name: &str| variables.data().lock().unwrap()[name].clone();
    let names: Vec<String> = parallel.variables().iter().map(|(name, _)| name.to_owned()).collect();
    for name in &names {
        named(&narrow, name).set(&named(&wide, name).to_dtype(DType::F32).unwrap()).unwrap();
        // Both maps have the values of f32.
        named(&wide, name).set(&named(&narrow, name).to_dtype(DType::F64).unwrap()).unwrap();
    }
    let all: Vec<usize> = (0..BATCH * comm.world_size()).collect();
    let own = &all[comm.rank() * BATCH..][..BATCH];
    let reduced = parallel.backward(&wide_model.loss(&text, own).unwrap()).unwrap();
    let joined = wide_model.loss(&text, &all).unwrap().backward().unwrap();
    let rounded = narrow_model.loss(&text, &all).unwrap().backward().unwrap();
    let read = |variables: &VarMap, store: &GradStore, name: &str| values(store.get(&named(variables, name)).unwrap());
    let distance = |a: &[f64], b: &[f64]| a.iter().zip(b).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
    for name in &names {
        let joined = read(&wide, &joined, name);
        let bound = 16.0 * 2f64.powi(-29) * distance(&joined, &read(&narrow, &rounded, name));
        let found = distance(&joined, &read(&wide, &reduced, name));
        assert!(found <= bound, "{name}: {found:e} apart, at most {bound:e}");
    }
}

/// The loss of guessing is the loss of 256 equally likely bytes.
fn learns<M: TensorMemory>(comm: &dyn Communicator<M>, device: &Device) {
    let loss = example::train(comm, device, &text(), 30).unwrap();
    assert!(loss < 256f64.ln() - 0.5, "{loss}");
    let all = comm.gather_words(&[loss.to_bits()]).unwrap();
    assert!(all.iter().all(|word| *word == loss.to_bits()));
}
