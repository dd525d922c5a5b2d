//! Weighted sums of any number of vectors of one dtype, from memory to memory: each group of 32 elements of all vectors gives one result,
//! which is written to any number of destinations. The sources may be among the destinations.
//!
//! Terms, order and rounding are the same as in `weighted_sums`.

use gradsync_device::math::Element as Formula;

use super::lanes::{CONSTANTS, changed, cut, load_wide, pack};
use super::{AHEAD_BYTES, GROUP};
use crate::dtype::DType;

/// Writes `D(Σ weights[p] × from[p][i])` to every vector of `to`, for whole groups only; returns the number of elements written.
///
/// # Safety
/// The machine has the instruction sets that [`isa`](crate::kernels::cpu::isa) requires for AVX-512. All of `from` are valid for reading
/// `len` elements and all of `to` for writing them. Two vectors that overlap are identical, dtypes included.
pub(in crate::kernels::cpu) unsafe fn combine<D: Formula, S: Formula>(
    to: &[*mut D],
    from: &[*const S],
    len: usize,
    weights: &[f64],
) -> usize {
    assert_eq!(from.len(), weights.len());
    if to.is_empty() || from.is_empty() {
        return 0;
    }
    let end = len / GROUP * GROUP;
    for first in (0..end).step_by(GROUP) {
        // SAFETY: the caller's promise.
        unsafe { combine_group(to, from, first, weights) };
    }
    end
}

/// Rounds a result in registers, which then occupies the fewest registers that hold it.
macro_rules! round {
    (f64) => { "" };
    (f32) => {
        concat! {
            "vcvtpd2ps ymm16, zmm16\n", "vcvtpd2ps ymm17, zmm17\n", "vcvtpd2ps ymm18, zmm18\n", "vcvtpd2ps ymm19, zmm19\n",
            "vinsertf64x4 zmm20, zmm16, ymm17, 1\n", "vinsertf64x4 zmm21, zmm18, ymm19, 1\n",
        }
    };
    ($short:ident) => { concat!(cut!(), pack!($short)) };
}
macro_rules! store {
    (f64) => {
        concat! {
            "vmovupd [{at}], zmm16\n", "vmovupd [{at} + 64], zmm17\n",
            "vmovupd [{at} + 128], zmm18\n", "vmovupd [{at} + 192], zmm19\n",
        }
    };
    (f32) => {
        concat!("vmovups [{at}], zmm20\n", "vmovups [{at} + 64], zmm21\n")
    };
    ($short:ident) => {
        "vmovdqu64 [{at}], zmm20\n"
    };
}
/// Prefetches the cache lines of a group.
macro_rules! fetch {
    (f64) => {
        concat! {
            fetch!(f32), "prefetcht1 [{at} + {ahead} + 128]\n", "prefetcht1 [{at} + {ahead} + 192]\n",
        }
    };
    (f32) => {
        concat!(fetch!(f16), "prefetcht1 [{at} + {ahead} + 64]\n")
    };
    ($short:ident) => {
        "prefetcht1 [{at} + {ahead}]\n"
    };
}

/// Combines 32 elements, from `first` on.
///
/// # Safety
/// The conditions of [`combine`]; the elements lie within all vectors, and there is at least one vector on either side.
#[inline(always)]
unsafe fn combine_group<D: Formula, S: Formula>(to: &[*mut D], from: &[*const S], first: usize, weights: &[f64]) {
    macro_rules! group {
        ($source:ident, $result:ident) => {
            changed!(
                "vbroadcastsd zmm16, [{constants} + 120]",
                "vmovapd zmm17, zmm16",
                "vmovapd zmm18, zmm16",
                "vmovapd zmm19, zmm16",
                "2:",
                "mov {at}, [{from}]",
                "add {at}, {from_offset}",
                "vbroadcastsd zmm26, [{weights}]",
                fetch!($source),
                load_wide!($source, "{at}", 20, 21, 22, 23),
                "vmulpd zmm20, zmm20, zmm26",
                "vmulpd zmm21, zmm21, zmm26",
                "vmulpd zmm22, zmm22, zmm26",
                "vmulpd zmm23, zmm23, zmm26",
                "vaddpd zmm16, zmm16, zmm20",
                "vaddpd zmm17, zmm17, zmm21",
                "vaddpd zmm18, zmm18, zmm22",
                "vaddpd zmm19, zmm19, zmm23",
                "add {from}, 8",
                "add {weights}, 8",
                "dec {vectors}",
                "jnz 2b",
                round!($result),
                "2:",
                "mov {at}, [{to}]",
                "add {at}, {to_offset}",
                store!($result),
                "add {to}, 8",
                "dec {places}",
                "jnz 2b",
                from = inout(reg) from.as_ptr() => _, vectors = inout(reg) from.len() => _,
                to = inout(reg) to.as_ptr() => _, places = inout(reg) to.len() => _,
                weights = inout(reg) weights.as_ptr() => _, at = out(reg) _,
                from_offset = in(reg) first * size_of::<S>(), to_offset = in(reg) first * size_of::<D>(),
                constants = in(reg) &CONSTANTS, ahead = const AHEAD_BYTES
            )
        };
    }
    macro_rules! to {
        ($result:ident) => {
            match S::DTYPE {
                DType::F64 => group!(f64, $result),
                DType::F32 => group!(f32, $result),
                DType::F16 => group!(f16, $result),
                DType::BF16 => group!(bf16, $result),
            }
        };
    }
    // SAFETY: the caller's promise; all vectors are read before any is written.
    unsafe {
        match D::DTYPE {
            DType::F64 => to!(f64),
            DType::F32 => to!(f32),
            DType::F16 => to!(f16),
            DType::BF16 => to!(bf16),
        }
    }
}
