//! Products of blocks that are already `f64`, with AVX-512: all products of four vectors with four others, or with each other, of which
//! every sum stays in one register and every element is loaded once.
//!
//! Written in assembly, because Rust's intrinsics for these registers are younger than the oldest compiler that this crate supports.
//! Lanes, order and rounding are those of `add_dot`, but that nothing is rounded between a product and its addition: this is for
//! products that are exact.

use std::arch::asm;

use super::BLOCK_LEN;
use super::products::{Block, LANES};

/// Vectors on each side of a tile.
const SIDE: usize = 4;

type Sums = [f64; LANES];

/// Adds the products of the first vectors with each other to those of all pairs, and returns how many vectors these are: none without
/// the instruction set, or all that make up whole tiles.
pub(super) fn add_tiles(sums: &mut [Sums], vectors: &[Block]) -> usize {
    // The standard library remembers the answer.
    if !std::arch::is_x86_feature_detected!("avx512f") {
        return 0;
    }
    let (count, tiled) = (vectors.len(), vectors.len() / SIDE * SIDE);
    let mut rest = sums;
    for i in (0..tiled).step_by(SIDE) {
        // A row is as long as there are vectors from its own on.
        let (first, others) = rest.split_at_mut(count - i);
        let (second, others) = others.split_at_mut(count - i - 1);
        let (third, others) = others.split_at_mut(count - i - 2);
        let (fourth, others) = others.split_at_mut(count - i - 3);
        rest = others;
        let own = (part(first, 0), part(second, 0), part(third, 0), part(fourth, 0));
        // SAFETY: the instruction set was just found on this machine.
        unsafe { add_triangle(own, tile(vectors, i)) };
        for j in (i + SIDE..tiled).step_by(SIDE) {
            let at = j - i;
            let rows = [part(first, at), part(second, at - 1), part(third, at - 2), part(fourth, at - 3)];
            // SAFETY: as above.
            unsafe { add_square(rows, tile(vectors, i), tile(vectors, j)) };
        }
    }
    tiled
}

fn tile(vectors: &[Block], begin: usize) -> &[Block; SIDE] {
    vectors[begin..begin + SIDE].try_into().expect("as many as the range has")
}

fn part<const COUNT: usize>(row: &mut [Sums], begin: usize) -> &mut [Sums; COUNT] {
    (&mut row[begin..begin + COUNT]).try_into().expect("as many as the range has")
}

macro_rules! load {
    ($sum:literal, $row:literal, $place:literal) => {
        concat!("vmovupd zmm", $sum, ", [{", $row, "} + ", $place, "]")
    };
}
macro_rules! store {
    ($sum:literal, $row:literal, $place:literal) => {
        concat!("vmovupd [{", $row, "} + ", $place, "], zmm", $sum)
    };
}
macro_rules! add {
    ($sum:literal, $x:literal, $y:literal) => {
        concat!("vfmadd231pd zmm", $sum, ", zmm", $x, ", zmm", $y)
    };
}

