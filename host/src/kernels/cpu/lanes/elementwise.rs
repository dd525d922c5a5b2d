//! Loops that compute each element from one of a source, and from the element that is replaced.

use std::arch::x86_64::_mm_sfence;

use gradsync_device::math::Element as Formula;

use super::{GROUP, LaneGroup, Lanes, Narrow, Wide, on_lanes, prefetch};
use crate::dtype::DType;

/// The alignment of stores. Non-temporal stores require it; other unaligned stores would write to two cache lines each.
const LINE_BYTES: usize = 64;
/// The number of elements from which aligned stores save more time than the group before them takes.
const LONG: usize = 1024;
/// The prefetch distance. The hardware's own prefetching ends at the page boundary, and stays too close to the loop.
const AHEAD_BYTES: usize = 4096;

on_lanes! {
    /// Applies `elementwise::cast` to every element; `stream` selects non-temporal stores.
    pub(in crate::kernels::cpu) fn cast<L, S: Formula, D: Formula>(dst: &mut [D], src: &[S], stream: bool) {
        // SAFETY: the caller's promise, here and below. The access is a constant in each of the calls.
        unsafe {
            if stream {
                update::<L, S, D>(dst, src, Operation::Cast, Access::Stream);
            } else {
                update::<L, S, D>(dst, src, Operation::Cast, Access::Far);
            }
        }
    }
}

on_lanes! {
    /// Applies `elementwise::cast` to every element; the elements are in the cache.
    pub(in crate::kernels::cpu) fn cast_near<L, S: Formula, D: Formula>(dst: &mut [D], src: &[S]) {
        // SAFETY: as above.
        unsafe { update::<L, S, D>(dst, src, Operation::Cast, Access::Near) }
    }
}

on_lanes! {
    /// Applies `elementwise::scale` to every element; `stream` selects non-temporal stores.
    pub(in crate::kernels::cpu) fn scale<L, S: Formula, D: Formula>(
        dst: &mut [D],
        src: &[S],
        factor: f64,
        stream: bool,
    ) {
        // SAFETY: as above.
        unsafe {
            if stream {
                update::<L, S, D>(dst, src, Operation::Scale(factor), Access::Stream);
            } else {
                update::<L, S, D>(dst, src, Operation::Scale(factor), Access::Far);
            }
        }
    }
}

on_lanes! {
    /// Applies `elementwise::accumulate` to every element.
    pub(in crate::kernels::cpu) fn accumulate<L, T: Formula, G: Formula>(sum: &mut [T], value: &[G]) {
        // SAFETY: as above; every set includes AVX2.
        unsafe {
            if size_of::<T>() == 2 {
                update::<L, G, T>(sum, value, Operation::Accumulate, Access::Far);
            } else {
                // With registers of 64 bytes, sums of f32 that exceed the caches take up to 1.3 times as long.
                update::<x86::Avx2, G, T>(sum, value, Operation::Accumulate, Access::Far);
            }
        }
    }
}

on_lanes! {
    /// Applies `elementwise::add_weighted` to every element.
    pub(in crate::kernels::cpu) fn add_weighted<L, T: Formula>(totals: &mut [f64], src: &[T], weight: f64) {
        // SAFETY: as above.
        unsafe { update::<L, T, f64>(totals, src, Operation::AddWeighted(weight), Access::Far) }
    }
}

/// The computation of an element.
#[derive(Clone, Copy)]
enum Operation {
    Cast,
    Scale(f64),
    Accumulate,
    AddWeighted(f64),
}

/// Where the elements are.
#[derive(Clone, Copy, PartialEq)]
enum Access {
    /// In the cache.
    Near,
    /// Anywhere.
    Far,
    /// Anywhere; the results are written with non-temporal stores.
    Stream,
}

/// Applies an operation to every element, for the length of the shorter slice. Operation and access are constants after inlining.
///
/// # Safety
/// The machine has the instruction set.
#[inline(always)]
unsafe fn update<L: Lanes, S: Formula, D: Formula>(dst: &mut [D], src: &[S], operation: Operation, access: Access) {
    // SAFETY: the caller's promise.
    unsafe {
        if matches!(S::DTYPE, DType::F64) || matches!(D::DTYPE, DType::F64) {
            update_in::<Wide<L>, S, D>(dst, src, operation, access);
        } else {
            update_in::<Narrow<L>, S, D>(dst, src, operation, access);
        }
    }
}

