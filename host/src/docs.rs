//! Pages about the whole crate. Their sources are the files of `docs/`, so that they can be read in the repository too.

/// Crates, modules and traits; the path of a collective call to each transport; the types that each operation supports.
///
#[doc = include_str!("../docs/architecture.md")]
pub mod architecture {}

/// The equivalents of calls of ONNX Runtime, TransformerEngine, Horovod and PyTorch, and their differences.
///
#[doc = include_str!("../docs/coming_from.md")]
pub mod coming_from {}

/// An example or function for every use, and the equivalents of other projects.
///
#[doc = include_str!("../docs/recipes.md")]
pub mod recipes {}

/// Starting ranks and connecting them, on GPUs and under MPI, on one machine and on several, and building for CUDA.
///
#[doc = include_str!("../docs/deployment.md")]
pub mod deployment {}

/// The errors that a program or its build can meet, with their causes and remedies, and how to see the library's messages.
///
#[doc = include_str!("../docs/errors.md")]
pub mod errors {}

/// When to use Adasum, a mean or a sum, and at which learning rate.
///
#[doc = include_str!("../docs/choosing.md")]
pub mod choosing {}

/// Whether a learning rate tuned for one rank keeps working as ranks are added: sum, mean and Adasum.
///
#[doc = include_str!("../docs/convergence.md")]
pub mod convergence {}

/// How the kernels are compiled from Rust to PTX, how they are loaded, and how the checked-in files are kept fresh.
///
#[doc = include_str!("../docs/device_code.md")]
pub mod device_code {}

/// How figures are measured, and the time of every operation beside its baseline.
///
#[doc = include_str!("../docs/performance.md")]
pub mod performance {}

/// The tiers of tests, their requirements, and the machines on which they have been run.
///
#[doc = include_str!("../docs/testing.md")]
pub mod testing {}
