//! `gradsync launch`, `gradsync trace` and `gradsync doctor`, with ranks that are processes of this machine.

#![forbid(unsafe_code)]
#![cfg(target_os = "linux")]

#[path = "../reduce_cli/program.rs"]
#[allow(dead_code, unused_imports)] // the runs of another command
mod program;

mod blame;
mod doctor;
mod endings;
mod examples;
mod explanations;
mod job;
mod leftovers;
mod machines;
mod outputs;
mod records;
mod restarts;
mod variables;
