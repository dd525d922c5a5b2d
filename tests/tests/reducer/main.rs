//! Reducers of gradients over threads, identical initial values on all ranks, and the assignment of examples to ranks.

#![forbid(unsafe_code)]

mod cases;
mod failures;
mod sampler;
