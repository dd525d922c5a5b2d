//! What is measured on GPUs: kernels, and collectives of ranks with a GPU each.
//!
//! Times are those between events on the queue, around each call.

mod adasum;
mod collectives;
pub(crate) mod kernels;
mod plain;
pub(crate) mod ranks;
pub(crate) mod tensors;
mod timing;
mod vectors;
