//! Foreign libraries: their declarations, and finding those that are loaded when they are first needed. Only CUDA's driver is linked, by `cust`.
//!
//! Nothing here decides anything about communication; `comm` does, on top.

pub(crate) mod cuda;
mod loader;
pub mod nccl;

/// A refusal of the CUDA driver, or its absence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("CUDA: {call} failed with code {code}: {text}")]
pub struct CudaError {
    /// The call of the driver.
    pub call: String,
    /// The driver's result code (`CUresult`).
    pub code: u32,
    /// The driver's own words, or its name for the code.
    pub text: String,
}

impl CudaError {
    pub(crate) fn of(call: String, status: cuda::Status) -> Self {
        CudaError { call, code: status.0, text: status.text() }
    }
}