/// Computes [`update`] in one working precision.
///
/// Both halves of the range are processed concurrently: one core gets a third more memory bandwidth from two read positions.
///
/// # Safety
/// The machine has the instruction set.
#[inline(always)]
unsafe fn update_in<G: LaneGroup, S: Formula, D: Formula>(
    dst: &mut [D],
    src: &[S],
    operation: Operation,
    access: Access,
) {
    let len = dst.len().min(src.len());
    let is_short = size_of::<D>() == 2 && len >= LONG;
    let is_aligned = access == Access::Stream || access == Access::Far && is_short;
    let begin = if is_aligned { dst.as_ptr().align_offset(LINE_BYTES).min(len) } else { 0 };
    let half = (len - begin) / (2 * GROUP) * GROUP;
    let end = begin + (len - begin) / GROUP * GROUP;
    // SAFETY: the caller's promise; groups lie within both slices, and begin where the destination is aligned for streaming.
    unsafe {
        let factor = match operation {
            Operation::Scale(factor) | Operation::AddWeighted(factor) => G::splat(factor),
            Operation::Cast | Operation::Accumulate => G::splat(1.0),
        };
        // Elements that do not depend on the destination may be computed twice, which takes less time than copies of parts.
        let is_repeatable = len >= GROUP && matches!(operation, Operation::Cast | Operation::Scale(_));
        let (to, from) = (dst.as_mut_ptr(), src.as_ptr());
        if !is_repeatable {
            update_part::<G, S, D>(to, from, begin, operation, factor);
        } else if begin > 0 {
            update_group::<G, S, D>(to, from, operation, factor, Access::Near);
        }
        for first in (begin..begin + half).step_by(GROUP) {
            for first in [first, first + half] {
                if access != Access::Near {
                    if matches!(operation, Operation::Accumulate) {
                        prefetch(to.wrapping_add(first).cast_const(), AHEAD_BYTES);
                    }
                    prefetch(from.wrapping_add(first), AHEAD_BYTES);
                }
                update_group::<G, S, D>(to.add(first), from.add(first), operation, factor, access);
            }
        }
        if begin + 2 * half < end {
            update_group::<G, S, D>(to.add(end - GROUP), from.add(end - GROUP), operation, factor, access);
        }
        if !is_repeatable {
            update_part::<G, S, D>(to.add(end), from.add(end), len - end, operation, factor);
        } else if end < len {
            update_group::<G, S, D>(to.add(len - GROUP), from.add(len - GROUP), operation, factor, Access::Near);
        }
        if access == Access::Stream {
            // Non-temporal stores are not ordered with other stores: the fence makes them visible before another thread is notified of
            // their completion.
            _mm_sfence();
        }
    }
}

/// Applies an operation to less than a group, by a copy.
///
/// # Safety
/// The machine has the instruction set; both pointers are valid for `len` elements.
#[inline(always)]
unsafe fn update_part<G: LaneGroup, S: Formula, D: Formula>(
    to: *mut D,
    from: *const S,
    len: usize,
    operation: Operation,
    factor: G,
) {
    if len == 0 {
        return;
    }
    let (mut old, mut values) = ([D::from_f32(0.0); GROUP], [S::from_f32(0.0); GROUP]);
    // SAFETY: the caller's promise; a part is shorter than a group.
    unsafe {
        old.as_mut_ptr().copy_from_nonoverlapping(to, len);
        values.as_mut_ptr().copy_from_nonoverlapping(from, len);
        update_group::<G, S, D>(old.as_mut_ptr(), values.as_ptr(), operation, factor, Access::Near);
        to.copy_from_nonoverlapping(old.as_ptr(), len);
    }
}

/// Applies an operation to a group.
///
/// # Safety
/// The machine has the instruction set; both pointers are valid for a group, and `to` is aligned to a cache line for streaming.
#[inline(always)]
unsafe fn update_group<G: LaneGroup, S: Formula, D: Formula>(
    to: *mut D,
    from: *const S,
    operation: Operation,
    factor: G,
    access: Access,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let value = G::load(from);
        let value = match operation {
            Operation::Cast => value,
            Operation::Scale(_) => value.multiply(factor),
            Operation::Accumulate => G::load(to.cast_const()).add(value),
            Operation::AddWeighted(_) => G::load(to.cast_const()).add(value.multiply(factor)),
        };
        value.store(to, access == Access::Stream);
    }
}
