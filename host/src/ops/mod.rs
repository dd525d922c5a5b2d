//! The operations that a training loop calls: gradient control on one rank, reductions over ranks, and transfers between ranks.
//!
//! | operation | modelled on |
//! |---|---|
//! | [`zero_gradient`], [`accumulate`], [`overwrite`] | ONNX Runtime's ZeroGradient, InPlaceAccumulator, InPlaceAccumulatorV2 |
//! | [`all_reduce`](all_reduce()) of a buffer, [`all_reduce_tensors`] | ONNX Runtime's NcclAllReduce, Horovod's allreduce, PyTorch's DDP |
//! | [`all_gather_tensors`], [`reduce_scatter_tensors`] | ncclAllGather and ncclReduceScatter of several tensors |
//! | [`Adasum`], [`adasum_all_reduce`], [`adasum`](adasum()) of a vector, [`hierarchical_adasum_all_reduce`] | ONNX Runtime's AdasumAllReduce, Horovod's `op=Adasum` |
//! | `OrderedAllReduce` (feature `cuda`) | Megatron-LM's reduce-scatter with wide sums |
//! | [`ZeroPartition`] | ONNX Runtime's ZeRO optimizer, PyTorch's ZeroRedundancyOptimizer |
//! | [`offline`]: the same reductions by one process that reads the tensors of all ranks | |
//! | [`send_recv`] | ONNX Runtime's Send, Recv and pipeline schedules |
//! | [`tensor_parallel`] | TransformerEngine's AllReduce, AllGather, ReduceScatter |
//!
//! [`docs::coming_from`](crate::docs::coming_from) describes the differences, and [`onnx`](crate::onnx) has ONNX Runtime's operators with
//! their signatures. The collectives that NCCL and MPI have too are in [`comm::Collectives`](crate::comm::Collectives).
//!
//! An operation checks its operands, makes the ranks compare their calls, then runs kernels and collectives. No operation calls another.

pub(crate) mod adasum;
mod all_reduce;
mod gradient;
pub mod offline;
#[cfg(feature = "cuda")]
mod ordered;
#[cfg(feature = "cuda")]
mod peer_connection;
pub mod send_recv;
pub mod tensor_parallel;
mod tensors;
mod zero;

pub use adasum::{
    Adasum, AdasumOptions, AdasumReport, Algorithm, Granularity, Nodes, WithinNode, adasum, adasum_all_reduce,
    hierarchical_adasum_all_reduce,
};
pub(crate) use adasum::{AdasumMemory, check_nodes};
pub(crate) use all_reduce::reduce_in_windows;
pub use all_reduce::{all_reduce, all_reduce_scaled};
pub(crate) use gradient::same_shape;
pub use gradient::{accumulate, overwrite, zero_gradient};
#[cfg(feature = "cuda")]
pub use ordered::OrderedAllReduce;
pub use tensors::{
    all_gather_tensors, all_reduce_tensors, all_reduce_tensors_into, pack, reduce_scatter_tensors, unpack,
};
pub(crate) use tensors::{check_outputs, one_dtype, views};
pub use zero::ZeroPartition;

pub use crate::plan::zero::ZeroPart;
