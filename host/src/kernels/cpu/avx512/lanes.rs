//! Pieces of assembly, each for 32 elements or for eight: load and widen, round and pack. No piece loops.
//!
//! Eight f64 or sixteen f32 fill a register. Sums and results in f64 are in registers 16 to 19, results in f32 and packed results from 20
//! on; 24 to 31 are temporaries. Registers 0 to 15 are not used, so that `vzeroupper` is not needed; macros that need more registers use
//! them and declare them as clobbered. Addresses are named operands of the enclosing assembly.

/// The constants that the pieces load through the operand `{constants}`.
#[repr(C, align(64))]
pub(super) struct Constants {
    /// The permutation that puts the quarters of a packed register in order.
    order: [u64; 8],
    /// The shuffle that makes each bf16 the upper half of an f32.
    spread: [i8; 32],
    /// A mask of the digits of an f64 beyond the 16th.
    dropped: u64,
    one: u32,
    below_half: u32,
    quiet: u32,
    /// Negative zero, which keeps the sign of a zero that is added to it.
    nothing: f64,
}

// The pieces contain these offsets as numbers.
const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(Constants, spread) == 64 && offset_of!(Constants, dropped) == 96);
    assert!(offset_of!(Constants, one) == 104 && offset_of!(Constants, below_half) == 108);
    assert!(offset_of!(Constants, quiet) == 112 && offset_of!(Constants, nothing) == 120);
};

pub(super) static CONSTANTS: Constants = Constants {
    order: [0, 2, 4, 6, 1, 3, 5, 7],
    spread: [
        -1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1,
        14, 15,
    ],
    dropped: (1 << 37) - 1,
    one: 1,
    below_half: 0x7fff,
    quiet: 0x0040_0000,
    nothing: -0.0,
};

/// Loads two registers of f32 from a dtype other than f64.
macro_rules! load_narrow {
    (f32, $from:literal, $first:literal, $second:literal) => {
        concat!("vmovups zmm", $first, ", [", $from, "]\n", "vmovups zmm", $second, ", [", $from, " + 64]\n")
    };
    (f16, $from:literal, $first:literal, $second:literal) => {
        concat! {
            "vcvtph2ps zmm", $first, ", ymmword ptr [", $from, "]\n",
            "vcvtph2ps zmm", $second, ", ymmword ptr [", $from, " + 32]\n",
        }
    };
    (bf16, $from:literal, $first:literal, $second:literal) => {
        concat! {
            "vpmovzxwd zmm", $first, ", ymmword ptr [", $from, "]\n",
            "vpmovzxwd zmm", $second, ", ymmword ptr [", $from, " + 32]\n",
            "vpslld zmm", $first, ", zmm", $first, ", 16\n",
            "vpslld zmm", $second, ", zmm", $second, ", 16\n",
        }
    };
}
pub(super) use load_narrow;

/// Loads a register of f64 from eight elements; for bf16, `$spread` is the register that holds [`Constants::spread`]. It is 5 where all
/// registers are below 16: these can be filled by the older form of an instruction, which is faster.
macro_rules! load_eight {
    (f64, $from:expr, $to:literal, $spread:literal) => {
        concat!("vmovupd zmm", $to, ", [", $from, "]\n")
    };
    (f32, $from:expr, $to:literal, $spread:literal) => {
        concat!("vcvtps2pd zmm", $to, ", ymmword ptr [", $from, "]\n")
    };
    (f16, $from:expr, $to:literal, $spread:literal) => {
        concat! {
            "vcvtph2ps ymm", $to, ", xmmword ptr [", $from, "]\n",
            "vcvtps2pd zmm", $to, ", ymm", $to, "\n",
        }
    };
    (bf16, $from:expr, $to:literal, 5) => {
        concat! {
            "vbroadcasti128 ymm", $to, ", xmmword ptr [", $from, "]\n",
            "vpshufb ymm", $to, ", ymm", $to, ", ymm5\n",
            "vcvtps2pd zmm", $to, ", ymm", $to, "\n",
        }
    };
    // Loads the same bytes into both halves of the register, since a shuffle stays within a half.
    (bf16, $from:expr, $to:literal, $spread:literal) => {
        concat! {
            "vbroadcasti32x4 ymm", $to, ", xmmword ptr [", $from, "]\n",
            "vpshufb ymm", $to, ", ymm", $to, ", ymm", $spread, "\n",
            "vcvtps2pd zmm", $to, ", ymm", $to, "\n",
        }
    };
}
pub(super) use load_eight;

