//! Kernels of gradsync: the arithmetic between `backward()` and `optimizer.step()`, written once.
//!
//! The crate is compiled twice from the same source:
//!
//! * for the CPU, as an ordinary `no_std` library: [`math`] is what `gradsync`'s CPU backend runs, and [`abi`] is the
//!   contract that its CUDA backend launches by;
//! * for `nvptx64-nvidia-cuda` by `cargo xtask ptx`: then the `kernels` wrap the same formulas into entry points.
//!
//! The device side speaks the dialect of rust-cuda's `cuda_std` (`thread::index_1d`, `warp::warp_shuffle_xor`, entry points
//! that are plain functions of pointers and scalars), and everything that depends on the target sits in `arch`. It never
//! allocates, never panics on purpose, uses no float atomics, and knows nothing of hosts, ranks' transports or files.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch, stdarch_nvptx))]

pub mod abi;
mod arch;
mod half;
pub mod math;

#[cfg(target_arch = "nvptx64")]
mod kernels;
#[cfg(target_arch = "nvptx64")]
mod memory;
#[cfg(target_arch = "nvptx64")]
mod peers;
#[cfg(target_arch = "nvptx64")]
mod reduce;
#[cfg(target_arch = "nvptx64")]
mod shared;
#[cfg(target_arch = "nvptx64")]
mod thread;
#[cfg(target_arch = "nvptx64")]
mod warp;

pub use half::{BF16, F16};
