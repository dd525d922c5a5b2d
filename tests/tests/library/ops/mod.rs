//! The gradient-control family, the gradient buffer, tensor-parallel operations, and the steps composed of operations,
//! with upstream's numeric cases.

mod accumulate;
mod all_reduce;
mod all_reduce_tensors;
mod gradient_buffer;
mod optimizer_bounds;
mod optimizer_case;
mod optimizer_norms;
mod optimizer_steps;
mod optimizers;
mod run_stage;
mod send_recv;
mod stepper;
mod stepper_adasum;
mod stepper_skips;
mod tensor_parallel;
