//! The gradient-control family, the gradient buffer, tensor-parallel operations, and the steps composed of operations,
//! with upstream's numeric cases.

mod accumulate;
mod buffer;
mod delta;
mod delta_skips;
mod optimizers;
mod pipeline;
mod reduced;
mod send_recv;
mod steps;
mod tensor_parallel;
mod tensors;
