//! The registers of AVX2 and of AVX-512.

use std::arch::x86_64::*;

use gradsync_device::math::Element as Formula;

use super::Lanes;
use crate::dtype::DType;

/// Two registers of 32 bytes hold what [`Lanes`] calls one: AVX2, F16C and FMA.
#[derive(Clone, Copy)]
pub(super) struct Avx2;

/// Registers of 64 bytes: AVX-512 F, BW and VL.
#[derive(Clone, Copy)]
pub(super) struct Avx512;

/// Widens eight elements, which are not `f64`, to `f32`.
///
/// # Safety
/// The conditions of [`Lanes`], for AVX2.
#[inline(always)]
unsafe fn load_eight<T: Formula>(from: *const T) -> __m256 {
    // SAFETY: the caller's promise; `T` has the layout of its dtype.
    unsafe {
        match T::DTYPE {
            DType::F32 => _mm256_loadu_ps(from.cast()),
            DType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
            DType::BF16 => {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            }
            _ => unreachable!("pairs with f64 work in f64"),
        }
    }
}

impl Lanes for Avx2 {
    type Wide = [__m256d; 2];
    type Narrow = [__m256; 2];

    const SIDE: usize = 2;
    const HALFWAY: bool = true;

    #[inline(always)]
    unsafe fn load_wide<T: Formula>(from: *const T) -> [__m256d; 2] {
        // SAFETY: the caller's promise, here and below.
        unsafe {
            match T::DTYPE {
                DType::F64 => [_mm256_loadu_pd(from.cast()), _mm256_loadu_pd(from.add(4).cast())],
                DType::F32 => {
                    let (low, high) = (_mm_loadu_ps(from.cast()), _mm_loadu_ps(from.add(4).cast()));
                    [_mm256_cvtps_pd(low), _mm256_cvtps_pd(high)]
                }
                _ => {
                    let all = load_eight(from);
                    let (low, high) = (_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all));
                    [_mm256_cvtps_pd(low), _mm256_cvtps_pd(high)]
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn load_narrow<T: Formula>(from: *const T) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe { [load_eight(from), load_eight(from.add(8))] }
    }

    #[inline(always)]
    unsafe fn store_wide([low, high]: [__m256d; 2], to: *mut f64, stream: bool) {
        // SAFETY: as above.
        unsafe {
            if stream {
                _mm256_stream_pd(to, low);
                _mm256_stream_pd(to.add(4), high);
            } else {
                _mm256_storeu_pd(to, low);
                _mm256_storeu_pd(to.add(4), high);
            }
        }
    }

    #[inline(always)]
    unsafe fn store_narrow([low, high]: [__m256; 2], to: *mut f32, stream: bool) {
        // SAFETY: as above.
        unsafe {
            if stream {
                _mm256_stream_ps(to, low);
                _mm256_stream_ps(to.add(8), high);
            } else {
                _mm256_storeu_ps(to, low);
                _mm256_storeu_ps(to.add(8), high);
            }
        }
    }

    #[inline(always)]
    unsafe fn store_f16(values: [[__m256; 2]; 2], to: *mut u16, stream: bool) {
        for (index, &eight) in values.as_flattened().iter().enumerate() {
            // SAFETY: as above.
            unsafe {
                let (halves, to) = (_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(eight), to.add(index * 8).cast());
                if stream { _mm_stream_si128(to, halves) } else { _mm_storeu_si128(to, halves) }
            }
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(values: [[__m256; 2]; 2], to: *mut u16, stream: bool) {
        /// The bits of the rounded numbers, in the lower half of each lane.
        ///
        /// # Safety
        /// The machine has AVX2.
        #[inline(always)]
        unsafe fn rounded(value: __m256) -> __m256i {
            // SAFETY: the caller's promise.
            unsafe {
                // A NaN is made quiet and truncated, not rounded: its payload may be in the lower half alone.
                let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
                let quiet = _mm256_and_si256(is_nan, _mm256_set1_epi32(0x0040_0000));
                let bits = _mm256_or_si256(_mm256_castps_si256(value), quiet);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let bias = _mm256_andnot_si256(is_nan, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
                _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias))
            }
        }
        for (index, &[low, high]) in values.iter().enumerate() {
            // SAFETY: as above.
            unsafe {
                // Packs within each half of the registers, then puts the quarters in order.
                let packed = _mm256_packus_epi32(rounded(low), rounded(high));
                let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
                let to = to.add(index * 16).cast();
                if stream { _mm256_stream_si256(to, packed) } else { _mm256_storeu_si256(to, packed) }
            }
        }
    }

    #[inline(always)]
    unsafe fn splat_wide(value: f64) -> [__m256d; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_set1_pd(value); 2] }
    }

    #[inline(always)]
    unsafe fn add_wide(a: [__m256d; 2], b: [__m256d; 2]) -> [__m256d; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_add_pd(a[0], b[0]), _mm256_add_pd(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn multiply_wide(a: [__m256d; 2], b: [__m256d; 2]) -> [__m256d; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_mul_pd(a[0], b[0]), _mm256_mul_pd(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn multiply_add(a: [__m256d; 2], b: [__m256d; 2], c: [__m256d; 2]) -> [__m256d; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_fmadd_pd(a[0], b[0], c[0]), _mm256_fmadd_pd(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    unsafe fn splat_narrow(value: f32) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    unsafe fn add_narrow(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn multiply_narrow(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn nearest([low, high]: [[__m256d; 2]; 2]) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe {
            [
                _mm256_set_m128(_mm256_cvtpd_ps(low[1]), _mm256_cvtpd_ps(low[0])),
                _mm256_set_m128(_mm256_cvtpd_ps(high[1]), _mm256_cvtpd_ps(high[0])),
            ]
        }
    }

    #[inline(always)]
    unsafe fn cut(mut value: [__m256d; 2]) -> [__m256d; 2] {
        for four in &mut value {
            // SAFETY: as above.
            unsafe {
                let (bits, dropped) = (_mm256_castpd_si256(*four), _mm256_set1_epi64x((1 << 37) - 1));
                // The sum carries into the last kept digit unless all dropped digits are zero.
                let carried = _mm256_add_epi64(_mm256_and_si256(bits, dropped), dropped);
                *four = _mm256_castsi256_pd(_mm256_andnot_si256(dropped, _mm256_or_si256(bits, carried)));
            }
        }
        value
    }
}

impl Lanes for Avx512 {
    type Wide = __m512d;
    type Narrow = __m512;

    const SIDE: usize = 4;
    const HALFWAY: bool = false;

    #[inline(always)]
    unsafe fn load_wide<T: Formula>(from: *const T) -> __m512d {
        // SAFETY: the caller's promise, here and below; `T` has the layout of its dtype.
        unsafe {
            match T::DTYPE {
                DType::F64 => _mm512_loadu_pd(from.cast()),
                DType::BF16 => {
                    // Makes each bf16 the upper half of an f32 by a single instruction between registers: both halves of the register are
                    // loaded with the same bytes, since a shuffle stays within a half.
                    let spread = _mm256_setr_epi8(
                        -1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, // lower half
                        -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15,
                    );
                    let twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(from.cast()));
                    _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_shuffle_epi8(twice, spread)))
                }
                _ => _mm512_cvtps_pd(load_eight(from)),
            }
        }
    }

    #[inline(always)]
    unsafe fn load_narrow<T: Formula>(from: *const T) -> __m512 {
        // SAFETY: as above.
        unsafe {
            match T::DTYPE {
                DType::F32 => _mm512_loadu_ps(from.cast()),
                DType::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())),
                DType::BF16 => {
                    let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
                }
                _ => unreachable!("pairs with f64 work in f64"),
            }
        }
    }

    #[inline(always)]
    unsafe fn store_wide(value: __m512d, to: *mut f64, stream: bool) {
        // SAFETY: as above.
        unsafe { if stream { _mm512_stream_pd(to, value) } else { _mm512_storeu_pd(to, value) } }
    }

    #[inline(always)]
    unsafe fn store_narrow(value: __m512, to: *mut f32, stream: bool) {
        // SAFETY: as above.
        unsafe { if stream { _mm512_stream_ps(to, value) } else { _mm512_storeu_ps(to, value) } }
    }

    #[inline(always)]
    unsafe fn store_f16([low, high]: [__m512; 2], to: *mut u16, stream: bool) {
        // SAFETY: as above.
        unsafe {
            let low = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(low);
            let high = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(high);
            let halves = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
            if stream { _mm512_stream_si512(to.cast(), halves) } else { _mm512_storeu_si512(to.cast(), halves) }
        }
    }

    #[inline(always)]
    unsafe fn store_bf16([low, high]: [__m512; 2], to: *mut u16, stream: bool) {
        /// The bits of the rounded numbers, in the lower half of each lane.
        ///
        /// # Safety
        /// The machine has AVX-512.
        #[inline(always)]
        unsafe fn rounded(value: __m512) -> __m512i {
            // SAFETY: the caller's promise.
            unsafe {
                let (bits, is_nan) = (_mm512_castps_si512(value), _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value));
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let sum = _mm512_add_epi32(_mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)), bits);
                // A NaN is made quiet and truncated, not rounded: its payload may be in the lower half alone.
                let rounded = _mm512_mask_or_epi32(sum, is_nan, bits, _mm512_set1_epi32(0x0040_0000));
                _mm512_srli_epi32::<16>(rounded)
            }
        }
        // SAFETY: as above.
        unsafe {
            // Packs within each quarter of the registers, then puts the eighths in order.
            let packed = _mm512_packus_epi32(rounded(low), rounded(high));
            let packed = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
            if stream { _mm512_stream_si512(to.cast(), packed) } else { _mm512_storeu_si512(to.cast(), packed) }
        }
    }

