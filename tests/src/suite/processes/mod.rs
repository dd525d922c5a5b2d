//! The cases of transports between processes: the cases of every transport, results as over threads, and ranks that are stopped or have no
//! shared memory left.

#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "memory whose first access waits")]
mod ahead;
#[cfg(target_os = "linux")]
mod buckets;
#[cfg(target_os = "linux")]
pub mod limits;
#[cfg(target_os = "linux")]
pub mod set_up;
#[cfg(target_os = "linux")]
pub mod stopped;
#[cfg(target_os = "linux")]
mod windows;

use gradsync::internal::memory::SharedWindows;

use super::adasum::as_threads;
use super::{Suite, Transport, collectives, exchange, failures, groups, mismatches, operations, point_to_point, words};

/// One rank of a transport between processes.
pub trait Processes: Transport<Comm: SharedWindows> + Sync {
    /// The variable that makes ranks send messages where they could share memory.
    const MESSAGES_ONLY: &'static str;
    /// Whether creating a communicator of all ranks needs a descriptor.
    const NEEDS_DESCRIPTORS: bool;
}

/// All cases, for at least two ranks.
pub fn run<T: Processes>(suite: &mut Suite<T>) {
    collectives::run(suite);
    point_to_point::run(suite);
    exchange::run(suite);
    mismatches::run(suite);
    failures::run(suite);
    failures::run_deadlines(suite);
    #[cfg(target_os = "linux")]
    ahead::run(suite);
    words::run(suite);
    groups::run(suite);
    as_threads::run(suite);
    #[cfg(target_os = "linux")]
    windows::run(suite);
    #[cfg(target_os = "linux")]
    limits::run(suite);
    #[cfg(target_os = "linux")]
    buckets::run(suite);
    #[cfg(target_os = "linux")]
    stopped::run(suite);
    #[cfg(target_os = "linux")]
    set_up::run(suite);
    operations::run(suite);
}
