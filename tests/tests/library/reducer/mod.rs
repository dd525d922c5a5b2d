//! Reducers of gradients over threads, identical initial values on all ranks, and the assignment of examples to ranks.

mod failures;
mod sharded_indices;
