//! With AVX-512: results of 16 bits, blocks widened to f64; products and weighted sums that need no blocks.
//!
//! Written in assembly, because Rust's intrinsics for these registers are younger than the oldest compiler that this
//! crate supports. Every function gives the bits of the formula that it stands for, as those of `avx2` do, which take what is no
//! whole group of elements; products take that as well.

mod blocks;
mod combine;
mod halves;
mod lanes;
mod products;

pub(super) use self::blocks::widen;
pub(super) use self::combine::combine;
pub(super) use self::halves::{accumulate, cast, cast_near};
pub(super) use self::products::products;

/// Elements in a step of any loop here.
const GROUP: usize = 32;
/// How far ahead operands are prefetched into the first-level cache, of a vector at a time.
const NEAR_BYTES: usize = 1024;
/// The same, of any number of vectors at a time, into the second-level cache: the first has no room for as many fetches, nor for their lines where
/// vectors lie a multiple of its size apart.
const AHEAD_BYTES: usize = 2048;
