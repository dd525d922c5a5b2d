//! The largest error of a weight over many steps of an optimizer, beside the exact weight: a forward analysis, step by step.
//!
//! Two computations are compared: one whose state has the unit roundoff u, with errors γ(k) of k roundings, and one in `f64`, with errors
//! δ(k). Gradients are the same in both, or differ by a relative error, as after clipping. A weight with the error E changes by a step that
//! depends on it by the decay only, with the magnitude a, and the sum is rounded:
//!
//! > E ← E (1 + rate × decay) + (γ(k) + δ(k)) a + γ(3) |w| + δ(8) |w|
//!
//! where `k` counts the roundings of a step, and 3 and 8 those of the step and the sum, and of a product of the weight with `1 - rate ×
//! decay`, as PyTorch has it.

use super::{gamma, gamma_of};

/// A weight, and the bound of its error.
#[derive(Clone, Debug, Default)]
pub struct Weight {
    /// The exact weight.
    pub exact: f64,
    /// The bound of the error of a computed one.
    pub bound: f64,
    /// The velocity, or the first moment; its value with the magnitudes of all terms; and the bound of the velocity's error.
    first: f64,
    size: f64,
    error: f64,
    second: f64,
}

/// The options of both optimizers.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The unit roundoff of the state.
    pub unit: f64,
    /// The rate.
    pub rate: f64,
    /// The weight decay.
    pub decay: f64,
    /// The relative error of all gradients of a step.
    pub gradient_error: f64,
}

/// Products of errors are far below a thousandth of them.
const PRODUCTS: f64 = 1.001;

impl Weight {
    /// A weight before the first step.
    pub fn new(exact: f64) -> Self {
        Self { exact, ..Self::default() }
    }

    /// A step of SGD. The velocity has a coefficient, a product and a sum in each step, the decay as many, and one rounding when it is
    /// stored; the step has the same, and its product with the rate.
    pub fn sgd(&mut self, options: Options, momentum: f64, nesterov: bool, gradient: f64) {
        let Options { unit, rate, decay, gradient_error } = options;
        let roundings = gamma_of(unit, 8) + gamma(8);
        let full = gradient + decay * self.exact;
        self.first = momentum * self.first + full;
        self.size = momentum * self.size + gradient.abs() + decay * (self.exact.abs() + self.bound);
        self.error = momentum * self.error + decay * self.bound + (roundings + gradient_error) * self.size;
        self.error *= PRODUCTS;
        let (direction, ahead) =
            if nesterov { (full + momentum * self.first, 1.0 + momentum) } else { (self.first, 1.0) };
        self.exact -= rate * direction;
        let moved = self.bound + rate * ahead * (self.error + roundings * self.size);
        self.bound = PRODUCTS * (moved + roundings * (self.exact.abs() + moved));
    }

    /// Step `t` of AdamW, from 1 on. In each step a moment has a coefficient, a product and a sum in the code, and one more where it is
    /// interpolated; the rest of a step has 14 roundings. A correction 1 - βᵗ keeps an absolute error of t units of `f64`, which is at most
    /// 1 / (1 - β) units relative to it.
    pub fn adamw(&mut self, options: Options, [beta1, beta2, epsilon]: [f64; 3], step: i32, gradient: f64) {
        let Options { unit, rate, decay, gradient_error } = options;
        let corrections = 2.0 * (1.0 / (1.0 - beta1) + 1.0 / (1.0 - beta2));
        let roundings =
            gamma_of(unit, 6 * step as usize + 14) + gamma(8 * step as usize + 14 + 2 * corrections.ceil() as usize);
        self.first = beta1 * self.first + (1.0 - beta1) * gradient;
        self.size = beta1 * self.size + (1.0 - beta1) * gradient.abs();
        self.second = beta2 * self.second + (1.0 - beta2) * gradient * gradient;
        let [correction1, correction2] = [beta1, beta2].map(|beta| 1.0 - beta.powi(step));
        let root = (self.second / correction2).sqrt() + epsilon;
        let magnitude = rate * (self.size / correction1 / root + decay * (self.exact.abs() + self.bound));
        self.exact -= rate * (self.first / correction1 / root + decay * self.exact);
        let moved = self.bound * (1.0 + rate * decay) + (roundings + 2.0 * gradient_error) * magnitude;
        let kept = gamma_of(unit, 3) + gamma(8);
        self.bound = PRODUCTS * (moved + kept * (self.exact.abs() + moved));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bounds are near the errors, so that they find mistakes: after 100 steps in `f32` they allow less than a thousandth of the way.
    #[test]
    fn weight_bounds_are_small_beside_its_way() {
        let options = Options { unit: 2.0_f64.powi(-24), rate: 0.01, decay: 0.01, gradient_error: 0.0 };
        let mut weights = [Weight::new(1.0), Weight::new(1.0)];
        for step in 1..=100 {
            weights[0].sgd(options, 0.9, true, 0.5);
            weights[1].adamw(options, [0.9, 0.999, 1e-8], step, 0.5);
        }
        for weight in weights {
            assert!(weight.bound > 1e-7 && weight.bound < 1e-3 * (weight.exact - 1.0).abs(), "{weight:?}");
        }
    }
}
