//! The library in one process, with threads as ranks: operations, transports' cases, reducers, kernels on CPUs and plans.

#![forbid(unsafe_code)]

mod adasum_all_reduce;
mod comm;
mod kernels;
mod ops;
mod plans;
mod prelude;
mod reducer;
