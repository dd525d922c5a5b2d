//! cast, accumulate and scale for one element and each pair of formats, directly from the specification.
//!
//! There are no loops and no buffers here: tests map these functions over their inputs.

use super::format::Format;

/// The format of the arithmetic on two operands: f64 if either is f64, otherwise f32.
pub fn wide_format(a: Format, b: Format) -> Format {
    if a == Format::F64 || b == Format::F64 { Format::F64 } else { Format::F32 }
}

/// `dst = T(src)`.
pub fn cast(to: Format, value: f64) -> f64 {
    to.round(value)
}

/// `dst = T(wide(dst) + wide(src))`.
///
/// The sum of two f32 numbers taken in f64 and rounded to f32 is the f32 sum: 53 bits are at least 2·24 + 2.
pub fn accumulate(sum_format: Format, sum: f64, value_format: Format, value: f64) -> f64 {
    let wide = wide_format(sum_format, value_format);
    sum_format.round(wide.round(sum + value))
}

/// `dst = T(wide(src) * wide(factor))`.
///
/// The product of two f32 numbers is exact in f64, so one rounding to `wide` follows one exact product.
pub fn scale(to: Format, from: Format, value: f64, factor: f64) -> f64 {
    let wide = wide_format(to, from);
    to.round(wide.round(value * wide.round(factor)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accumulate_through_f64_is_the_f32_sum() {
        let mut state = 7_u64;
        for _ in 0..200_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (a, b) = (f32::from_bits((state >> 32) as u32), f32::from_bits(state as u32));
            let expected = f64::from(a + b);
            let got = accumulate(Format::F32, f64::from(a), Format::F32, f64::from(b));
            assert!(got == expected || (got.is_nan() && expected.is_nan()), "{a:e} + {b:e}: {got:e}, not {expected:e}");
            let expected = f64::from(a * b);
            let got = scale(Format::F32, Format::F32, f64::from(a), f64::from(b));
            assert!(got == expected || (got.is_nan() && expected.is_nan()), "{a:e} * {b:e}: {got:e}, not {expected:e}");
        }
    }
}
