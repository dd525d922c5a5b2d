//! A small transformer that predicts text, character by character, in candle: two blocks of four heads with 64 features per character.
//!
//! Normalisation comes before attention and the dense layers. It uses candle's elementary operations, because candle's own has no gradient.

use candle_core::{D, Device, Result, Tensor, Var};
use candle_nn::{loss, ops};
use gradsync::GradientBuffer;

use crate::images::Part;
use crate::learner::{Data, Learner, Sums};
use crate::lenet::{tensor, tensor_mut};
use crate::random::SplitMix64;
use crate::text::{SYMBOLS, Text, WINDOW};

const WIDTH: usize = 64;
const BLOCKS: usize = 2;
const HEADS: usize = 4;
/// Windows per rank and step.
const BATCH: usize = 16;

/// Names, shapes, and initial values: uniform within ± 1 / √inputs, or this constant.
fn parameters() -> Vec<(String, Vec<usize>, Option<f32>)> {
    let mut parameters =
        vec![("characters".to_owned(), vec![SYMBOLS, WIDTH], None), ("places".to_owned(), vec![WINDOW, WIDTH], None)];
    for block in 1..=BLOCKS {
        let named = |name: &str, shape: &[usize], start| (format!("block {block} {name}"), shape.to_vec(), start);
        parameters.extend([
            named("norm 1 scale", &[WIDTH], Some(1.0)),
            named("norm 1 shift", &[WIDTH], Some(0.0)),
            named("queries, keys, values", &[3 * WIDTH, WIDTH], None),
            named("attention", &[WIDTH, WIDTH], None),
            named("norm 2 scale", &[WIDTH], Some(1.0)),
            named("norm 2 shift", &[WIDTH], Some(0.0)),
            named("up", &[4 * WIDTH, WIDTH], None),
            named("up bias", &[4 * WIDTH], Some(0.0)),
            named("down", &[WIDTH, 4 * WIDTH], None),
            named("down bias", &[WIDTH], Some(0.0)),
        ]);
    }
    parameters.extend([
        ("norm scale".to_owned(), vec![WIDTH], Some(1.0)),
        ("norm shift".to_owned(), vec![WIDTH], Some(0.0)),
        ("scores".to_owned(), vec![SYMBOLS, WIDTH], None),
    ]);
    parameters
}

impl Data for Text {
    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        parameters().into_iter().map(|(name, shape, _)| (name, shape)).collect()
    }

    fn start(&self, weights: &mut GradientBuffer, seed: u64) {
        let mut random = SplitMix64::new(seed, 1);
        for (index, (_, shape, start)) in parameters().into_iter().enumerate() {
            let bound = 1.0 / (shape[shape.len() - 1] as f32).sqrt();
            let values = tensor_mut(weights, index).iter_mut();
            values.for_each(|value| *value = start.unwrap_or_else(|| random.uniform(bound)));
        }
    }

    fn batch(&self) -> usize {
        BATCH
    }

    fn samples(&self, part: Part) -> usize {
        self.windows(part)
    }

    fn chance(&self) -> f64 {
        self.entropy()
    }

    fn learner(&self) -> Result<Box<dyn Learner + '_>> {
        let variable =
            |(_, shape, _): (String, Vec<usize>, _)| Var::zeros(shape, candle_core::DType::F32, &Device::Cpu);
        let variables = parameters().into_iter().map(variable).collect::<Result<_>>()?;
        // The mask, which is added to the scores of later positions.
        let later = (0..WINDOW * WINDOW).map(|place| if place % WINDOW > place / WINDOW { -1e9f32 } else { 0.0 });
        let mask = Tensor::from_iter(later, &Device::Cpu)?.reshape((WINDOW, WINDOW))?;
        Ok(Box::new(Transformer { text: self, variables, mask }))
    }
}

struct Transformer<'a> {
    text: &'a Text,
    variables: Vec<Var>,
    mask: Tensor,
}

