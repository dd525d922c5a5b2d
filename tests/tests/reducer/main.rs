//! Reducers of gradients, over threads: the cases of every transport of host memory, and ranks that fail in the middle of a step.

mod cases;
