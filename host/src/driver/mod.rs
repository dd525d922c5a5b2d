//! The CUDA driver through `cust`: devices, queues of work, device memory, and the crate's kernels as functions.
//!
//! A [`Queue`] is a device's primary context and one in-order stream; everything that safe code does with a buffer is ordered on
//! the queue that made it, so that no two operations on one buffer ever race. Knows no kernel by name.
//!
//! Building with the feature `cuda` needs a `libcuda` to link against, a toolkit's stub or the forwarding one that
//! `cargo xtask libcuda` makes; with the latter the program also starts on machines without a driver, and everything here
//! returns a [`CudaError`] there.

mod event;
mod graph;
mod launch;
mod memory;
mod module;
mod peer;
mod pinned;
mod pool;
mod queue;

use cust::device::Device;

pub use event::Event;
pub use graph::Graph;
pub use memory::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
pub use module::{KernelSource, LoadedKernel};
pub use queue::Queue;

pub(crate) use launch::Argument;
pub(crate) use peer::{HostFlag, Mapping, Offer};
pub(crate) use pinned::Pinned;

/// A refusal of the CUDA driver, or its absence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("CUDA: {call} failed with code {code}: {text}")]
pub struct CudaError {
    /// What was asked of the driver.
    pub call: String,
    /// The driver's result code (`CUresult`).
    pub code: u32,
    /// The driver's own words, or its name for the code.
    pub text: String,
}

impl CudaError {
    fn new(call: impl Into<String>, error: cust::error::CudaError) -> Self {
        CudaError { call: call.into(), code: error as u32, text: format!("{error:?}: {error}") }
    }
}

fn check(call: &str, status: cust::sys::CUresult) -> Result<(), CudaError> {
    if status == cust::sys::cudaError_enum::CUDA_SUCCESS {
        return Ok(());
    }
    Err(CudaError { call: call.into(), code: status as u32, text: format!("{status:?}") })
}

/// Gives a refusal the name of the call.
trait Named<T> {
    fn named(self, call: &str) -> Result<T, CudaError>;
}

impl<T> Named<T> for cust::error::CudaResult<T> {
    fn named(self, call: &str) -> Result<T, CudaError> {
        self.map_err(|error| CudaError::new(call, error))
    }
}

/// The names of the CUDA devices of this machine, by ordinal.
///
/// # Errors
/// [`CudaError`] if there is no driver or no device: code 100, `CUDA_ERROR_NO_DEVICE`.
pub fn devices() -> Result<Vec<String>, CudaError> {
    cust::init(cust::CudaFlags::empty()).named("cuInit")?;
    let count = Device::num_devices().named("cuDeviceGetCount")?;
    if count == 0 {
        return Err(CudaError::new("cuDeviceGetCount", cust::error::CudaError::NoDevice));
    }
    (0..count)
        .map(|ordinal| {
            let device = Device::get_device(ordinal).named("cuDeviceGet")?;
            device.name().named("cuDeviceGetName")
        })
        .collect()
}
