//! The options of optimizers: [`SgdOptions`], [`AdamWOptions`], groups of parameters, and the ranges of all numbers.

use std::fmt::Debug;

use gradsync_device::math::step::{LEAST_SCALE, StepRules};

use crate::call::setters;
use crate::error::{Error, Result};
use crate::kernels::optimizer::{SgdScalars, UpdateRule};

/// The options of one optimizer, which choose it: [`SgdOptions`] or [`AdamWOptions`].
pub trait OptimizerOptions: sealed::Sealed + Copy + Debug + PartialEq + Default + From<f64> {
    /// The name of the optimizer in errors.
    #[doc(hidden)]
    const NAME: &'static str;
    /// The names of the vectors of its state.
    #[doc(hidden)]
    const VECTORS: &'static [&'static str];

    #[doc(hidden)]
    fn check(&self) -> Result<()>;
    /// The number of its vectors that these options need.
    #[doc(hidden)]
    fn vectors(&self) -> usize;
    #[doc(hidden)]
    fn weight_decay(&self) -> f64;
    #[doc(hidden)]
    fn rule(&self) -> UpdateRule;
    /// Writes the optimizer's own numbers, for states whose largest number is `largest`.
    #[doc(hidden)]
    fn write_rules(&self, rules: &mut StepRules, largest: f64);
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::SgdOptions {}
    impl Sealed for super::AdamWOptions {}
}

/// The options of [`Sgd`](super::Sgd): stochastic gradient descent, with PyTorch's momentum and weight decay.
///
/// With `g = gradient + weight_decay × weight`: `velocity = momentum × velocity + g`, and the weight changes by `-rate × velocity`, or with
/// `nesterov` by `-rate × (g + momentum × velocity)`. Computed in `f64`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct SgdOptions {
    /// The learning rate; finite and not negative. 0.01 by default.
    pub rate: f64,
    /// The factor of the last velocity, from 0 to below 1; 0, the default, for none. Without momentum there is no state.
    pub momentum: f64,
    /// Whether the step looks ahead by one velocity.
    pub nesterov: bool,
    /// The fraction of each weight that is added to its gradient; finite and not negative. 0 by default.
    pub weight_decay: f64,
}

impl Default for SgdOptions {
    fn default() -> Self {
        Self { rate: 0.01, momentum: 0.0, nesterov: false, weight_decay: 0.0 }
    }
}

/// Options with this learning rate and the defaults of the others.
impl From<f64> for SgdOptions {
    fn from(rate: f64) -> Self {
        Self { rate, ..Self::default() }
    }
}

impl SgdOptions {
    setters! {
        with_rate(rate: f64),
        with_momentum(momentum: f64),
        with_nesterov(nesterov: bool),
        with_weight_decay(weight_decay: f64),
    }
}

impl OptimizerOptions for SgdOptions {
    const NAME: &'static str = "sgd";
    const VECTORS: &'static [&'static str] = &["velocity"];

    fn check(&self) -> Result<()> {
        let Self { rate, momentum, nesterov, weight_decay } = *self;
        check_options(
            Self::NAME,
            &[
                ("rate", rate, Range::NotNegative),
                ("momentum", momentum, Range::Part),
                ("weight_decay", weight_decay, Range::NotNegative),
            ],
        )?;
        if nesterov && momentum == 0.0 {
            let reason = "`nesterov` is true and momentum is 0: Nesterov's step looks ahead by the momentum".into();
            return Err(Error::InvalidArgument { operation: Self::NAME, reason });
        }
        Ok(())
    }

    fn vectors(&self) -> usize {
        usize::from(self.momentum != 0.0)
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn rule(&self) -> UpdateRule {
        UpdateRule::Sgd(SgdScalars { momentum: self.momentum, nesterov: f64::from(u8::from(self.nesterov)) })
    }

    /// A velocity is at most 1 / (1 - momentum) times the largest gradient; the rest is a margin for roundings.
    fn write_rules(&self, rules: &mut StepRules, largest: f64) {
        rules.rate = self.rate;
        rules.limit = if self.momentum == 0.0 { f64::MAX } else { (1.0 - self.momentum) * largest * 0.999 };
    }
}

