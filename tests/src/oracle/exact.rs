//! Double-double arithmetic: an unevaluated sum of two `f64`, about 106 significant bits.
//!
//! The oracle's inner products and norms use it, so that the oracle's own error (relative 2^-100 or so) never enters a bound. It is not
//! exact at the ends of the range: an error term that underflows is lost, and a sum that overflows is infinite, as in `f64`.

/// `high + low`, where `low` is at most half a unit in the last place of `high`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Wide {
    high: f64,
    low: f64,
}

impl Wide {
    /// Zero.
    pub const ZERO: Wide = Wide { high: 0.0, low: 0.0 };
    /// One.
    pub const ONE: Wide = Wide { high: 1.0, low: 0.0 };

    /// Represents `value` exactly.
    pub fn new(value: f64) -> Wide {
        Wide { high: value, low: 0.0 }
    }

    /// Rounded to `f64`.
    pub fn value(self) -> f64 {
        self.high
    }

    /// The exact product of two `f64`.
    pub fn product(a: f64, b: f64) -> Wide {
        let high = a * b;
        if !high.is_finite() {
            return Wide::new(high);
        }
        Wide { high, low: a.mul_add(b, -high) }
    }

    /// Sum.
    #[allow(clippy::should_implement_trait, reason = "a named method reads better in the long formulas")]
    pub fn add(self, other: Wide) -> Wide {
        let high = two_sum(self.high, other.high);
        if !high.high.is_finite() {
            return Wide::new(high.high);
        }
        let low = two_sum(self.low, other.low);
        let first = quick_two_sum(high.high, high.low + low.high);
        quick_two_sum(first.high, first.low + low.low)
    }

    /// The negative.
    #[allow(clippy::should_implement_trait, reason = "see add")]
    pub fn neg(self) -> Wide {
        Wide { high: -self.high, low: -self.low }
    }

    /// Product.
    #[allow(clippy::should_implement_trait, reason = "see add")]
    pub fn mul(self, other: Wide) -> Wide {
        let product = Wide::product(self.high, other.high);
        if !product.high.is_finite() {
            return product;
        }
        quick_two_sum(product.high, product.low + (self.high * other.low + self.low * other.high))
    }

    /// Quotient, by one correction step.
    #[allow(clippy::should_implement_trait, reason = "see add")]
    pub fn div(self, other: Wide) -> Wide {
        let first = self.high / other.high;
        if !first.is_finite() {
            return Wide::new(first);
        }
        let rest = self.add(other.mul(Wide::new(first)).neg());
        let second = rest.high / other.high;
        let rest = rest.add(other.mul(Wide::new(second)).neg());
        let third = rest.high / other.high;
        quick_two_sum(first, second).add(Wide::new(third))
    }

    /// Absolute value.
    pub fn abs(self) -> Wide {
        if self.high < 0.0 { self.neg() } else { self }
    }
}

/// Inner product of two vectors of [`Wide`] numbers.
pub fn dot(a: &[Wide], b: &[Wide]) -> Wide {
    assert_eq!(a.len(), b.len(), "the oracle was given vectors of different lengths");
    a.iter().zip(b).fold(Wide::ZERO, |sum, (&x, &y)| sum.add(x.mul(y)))
}

/// Inner product of two plain vectors.
pub fn dot_f64(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "the oracle was given vectors of different lengths");
    a.iter().zip(b).fold(Wide::ZERO, |sum, (&x, &y)| sum.add(Wide::product(x, y))).value()
}

fn two_sum(a: f64, b: f64) -> Wide {
    let high = a + b;
    let part = high - a;
    Wide { high, low: (a - (high - part)) + (b - part) }
}

fn quick_two_sum(a: f64, b: f64) -> Wide {
    let high = a + b;
    if !high.is_finite() {
        return Wide::new(high);
    }
    Wide { high, low: b - (high - a) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_keeps_what_f64_loses() {
        let sum = Wide::new(1e16).add(Wide::new(1.0)).add(Wide::new(-1e16));
        assert_eq!(sum.value(), 1.0);
        let third = Wide::ONE.div(Wide::new(3.0));
        let back = third.mul(Wide::new(3.0)).add(Wide::ONE.neg());
        assert!(back.value().abs() < 1e-30, "{back:?}");
        assert_eq!(dot_f64(&[1e8, 1.0, -1e8], &[1e8, 1.0, 1e8]), 1.0);
    }

    #[test]
    fn wide_passes_infinity_and_nan_through() {
        assert_eq!(Wide::product(1e300, 1e300).value(), f64::INFINITY);
        assert_eq!(Wide::new(f64::INFINITY).add(Wide::ONE).value(), f64::INFINITY);
        assert!(Wide::new(f64::INFINITY).add(Wide::new(f64::NEG_INFINITY)).value().is_nan());
        assert!(Wide::new(f64::NAN).mul(Wide::ZERO).value().is_nan());
        assert!(Wide::new(f64::INFINITY).div(Wide::new(f64::INFINITY)).value().is_nan());
    }
}
