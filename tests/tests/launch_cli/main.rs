//! `gradsync launch`, `gradsync trace` and `gradsync doctor`, with ranks that are processes of this machine.

#![forbid(unsafe_code)]
#![cfg(target_os = "linux")]

#[path = "../reduce_cli/program.rs"]
#[allow(dead_code, unused_imports)] // the runs of another command
mod program;

mod doctor;
mod examples;
mod job;
mod launch;
