//! Everything that depends on the target: `nvptx` for the GPU, `host` for any CPU.
//!
//! A further device compiler would be a third file here. Both files offer the same conversions and [`multiply_add`]; the
//! GPU's adds what a kernel needs of the machine. Nothing outside this folder contains an intrinsic or `asm!`.

#[cfg(not(target_arch = "nvptx64"))]
mod host;
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) use host::*;

#[cfg(target_arch = "nvptx64")]
mod nvptx;
#[cfg(target_arch = "nvptx64")]
pub(crate) use nvptx::*;