/// Loads four registers of f64 from any dtype.
macro_rules! load_wide {
    (f64, $from:literal, $first:literal, $second:literal, $third:literal, $fourth:literal) => {
        concat! {
            "vmovupd zmm", $first, ", [", $from, "]\n",
            "vmovupd zmm", $second, ", [", $from, " + 64]\n",
            "vmovupd zmm", $third, ", [", $from, " + 128]\n",
            "vmovupd zmm", $fourth, ", [", $from, " + 192]\n",
        }
    };
    (f32, $from:literal, $first:literal, $second:literal, $third:literal, $fourth:literal) => {
        $crate::kernels::cpu::avx512::lanes::load_wide!(@ f32, $from, 32, $first, $second, $third, $fourth)
    };
    (f16, $from:literal, $first:literal, $second:literal, $third:literal, $fourth:literal) => {
        $crate::kernels::cpu::avx512::lanes::load_wide!(@ f16, $from, 16, $first, $second, $third, $fourth)
    };
    (bf16, $from:literal, $first:literal, $second:literal, $third:literal, $fourth:literal) => {
        concat! {
            "vmovdqu64 ymm24, [{constants} + 64]\n",
            $crate::kernels::cpu::avx512::lanes::load_wide!(@ bf16, $from, 16, $first, $second, $third, $fourth),
        }
    };
    (@ $dtype:ident, $from:literal, $bytes:literal, $first:literal, $second:literal, $third:literal, $fourth:literal) => {
        concat! {
            $crate::kernels::cpu::avx512::lanes::load_eight!($dtype, $from, $first, 24),
            $crate::kernels::cpu::avx512::lanes::load_eight!($dtype, concat!($from, " + ", $bytes), $second, 24),
            $crate::kernels::cpu::avx512::lanes::load_eight!($dtype, concat!($from, " + 2*", $bytes), $third, 24),
            $crate::kernels::cpu::avx512::lanes::load_eight!($dtype, concat!($from, " + 3*", $bytes), $fourth, 24),
        }
    };
}
pub(super) use load_wide;

/// Rounds registers 16 to 19 to f32 in 20 and 21 by truncation to odd, like `avx2::lanes::cut`.
macro_rules! cut {
    () => {
        concat! {
            "vpbroadcastq zmm31, [{constants} + 96]\n",
            $crate::kernels::cpu::avx512::lanes::cut!(16, 24),
            $crate::kernels::cpu::avx512::lanes::cut!(17, 25),
            $crate::kernels::cpu::avx512::lanes::cut!(18, 26),
            $crate::kernels::cpu::avx512::lanes::cut!(19, 27),
            "vinsertf64x4 zmm20, zmm16, ymm17, 1\n",
            "vinsertf64x4 zmm21, zmm18, ymm19, 1\n",
        }
    };
    ($value:literal, $carried:literal) => {
        concat! {
            "vpandq zmm", $carried, ", zmm", $value, ", zmm31\n",
            "vpaddq zmm", $carried, ", zmm", $carried, ", zmm31\n",
            // (value | carried) & !dropped
            "vpternlogq zmm", $value, ", zmm", $carried, ", zmm31, 0x54\n",
            "vcvtpd2ps ymm", $value, ", zmm", $value, "\n",
        }
    };
}
pub(super) use cut;

/// Rounds the f32 of registers 20 and 21 to 32 elements in 20, to nearest with ties to even.
macro_rules! pack {
    (f16) => {
        concat! {
            "vcvtps2ph ymm20, zmm20, 0\n",
            "vcvtps2ph ymm21, zmm21, 0\n",
            "vinserti64x4 zmm20, zmm20, ymm21, 1\n",
        }
    };
    (bf16) => {
        concat! {
            "vpbroadcastd zmm29, [{constants} + 104]\n",
            "vpbroadcastd zmm30, [{constants} + 108]\n",
            "vpbroadcastd zmm31, [{constants} + 112]\n",
            "vmovdqa64 zmm28, [{constants}]\n",
            $crate::kernels::cpu::avx512::lanes::pack!(20, 24, "k1"),
            $crate::kernels::cpu::avx512::lanes::pack!(21, 25, "k2"),
            "vpackusdw zmm20, zmm20, zmm21\n",
            "vpermq zmm20, zmm28, zmm20\n",
        }
    };
    // The formula of `f32_to_bf16`: a NaN is made quiet and truncated, not rounded.
    ($value:literal, $rounded:literal, $is_nan:literal) => {
        concat! {
            "vcmpunordps ", $is_nan, ", zmm", $value, ", zmm", $value, "\n",
            "vpsrld zmm", $rounded, ", zmm", $value, ", 16\n",
            "vpandd zmm", $rounded, ", zmm", $rounded, ", zmm29\n",
            "vpaddd zmm", $rounded, ", zmm", $rounded, ", zmm30\n",
            "vpaddd zmm", $rounded, ", zmm", $rounded, ", zmm", $value, "\n",
            "vpord zmm", $rounded, "{{", $is_nan, "}}, zmm", $value, ", zmm31\n",
            "vpsrld zmm", $value, ", zmm", $rounded, ", 16\n",
        }
    };
}
pub(super) use pack;

/// The registers that the pieces change, as operands.
macro_rules! changed {
    ($($operands:tt)*) => {
        std::arch::asm!(
            $($operands)*,
            out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _,
            out("zmm23") _, out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _,
            out("zmm29") _, out("zmm30") _, out("zmm31") _, out("k1") _, out("k2") _,
            options(nostack),
        )
    };
}
pub(super) use changed;
