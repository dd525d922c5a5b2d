//! Products of vectors of one dtype with each other, from memory to the sums: four vectors with each other, or with four others, so that
//! each sum stays in one register.
//!
//! Elements are widened to f64 when they are loaded, for each product anew: that takes less time than storing them as f64 once. Lanes,
//! order and rounding are the same as in `add_dot`, except that an exact product is fused with its addition; products of f64 are not exact.

use std::ops::Range;

use gradsync_device::math::Element as Formula;
use gradsync_device::math::adasum::product_index;

use super::lanes::{CONSTANTS, changed, load_eight};
use super::{AHEAD_BYTES, GROUP};
use crate::dtype::DType;
use crate::kernels::cpu::products::{LANES, lane_sum};

/// The number of vectors on each side of a tile.
const SIDE: usize = 4;
/// The size of a block in bytes, over all vectors: half of the first-level cache.
const BLOCK_BYTES: usize = 16 << 10;

type Sums = [f64; LANES];

/// The sums of all products of four vectors with four others. For four vectors with themselves: the upper triangle, row by row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Tile([Sums; SIDE * SIDE]);

/// Memory for [`products`], which all chunks of a thread share.
pub(in crate::kernels::cpu) struct Tiles<T> {
    tiles: Vec<Tile>,
    starts: Vec<*const T>,
}

impl<T> Default for Tiles<T> {
    fn default() -> Self {
        Self { tiles: Vec::new(), starts: Vec::new() }
    }
}

/// Computes the products of all vectors with each other in a chunk, in the order of [`product_index`].
///
/// # Safety
/// The machine has the instruction sets that [`isa`](crate::kernels::cpu::isa) requires for AVX-512.
pub(in crate::kernels::cpu) unsafe fn products<T: Formula>(
    sums: &mut [f64],
    vectors: &[&[T]],
    chunk: Range<usize>,
    Tiles { tiles, starts }: &mut Tiles<T>,
) {
    let (count, sides) = (vectors.len(), vectors.len().div_ceil(SIDE));
    tiles.clear();
    tiles.resize(sides * (sides + 1) / 2, Tile([[0.0; LANES]; SIDE * SIDE]));
    let end = chunk.start + chunk.len() / GROUP * GROUP;
    // A single tile reads each element once, and needs no blocks.
    let groups = if sides == 1 { chunk.len() } else { BLOCK_BYTES / size_of::<T>() / count } / GROUP;
    let block = groups.max(1) * GROUP;
    for begin in (chunk.start..end).step_by(block) {
        let block = begin..end.min(begin + block);
        starts.clear();
        starts.extend(vectors.iter().map(|vector| vector[block.clone()].as_ptr()));
        // SAFETY: the caller's promise; from each start on there are as many elements.
        unsafe { add_block(tiles, starts, block.len()) };
    }
    let rest = end..chunk.end;
    if !rest.is_empty() {
        // Zeros behind the end add nothing to the sums.
        let mut group = vec![[T::from_f64(0.0); GROUP]; count];
        let parts = group.iter_mut().zip(vectors);
        parts.for_each(|(group, vector)| group[..rest.len()].copy_from_slice(&vector[rest.clone()]));
        starts.clear();
        starts.extend(group.iter().map(|group| group.as_ptr()));
        // SAFETY: as above.
        unsafe { add_block(tiles, starts, GROUP) };
    }
    let pairs = (0..count).flat_map(|i| (i..count).map(move |j| (i, j)));
    for (sum, (i, j)) in sums.iter_mut().zip(pairs) {
        let (above, beside) = ((i / SIDE, i % SIDE), (j / SIDE, j % SIDE));
        let is_triangle = above.0 == beside.0;
        let place = if is_triangle { product_index(above.1, beside.1, SIDE) } else { beside.1 * SIDE + above.1 };
        *sum = lane_sum(tiles[product_index(above.0, beside.0, sides)].0[place]);
    }
}

/// Adds the products of a block of all vectors.
///
/// # Safety
/// The machine has the instruction sets that [`isa`](crate::kernels::cpu::isa) requires for AVX-512; from each of `starts` on there are
/// `len` elements, in whole groups.
unsafe fn add_block<T: Formula>(tiles: &mut [Tile], starts: &[*const T], len: usize) {
    let sides = starts.len().div_ceil(SIDE);
    for (i, above) in starts.chunks(SIDE).enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            add_triangle(&mut tiles[product_index(i, i, sides)], above, len);
            for (j, beside) in starts.chunks(SIDE).enumerate().skip(i + 1) {
                add_square(&mut tiles[product_index(i, j, sides)], above, beside, len);
            }
        }
    }
}

