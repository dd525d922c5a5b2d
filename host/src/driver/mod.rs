//! The CUDA driver through `cust`: devices, queues of work, device memory, and the crate's kernels as functions.
//!
//! A [`Queue`] is a device's primary context and one in-order stream; everything that safe code does with a buffer is ordered on the queue
//! that made it, so that no two operations on one buffer ever race. This module knows no kernel by name.
//!
//! The library that programs link opens the driver at the first call: a program starts on machines without a driver too, and everything
//! here returns a [`CudaError`] there.

mod context;
pub(crate) mod device;
mod event;
mod gate;
mod graph;
mod launch;
mod launch_order;
mod memory;
pub(crate) mod module;
mod occupancy;
mod peer;
mod peer_shared;
mod pinned;
mod pool;
mod queue;
mod recording;
mod retired;

#[doc(no_inline)]
pub use crate::error::CudaError;
use crate::sys::cuda::Status;

pub use device::Device;
pub(crate) use device::DeviceAttribute;
pub use event::Event;
pub use graph::Graph;
pub use memory::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
pub use queue::Queue;

pub(crate) use gate::Held;
pub(crate) use launch::{Argument, Grid};
pub(crate) use launch_order::LaunchOrder;
pub(crate) use occupancy::{Claim, Kernels, Sharers};
pub(crate) use peer::{HostFlag, Mapping, Offer, process_number};
pub(crate) use peer_shared::{FlagList, PeerSharedMemory};
pub(crate) use pinned::Pinned;
pub(crate) use pool::Table;
pub(crate) use recording::DeviceMemory;

fn check(call: &str, status: Status) -> Result<(), CudaError> {
    check_named(|| call.into(), status)
}

/// Like [`check`], for a call whose name has to be formatted.
fn check_named(call: impl FnOnce() -> String, status: Status) -> Result<(), CudaError> {
    if status == Status::SUCCESS {
        return Ok(());
    }
    Err(CudaError::of(call(), status))
}

/// Adds the name of the call to an error of `cust`.
trait Named<T> {
    fn named(self, call: &str) -> Result<T, CudaError>;
}

impl<T> Named<T> for cust::error::CudaResult<T> {
    fn named(self, call: &str) -> Result<T, CudaError> {
        self.map_err(|error| CudaError::of(call.into(), Status(error as u32)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_passes_an_unknown_code_on() {
        let error = check("cuMemAlloc of 8 bytes", Status(99999)).unwrap_err();
        assert_eq!((error.call.as_str(), error.code), ("cuMemAlloc of 8 bytes", 99999));
        assert!(error.to_string().starts_with("CUDA: cuMemAlloc of 8 bytes failed with code 99999: "), "{error}");
        assert_eq!(check("cuInit", Status::SUCCESS), Ok(()));
    }
}
