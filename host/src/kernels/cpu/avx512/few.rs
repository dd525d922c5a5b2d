//! Products of one or two vectors of 16-bit numbers, from memory to the sums without a block in between.
//!
//! Lanes, order and rounding are those of `add_dot`; products of such numbers are exact.

use gradsync_device::math::Element as Formula;

use super::GROUP;
use super::lanes::{Halfway, changed, load_wide};
use crate::dtype::DType;
use crate::kernels::cpu::avx2::PREFETCH_BYTES;
use crate::kernels::cpu::products::LANES;

/// Adds the squares of elements of 16 bits to eight interleaved sums, and returns how many there were: those of all
/// whole groups. Squares are exact, and only their addition rounds.
///
/// # Safety
/// The machine has what [`isa`](crate::kernels::cpu::isa) asks for AVX-512.
pub(in crate::kernels::cpu) unsafe fn add_squares<T: Formula>(sums: &mut [f64; LANES], src: &[T]) -> usize {
    if src.len() < GROUP {
        return 0;
    }
    macro_rules! groups {
        ($dtype:ident) => {
            changed!(
                "vmovupd zmm20, [{sums}]",
                "2:",
                "prefetcht1 [{from} + {ahead}]",
                load_wide!($dtype, "{from}", 16, 17, 18, 19),
                "vfmadd231pd zmm20, zmm16, zmm16",
                "vfmadd231pd zmm20, zmm17, zmm17",
                "vfmadd231pd zmm20, zmm18, zmm18",
                "vfmadd231pd zmm20, zmm19, zmm19",
                "add {from}, 64",
                "dec {count}",
                "jnz 2b",
                "vmovupd [{sums}], zmm20",
                sums = in(reg) sums, from = inout(reg) src.as_ptr() => _, count = inout(reg) src.len() / GROUP => _,
                halfway = in(reg) &mut Halfway::new(), ahead = const PREFETCH_BYTES
            )
        };
    }
    // SAFETY: the caller's promise; groups lie within the slice.
    unsafe {
        match T::DTYPE {
            DType::F16 => groups!(f16),
            DType::BF16 => groups!(bf16),
            DType::F64 | DType::F32 => return 0,
        }
    }
    src.len() / GROUP * GROUP
}

/// As [`add_squares`], for the products of two vectors, as far as both go: `sums` are those of the first with itself
/// and with the second, and of the second with itself.
///
/// # Safety
/// As [`add_squares`].
pub(in crate::kernels::cpu) unsafe fn add_dots<T: Formula>(sums: &mut [[f64; LANES]; 3], x: &[T], y: &[T]) -> usize {
    let len = x.len().min(y.len());
    if len < GROUP {
        return 0;
    }
    macro_rules! groups {
        ($dtype:ident) => {
            changed!(
                "vmovupd zmm26, [{sums}]",
                "vmovupd zmm27, [{sums} + 64]",
                "vmovupd zmm28, [{sums} + 128]",
                "2:",
                "prefetcht1 [{x} + {ahead}]",
                "prefetcht1 [{y} + {ahead}]",
                load_wide!($dtype, "{x}", 16, 17, 18, 19),
                load_wide!($dtype, "{y}", 20, 21, 22, 23),
                groups!(@ 16, 20),
                groups!(@ 17, 21),
                groups!(@ 18, 22),
                groups!(@ 19, 23),
                "add {x}, 64",
                "add {y}, 64",
                "dec {count}",
                "jnz 2b",
                "vmovupd [{sums}], zmm26",
                "vmovupd [{sums} + 64], zmm27",
                "vmovupd [{sums} + 128], zmm28",
                sums = in(reg) sums, x = inout(reg) x.as_ptr() => _, y = inout(reg) y.as_ptr() => _,
                count = inout(reg) len / GROUP => _, halfway = in(reg) &mut Halfway::new(), ahead = const PREFETCH_BYTES
            )
        };
        (@ $x:literal, $y:literal) => {
            concat! {
                "vfmadd231pd zmm26, zmm", $x, ", zmm", $x, "\n",
                "vfmadd231pd zmm27, zmm", $x, ", zmm", $y, "\n",
                "vfmadd231pd zmm28, zmm", $y, ", zmm", $y, "\n",
            }
        };
    }
    // SAFETY: the caller's promise; groups lie within both slices.
    unsafe {
        match T::DTYPE {
            DType::F16 => groups!(f16),
            DType::BF16 => groups!(bf16),
            DType::F64 | DType::F32 => return 0,
        }
    }
    len / GROUP * GROUP
}
