//! Foreign libraries: their declarations, and the loading of libraries on first use. Only CUDA's driver is linked, by `cust`.
//!
//! This module makes no decisions about communication; `comm` does.

pub(crate) mod cuda;
mod loader;
pub mod nccl;

/// An error of the CUDA driver, or its absence.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("CUDA: {call} failed with code {code}: {text}")]
#[non_exhaustive]
pub struct CudaError {
    /// The call of the driver.
    pub call: String,
    /// The driver's result code (`CUresult`).
    pub code: u32,
    /// The driver's description of the code, or its name.
    pub text: String,
}

crate::error::debug_as_text!(CudaError);

impl CudaError {
    pub(crate) fn of(call: String, status: cuda::Status) -> Self {
        CudaError { call, code: status.0, text: status.text() }
    }
}
