//! Common parts of gradsync's tests: an oracle, tolerances, inputs, and ranks.
//!
//! - [`oracle`]: the correct results, written independently from the specification; imports nothing of gradsync;
//! - [`tolerance`]: the largest error that a correct result may have, with the derivation; imports nothing of gradsync;
//! - [`inputs`]: seeded vectors of every kind that matters; imports nothing of gradsync;
//! - [`double`]: families of `f64` vectors with visible rounding errors, for the rational oracle; imports nothing of gradsync;
//! - [`mod@array`]: owned data of any of the four dtypes, handed to gradsync as its slices;
//! - [`tensors`]: test cases for collectives on many tensors, with scaling factors and with separate outputs;
//! - [`transfers`]: test cases for sends, receives and pipelines over every transport;
//! - [`programs`]: shared libraries compiled for a test, and processes started by a test;
//! - [`out_of_range`]: test cases for reductions whose intermediate values leave the range, over every transport;
//! - [`ranks`]: running a body on P ranks, checking that ranks agree, and a watchdog;
//! - [`reducer`]: test cases for gradient reducers over every transport;
//! - [`start`]: test cases for equal initial parameters and for means over ranks, over every transport;
//! - [`suite`]: the cases that every transport runs, and what runs them;
//!
//! This crate is never published, and only tests depend on it.

#![deny(unsafe_code)]

pub mod array;
pub mod double;
pub mod inputs;
pub mod oracle;
pub mod out_of_range;
pub mod programs;
pub mod ranks;
pub mod reducer;
pub mod start;
pub mod suite;
pub mod tensors;
pub mod tolerance;
pub mod transfers;
