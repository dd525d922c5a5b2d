//! The dialect for rustc's own PTX target.

pub(crate) mod atomic;
#[cfg(not(feature = "cuda_std"))]
pub(crate) mod shared;
pub(crate) mod thread;
pub(crate) mod warp;

/// An entry point, after `cuda_std`'s `#[kernel]`: unmangled, with the concatenated name, and with the PTX kernel convention.
#[cfg(not(feature = "cuda_std"))]
macro_rules! entry {
    ([$($name:literal)+] $parameters:tt $body:tt) => {
        #[unsafe(export_name = concat!($($name),+))]
        unsafe extern "ptx-kernel" fn kernel $parameters $body
    };
}
#[cfg(not(feature = "cuda_std"))]
pub(crate) use entry;