/// Adds the products of each of `left` with each of `right`; `sums` are those of each of `left`, in the order of `right`.
///
/// # Safety
/// The machine has AVX-512F.
#[inline(never)]
unsafe fn add_square(sums: [&mut [Sums; SIDE]; SIDE], left: &[Block; SIDE], right: &[Block; SIDE]) {
    let [first, second, third, fourth] = sums.map(|sums| sums.as_mut_ptr());
    // SAFETY: the caller's promise. Eight elements of each vector a turn, a whole number of which make a block; four registers of sums for
    // each of `left`.
    unsafe {
        asm!(
            load!(0, "first", 0), load!(1, "first", 64), load!(2, "first", 128), load!(3, "first", 192),
            load!(4, "second", 0), load!(5, "second", 64), load!(6, "second", 128), load!(7, "second", 192),
            load!(8, "third", 0), load!(9, "third", 64), load!(10, "third", 128), load!(11, "third", 192),
            load!(12, "fourth", 0), load!(13, "fourth", 64), load!(14, "fourth", 128), load!(15, "fourth", 192),
            "2:",
            load!(16, "right", "0"), load!(17, "right", "{block}"),
            load!(18, "right", "2*{block}"), load!(19, "right", "3*{block}"),
            load!(20, "left", "0"),
            add!(0, 20, 16), add!(1, 20, 17), add!(2, 20, 18), add!(3, 20, 19),
            load!(21, "left", "{block}"),
            add!(4, 21, 16), add!(5, 21, 17), add!(6, 21, 18), add!(7, 21, 19),
            load!(22, "left", "2*{block}"),
            add!(8, 22, 16), add!(9, 22, 17), add!(10, 22, 18), add!(11, 22, 19),
            load!(23, "left", "3*{block}"),
            add!(12, 23, 16), add!(13, 23, 17), add!(14, 23, 18), add!(15, 23, 19),
            "add {left}, 64",
            "add {right}, 64",
            "dec {turns}",
            "jnz 2b",
            store!(0, "first", 0), store!(1, "first", 64), store!(2, "first", 128), store!(3, "first", 192),
            store!(4, "second", 0), store!(5, "second", 64), store!(6, "second", 128), store!(7, "second", 192),
            store!(8, "third", 0), store!(9, "third", 64), store!(10, "third", 128), store!(11, "third", 192),
            store!(12, "fourth", 0), store!(13, "fourth", 64), store!(14, "fourth", 128), store!(15, "fourth", 192),
            "vzeroupper",
            first = in(reg) first, second = in(reg) second, third = in(reg) third, fourth = in(reg) fourth,
            left = inout(reg) left => _, right = inout(reg) right => _, turns = inout(reg) BLOCK_LEN / LANES => _,
            block = const size_of::<Block>(),
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
            out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm12") _,
            out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm16") _, out("zmm17") _, out("zmm18") _,
            out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
            options(nostack),
        );
    }
}

/// Adds the products of four vectors with each other; `sums` are those of each with itself and those after it.
///
/// # Safety
/// The machine has AVX-512F.
#[inline(never)]
unsafe fn add_triangle(
    (first, second, third, fourth): (&mut [Sums; 4], &mut [Sums; 3], &mut [Sums; 2], &mut [Sums; 1]),
    vectors: &[Block; SIDE],
) {
    // SAFETY: as above.
    unsafe {
        asm!(
            load!(0, "first", 0), load!(1, "first", 64), load!(2, "first", 128), load!(3, "first", 192),
            load!(4, "second", 0), load!(5, "second", 64), load!(6, "second", 128),
            load!(7, "third", 0), load!(8, "third", 64),
            load!(9, "fourth", 0),
            "2:",
            load!(16, "vectors", "0"), load!(17, "vectors", "{block}"),
            load!(18, "vectors", "2*{block}"), load!(19, "vectors", "3*{block}"),
            add!(0, 16, 16), add!(1, 16, 17), add!(2, 16, 18), add!(3, 16, 19),
            add!(4, 17, 17), add!(5, 17, 18), add!(6, 17, 19),
            add!(7, 18, 18), add!(8, 18, 19),
            add!(9, 19, 19),
            "add {vectors}, 64",
            "dec {turns}",
            "jnz 2b",
            store!(0, "first", 0), store!(1, "first", 64), store!(2, "first", 128), store!(3, "first", 192),
            store!(4, "second", 0), store!(5, "second", 64), store!(6, "second", 128),
            store!(7, "third", 0), store!(8, "third", 64),
            store!(9, "fourth", 0),
            "vzeroupper",
            first = in(reg) first, second = in(reg) second, third = in(reg) third, fourth = in(reg) fourth,
            vectors = inout(reg) vectors => _, turns = inout(reg) BLOCK_LEN / LANES => _,
            block = const size_of::<Block>(),
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
            out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm12") _,
            out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm16") _, out("zmm17") _, out("zmm18") _,
            out("zmm19") _,
            options(nostack),
        );
    }
}
