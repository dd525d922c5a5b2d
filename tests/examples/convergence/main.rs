//! `convergence`: does a learning rate that was tuned for one rank remain good as ranks are added? The program compares sum, mean and
//! Adasum.
//!
//! `study` makes all runs of a protocol and keeps them in a file; `demo` makes a few of these runs, with the rates that the study chose,
//! and writes a page. `cargo xtask study` and `cargo xtask demo` run this program. It never downloads anything: arguments name the data.

#![deny(unsafe_code)]

mod charts;
mod demo;
mod figures;
mod images;
mod lanes;
mod learner;
mod lenet;
mod page;
mod plan;
mod random;
mod results;
mod runner;
mod statistics;
mod study;
mod table;
mod text;
mod train;
mod transformer;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, Parser, Subcommand};

use crate::images::Images;
use crate::learner::Data;
use crate::plan::Task;
use crate::results::{Journal, Results, ResultsError};
use crate::runner::{Limits, Origin, Tasks};
use crate::study::{Scale, Study};
use crate::text::Text;

/// Trains with sum, mean and Adasum on 1 to 64 ranks, which are threads of this process.
#[derive(Parser)]
#[command(name = "convergence", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make a few runs, with the rates that the study chose, and write a page about their results
    Demo(Demo),
    /// Make all runs of the study that are not yet in its file, and print its tables
    Study(StudyArguments),
    /// Write the tables and charts of a study into the pages of a repository
    Page(Page),
}

#[derive(Args)]
struct Demo {
    #[command(flatten)]
    data: DemoData,
    /// The folder for report.html; created if missing
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Make a few short runs that only check that everything works
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct DemoData {
    /// The folder with the four files of Fashion-MNIST
    #[arg(long, value_name = "DIR")]
    images: Option<PathBuf>,
    /// scikit-learn's sklearn/datasets/data/digits.csv.gz, if Fashion-MNIST is not available
    #[arg(long, value_name = "FILE")]
    digits: Option<PathBuf>,
}

#[derive(Args)]
struct StudyArguments {
    /// The folder with the four files of Fashion-MNIST
    #[arg(long, value_name = "DIR")]
    images: PathBuf,
    /// The plays; without them the study has images only
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// The file of runs, one per line; runs that it contains are not repeated
    #[arg(long, value_name = "FILE")]
    results: PathBuf,
    /// Make a few short runs that only check that everything works
    #[arg(long)]
    quick: bool,
    /// Only this task (may be repeated)
    #[arg(long, value_name = "TASK", value_enum)]
    only: Vec<Task>,
    /// Numbers of ranks instead of the study's, separated by commas; 1 is always included
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = ranks)]
    ranks: Vec<usize>,
    /// Seeds for the figures instead of the study's, at least 3
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    seeds: Vec<u64>,
    /// Start no run after this many seconds
    #[arg(long, value_name = "SECONDS")]
    within: Option<u64>,
    #[command(flatten)]
    threads: Threads,
    /// The commit that this program was built from, which is recorded with its runs
    #[arg(long, default_value = "unknown")]
    commit: String,
}