/// Loads eight elements as f64.
macro_rules! widen {
    ($dtype:ident, $to:literal, $from:literal, $eight:literal) => {
        load_eight!($dtype, concat!("{", $from, "} + {at} + ", $eight, "*{eight}"), $to, 5)
    };
}
macro_rules! add {
    (f64, $sum:literal, $x:literal, $y:literal) => {
        concat!("vmulpd zmm6, zmm", $x, ", zmm", $y, "\n", "vaddpd zmm", $sum, ", zmm", $sum, ", zmm6\n")
    };
    ($narrow:ident, $sum:literal, $x:literal, $y:literal) => {
        concat!("vfmadd231pd zmm", $sum, ", zmm", $x, ", zmm", $y, "\n")
    };
}
/// Prefetches a group.
macro_rules! fetch {
    (f64, $from:literal) => {
        concat! {
            fetch!(f32, $from),
            "prefetcht1 [{", $from, "} + {at} + {ahead} + 128]\n", "prefetcht1 [{", $from, "} + {at} + {ahead} + 192]\n",
        }
    };
    (f32, $from:literal) => {
        concat!("prefetcht1 [{", $from, "} + {at} + {ahead}]\n", "prefetcht1 [{", $from, "} + {at} + {ahead} + 64]\n")
    };
    ($short:ident, $from:literal) => {
        concat!("prefetcht1 [{", $from, "} + {at} + {ahead}]\n")
    };
}
macro_rules! load {
    ($sum:literal, $place:literal) => {
        concat!("vmovupd zmm", $sum, ", [{sums} + 64*", $place, "]\n")
    };
}
macro_rules! store {
    ($sum:literal, $place:literal) => {
        concat!("vmovupd [{sums} + 64*", $place, "], zmm", $sum, "\n")
    };
}
/// Applies a piece to all sums of a tile, which are in registers 16 to 31.
macro_rules! each_sum {
    ($piece:ident) => {
        concat! {
            $piece!(16, 0), $piece!(17, 1), $piece!(18, 2), $piece!(19, 3), $piece!(20, 4), $piece!(21, 5),
            $piece!(22, 6), $piece!(23, 7), $piece!(24, 8), $piece!(25, 9), $piece!(26, 10), $piece!(27, 11),
            $piece!(28, 12), $piece!(29, 13), $piece!(30, 14), $piece!(31, 15),
        }
    };
}
/// Loops over all groups with a piece for eight elements. The caller supplies the dtype, the number of vectors on one side, and further
/// operands. Not every dtype and number uses every operand.
macro_rules! groups {
    ($dtype:ident, $count:tt, $sums:ident, $len:ident, $fetch:ident, $eight:ident, $unused:literal, $($operands:tt)*) => {
        changed!(
            "vmovdqu ymm5, [{constants} + 64]",
            each_sum!(load),
            "2:",
            $fetch!($dtype, $count),
            $eight!($dtype, $count, 0),
            $eight!($dtype, $count, 1),
            $eight!($dtype, $count, 2),
            $eight!($dtype, $count, 3),
            "add {at}, 4*{eight}",
            "jnz 2b",
            each_sum!(store),
            "vzeroupper",
            $unused,
            sums = in(reg) $sums, at = inout(reg) -(($len * size_of::<T>()) as isize) => _, constants = in(reg) &CONSTANTS,
            eight = const 8 * size_of::<T>(), $($operands)*,
            // All registers that `vzeroupper` modifies.
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
            out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm12") _, out("zmm13") _,
            out("zmm14") _, out("zmm15") _
        )
    };
}
/// Runs the caller's macro for the dtype and a number of vectors up to four.
macro_rules! by_dtype_and_count {
    ($count:expr, $tile:ident) => {
        match (T::DTYPE, $count) {
            (DType::F64, 1) => $tile!(f64, 1),
            (DType::F64, 2) => $tile!(f64, 2),
            (DType::F64, 3) => $tile!(f64, 3),
            (DType::F64, _) => $tile!(f64, 4),
            (DType::F32, 1) => $tile!(f32, 1),
            (DType::F32, 2) => $tile!(f32, 2),
            (DType::F32, 3) => $tile!(f32, 3),
            (DType::F32, _) => $tile!(f32, 4),
            (DType::F16, 1) => $tile!(f16, 1),
            (DType::F16, 2) => $tile!(f16, 2),
            (DType::F16, 3) => $tile!(f16, 3),
            (DType::F16, _) => $tile!(f16, 4),
            (DType::BF16, 1) => $tile!(bf16, 1),
            (DType::BF16, 2) => $tile!(bf16, 2),
            (DType::BF16, 3) => $tile!(bf16, 3),
            (DType::BF16, _) => $tile!(bf16, 4),
        }
    };
}

