//! Reductions that exist for GPUs only: sums in rank order, over any [`Communicator<Cuda>`](crate::comm::Communicator). All other operations
//! serve both memories and are in [`ops`](super). The strategies of [`Adasum`](super::Adasum) for GPUs are private.
//!
//! Everything is asynchronous, in the queue of the buffer. An operation that needs workspace, or an agreement of the ranks, is an object,
//! made once and run at every step; it borrows the communicator that it was made with, and runs over no other.

mod adasum;
mod ordered;
mod peers;

pub use ordered::{OrderedAllReduce, PeerAllReduce};

use crate::driver::{DeviceSlice, DeviceSliceMut, Queue};

/// Memory to write, from a view of it.
///
/// # Safety
/// The caller holds the memory mutably, and nothing reads it in a way that the write disturbs.
unsafe fn in_place<'a>(queue: &'a Queue, view: DeviceSlice<'a>) -> DeviceSliceMut<'a> {
    // SAFETY: the caller's promise.
    unsafe { DeviceSliceMut::from_raw_parts(queue, view.address(), view.dtype(), view.len()) }
}
