//! [`Case`]: an optimizer beside the oracle's, compared in all bits of weights, states and numbers after each step.

use gradsync::train::{Optimizer, OptimizerOptions, TensorStep};
use gradsync::{Result, TensorView, TensorViewMut};
use gradsync_tests::array::Array;
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::optimizer::{self as oracle, Parameter};

use super::optimizers::{State, state};

/// Tensors with names, as a program has them.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) names: Vec<String>,
    pub(crate) weights: Vec<Array>,
}

impl Model {
    /// Random weights of these formats and lengths, named `t0`, `t1` and so on.
    pub(crate) fn new(tensors: &[(Format, usize)]) -> Self {
        let weights =
            |(index, &(format, len)): (usize, &(Format, usize))| Array::new(format, &vector(format, len, index as u64));
        Self {
            names: (0..tensors.len()).map(|index| format!("t{index}")).collect(),
            weights: tensors.iter().enumerate().map(weights).collect(),
        }
    }

    /// The tensors of a step by these gradients.
    pub(crate) fn steps<'a>(&'a mut self, gradients: &'a [Option<Array>]) -> Vec<TensorStep<'a>> {
        let named = self.names.iter().zip(&mut self.weights).zip(gradients);
        let step = |((name, weights), gradient): ((&'a String, &'a mut Array), &'a Option<Array>)| TensorStep {
            name,
            weights: view_mut(weights),
            gradient: gradient.as_ref().map(|data| TensorView::new(data.slice(), vec![data.len()]).unwrap()),
        };
        named.map(step).collect()
    }

    pub(crate) fn restore<O: OptimizerOptions>(&mut self, optimizer: &mut Optimizer<O>, state: &State) -> Result<()> {
        let mut vectors = state.vectors.iter();
        let weights = self.names.iter().zip(&mut self.weights).map(|(name, weights)| (&name[..], view_mut(weights)));
        optimizer.restore(&state.numbers, weights, |name, vector, data| {
            let saved = vectors.next().expect("a vector for each call");
            assert_eq!((&saved.0[..], saved.1, gradsync_tests::array::dtype(saved.2)), (name, vector, data.dtype()));
            gradsync_tests::array::write(data, 0, &saved.3);
            Ok(())
        })
    }
}

fn view_mut(weights: &mut Array) -> TensorViewMut<'_> {
    let len = weights.len();
    TensorViewMut::new(weights.slice_mut(), vec![len]).unwrap()
}

/// Random gradients of these formats for tensors of these lengths.
pub(crate) fn gradients(tensors: &[(Format, usize)], seed: usize) -> Vec<Option<Array>> {
    let of = |(index, &(format, len)): (usize, &(Format, usize))| {
        Some(Array::new(format, &vector(format, len, (1000 * seed + index + 500) as u64)))
    };
    tensors.iter().enumerate().map(of).collect()
}

/// An optimizer and the oracle's.
pub(crate) struct Case<O: OptimizerOptions> {
    pub(crate) model: Model,
    pub(crate) optimizer: Optimizer<O>,
    pub(crate) expected: oracle::Optimizer,
}

impl<O: OptimizerOptions> Case<O> {
    /// Tensors whose weights and gradients have these formats, with the options of all.
    pub(crate) fn new(
        optimizer: Optimizer<O>,
        (rule, rate, decay): (oracle::Rule, f64, f64),
        tensors: &[(Format, Format, usize)],
    ) -> Self {
        let model = Model::new(&tensors.iter().map(|&(weights, _, len)| (weights, len)).collect::<Vec<_>>());
        let parameter = |(weights, &(format, gradient, len)): (&Array, &(Format, Format, usize))| Parameter {
            format,
            state: if [format, gradient].contains(&Format::F64) { Format::F64 } else { Format::F32 },
            masters: weights.values(),
            vectors: [vec![0.0; len], vec![0.0; len]],
            rate: 1.0,
            decay,
            is_frozen: false,
        };
        let parameters = model.weights.iter().zip(tensors).map(parameter).collect();
        let scale = optimizer.loss_scale().unwrap();
        Self { expected: oracle::Optimizer::new(rule, rate, scale, parameters), model, optimizer }
    }

    /// Makes a step of both, and compares all that they keep.
    #[track_caller]
    pub(crate) fn step(&mut self, what: &str, factor_of_rate: f64, gradients: &[Option<Array>]) {
        self.optimizer.step_tensors(self.model.steps(gradients)).unwrap();
        let values = |gradient: &Option<Array>| gradient.as_ref().map(|data| (data.format(), data.values()));
        self.expected.step(factor_of_rate, &gradients.iter().map(values).collect::<Vec<_>>());
        self.compare(what);
    }

    #[track_caller]
    pub(crate) fn compare(&self, what: &str) {
        let vectors: &[&str] = match self.expected.rule {
            oracle::Rule::Sgd { momentum: 0.0, .. } => &[],
            oracle::Rule::Sgd { .. } => &["velocity"],
            oracle::Rule::AdamW { .. } => &["first", "second"],
        };
        let mut expected = State { vectors: Vec::new(), numbers: self.expected.numbers.to_vec() };
        for ((parameter, name), weights) in
            self.expected.parameters.iter().zip(&self.model.names).zip(&self.model.weights)
        {
            assert_eq!(weights, &Array::new(parameter.format, &parameter.weights()), "{what}: the weights {name}");
            if parameter.is_frozen {
                continue;
            }
            for (&vector, data) in vectors.iter().zip(&parameter.vectors) {
                expected.vectors.push((name.clone(), vector, parameter.state, data.clone()));
            }
            if parameter.format != parameter.state {
                expected.vectors.push((name.clone(), "master", parameter.state, parameter.masters.clone()));
            }
        }
        let found = state(&self.optimizer);
        assert!(
            same(&found.numbers, &expected.numbers),
            "{what}: {:?}, expected {:?}",
            found.numbers,
            expected.numbers
        );
        assert_eq!(found.vectors.len(), expected.vectors.len(), "{what}: vectors");
        for (found, expected) in found.vectors.iter().zip(&expected.vectors) {
            assert_eq!((&found.0, found.1, found.2), (&expected.0, expected.1, expected.2), "{what}");
            let wrong = (0..expected.3.len()).find(|&index| !same(&found.3[index..=index], &expected.3[index..=index]));
            let wrong = wrong.map(|index| (index, found.3[index], expected.3[index]));
            assert!(wrong.is_none() && found.3.len() == expected.3.len(), "{what}: {} {}: {wrong:?}", found.0, found.1);
        }
    }
}

/// Whether numbers have the same bits, or are NaN.
fn same(found: &[f64], expected: &[f64]) -> bool {
    let bits = |number: &f64| if number.is_nan() { 0x7ff8 << 48 } else { number.to_bits() };
    found.iter().map(bits).eq(expected.iter().map(bits))
}
