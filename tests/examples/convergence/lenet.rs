//! LeNet-5 on images of 28 × 28: loss, gradient and number of correct answers of one batch.
//!
//! Two convolutions of 5 × 5 (6 and 16 channels), each followed by a rectifier and a maximum over 2 × 2, and three fully connected layers
//! (120, 84, 10) with rectifiers between them. The network is written by hand because candle's convolutions took 15 times as long on one
//! core.

use gradsync::GradientBuffer;
use pulp::{Arch, Simd, WithSimd};

use crate::images::{CLASSES, SIDE};
use crate::lanes::{Affine, BATCH, Row};
use crate::random::SplitMix64;

/// The number of layers, and their names.
const LAYERS: usize = 5;
const NAMES: [&str; LAYERS] = ["convolution 1", "convolution 2", "dense 1", "dense 2", "dense 3"];

/// The network's shape, and one rank's working memory.
pub(crate) struct LeNet {
    /// The instruction set of the processor.
    arch: Arch,
    layers: [Affine; LAYERS],
    /// The inputs of each layer; the first layer's are the images.
    inputs: [Vec<Row>; LAYERS],
    /// The outputs of each layer, which the backward pass replaces by their gradients.
    outputs: [Vec<Row>; LAYERS],
    /// Gradients of the inputs.
    gradients: [Vec<Row>; LAYERS],
}

/// The results of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Answers {
    /// The sum of cross-entropies.
    pub(crate) loss: f64,
    pub(crate) correct: usize,
}

impl LeNet {
    pub(crate) fn new() -> Self {
        let layers = [
            Affine::convolution(1, SIDE, 5, 6),
            Affine::convolution(6, 12, 5, 16),
            Affine::dense(256, 120),
            Affine::dense(120, 84),
            Affine::dense(84, CLASSES),
        ];
        let rows = |count: usize| vec![[0.0; BATCH]; count];
        let inputs = [SIDE * SIDE, 6 * 12 * 12, 16 * 4 * 4, 120, 84];
        let outputs = layers.each_ref().map(|layer| rows(layer.output_rows()));
        Self { arch: Arch::new(), layers, inputs: inputs.map(rows), outputs, gradients: inputs.map(rows) }
    }

    /// Names and shapes of weights and biases, layer by layer.
    pub(crate) fn tensors() -> Vec<(String, Vec<usize>)> {
        let shapes = Self::new().layers.map(|layer| (layer.outputs, layer.taps()));
        let pair = |(name, (outputs, taps)): (&str, _)| {
            [(format!("{name} weights"), vec![outputs, taps]), (format!("{name} bias"), vec![outputs])]
        };
        NAMES.into_iter().zip(shapes).flat_map(pair).collect()
    }

    /// The initial weights: weights and biases are uniform within ± 1 / √inputs.
    pub(crate) fn start(weights: &mut GradientBuffer, seed: u64) {
        let mut random = SplitMix64::new(seed, 1);
        for layer in 0..LAYERS {
            let bound = 1.0 / (weights.shape(2 * layer)[1] as f32).sqrt();
            for index in [2 * layer, 2 * layer + 1] {
                tensor_mut(weights, index).iter_mut().for_each(|value| *value = random.uniform(bound));
            }
        }
    }

    /// The images of the next batch, which the caller fills.
    pub(crate) fn images(&mut self) -> &mut [Row] {
        &mut self.inputs[0]
    }

    /// The results for the first images of the batch, one for each label; with `into`, also the gradient of the mean loss, of a full batch.
    pub(crate) fn run(
        &mut self,
        weights: &GradientBuffer,
        labels: &[u8],
        into: Option<&mut GradientBuffer>,
    ) -> Answers {
        let arch = self.arch;
        arch.dispatch(Pass { network: self, weights, labels, into })
    }

    /// The results from the last layer's outputs; with `gradient`, the gradient of the mean loss replaces the outputs.
    fn scores(&mut self, labels: &[u8], gradient: bool) -> Answers {
        let scores = &mut self.outputs[LAYERS - 1];
        let mut answers = Answers::default();
        for (image, &label) in labels.iter().enumerate() {
            let own: [f64; CLASSES] = std::array::from_fn(|class| f64::from(scores[class][image]));
            let largest = own.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let parts = own.map(|score| (score - largest).exp());
            let total: f64 = parts.iter().sum();
            answers.loss -= (parts[usize::from(label)] / total).ln();
            // Of equal scores, the first one counts.
            let answer = own.iter().position(|score| *score == largest);
            answers.correct += usize::from(answer == Some(usize::from(label)));
            if gradient {
                for (class, part) in parts.into_iter().enumerate() {
                    let target = f64::from(u8::from(class == usize::from(label)));
                    scores[class][image] = ((part / total - target) / labels.len() as f64) as f32;
                }
            }
        }
        answers
    }

