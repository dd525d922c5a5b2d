//! `digits`: eight ranks learn to read handwritten digits, three times from the same start: gradients reduced by mean,
//! by sum, and by Adasum. What `cargo xtask demo` runs.
//!
//! Training is candle's (CPU, f32); everything between `backward()` and the optimiser's step is gradsync's: accumulation
//! over micro-batches in a `GradientBuffer`, the all-reduce, the exchange between ranks (threads of this process).
//! Prints a table and writes a report; reports whatever comes out. Never fetches anything: `--data` names the file
//! (`data.rs` says which, where it is from, and its licence: UCI, CC BY 4.0, as carried by scikit-learn).

mod charts;
mod curve;
mod data;
mod figures;
mod model;
mod plan;
mod random;
mod report;
mod search;
mod table;
mod train;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use crate::data::{Digits, Split};
use crate::model::{Network, WIDTHS};
use crate::plan::{Mode, Plan};
use crate::search::{RATES, Search};

/// Trains a small network on handwritten digits with mean, sum and Adasum gradients.
#[derive(Parser)]
#[command(name = "digits", version)]
struct Arguments {
    /// The digits: scikit-learn's sklearn/datasets/data/digits.csv.gz.
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Folder for report.html; created if missing.
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Ranks, each a thread with its own copy of the network and its own 40 images a step.
    #[arg(long, default_value_t = 8, value_parser = parse_ranks)]
    ranks: usize,
    /// Passes over the training images in every run [default: 40; 10 with --quick].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "steps")]
    epochs: Option<u32>,
    /// Steps in every run, instead of --epochs.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    steps: Option<u32>,
    /// Decides initial weights and batches; the test images are the same for all seeds.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fewer epochs and every third learning rate: a few seconds, for checking that all of it runs.
    #[arg(long)]
    quick: bool,
}

fn parse_ranks(text: &str) -> Result<usize, String> {
    let ranks = text.parse().map_err(|error| format!("{error}"))?;
    if (1..=64).contains(&ranks) { Ok(ranks) } else { Err("1 to 64 ranks".into()) }
}

/// Everything that the table and the report are made of.
pub(crate) struct Outcome {
    pub(crate) plan: Plan,
    pub(crate) steps_per_epoch: usize,
    pub(crate) rows: [usize; 3],
    pub(crate) searches: Vec<Search>,
    /// Wall-clock of all runs, scoring included.
    pub(crate) seconds: f64,
}

fn main() -> ExitCode {
    one_thread_a_rank();
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The ranks are the threads. candle and rayon would each start more of them for every matrix product, which made the
/// training half as fast on two cores. Who sets the variable keeps his value.
fn one_thread_a_rank() {
    const VARIABLE: &str = "RAYON_NUM_THREADS";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: this is the first thing that the program does, and no other thread exists yet.
        unsafe { std::env::set_var(VARIABLE, "1") };
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let digits = Digits::read(&arguments.data)?;
    let split = Split::of(&digits);
    // Now rather than after the training: a folder that cannot be made should not cost a minute.
    std::fs::create_dir_all(&arguments.output)
        .with_context(|| format!("{}: cannot be created", arguments.output.display()))?;

    let mut plan = Plan {
        ranks: arguments.ranks,
        micro_batches: 4,
        micro_batch: 10,
        steps: 0,
        momentum: 0.9,
        seed: arguments.seed,
    };
    let steps_per_epoch = plan.steps_per_epoch(split.train.len())?;
    let epochs = arguments.epochs.unwrap_or(if arguments.quick { 10 } else { 40 });
    plan.steps = arguments.steps.map_or(epochs as usize * steps_per_epoch, |steps| steps as usize);
    let stride = if arguments.quick { 3 } else { 1 };
    let rates: Vec<f32> = RATES.into_iter().step_by(stride).collect();

    let widths = WIDTHS.map(|width| width.to_string()).join("-");
    println!("data      {}", data::SOURCE);
    println!("licence   {}", data::LICENCE);
    println!(
        "images    {}: {} to train on, {} to choose the learning rate by, {} for the test",
        table::thousands(digits.len()),
        table::thousands(split.train.len()),
        split.validation.len(),
        split.test.len()
    );
    println!("network   {widths} perceptron, {} parameters, f32, on the CPU", table::thousands(Network::size()));
    println!(
        "batch     {} = {} ranks x {} micro-batches x {} images; SGD with momentum {}",
        plan.batch(),
        plan.ranks,
        plan.micro_batches,
        plan.micro_batch,
        plan.momentum
    );
    println!(
        "runs      {} steps each, 3 modes x {} learning rates, same start and same batches",
        plan.steps,
        rates.len()
    );

    let started = Instant::now();
    let mut searches = Vec::new();
    for mode in Mode::ALL {
        let progress = progress_bar(mode, rates.len() * plan.steps);
        let search = Search::run(&plan, mode, &rates, &digits, &split, &|| progress.inc(1))?;
        progress.finish();
        if progress.is_hidden() {
            eprintln!(
                "{:<7} {} runs in {:.1} s; learning rate {}",
                mode.name(),
                rates.len(),
                progress.elapsed().as_secs_f64(),
                table::rate(search.best().rate)
            );
        }
        searches.push(search);
    }
    let outcome = Outcome {
        plan,
        steps_per_epoch,
        rows: [split.train.len(), split.validation.len(), split.test.len()],
        searches,
        seconds: started.elapsed().as_secs_f64(),
    };

    println!("\n{}", table::text(&outcome));
    for remark in report::remarks(&outcome) {
        println!("- {remark}");
    }
    let path = report::write(&outcome, &arguments.output)?;
    println!("\nreport: {}", path.display());
    Ok(())
}

/// Hidden where stderr is not a terminal: the caller prints a line instead.
fn progress_bar(mode: Mode, steps: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{prefix:<7} {bar:40} {pos:>5}/{len} steps {elapsed:>4}, {eta} left")
        .expect("the template is a constant");
    ProgressBar::new(steps as u64).with_style(style).with_prefix(mode.name())
}
