//! `gradsync-bench perf`, which `cargo xtask perf` runs, on the CPU: its table, JSON, rows of processes, and errors.
//!
//! Sizes are small and iterations few: these tests check that results are correct and reported correctly, not how fast operations are.

#![forbid(unsafe_code)]

mod arguments;
mod every_operation;
mod json;
mod processes;
mod run;
mod table;
