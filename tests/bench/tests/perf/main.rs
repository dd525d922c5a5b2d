//! `gradsync-bench perf`, which is `cargo xtask perf`, on the CPU: its table, its JSON, its charts, its rows of processes, its cost model, and what it refuses.
//!
//! Sizes are small and iterations few: what is measured is no matter here, only that it is said right, and that results are right.

mod arguments;
mod files;
mod grid;
mod json;
mod model;
mod processes;
mod run;
mod table;
