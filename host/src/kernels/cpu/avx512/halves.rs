//! Results of 16 bits from any dtype, 32 elements at a time, so that a whole cache line is written at once.
//!
//! With `f64` sources these loops are limited by memory reads; fewer instructions between two cache lines let a core have more reads in
//! flight.

use gradsync_device::math::Element as Formula;

use super::GROUP;
use super::lanes::{CONSTANTS, changed, cut, load_narrow, load_wide, pack};
use crate::dtype::DType;
use crate::kernels::cpu::avx2;

/// The alignment of stores. Non-temporal stores require it; other unaligned stores would write to two cache lines each.
const LINE_BYTES: usize = 64;

/// Applies `elementwise::cast` to every element, to 16 bits; `stream` selects non-temporal stores.
///
/// # Safety
/// The machine has the instruction sets that [`isa`](crate::kernels::cpu::isa) requires for AVX-512.
pub(in crate::kernels::cpu) unsafe fn cast<S: Formula, D: Formula>(dst: &mut [D], src: &[S], stream: bool) {
    let len = dst.len().min(src.len());
    let begin = dst.as_ptr().align_offset(LINE_BYTES).min(len);
    let (to, from) = (dst.as_mut_ptr(), src.as_ptr());
    // SAFETY: the caller's promise; groups lie within both slices, and begin where the destination is aligned for
    // streaming.
    let end = unsafe {
        avx2::cast(&mut dst[..begin], &src[..begin], false);
        let end = each_group(begin, len, |first| {
            avx2::prefetch(from.wrapping_add(first));
            cast_group(to.add(first), from.add(first), stream);
        });
        if stream {
            // Non-temporal stores are not ordered with other stores: the fence makes them visible before another thread is notified of
            // their completion.
            std::arch::x86_64::_mm_sfence();
        }
        end
    };
    // SAFETY: the caller's promise.
    unsafe { avx2::cast(&mut dst[end..len], &src[end..len], false) };
}

/// Applies `elementwise::cast` to every element, to 16 bits; the elements are in the cache.
///
/// # Safety
/// The condition of [`cast`].
pub(in crate::kernels::cpu) unsafe fn cast_near<S: Formula, D: Formula>(dst: &mut [D], src: &[S]) {
    let len = dst.len().min(src.len());
    let end = len / GROUP * GROUP;
    let (to, from) = (dst.as_mut_ptr(), src.as_ptr());
    for first in (0..end).step_by(GROUP) {
        // SAFETY: the caller's promise; groups lie within both slices.
        unsafe { cast_group(to.add(first), from.add(first), false) };
    }
    // SAFETY: the caller's promise.
    unsafe { avx2::cast_near(&mut dst[end..len], &src[end..len]) };
}

/// Applies `elementwise::accumulate` to every element, with sums of 16 bits.
///
/// # Safety
/// The condition of [`cast`].
pub(in crate::kernels::cpu) unsafe fn accumulate<T: Formula, G: Formula>(sum: &mut [T], value: &[G]) {
    let len = sum.len().min(value.len());
    let begin = sum.as_ptr().align_offset(LINE_BYTES).min(len);
    let (to, from) = (sum.as_mut_ptr(), value.as_ptr());
    // SAFETY: the caller's promise; groups lie within both slices.
    unsafe {
        avx2::accumulate(&mut sum[..begin], &value[..begin]);
        let end = each_group(begin, len, |first| {
            avx2::prefetch(to.wrapping_add(first).cast_const());
            avx2::prefetch(from.wrapping_add(first));
            accumulate_group(to.add(first), from.add(first));
        });
        avx2::accumulate(&mut sum[end..len], &value[end..len]);
    }
}

/// Runs `work` for each whole group of elements from `begin` on, alternating between both halves of the range; returns the end of the last
/// group.
#[inline(always)]
fn each_group(begin: usize, end: usize, mut work: impl FnMut(usize)) -> usize {
    let half = (end - begin) / (2 * GROUP) * GROUP;
    for first in (begin..begin + half).step_by(GROUP) {
        work(first);
        work(first + half);
    }
    begin + 2 * half
}

