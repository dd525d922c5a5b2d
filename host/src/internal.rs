//! Names for the other crates of this repository alone: the tests, the measuring programs, the program `gradsync` and `gradsync-candle`.
//!
//! The module is hidden, and may change in every release.

use std::time::Duration;

use crate::bootstrap::Member;
#[cfg(feature = "cuda")]
use crate::comm::nccl;
use crate::error::{Call, CommError, Departure, Operation};

pub use crate::call_comparison::all_prepared;
pub use crate::comm::local::run::{run_each, run_each_with_deadline};
pub use crate::loading::reason;
pub use crate::ops::adasum::AdasumMemory;
pub use crate::ops::send_recv::memory::BundleMemory;
pub use crate::train::reducer::ReducerMemory;

/// The most bytes of a call between machines.
pub const NETWORK_BYTES: usize = crate::comm::process::NETWORK_BYTES;

/// The arithmetic of plans.
pub mod plan {
    pub use crate::plan::*;
}

/// The kernels of each kind of memory.
pub mod kernels {
    /// The kernels of the CPU.
    pub mod cpu {
        pub use crate::kernels::cpu::*;
    }

    /// The kernels of GPUs.
    #[cfg(feature = "cuda")]
    pub mod cuda {
        pub use crate::kernels::cuda::*;
    }
}

/// Access of ranks to each other's memory.
pub mod memory {
    #[cfg(feature = "cuda")]
    pub use crate::memory::sharing::{PeerMemory, SharedMemory};
    pub use crate::memory::sharing::{SharedWindows, Work};
}

/// Traces as the launcher reads them.
pub mod trace {
    pub use crate::trace::file::file_name;
    pub use crate::trace::format::{CallState, DeviceWait, GroupTrace, RankTrace, TracedCall};
    pub use crate::trace::process::{DIRECTORY, JOB, LAUNCHER, RANK_VARIABLES};
}

/// NCCL as it is in C.
#[cfg(feature = "cuda")]
pub mod sys {
    /// NCCL's functions and types.
    pub mod nccl {
        pub use crate::sys::nccl::*;
    }
}

/// Facts on devices and on the kernels that a queue has loaded.
#[cfg(feature = "cuda")]
pub mod driver {
    pub use crate::driver::device::{DeviceAttribute, can_access_peer, devices};
    pub use crate::driver::module::{KernelSource, LoadedKernel};
    use crate::driver::{Device, Queue};
    use crate::error::CudaError;

    /// Queries an attribute of a device.
    ///
    /// # Errors
    /// [`CudaError`] of the driver.
    pub fn attribute(device: Device, attribute: DeviceAttribute) -> Result<i32, CudaError> {
        device.attribute(attribute)
    }

    /// The kernels that a queue and its clones have loaded, by name.
    pub fn loaded_kernels(queue: &Queue) -> Vec<LoadedKernel> {
        queue.loaded_kernels()
    }
}

/// Begins a group of NCCL's operations.
#[cfg(feature = "cuda")]
pub fn nccl_group<'c, 'd>(comm: &'c nccl::NcclCommunicator) -> nccl::group::NcclGroup<'c, 'd> {
    comm.group()
}

/// The calls of a member by which transports compare their calls and report late ranks.
#[allow(missing_docs)] // The methods of the same names in `bootstrap::member` describe them.
pub trait MemberCalls {
    fn agree(&self, calls: &[Call], deadline: Duration) -> Result<(), CommError>;
    fn announce(&self, calls: &[Call], deadline: Duration) -> Result<(), CommError>;
    fn ask_to_confirm(&self);
    fn confirm(&self, deadline: Duration) -> Result<(), CommError>;
    fn posted(&self, call: Call) -> u64;
    fn recent(&self) -> Vec<(u64, Call)>;
    fn late(&self, sequence: u64, operation: Operation, deadline: Duration) -> CommError;
    fn wait_failure(&self, timeout: Duration) -> Option<CommError>;
    fn gone_before(&self, sequence: u64) -> Option<(usize, Departure)>;
}

impl MemberCalls for Member {
    fn agree(&self, calls: &[Call], deadline: Duration) -> Result<(), CommError> {
        Member::agree(self, calls, deadline)
    }

    fn announce(&self, calls: &[Call], deadline: Duration) -> Result<(), CommError> {
        Member::announce(self, calls, deadline)
    }

    fn ask_to_confirm(&self) {
        Member::ask_to_confirm(self);
    }

    fn confirm(&self, deadline: Duration) -> Result<(), CommError> {
        Member::confirm(self, deadline)
    }

    fn posted(&self, call: Call) -> u64 {
        Member::posted(self, call)
    }

    fn recent(&self) -> Vec<(u64, Call)> {
        Member::recent(self)
    }

    fn late(&self, sequence: u64, operation: Operation, deadline: Duration) -> CommError {
        Member::late(self, sequence, operation, deadline)
    }

    fn wait_failure(&self, timeout: Duration) -> Option<CommError> {
        Member::wait_failure(self, timeout)
    }

    fn gone_before(&self, sequence: u64) -> Option<(usize, Departure)> {
        Member::gone_before(self, sequence)
    }
}
