//! The CPU's side of `arch`: the formulas themselves. Hardware conversions of a particular CPU are chosen at run time by the backend that
//! loops over them, not here.

pub(crate) use crate::math::rounding::{f16_to_f32, f32_to_bf16, f32_to_f16, f64_to_f32_odd};

#[inline(always)]
pub(crate) fn f16_to_f64(bits: u16) -> f64 {
    f16_to_f32(bits) as f64
}

#[inline(always)]
pub(crate) fn f64_to_f16(value: f64) -> u16 {
    f32_to_f16(f64_to_f32_odd(value))
}

/// `x × y + z` with two roundings: a fused operation would be a library call on a CPU without a known instruction for it.
#[inline(always)]
pub(crate) fn multiply_add(x: f64, y: f64, z: f64) -> f64 {
    x * y + z
}

/// The square root, rounded once.
#[inline(always)]
pub(crate) fn sqrt_f32(value: f32) -> f32 {
    value.sqrt()
}

/// The square root, rounded once.
#[inline(always)]
pub(crate) fn sqrt_f64(value: f64) -> f64 {
    value.sqrt()
}
