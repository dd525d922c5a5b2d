//! The names of rust-cuda's `cuda_std` that kernels use: with the feature `cuda_std` from that crate, for rust-cuda's own compiler, or for
//! type checks on a CPU; without it from `rustc`, with the same names, types and safety, for rustc's PTX target.

// On a CPU, a stand-in's panic ends the functions.
#[cfg(feature = "cuda_std")]
mod rust_cuda;
#[cfg_attr(not(target_arch = "nvptx64"), allow(unreachable_code, unused_unsafe, unused_variables))]
mod rustc;

#[cfg(feature = "cuda_std")]
pub(crate) use rust_cuda::{atomic, entry, shared, thread, warp};
#[cfg(not(feature = "cuda_std"))]
pub(crate) use rustc::{atomic, entry, shared, thread, warp};
