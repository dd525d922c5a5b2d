//! The program `gradsync`: reduces gradient files of several ranks, launches ranks, checks machines, compares traces, and generates secrets.
//!
//! Results go to stdout, everything else to stderr; a failure prints its reason there and has exit code 1 (2 for a wrong command line, 3 for
//! a result that is not finite where that was forbidden). `GRADSYNC_LOG` (error, warn, info, debug, trace) sets the log level. The
//! arithmetic is the library's; this crate only handles files and the command line.

#![deny(unsafe_code)]

mod backend;
mod checkpoint;
mod doctor;
#[allow(unsafe_code, reason = "it calls the libraries of a machine")]
mod info;
#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "it prepares processes before they run their programs")]
mod launch;
mod reduce;
mod regular;
#[cfg_attr(
    not(target_os = "linux"),
    expect(dead_code, unused_imports, reason = "records that `gradsync launch` keeps")
)]
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gradsync::bootstrap::Secret;
use gradsync_cli::messages::{self, Listener, complain};

/// Gradient communication for training programs in pure Rust.
#[derive(Parser)]
#[command(name = "gradsync", version, about, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Reduce the gradients or weight deltas of several ranks, one safetensors file each, to one file.
    Reduce(reduce::Reduce),
    /// Tell the version, and which CPU features, GPUs and libraries are found, or where they were looked for.
    Info(info::Info),
    /// Start the ranks of a job on this machine, and end all of them when one fails.
    ///
    /// Each rank is a process with torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on) and a fresh GRADSYNC_SECRET. Lines of its
    /// output are shown behind its number, signals are passed on, and the exit status is the status of the first rank that failed. On several machines,
    /// run the same command on each, with --nodes, --node-rank and --master.
    #[cfg(target_os = "linux")]
    Launch(launch::Launch),
    /// Outlives a launcher, and ends what is left of its ranks.
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    LaunchGuard(launch::Guard),
    /// Compare the last calls of all ranks, which they write to the folder in GRADSYNC_TRACE_DIR, and say where ranks part.
    Trace(trace::Trace),
    /// Join the ranks of a launch, and check what goes wrong at a first start: variables, addresses, secrets, versions, GPUs, clocks, limits.
    ///
    /// Start it in place of the program: srun gradsync doctor, torchrun --no-python gradsync doctor, mpirun gradsync doctor, gradsync launch -n 4 -- gradsync
    /// doctor. Rank 0 prints a table with a line for each rank, and each problem with its remedy. The exit code is 1 if there is one.
    Doctor(doctor::Doctor),
    /// Print a fresh secret for the ranks of a job: export GRADSYNC_SECRET=$(gradsync secret)
    ///
    /// Ranks that meet over TCP prove to each other that they know it. Give all ranks of a job the same, and every job another one. It is
    /// 256 random bits in a form of its own, and no other form is accepted.
    Secret,
}

fn secret() -> Result<(), String> {
    let secret = Secret::generate().map_err(|error| error.to_string())?;
    Listener::Stdout.print(&format!("{}\n", secret.reveal())).map_err(|error| error.to_string())
}

fn main() -> ExitCode {
    messages::start_log();
    let result = match Arguments::parse().command {
        Command::Reduce(reduce) => reduce.run().map_err(|error| (error.exit_code(), error.to_string())),
        Command::Info(info) => info.run().map_err(|error| (ExitCode::FAILURE, error.to_string())),
        #[cfg(target_os = "linux")]
        Command::Launch(launch) => match launch.run() {
            Ok(code) => return code,
            Err(reason) => Err((ExitCode::FAILURE, reason)),
        },
        #[cfg(target_os = "linux")]
        Command::LaunchGuard(guard) => guard.run().map_err(|reason| (ExitCode::FAILURE, reason)),
        Command::Doctor(doctor) => match doctor.run() {
            Ok(code) => return code,
            Err(reason) => Err((ExitCode::FAILURE, reason)),
        },
        Command::Trace(trace) => trace.run().map_err(|reason| (ExitCode::FAILURE, reason)),
        Command::Secret => secret().map_err(|reason| (ExitCode::FAILURE, reason)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err((code, reason)) => {
            complain(reason);
            code
        }
    }
}
