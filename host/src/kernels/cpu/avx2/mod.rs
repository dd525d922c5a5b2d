//! Loops over eight elements at a time with AVX2, F16C and FMA, where the compiler does not generate good code from the formulas.
//!
//! A conversion of f16 is one instruction here and a dozen in the formula, bf16 is packed directly, elements stay in registers from load to
//! store, and large results are written with non-temporal stores. Every function returns the bits of the formula that it replaces, except
//! for NaN payloads; a tail of fewer than eight elements uses the formula itself. Only products that are exact are fused with their
//! addition.

mod lanes;
mod products;

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch, _mm_sfence};
use std::ops::Deref;

use gradsync_device::math::{Element as Formula, elementwise};

use self::lanes::{Lanes, Narrow, Wide, store_bytes};
pub(super) use self::products::add_products;
use crate::dtype::DType;
use crate::kernels::cpu::BLOCK_LEN;
use crate::kernels::cpu::products::Halfway;
use crate::slice::{Element, storage};

/// Elements per step of each loop here.
const STEP: usize = 8;

/// Elements between two prefetches: a cache line of the narrowest dtypes.
const GROUP: usize = 32;
/// The prefetch distance. The hardware's own prefetching ends at the page boundary, and stays too close to the loop.
const PREFETCH_BYTES: usize = 4096;

/// Prefetches a group of elements ahead of the loop into the second-level cache: the blocks of several vectors fill the first.
///
/// # Safety
/// The processor has the instruction set. Any address may be prefetched, valid or not.
#[inline(always)]
pub(super) unsafe fn prefetch<T>(from: *const T) {
    for line in (0..GROUP * size_of::<T>()).step_by(64) {
        // SAFETY: prefetching does not access memory.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast::<i8>().wrapping_add(PREFETCH_BYTES + line)) };
    }
}

/// Runs the first block for every group of elements from `$begin` to `$end` and the second for every step, in groups first.
///
/// Both halves of the range are processed concurrently: one core gets a third more memory bandwidth from two read positions. This is a
/// macro, because a closure may not be inlined, and would then lack the instruction set of the enclosing function.
macro_rules! each_step {
    ($begin:expr, $end:expr, $group:ident => $fetch:block, $step:ident => $work:block) => {
        let (begin, end): (usize, usize) = ($begin, $end);
        let half = (end - begin) / (2 * GROUP) * GROUP;
        for at in (begin..begin + half).step_by(GROUP) {
            for $group in [at, at + half] {
                $fetch
                for $step in ($group..$group + GROUP).step_by(STEP) $work
            }
        }
        for $step in (begin + 2 * half..end).step_by(STEP) $work
    };
}

const fn is_wide<A: Formula, B: Formula>() -> bool {
    matches!(A::DTYPE, DType::F64) || matches!(B::DTYPE, DType::F64)
}

/// Applies `elementwise::cast` to every element; `stream` selects non-temporal stores.
///
/// # Safety
/// The machine has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn cast<S: Formula, D: Formula>(dst: &mut [D], src: &[S], stream: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        match (is_wide::<S, D>(), stream) {
            (false, false) => map::<Narrow, S, D, false, false>(dst, src, 1.0),
            (false, true) => map::<Narrow, S, D, false, true>(dst, src, 1.0),
            (true, false) => map::<Wide, S, D, false, false>(dst, src, 1.0),
            (true, true) => map::<Wide, S, D, false, true>(dst, src, 1.0),
        }
    }
}

/// Applies `elementwise::cast` to every element; the elements are in the cache.
///
/// # Safety
/// The machine has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn cast_near<S: Formula, D: Formula>(dst: &mut [D], src: &[S]) {
    let len = dst.len().min(src.len());
    let end = len / STEP * STEP;
    let (to, from) = (dst.as_mut_ptr(), src.as_ptr());
    for first in (0..end).step_by(STEP) {
        // SAFETY: the caller's promise; steps lie within both slices.
        unsafe {
            if is_wide::<S, D>() {
                Wide::load(from.add(first)).store::<D, false>(to.add(first));
            } else {
                Narrow::load(from.add(first)).store::<D, false>(to.add(first));
            }
        }
    }
    dst[end..len].iter_mut().zip(&src[end..len]).for_each(|(to, &from)| *to = elementwise::cast(from));
}

