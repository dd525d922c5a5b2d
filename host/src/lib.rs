//! Gradient communication for training programs in pure Rust.
//!
//! The crate covers everything that a training program on more than one rank does with its gradients between `backward()` and
//! `optimizer.step()`: it accumulates, casts and clears them in mixed precision, and reduces them over ranks by sum, mean or Adasum.
//!
//! | for | take |
//! |---|---|
//! | a candle model on several CPUs or GPUs | [`gradsync-candle`](https://docs.rs/gradsync-candle), whose `backward` reduces gradients |
//! | gradients in your own slices, or in the memory of another framework | this crate |
//! | starting ranks, explaining hangs, checking machines, reducing checkpoints | the program of [`gradsync-cli`](https://docs.rs/gradsync-cli) |
//!
//! Ranks are threads, processes, MPI processes, or processes with a GPU each. Ranks compare their calls, every call has a deadline, and errors
//! name the ranks: [`docs::errors`] has the remedies. Messages of the library are events of the crate `tracing`.
//!
//! # A program
//!
//! Its ranks are threads. A program with processes, MPI processes or GPUs as ranks takes another communicator ([`comm`]).
//!
//! ```
//! use gradsync::prelude::*;
//!
//! fn main() -> Result<(), Error> {
//!     let results = local::run(4, |comm| {
//!         let tensors = [("weight", vec![2, 3]), ("bias", vec![3])];
//!         let mut gradients = GradientBuffer::new(DType::F32, comm.world_size(), tensors)?;
//!         let micro_batch = vec![comm.rank() as f32; 3]; // what `backward()` gave for "bias"
//!         accumulate(gradients.tensor_mut(1), &micro_batch)?;
//!         adasum_all_reduce(&comm, &mut gradients, AdasumOptions::default())?;
//!         gradients.tensor(1).to_vec::<f32>()
//!     })?;
//!     assert!(results.iter().all(|result| *result == [1.75; 3])); // the same bits on every rank
//!     Ok(())
//! }
//! ```
//!
//! # Contents
//!
//! | concept | where |
//! |---|---|
//! | the traits and names of a first program, by one `use` | [`prelude`] |
//! | an example or function for every use | [`docs::recipes`] |
//! | an overview: modules, traits, transports | [`docs::architecture`] |
//! | many tensors in one allocation | [`GradientBuffer`] |
//! | one tensor, as a view with a shape | [`TensorView`], [`TensorViewMut`] |
//! | host memory and CUDA memory as a type parameter | [`memory`] |
//! | clearing and accumulating gradients | [`ops::zero_gradient`], [`ops::accumulate`], [`ops::overwrite`] |
//! | sums and means over ranks | of a buffer [`ops::all_reduce`](ops::all_reduce()), of tensors [`ops::all_reduce_tensors`], of a `Vec` or slice [`comm::Collectives::all_reduce`] |
//! | Adasum over ranks | of a buffer [`ops::adasum_all_reduce`], [`ops::Adasum`], of a `Vec` or slice [`ops::adasum`](ops::adasum()), on nodes [`ops::hierarchical_adasum_all_reduce`] |
//! | sums in rank order on GPUs | `ops::OrderedAllReduce` |
//! | sums, means and Adasum by one process, from the checkpoints of all ranks | [`ops::offline`] |
//! | sharing an optimizer's state out over ranks | [`ops::ZeroPartition`] |
//! | tensors from rank to rank, pipelines | [`ops::send_recv`] |
//! | tensor parallelism | [`ops::tensor_parallel`] |
//! | gradients reduced in buckets while they are computed (DDP) | [`train::Reducer`] |
//! | equal initial parameters on all ranks; the examples of each rank | [`train::broadcast_parameters`], [`train::ShardedIndices`] |
//! | whole training steps | [`train`] |
//! | joining the ranks that a launcher has started | [`join()`], [`join_or_alone`], [`bootstrap::Launch`] |
//! | ranks, communicators, collectives, deadlines | [`comm`] |
//! | ranks as threads; as processes; as MPI processes; with a GPU each | [`comm::local`]; [`comm::process`]; `comm::mpi`; `comm::nccl` |
//! | groups of ranks for data, tensor and pipeline parallelism | [`groups`] |
//! | how ranks find each other, launchers, secrets | [`bootstrap`], [`docs::deployment`] |
//! | the arithmetic on the memory of one rank | [`kernels`] |
//! | GPUs, queues, device memory, graphs | `driver` |
//! | everything that can go wrong | [`error`]; causes, remedies and logs [`docs::errors`] |
//! | ranges that a profiler shows | [`nvtx`] |
//! | the last calls of each rank, for finding out why a job hangs | [`trace`] |
//! | from ONNX Runtime, TransformerEngine, Horovod or PyTorch | [`docs::coming_from`], [`onnx`] |
//! | when to use Adasum, and at which learning rate | [`docs::choosing`], [`docs::convergence`] |
//! | how fast it is, how it is tested, how its kernels are made | [`docs::performance`], [`docs::testing`], [`docs::device_code`] |
//!
//! Modules in plain type need the feature `cuda` or `mpi`. `cuda` and `mpi` are for Linux; [`comm::process`] needs Unix, and Linux for calls
//! of more than 1 MiB; everything else is for Linux, macOS and Windows.
//!
//! # Features
//!
//! None is on by default.
//!
//! * `cuda`: the CUDA backend through `cust`, with kernels as PTX in the crate. Building takes no CUDA toolkit, and programs start on
//!   machines without a driver too. Where there is no toolkit, `cust` needs one line of configuration, which is in [`docs::deployment`].
//! * `mpi`: ranks as the processes of an MPI job, through the crate `mpi` (rsmpi). Links an installed MPI; building needs its headers, a C
//!   compiler and libclang.
//! * `log`: messages as records of the crate `log`, for programs with a logger of that crate.
//! * `nvtx`: ranges of sends and receives, for profilers such as Nsight Systems.

// The compiler proves that the examples need no unsafe code.
#![doc(test(attr(forbid(unsafe_code))))]
// On docs.rs, which has a nightly compiler, each item shows the feature that it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

/// Implements `Debug` of errors as their text. `fn main() -> Result<(), Error>` and `unwrap` print `Debug`, and the texts name the remedies;
/// the fields stay open to `match`.
macro_rules! debug_as_text {
    ($($error:ty),+) => {
        $(impl std::fmt::Debug for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        })+
    };
}

pub mod bootstrap;
pub mod buffer;
mod call;
mod call_comparison;
pub mod comm;
pub mod docs;
pub mod dtype;
mod engine;
pub mod error;
pub mod groups;
// Hidden, and not private: the other crates of the repository use it.
#[doc(hidden)]
pub mod internal;
pub mod kernels;
mod loading;
pub mod memory;
pub mod nvtx;
pub mod onnx;
pub mod ops;
mod plan;
pub mod prelude;
pub mod slice;
pub mod trace;
pub mod train;

#[cfg(feature = "cuda")]
pub mod driver;
#[cfg(feature = "cuda")]
mod sys;

pub use buffer::GradientBuffer;
pub use comm::join::{join, join_or_alone};
#[doc(no_inline)]
pub use dtype::DType;
pub use dtype::{Element, Float};
pub use error::{CommError, Error, Result};
#[doc(no_inline)]
pub use half::{bf16, f16};
pub use memory::{TensorView, TensorViewMut};
pub use slice::{Slice, SliceMut};
