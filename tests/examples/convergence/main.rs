//! `convergence`: does a learning rate that was tuned for one rank remain good as ranks are added? The program compares sum, mean and
//! Adasum.
//!
//! `study` makes all runs of a protocol and keeps them in a file; `demo` makes a smaller study and writes a page. `cargo xtask study` and
//! `cargo xtask demo` run this program. It never downloads anything: arguments name the data.

#![forbid(unsafe_code)]

mod chart;
mod demo;
mod images;
mod lanes;
mod lenet;
mod page;
mod random;
mod results;
mod runner;
mod study;
mod table;
mod tables;
mod train;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser};

use crate::images::Images;
use crate::results::Runs;
use crate::runner::Runner;
use crate::study::{Scale, Study};

/// Trains with sum, mean and Adasum on 1 to 64 ranks, which are threads of this process.
#[derive(Parser)]
#[command(name = "convergence", version)]
enum Command {
    /// Make a study of a few minutes, and write a page about its results
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
    #[command(flatten)]
    common: Common,
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
    /// The file of runs, one per line; runs that it contains are not repeated
    #[arg(long, value_name = "FILE")]
    results: PathBuf,
    /// Numbers of ranks instead of the study's, separated by commas; 1 is always included
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = ranks)]
    ranks: Vec<usize>,
    /// Seeds for the figures instead of the study's, at least 3, below 100
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    seeds: Vec<u64>,
    /// Start no run after this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = u64::MAX)]
    within: u64,
    /// The commit that this program was built from, which is recorded with its runs
    #[arg(long, default_value = "unknown")]
    commit: String,
    #[command(flatten)]
    common: Common,
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
struct Common {
    /// Make a few short runs that only check that everything works
    #[arg(long)]
    quick: bool,
    /// Runs at a time [default: the processor's threads]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
}

impl Common {
    fn runner<'a>(&self, scale: &'a Scale, images: &'a Images, within: Duration, commit: &str) -> Runner<'a> {
        let threads = self.threads.map_or_else(processors, NonZeroUsize::get);
        Runner { scale, images, threads, within, machine: machine(), commit: commit.to_owned() }
    }
}

fn ranks(text: &str) -> Result<usize, String> {
    let ranks = text.parse().map_err(|error| format!("{error}"))?;
    if (2..=256).contains(&ranks) { Ok(ranks) } else { Err("2 to 256 ranks".into()) }
}

fn main() -> ExitCode {
    let outcome = match Command::parse() {
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

fn demo(Demo { data, output, common }: &Demo) -> Result<()> {
    let images = match (&data.images, &data.digits) {
        (Some(folder), _) => Images::fashion_mnist(folder)?,
        (None, file) => Images::digits(file.as_ref().context("no data are named")?)?,
    };
    // The folder is created before the training, so that an error does not cost minutes.
    std::fs::create_dir_all(output).with_context(|| format!("{}: cannot be created", output.display()))?;
    let scale = if common.quick { Scale::demo().quick() } else { Scale::demo() };
    println!("data      {}", demo::about(images.source));
    println!("network   LeNet-5, {} images a rank and step; plain gradient descent", lanes::BATCH);
    println!("runs      about 100: a search for learning rates, then mean, sum and Adasum on more and more ranks");
    let started = Instant::now();
    let runs = common.runner(&scale, &images, Duration::MAX, "").run(Runs::default())?;
    let study = Study { scale: &scale, runs: &runs };
    println!("\n{}", demo::summary(&study));
    let facts = [started.elapsed().as_secs().to_string(), machine()];
    let path = demo::write(&study, &images, facts, common.quick, output)?;
    println!("\nreport: {}", path.display());
    Ok(())
}

fn study(arguments: &StudyArguments) -> Result<()> {
    let StudyArguments { images, results, ranks, seeds, within, commit, common } = arguments;
    ensure!(seeds.is_empty() || seeds.len() >= 3, "{} seeds are too few to compare", seeds.len());
    ensure!(seeds.iter().all(|&seed| seed < 100), "seeds from 100 on are for the choice of rates: {seeds:?}");
    let images = Images::fashion_mnist(images)?;
    let scale = if common.quick { Scale::full().quick() } else { Scale::full() };
    let scale = scale.with(ranks, seeds);
    let runner = common.runner(&scale, &images, Duration::from_secs(*within), commit);
    let runs = runner.run(Runs::open(results)?)?;
    let study = Study { scale: &scale, runs: &runs };
    let left = study.plan().iter().filter(|spec| runs.get(spec).is_none()).count();
    println!("{}{} runs in {}, {left} known to be missing", page::text(&study), runs.records.len(), results.display());
    Ok(())
}

fn page(Page { results, root }: &Page) -> Result<()> {
    let text = std::fs::read_to_string(results).with_context(|| format!("{}: cannot be read", results.display()))?;
    page::write(&page::files(&Runs::parse(&text, results)?, root)?)
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// The processor and the number of threads, as far as Linux reports them.
fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split(": ").nth(1));
    let threads = processors();
    let ending = if threads == 1 { "" } else { "s" };
    format!("{}, {threads} thread{ending}", name.unwrap_or(std::env::consts::ARCH))
}
