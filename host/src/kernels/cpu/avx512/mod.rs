//! Kernels with AVX-512: results of 16 bits, blocks widened to f64, and products and weighted sums without blocks.
//!
//! They are written in assembly, because Rust's intrinsics for these registers are younger than the oldest compiler that this crate
//! supports. Every function returns the bits of the formula that it replaces, like the functions of `avx2`, which process the elements
//! after the last whole group; products process these themselves.

mod blocks;
mod combine;
mod halves;
mod lanes;
mod products;

pub(super) use self::blocks::widen;
pub(super) use self::combine::combine;
pub(super) use self::halves::{accumulate, cast, cast_near};
pub(super) use self::products::{Tiles, products};

/// Elements per step of each loop here.
const GROUP: usize = 32;
/// The prefetch distance into the first-level cache, for one vector at a time.
const NEAR_BYTES: usize = 1024;
/// The prefetch distance into the second-level cache, for any number of vectors at a time. The first-level cache lacks the capacity for
/// that many prefetches, and for their lines where the vectors' addresses differ by a multiple of its size.
const AHEAD_BYTES: usize = 2048;
