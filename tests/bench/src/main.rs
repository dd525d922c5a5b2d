//! The program `gradsync-bench`: all measurements of gradsync, with one method, one table and one JSON format.
//!
//! `cargo xtask perf` and `cargo xtask compare` build it with the features that the machine supports, and start it.

#![deny(unsafe_code)]

mod compare;
mod model;
mod mpirun;
mod perf;
mod tables;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gradsync_cli::messages::{complain, start_log};

/// Measurements of gradsync.
#[derive(Parser)]
#[command(name = "gradsync-bench", version, about, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure operations and their baselines, as nccl-tests does, and check their results
    Perf(Box<perf::Perf>),
    /// Measure an operation beside another implementation: Horovod, Gloo or PyTorch; `perf` itself has NCCL and MPI
    Compare(compare::Compare),
    /// Print the times of Adasum on many ranks by the library's cost model, and the numbers of a kind of GPU from files of `perf`
    Model(model::Model),
    /// Write the tables of the pages on performance and tests from the measurements in tests/measured
    Tables(tables::Tables),
}

fn main() -> ExitCode {
    start_log();
    let result = match Arguments::parse().command {
        Command::Perf(perf) => perf.run().map_err(|error| error.to_string()),
        Command::Model(model) => model.run().map_err(|error| format!("{error:#}")),
        Command::Tables(tables) => tables.run().map_err(|error| format!("{error:#}")),
        Command::Compare(compare) => compare.run().map_err(|error| format!("{error:#}")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            complain(reason);
            ExitCode::FAILURE
        }
    }
}
