//! Products of vectors with each other, tile by tile: as many vectors with each other, or with as many others, as their sums fit into
//! registers.
//!
//! Elements are widened to f64 when they are loaded, for each tile anew. Lanes, order and rounding are the same as in `add_dot`, except that
//! an exact product is fused with its addition.

use std::ops::Range;

use gradsync_device::math::Element as Formula;
use gradsync_device::math::adasum::product_index;

use super::combine::AHEAD_BYTES;
use super::{GROUP, Lanes, on_lanes, prefetch, x86};
use crate::dtype::DType;
use crate::kernels::cpu::isa::{Isa, allowed};
use crate::kernels::cpu::products::{LANES, Sums};
use crate::plan::segments::pieces;

/// The size of a block in bytes, over all vectors: half of the first-level cache, because most tiles read elements that another one has
/// read.
const BLOCK_BYTES: usize = 16 << 10;

/// Adds the products of all vectors with each other in a chunk, if widening elements in registers takes less time than widening them once,
/// into blocks.
pub(in crate::kernels::cpu) fn add_products_of_chunk<T: Formula>(
    sums: &mut [Sums],
    vectors: &[&[T]],
    chunk: &Range<usize>,
) -> bool {
    let side = match allowed() {
        Isa::Baseline => return false,
        Isa::Avx2 if vectors.len() > x86::Avx2::SIDE => return false,
        Isa::Avx2 => x86::Avx2::SIDE,
        Isa::Avx512 => x86::Avx512::SIDE,
    };
    let end = chunk.start + chunk.len() / GROUP * GROUP;
    // A single tile reads each element once, and needs no blocks.
    let groups = if vectors.len() <= side { chunk.len() } else { BLOCK_BYTES / size_of::<T>() / vectors.len() } / GROUP;
    for block in pieces(chunk.start..end, groups.max(1) * GROUP) {
        add_products(sums, vectors, &block, false, false);
    }
    if end < chunk.end {
        // Zeros behind the end add nothing to the sums.
        let padded = |vector: &&[T]| {
            let mut group = [T::from_f32(0.0); GROUP];
            group[..chunk.end - end].copy_from_slice(&vector[end..chunk.end]);
            group
        };
        let groups: Vec<[T; GROUP]> = vectors.iter().map(padded).collect();
        let groups: Vec<&[T]> = groups.iter().map(|group| &group[..]).collect();
        add_products(sums, &groups, &(0..GROUP), false, true);
    }
    true
}

on_lanes! {
    /// Adds the products of all vectors with each other in the range, which has whole groups, to their sums in the order of
    /// [`product_index`]. Products of narrow dtypes are exact, and fused with their additions; for `f64`, `exact` says whether they are.
    /// `is_near` is set if the elements are in the cache.
    pub(in crate::kernels::cpu) fn add_products<L, T: Formula, V: AsRef<[T]>>(
        sums: &mut [Sums],
        vectors: &[V],
        range: &Range<usize>,
        exact: bool,
        is_near: bool,
    ) {
        assert!(range.len().is_multiple_of(GROUP), "a range of {} elements has a part of a group", range.len());
        assert!(vectors.iter().all(|vector| range.end <= vector.as_ref().len()), "{range:?} exceeds a vector");
        let (count, len) = (vectors.len(), range.len());
        for i in (0..count).step_by(L::SIDE) {
            for j in (i..count).step_by(L::SIDE) {
                let mut starts = [[std::ptr::null(); 4]; 2];
                for (starts, first) in starts.iter_mut().zip([i, j]) {
                    for (start, vector) in starts.iter_mut().zip(&vectors[first..]).take(L::SIDE) {
                        *start = vector.as_ref()[range.start..].as_ptr();
                    }
                }
                let tile = Tile { sums: &mut *sums, count, i, j, starts, len, is_near };
                // SAFETY: this machine has the instruction set; the vectors have the range.
                unsafe {
                    if exact || !matches!(T::DTYPE, DType::F64) {
                        tile.add::<L, true>();
                    } else {
                        tile.add::<L, false>();
                    }
                }
            }
        }
    }
}

