//! Kernels of gradsync: the arithmetic between `backward()` and `optimizer.step()`, written once.
//!
//! The crate is compiled twice from the same source:
//!
//! * for the CPU, as an ordinary library: `gradsync`'s CPU backend runs [`math`], and [`abi`] is the contract of its CUDA
//!   backend's launches;
//! * for `nvptx64-nvidia-cuda` by `cargo xtask ptx`: then the `kernels` wrap the same formulas into entry points.
//!
//! The device side uses the dialect of rust-cuda's `cuda_std` (`thread::thread_idx_x`, `warp::warp_shuffle_xor`, entry points that are
//! plain functions of pointers and scalars), and compiles against that crate too, with the feature `cuda_std`. Target-dependent code is in
//! `dialect` and `arch`. The crate never allocates, never panics on purpose, uses no float atomics, and knows nothing of hosts, ranks'
//! transports or files.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch, stdarch_nvptx))]
#![cfg_attr(all(target_arch = "nvptx64", not(feature = "cuda_std")), feature(abi_ptx))]

// The square root of a CPU is not in `core`.
#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

pub mod abi;
mod arch;
mod half;
pub mod math;

#[cfg(any(target_arch = "nvptx64", feature = "cuda_std"))]
mod dialect;
#[cfg(any(target_arch = "nvptx64", feature = "cuda_std"))]
mod kernels;
#[cfg(any(target_arch = "nvptx64", feature = "cuda_std"))]
mod lanes;
#[cfg(any(target_arch = "nvptx64", feature = "cuda_std"))]
mod memory;
#[cfg(any(target_arch = "nvptx64", feature = "cuda_std"))]
mod peers;
#[cfg(any(target_arch = "nvptx64", feature = "cuda_std"))]
mod reduce;
#[cfg(any(target_arch = "nvptx64", feature = "cuda_std"))]
mod shared;

#[cfg(any(target_arch = "nvptx64", feature = "cuda_std"))]
use dialect::{thread, warp};

pub use half::*;
