//! Products of blocks that are already `f64`: all products of four vectors with four others, or with each other, of
//! which every sum stays in one register and every element is loaded once.
//!
//! Lanes, order and rounding are those of `add_dot`, but that nothing is rounded between a product and its addition:
//! this is for products that are exact.

use std::arch::asm;

use gradsync_device::math::Element as Formula;

use super::lanes::{Halfway, changed, load_wide};
use super::{GROUP, NEAR_BYTES};
use crate::dtype::{DType, Element};
use crate::kernels::cpu::BLOCK_LEN;
use crate::kernels::cpu::products::{Block, LANES};

/// Vectors on each side of a tile.
const SIDE: usize = 4;

type Sums = [f64; LANES];

/// Adds the products of the first vectors with each other to those of all pairs, and returns how many vectors these
/// are: all that make up whole tiles.
///
/// # Safety
/// The machine has AVX-512F.
pub(in crate::kernels::cpu) unsafe fn add_tiles(sums: &mut [Sums], vectors: &[Block]) -> usize {
    // SAFETY: the caller's promise.
    unsafe {
        for_tiles(sums, vectors.len(), |i, own| add_triangle(own, tile(vectors, i)));
        add_squares_of_tiles(sums, vectors)
    }
}

/// As [`add_tiles`], for vectors of 16 bits, of which a block from `begin` on is widened on the way.
///
/// # Safety
/// The machine has AVX-512F.
pub(in crate::kernels::cpu) unsafe fn widen_tiles<T: Element>(
    sums: &mut [Sums],
    wide: &mut [Block],
    vectors: &[&[T]],
    begin: usize,
) -> usize {
    let fits = |vector: &&[T]| begin + BLOCK_LEN <= vector.len();
    assert!(vectors.iter().all(fits) && vectors.len() == wide.len(), "a block from {begin} exceeds a vector");
    // SAFETY: the caller's promise; a block of every vector lies within it.
    unsafe {
        for_tiles(sums, vectors.len(), |i, own| {
            let from = std::array::from_fn(|rank| vectors[i + rank].as_ptr().add(begin).cast::<T::Storage>());
            widen_triangle(own, from, (&mut wide[i..i + SIDE]).try_into().expect("as many as the range has"));
        });
        add_squares_of_tiles(sums, wide)
    }
}

/// The sums of four vectors with themselves and those after them.
type Triangle<'a> = (&'a mut [Sums; 4], &'a mut [Sums; 3], &'a mut [Sums; 2], &'a mut [Sums; 1]);

/// The rows of four vectors, from the first of them on, in the sums of those from there on.
fn rows(sums: &mut [Sums], count: usize) -> ([&mut [Sums]; SIDE], &mut [Sums]) {
    // A row is as long as there are vectors from its own on.
    let (first, others) = sums.split_at_mut(count);
    let (second, others) = others.split_at_mut(count - 1);
    let (third, others) = others.split_at_mut(count - 2);
    let (fourth, others) = others.split_at_mut(count - 3);
    ([first, second, third, fourth], others)
}