/// The products of some vectors with each other or with others.
struct Tile<'a, T> {
    /// The sums of all products of `count` vectors.
    sums: &'a mut [Sums],
    count: usize,
    /// The first vector above, and beside: the same one for vectors with each other.
    i: usize,
    j: usize,
    /// The first elements of the vectors above and beside, of [`Lanes::SIDE`] vectors or as many as there are.
    starts: [[*const T; 4]; 2],
    /// The number of elements.
    len: usize,
    is_near: bool,
}

impl<T: Formula> Tile<'_, T> {
    /// Adds the tile's products.
    ///
    /// # Safety
    /// The machine has the instruction set, and there are `len` elements from every start on.
    #[inline(always)]
    unsafe fn add<L: Lanes, const FUSED: bool>(self) {
        let columns = (self.count - self.j).min(L::SIDE);
        // SAFETY: the caller's promise.
        unsafe {
            match (self.i == self.j, columns) {
                (true, 1) => self.add_shape::<L, 1, 1, true, FUSED>(),
                (true, 2) => self.add_shape::<L, 2, 2, true, FUSED>(),
                (true, 3) if L::SIDE > 2 => self.add_shape::<L, 3, 3, true, FUSED>(),
                (true, 4) if L::SIDE > 2 => self.add_shape::<L, 4, 4, true, FUSED>(),
                (false, 1) if L::SIDE == 2 => self.add_shape::<L, 2, 1, false, FUSED>(),
                (false, 2) if L::SIDE == 2 => self.add_shape::<L, 2, 2, false, FUSED>(),
                (false, 1) => self.add_shape::<L, 4, 1, false, FUSED>(),
                (false, 2) => self.add_shape::<L, 4, 2, false, FUSED>(),
                (false, 3) if L::SIDE > 2 => self.add_shape::<L, 4, 3, false, FUSED>(),
                (false, 4) if L::SIDE > 2 => self.add_shape::<L, 4, 4, false, FUSED>(),
                _ => unreachable!("a tile of {columns} columns"),
            }
        }
    }

    /// Adds the products of a tile of one shape: of all rows with all columns, or with themselves, for which the triangle above the
    /// diagonal is enough.
    ///
    /// # Safety
    /// The condition of [`add`](Self::add).
    #[inline(always)]
    unsafe fn add_shape<L: Lanes, const ROWS: usize, const COLUMNS: usize, const TRIANGLE: bool, const FUSED: bool>(
        self,
    ) {
        let [above, beside] = self.starts;
        let index = |row, column| product_index(self.i + row, self.j + column, self.count);
        let rows = |column| if TRIANGLE { column + 1 } else { ROWS };
        // SAFETY: the caller's promise.
        unsafe {
            // By columns, each of which is loaded once and multiplied with all rows.
            let mut totals = [[L::splat_wide(0.0); ROWS]; COLUMNS];
            for (column, totals) in totals.iter_mut().enumerate() {
                for (row, total) in totals.iter_mut().enumerate().take(rows(column)) {
                    *total = L::load_wide(self.sums[index(row, column)].0.as_ptr());
                }
            }
            for group in (0..self.len).step_by(GROUP) {
                // The rows of other tiles have been read by the tile of the rows with themselves, and most columns have.
                if TRIANGLE && !self.is_near {
                    for above in &above[..ROWS] {
                        prefetch(above.wrapping_add(group), AHEAD_BYTES);
                    }
                }
                for at in (group..group + GROUP).step_by(LANES) {
                    let mut x = [L::splat_wide(0.0); ROWS];
                    for (x, above) in x.iter_mut().zip(above) {
                        *x = L::load_wide(above.add(at));
                    }
                    for (column, totals) in totals.iter_mut().enumerate() {
                        let y = if TRIANGLE { x[column] } else { L::load_wide(beside[column].add(at)) };
                        for (total, &x) in totals.iter_mut().zip(&x).take(rows(column)) {
                            *total = if FUSED {
                                L::multiply_add(x, y, *total)
                            } else {
                                L::add_wide(*total, L::multiply_wide(x, y))
                            };
                        }
                    }
                }
            }
            for (column, totals) in totals.into_iter().enumerate() {
                for (row, total) in totals.into_iter().enumerate().take(rows(column)) {
                    L::store_wide(total, self.sums[index(row, column)].0.as_mut_ptr(), false);
                }
            }
        }
    }
}
