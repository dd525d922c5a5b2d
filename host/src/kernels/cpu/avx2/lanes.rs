//! Eight elements in registers: load and widen, compute, round and store. None of these functions loops.

use std::arch::x86_64::*;

use gradsync_device::math::Element as Formula;

use crate::dtype::DType;

/// Eight elements in the working precision of a pair of dtypes.
pub(super) trait Lanes: Copy {
    /// Widens eight elements.
    ///
    /// # Safety
    /// `from` is valid for eight elements, and the machine has AVX2 and F16C.
    unsafe fn load<T: Formula>(from: *const T) -> Self;

    /// Rounds to eight elements of `T`, once, and stores them.
    ///
    /// # Safety
    /// `to` is valid for eight elements, and aligned to [`store_bytes`] if `STREAM` is set. The machine has AVX2 and F16C.
    unsafe fn store<T: Formula, const STREAM: bool>(self, to: *mut T);

    /// The factor in every lane.
    ///
    /// # Safety
    /// The machine has AVX2 and F16C.
    unsafe fn splat(factor: f64) -> Self;

    /// Adds lane by lane.
    ///
    /// # Safety
    /// The machine has AVX2 and F16C.
    unsafe fn add(self, other: Self) -> Self;

    /// Multiplies lane by lane.
    ///
    /// # Safety
    /// The machine has AVX2 and F16C.
    unsafe fn multiply(self, other: Self) -> Self;
}

/// Eight `f32`, for pairs without `f64`.
#[derive(Clone, Copy)]
pub(super) struct Narrow(__m256);

/// Eight `f64`, for pairs with `f64`.
#[derive(Clone, Copy)]
pub(super) struct Wide(__m256d, __m256d);

/// The size of one store in bytes, to which a non-temporal store must be aligned.
pub(super) const fn store_bytes<T: Formula>() -> usize {
    match T::DTYPE {
        DType::F64 | DType::F32 => 32,
        DType::F16 | DType::BF16 => 16,
    }
}

impl Lanes for Narrow {
    #[inline(always)]
    unsafe fn load<T: Formula>(from: *const T) -> Self {
        // SAFETY: the caller's promise; `T` has the layout of its dtype.
        unsafe {
            Narrow(match T::DTYPE {
                DType::F64 => unreachable!("pairs with f64 work in f64"),
                DType::F32 => _mm256_loadu_ps(from.cast()),
                DType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                DType::BF16 => {
                    let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
                }
            })
        }
    }