    #[inline(always)]
    unsafe fn splat_wide(value: f64) -> __m512d {
        // SAFETY: as above.
        unsafe { _mm512_set1_pd(value) }
    }

    #[inline(always)]
    unsafe fn add_wide(a: __m512d, b: __m512d) -> __m512d {
        // SAFETY: as above.
        unsafe { _mm512_add_pd(a, b) }
    }

    #[inline(always)]
    unsafe fn multiply_wide(a: __m512d, b: __m512d) -> __m512d {
        // SAFETY: as above.
        unsafe { _mm512_mul_pd(a, b) }
    }

    #[inline(always)]
    unsafe fn multiply_add(a: __m512d, b: __m512d, c: __m512d) -> __m512d {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_pd(a, b, c) }
    }

    #[inline(always)]
    unsafe fn splat_narrow(value: f32) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn add_narrow(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn multiply_narrow(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn nearest([low, high]: [__m512d; 2]) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let (low, high) = (_mm256_castps_pd(_mm512_cvtpd_ps(low)), _mm256_castps_pd(_mm512_cvtpd_ps(high)));
            _mm512_castpd_ps(_mm512_insertf64x4::<1>(_mm512_castpd256_pd512(low), high))
        }
    }

    #[inline(always)]
    unsafe fn cut(value: __m512d) -> __m512d {
        // SAFETY: as above.
        unsafe {
            let (bits, dropped) = (_mm512_castpd_si512(value), _mm512_set1_epi64((1 << 37) - 1));
            let carried = _mm512_add_epi64(_mm512_and_si512(bits, dropped), dropped);
            _mm512_castsi512_pd(_mm512_andnot_si512(dropped, _mm512_or_si512(bits, carried)))
        }
    }
}