impl Transformer<'_> {
    /// The scores of every symbol after each of the windows' characters, (windows × positions) × symbols, and the actual next symbols.
    fn scores(&self, weights: &GradientBuffer, part: Part, samples: &[u32]) -> Result<(Tensor, Tensor)> {
        for (index, variable) in self.variables.iter().enumerate() {
            variable.set(&Tensor::from_slice(tensor(weights, index), variable.shape(), &Device::Cpu)?)?;
        }
        let (from, to) = self.text.gather(part, samples);
        let (windows, rows) = (samples.len(), from.len());
        let from = Tensor::from_vec(from, rows, &Device::Cpu)?;
        let to = Tensor::from_vec(to, rows, &Device::Cpu)?;
        let mut variables = self.variables.iter().map(Var::as_tensor);
        let mut next = || variables.next().expect("the list of parameters is what is read here");

        let characters = next().index_select(&from, 0)?.reshape((windows, WINDOW, WIDTH))?;
        let mut values = characters.broadcast_add(next())?.reshape((rows, WIDTH))?;
        for _ in 0..BLOCKS {
            let normal = normalised(&values, next(), next())?;
            let parts = normal.matmul(&next().t()?)?.reshape((windows, WINDOW, 3, HEADS, WIDTH / HEADS))?;
            let part = |index: usize| parts.narrow(2, index, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous();
            let (queries, keys) = (part(0)?, part(1)?.t()?.contiguous()?);
            let fit = (queries.matmul(&keys)? / ((WIDTH / HEADS) as f64).sqrt())?.broadcast_add(&self.mask)?;
            let seen = ops::softmax(&fit, D::Minus1)?.matmul(&part(2)?)?;
            let seen = seen.transpose(1, 2)?.contiguous()?.reshape((rows, WIDTH))?;
            values = (values + seen.matmul(&next().t()?)?)?;
            let normal = normalised(&values, next(), next())?;
            let up = normal.matmul(&next().t()?)?.broadcast_add(next())?.relu()?;
            values = (values + up.matmul(&next().t()?)?.broadcast_add(next())?)?;
        }
        let normal = normalised(&values, next(), next())?;
        Ok((normal.matmul(&next().t()?)?, to))
    }
}

impl Learner for Transformer<'_> {
    fn gradient(&mut self, weights: &GradientBuffer, samples: &[u32], into: &mut GradientBuffer) -> Result<()> {
        let (scores, to) = self.scores(weights, Part::Train, samples)?;
        let gradients = loss::cross_entropy(&scores, &to)?.backward()?;
        for (index, variable) in self.variables.iter().enumerate() {
            let Some(gradient) = gradients.get(variable) else {
                candle_core::bail!("{} has no gradient", into.name(index));
            };
            tensor_mut(into, index).copy_from_slice(&gradient.flatten_all()?.to_vec1()?);
        }
        Ok(())
    }

    fn score(&mut self, weights: &GradientBuffer, part: Part, samples: &[u32]) -> Result<Sums> {
        let (scores, to) = self.scores(weights, part, samples)?;
        let count = to.elem_count() as f64;
        let loss = f64::from(loss::cross_entropy(&scores, &to)?.to_scalar::<f32>()?) * count;
        let right = scores.argmax(D::Minus1)?.eq(&to)?.to_vec1::<u8>()?;
        Ok(Sums { loss, correct: right.into_iter().map(f64::from).sum(), count })
    }
}

/// Normalises each row to mean 0 and variance 1, then scales and shifts it.
fn normalised(values: &Tensor, scale: &Tensor, shift: &Tensor) -> Result<Tensor> {
    let values = values.broadcast_sub(&values.mean_keepdim(D::Minus1)?)?;
    let deviation = (values.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?.sqrt()?;
    values.broadcast_div(&deviation)?.broadcast_mul(scale)?.broadcast_add(shift)
}
