//! The state of optimizer steps, one for all tensors: [`StepState`], which a GPU keeps in its memory, and [`advance`], which computes the
//! next one from the norm of the gradients. So a step that clips, scales its loss, skips bad gradients and follows a schedule needs no
//! answer from the device.
//!
//! All numbers are `f64`, counts too, so that the state is a vector of `f64`. Operations are rounded once each, in the order in which they
//! are written.

use super::optimizer::Real;
use crate::arch;

/// The state of the steps of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct StepState {
    /// The number of steps that were applied.
    pub applied: f64,
    /// The number of steps that were skipped.
    pub skipped: f64,
    /// 0.0 if the last step was applied, otherwise one of [`NOT_FINITE`] and [`TOO_LARGE`].
    pub refusal: f64,
    /// The norm of the last step's gradients, divided by the scale of the loss.
    pub norm: f64,
    /// The factor by which the last step multiplies gradients: for the scale of the loss, and for clipping.
    pub factor: f64,
    /// The learning rate of the last step.
    pub rate: f64,
    /// The product of all applied steps' β₁.
    pub power1: f64,
    /// The product of all applied steps' β₂.
    pub power2: f64,
    /// The factor that corrects the first moment for its initial zero.
    pub correction1: f64,
    /// The factor that corrects the second moment for its initial zero.
    pub correction2: f64,
    /// The scale of the loss in the next step.
    pub scale: f64,
    /// The number of steps that were applied since the scale changed.
    pub steps_of_scale: f64,
}

/// The number of `f64` in a [`StepState`].
pub const STEP_STATE_LEN: usize = 12;
/// The place of [`StepState::scale`] among them.
pub const SCALE_PLACE: usize = 10;
const _: () = assert!(size_of::<StepState>() == STEP_STATE_LEN * size_of::<f64>());
const _: () = assert!(core::mem::offset_of!(StepState, scale) == SCALE_PLACE * size_of::<f64>());

/// The step was skipped, because gradients have NaN or infinities.
pub const NOT_FINITE: f64 = 1.0;
/// The step was skipped, because the square of a gradient may leave the range of the optimizer's state.
pub const TOO_LARGE: f64 = 2.0;

/// The least scale of a loss; gradients that are never finite would lead to 0.
pub const LEAST_SCALE: f64 = 1.0 / (1_u64 << 32) as f64;

impl StepState {
    /// The state before the first step.
    pub const fn new(scale: f64) -> Self {
        Self {
            applied: 0.0,
            skipped: 0.0,
            refusal: 0.0,
            norm: 0.0,
            factor: 0.0,
            rate: 0.0,
            power1: 1.0,
            power2: 1.0,
            correction1: 1.0,
            correction2: 1.0,
            scale,
            steps_of_scale: 0.0,
        }
    }

    /// The state as numbers.
    pub const fn to_numbers(self) -> [f64; STEP_STATE_LEN] {
        // SAFETY: `#[repr(C)]` of as many `f64`.
        unsafe { core::mem::transmute(self) }
    }

    /// The state with these numbers.
    pub const fn from_numbers(numbers: [f64; STEP_STATE_LEN]) -> Self {
        // SAFETY: as above; every bit pattern is a value.
        unsafe { core::mem::transmute(numbers) }
    }
}

/// The rules of all steps, as numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct StepRules {
    /// The learning rate, which the schedule multiplies.
    pub rate: f64,
    /// The largest norm: gradients beyond it are multiplied by the quotient. Infinity for no limit.
    pub max_norm: f64,
    /// The largest norm with which the optimizer's state stays in the range of its type.
    pub limit: f64,
    /// β₁, or 0 for optimizers without one.
    pub beta1: f64,
    /// β₂, or 0.
    pub beta2: f64,
    /// ε, or 0.
    pub epsilon: f64,
    /// 1.0 if moments are corrected for their initial zero.
    pub corrects: f64,
    /// The factor of the scale of the loss after [`growth_interval`](Self::growth_interval) applied steps.
    pub growth: f64,
    /// The factor of the scale after a skipped step.
    pub backoff: f64,
    /// The number of applied steps until the scale grows; 0 if it never does.
    pub growth_interval: f64,
    /// The largest scale.
    pub most_scale: f64,
    /// The form of the schedule behind its warm-up: one of the constants below.
    pub schedule: f64,
    /// The number of steps in which the rate rises linearly, from its first step on.
    pub warm_up: f64,
    /// The step with which the decay begins, counted from 0.
    pub decay_begin: f64,
    /// The step with which the decay ends.
    pub decay_end: f64,
    /// The factor of the rate at the end of the decay.
    pub last: f64,
}