    #[inline(always)]
    fn forward<S: Simd>(&mut self, simd: S, weights: &GradientBuffer) {
        for (index, layer) in self.layers.iter().enumerate() {
            let (input, output) = (&self.inputs[index], &mut self.outputs[index]);
            layer.forward(simd, output, input, tensor(weights, 2 * index), tensor(weights, 2 * index + 1));
            let Some(next) = self.inputs.get_mut(index + 1) else { continue };
            match SIDES[index] {
                Some(side) => pool(next, output, side),
                None => next.iter_mut().zip(output.iter()).for_each(|(to, from)| *to = from.map(rectified)),
            }
        }
    }

    #[inline(always)]
    fn backward<S: Simd>(&mut self, simd: S, weights: &GradientBuffer, into: &mut GradientBuffer) {
        for (index, layer) in self.layers.iter().enumerate().rev() {
            let (input, output) = (&self.inputs[index], &mut self.outputs[index]);
            if let Some(gradient) = self.gradients.get(index + 1) {
                match SIDES[index] {
                    Some(side) => unpool(output, gradient, side),
                    None => output.iter_mut().zip(gradient).for_each(|(output, gradient)| {
                        *output = std::array::from_fn(|lane| if output[lane] > 0.0 { gradient[lane] } else { 0.0 });
                    }),
                }
            }
            let mut bias = vec![0.0; layer.outputs];
            layer.backward_weights(simd, tensor_mut(into, 2 * index), &mut bias, output, input);
            tensor_mut(into, 2 * index + 1).copy_from_slice(&bias);
            if index > 0 {
                layer.backward_input(simd, &mut self.gradients[index], output, tensor(weights, 2 * index));
            }
        }
    }
}

/// What [`LeNet::run`] computes with the processor's vector registers.
struct Pass<'a> {
    network: &'a mut LeNet,
    weights: &'a GradientBuffer,
    labels: &'a [u8],
    into: Option<&'a mut GradientBuffer>,
}

impl WithSimd for Pass<'_> {
    type Output = Answers;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Answers {
        let Self { network, weights, labels, into } = self;
        network.forward(simd, weights);
        let answers = network.scores(labels, into.is_some());
        if let Some(into) = into {
            assert_eq!(labels.len(), BATCH, "a gradient needs a full batch");
            network.backward(simd, weights, into);
        }
        answers
    }
}

/// The width of a layer's output images, for layers that are followed by a maximum over 2 × 2.
const SIDES: [Option<usize>; LAYERS] = [Some(24), Some(8), None, None, None];

pub(crate) fn tensor(buffer: &GradientBuffer, index: usize) -> &[f32] {
    let range = buffer.segments()[index].clone();
    buffer.as_slice().range(range).typed().expect("made as f32")
}

pub(crate) fn tensor_mut(buffer: &mut GradientBuffer, index: usize) -> &mut [f32] {
    buffer.tensor_mut(index).into_data().typed().expect("made as f32")
}

#[inline(always)]
fn rectified(value: f32) -> f32 {
    if value > 0.0 { value } else { 0.0 }
}

/// The four positions of the large image that belong to one position of the small image.
#[inline(always)]
fn corners(place: usize, side: usize) -> [usize; 4] {
    let half = side / 2;
    let (channel, y, x) = (place / (half * half), place / half % half, place % half);
    let first = channel * side * side + 2 * y * side + 2 * x;
    [first, first + 1, first + side, first + side + 1]
}

/// The maximum of each four values, or 0 if all are negative.
#[inline(always)]
fn pool(small: &mut [Row], large: &[Row], side: usize) {
    for (place, small) in small.iter_mut().enumerate() {
        let corners = corners(place, side).map(|corner| &large[corner]);
        for lane in 0..BATCH {
            let largest = |a: f32, b: f32| if a > b { a } else { b };
            let of = |corner: usize| corners[corner][lane];
            small[lane] = rectified(largest(largest(of(0), of(1)), largest(of(2), of(3))));
        }
    }
}

