//! What a training loop calls: gradient control on one rank, and reductions over ranks.
//!
//! An operation checks its operands, then runs kernels and collectives; no operation uses another.

mod adasum;
mod all_reduce;
mod gradient;

pub use adasum::{AdasumOptions, AdasumReport, Algorithm, Granularity, adasum_all_reduce};
pub use all_reduce::all_reduce;
pub use gradient::{in_place_accumulate, in_place_accumulate_v2, zero_gradient};
