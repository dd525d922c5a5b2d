//! The GPU's side of `arch`: conversions in inline PTX, and the panic handler. The feature `sm_80` means that the GPU has the conversions
//! of compute capability 8.0.

use core::arch::asm;

#[cfg(not(feature = "sm_80"))]
use crate::math::rounding;

#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let value: f32;
    // SAFETY: arithmetic on registers.
    unsafe { asm!("cvt.f32.f16 {0}, {1};", out(reg32) value, in(reg16) bits, options(pure, nomem, nostack)) };
    value
}

#[inline(always)]
pub(crate) fn f16_to_f64(bits: u16) -> f64 {
    let value: f64;
    // SAFETY: arithmetic on registers.
    unsafe { asm!("cvt.f64.f16 {0}, {1};", out(reg64) value, in(reg16) bits, options(pure, nomem, nostack)) };
    value
}

#[inline(always)]
pub(crate) fn f64_to_f16(value: f64) -> u16 {
    let bits: u16;
    // SAFETY: arithmetic on registers.
    unsafe { asm!("cvt.rn.f16.f64 {0}, {1};", out(reg16) bits, in(reg64) value, options(pure, nomem, nostack)) };
    bits
}

#[inline(always)]
pub(crate) fn f32_to_f16(value: f32) -> u16 {
    let bits: u16;
    // SAFETY: arithmetic on registers.
    unsafe { asm!("cvt.rn.f16.f32 {0}, {1};", out(reg16) bits, in(reg32) value, options(pure, nomem, nostack)) };
    bits
}

/// Uses an instruction from compute capability 8.0 on, and the formula before. It is the instruction for two values, because the assembler
/// may map the one for a single value to the slow unit of 64-bit conversions.
#[inline(always)]
pub(crate) fn f32_to_bf16(value: f32) -> u16 {
    #[cfg(feature = "sm_80")]
    {
        let bits: u16;
        // SAFETY: arithmetic on registers.
        unsafe {
            asm!("{{ .reg .b32 both; cvt.rn.bf16x2.f32 both, 0f00000000, {1}; cvt.u16.u32 {0}, both; }}", out(reg16) bits,
                in(reg32) value, options(pure, nomem, nostack))
        };
        bits
    }
    #[cfg(not(feature = "sm_80"))]
    rounding::f32_to_bf16(value)
}

/// Rounds to odd: the conversion truncates, and the last bit is set if digits were lost. Without a branch.
#[inline(always)]
pub(crate) fn f64_to_f32_odd(value: f64) -> f32 {
    let truncated: f32;
    // SAFETY: arithmetic on registers.
    unsafe { asm!("cvt.rz.f32.f64 {0}, {1};", out(reg32) truncated, in(reg64) value, options(pure, nomem, nostack)) };
    // A value beyond the largest binary32 becomes the largest, whose last bit is set; a NaN stays a NaN.
    let is_cut = truncated as f64 != value;
    f32::from_bits(truncated.to_bits() | is_cut as u32)
}

/// `x × y + z`, rounded once.
#[inline(always)]
pub(crate) fn multiply_add(x: f64, y: f64, z: f64) -> f64 {
    let total: f64;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("fma.rn.f64 {0}, {1}, {2}, {3};", out(reg64) total, in(reg64) x, in(reg64) y, in(reg64) z,
            options(pure, nomem, nostack))
    };
    total
}

/// The square root, rounded once.
#[inline(always)]
pub(crate) fn sqrt_f32(value: f32) -> f32 {
    let root: f32;
    // SAFETY: arithmetic on registers.
    unsafe { asm!("sqrt.rn.f32 {0}, {1};", out(reg32) root, in(reg32) value, options(pure, nomem, nostack)) };
    root
}

/// The square root, rounded once.
#[inline(always)]
pub(crate) fn sqrt_f64(value: f64) -> f64 {
    let root: f64;
    // SAFETY: arithmetic on registers.
    unsafe { asm!("sqrt.rn.f64 {0}, {1};", out(reg64) root, in(reg64) value, options(pure, nomem, nostack)) };
    root
}

/// The panic handler; no kernel contains a panic, which a test of the PTX asserts. `cuda_std` has its own.
#[cfg(not(feature = "cuda_std"))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: ends the kernel with an error that the host sees.
    unsafe { core::arch::nvptx::trap() }
}
