//! Measurements on GPUs: kernels, and collectives of ranks with a GPU each.
//!
//! Times are measured between events on the queue, around each call or around each launch of a graph of many calls.

mod adasum;
mod baseline;
mod collectives;
pub(crate) mod first_use;
pub(crate) mod kernels;
pub(crate) mod launch;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[allow(unsafe_code, reason = "NCCL's own calls, the baseline")]
mod plain;
pub(crate) mod ranks;
pub(crate) mod tensors;
mod timing;
mod vectors;
