//! [`Unbounded`]: numbers with the digits of `f64` and any exponent, for the values inside a reduction that leave the range of `f64`.

use std::ops::{Add, Div, Mul};

/// A finite number, rounded like an `f64` after every operation, whose exponent has no bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Unbounded {
    /// A zero, or a number from 1 to below 2 with a sign.
    digits: f64,
    exponent: i64,
}

impl Unbounded {
    /// The number `value × 2^exponent`, where `value` is finite.
    fn normalized(value: f64, exponent: i64) -> Self {
        const EXPONENT_BITS: u64 = 0x7ff << 52;
        if value == 0.0 {
            return Self { digits: value, exponent: 0 };
        }
        let (value, exponent) = if value.is_normal() { (value, exponent) } else { (value * power(64), exponent - 64) };
        let own = (value.to_bits() & EXPONENT_BITS) >> 52;
        let digits = f64::from_bits(value.to_bits() & !EXPONENT_BITS | 1.0f64.to_bits());
        Self { digits, exponent: exponent + own as i64 - 1023 }
    }

    /// Whether this number is at least the other.
    pub(super) fn is_at_least(self, other: Self) -> bool {
        (self + Self { digits: -other.digits, ..other }).digits >= 0.0
    }

    /// The nearest `f64`: an infinity beyond its range.
    pub(super) fn to_f64(self) -> f64 {
        // Two factors, so that neither leaves the range before the product does; only the second one can round.
        let exponent = self.exponent.clamp(-1200, 1200);
        self.digits * power(exponent / 2) * power(exponent - exponent / 2)
    }
}

/// The power of two, or 0 or infinity beyond the normal numbers.
fn power(exponent: i64) -> f64 {
    match exponent {
        ..-1022 => 0.0,
        -1022..=1023 => f64::from_bits(((exponent + 1023) as u64) << 52),
        _ => f64::INFINITY,
    }
}

impl From<f64> for Unbounded {
    /// Converts a finite number.
    fn from(value: f64) -> Self {
        Self::normalized(value, 0)
    }
}

impl Add for Unbounded {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let exponent = match (self.digits == 0.0, other.digits == 0.0) {
            (true, _) => other.exponent,
            (false, true) => self.exponent,
            (false, false) => self.exponent.max(other.exponent),
        };
        let aligned = |number: Self| number.digits * power((number.exponent - exponent).min(0));
        Self::normalized(aligned(self) + aligned(other), exponent)
    }
}

impl Mul for Unbounded {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        Self::normalized(self.digits * other.digits, self.exponent + other.exponent)
    }
}

impl Div for Unbounded {
    type Output = Self;

    /// Divides by a number that is not zero.
    fn div(self, other: Self) -> Self {
        Self::normalized(self.digits / other.digits, self.exponent - other.exponent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBERS: [f64; 14] = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        0.1,
        -1.0 / 3.0,
        1e17,
        7e-16,
        f64::MAX,
        f64::MIN,
        f64::MIN_POSITIVE,
        3e-310,
        -5e-324,
        1e300,
    ];

    /// Compares bits. A product or a quotient among the subnormals is rounded twice.
    fn assert_same(what: &str, found: Unbounded, expected: f64) {
        let found = found.to_f64();
        let is_same = found.to_bits() == expected.to_bits();
        let is_near = expected.abs() < f64::MIN_POSITIVE && (found - expected).abs() <= power(-1022) * f64::EPSILON;
        assert!(is_same || is_near, "{what}: {found:e}, expected {expected:e}");
    }

    #[test]
    fn unbounded_has_the_bits_of_f64_in_its_range() {
        for a in NUMBERS {
            assert_eq!(Unbounded::from(a).to_f64().to_bits(), a.to_bits(), "{a:e}");
            for b in NUMBERS {
                let (left, right) = (Unbounded::from(a), Unbounded::from(b));
                assert_eq!((left + right).to_f64().to_bits(), (a + b).to_bits(), "{a:e} + {b:e}");
                assert_same(&format!("{a:e} * {b:e}"), left * right, a * b);
                if b != 0.0 {
                    assert_same(&format!("{a:e} / {b:e}"), left / right, a / b);
                }
                assert_eq!(left.is_at_least(right), a >= b, "{a:e} >= {b:e}");
            }
        }
    }

    #[test]
    fn unbounded_keeps_digits_beyond_the_range_of_f64() {
        let [largest, smallest] = [f64::MAX, f64::MIN_POSITIVE].map(Unbounded::from);
        assert_eq!((largest * largest / largest).to_f64(), f64::MAX);
        assert_eq!((smallest * smallest / smallest).to_f64(), f64::MIN_POSITIVE);
        assert_eq!((largest + largest + f64::MIN.into()).to_f64(), f64::MAX);
        assert_eq!(((largest + largest) / 2.0.into()).to_f64(), f64::MAX);
        assert_eq!((largest * largest).to_f64(), f64::INFINITY);
        assert_eq!((smallest * smallest).to_f64(), 0.0);
    }
}