/// Runs `work` for the first vector of each tile on the diagonal.
fn for_tiles(sums: &mut [Sums], count: usize, mut work: impl FnMut(usize, Triangle<'_>)) {
    let mut rest = sums;
    for i in (0..count / SIDE * SIDE).step_by(SIDE) {
        let ([first, second, third, fourth], others) = rows(rest, count - i);
        rest = others;
        work(i, (part(first, 0), part(second, 0), part(third, 0), part(fourth, 0)));
    }
}

/// Adds the products of vectors of different tiles, and returns how many vectors there are in tiles.
///
/// # Safety
/// The machine has AVX-512F.
unsafe fn add_squares_of_tiles(sums: &mut [Sums], vectors: &[Block]) -> usize {
    let (count, tiled) = (vectors.len(), vectors.len() / SIDE * SIDE);
    let mut rest = sums;
    for i in (0..tiled).step_by(SIDE) {
        let ([first, second, third, fourth], others) = rows(rest, count - i);
        rest = others;
        for j in (i + SIDE..tiled).step_by(SIDE) {
            let at = j - i;
            let rows = [part(first, at), part(second, at - 1), part(third, at - 2), part(fourth, at - 3)];
            // SAFETY: the caller's promise.
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
/// Does the same with the sums of a [`Triangle`], which are in registers 0 to 9.
macro_rules! each_of_triangle {
    ($piece:ident) => {
        concat! {
            $piece!(0, "first", 0), "\n", $piece!(1, "first", 64), "\n", $piece!(2, "first", 128), "\n",
            $piece!(3, "first", 192), "\n",
            $piece!(4, "second", 0), "\n", $piece!(5, "second", 64), "\n", $piece!(6, "second", 128), "\n",
            $piece!(7, "third", 0), "\n", $piece!(8, "third", 64), "\n",
            $piece!(9, "fourth", 0), "\n",
        }
    };
}
macro_rules! add {
    ($sum:literal, $x:literal, $y:literal) => {
        concat!("vfmadd231pd zmm", $sum, ", zmm", $x, ", zmm", $y)
    };
}

/// Adds the products of each of `left` with each of `right`; `sums` are those of each of `left`, in the order of
/// `right`.
///
/// # Safety
/// The machine has AVX-512F.
#[inline(never)]
unsafe fn add_square(sums: [&mut [Sums; SIDE]; SIDE], left: &[Block; SIDE], right: &[Block; SIDE]) {
    let [first, second, third, fourth] = sums.map(|sums| sums.as_mut_ptr());
    // SAFETY: the caller's promise. Eight elements of each vector a turn, a whole number of which make a block; four
    // registers of sums for each of `left`.
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
unsafe fn add_triangle((first, second, third, fourth): Triangle<'_>, vectors: &[Block; SIDE]) {
    // SAFETY: as above.
    unsafe {
        asm!(
            each_of_triangle!(load),
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
            each_of_triangle!(store),
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

/// As [`add_triangle`], for vectors of 16 bits, of which a block each becomes f64 in `wide` on the way.
///
/// # Safety
/// The machine has AVX-512F; all of `from` are valid for a block.
#[inline(never)]
unsafe fn widen_triangle<T: Formula>(
    (first, second, third, fourth): Triangle<'_>,
    [a, b, c, d]: [*const T; SIDE],
    wide: &mut [Block; SIDE],
) {
    macro_rules! widen {
        ($dtype:ident, $from:literal, $to:literal, $first:literal, $second:literal, $third:literal, $fourth:literal) => {
            concat! {
                "prefetcht0 [", $from, " + {ahead}]\n",
                load_wide!($dtype, $from, $first, $second, $third, $fourth),
                "vmovupd [", $to, "], zmm", $first, "\n",
                "vmovupd [", $to, " + 64], zmm", $second, "\n",
                "vmovupd [", $to, " + 128], zmm", $third, "\n",
                "vmovupd [", $to, " + 192], zmm", $fourth, "\n",
                "add ", $from, ", 64\n",
            }
        };
    }
    macro_rules! multiply {
        ($a:literal, $b:literal, $c:literal, $d:literal) => {
            concat! {
                add!(0, $a, $a), "\n", add!(1, $a, $b), "\n", add!(2, $a, $c), "\n", add!(3, $a, $d), "\n",
                add!(4, $b, $b), "\n", add!(5, $b, $c), "\n", add!(6, $b, $d), "\n",
                add!(7, $c, $c), "\n", add!(8, $c, $d), "\n",
                add!(9, $d, $d), "\n",
            }
        };
    }
    macro_rules! triangle {
        ($dtype:ident) => {
            changed!(
                each_of_triangle!(load),
                "2:",
                widen!($dtype, "{a}", "{wide}", 10, 11, 12, 13),
                widen!($dtype, "{b}", "{wide} + {block}", 14, 15, 16, 17),
                widen!($dtype, "{c}", "{wide} + 2*{block}", 18, 19, 20, 21),
                widen!($dtype, "{d}", "{wide} + 3*{block}", 22, 23, 26, 27),
                multiply!(10, 14, 18, 22),
                multiply!(11, 15, 19, 23),
                multiply!(12, 16, 20, 26),
                multiply!(13, 17, 21, 27),
                "add {wide}, 256",
                "dec {turns}",
                "jnz 2b",
                each_of_triangle!(store),
                "vzeroupper",
                first = in(reg) first, second = in(reg) second, third = in(reg) third, fourth = in(reg) fourth,
                a = inout(reg) a => _, b = inout(reg) b => _, c = inout(reg) c => _, d = inout(reg) d => _,
                wide = inout(reg) wide => _, turns = inout(reg) BLOCK_LEN / GROUP => _,
                halfway = in(reg) &mut Halfway::new(), block = const size_of::<Block>(), ahead = const NEAR_BYTES,
                out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
                out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm12") _,
                out("zmm13") _, out("zmm14") _, out("zmm15") _
            )
        };
    }
    // SAFETY: the caller's promise.
    unsafe {
        match T::DTYPE {
            DType::F16 => triangle!(f16),
            DType::BF16 => triangle!(bf16),
            DType::F64 | DType::F32 => unreachable!("these vectors have 16 bits"),
        }
    }
}
