//! The CPU backend: every kernel on slices, threaded with rayon and vectorised by the compiler.
//!
//! Work is divided into pieces, or chunks where products are added, and sums over chunks are added in their order, so that results depend neither on the number
//! of threads nor on the instruction set. Each function checks its operands before it writes anything. A call selects the dtypes once; the
//! loops inside are generic over the formulas' storage types.

mod combine;
mod elementwise;
mod fingerprint;
pub(crate) mod isa;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod many;
pub(crate) mod optimizer;
mod pack;
mod products;
mod tree;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

pub use combine::combine;
pub(crate) use combine::{Operand, combine_in_place};
pub use elementwise::{accumulate, all_finite, cast, scale, scale_in_place, zero};
pub(crate) use elementwise::{accumulate_piece, cast_piece};
#[cfg(feature = "cuda")]
pub(crate) use fingerprint::BLOCK_BYTES;
pub use fingerprint::Fingerprint;
pub(crate) use fingerprint::fingerprint_of_words;
pub use many::{accumulate_all, cast_all, zero_all};
pub(crate) use pack::pack_checked;
pub use pack::{pack, unpack};
pub(crate) use products::add_gram;
pub use products::{Coefficients, coefficients, coefficients_by, dots, gram, squared_norms};
pub(crate) use tree::add_tree_dots;
pub use tree::{Trees, tree_combine, tree_dots};

use crate::plan::segments;
use crate::slice::SliceMut;

/// The number of elements that one thread takes at a time, counted from the begin of each segment, in kernels that compute no sums (sums
/// have [chunks](crate::plan::chunks) instead). A power of two, so that pieces keep the alignment of every dtype.
pub const PIECE_LEN: usize = 1 << 16;
/// The number of elements that are widened to `f64` at a time inside a piece or chunk, small enough for the first-level cache.
const BLOCK_LEN: usize = 256;

/// The number of elements, over all vectors of a call, that one thread processes before another wakes up.
const ALONE: usize = 1 << 16;

/// Runs `work` for each item, on all threads if `elements` elements are worth it.
fn for_each<T: Send>(items: Vec<T>, elements: usize, work: impl Fn(T) + Sync) {
    if items.len() <= 1 || elements <= ALONE || has_one_thread() {
        return items.into_iter().for_each(work);
    }
    let items: Vec<Mutex<Option<T>>> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
    on_all_threads(items.len(), &|index| {
        let item = items[index].lock().unwrap_or_else(PoisonError::into_inner).take();
        item.into_iter().for_each(&work);
    });
}

/// Runs `work` for every number below `count`, on all threads. Not generic, since rayon's iterators are much code, which the compiler would
/// repeat for every pair of dtypes.
fn on_all_threads(count: usize, work: &(dyn Fn(usize) + Sync)) {
    (0..count).into_par_iter().for_each(work);
}

/// Whether the thread pool has one thread, so that passing work to it gains nothing.
fn has_one_thread() -> bool {
    rayon::current_num_threads() == 1
}

/// The number of elements over all vectors of a call.
fn elements(vectors: usize, segments: &[Range<usize>]) -> usize {
    vectors * segments.iter().map(Range::len).sum::<usize>()
}

/// The pieces of the segments, each with its range of the destination.
fn pieces<'a>(dst: SliceMut<'a>, segments: &[Range<usize>]) -> Vec<(usize, Range<usize>, SliceMut<'a>)> {
    let ranges: Vec<_> = segments::pieces_of_all(segments, PIECE_LEN).collect();
    let pieces = dst.ranges_mut(ranges.iter().map(|(_, range)| range.clone()));
    ranges.into_iter().zip(pieces).map(|((segment, range), piece)| (segment, range, piece)).collect()
}
