//! [`Schedule`]: the learning rate as a formula of the number of applied steps, which a GPU evaluates itself.

use gradsync_device::math::step::{CONSTANT, COSINE, LINEAR, StepRules};

use super::options::{Range, check_options};
use crate::call::setters;
use crate::error::{Error, Result};

/// The factor of the learning rate in each step, counted in applied steps.
///
/// ```
/// use gradsync::train::Schedule;
///
/// let schedule = Schedule::cosine(1000).with_warm_up(100).with_last(0.1);
/// assert_eq!([0, 99, 100, 1000].map(|step| schedule.factor(step)), [0.01, 1.0, 1.0, 0.1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Schedule {
    shape: Shape,
    /// The number of steps in which the rate rises linearly to its full value; 0 by default.
    pub warm_up: u64,
    /// The factor at the end of the decay, and behind it, from 0 to 1; 0 by default.
    pub last: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    Constant,
    Linear { begin: Option<u64>, end: u64 },
    Cosine { end: u64 },
}

impl Default for Schedule {
    fn default() -> Self {
        Self::constant()
    }
}

impl Schedule {
    /// A rate that stays.
    pub fn constant() -> Self {
        Self { shape: Shape::Constant, warm_up: 0, last: 0.0 }
    }

    /// A rate that falls linearly from the end of the warm-up until step `end`.
    pub fn linear(end: u64) -> Self {
        Self { shape: Shape::Linear { begin: None, end }, ..Self::constant() }
    }

    /// A rate that falls as half a period of the cosine from the end of the warm-up until step `end`.
    pub fn cosine(end: u64) -> Self {
        Self { shape: Shape::Cosine { end }, ..Self::constant() }
    }

    /// A rate that stays until step `begin`, and falls linearly until step `end`: warm-up, stable, decay (WSD).
    pub fn stable_then_decay(begin: u64, end: u64) -> Self {
        Self { shape: Shape::Linear { begin: Some(begin), end }, ..Self::constant() }
    }

    setters! { with_warm_up(warm_up: u64), with_last(last: f64) }

    /// The factor of the rate in a step, counted from 0.
    pub fn factor(&self, step: u64) -> f64 {
        let mut rules = super::no_rules();
        self.write_rules(&mut rules);
        rules.factor_of_rate(step as f64)
    }

    pub(super) fn check(&self, operation: &'static str) -> Result<()> {
        check_options(operation, &[("last", self.last, Range::Fraction)])?;
        let (begin, end) = match self.shape {
            Shape::Constant => return Ok(()),
            Shape::Linear { begin, end } => (begin.unwrap_or(self.warm_up), end),
            Shape::Cosine { end } => (self.warm_up, end),
        };
        if begin < self.warm_up || end <= begin {
            let reason = format!(
                "a schedule with {} steps of warm-up whose decay begins at step {begin} and ends at step {end}: these must ascend",
                self.warm_up
            );
            return Err(Error::InvalidArgument { operation, reason });
        }
        Ok(())
    }

    pub(super) fn write_rules(&self, rules: &mut StepRules) {
        let warm_up = self.warm_up as f64;
        (rules.warm_up, rules.last) = (warm_up, self.last);
        (rules.schedule, rules.decay_begin, rules.decay_end) = match self.shape {
            Shape::Constant => (CONSTANT, 0.0, 0.0),
            Shape::Linear { begin, end } => (LINEAR, begin.map_or(warm_up, |begin| begin as f64), end as f64),
            Shape::Cosine { end } => (COSINE, warm_up, end as f64),
        };
    }
}