#[derive(Args)]
struct Page {
    /// The runs
    #[arg(long, value_name = "FILE")]
    results: PathBuf,
    /// The repository
    #[arg(long, value_name = "DIR")]
    root: PathBuf,
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

fn ranks(text: &str) -> Result<usize, String> {
    let ranks = text.parse().map_err(|error| format!("{error}"))?;
    if (2..=256).contains(&ranks) { Ok(ranks) } else { Err("2 to 256 ranks".into()) }
}

fn main() -> ExitCode {
    one_thread_a_rank();
    let outcome = match Arguments::parse().command {
        Command::Demo(arguments) => demo(&arguments),
        Command::Study(arguments) => study(&arguments),
        Command::Page(arguments) => page(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Ranks are threads, and several runs are active at a time; candle and rayon would each start further threads. A value that the user sets
/// is kept.
#[allow(unsafe_code, reason = "it sets a variable while there is one thread")]
fn one_thread_a_rank() {
    const VARIABLE: &str = "RAYON_NUM_THREADS";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: this is the first thing that the program does, and no other thread exists yet.
        unsafe { std::env::set_var(VARIABLE, "1") };
    }
}

fn demo(arguments: &Demo) -> anyhow::Result<()> {
    let images = match (&arguments.data.images, &arguments.data.digits) {
        (Some(folder), _) => Images::fashion_mnist(folder)?,
        (None, Some(file)) => Images::digits(file)?,
        (None, None) => anyhow::bail!("no data are named"),
    };
    // The folder is created before the training, so that an error does not cost minutes.
    let folder = &arguments.output;
    std::fs::create_dir_all(folder).with_context(|| format!("{}: cannot be created", folder.display()))?;
    let scale = Scale::demo(arguments.quick);
    let searches = demo::searches(published()?, &scale);
    let specs = demo::specs(&Study { scale: &scale, results: &searches });
    anyhow::ensure!(!specs.is_empty(), "the study that is checked in has no rate for one rank");
    println!("data      {}", demo::about(images.source));
    println!("network   LeNet-5, {} images a rank and step; plain gradient descent", images.batch());
    println!(
        "runs      {}: mean, sum and Adasum on {:?} ranks, {:?} as seeds",
        specs.len(),
        study_ranks(&scale),
        scale.figure_seeds
    );
    let tasks = Tasks { images: Some(&images), text: None };
    let origin = Origin { machine: machine(), commit: String::new() };
    let limits = Limits { threads: arguments.threads.get(), within: None };
    let started = Instant::now();
    let results = runner::run(&tasks, (None, searches), &limits, &origin, &|_| specs.clone())?;
    let study = Study { scale: &scale, results: &results };
    println!("\n{}", demo::summary(&study));
    let path = demo::write(&study, &images, started.elapsed().as_secs_f64(), folder)?;
    println!("\nreport: {}", path.display());
    Ok(())
}

fn study_ranks(scale: &Scale) -> Vec<usize> {
    Study { scale, results: &Results::default() }.all_ranks()
}

fn study(arguments: &StudyArguments) -> anyhow::Result<()> {
    let images = Images::fashion_mnist(&arguments.images)?;
    let text = arguments.text.as_deref().map(Text::read).transpose()?;
    let tasks = Tasks { images: Some(&images), text: text.as_ref().map(|text| text as &dyn Data) };
    let scale = if arguments.quick { Scale::quick() } else { Scale::full() };
    let scale = scale.with(&arguments.ranks, &arguments.seeds);
    anyhow::ensure!(
        scale.figure_seeds.len() >= statistics::LEAST,
        "{} seeds are too few to compare",
        scale.figure_seeds.len()
    );
    let (journal, results) = Journal::open(&arguments.results)?;
    let origin = Origin { machine: machine(), commit: arguments.commit.clone() };
    let limits = Limits { threads: arguments.threads.get(), within: arguments.within.map(Duration::from_secs) };
    let mut known = tasks.known();
    known.retain(|task| arguments.only.is_empty() || arguments.only.contains(task));
    let plan = |results: &_| Study { scale: &scale, results }.specs(&known);
    let results = runner::run(&tasks, (Some(journal), results), &limits, &origin, &plan)?;
    let left = plan(&results).iter().filter(|spec| !results.has(spec)).count();
    println!("{}", page::text(&Study { scale: &scale, results: &results }));
    println!("{} runs in {}, {left} known to be missing", results.records.len(), arguments.results.display());
    Ok(())
}

fn page(arguments: &Page) -> anyhow::Result<()> {
    let path = &arguments.results;
    let text = std::fs::read_to_string(path).with_context(|| format!("{}: cannot be read", path.display()))?;
    Ok(page::write(&page::files(&Results::parse(&text, path)?, &arguments.root)?)?)
}

/// The published study of the repository.
fn published() -> Result<Results, ResultsError> {
    const RUNS: &str = include_str!("../../measured/convergence/runs.jsonl");
    Results::parse(RUNS, Path::new("tests/measured/convergence/runs.jsonl"))
}

/// The processor and the number of threads, as far as Linux reports them.
fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split(": ").nth(1));
    let threads = std::thread::available_parallelism().map_or(0, NonZeroUsize::get);
    let ending = if threads == 1 { "" } else { "s" };
    format!("{}, {threads} thread{ending}", name.unwrap_or(std::env::consts::ARCH))
}
