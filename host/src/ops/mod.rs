//! What a training loop calls: gradient control on one rank, and reductions over ranks.
//!
//! An operation checks its operands, then runs kernels and collectives; no operation uses another.

mod adasum;
mod all_reduce;
#[cfg(feature = "cuda")]
pub mod cuda;
mod gradient;
pub mod send_recv;
pub mod tensor_parallel;
mod tensors;
mod zero;

pub(crate) use adasum::check_nodes;
pub use adasum::{
    AdasumOptions, AdasumReport, Algorithm, Granularity, Nodes, WithinNode, adasum_all_reduce,
    hierarchical_adasum_all_reduce,
};
pub use all_reduce::{ReducibleMemory, all_reduce, all_reduce_scaled};
pub use gradient::{in_place_accumulate, in_place_accumulate_v2, zero_gradient};
pub use tensors::{
    all_gather_owned, all_gather_tensors, all_reduce_tensors, pack, reduce_scatter_owned, reduce_scatter_tensors,
    unpack,
};
pub use zero::ZeroPartition;

use crate::buffer::GradientBuffer;

/// What ranks compare of the memory that their gradients are in.
fn memory_kind(buffer: &GradientBuffer) -> &'static str {
    if buffer.is_shared() { "shared memory" } else { "memory of its own" }
}
