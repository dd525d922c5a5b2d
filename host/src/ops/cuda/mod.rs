//! What a training loop calls where its gradients are in the memory of GPUs: the operations of [`ops`](super) on device memory, over
//! any [`DeviceCommunicator`](crate::comm::DeviceCommunicator), and ONNX Runtime's bundle operations over NCCL.
//!
//! Everything is asynchronous, in the queue of the buffer. What needs workspace, or an agreement of the ranks, is an object,
//! made once and run at every step; it borrows the communicator that it was made with, and runs over no other.
//! No operation uses another. Those of [tensor parallelism](super::tensor_parallel) serve both kinds of memory and stand there.

mod adasum;
mod bundle;
mod ordered;
mod peers;
mod zero;

pub use adasum::{Adasum, AdasumAllReduce, HierarchicalAdasum, ReduceAlgo, StagedAdasum};
pub use bundle::{
    nccl_all_gather, nccl_all_gather_owned, nccl_all_reduce, nccl_reduce_scatter, nccl_reduce_scatter_owned,
};
pub use ordered::{OrderedAllReduce, PeerAllReduce};
pub use zero::ZeroPartition;

use crate::driver::{DeviceSlice, DeviceSliceMut, Queue};

/// Memory to write, from a view of it.
///
/// # Safety
/// The caller holds the memory mutably, and nothing reads it in a way that the write disturbs.
unsafe fn in_place<'a>(queue: &'a Queue, view: DeviceSlice<'a>) -> DeviceSliceMut<'a> {
    // SAFETY: the caller's promise.
    unsafe { DeviceSliceMut::from_raw_parts(queue, view.address(), view.dtype(), view.len()) }
}
