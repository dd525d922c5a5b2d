//! The gradient-control family and the gradient buffer on one rank, with ONNX Runtime's numeric cases.

mod accumulate;
mod buffer;
mod reduced;
