//! Pages about the whole crate; their sources are the files of `docs/`, so that they can be read in the repository too.

/// Crates, modules and traits; how a collective call travels to each transport; what every operation supports.
///
#[doc = include_str!("../docs/architecture.md")]
pub mod architecture {}

/// Which call of ONNX Runtime, TransformerEngine, Horovod and PyTorch is which here, and how they differ.
///
#[doc = include_str!("../docs/coming_from.md")]
pub mod coming_from {}

/// How ranks are started and meet, on GPUs and under MPI, on one machine and on several, and how to build for CUDA.
///
#[doc = include_str!("../docs/deployment.md")]
pub mod deployment {}

/// Whether a learning rate that was tuned for one rank keeps working as ranks are added: sum, mean and Adasum.
///
#[doc = include_str!("../docs/convergence.md")]
pub mod convergence {}

/// How the kernels get from Rust to PTX, how they are loaded, and how the checked-in files are kept fresh.
///
#[doc = include_str!("../docs/device_code.md")]
pub mod device_code {}

/// How figures are measured, and what every operation takes beside its baseline.
///
#[doc = include_str!("../docs/performance.md")]
pub mod performance {}

/// The tiers of tests, what each needs, and where they have been run.
///
#[doc = include_str!("../docs/testing.md")]
pub mod testing {}
