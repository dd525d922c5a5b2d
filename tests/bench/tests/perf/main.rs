//! `gradsync-bench perf`, which `cargo xtask perf` runs, on the CPU: its table, JSON, charts, rows of processes, cost model, and errors.
//!
//! Sizes are small and iterations few: these tests check that results are correct and reported correctly, not how fast operations are.

#![forbid(unsafe_code)]

mod arguments;
mod files;
mod grid;
mod json;
mod model;
mod processes;
mod run;
mod table;
