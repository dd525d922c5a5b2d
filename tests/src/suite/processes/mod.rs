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

use gradsync::bootstrap::Launch;
use gradsync::comm::{Collectives, Ranks, ReduceOp, Split};
use gradsync::internal::memory::SharedWindows;

use super::adasum::as_threads;
use super::{
    Suite, Transport, collectives, error_texts, exchange, failures, groups, mismatches, mistakes, operations,
    point_to_point,
};

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
    mistakes::run(suite);
    #[cfg(target_os = "linux")]
    ahead::run(suite);
    error_texts::run(suite);
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

/// Joins the ranks of the launcher by [`gradsync::join`], whose communicator reduces and splits.
///
/// # Panics
/// If anything of that fails.
pub fn join() {
    let launch = Launch::from_env().expect("a launcher");
    let comm = gradsync::join().expect("every rank joins");
    assert_eq!((comm.rank(), comm.world_size()), (launch.rank, launch.world_size));
    let sum: usize = (0..launch.world_size).sum();
    assert_eq!(comm.all_reduce_scalar(comm.rank() as f32, ReduceOp::Sum).expect("a sum"), sum as f32);
    let group = comm.split(Some((comm.rank() % 2) as u64), 0).expect("groups").expect("a colour");
    assert_eq!((group.rank(), group.world_size()), (comm.rank() / 2, (comm.world_size() + 1 - comm.rank() % 2) / 2));
    group.barrier().expect("all ranks of the group are here");
}