/// The number of `f64` in [`StepRules`].
pub const STEP_RULES_LEN: usize = 16;
const _: () = assert!(size_of::<StepRules>() == STEP_RULES_LEN * size_of::<f64>());

/// The numbers of a step that updates use, each in both precisions: a GPU's threads, which handle four elements each, would take as long to
/// convert them as to use them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct StepConstants<W> {
    /// [`StepState::factor`].
    pub factor: W,
    /// [`StepState::rate`].
    pub rate: W,
    /// β₁ and 1 - β₁.
    pub beta1: [W; 2],
    /// β₂ and 1 - β₂.
    pub beta2: [W; 2],
    /// ε.
    pub epsilon: W,
    /// [`StepState::correction1`].
    pub correction1: W,
    /// [`StepState::correction2`].
    pub correction2: W,
    /// 0 for an applied step.
    pub refusal: W,
}

/// What [`advance`] writes: the state, and its constants in both precisions.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct StepMemory {
    /// The state.
    pub state: StepState,
    /// The constants in `f64`.
    pub wide: StepConstants<f64>,
    /// The constants in `f32`.
    pub narrow: StepConstants<f32>,
}

/// The number of `f64` in a [`StepMemory`], of which the first [`STEP_STATE_LEN`] are the state.
pub const STEP_MEMORY_LEN: usize = STEP_STATE_LEN + 10 + 5;
const _: () = assert!(size_of::<StepMemory>() == STEP_MEMORY_LEN * size_of::<f64>());

impl StepMemory {
    /// The memory before the first step, from a state.
    pub fn new(state: StepState) -> Self {
        Self { state, wide: StepConstants::default(), narrow: StepConstants::default() }
    }

    /// The memory after a step, as [`advance`] describes.
    #[inline(always)]
    pub fn advanced(&self, rules: &StepRules, sum: f64) -> Self {
        let state = advance(&self.state, rules, sum);
        Self { state, wide: StepConstants::new(&state, rules), narrow: StepConstants::new(&state, rules) }
    }

    /// The memory as numbers, whose last ones are pairs of `f32`.
    pub const fn to_numbers(self) -> [f64; STEP_MEMORY_LEN] {
        // SAFETY: `#[repr(C)]` of as many bytes, without padding.
        unsafe { core::mem::transmute(self) }
    }

    /// The memory with these numbers.
    pub const fn from_numbers(numbers: [f64; STEP_MEMORY_LEN]) -> Self {
        // SAFETY: as above; every bit pattern is a value.
        unsafe { core::mem::transmute(numbers) }
    }
}

impl<W: Real> StepConstants<W> {
    /// The constants of a step with this state.
    #[inline(always)]
    pub fn new(state: &StepState, rules: &StepRules) -> Self {
        let [factor, rate, epsilon] = [state.factor, state.rate, rules.epsilon].map(W::from_f64);
        let [correction1, correction2] = [state.correction1, state.correction2].map(W::from_f64);
        let [beta1, beta2] = [rules.beta1, rules.beta2].map(|beta| [beta, 1.0 - beta].map(W::from_f64));
        let refusal = W::from_f64(state.refusal);
        Self { factor, rate, beta1, beta2, epsilon, correction1, correction2, refusal }
    }
}

