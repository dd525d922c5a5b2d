//! Numbers of twice the precision of `f64`, as unevaluated sums of two ("double-double" arithmetic; Dekker 1971, and Hida, Li and
//! Bailey 2001): about 104 bits, in the exponent range of `f64`.
//!
//! Nothing is fused, so that all CPUs and GPUs give the same bits. Additions and products are commutative: terms that cancel exactly in the
//! formula cancel exactly here, also if two ranks are exchanged.

/// `high + low`, where `low` is at most half a unit in the last place of `high`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Wide {
    /// The number rounded to `f64`.
    pub high: f64,
    /// The rest of the number.
    pub low: f64,
}

impl From<f64> for Wide {
    #[inline(always)]
    fn from(value: f64) -> Self {
        Self { high: value, low: 0.0 }
    }
}

impl Wide {
    /// The exact sum of two numbers.
    #[inline(always)]
    pub fn sum(a: f64, b: f64) -> Self {
        let high = a + b;
        let of_b = high - a;
        Self { high, low: (a - (high - of_b)) + (b - of_b) }
    }

    /// The exact sum of two numbers, where the first is not the smaller one in magnitude.
    #[inline(always)]
    fn sum_of_ordered(a: f64, b: f64) -> Self {
        let high = a + b;
        Self { high, low: b - (high - a) }
    }

    /// The exact product of two numbers, unless a part of it underflows, or one is beyond `2^996`.
    #[inline(always)]
    pub fn product(a: f64, b: f64) -> Self {
        let high = a * b;
        let ((a, a_rest), (b, b_rest)) = (halves(a), halves(b));
        let low = ((a * b - high) + (a * b_rest + a_rest * b)) + a_rest * b_rest;
        Self { high, low }
    }

    /// `self + other`, also where they cancel.
    #[inline(always)]
    pub fn plus(self, other: Self) -> Self {
        let (high, low) = (Self::sum(self.high, other.high), Self::sum(self.low, other.low));
        let first = Self::sum_of_ordered(high.high, high.low + low.high);
        Self::sum_of_ordered(first.high, first.low + low.low)
    }

    /// `-self`.
    #[inline(always)]
    pub fn negated(self) -> Self {
        Self { high: -self.high, low: -self.low }
    }

    /// `factor × self`, for a power of two.
    #[inline(always)]
    pub fn scaled(self, factor: f64) -> Self {
        Self { high: factor * self.high, low: factor * self.low }
    }

    /// `self × other`.
    #[inline(always)]
    pub fn times(self, other: Self) -> Self {
        let product = Self::product(self.high, other.high);
        Self::sum_of_ordered(product.high, product.low + (self.high * other.low + self.low * other.high))
    }

    /// `self / other`.
    #[inline(always)]
    pub fn over(self, other: Self) -> Self {
        let first = self.high / other.high;
        let rest = self.plus(other.times(first.into()).negated());
        let second = rest.high / other.high;
        let rest = rest.plus(other.times(second.into()).negated());
        Self::sum_of_ordered(first, second).plus((rest.high / other.high).into())
    }
}

/// Two numbers of at most 26 bits whose sum is `value`.
#[inline(always)]
fn halves(value: f64) -> (f64, f64) {
    const SPLITTER: f64 = ((1u64 << 27) + 1) as f64;
    let scaled = SPLITTER * value;
    let high = scaled - (scaled - value);
    (high, value - high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_keeps_twice_the_digits() {
        let third = Wide::from(1.0).over(3.0.into());
        let rest = third.times(3.0.into()).plus(Wide::from(-1.0));
        assert!(rest.high.abs() < 1e-31, "{rest:?}");
        let tiny = 2f64.powi(-80);
        let sum = Wide::from(1.0).plus(tiny.into()).plus(Wide::from(-1.0));
        assert_eq!(sum, tiny.into());
        let product = Wide::product(1.0 + f64::EPSILON, 1.0 - f64::EPSILON);
        assert_eq!(product, Wide { high: 1.0, low: -f64::EPSILON * f64::EPSILON });
    }

    #[test]
    fn wide_operands_may_be_exchanged() {
        let number = |seed: f64| Wide::from(seed.sin()).plus((seed.cos() * 1e-17).into());
        for seed in 0..1000 {
            let (a, b) = (number(seed.into()), number(f64::from(seed) * 7.0 + 0.5));
            assert_eq!(a.plus(b), b.plus(a));
            assert_eq!(a.times(b), b.times(a));
        }
    }
}
