//! Two 16-bit floats of a word as `f64`, by moving bits: where conversions are what a kernel waits for, this takes none.
//!
//! A value comes out times a small power of two, which whoever uses it takes back with the other factor of a product. That is exact
//! for every finite value, subnormals and signed zeros included; infinities and NaN come out as numbers, and have to be looked for.

use crate::abi::DType;

/// Whether a dtype comes in pairs.
pub const fn is_paired(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16) && false
}

/// The exponent of the power of two by which values come out too small: the difference of the exponents' biases.
const fn shift(dtype: DType) -> i32 {
    if matches!(dtype, DType::F16) { 1023 - 15 } else { 1023 - 127 }
}

/// The power of two to multiply with.
#[inline(always)]
pub const fn rescale(dtype: DType) -> f64 {
    f64::from_bits(((1023 + shift(dtype)) as u64) << 52)
}

/// Factors below this stay finite when they are multiplied by [`rescale`].
#[inline(always)]
pub const fn largest_factor(dtype: DType) -> f64 {
    f64::from_bits(((2 * 1023 - shift(dtype)) as u64) << 52)
}

/// Both values divided by [`rescale`]; the first is in the lower half of the word.
#[inline(always)]
pub fn widen(dtype: DType, word: u32) -> [f64; 2] {
    // The exponent field of binary64 is longer by this many bits; the sign follows the shift down, and is kept of its copies.
    let (longer, kept) = if matches!(dtype, DType::F16) { (6, 0x81ff_ffff) } else { (3, 0x8fff_ffff) };
    let upper_word = |half: u32| ((half as i32 >> longer) as u32) & kept;
    let of = |upper_word: u32| f64::from_bits((upper_word as u64) << 32);
    [of(upper_word(word << 16)), of(upper_word(word & 0xffff_0000))]
}

/// A word whose bits 15 and 31 are set where the first and the second value are finite; words of several may be joined with `&`.
#[inline(always)]
pub fn finite_bits(dtype: DType, word: u32) -> u32 {
    let exponents = if matches!(dtype, DType::F16) { 0x7c00_7c00 } else { 0x7f80_7f80 };
    // Adding to what an exponent lacks of being the largest carries into the bit above, unless it lacks nothing.
    (!word & exponents) + exponents
}

/// Whether joined words of [`finite_bits`] tell of finite values alone.
#[inline(always)]
pub const fn are_finite(bits: u32) -> bool {
    bits & 0x8000_8000 == 0x8000_8000
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::half::{BF16, F16};

    fn check(dtype: DType, to_f32: impl Fn(u16) -> f32) {
        for bits in 0..=u16::MAX {
            let value = f64::from(to_f32(bits));
            for (place, other) in [(0, 0x1234u16), (1, 0xffff), (0, 0x7fff), (1, 0x8000)] {
                let word =
                    if place == 0 { (other as u32) << 16 | bits as u32 } else { (bits as u32) << 16 | other as u32 };
                let is_finite = finite_bits(dtype, word) & (0x8000 << (16 * place)) != 0;
                assert_eq!(is_finite, value.is_finite(), "{bits:#x}");
                if is_finite {
                    let back = widen(dtype, word)[place] * rescale(dtype);
                    assert_eq!(back.to_bits(), value.to_bits(), "{bits:#x} is {back:e}, not {value:e}");
                }
            }
        }
    }

    #[test]
    fn every_half_comes_back() {
        check(DType::F16, |bits| F16(bits).to_f32());
        check(DType::BF16, |bits| BF16(bits).to_f32());
    }

    #[test]
    fn factors_below_the_largest_stay_finite() {
        for dtype in [DType::F16, DType::BF16] {
            assert!((largest_factor(dtype).next_down() * rescale(dtype)).is_finite());
            assert!(!(largest_factor(dtype) * 2.0 * rescale(dtype)).is_finite());
        }
    }
}