/// A rate that stays.
pub const CONSTANT: f64 = 0.0;
/// A rate that falls linearly.
pub const LINEAR: f64 = 1.0;
/// A rate that falls as half a period of the cosine.
pub const COSINE: f64 = 2.0;

impl StepRules {
    /// The rules as numbers.
    pub const fn to_numbers(self) -> [f64; STEP_RULES_LEN] {
        // SAFETY: `#[repr(C)]` of as many `f64`.
        unsafe { core::mem::transmute(self) }
    }

    /// The factor of the rate in a step, counted from 0.
    #[inline(always)]
    pub fn factor_of_rate(&self, step: f64) -> f64 {
        if step < self.warm_up {
            return (step + 1.0) / self.warm_up;
        }
        if self.schedule == CONSTANT || step < self.decay_begin {
            return 1.0;
        }
        if step >= self.decay_end {
            return self.last;
        }
        let progress = (step - self.decay_begin) / (self.decay_end - self.decay_begin);
        let left = if self.schedule == COSINE { 0.5 * (1.0 + cosine_of_half_turns(progress)) } else { 1.0 - progress };
        self.last + (1.0 - self.last) * left
    }
}

/// The state after a step whose gradients, multiplied by the scale of the loss, have squares with this sum.
///
/// A step is skipped if the sum is not finite, or so large that the optimizer's state could leave its range: then the counts of skipped
/// steps, the scale and the reason change, and nothing else does.
#[inline(always)]
pub fn advance(state: &StepState, rules: &StepRules, sum: f64) -> StepState {
    let mut next = *state;
    next.norm = arch::sqrt_f64(sum) / state.scale;
    next.refusal = if !sum.is_finite() {
        NOT_FINITE
    } else if next.norm > rules.limit {
        TOO_LARGE
    } else {
        0.0
    };
    if next.refusal != 0.0 {
        next.skipped = state.skipped + 1.0;
        next.scale = state.scale * rules.backoff;
        if next.scale < LEAST_SCALE {
            next.scale = LEAST_SCALE;
        }
        next.steps_of_scale = 0.0;
        return next;
    }
    let unscale = 1.0 / state.scale;
    next.factor = if next.norm > rules.max_norm { unscale * (rules.max_norm / next.norm) } else { unscale };
    next.rate = rules.rate * rules.factor_of_rate(state.applied);
    next.applied = state.applied + 1.0;
    next.power1 = state.power1 * rules.beta1;
    next.power2 = state.power2 * rules.beta2;
    if rules.corrects != 0.0 {
        next.correction1 = 1.0 / (1.0 - next.power1);
        next.correction2 = 1.0 / (1.0 - next.power2);
    } else {
        (next.correction1, next.correction2) = (1.0, 1.0);
    }
    next.steps_of_scale = state.steps_of_scale + 1.0;
    if rules.growth_interval > 0.0 && next.steps_of_scale >= rules.growth_interval {
        next.steps_of_scale = 0.0;
        let grown = state.scale * rules.growth;
        next.scale = if grown > rules.most_scale { rules.most_scale } else { grown };
    }
    next
}

/// `cos(πx)` for x from 0 to 1, within 2⁻⁵⁰: the series of the sine around ½.
#[inline(always)]
fn cosine_of_half_turns(x: f64) -> f64 {
    let z = core::f64::consts::PI * (0.5 - x);
    let square = z * z;
    // 1 - z²/(20·21) (...), from the inside; at |z| = π/2 the first term left out is below 2⁻⁶⁰.
    let mut series = 1.0;
    let mut n = 20.0;
    while n > 0.0 {
        series = 1.0 - square / (n * (n + 1.0)) * series;
        n -= 2.0;
    }
    z * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cosine_of_half_turns_is_the_cosine() {
        for step in 0..=1000 {
            let x = f64::from(step) / 1000.0;
            let wanted = (core::f64::consts::PI * x).cos();
            assert!((cosine_of_half_turns(x) - wanted).abs() <= 2.0_f64.powi(-50), "{x}");
        }
    }
}
