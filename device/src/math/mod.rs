//! The formulas, in plain Rust with `core` alone: what one element, one pair of vectors or one layer goes through.
//!
//! No pointer, no thread, no intrinsic is in sight here. The CPU backend loops over these functions and the GPU kernels
//! call them once a thread, so that both give the same bits wherever the order of additions does not matter.

pub mod adasum;
pub mod element;
pub mod elementwise;
pub mod precise;
pub mod rounding;
pub mod wide;

pub use element::Element;
