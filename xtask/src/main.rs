//! `cargo xtask`: the repository's tasks that need more than one cargo command.
//!
//! One command is one file, one variant of [`flags::Command`] and one `run`. xtask depends on no crate of the workspace, so every command
//! works even if these crates do not compile.

#![forbid(unsafe_code)]

mod bundle;
mod compare;
mod demo;
mod flags;
#[cfg(test)]
mod forwarders;
mod multi_gpu;
mod perf;
mod process;
mod ptx;
mod ptxas;
mod study;
mod test;
#[cfg(test)]
mod tidy;
mod toolchain;

use std::process::ExitCode;

use clap::Parser;
use flags::{Command, Xtask};

fn main() -> ExitCode {
    let outcome = match Xtask::parse().command {
        Command::Demo(flags) => flags.run(),
        Command::Study(flags) => flags.run(),
        Command::Test(flags) => flags.run(),
        Command::TestMultiGpu(flags) => flags.run(),
        Command::Ptx(flags) => flags.run(),
        Command::Ptxas(flags) => flags.run(),
        Command::Bundle(flags) => flags.run(),
        Command::Perf(flags) => flags.run(),
        Command::Compare(flags) => flags.run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