/// The options of [`AdamW`](super::AdamW): Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), as in PyTorch.
///
/// `first = β₁ first + (1 - β₁) g`, `second = β₂ second + (1 - β₂) g²`, and the weight changes by `-rate × ((first × c₁) / (√(second × c₂) + ε)
/// + weight_decay × weight)`, where `c = 1 / (1 - βᵗ)` in step `t`, or 1 without bias correction. Computed in `f32`, or in `f64` where an
/// operand is `f64`; the products βᵗ and c in `f64`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AdamWOptions {
    /// The learning rate; finite and not negative. 0.001 by default.
    pub rate: f64,
    /// The decay rate of the first moment; from 0 to below 1. 0.9 by default.
    pub beta1: f64,
    /// The decay rate of the second moment; from 0 to below 1. 0.999 by default.
    pub beta2: f64,
    /// The number that is added to the root of the second moment; finite and above 0. 1e-8 by default.
    pub epsilon: f64,
    /// The fraction of each weight, times the rate, that a step subtracts; finite and not negative. 0.01 by default, as in PyTorch and candle.
    pub weight_decay: f64,
    /// Whether moments are corrected for their initial value 0; true by default.
    pub bias_correction: bool,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { rate: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01, bias_correction: true }
    }
}

/// Options with this learning rate and the defaults of the others.
impl From<f64> for AdamWOptions {
    fn from(rate: f64) -> Self {
        Self { rate, ..Self::default() }
    }
}

impl AdamWOptions {
    setters! {
        with_rate(rate: f64),
        with_beta1(beta1: f64),
        with_beta2(beta2: f64),
        with_epsilon(epsilon: f64),
        with_weight_decay(weight_decay: f64),
        with_bias_correction(bias_correction: bool),
    }
}

impl OptimizerOptions for AdamWOptions {
    const NAME: &'static str = "adamw";
    const VECTORS: &'static [&'static str] = &["first", "second"];

    fn check(&self) -> Result<()> {
        let Self { rate, beta1, beta2, epsilon, weight_decay, bias_correction: _ } = *self;
        check_options(
            Self::NAME,
            &[
                ("rate", rate, Range::NotNegative),
                ("beta1", beta1, Range::Part),
                ("beta2", beta2, Range::Part),
                ("epsilon", epsilon, Range::Positive),
                ("weight_decay", weight_decay, Range::NotNegative),
            ],
        )
    }

    fn vectors(&self) -> usize {
        Self::VECTORS.len()
    }

    fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    fn rule(&self) -> UpdateRule {
        UpdateRule::AdamW
    }

    /// Second moments are means of squares; a correction multiplies them by 2⁵³ at most.
    fn write_rules(&self, rules: &mut StepRules, largest: f64) {
        let most = if largest > f64::from(f32::MAX) { largest / (1_u64 << 54) as f64 } else { largest / 2.0 };
        rules.rate = self.rate;
        rules.limit = most.sqrt();
        (rules.beta1, rules.beta2, rules.epsilon) = (self.beta1, self.beta2, self.epsilon);
        rules.corrects = f64::from(u8::from(self.bias_correction));
    }
}

/// Options of the parameters whose names match a pattern, which differ from the optimizer's own.
///
/// ```
/// use gradsync::train::ParameterGroup;
///
/// let without_decay = ParameterGroup::matching("*.bias").with_weight_decay(Some(0.0));
/// let slow = ParameterGroup::matching("embedding.*").with_rate(0.1);
/// let frozen = ParameterGroup::matching("encoder.layers.0.*").with_frozen(true);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ParameterGroup {
    /// The pattern of names, in which `*` stands for any characters.
    pub pattern: String,
    /// The factor of the learning rate; finite and not negative. 1 by default.
    pub rate: f64,
    /// The weight decay; `None`, the default, for the optimizer's.
    pub weight_decay: Option<f64>,
    /// Whether the optimizer leaves these parameters and their states unchanged, and their gradients out of the norm. False by default.
    pub frozen: bool,
}

impl ParameterGroup {
    /// The parameters whose names match a pattern, in which `*` stands for any characters, with the options of all parameters.
    pub fn matching(pattern: impl Into<String>) -> Self {
        Self { pattern: pattern.into(), rate: 1.0, weight_decay: None, frozen: false }
    }

    setters! { with_rate(rate: f64), with_weight_decay(weight_decay: Option<f64>), with_frozen(frozen: bool) }

    pub(super) fn check(&self, operation: &'static str) -> Result<()> {
        let decay = self.weight_decay.unwrap_or_default();
        let options = [("rate", self.rate, Range::NotNegative), ("weight_decay", decay, Range::NotNegative)];
        check_options(operation, &options).map_err(|error| match error {
            Error::InvalidArgument { operation, reason } => {
                Error::InvalidArgument { operation, reason: format!("in the group {:?}: {reason}", self.pattern) }
            }
            error => error,
        })
    }

