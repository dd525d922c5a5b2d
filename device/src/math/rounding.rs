//! Conversions between floating-point formats in integer arithmetic: rounding to nearest, ties to even, by formula.
//!
//! Written without data-dependent branches, so that a compiler vectorises a loop over them. Subnormals are kept on both sides, overflow
//! gives an infinity, a NaN stays a (quiet) NaN. Not used where hardware has the conversion.

const SIGN_32: u32 = 0x8000_0000;
const INFINITY_32: u32 = 0x7f80_0000;
const QUIET_32: u32 = 0x0040_0000;
const EXPONENT_SHIFT_32: u32 = 23;
/// Difference of the exponent biases of binary32 and binary16, 127 - 15.
const REBIAS: u32 = 112;
/// Bits of fraction that binary32 has and binary16 lacks, 23 - 10.
const FRACTION_DROP: u32 = 13;

/// binary16 → binary32; exact.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = ((bits as u32) << 16) & SIGN_32;
    let magnitude = ((bits as u32) & 0x7fff) << FRACTION_DROP;
    let normal = magnitude + (REBIAS << EXPONENT_SHIFT_32);
    // A subnormal has no hidden bit: build it with one, then take that one away, which is exact.
    let one = (REBIAS + 1) << EXPONENT_SHIFT_32;
    let subnormal = (f32::from_bits(magnitude + one) - f32::from_bits(one)).to_bits();
    let special = (magnitude + ((2 * REBIAS) << EXPONENT_SHIFT_32))
        | if magnitude > 0x7c00 << FRACTION_DROP { QUIET_32 } else { 0 };
    let value = if magnitude < 0x0400 << FRACTION_DROP { subnormal } else { normal };
    let value = if magnitude >= 0x7c00 << FRACTION_DROP { special } else { value };
    f32::from_bits(sign | value)
}

/// binary32 → binary16, to nearest, ties to even.
#[inline(always)]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits & SIGN_32) >> 16;
    let magnitude = bits & !SIGN_32;
    // Adding just under half a unit, and one more when the kept part is odd, carries exactly when rounding up is due.
    let odd = (magnitude >> FRACTION_DROP) & 1;
    let normal = magnitude.wrapping_add(0x0fff + odd).wrapping_sub(REBIAS << EXPONENT_SHIFT_32) >> FRACTION_DROP;
    // Below 2^-14 the unit is 2^-24, which is the unit of binary32 at 0.5: let the addition round there.
    let half = f32::from_bits(126 << EXPONENT_SHIFT_32);
    let subnormal = (f32::from_bits(magnitude) + half).to_bits().wrapping_sub(half.to_bits());
    let rounded = if magnitude < 113 << EXPONENT_SHIFT_32 { subnormal } else { normal };
    let rounded = if magnitude >= 0x477f_f000 { 0x7c00 } else { rounded }; // 65520 and beyond
    let rounded = if magnitude > INFINITY_32 { 0x7e00 } else { rounded };
    (sign | rounded) as u16
}

/// binary32 → bfloat16, to nearest, ties to even.
#[inline(always)]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let odd = (bits >> 16) & 1;
    let rounded = bits.wrapping_add(0x7fff + odd) >> 16;
    let quiet = (bits >> 16) | (QUIET_32 >> 16);
    (if bits & !SIGN_32 > INFINITY_32 { quiet } else { rounded }) as u16
}

/// binary64 → binary32, rounded to odd: truncated, and the last bit set if any digit was lost.
///
/// A second rounding of the result to 22 bits of fraction or fewer then equals one rounding of `value`
/// (Boldo and Melquiond, "When double rounding is odd", 2005), which is how a binary64 becomes a 16-bit float here.
#[inline(always)]
pub fn f64_to_f32_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let back = nearest as f64;
    let magnitude = nearest.to_bits();
    let truncated = if back.abs() > value.abs() { magnitude.wrapping_sub(1) } else { magnitude };
    let exact = back == value || value.is_nan();
    f32::from_bits(if exact { magnitude } else { truncated | 1 })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Rounding to odd by its definition: exact if it can be, otherwise the neighbour whose last bit is set.
    fn is_odd_rounding(value: f64, result: f32) -> bool {
        let back = f64::from(result);
        if value.is_nan() || back == value {
            return result.is_nan() == value.is_nan();
        }
        let beside = |step| f64::from(f32::from_bits(result.abs().to_bits().wrapping_add_signed(step)));
        let is_between = beside(-1) < value.abs() && value.abs() < beside(1);
        result.to_bits() & 1 == 1 && is_between && result.is_sign_negative() == value.is_sign_negative()
    }

    proptest! {
        #[test]
        fn f64_to_f32_odd_rounds_any_bits(bits: u64) {
            let value = f64::from_bits(bits);
            prop_assert!(is_odd_rounding(value, f64_to_f32_odd(value)), "{value:e} {:e}", f64_to_f32_odd(value));
        }

        #[test]
        fn f64_to_f32_odd_rounds_near_f32_values(bits: u32, offset in -3i64..4) {
            let near = f64::from(f32::from_bits(bits));
            let value = f64::from_bits(near.to_bits().wrapping_add_signed(offset));
            prop_assert!(is_odd_rounding(value, f64_to_f32_odd(value)), "{value:e} {:e}", f64_to_f32_odd(value));
        }
    }

    #[test]
    fn f16_to_f32_and_back_keeps_every_half() {
        for bits in 0..=u16::MAX {
            let value = f16_to_f32(bits);
            assert_eq!(value.to_bits(), half::f16::from_bits(bits).to_f32().to_bits(), "{bits:#x}");
            if !value.is_nan() {
                assert_eq!(f32_to_f16(value), bits);
            }
        }
    }
}