    #[inline(always)]
    unsafe fn store<T: Formula, const STREAM: bool>(self, to: *mut T) {
        // SAFETY: as above.
        unsafe {
            let halves = match T::DTYPE {
                DType::F64 => unreachable!("pairs with f64 work in f64"),
                DType::F32 if STREAM => return _mm256_stream_ps(to.cast(), self.0),
                DType::F32 => return _mm256_storeu_ps(to.cast(), self.0),
                DType::F16 => _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0),
                DType::BF16 => to_bf16(self.0),
            };
            if STREAM { _mm_stream_si128(to.cast(), halves) } else { _mm_storeu_si128(to.cast(), halves) }
        }
    }

    #[inline(always)]
    unsafe fn splat(factor: f64) -> Self {
        // SAFETY: as above.
        unsafe { Narrow(_mm256_set1_ps(factor as f32)) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { Narrow(_mm256_add_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn multiply(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { Narrow(_mm256_mul_ps(self.0, other.0)) }
    }
}

impl Lanes for Wide {
    #[inline(always)]
    unsafe fn load<T: Formula>(from: *const T) -> Self {
        // SAFETY: as above.
        unsafe {
            match T::DTYPE {
                DType::F64 => Wide(_mm256_loadu_pd(from.cast()), _mm256_loadu_pd(from.add(4).cast())),
                DType::F32 => {
                    let (low, high) = (_mm_loadu_ps(from.cast()), _mm_loadu_ps(from.add(4).cast()));
                    Wide(_mm256_cvtps_pd(low), _mm256_cvtps_pd(high))
                }
                DType::F16 | DType::BF16 => {
                    let Narrow(all) = Narrow::load(from);
                    Wide(_mm256_cvtps_pd(_mm256_castps256_ps128(all)), _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(all)))
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn store<T: Formula, const STREAM: bool>(self, to: *mut T) {
        // SAFETY: as above.
        unsafe {
            match T::DTYPE {
                DType::F64 if STREAM => {
                    _mm256_stream_pd(to.cast(), self.0);
                    _mm256_stream_pd(to.add(4).cast(), self.1);
                }
                DType::F64 => {
                    _mm256_storeu_pd(to.cast(), self.0);
                    _mm256_storeu_pd(to.add(4).cast(), self.1);
                }
                DType::F32 => self.nearest().store::<T, STREAM>(to),
                DType::F16 | DType::BF16 => self.cut().store::<T, STREAM>(to),
            }
        }
    }

    #[inline(always)]
    unsafe fn splat(factor: f64) -> Self {
        // SAFETY: as above.
        unsafe { Wide(_mm256_set1_pd(factor), _mm256_set1_pd(factor)) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { Wide(_mm256_add_pd(self.0, other.0), _mm256_add_pd(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn multiply(self, other: Self) -> Self {
        // SAFETY: as above.
        unsafe { Wide(_mm256_mul_pd(self.0, other.0), _mm256_mul_pd(self.1, other.1)) }
    }
}

impl Wide {
    /// Rounds to `f32`, to nearest with ties to even.
    ///
    /// # Safety
    /// The machine has AVX2.
    #[inline(always)]
    unsafe fn nearest(self) -> Narrow {
        // SAFETY: the caller's promise.
        unsafe { Narrow(_mm256_set_m128(_mm256_cvtpd_ps(self.1), _mm256_cvtpd_ps(self.0))) }
    }

    /// Truncates to 16 digits and sets the last one if any truncated digit was set (round to odd), so that rounding the result to fewer
    /// digits equals a single rounding (as `f64_to_f32_odd` explains). A subnormal `f32` still holds all 16 digits, down to numbers that
    /// any rounding turns into zero in f16 and bf16.
    ///
    /// # Safety
    /// The machine has AVX2.
    #[inline(always)]
    unsafe fn cut(self) -> Narrow {
        // SAFETY: the caller's promise.
        unsafe { Wide(cut(self.0), cut(self.1)).nearest() }
    }
}

/// Truncates to 16 digits and sets the last one if a later digit was set; infinities and NaN are preserved.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn cut(value: __m256d) -> __m256d {
    // SAFETY: the caller's promise.
    unsafe {
        let (bits, dropped) = (_mm256_castpd_si256(value), _mm256_set1_epi64x((1 << 37) - 1));
        // The sum carries into the last kept digit unless all dropped digits are zero.
        let carried = _mm256_add_epi64(_mm256_and_si256(bits, dropped), dropped);
        _mm256_castsi256_pd(_mm256_andnot_si256(dropped, _mm256_or_si256(bits, carried)))
    }
}

/// Rounds to bf16 by the formula of `f32_to_bf16`.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn to_bf16(value: __m256) -> __m128i {
    // SAFETY: the caller's promise.
    unsafe {
        // A NaN is made quiet and truncated, not rounded: its payload may be in the lower half alone.
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
        let quiet = _mm256_and_si256(is_nan, _mm256_set1_epi32(0x0040_0000));
        let bits = _mm256_or_si256(_mm256_castps_si256(value), quiet);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let bias = _mm256_andnot_si256(is_nan, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let rounded = _mm256_add_epi32(bits, bias);
        // Gathers the upper two bytes of every element, first within each half of the register.
        let upper = _mm256_set1_epi64x(0x0f0e_0b0a_0706_0302);
        let halves = _mm256_shuffle_epi8(rounded, upper);
        _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b10_00>(halves))
    }
}