    pub(super) fn matches(&self, name: &str) -> bool {
        let mut parts = self.pattern.split('*');
        let first = parts.next().unwrap_or_default();
        let Some(mut rest) = name.strip_prefix(first) else { return false };
        let parts: Vec<&str> = parts.collect();
        let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
        for part in middle {
            let Some(found) = rest.find(part) else { return false };
            rest = &rest[found + part.len()..];
        }
        rest.ends_with(last)
    }
}

/// The scale of a loss whose gradients are in `f16`, as in PyTorch's `GradScaler`: it grows as long as gradients are finite, and falls when
/// they are not.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LossScaler {
    /// The first scale, from 2⁻³² to the largest `f32`. 65536 by default.
    pub initial: f64,
    /// The factor of the scale after `growth_interval` steps in a row; at least 1 and finite. 2 by default.
    pub growth: f64,
    /// The factor of the scale after a skipped step; above 0 and at most 1. 0.5 by default.
    pub backoff: f64,
    /// The number of applied steps after which the scale grows; 0 if it never does. 2000 by default.
    pub growth_interval: u32,
}

impl Default for LossScaler {
    fn default() -> Self {
        Self { initial: 65536.0, growth: 2.0, backoff: 0.5, growth_interval: 2000 }
    }
}

impl LossScaler {
    setters! {
        with_initial(initial: f64),
        with_growth(growth: f64),
        with_backoff(backoff: f64),
        with_growth_interval(growth_interval: u32),
    }

    pub(super) fn check(self, operation: &'static str) -> Result<()> {
        let Self { initial, growth, backoff, growth_interval: _ } = self;
        check_options(
            operation,
            &[
                ("initial", initial, Range::Scale),
                ("growth", growth, Range::AtLeastOne),
                ("backoff", backoff, Range::Share),
            ],
        )
    }
}

/// The range of an option's values.
#[derive(Clone, Copy)]
pub(super) enum Range {
    NotNegative,
    Positive,
    AtLeastOne,
    /// From 0 to below 1.
    Part,
    /// From 0 to 1.
    Fraction,
    /// Above 0, to 1.
    Share,
    /// From the least scale of a loss to the largest one.
    Scale,
}

impl Range {
    fn contains(self, value: f64) -> bool {
        match self {
            Range::NotNegative => value.is_finite() && value >= 0.0,
            Range::Positive => value.is_finite() && value > 0.0,
            Range::AtLeastOne => value.is_finite() && value >= 1.0,
            Range::Part => (0.0..1.0).contains(&value),
            Range::Fraction => (0.0..=1.0).contains(&value),
            Range::Share => value > 0.0 && value <= 1.0,
            Range::Scale => (LEAST_SCALE..=f64::from(f32::MAX)).contains(&value),
        }
    }
}

/// Refuses the first option that is not in its range.
///
/// # Errors
/// [`Error::InvalidArgument`] naming the option and its value.
pub(super) fn check_options(operation: &'static str, options: &[(&str, f64, Range)]) -> Result<()> {
    let Some((name, value, range)) = options.iter().find(|(_, value, range)| !range.contains(*value)) else {
        return Ok(());
    };
    let range = match range {
        Range::NotNegative => "finite and not negative",
        Range::Positive => "finite and above 0",
        Range::AtLeastOne => "finite and at least 1",
        Range::Part => "from 0 to below 1",
        Range::Fraction => "from 0 to 1",
        Range::Share => "above 0 and at most 1",
        Range::Scale => "from 2^-32 to the largest f32",
    };
    Err(Error::InvalidArgument { operation, reason: format!("{name} is {value}, and must be {range}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_group_matches_names_by_its_pattern() {
        let cases: [(&str, &[&str], &[&str]); 6] = [
            ("*", &["", "a", "a.b"], &[]),
            ("a", &["a"], &["", "ab", "ba"]),
            ("*.bias", &["x.bias", ".bias"], &["bias", "x.bias.y"]),
            ("layers.*.norm.*", &["layers.0.norm.weight"], &["layers.0.norm", "layer.0.norm.weight"]),
            ("a*a", &["aa", "aba"], &["a", "ab"]),
            ("*a*b*", &["ab", "xaxbx"], &["ba", "b", "a"]),
        ];
        for (pattern, yes, no) in cases {
            let group = ParameterGroup::matching(pattern);
            yes.iter().for_each(|name| assert!(group.matches(name), "{pattern} {name}"));
            no.iter().for_each(|name| assert!(!group.matches(name), "{pattern} {name}"));
        }
    }
}
