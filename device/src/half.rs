//! The two 16-bit floats as storage types, and the selection of their conversions.
//!
//! Each conversion exists as a formula ([`crate::math::rounding`]) and, where the target has one, as an instruction
//! (`arch`). Both give the same bits for every number; the payload of a NaN may differ. There is no arithmetic in 16 bits.

use crate::abi::DType;
use crate::arch;
use crate::math::Element;

/// IEEE 754 binary16 by its bits: 1 sign, 5 exponent, 10 fraction bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

/// bfloat16 by its bits: the upper half of an IEEE 754 binary32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct BF16(pub u16);

impl F16 {
    /// The same number as `f32`; exact.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        arch::f16_to_f32(self.0)
    }

    /// Rounds once to the nearest binary16, ties to even; subnormals are kept, overflow gives an infinity.
    #[inline(always)]
    pub fn from_f32(value: f32) -> Self {
        F16(arch::f32_to_f16(value))
    }

    /// Like [`from_f32`](Self::from_f32), with one rounding from `f64`.
    #[inline(always)]
    pub fn from_f64(value: f64) -> Self {
        F16(arch::f64_to_f16(value))
    }

    /// The same number as `f64`; exact.
    #[inline(always)]
    pub fn to_f64(self) -> f64 {
        arch::f16_to_f64(self.0)
    }
}

impl BF16 {
    /// The same number as `f32`; exact.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        f32::from_bits((self.0 as u32) << 16)
    }

    /// Rounds once to the nearest bfloat16, ties to even; subnormals are kept, overflow gives an infinity.
    #[inline(always)]
    pub fn from_f32(value: f32) -> Self {
        BF16(arch::f32_to_bf16(value))
    }

    /// Like [`from_f32`](Self::from_f32), with one rounding from `f64`.
    #[inline(always)]
    pub fn from_f64(value: f64) -> Self {
        Self::from_f32(arch::f64_to_f32_odd(value))
    }
}

impl Element for F16 {
    const DTYPE: DType = DType::F16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        F16::to_f32(self)
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        F16::to_f64(self)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        F16::from_f32(value)
    }
    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        F16::from_f64(value)
    }
}

impl Element for BF16 {
    const DTYPE: DType = DType::BF16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        BF16::to_f32(self)
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        BF16::to_f32(self) as f64
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        BF16::from_f32(value)
    }
    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        BF16::from_f64(value)
    }
}
