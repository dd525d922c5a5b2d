//! Plans of data placement and transfers, as pure arithmetic on counts and ranks.
//!
//! | module | question |
//! |---|---|
//! | `layout`, `segments` | at which offset is each tensor of a [`GradientBuffer`](crate::GradientBuffer), and which part of it is in a rank's shard? |
//! | `chunks` | over which parts of a tensor are products added, so that their bits do not depend on buffers and shards? |
//! | `reduction` | which blocks of a kernel add which chunks, and in which rows are the sums of divided layers? |
//! | `tree` | which ranks exchange which halves in Adasum by the tree? |
//! | `cost` | which algorithm of Adasum is the fastest for so many ranks and bytes? |
//! | `buckets` | which gradients are reduced together, while others are still computed? |
//! | `ownership` | which rank owns a tensor (ONNX Runtime's NcclAllGather and NcclReduceScatter)? |
//! | `zero` | which elements does a rank update (ZeRO)? |
//! | `groups` | which ranks form a data, tensor-parallel or pipeline group (ONNX Runtime's `group_type`)? |
//! | `bundle` | how are several tensors sent as one message? |
//! | `schedule` | which transfers does each rank make in each slot of a pipeline? |
//!
//! Nothing here touches memory, a device or a transport, so that a test can simulate every rank of any world.
//!
//! What callers pass in or get back has its public place where it is used: [`groups`](crate::groups),
//! [`ops::send_recv`](crate::ops::send_recv) and [`ops`](crate::ops).

pub(crate) mod buckets;
pub mod bundle;
pub mod chunks;
pub mod cost;
pub mod groups;
pub mod layout;
pub mod ownership;
// Kernels of GPUs alone use it.
#[cfg(any(feature = "cuda", test))]
pub(crate) mod reduction;
pub mod schedule;
pub(crate) mod segments;
pub(crate) mod tree;
pub mod zero;
