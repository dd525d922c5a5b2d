//! The four number formats, by their textbook parameters, and rounding to them.
//!
//! One generic rounding (scale to the quantum, round half to even, scale back) serves all four formats; the conversion code under test uses
//! bit arithmetic or a hardware instruction, and shares nothing with this module. The `half` crate is not used even here, because its `f64`
//! conversions have dropped sticky bits in the past (they look at the upper 32 bits only).

/// A binary floating-point format of at most 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE binary64.
    F64,
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of binary32.
    BF16,
}

impl Format {
    /// All four, widest first.
    pub const ALL: [Format; 4] = [Format::F64, Format::F32, Format::F16, Format::BF16];

    /// Significand bits, the hidden one included.
    pub fn precision(self) -> i32 {
        match self {
            Format::F64 => 53,
            Format::F32 => 24,
            Format::F16 => 11,
            Format::BF16 => 8,
        }
    }

    /// Exponent of the smallest normal number.
    pub fn min_exponent(self) -> i32 {
        match self {
            Format::F64 => -1022,
            Format::F32 | Format::BF16 => -126,
            Format::F16 => -14,
        }
    }

    /// Exponent of the largest finite number.
    pub fn max_exponent(self) -> i32 {
        1 - self.min_exponent()
    }

    /// Bits of the encoding.
    pub fn bits(self) -> u32 {
        match self {
            Format::F64 => 64,
            Format::F32 => 32,
            Format::F16 | Format::BF16 => 16,
        }
    }

    /// Bytes of one element.
    pub fn size_bytes(self) -> usize {
        self.bits() as usize / 8
    }

    /// gradsync's name of the dtype.
    pub fn name(self) -> &'static str {
        match self {
            Format::F64 => "f64",
            Format::F32 => "f32",
            Format::F16 => "f16",
            Format::BF16 => "bf16",
        }
    }

    /// The largest finite number.
    pub fn max_finite(self) -> f64 {
        (2.0 - power_of_two(1 - self.precision())) * power_of_two(self.max_exponent())
    }

    /// The smallest positive (subnormal) number.
    pub fn smallest(self) -> f64 {
        power_of_two(self.min_exponent() - self.precision() + 1)
    }

    /// Half the distance from 1 to the next number: the largest relative error of one rounding to nearest.
    pub fn unit_roundoff(self) -> f64 {
        power_of_two(-self.precision())
    }

    /// The largest error of rounding `value` once: relative, plus half a quantum among the subnormals.
    pub fn rounding_error(self, value: f64) -> f64 {
        // Half of the smallest f64 is not representable in f64; the whole quantum is a valid bound too.
        let half_quantum = if self == Format::F64 { self.smallest() } else { self.smallest() / 2.0 };
        value.abs() * self.unit_roundoff() + half_quantum
    }

    /// Rounds to nearest, ties to even, with overflow to infinity, as IEEE 754 defines it.
    pub fn round(self, value: f64) -> f64 {
        match self {
            Format::F64 => value,
            _ if value == 0.0 || !value.is_finite() => value,
            _ => {
                let exponent = exponent_of(value).max(self.min_exponent());
                let quantum = power_of_two(exponent - self.precision() + 1);
                // Dividing and multiplying by a power of two is exact here: the quanta of the narrower formats lie far inside f64's range.
                let rounded = (value / quantum).round_ties_even() * quantum;
                if rounded.abs() > self.max_finite() { f64::INFINITY.copysign(value) } else { rounded }
            }
        }
    }

    /// The number that a bit pattern of this format encodes.
    pub fn decode(self, pattern: u64) -> f64 {
        if self == Format::F64 {
            return f64::from_bits(pattern);
        }
        let fraction_bits = self.precision() - 1;
        let fraction = pattern & ((1 << fraction_bits) - 1);
        let exponent_bits = self.bits() as i32 - 1 - fraction_bits;
        let biased = (pattern >> fraction_bits) & ((1 << exponent_bits) - 1);
        let magnitude = if biased == (1 << exponent_bits) - 1 {
            if fraction == 0 { f64::INFINITY } else { f64::NAN }
        } else if biased == 0 {
            fraction as f64 * self.smallest()
        } else {
            let significand = (fraction | (1 << fraction_bits)) as f64;
            significand * self.smallest() * power_of_two(biased as i32 - 1)
        };
        if pattern >> (self.bits() - 1) == 1 { -magnitude } else { magnitude }
    }

    /// The bit pattern of a number of this format; a quiet NaN for NaN.
    ///
    /// # Panics
    ///
    /// If `value` is not representable in this format: the oracle never rounds implicitly.
    pub fn encode(self, value: f64) -> u64 {
        assert!(value.is_nan() || self.round(value) == value, "{value:e} is not a number of {self:?}");
        if self == Format::F64 {
            return value.to_bits();
        }
        let fraction_bits = self.precision() - 1;
        let infinity = ((1_u64 << (self.bits() as i32 - 1 - fraction_bits)) - 1) << fraction_bits;
        let sign = u64::from(value.is_sign_negative()) << (self.bits() - 1);
        let magnitude = value.abs();
        let pattern = if magnitude.is_nan() {
            // The leading bits are kept, as processors do.
            let fraction = magnitude.to_bits() & ((1 << 52) - 1);
            infinity | (1 << (fraction_bits - 1)) | (fraction >> (52 - fraction_bits))
        } else if magnitude.is_infinite() {
            infinity
        } else if magnitude < power_of_two(self.min_exponent()) {
            (magnitude / self.smallest()) as u64
        } else {
            let exponent = exponent_of(magnitude);
            let significand = (magnitude / power_of_two(exponent - fraction_bits)) as u64;
            significand + (((exponent - self.min_exponent()) as u64) << fraction_bits)
        };
        sign | pattern
    }

    /// The next number of this format away from zero; `value` must be finite and of this format.
    pub fn next_away(self, value: f64) -> f64 {
        if self == Format::F64 {
            return f64::from_bits(value.to_bits() + 1);
        }
        let exponent = if value == 0.0 { self.min_exponent() } else { exponent_of(value).max(self.min_exponent()) };
        self.round(value + power_of_two(exponent - self.precision() + 1).copysign(value))
    }
}

