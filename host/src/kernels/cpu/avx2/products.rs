//! Products of blocks that are already `f64`, with as many sums in registers as fit.

use std::arch::x86_64::*;

use crate::kernels::cpu::BLOCK_LEN;
use crate::kernels::cpu::products::LANES;

/// Adds the products of each vector of `left` with each of `right`, lane by lane, to `sums`; each vector is loaded once for all its
/// products. `fused` is set for exact products only, where fusing changes no result.
///
/// # Safety
/// The machine has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels::cpu) unsafe fn add_products<const ROWS: usize, const COLUMNS: usize>(
    sums: &mut [[[f64; LANES]; COLUMNS]; ROWS],
    left: [&[f64; BLOCK_LEN]; ROWS],
    right: [&[f64; BLOCK_LEN]; COLUMNS],
    fused: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if fused {
            add_products_in::<ROWS, COLUMNS, true>(sums, left, right);
        } else {
            add_products_in::<ROWS, COLUMNS, false>(sums, left, right);
        }
    }
}

/// Computes [`add_products`], fused or not.
///
/// # Safety
/// The machine has AVX2 and FMA.
#[inline(always)]
unsafe fn add_products_in<const ROWS: usize, const COLUMNS: usize, const FUSED: bool>(
    sums: &mut [[[f64; LANES]; COLUMNS]; ROWS],
    left: [&[f64; BLOCK_LEN]; ROWS],
    right: [&[f64; BLOCK_LEN]; COLUMNS],
) {
    /// Lanes in a register.
    const HALF: usize = LANES / 2;
    // SAFETY: the caller's promise; a block is a whole number of steps, and the sums of a pair fill two registers.
    unsafe {
        let mut totals = [[[_mm256_setzero_pd(); 2]; COLUMNS]; ROWS];
        for (total, sum) in totals.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
            *total = [_mm256_loadu_pd(sum.as_ptr()), _mm256_loadu_pd(sum.as_ptr().add(HALF))];
        }
        for index in (0..BLOCK_LEN).step_by(LANES) {
            for half in 0..2 {
                let at = index + half * HALF;
                for (totals, left) in totals.iter_mut().zip(left) {
                    let x = _mm256_loadu_pd(left.as_ptr().add(at));
                    for (total, right) in totals.iter_mut().zip(right) {
                        let (y, total) = (_mm256_loadu_pd(right.as_ptr().add(at)), &mut total[half]);
                        *total = if FUSED {
                            _mm256_fmadd_pd(x, y, *total)
                        } else {
                            _mm256_add_pd(*total, _mm256_mul_pd(x, y))
                        };
                    }
                }
            }
        }
        for (total, sum) in totals.as_flattened().iter().zip(sums.as_flattened_mut()) {
            _mm256_storeu_pd(sum.as_mut_ptr(), total[0]);
            _mm256_storeu_pd(sum.as_mut_ptr().add(HALF), total[1]);
        }
    }
}
