//! Measurements on host memory: the kernels of the CPU backend, and collectives over any communicator of host memory.

pub(crate) mod baseline;
pub(crate) mod collectives;
pub(crate) mod kernels;
pub(crate) mod local;
mod reducer;
pub(crate) mod vectors;
