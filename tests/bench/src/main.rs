//! The program `gradsync-bench`: everything that is measured of gradsync, in one way, with one table and one JSON.
//!
//! `cargo xtask perf` and `cargo xtask bench` build it with what the machine has, and start it.

mod horovod;
mod mpirun;
mod perf;
mod standing;

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
    /// Measure operations beside their baselines, as nccl-tests does, and check their results.
    Perf(Box<perf::Perf>),
    /// Measure the standing set with `perf`, hold it to the goals, and write a report
    Standing(standing::Standing),
    /// Measure Adasum of MPI processes beside Horovod's
    Horovod(horovod::Horovod),
}

fn main() -> ExitCode {
    start_log();
    let result = match Arguments::parse().command {
        Command::Perf(perf) => perf.run().map_err(|error| error.to_string()),
        Command::Standing(standing) => standing.run().map_err(|error| format!("{error:#}")),
        Command::Horovod(horovod) => horovod.run().map_err(|error| format!("{error:#}")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            complain(reason);
            ExitCode::FAILURE
        }
    }
}
