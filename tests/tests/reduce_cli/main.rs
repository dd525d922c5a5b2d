//! The program `gradsync reduce`: results against the oracle, its JSON, and every invalid file, which it has to refuse without leaving
//! anything behind.

#![forbid(unsafe_code)]

mod files;
mod program;
mod reduce;
mod secret;