/// Applies `elementwise::scale` to every element; `stream` selects non-temporal stores.
///
/// # Safety
/// The machine has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn scale<S: Formula, D: Formula>(dst: &mut [D], src: &[S], factor: f64, stream: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        match (is_wide::<S, D>(), stream) {
            (false, false) => map::<Narrow, S, D, true, false>(dst, src, factor),
            (false, true) => map::<Narrow, S, D, true, true>(dst, src, factor),
            (true, false) => map::<Wide, S, D, true, false>(dst, src, factor),
            (true, true) => map::<Wide, S, D, true, true>(dst, src, factor),
        }
    }
}

/// Computes `dst[i] = D(src[i])`, multiplied by `factor` in the working precision if `SCALED` is set.
///
/// # Safety
/// The machine has AVX2 and F16C.
#[inline(always)]
unsafe fn map<L: Lanes, S: Formula, D: Formula, const SCALED: bool, const STREAM: bool>(
    dst: &mut [D],
    src: &[S],
    factor: f64,
) {
    let len = dst.len().min(src.len());
    let formula = |from: S| if SCALED { elementwise::scale(from, factor) } else { elementwise::cast(from) };
    let begin = if STREAM { dst.as_ptr().align_offset(store_bytes::<D>()).min(len) } else { 0 };
    let end = begin + (len - begin) / STEP * STEP;
    dst[..begin].iter_mut().zip(&src[..begin]).for_each(|(to, &from)| *to = formula(from));
    // SAFETY: the caller's promise; steps lie within both slices, and begin where the destination is aligned for streaming.
    unsafe {
        let factor = L::splat(factor);
        let (to, from) = (dst.as_mut_ptr(), src.as_ptr());
        each_step!(begin, end, first => { prefetch(from.wrapping_add(first)) }, first => {
            let value = L::load(from.add(first));
            let value = if SCALED { value.multiply(factor) } else { value };
            value.store::<D, STREAM>(to.add(first));
        });
        if STREAM {
            // Non-temporal stores are not ordered with other stores: the fence makes them visible before another thread is notified of
            // their completion.
            _mm_sfence();
        }
    }
    dst[end..len].iter_mut().zip(&src[end..len]).for_each(|(to, &from)| *to = formula(from));
}

/// Applies `elementwise::accumulate` to every element.
///
/// # Safety
/// The machine has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn accumulate<T: Formula, G: Formula>(sum: &mut [T], value: &[G]) {
    // SAFETY: the caller's promise.
    unsafe {
        if is_wide::<T, G>() {
            accumulate_in::<Wide, T, G>(sum, value)
        } else {
            accumulate_in::<Narrow, T, G>(sum, value)
        }
    }
}

/// Computes [`accumulate`] in one working precision.
///
/// # Safety
/// The machine has AVX2 and F16C.
#[inline(always)]
unsafe fn accumulate_in<L: Lanes, T: Formula, G: Formula>(sum: &mut [T], value: &[G]) {
    let len = sum.len().min(value.len());
    let end = len / STEP * STEP;
    let (to, from) = (sum.as_mut_ptr(), value.as_ptr());
    // SAFETY: the caller's promise; steps lie within both slices.
    unsafe {
        each_step!(0, end, first => {
            prefetch(to.wrapping_add(first).cast_const());
            prefetch(from.wrapping_add(first));
        }, first => {
            let to = to.add(first);
            L::load(to.cast_const()).add(L::load(from.add(first))).store::<T, false>(to);
        });
    }
    sum[end..len].iter_mut().zip(&value[end..len]).for_each(|(to, &from)| *to = elementwise::accumulate(*to, from));
}

