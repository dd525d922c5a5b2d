//! Gradient communication for training programs in pure Rust.
//!
//! Everything that such a program does with its gradients between `backward()` and `optimizer.step()` once it runs on more
//! than one rank: accumulate, cast and clear them in mixed precision, and reduce them over ranks by sum, mean or Adasum.
//!
//! | module | what stands there |
//! |---|---|
//! | [`kernels`] | the arithmetic on one rank's memory: [`kernels::cpu`], `kernels::cuda` |
//! | [`GradientBuffer`] | many tensors in one arena |
//! | [`bootstrap`] | how ranks find each other, and the control channel that stays up |
//! | [`comm`] | ranks and their collectives; [`comm::local`] runs ranks as threads |
//! | [`ops`] | what a training loop calls: gradient control, all-reduce, Adasum, tensor parallelism, Send and Recv |
//! | [`nvtx`] | ranges that a profiler shows |
//! | [`plan`] | who holds and sends what, as pure functions |
//! | [`train`] | operations composed into whole steps: means, sums, Adasum of optimizer steps |
//! | [`docs`] | pages: deployment, convergence, performance, testing, device code |
//!
//! # Features
//!
//! None is on by default. The program `gradsync`, which reduces checkpoints, is the crate `gradsync-cli`.
//!
//! * `cuda`: the CUDA backend through `cust`, with kernels as PTX in the crate. Links a `libcuda`: a toolkit's stub, or the forwarding
//!   one that `cargo xtask libcuda` makes, with which a program starts on machines without a driver too.
//! * `mpi`: ranks as the processes of an MPI job, through `mpi` (rsmpi). Links the system's MPI; building needs its headers, a C
//!   compiler and libclang.
//! * `nvtx`: ranges of sends and receives, for profilers such as Nsight Systems.

mod agreement;
pub mod bootstrap;
pub mod buffer;
mod call;
pub mod comm;
pub mod docs;
pub mod dtype;
pub mod error;
pub mod groups;
pub mod kernels;
pub mod memory;
pub mod nvtx;
pub mod ops;
pub mod plan;
pub mod slice;
pub mod train;

#[cfg(feature = "cuda")]
pub mod driver;
#[cfg(feature = "cuda")]
pub mod sys;

pub use buffer::GradientBuffer;
pub use dtype::{DType, DataType};
pub use error::{CommError, Error, Result};
pub use half::{bf16, f16};
pub use memory::{TensorView, TensorViewMut};
pub use slice::{Element, Slice, SliceMut};

/// Compiles and runs the program in the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