/// Replaces the values by gradients: the value that was the maximum (the first one if several are equal) gets the gradient of the small
/// image, and the others get 0.
#[inline(always)]
fn unpool(large: &mut [Row], small: &[Row], side: usize) {
    for (place, gradient) in small.iter().enumerate() {
        let corners = corners(place, side);
        let values = corners.map(|corner| large[corner]);
        let mut results = [[0.0; BATCH]; 4];
        for lane in 0..BATCH {
            let largest = |a: f32, b: f32| if a > b { a } else { b };
            let of = |corner: usize| values[corner][lane];
            let most = largest(largest(of(0), of(1)), largest(of(2), of(3)));
            let mut left = if most > 0.0 { gradient[lane] } else { 0.0 };
            for (result, value) in results.iter_mut().zip(&values) {
                let is_it = value[lane] == most;
                result[lane] = if is_it { left } else { 0.0 };
                left = if is_it { 0.0 } else { left };
            }
        }
        for (corner, result) in corners.into_iter().zip(results) {
            large[corner] = result;
        }
    }
}

#[cfg(all(test, feature = "candle"))]
mod tests {
    use candle_core::{D, Device, Result, Tensor, Var};
    use gradsync::DType;

    use super::*;

    /// The same network in candle: its loss, and the gradients of weights and biases.
    fn by_candle(images: &[Row], labels: &[u8], weights: &GradientBuffer) -> Result<(f32, Vec<Vec<f32>>)> {
        let device = Device::Cpu;
        let rows: Vec<f32> = images.iter().flatten().copied().collect();
        let images = Tensor::from_vec(rows, (SIDE * SIDE, BATCH), &device)?.t()?.reshape((BATCH, 1, SIDE, SIDE))?;
        let labels = Tensor::from_vec(labels.iter().map(|&label| u32::from(label)).collect(), BATCH, &device)?;
        let variable = |index: usize| Var::from_slice(tensor(weights, index), weights.shape(index), &device);
        let variables: Vec<Var> = (0..weights.tensor_count()).map(variable).collect::<Result<_>>()?;
        let mut values = images;
        for layer in 0..LAYERS {
            let (weight, bias) = (variables[2 * layer].as_tensor(), variables[2 * layer + 1].as_tensor());
            values = match layer {
                0 | 1 => {
                    let channels = if layer == 0 { 1 } else { 6 };
                    let window = weight.reshape(((), channels, 5, 5))?;
                    let bias = bias.reshape((1, (), 1, 1))?;
                    let sums = values.conv2d(&window, 0, 1, 1, 1)?.broadcast_add(&bias)?;
                    let (_, channels, side, _) = sums.dims4()?;
                    // The gradient of candle's max_pool2d is a quarter of the correct value, so the maximum is written out here.
                    let fours = sums.reshape((BATCH, channels, side / 2, 2, side / 2, 2))?;
                    fours.max(5)?.max(3)?.relu()?
                }
                _ => {
                    let sums = values.flatten_from(1)?.matmul(&weight.t()?)?.broadcast_add(bias)?;
                    if layer + 1 < LAYERS { sums.relu()? } else { sums }
                }
            };
        }
        let loss = candle_nn::loss::cross_entropy(&values, &labels)?;
        assert_eq!(values.argmax(D::Minus1)?.dims(), [BATCH]);
        let gradients = loss.backward()?;
        let of = |variable: &Var| gradients.get(variable).unwrap().flatten_all()?.to_vec1();
        Ok((loss.to_scalar()?, variables.iter().map(of).collect::<Result<_>>()?))
    }

    #[test]
    fn lenet_has_the_loss_and_the_gradient_of_candle() {
        let buffer = || GradientBuffer::new(DType::F32, 1, LeNet::tensors()).unwrap();
        let (mut weights, mut gradients) = (buffer(), buffer());
        LeNet::start(&mut weights, 5);
        let mut random = SplitMix64::new(5, 98);
        let mut network = LeNet::new();
        network.images().iter_mut().flatten().for_each(|pixel| *pixel = random.uniform(1.5));
        let labels: Vec<u8> = (0..BATCH).map(|image| (image % CLASSES) as u8).collect();
        let images = network.images().to_vec();
        let answers = network.run(&weights, &labels, Some(&mut gradients));
        assert_eq!(answers, network.run(&weights, &labels, None));
        let (loss, expected) = by_candle(&images, &labels, &weights).unwrap();
        assert!((answers.loss / BATCH as f64 - f64::from(loss)).abs() < 1e-5, "{} and {loss}", answers.loss);
        for (index, expected) in expected.iter().enumerate() {
            assert_near(tensor(&gradients, index), expected, gradients.name(index));
        }
    }

    /// The results are equal except for the order of summation. The longest sums belong to the first layer's gradient: 24 × 24 products for
    /// each image, each rounded once.
    fn assert_near(found: &[f32], expected: &[f32], name: &str) {
        let error = (24 * 24 * BATCH) as f32 * f32::EPSILON / 2.0;
        let largest = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        assert!(largest > 0.0, "{name}");
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= error * largest, "{name}: {found}, not {expected} of {largest}");
        }
    }
}