/// Adds the products of up to four vectors with each other.
///
/// # Safety
/// The conditions of [`add_block`].
unsafe fn add_triangle<T: Formula>(sums: &mut Tile, vectors: &[*const T], len: usize) {
    macro_rules! fetched {
        ($dtype:ident, 1) => {
            fetch!($dtype, "a")
        };
        ($dtype:ident, 2) => {
            concat!(fetched!($dtype, 1), fetch!($dtype, "b"))
        };
        ($dtype:ident, 3) => {
            concat!(fetched!($dtype, 2), fetch!($dtype, "c"))
        };
        ($dtype:ident, 4) => {
            concat!(fetched!($dtype, 3), fetch!($dtype, "d"))
        };
    }
    macro_rules! widened {
        ($dtype:ident, 1, $eight:literal) => {
            widen!($dtype, 0, "a", $eight)
        };
        ($dtype:ident, 2, $eight:literal) => {
            concat!(widened!($dtype, 1, $eight), widen!($dtype, 1, "b", $eight))
        };
        ($dtype:ident, 3, $eight:literal) => {
            concat!(widened!($dtype, 2, $eight), widen!($dtype, 2, "c", $eight))
        };
        ($dtype:ident, 4, $eight:literal) => {
            concat!(widened!($dtype, 3, $eight), widen!($dtype, 3, "d", $eight))
        };
    }
    macro_rules! added {
        ($dtype:ident, 1) => {
            add!($dtype, 16, 0, 0)
        };
        ($dtype:ident, 2) => {
            concat!(added!($dtype, 1), add!($dtype, 17, 0, 1), add!($dtype, 20, 1, 1))
        };
        ($dtype:ident, 3) => {
            concat!(added!($dtype, 2), add!($dtype, 18, 0, 2), add!($dtype, 21, 1, 2), add!($dtype, 23, 2, 2))
        };
        ($dtype:ident, 4) => {
            concat!(
                added!($dtype, 3),
                add!($dtype, 19, 0, 3),
                add!($dtype, 22, 1, 3),
                add!($dtype, 24, 2, 3),
                add!($dtype, 25, 3, 3)
            )
        };
    }
    macro_rules! eight {
        ($dtype:ident, $count:tt, $eight:literal) => {
            concat!(widened!($dtype, $count, $eight), added!($dtype, $count))
        };
    }
    let [a, b, c, d] = ends(vectors, len);
    macro_rules! triangle {
        ($dtype:ident, $count:tt) => {
            groups!(
                $dtype, $count, sums, len, fetched, eight, "// {b} {c} {d}",
                a = in(reg) a, b = in(reg) b, c = in(reg) c, d = in(reg) d, ahead = const AHEAD_BYTES
            )
        };
    }
    // SAFETY: the caller's promise.
    unsafe { by_dtype_and_count!(vectors.len(), triangle) }
}

/// Adds the products of each of four vectors, which are in the caches by now, with each of up to four others, most of which are too.
///
/// # Safety
/// The conditions of [`add_block`].
unsafe fn add_square<T: Formula>(sums: &mut Tile, above: &[*const T], beside: &[*const T], len: usize) {
    macro_rules! row {
        ($dtype:ident, $from:literal, $eight:literal, $a:literal, $b:literal, $c:literal, $d:literal) => {
            concat!(
                widen!($dtype, 4, $from, $eight),
                add!($dtype, $a, 4, 0),
                add!($dtype, $b, 4, 1),
                add!($dtype, $c, 4, 2),
                add!($dtype, $d, 4, 3)
            )
        };
    }
    macro_rules! rows {
        ($dtype:ident, 1, $eight:literal) => {
            row!($dtype, "e", $eight, 16, 17, 18, 19)
        };
        ($dtype:ident, 2, $eight:literal) => {
            concat!(rows!($dtype, 1, $eight), row!($dtype, "f", $eight, 20, 21, 22, 23))
        };
        ($dtype:ident, 3, $eight:literal) => {
            concat!(rows!($dtype, 2, $eight), row!($dtype, "g", $eight, 24, 25, 26, 27))
        };
        ($dtype:ident, 4, $eight:literal) => {
            concat!(rows!($dtype, 3, $eight), row!($dtype, "h", $eight, 28, 29, 30, 31))
        };
    }
    macro_rules! eight {
        ($dtype:ident, $count:tt, $eight:literal) => {
            concat! {
                widen!($dtype, 0, "a", $eight), widen!($dtype, 1, "b", $eight),
                widen!($dtype, 2, "c", $eight), widen!($dtype, 3, "d", $eight),
                rows!($dtype, $count, $eight),
            }
        };
    }
    macro_rules! nothing {
        ($dtype:ident, $count:tt) => {
            ""
        };
    }
    let ([a, b, c, d], [e, f, g, h]) = (ends(above, len), ends(beside, len));
    macro_rules! square {
        ($dtype:ident, $count:tt) => {
            groups!(
                $dtype, $count, sums, len, nothing, eight, "// {f} {g} {h}",
                a = in(reg) a, b = in(reg) b, c = in(reg) c, d = in(reg) d,
                e = in(reg) e, f = in(reg) f, g = in(reg) g, h = in(reg) h
            )
        };
    }
    // SAFETY: the caller's promise.
    unsafe { by_dtype_and_count!(beside.len(), square) }
}

/// The ends of up to four vectors; missing vectors repeat the last one.
fn ends<T>(starts: &[*const T], len: usize) -> [*const T; SIDE] {
    std::array::from_fn(|place| starts[place.min(starts.len() - 1)].wrapping_add(len))
}
