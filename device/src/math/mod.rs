//! The formulas, in plain Rust with `core` alone: the arithmetic of one element, one pair of vectors or one layer.
//!
//! They use no pointers, threads or intrinsics. The CPU backend loops over these functions and the GPU kernels call them once per thread,
//! so that both give the same bits where the order of additions does not matter.

pub mod adasum;
pub mod element;
pub mod elementwise;
pub mod optimizer;
pub mod precise;
pub mod product_part;
pub mod rounding;
pub mod step;
pub mod sums;
pub mod wide;

pub use element::Element;
