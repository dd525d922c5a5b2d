//! Widening of blocks in the cache to f64.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use gradsync_device::math::Element as Formula;

use super::lanes::{CONSTANTS, changed, load_wide};
use super::{GROUP, NEAR_BYTES};
use crate::dtype::DType;
use crate::kernels::cpu::avx2;

/// Computes `block[i] = f64(src[i])` for the length of the shorter slice.
///
/// # Safety
/// The machine has the instruction sets that [`isa`](crate::kernels::cpu::isa) requires for AVX-512.
pub(in crate::kernels::cpu) unsafe fn widen<T: Formula>(block: &mut [f64], src: &[T]) {
    let len = block.len().min(src.len());
    let end = len / GROUP * GROUP;
    for first in (0..end).step_by(GROUP) {
        // SAFETY: the caller's promise; groups lie within both slices.
        unsafe {
            let from = src.as_ptr().add(first);
            _mm_prefetch::<_MM_HINT_T0>(from.cast::<i8>().wrapping_add(NEAR_BYTES));
            widen_group(block.as_mut_ptr().add(first), from);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { avx2::cast_near(&mut block[end..len], &src[end..len]) };
}

/// Widens 32 elements.
///
/// # Safety
/// The machine has these instruction sets; both pointers are valid for 32 elements.
#[inline(always)]
unsafe fn widen_group<T: Formula>(to: *mut f64, from: *const T) {
    macro_rules! group {
        ($dtype:ident) => {
            changed!(
                "// {constants}",
                load_wide!($dtype, "{from}", 16, 17, 18, 19),
                "vmovupd [{to}], zmm16",
                "vmovupd [{to} + 64], zmm17",
                "vmovupd [{to} + 128], zmm18",
                "vmovupd [{to} + 192], zmm19",
                to = in(reg) to, from = in(reg) from, constants = in(reg) &CONSTANTS
            )
        };
    }
    // SAFETY: the caller's promise.
    unsafe {
        match T::DTYPE {
            DType::F64 => group!(f64),
            DType::F32 => group!(f32),
            DType::F16 => group!(f16),
            DType::BF16 => group!(bf16),
        }
    }
}
