//! Reducers of gradients over threads, the same start on all ranks, and which rank sees which example.

mod cases;
mod failures;
mod sampler;
