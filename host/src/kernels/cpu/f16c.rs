//! binary16 in hardware: where the machine has F16C, blocks of f16 go through `half`'s conversions and an `f32` copy in the cache.
//!
//! The formula that converts f16 in integer arithmetic costs a dozen vector instructions an element, F16C an eighth of one. Both
//! give the same bits, and so do the loops, because every value of f16 is one of `f32` and results are rounded from `f32` anyway;
//! only pairs with `f64`, whose results are rounded from `f64`, must not come this way. bf16 needs none of this: its conversions
//! are a shift and an addition.

use gradsync_device::math::Element as Formula;
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::BLOCK_LEN;
use crate::dtype::DType;

/// Whether elements of `T` are f16 which this machine converts in hardware.
#[inline]
fn is_hardware_f16<T: Formula>() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = super::isa::has_avx2();
    #[cfg(not(target_arch = "x86_64"))]
    let has = false;
    matches!(T::DTYPE, DType::F16) && has
}

/// The slice as f16, if this module serves it.
#[inline]
pub(super) fn view<T: Formula>(data: &[T]) -> Option<&[f16]> {
    // SAFETY: `T` is f16 by its dtype, in another wrapper of the same 16 bits.
    is_hardware_f16::<T>().then(|| unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) })
}

/// As [`view`], to write.
#[inline]
pub(super) fn view_mut<T: Formula>(data: &mut [T]) -> Option<&mut [f16]> {
    // SAFETY: as above, and the borrow stays unique.
    is_hardware_f16::<T>().then(|| unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), data.len()) })
}

/// Calls `work(dst, src)` on blocks of the two slices, with the source as `f32`.
pub(super) fn widened<D>(dst: &mut [D], src: &[f16], work: impl Fn(&mut [D], &[f32])) {
    let mut wide = [0.0; BLOCK_LEN];
    for (dst, src) in dst.chunks_mut(BLOCK_LEN).zip(src.chunks(BLOCK_LEN)) {
        let wide = &mut wide[..src.len()];
        src.convert_to_f32_slice(wide);
        work(dst, wide);
    }
}

/// Calls `work(dst, src)` on blocks of the two slices, with the destination as `f32` that is rounded afterwards.
pub(super) fn narrowed<S>(dst: &mut [f16], src: &[S], work: impl Fn(&mut [f32], &[S])) {
    let mut wide = [0.0; BLOCK_LEN];
    for (dst, src) in dst.chunks_mut(BLOCK_LEN).zip(src.chunks(BLOCK_LEN)) {
        let wide = &mut wide[..src.len()];
        work(wide, src);
        dst.convert_from_f32_slice(wide);
    }
}

/// As [`narrowed`], where `work` finds the destination's old values.
pub(super) fn updated<S>(dst: &mut [f16], src: &[S], work: impl Fn(&mut [f32], &[S])) {
    let mut wide = [0.0; BLOCK_LEN];
    for (dst, src) in dst.chunks_mut(BLOCK_LEN).zip(src.chunks(BLOCK_LEN)) {
        let wide = &mut wide[..src.len()];
        dst.convert_to_f32_slice(wide);
        work(wide, src);
        dst.convert_from_f32_slice(wide);
    }
}
