//! The program `gradsync`: reduces gradient files of several ranks, tells what a machine has, and measures it; and makes secrets.
//!
//! Results go to stdout, everything else to stderr; a failure gives its reason there and exit code 1 (2 for a wrong command
//! line, 3 for a result that is not finite where that was forbidden). `GRADSYNC_LOG` (error, warn, info, debug, trace) sets what is logged there. The arithmetic is the library's; only files and the command line are dealt with here.

mod backend;
mod checkpoint;
mod info;
mod output;
mod perf;
mod reduce;
mod text;

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

/// Where a command tells its results.
#[derive(Clone, Copy, Debug)]
enum Listener {
    Stdout,
    /// Where stdout has been given to a file that the command makes.
    Stderr,
}

impl Listener {
    /// Beside these outputs.
    fn beside<'a>(outputs: impl IntoIterator<Item = &'a output::Destination>) -> Self {
        if outputs.into_iter().any(output::Destination::is_stdout) { Self::Stderr } else { Self::Stdout }
    }

    /// Writes lines, of which foreign texts are part.
    fn print(self, lines: &str) -> io::Result<()> {
        self.print_by(|writer| writer.write_all(text::printable(lines).as_bytes()))
    }

    /// Has `work` write what is fit for a terminal. A reader that has seen enough and closed the pipe is no failure.
    fn print_by(self, work: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        let writer: Box<dyn Write> = match self {
            Listener::Stdout => Box::new(io::stdout().lock()),
            Listener::Stderr => Box::new(io::stderr().lock()),
        };
        let mut writer = io::BufWriter::new(writer);
        match work(&mut writer).and_then(|()| writer.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            result => result,
        }
    }
}

/// Says why it failed.
fn complain(reason: impl Display) {
    say("error", reason);
}

/// Says something in one piece: the ranks of a job share a terminal. There is nobody to tell that it cannot be said.
fn say(kind: &str, what: impl Display) {
    let line = format!("gradsync: {kind}: {what}\n");
    let _ = io::stderr().write_all(text::printable(&line).as_bytes());
}

fn secret() -> Result<(), String> {
    let secret = Secret::generate().map_err(|error| error.to_string())?;
    Listener::Stdout.print(&format!("{}\n", secret.reveal())).map_err(|error| error.to_string())
}

fn main() -> ExitCode {
    let level = std::env::var("GRADSYNC_LOG").ok().and_then(|level| level.parse().ok());
    let level = level.unwrap_or(tracing::level_filters::LevelFilter::WARN);
    tracing_subscriber::fmt().with_writer(io::stderr).with_max_level(level).init();
    let result = match Arguments::parse().command {
        Command::Reduce(reduce) => reduce.run().map_err(|error| (error.exit_code(), error.to_string())),
        Command::Info(info) => info.run().map_err(|error| (ExitCode::FAILURE, error.to_string())),
        Command::Perf(perf) => perf.run().map_err(|error| (ExitCode::FAILURE, error.to_string())),
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
