//! Optimizers' steps again: SGD and AdamW with clipping, a scale of the loss, groups and master copies, element by element.
//!
//! Every operation is computed in `f64` and rounded to the working format. For `f32` that is the result of the operation in `f32`: the
//! precision of `f64` is more than twice as large, so that rounding twice changes no sum, product, quotient or root. So bits are compared.

use super::Format;

/// The formula of an optimizer.
#[derive(Clone, Copy, Debug)]
pub enum Rule {
    /// In `f64`, with a velocity unless the momentum is 0.
    Sgd {
        /// The factor of the last velocity.
        momentum: f64,
        /// Whether the step looks ahead by one velocity.
        nesterov: bool,
    },
    /// In the format of the state.
    AdamW {
        /// The decay rate of the first moment.
        beta1: f64,
        /// The decay rate of the second moment.
        beta2: f64,
        /// The number that is added to the root.
        epsilon: f64,
        /// Whether moments are corrected for their initial zero.
        corrects: bool,
    },
}

/// A parameter with its state.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The format of the weights.
    pub format: Format,
    /// The format of the state: `f32`, or `f64`.
    pub state: Format,
    /// The weights in the format of the state: their master copies, if that is not their own.
    pub masters: Vec<f64>,
    /// The velocity; the first and the second moments.
    pub vectors: [Vec<f64>; 2],
    /// The factor of the rate.
    pub rate: f64,
    /// The weight decay.
    pub decay: f64,
    /// Whether nothing of it changes.
    pub is_frozen: bool,
}

impl Parameter {
    /// The weights as the program sees them.
    pub fn weights(&self) -> Vec<f64> {
        self.masters.iter().map(|&weight| self.format.round(weight)).collect()
    }
}

/// The scale of a loss.
#[derive(Clone, Copy, Debug)]
pub struct Scaler {
    /// The factor of the scale after `interval` applied steps in a row.
    pub growth: f64,
    /// The factor of the scale after a skipped step.
    pub backoff: f64,
    /// The number of applied steps until the scale grows.
    pub interval: f64,
}

/// An optimizer with its parameters.
#[derive(Clone, Debug)]
pub struct Optimizer {
    /// The formula.
    pub rule: Rule,
    /// The rate.
    pub rate: f64,
    /// The largest norm, if there is one.
    pub max_norm: Option<f64>,
    /// The scale's rules, if there is one.
    pub scaler: Option<Scaler>,
    /// The parameters.
    pub parameters: Vec<Parameter>,
    /// As many as the library's: counts of applied and skipped steps, 1 for a step that was skipped, norm, factor of gradients, rate, products
    /// of β₁ and β₂, the corrections of both moments, the scale of the loss, and the applied steps since it changed.
    pub numbers: [f64; 12],
}

impl Optimizer {
    /// An optimizer before its first step.
    pub fn new(rule: Rule, rate: f64, scale: f64, parameters: Vec<Parameter>) -> Self {
        let numbers = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, scale, 0.0];
        Self { rule, rate, max_norm: None, scaler: None, parameters, numbers }
    }

    /// Makes one step with this factor of the rate, by gradients with their formats.
    pub fn step(&mut self, factor_of_rate: f64, gradients: &[Option<(Format, Vec<f64>)>]) {
        let present = self.parameters.iter().zip(gradients).filter(|(parameter, _)| !parameter.is_frozen);
        let present: Vec<(Format, &[f64])> =
            present.filter_map(|(_, gradient)| gradient.as_ref().map(|(format, data)| (*format, &data[..]))).collect();
        let sum = square_sum(&present);
        let [applied, skipped, refusal, norm, factor, rate, power1, power2, correction1, correction2, scale, since] =
            &mut self.numbers;
        *norm = sum.sqrt() / *scale;
        if !sum.is_finite() {
            (*skipped, *refusal, *since) = (*skipped + 1.0, 1.0, 0.0);
            *scale *= self.scaler.map_or(1.0, |scaler| scaler.backoff);
            return;
        }
        *refusal = 0.0;
        *factor = 1.0 / *scale;
        if let Some(most) = self.max_norm.filter(|most| *norm > *most) {
            *factor *= most / *norm;
        }
        *rate = self.rate * factor_of_rate;
        *applied += 1.0;
        if let Rule::AdamW { beta1, beta2, corrects, .. } = self.rule {
            (*power1, *power2) = (*power1 * beta1, *power2 * beta2);
            if corrects {
                (*correction1, *correction2) = (1.0 / (1.0 - *power1), 1.0 / (1.0 - *power2));
            }
        } else {
            (*power1, *power2) = (0.0, 0.0);
        }
        *since += 1.0;
        if let Some(scaler) = self.scaler.filter(|scaler| *since == scaler.interval) {
            (*since, *scale) = (0.0, *scale * scaler.growth);
        }
        let (factor, rate, corrections) = (*factor, *rate, [*correction1, *correction2]);
        for (parameter, gradient) in self.parameters.iter_mut().zip(gradients) {
            let Some((_, gradient)) = gradient.as_ref().filter(|_| !parameter.is_frozen) else { continue };
            let Parameter { state, masters, vectors, decay, .. } = parameter;
            let [first, second] = vectors;
            let rates = [factor, rate, parameter.rate, *decay];
            for (index, &gradient) in gradient.iter().enumerate() {
                let states = [&mut first[index], &mut second[index]];
                let change = change(self.rule, *state, rates, corrections, [gradient, masters[index]], states);
                masters[index] = state.round(masters[index] + change);
            }
        }
    }
}

