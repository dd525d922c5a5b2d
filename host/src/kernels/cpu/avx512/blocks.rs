//! Blocks in the cache: widened to f64, and weighted sums of any number of vectors, 32 elements of all of them at a
//! time.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::ops::Deref;

use gradsync_device::math::Element as Formula;

use super::lanes::{CONSTANTS, changed, load_wide};
use super::{GROUP, NEAR_BYTES};
use crate::dtype::{DType, Element, storage};
use crate::kernels::cpu::avx2;

/// `f64(src[i])`, as far as both go.
///
/// # Safety
/// The machine has what [`isa`](crate::kernels::cpu::isa) asks for AVX-512.
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
/// As [`widen`]; both pointers are valid for 32 elements.
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

/// Adds to each of `sums` the weighted elements of all vectors from `begin` on, in the order of the vectors.
///
/// # Safety
/// As [`widen`].
pub(in crate::kernels::cpu) unsafe fn add_all_weighted<T: Element, V: Deref<Target = [T]>>(
    sums: &mut [f64],
    vectors: &[V],
    begin: usize,
    weights: &[f64],
) {
    let len = sums.len();
    assert!(vectors.iter().all(|vector| begin + len <= vector.len()), "a block of {len} from {begin} exceeds a vector");
    let weights = &weights[..vectors.len()];
    let end = len / GROUP * GROUP;
    for (vectors, weights) in vectors.chunks(TURN).zip(weights.chunks(TURN)) {
        let mut pointers = [std::ptr::null(); TURN];
        for (pointer, vector) in pointers.iter_mut().zip(vectors) {
            *pointer = vector.as_ptr().cast::<T::Storage>().wrapping_add(begin);
        }
        for first in (0..end).step_by(GROUP) {
            // SAFETY: the caller's promise; groups lie within the sums and within every vector.
            unsafe {
                let sums = sums.as_mut_ptr().add(first);
                add_group(sums, &pointers[..vectors.len()], first, weights);
            }
        }
    }
    for (vector, &weight) in vectors.iter().zip(weights) {
        // SAFETY: the caller's promise.
        unsafe { avx2::add_weighted(&mut sums[end..], storage(&vector[begin + end..]), weight) };
    }
}

/// Vectors whose addresses are at hand at a time.
const TURN: usize = 16;

/// Adds to 32 sums the weighted elements of all vectors, which are at least one, from `first` on.
///
/// # Safety
/// As [`widen`]; `sums` are valid for 32 elements, and so is every vector from `first` on; there are as many weights.
#[inline(always)]
unsafe fn add_group<T: Formula>(sums: *mut f64, vectors: &[*const T], first: usize, weights: &[f64]) {
    macro_rules! group {
        ($dtype:ident, $($fetch:literal),*) => {
            changed!(
                "// {constants}",
                "vmovupd zmm16, [{sums}]",
                "vmovupd zmm17, [{sums} + 64]",
                "vmovupd zmm18, [{sums} + 128]",
                "vmovupd zmm19, [{sums} + 192]",
                "2:",
                "mov {from}, [{vectors}]",
                "add {from}, {offset}",
                "vbroadcastsd zmm26, [{weights}]",
                $($fetch,)*
                load_wide!($dtype, "{from}", 20, 21, 22, 23),
                "vmulpd zmm20, zmm20, zmm26",
                "vmulpd zmm21, zmm21, zmm26",
                "vmulpd zmm22, zmm22, zmm26",
                "vmulpd zmm23, zmm23, zmm26",
                "vaddpd zmm16, zmm16, zmm20",
                "vaddpd zmm17, zmm17, zmm21",
                "vaddpd zmm18, zmm18, zmm22",
                "vaddpd zmm19, zmm19, zmm23",
                "add {vectors}, 8",
                "add {weights}, 8",
                "dec {count}",
                "jnz 2b",
                "vmovupd [{sums}], zmm16",
                "vmovupd [{sums} + 64], zmm17",
                "vmovupd [{sums} + 128], zmm18",
                "vmovupd [{sums} + 192], zmm19",
                sums = in(reg) sums, vectors = inout(reg) vectors.as_ptr() => _, offset = in(reg) size_of::<T>() * first,
                weights = inout(reg) weights.as_ptr() => _, count = inout(reg) vectors.len() => _,
                constants = in(reg) &CONSTANTS, from = out(reg) _, ahead = const NEAR_BYTES
            )
        };
    }
    // SAFETY: the caller's promise. As many cache lines are fetched ahead as a group has.
    unsafe {
        match T::DTYPE {
            DType::F64 => group!(
                f64,
                "prefetcht0 [{from} + {ahead}]",
                "prefetcht0 [{from} + {ahead} + 64]",
                "prefetcht0 [{from} + {ahead} + 128]",
                "prefetcht0 [{from} + {ahead} + 192]"
            ),
            DType::F32 => group!(f32, "prefetcht0 [{from} + {ahead}]", "prefetcht0 [{from} + {ahead} + 64]"),
            DType::F16 => group!(f16, "prefetcht0 [{from} + {ahead}]"),
            DType::BF16 => group!(bf16, "prefetcht0 [{from} + {ahead}]"),
        }
    }
}
