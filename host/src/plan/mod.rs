//! Plans of data placement and transfers, as pure arithmetic on counts and ranks.
//!
//! | module | question |
//! |---|---|
//! | `layout`, `segments` | at which offset is each tensor of a [`GradientBuffer`](crate::GradientBuffer), and which part has each shard? |
//! | `chunks` | over which ranges of a tensor are products added, so that their bits do not depend on buffers and shards? |
//! | `divided_layers` | which blocks of a kernel add which chunks, and in which rows are the sums of divided layers? |
//! | `tree` | which ranks exchange which halves in Adasum by the tree? |
//! | `cost` | which algorithm of Adasum is the fastest for so many ranks and bytes? |
//! | `buckets` | which gradients are reduced together, while others are still computed? |
//! | `ownership` | which rank owns a tensor (ONNX Runtime's NcclAllGather and NcclReduceScatter)? |
//! | `zero` | which elements does a rank update (ZeRO)? |
//! | `groups` | which ranks form a data, tensor-parallel or pipeline group (ONNX Runtime's `group_type`)? |
//! | `bundle` | how are several tensors sent as one message? |
//! | `schedule` | which transfers does each rank make in each slot of a pipeline? |
//!
//! # Words for ranges of a vector
//!
//! | word | meaning everywhere |
//! |---|---|
//! | arena | the memory of all tensors of a buffer, one after another, with gaps |
//! | segment | the elements of one tensor in an arena |
//! | layer | the elements that have one set of Adasum weights: a segment, or all segments of an arena |
//! | shard | the elements of an arena that one rank reduces or keeps: equally many for each rank, in rank order |
//! | part | the elements of one segment in one shard |
//! | chunk | the elements of a segment whose products are added without interruption; chunks determine the bits of sums |
//! | row | one line of a table of sums, to which one or more chunks of one layer are added |
//! | piece | the elements that are moved or processed at a time: one message, one step of a pipeline, the work of a thread; no bits depend on it |
//! | block | the elements of one thread block of a GPU; on a CPU, the elements that stay in the nearest cache |
//! | tile | the elements that a block or core loads before it works on them |
//! | span | a segment, or a part, as a row of a kernel's table |
//! | window | memory of another rank that this rank accesses; its elements are a shard |
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
pub(crate) mod divided_layers;
pub mod schedule;
pub(crate) mod segments;
pub(crate) mod tree;
pub mod zero;
