//! Foreign libraries: their declarations, and finding those that are loaded when they are first needed. Only CUDA's driver is linked, by `cust`.
//!
//! Nothing here decides anything about communication; `comm` does, on top.

pub(crate) mod cuda;
mod loader;
pub mod nccl;
