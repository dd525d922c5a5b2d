//! Foreign libraries: their declarations, and the loading of libraries on first use. Only CUDA's driver is linked, by `cust`.
//!
//! This module makes no decisions about communication; `comm` does.

pub(crate) mod cuda;
pub(crate) mod nccl;

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

debug_as_text!(CudaError);

/// The codes with which MPS refuses a client while its server ends one that was killed or that failed.
const AFTER_A_KILL: [u32; 5] = [46, 805, 806, 807, 999];
const MPS_REMEDY: &str = " (this process is a client of MPS, whose server refuses new clients while it ends one that was killed: wait some \
    seconds and start again; if it stays so, end the server by `echo quit | nvidia-cuda-mps-control` and start it anew)";

/// Whether the driver takes this process for a client of CUDA's Multi-Process Service: there is a daemon's pipe.
fn is_client_of_mps() -> bool {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| "/tmp/nvidia-mps".into());
    std::path::Path::new(&folder).join("control").exists()
}

impl CudaError {
    pub(crate) fn of(call: String, status: cuda::Status) -> Self {
        let mut text = status.text();
        if is_client_of_mps() && AFTER_A_KILL.contains(&status.0) {
            text += MPS_REMEDY;
        }
        CudaError { call, code: status.0, text }
    }
}
