//! Formulas of one element: cast, accumulate, scale, finiteness, and one term of a product or of a weighted sum.
//!
//! The working precision of a pair of types is `f64` if one of them is `f64`, else `f32`; the result is rounded once from there. NaN and
//! infinities propagate as in IEEE 754; nothing is flushed or clamped.

use super::Element;
use crate::abi::DType;
use crate::arch;

/// Whether a pair of types works in `f64`.
#[inline(always)]
const fn wide<A: Element, B: Element>() -> bool {
    matches!(A::DTYPE, DType::F64) || matches!(B::DTYPE, DType::F64)
}

/// `D(value)`: exact where `D` can hold the value, otherwise rounded once to nearest even.
#[inline(always)]
pub fn cast<S: Element, D: Element>(value: S) -> D {
    if wide::<S, D>() { D::from_f64(value.to_f64()) } else { D::from_f32(value.to_f32()) }
}

/// `T(sum + value)`: both widened, added, rounded once.
#[inline(always)]
pub fn accumulate<T: Element, G: Element>(sum: T, value: G) -> T {
    if wide::<T, G>() { T::from_f64(sum.to_f64() + value.to_f64()) } else { T::from_f32(sum.to_f32() + value.to_f32()) }
}

/// `D(value × factor)`: both in the working precision, multiplied, rounded once.
#[inline(always)]
pub fn scale<S: Element, D: Element>(value: S, factor: f64) -> D {
    if wide::<S, D>() { D::from_f64(value.to_f64() * factor) } else { D::from_f32(value.to_f32() * factor as f32) }
}

/// Whether the value is neither NaN nor an infinity. An `f64` beyond the range of `f32` counts as finite.
#[inline(always)]
pub fn is_finite<T: Element>(value: T) -> bool {
    if wide::<T, T>() { value.to_f64().is_finite() } else { value.to_f32().is_finite() }
}

/// `total + weight × value` in `f64`, rounded twice: one term of a weighted sum, with the same bits on every target.
#[inline(always)]
pub fn add_weighted(total: f64, weight: f64, value: f64) -> f64 {
    total + weight * value
}

/// `total + x × y` in `f64`: one term of a dot product.
///
/// The product of two values of 24 bits or fewer is exact in `f64`, so that a fused and a separate multiplication agree
/// for every type but `f64` itself; there a GPU, which fuses, may differ from a CPU in the last bit.
#[inline(always)]
pub fn add_product(total: f64, x: f64, y: f64) -> f64 {
    arch::multiply_add(x, y, total)
}
