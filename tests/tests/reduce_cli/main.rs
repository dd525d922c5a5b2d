//! The program `gradsync reduce`: results against the oracle, its JSON, and every invalid file, which it has to refuse without leaving
//! anything behind.

#![forbid(unsafe_code)]

mod bad_files;
mod bad_tensors;
mod bits;
mod changing;
mod files;
mod formats;
mod json;
mod layouts;
mod limits;
mod names;
mod non_finite;
mod numbers;
mod other_dtypes;
mod outputs;
mod places;
mod program;
#[cfg(feature = "prepared")]
mod python;
mod secret;
mod signals;
