//! The program `gradsync`: reduces gradient files of several ranks, tells what a machine has, and measures it; and makes secrets.
//!
//! Results go to stdout, everything else to stderr; a failure gives its reason there and exit code 1 (2 for a wrong command
//! line). `GRADSYNC_LOG` (error, warn, info, debug, trace) sets what is logged there. The arithmetic is the library's; only files and the command line are dealt with here.

mod backend;
mod checkpoint;
mod info;
mod perf;
mod reduce;
mod report;
mod unfinished;

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gradsync::bootstrap::Secret;

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
    /// Measure operations beside their baselines, as nccl-tests does, and check their results.
    Perf(Box<perf::Perf>),
    /// Print a fresh secret for the ranks of a job: export GRADSYNC_SECRET=$(gradsync secret)
    ///
    /// Ranks that meet over TCP prove to each other that they know it. Give all ranks of a job the same, and every job another one. It is
    /// 256 random bits in a form of its own, and no other form is accepted.
    Secret,
}

/// Writes a result to stdout. A reader that has seen enough and closed the pipe is no failure.
fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Says why it failed, in one piece: the ranks of a job share a terminal. There is nobody to tell that it cannot be said.
fn complain(reason: impl Display) {
    let _ = io::stderr().write_all(format!("gradsync: error: {reason}\n").as_bytes());
}

fn main() -> ExitCode {
    let level = std::env::var("GRADSYNC_LOG").ok().and_then(|level| level.parse().ok());
    let level = level.unwrap_or(tracing::level_filters::LevelFilter::WARN);
    tracing_subscriber::fmt().with_writer(io::stderr).with_max_level(level).init();
    let result = match Arguments::parse().command {
        Command::Reduce(reduce) => reduce.run().map_err(|error| error.to_string()),
        Command::Info(info) => info.run().map_err(|error| error.to_string()),
        Command::Perf(perf) => perf.run().map_err(|error| error.to_string()),
        Command::Secret => Secret::generate()
            .map_err(|error| error.to_string())
            .and_then(|secret| print(&format!("{}\n", secret.reveal())).map_err(|error| error.to_string())),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            complain(reason);
            ExitCode::FAILURE
        }
    }
}
