//! Target-dependent code, besides [`crate::dialect`]: `nvptx` for the GPU and `host` for any CPU have the same conversions,
//! [`multiply_add`] and square roots; `instructions` adds the GPU instructions for kernels that `cuda_std` lacks.
//!
//! Only these two folders contain intrinsics and `asm!`. Where a CPU's compiler checks the kernels against rust-cuda's crate, a `stand_in`
//! replaces both.

#[cfg(not(target_arch = "nvptx64"))]
mod host;
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) use host::*;

#[cfg(target_arch = "nvptx64")]
mod nvptx;
#[cfg(target_arch = "nvptx64")]
pub(crate) use self::nvptx::*;
#[cfg(target_arch = "nvptx64")]
pub(crate) use core::arch::{asm, nvptx as intrinsics};

#[cfg(all(feature = "cuda_std", not(target_arch = "nvptx64")))]
mod stand_in;
#[cfg(all(feature = "cuda_std", not(target_arch = "nvptx64")))]
pub(crate) use stand_in::{asm, intrinsics};

// On a CPU, a stand-in's panic ends the functions.
#[cfg(any(target_arch = "nvptx64", feature = "cuda_std"))]
#[cfg_attr(not(target_arch = "nvptx64"), allow(unreachable_code, unused_unsafe, unused_variables))]
mod instructions;
#[cfg(any(target_arch = "nvptx64", feature = "cuda_std"))]
pub(crate) use instructions::*;
