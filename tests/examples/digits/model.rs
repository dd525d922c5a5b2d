//! The network and its optimiser: a multi-layer perceptron in candle, and SGD with momentum from a reduced
//! `GradientBuffer`.
//!
//! One copy a rank. Never talks to another rank; what keeps the copies equal is that all of them start from the same
//! values and apply the same reduced gradient.

use candle_core::{Device, Result, Tensor, Var};
use candle_nn::{Linear, Module};
use gradsync::Slice;

use crate::data::{CLASSES, PIXELS};
use crate::random::SplitMix64;
use gradsync::GradientBuffer;

/// Neurons from the pixels to the digits.
pub(crate) const WIDTHS: [usize; 4] = [PIXELS, 128, 64, CLASSES];

/// A weight matrix or a bias. `values` is what counts; `var` is the copy that candle computes with.
pub(crate) struct Parameter {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f32>,
    pub(crate) var: Var,
}

/// The network, one rank's copy.
pub(crate) struct Network {
    pub(crate) parameters: Vec<Parameter>,
    layers: Vec<Linear>,
}

impl Network {
    /// He's uniform initialisation: weights within ±√(6 / inputs), biases zero.
    pub(crate) fn new(seed: u64) -> Result<Self> {
        let mut random = SplitMix64::new(seed, 1);
        let mut parameters = Vec::new();
        let mut layers = Vec::new();
        for (index, widths) in WIDTHS.windows(2).enumerate() {
            let (inputs, outputs) = (widths[0], widths[1]);
            let bound = (6.0 / inputs as f32).sqrt();
            let weights = (0..inputs * outputs).map(|_| random.uniform(bound)).collect();
            let weight = Parameter::new(format!("layer{}.weight", index + 1), vec![outputs, inputs], weights)?;
            let bias = Parameter::new(format!("layer{}.bias", index + 1), vec![outputs], vec![0.0; outputs])?;
            layers.push(Linear::new(weight.var.as_tensor().clone(), Some(bias.var.as_tensor().clone())));
            parameters.extend([weight, bias]);
        }
        Ok(Self { parameters, layers })
    }

    /// Images to one score a digit.
    pub(crate) fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let mut values = images.clone();
        for (index, layer) in self.layers.iter().enumerate() {
            values = layer.forward(&values)?;
            if index + 1 < self.layers.len() {
                values = values.relu()?;
            }
        }
        Ok(values)
    }

    /// Gives candle the current `values`.
    pub(crate) fn publish(&self) -> Result<()> {
        for parameter in &self.parameters {
            let values = Tensor::from_slice(&parameter.values, parameter.shape.as_slice(), &Device::Cpu)?;
            parameter.var.set(&values)?;
        }
        Ok(())
    }

    /// FNV-1a over the bit patterns of all values: differs as soon as one bit of one weight does.
    pub(crate) fn fingerprint(&self) -> u64 {
        let bytes =
            self.parameters.iter().flat_map(|parameter| &parameter.values).flat_map(|value| value.to_le_bytes());
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }

    /// How many numbers are trained.
    pub(crate) fn size() -> usize {
        WIDTHS.windows(2).map(|widths| widths[0] * widths[1] + widths[1]).sum()
    }
}

impl Parameter {
    fn new(name: String, shape: Vec<usize>, values: Vec<f32>) -> Result<Self> {
        let var = Var::from_slice(&values, shape.as_slice(), &Device::Cpu)?;
        Ok(Self { name, shape, values, var })
    }
}

/// SGD with momentum, `v = momentum · v + g`, `w = w - rate · v`: the same for every way of reducing.
pub(crate) struct Sgd {
    rate: f32,
    momentum: f32,
    velocities: Vec<Vec<f32>>,
}

impl Sgd {
    pub(crate) fn new(network: &Network, rate: f32, momentum: f32) -> Self {
        let velocities = network.parameters.iter().map(|parameter| vec![0.0; parameter.values.len()]).collect();
        Self { rate, momentum, velocities }
    }

    /// One step along the reduced gradient. The buffer's tensors are the network's parameters, in their order, in f32.
    pub(crate) fn step(&mut self, network: &mut Network, gradient: &GradientBuffer) -> Result<()> {
        for (index, parameter) in network.parameters.iter_mut().enumerate() {
            let Slice::F32(gradient) = gradient.as_slice().range(gradient.segments()[index].clone()) else {
                candle_core::bail!("{}: the gradient is not f32", parameter.name);
            };
            let velocity = &mut self.velocities[index];
            for ((value, velocity), gradient) in parameter.values.iter_mut().zip(velocity).zip(gradient) {
                *velocity = self.momentum * *velocity + gradient;
                *value -= self.rate * *velocity;
            }
        }
        network.publish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradsync::{DType, TensorView, ops};

    #[test]
    fn the_fingerprint_sees_one_bit() {
        let mut network = Network::new(1).unwrap();
        let before = network.fingerprint();
        assert_eq!(before, Network::new(1).unwrap().fingerprint());
        assert_ne!(before, Network::new(2).unwrap().fingerprint());
        let last = network.parameters[5].values.last_mut().unwrap();
        *last = -*last; // 0.0 and -0.0 are equal, but not the same bits
        assert_ne!(before, network.fingerprint());
    }

    #[test]
    fn size_counts_what_is_there() {
        let network = Network::new(1).unwrap();
        assert_eq!(Network::size(), network.parameters.iter().map(|parameter| parameter.values.len()).sum::<usize>());
    }

    #[test]
    fn sgd_with_momentum_by_hand() {
        let mut network = Network::new(1).unwrap();
        let tensors = network.parameters.iter().map(|parameter| (parameter.name.clone(), parameter.shape.clone()));
        let mut buffer = GradientBuffer::new(DType::F32, 1, tensors).unwrap();
        let ones = vec![1.0f32; CLASSES];
        let ones = TensorView::new(Slice::from(ones.as_slice()), &[CLASSES]).unwrap();
        assert!(ops::in_place_accumulate_v2(buffer.tensor_mut(5), ones, true).unwrap());

        let first = network.parameters[0].values[0];
        let mut sgd = Sgd::new(&network, 0.5, 0.5);
        sgd.step(&mut network, &buffer).unwrap();
        assert_eq!(network.parameters[5].values, vec![-0.5; CLASSES]);
        sgd.step(&mut network, &buffer).unwrap();
        assert_eq!(network.parameters[5].values, vec![-1.25; CLASSES]);
        assert_eq!(network.parameters[0].values[0], first);
        assert_eq!(network.parameters[5].var.to_vec1::<f32>().unwrap(), vec![-1.25; CLASSES]);
    }
}