/// The number to add to a weight, in the format of the state.
fn change(
    rule: Rule,
    kept: Format,
    [factor, rate, factor_of_rate, decay]: [f64; 4],
    corrections: [f64; 2],
    [gradient, weight]: [f64; 2],
    [first, second]: [&mut f64; 2],
) -> f64 {
    match rule {
        Rule::Sgd { momentum, nesterov } => {
            let mut gradient = gradient * factor;
            if decay != 0.0 {
                gradient += decay * weight;
            }
            let velocity = if momentum == 0.0 { gradient } else { momentum * *first + gradient };
            *first = kept.round(velocity);
            let direction = if nesterov { gradient + momentum * velocity } else { velocity };
            kept.round(-(rate * factor_of_rate * direction))
        }
        Rule::AdamW { beta1, beta2, epsilon, .. } => {
            let r = |number: f64| kept.round(number);
            let gradient = r(gradient * r(factor));
            *first = r(r(r(beta1) * *first) + r(r(1.0 - beta1) * gradient));
            *second = r(r(r(beta2) * *second) + r(r(1.0 - beta2) * r(gradient * gradient)));
            let [correction1, correction2] = corrections.map(r);
            let root = r(r(*second * correction2).sqrt());
            let direction = r(r(*first * correction1) / r(root + r(epsilon)));
            let rate = r(r(rate) * r(factor_of_rate));
            0.0 - r(rate * r(direction + r(r(decay) * weight)))
        }
    }
}

/// The number of elements of a chunk.
pub const CHUNK: usize = 32_768;

/// The sum of squares of all tensors, added in the order that both memories keep.
///
/// Chunks have [`CHUNK`] elements of one tensor. In a chunk, element `i` belongs to lane `i mod n`, where the `n` lanes are those of 128 threads
/// which read 16 bytes each. A lane adds its squares in order, a thread its lanes in order; the threads are added by `tree`. The chunks of
/// all tensors are added in the same way, in 512 lanes, of which thread `t` has `t`, `t + 128`, `t + 256` and `t + 384`.
pub fn square_sum(tensors: &[(Format, &[f64])]) -> f64 {
    let mut chunks = Vec::new();
    for (format, tensor) in tensors {
        let vector = 16 / format.size_bytes();
        for chunk in tensor.chunks(CHUNK) {
            let of_thread = |thread: usize| {
                let lane = |lane: usize| chunk.iter().skip(lane).step_by(128 * vector).fold(0.0, |sum, x| sum + x * x);
                (1..vector).fold(lane(thread * vector), |sum, next| sum + lane(thread * vector + next))
            };
            chunks.push(tree(&(0..128).map(of_thread).collect::<Vec<f64>>()));
        }
    }
    let of_thread = |thread: usize| {
        let lane = |lane: usize| chunks.iter().skip(lane).step_by(512).fold(0.0, |sum, chunk| sum + chunk);
        (1..4).fold(lane(thread), |sum, next| sum + lane(thread + 128 * next))
    };
    tree(&(0..128).map(of_thread).collect::<Vec<f64>>())
}

/// The sum of 128 numbers: in each 32, the upper half is added to the lower one until one is left; these are added in order.
fn tree(numbers: &[f64]) -> f64 {
    fn halved(numbers: &[f64]) -> f64 {
        let (lower, upper) = numbers.split_at(numbers.len() / 2);
        if lower.is_empty() {
            return upper[0];
        }
        halved(&lower.iter().zip(upper).map(|(one, other)| one + other).collect::<Vec<f64>>())
    }
    numbers.chunks(32).map(halved).fold(0.0, |sum, warp| sum + warp)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Powers of two have exact sums: each element counts once.
    #[test]
    fn square_sums_have_every_element_once() {
        for format in Format::ALL {
            for len in [0, 1, 127, 1025, CHUNK, CHUNK + 1, 40000] {
                let ones = vec![2.0; len];
                assert_eq!(square_sum(&[(format, &ones), (format, &[]), (Format::F64, &ones)]), 8.0 * len as f64);
            }
        }
    }

    /// A published step: with β₁ = 0.9, β₂ = 0.999 and no decay, the first step of AdamW is the rate, whatever the gradient.
    #[test]
    fn step_of_adamw_is_the_rate_at_first() {
        let parameter = Parameter {
            format: Format::F64,
            state: Format::F64,
            masters: vec![1.0; 3],
            vectors: [vec![0.0; 3], vec![0.0; 3]],
            rate: 1.0,
            decay: 0.0,
            is_frozen: false,
        };
        let rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, corrects: true };
        let mut optimizer = Optimizer::new(rule, 0.25, 1.0, vec![parameter]);
        optimizer.step(1.0, &[Some((Format::F64, vec![3.0, -0.5, 1e4]))]);
        let expected = [0.75, 1.25, 0.75];
        let weights = optimizer.parameters[0].weights();
        assert!(weights.iter().zip(expected).all(|(weight, expected)| (weight - expected).abs() < 1e-7), "{weights:?}");
    }
}
