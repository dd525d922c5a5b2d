//! The optimizers' formulas of one element: [`Sgd`] and [`AdamW`], each as a [`Rule`] of one step, and [`delta`] and [`weight`], the two
//! results that a step can have.
//!
//! Every operation is rounded once, in the order in which it is written: nothing is contracted, division and square root are exactly
//! rounded. So a CPU and a GPU get the same bits, but for the payloads of NaN.

use core::ops::{Add, Div, Mul, Sub};

use super::step::StepConstants;
use super::{Element, elementwise};
use crate::arch;

/// The working precisions of optimizers, `f32` and `f64`, which are also the types of their states.
pub trait Real: Element + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> {
    /// Zero.
    const ZERO: Self;
    /// The value of any element type, rounded once.
    fn of<T: Element>(value: T) -> Self;
    /// The square root, rounded once.
    fn sqrt(self) -> Self;
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    #[inline(always)]
    fn of<T: Element>(value: T) -> Self {
        value.to_f32()
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        arch::sqrt_f32(self)
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    #[inline(always)]
    fn of<T: Element>(value: T) -> Self {
        value.to_f64()
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        arch::sqrt_f64(self)
    }
}

/// An optimizer in one step of one tensor: the change of a weight from its gradient and its state.
pub trait Rule: Copy {
    /// The type in which the rule computes.
    type Work: Real;
    /// The number of numbers in the state of an element.
    const STATES: usize;

    /// The number to add to a weight, and the next state of its element, from the state in `states`. Numbers beyond
    /// [`STATES`](Self::STATES) are ignored.
    fn change(self, gradient: Self::Work, weight: Self::Work, states: [Self::Work; 2])
    -> (Self::Work, [Self::Work; 2]);
}

/// The scalars of SGD, which its kernels take.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SgdScalars {
    /// The factor of the last velocity; 0 for none.
    pub momentum: f64,
    /// Whether the step looks ahead by one velocity (Nesterov), 1.0, or not, 0.0.
    pub nesterov: f64,
}

/// SGD with momentum, in `f64` for any dtypes, so that its steps have the bits of the formula's exact products:
/// `g = factor × gradient + decay × weight`, `velocity = momentum × velocity + g`, `change = -(rate × velocity)`, where Nesterov's form has
/// `g + momentum × velocity` in place of the velocity.
#[derive(Clone, Copy, Debug)]
pub struct Sgd {
    scalars: SgdScalars,
    factor: f64,
    rate: f64,
    decay: f64,
}

impl Sgd {
    /// The rule in a step, for a tensor with a multiple of the step's rate and a weight decay.
    #[inline(always)]
    pub fn new(scalars: SgdScalars, step: &StepConstants<f64>, rate: f64, decay: f64) -> Self {
        Self { scalars, factor: step.factor, rate: step.rate * rate, decay }
    }
}

impl Rule for Sgd {
    type Work = f64;
    const STATES: usize = 1;

    #[inline(always)]
    fn change(self, gradient: f64, weight: f64, [velocity, _]: [f64; 2]) -> (f64, [f64; 2]) {
        let SgdScalars { momentum, nesterov } = self.scalars;
        let mut gradient = gradient * self.factor;
        if self.decay != 0.0 {
            gradient += self.decay * weight;
        }
        let velocity = if momentum == 0.0 { gradient } else { momentum * velocity + gradient };
        let direction = if nesterov == 0.0 { velocity } else { gradient + momentum * velocity };
        (-(self.rate * direction), [velocity, 0.0])
    }
}

/// AdamW in the precision of its state: `g = factor × gradient`, `first = β₁ first + (1 - β₁) g`, `second = β₂ second + (1 - β₂) g²`,
/// `change = -(rate × ((first × c₁) / (√(second × c₂) + ε) + decay × weight))`, where `c = 1 / (1 - βᵗ)` is computed in `f64` once a step.
#[derive(Clone, Copy, Debug)]
pub struct AdamW<W> {
    step: StepConstants<W>,
    rate: W,
    decay: W,
}

impl<W: Real> AdamW<W> {
    /// The rule in a step, for a tensor with a multiple of the step's rate and a weight decay.
    #[inline(always)]
    pub fn new(step: &StepConstants<W>, rate: W, decay: W) -> Self {
        Self { step: *step, rate: step.rate * rate, decay }
    }
}

impl<W: Real> Rule for AdamW<W> {
    type Work = W;
    const STATES: usize = 2;

    #[inline(always)]
    fn change(self, gradient: W, weight: W, [first, second]: [W; 2]) -> (W, [W; 2]) {
        let StepConstants { factor, beta1, beta2, epsilon, correction1, correction2, .. } = self.step;
        let gradient = gradient * factor;
        let first = beta1[0] * first + beta1[1] * gradient;
        let second = beta2[0] * second + beta2[1] * (gradient * gradient);
        let direction = (first * correction1) / ((second * correction2).sqrt() + epsilon);
        (W::ZERO - self.rate * (direction + self.decay * weight), [first, second])
    }
}

/// One element's step as a number of its own: the change, rounded once to `D`, and the next state, rounded to its type.
#[inline(always)]
pub fn delta<R: Rule, M: Real, G: Element, D: Element>(rule: R, gradient: G, weight: M, states: [M; 2]) -> (D, [M; 2]) {
    let (change, states) = rule.change(R::Work::of(gradient), R::Work::of(weight), states.map(R::Work::of));
    (elementwise::cast(change), states.map(M::of))
}

/// One element's step applied: the weight plus the change, which is rounded to the type of the weight before it is added, and the next
/// state.
#[inline(always)]
pub fn weight<R: Rule, M: Real, G: Element>(rule: R, gradient: G, weight: M, states: [M; 2]) -> (M, [M; 2]) {
    let (change, states) = delta::<R, M, G, M>(rule, gradient, weight, states);
    (weight + change, states)
}