/// Adds to each of `sums` the weighted elements of all vectors from `begin` on, in the order of the vectors.
///
/// # Safety
/// The machine has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn add_all_weighted<T: Element, V: Deref<Target = [T]>>(
    sums: &mut [f64],
    vectors: &[V],
    begin: usize,
    weights: &[f64],
) {
    let len = sums.len();
    assert!(vectors.iter().all(|vector| begin + len <= vector.len()), "a block of {len} from {begin} exceeds a vector");
    let end = len / GROUP * GROUP;
    for first in (0..end).step_by(GROUP) {
        // SAFETY: the caller's promise; the group lies within the sums and within every vector.
        unsafe {
            let to = sums.as_mut_ptr().add(first);
            let mut totals = [Wide::splat(0.0); GROUP / STEP];
            for (step, total) in totals.iter_mut().enumerate() {
                *total = Wide::load(to.add(step * STEP).cast_const());
            }
            for (vector, &weight) in vectors.iter().zip(weights) {
                let from = vector.as_ptr().cast::<T::Storage>().add(begin + first);
                prefetch(from);
                let weight = Wide::splat(weight);
                for (step, total) in totals.iter_mut().enumerate() {
                    *total = total.add(Wide::load(from.add(step * STEP)).multiply(weight));
                }
            }
            for (step, total) in totals.into_iter().enumerate() {
                total.store::<f64, false>(to.add(step * STEP));
            }
        }
    }
    for (vector, &weight) in vectors.iter().zip(weights) {
        // SAFETY: the caller's promise.
        unsafe { add_weighted(&mut sums[end..], storage(&vector[begin + end..]), weight) };
    }
}

/// Like [`add_all_weighted`], for 16-bit elements. They are widened to `f32` in `halfway` one group ahead of the sums: that halves the
/// number of widening instructions, and overlaps memory accesses with arithmetic.
///
/// # Safety
/// The machine has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn add_all_weighted_short<T: Element, V: Deref<Target = [T]>>(
    sums: &mut [f64],
    halfway: &mut [Halfway],
    vectors: &[V],
    begin: usize,
    weights: &[f64],
) {
    let len = sums.len();
    assert!(vectors.iter().all(|vector| begin + len <= vector.len()), "a block of {len} from {begin} exceeds a vector");
    assert!(len <= BLOCK_LEN && size_of::<T>() == 2);
    let end = len / GROUP * GROUP;
    // The first iteration only widens the first group.
    for next in (0..end + GROUP).step_by(GROUP) {
        // SAFETY: the caller's promise; groups lie within the sums, every vector and every block.
        unsafe {
            let mut totals = [Wide::splat(0.0); GROUP / STEP];
            let current = next.wrapping_sub(GROUP);
            if next > 0 {
                for (step, total) in totals.iter_mut().enumerate() {
                    *total = Wide::load(sums.as_ptr().add(current + step * STEP));
                }
            }
            for ((vector, halfway), &weight) in vectors.iter().zip(halfway.iter_mut()).zip(weights) {
                let halfway = halfway.as_mut_ptr();
                if next < end {
                    let from = vector.as_ptr().cast::<T::Storage>().add(begin + next);
                    prefetch(from);
                    for step in (0..GROUP).step_by(STEP) {
                        Narrow::load(from.add(step)).store::<f32, false>(halfway.add(next + step));
                    }
                }
                if next > 0 {
                    let weight = Wide::splat(weight);
                    for (step, total) in totals.iter_mut().enumerate() {
                        let from = halfway.add(current + step * STEP).cast_const();
                        *total = total.add(Wide::load(from).multiply(weight));
                    }
                }
            }
            if next > 0 {
                for (step, total) in totals.into_iter().enumerate() {
                    total.store::<f64, false>(sums.as_mut_ptr().add(current + step * STEP));
                }
            }
        }
    }
    for (vector, &weight) in vectors.iter().zip(weights) {
        // SAFETY: the caller's promise.
        unsafe { add_weighted(&mut sums[end..], storage(&vector[begin + end..]), weight) };
    }
}

/// Applies `elementwise::add_weighted` to every element.
///
/// # Safety
/// The machine has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn add_weighted<T: Formula>(totals: &mut [f64], src: &[T], weight: f64) {
    let len = totals.len().min(src.len());
    let end = len / STEP * STEP;
    let (to, from) = (totals.as_mut_ptr(), src.as_ptr());
    // SAFETY: the caller's promise; steps lie within both slices.
    unsafe {
        let weight = Wide::splat(weight);
        each_step!(0, end, first => { prefetch(from.wrapping_add(first)) }, first => {
            let to = to.add(first);
            let term = Wide::load(from.add(first)).multiply(weight);
            Wide::load(to.cast_const()).add(term).store::<f64, false>(to);
        });
    }
    let rest = totals[end..len].iter_mut().zip(&src[end..len]);
    rest.for_each(|(to, &from)| *to = elementwise::add_weighted(*to, weight, from.to_f64()));
}
