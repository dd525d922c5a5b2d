//! The CPU backend: every kernel on slices, threaded with rayon and vectorised by the compiler.
//!
//! Work is cut into chunks of a fixed length and partial sums are added in chunk order, so that results depend neither on
//! the number of threads nor on which instruction set runs. Each function checks its operands before it writes anything.
//! Dtypes are told apart once a call; the loops inside are generic over the formulas' storage types.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod combine;
mod elementwise;
pub(crate) mod isa;
mod pack;
mod products;
mod tree;

pub use combine::combine;
pub(crate) use combine::{Operand, combine_in_place};
pub use elementwise::{accumulate, all_finite, cast, scale, zero};
pub(crate) use elementwise::{accumulate_chunk, cast_chunk};
pub use pack::{pack, unpack};
pub use products::{Coefficients, coefficients, dots, gram, squared_norms};
pub use tree::{Trees, tree_combine, tree_dots};

/// Elements of a chunk: what one thread takes at a time. A power of two, so that chunks of every dtype keep alignment.
pub(crate) const CHUNK_LEN: usize = 1 << 16;
/// Elements that are widened to `f64` at a time inside a chunk, small enough for the first-level cache.
const BLOCK_LEN: usize = 256;

/// Runs `work` for each item, on all threads if there is more than one.
fn for_each<T: Send>(items: Vec<T>, work: impl Fn(T) + Sync + Send) {
    use rayon::prelude::*;
    // A single chunk is done faster than a second thread wakes up.
    if items.len() <= 1 { items.into_iter().for_each(work) } else { items.into_par_iter().for_each(work) }
}

/// Runs `work` for each item, on all threads if there is more than one; results are in the items' order.
fn map<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
    use rayon::prelude::*;
    if items.len() <= 1 { items.into_iter().map(work).collect() } else { items.into_par_iter().map(work).collect() }
}