/// Assembly that leaves 32 elements in register 20, and stores that register.
macro_rules! group {
    ($to:ident, $from:ident, $store:literal, $($piece:expr),*) => {
        changed!(
            // Not every piece needs every operand.
            "// {constants}",
            $($piece,)*
            $store,
            to = in(reg) $to, from = in(reg) $from, constants = in(reg) &CONSTANTS
        )
    };
    ($to:ident, $from:ident, $stream:expr, $($piece:expr),*) => {
        if $stream {
            group!($to, $from, "vmovntdq [{to}], zmm20", $($piece),*)
        } else {
            group!($to, $from, "vmovdqu64 [{to}], zmm20", $($piece),*)
        }
    };
}

/// Runs the caller's macro for the dtypes of source and result: `wide!(to)` from f64, else `narrow!(from, to)`.
macro_rules! by_dtypes {
    ($from:expr, $to:expr, $wide:ident, $narrow:ident) => {
        match ($from, $to) {
            (DType::F64, DType::F16) => $wide!(f16),
            (DType::F64, DType::BF16) => $wide!(bf16),
            (DType::F32, DType::F16) => $narrow!(f32, f16),
            (DType::F32, DType::BF16) => $narrow!(f32, bf16),
            (DType::F16, DType::F16) => $narrow!(f16, f16),
            (DType::F16, DType::BF16) => $narrow!(f16, bf16),
            (DType::BF16, DType::F16) => $narrow!(bf16, f16),
            (DType::BF16, DType::BF16) => $narrow!(bf16, bf16),
            (_, DType::F64 | DType::F32) => unreachable!("results have 16 bits"),
        }
    };
}

/// Casts 32 elements.
///
/// # Safety
/// The condition of [`cast`]; both pointers are valid for 32 elements, and `to` is aligned to a cache line if `stream` is set.
#[inline(always)]
unsafe fn cast_group<S: Formula, D: Formula>(to: *mut D, from: *const S, stream: bool) {
    macro_rules! narrow {
        ($source:ident, $result:ident) => {
            group!(to, from, stream, load_narrow!($source, "{from}", 20, 21), pack!($result))
        };
    }
    macro_rules! wide {
        ($result:ident) => {
            group!(to, from, stream, load_wide!(f64, "{from}", 16, 17, 18, 19), cut!(), pack!($result))
        };
    }
    // SAFETY: the caller's promise.
    unsafe { by_dtypes!(S::DTYPE, D::DTYPE, wide, narrow) }
}

/// Accumulates 32 elements.
///
/// # Safety
/// The condition of [`cast`]; both pointers are valid for 32 elements.
#[inline(always)]
unsafe fn accumulate_group<T: Formula, G: Formula>(to: *mut T, from: *const G) {
    macro_rules! narrow {
        ($value:ident, $sum:ident) => {
            group!(
                to,
                from,
                "vmovdqu64 [{to}], zmm20",
                load_narrow!($sum, "{to}", 20, 21),
                load_narrow!($value, "{from}", 22, 23),
                "vaddps zmm20, zmm20, zmm22",
                "vaddps zmm21, zmm21, zmm23",
                pack!($sum)
            )
        };
    }
    macro_rules! wide {
        ($sum:ident) => {
            group!(
                to,
                from,
                "vmovdqu64 [{to}], zmm20",
                load_wide!($sum, "{to}", 16, 17, 18, 19),
                "vaddpd zmm16, zmm16, [{from}]",
                "vaddpd zmm17, zmm17, [{from} + 64]",
                "vaddpd zmm18, zmm18, [{from} + 128]",
                "vaddpd zmm19, zmm19, [{from} + 192]",
                cut!(),
                pack!($sum)
            )
        };
    }
    // SAFETY: the caller's promise.
    unsafe { by_dtypes!(G::DTYPE, T::DTYPE, wide, narrow) }
}