/// `2^exponent`, exactly, subnormals included.
pub fn power_of_two(exponent: i32) -> f64 {
    if exponent >= -1022 {
        f64::from_bits(((exponent + 1023) as u64) << 52)
    } else {
        f64::from_bits(1_u64 << (exponent + 1074))
    }
}

/// The exponent of the leading bit of a finite nonzero number.
fn exponent_of(value: f64) -> i32 {
    let biased = (value.to_bits() >> 52) as i32 & 0x7ff;
    if biased > 0 {
        biased - 1023
    } else {
        let fraction = value.to_bits() & ((1 << 52) - 1);
        63 - fraction.leading_zeros() as i32 - 1074
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_has_the_published_limits() {
        assert_eq!(Format::F32.max_finite(), f64::from(f32::MAX));
        assert_eq!(Format::F64.max_finite(), f64::MAX);
        assert_eq!(Format::F16.max_finite(), 65504.0);
        assert_eq!(Format::BF16.max_finite(), 3.389_531_389_251_535_5e38);
        assert_eq!(Format::F16.smallest(), 5.960_464_477_539_063e-8);
        assert_eq!(Format::F64.smallest(), 5e-324);
        assert_eq!(Format::F32.smallest(), f64::from(f32::from_bits(1)));
    }

    #[test]
    fn round_to_f32_is_the_compilers() {
        let mut state = 1_u64;
        for _ in 0..200_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let value = f64::from_bits(state ^ (state >> 29));
            if !value.is_nan() {
                let narrow = value as f32;
                assert_eq!(Format::F32.round(value), f64::from(narrow), "{value:e}");
                assert_eq!(Format::F32.encode(f64::from(narrow)), u64::from(narrow.to_bits()));
                assert_eq!(Format::F32.decode(u64::from(narrow.to_bits())), f64::from(narrow));
            }
        }
    }

    #[test]
    fn round_takes_ties_to_even_and_counts_sticky_bits() {
        // Halfway between 1 and 1 + 2^-10, the even neighbour is 1; a single bit of 2^-52 above the midpoint changes the result.
        let midpoint = 1.0 + power_of_two(-11);
        assert_eq!(Format::F16.round(midpoint), 1.0);
        assert_eq!(Format::F16.round(f64::from_bits(midpoint.to_bits() + 1)), 1.0 + power_of_two(-10));
        assert_eq!(Format::F16.round(65519.999), 65504.0);
        assert_eq!(Format::F16.round(65520.0), f64::INFINITY);
        assert_eq!(Format::F16.round(-1e-30), 0.0);
        assert!(Format::F16.round(-1e-30).is_sign_negative());
    }

    #[test]
    fn round_keeps_every_half_pattern() {
        for format in [Format::F16, Format::BF16] {
            for pattern in 0..=u64::from(u16::MAX) {
                let value = format.decode(pattern);
                let rounded = format.round(value);
                assert!(rounded == value || (rounded.is_nan() && value.is_nan()), "{format:?} {pattern:#06x}");
                if !value.is_nan() {
                    assert_eq!(format.encode(value), pattern, "{format:?}");
                }
            }
        }
    }
}
