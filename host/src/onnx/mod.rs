//! Operators of ONNX Runtime training with its names and signatures, for programs that are ported from it.
//!
//! | operator | here | without switches, signals and owners |
//! |---|---|---|
//! | InPlaceAccumulator, with a switch | [`in_place_accumulator`] | [`ops::accumulate`] |
//! | InPlaceAccumulatorV2, with an updated flag | [`in_place_accumulator_v2`] | [`ops::accumulate`], [`ops::overwrite`] |
//! | NcclAllGather | [`nccl_all_gather`], [`nccl_all_gather_into`] | [`ops::all_gather_tensors`] |
//! | NcclReduceScatter | [`nccl_reduce_scatter`], [`nccl_reduce_scatter_into`] | [`ops::reduce_scatter_tensors`] |
//! | Send, Recv, with an input signal | [`send`], [`recv`], [`recv_described`] | the methods of [`ops::send_recv::SendRecv`] |
//!
//! [`docs::coming_from`](crate::docs::coming_from) has the operators that need no form of their own, and the differences.
//!
//! [`ops::accumulate`]: crate::ops::accumulate
//! [`ops::overwrite`]: crate::ops::overwrite
//! [`ops::all_gather_tensors`]: crate::ops::all_gather_tensors
//! [`ops::reduce_scatter_tensors`]: crate::ops::reduce_scatter_tensors
//! [`ops::send_recv::SendRecv`]: crate::ops::send_recv::SendRecv

mod accumulate;
mod owned;
mod transfer;

pub use self::accumulate::{in_place_accumulator, in_place_accumulator_v2};
pub use self::owned::{nccl_all_gather, nccl_all_gather_into, nccl_reduce_scatter, nccl_reduce_scatter_into};
pub use self::transfer::{recv, recv_described, send};
