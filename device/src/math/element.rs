//! The element types of gradients, with their conversions.
//!
//! Storage types only convert; the formulas that use them compute sums and products in `f32` or `f64`.

use crate::abi::DType;

/// A storage type of gradients: `f64`, `f32`, [`F16`](crate::F16) or [`BF16`](crate::BF16).
///
/// Widening is exact except for `f64` → `f32`. Narrowing rounds once, to nearest with ties to even; NaN stays NaN.
pub trait Element: Copy + Send + Sync + 'static {
    /// The name of this type at run time.
    const DTYPE: DType;
    /// The value as `f32` (rounded if this is `f64`).
    fn to_f32(self) -> f32;
    /// The value as `f64`; exact.
    fn to_f64(self) -> f64;
    /// Rounds an `f32` to this type.
    fn from_f32(value: f32) -> Self;
    /// Rounds an `f64` to this type, once.
    fn from_f64(value: f64) -> Self;
}

impl Element for f64 {
    const DTYPE: DType = DType::F64;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self as f32
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value as f64
    }
    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        value
    }
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        self as f64
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        value as f32
    }
}
