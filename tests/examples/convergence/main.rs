//! `convergence`: does a learning rate that was tuned for one rank keep working as ranks are added? Sum, mean and Adasum, held against each other.
//!
//! `study` makes all runs of a protocol and keeps them in a file; `demo` makes a few of them, with the rates that the study chose, and writes
//! a page. What `cargo xtask study` and `cargo xtask demo` run. Never fetches anything: arguments name the data.

mod images;
mod lanes;
mod learner;
mod lenet;
mod plan;
mod random;
mod results;
mod runner;
mod study;
mod train;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::images::Images;
use crate::results::Journal;
use crate::runner::{Limits, Place, Tasks};
use crate::study::{Scale, Study};

/// Trains with sum, mean and Adasum on 1 to 64 ranks, which are threads of this process.
#[derive(Parser)]
#[command(name = "convergence", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make all runs of the study that are not yet in its file
    Study(StudyArguments),
}

#[derive(Args)]
struct StudyArguments {
    /// The folder with the four files of Fashion-MNIST
    #[arg(long, value_name = "DIR")]
    images: PathBuf,
    /// Where runs are kept, a line each; those that it has are not made again
    #[arg(long, value_name = "FILE")]
    results: PathBuf,
    /// A few short runs: whether everything works
    #[arg(long)]
    quick: bool,
    /// Start no run after so many seconds
    #[arg(long, value_name = "SECONDS")]
    within: Option<u64>,
    #[command(flatten)]
    threads: Threads,
    /// The commit that this program was built from, to be kept with its runs
    #[arg(long, default_value = "unknown")]
    commit: String,
}

#[derive(Args)]
struct Threads {
    /// Runs at a time [default: the processor's threads]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
}

impl Threads {
    fn get(&self) -> usize {
        let all = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        self.threads.map_or_else(all, NonZeroUsize::get)
    }
}

fn main() -> ExitCode {
    one_thread_a_rank();
    let outcome = match Arguments::parse().command {
        Command::Study(arguments) => study(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The ranks are the threads, and several runs go on at a time; candle and rayon would each start more of them. Who sets the variable keeps
/// the value.
fn one_thread_a_rank() {
    const VARIABLE: &str = "RAYON_NUM_THREADS";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: this is the first thing that the program does, and no other thread exists yet.
        unsafe { std::env::set_var(VARIABLE, "1") };
    }
}

fn study(arguments: &StudyArguments) -> anyhow::Result<()> {
    let images = Images::fashion_mnist(&arguments.images)?;
    let tasks = Tasks { images: Some(&images), text: None };
    let scale = if arguments.quick { Scale::QUICK } else { Scale::FULL };
    let (journal, results) = Journal::open(&arguments.results)?;
    let place = Place { machine: machine(), commit: arguments.commit.clone() };
    let limits = Limits { threads: arguments.threads.get(), within: arguments.within.map(Duration::from_secs) };
    let known = tasks.known();
    let plan = |results: &_| Study { scale, results }.specs(&known);
    let results = runner::run(&tasks, (Some(journal), results), &limits, &place, &plan)?;
    let left = plan(&results).iter().filter(|spec| !results.has(spec)).count();
    println!("{} runs in {}, {left} known to be missing", results.records.len(), arguments.results.display());
    Ok(())
}

/// Processor and threads, where Linux says it.
fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split(": ").nth(1));
    let threads = std::thread::available_parallelism().map_or(0, NonZeroUsize::get);
    format!("{}, {threads} threads", name.unwrap_or(std::env::consts::ARCH))
}
