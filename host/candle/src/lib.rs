//! Training on several ranks with [candle](https://github.com/huggingface/candle), by [gradsync].
//!
//! | here | contents |
//! |---|---|
//! | [`join`], [`join_or_alone`] | the communicator and the device of a process that a launcher has started |
//! | [`DataParallel`] | equal weights at the start, `backward` with gradients reduced over ranks, accumulation, clipping, averages of buffers |
//! | [`AdamW`], [`Sgd`] | optimizers of variables in place: clipping, schedules, groups, loss scale, master copies of 16-bit weights |
//! | [`Variables`] | the variables of a model by name, and which of them are frozen or local |
//! | [`tensor_parallel`] | collectives with gradients, and linear layers that are divided over ranks |
//!
//! A program for one rank needs five changes for many ranks:
//!
//! 1. Ranks: [`join_or_alone`] at the beginning. Ranks that are threads, and groups of ranks, are in [`gradsync::comm`].
//! 2. [`DataParallel::new`] of the model's `VarMap`, after all layers: all ranks continue with rank 0's weights.
//! 3. Examples: [`ShardedIndices`](gradsync::train::ShardedIndices) says which ones are this rank's.
//! 4. [`DataParallel::step`] of a loss and an [`AdamW`], in the place of `loss.backward()` and the optimizer's step; candle's optimizers take
//!    the result of [`DataParallel::backward`].
//! 5. Losses and metrics: [`mean_over_ranks`](gradsync::train::mean_over_ranks).
//!
//! The examples `gpt` and `lora` in this crate's repository train a small GPT, and adapters of a frozen model.
//!
//! # Numerics
//!
//! Gradients of losses that are means over a rank's examples are reduced to their mean, which is the gradient of the mean over all ranks'
//! examples if ranks have the same number ([`DataParallel::backward_of`] uses weights otherwise). It differs from the gradient of one rank
//! with all examples only by rounding: sums over a batch are grouped differently. All ranks get the same bits. gradsync's page on
//! architecture has the details.
//!
//! # CUDA
//!
//! The feature `cuda` needs candle's CUDA toolkit to build. Variables are on a device created by `Device::new_cuda_with_stream`, and the
//! communicator is for device memory. `Device::new_cuda` computes on the per-thread default stream, for which other threads cannot wait; an
//! error names and refuses it.

#![deny(unsafe_code)] // but in the module that lends candle's memory on GPUs

mod clip;
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
mod cuda;
mod data_parallel;
mod declared;
mod error;
mod join;
mod memory;
mod optimizer;
mod options;
mod replicas;
pub mod tensor_parallel;
mod variables;

pub use data_parallel::DataParallel;
pub use error::{Error, Result};
pub use join::{JoinedCommunicator, join, join_or_alone};
pub use memory::TensorMemory;
pub use optimizer::{AdamW, Optimizer, Sgd};
pub use options::DataParallelOptions;
pub use variables::Variables;

/// Compiles and runs the program in the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
