//! `gradsync-bench standing`, which `cargo xtask bench` runs: the standing set of measurements, and a report of them, `report.html`.
//!
//! `perf` measures, checks and draws; this module starts it as a process of its own for each part of the set, and combines the results. A
//! part that this machine cannot run is listed with the reason. The repository's files are not used. The report is rewritten after each
//! part, so that an interrupted run leaves a report too.

mod goals;
mod page;
mod parts;

use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;

use self::parts::{Needs, PARTS, Part};
use crate::mpirun;
use crate::perf::places::gpus;

/// Ranks of the parts that run under mpirun.
const MPI_RANKS: usize = 8;
/// Disables the driver's cache, so that it compiles every kernel.
const NO_CACHE: &str = "CUDA_CACHE_DISABLE";
/// The deadline of one part.
const DEADLINE: Duration = Duration::from_secs(3600);

/// The arguments of `gradsync-bench standing`.
#[derive(Args)]
pub(crate) struct Standing {
    /// Small sizes and few iterations: whether everything runs, not how fast it is
    #[arg(long)]
    quick: bool,
    /// Only this part of the set (may be repeated)
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Start no part after this much time: for rented machines
    #[arg(long, value_name = "SECONDS")]
    within: Option<NonZeroU64>,
    /// The folder for the report and its parts' files
    #[arg(long, value_name = "FOLDER", default_value = "bench")]
    out: PathBuf,
}

/// The outcome of a part.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    Measured,
    NotRun(String),
    Failed(String),
}

/// A part's results in the report.
struct Shown {
    part: &'static Part,
    ended: Ended,
    /// The command in a shell's syntax.
    command: String,
    seconds: f64,
    /// The standard output of the program.
    text: String,
    svg: Option<String>,
    json: Option<Value>,
}

impl Shown {
    fn not_run(part: &'static Part, why: String) -> Self {
        let (command, text) = (String::new(), String::new());
        Self { part, ended: Ended::NotRun(why), command, seconds: 0.0, text, svg: None, json: None }
    }
}

/// The environment of the parts.
struct Bench {
    /// The path of this program.
    program: PathBuf,
    folder: PathBuf,
    mpirun: Result<(), String>,
    gpus: Result<usize, String>,
    is_quick: bool,
}

impl Standing {
    pub(crate) fn run(self) -> Result<()> {
        let wanted: Vec<&'static Part> = PARTS
            .iter()
            .filter(|part| self.only.is_empty() || self.only.iter().any(|name| name == part.name))
            .collect();
        let names = || PARTS.iter().map(|part| part.name).collect::<Vec<_>>().join(", ");
        if let Some(name) = self.only.iter().find(|name| PARTS.iter().all(|part| part.name != name.as_str())) {
            bail!("--only {name}: there are {}", names());
        }
        let bench = self.prepare()?;
        let start = Instant::now();
        let mut shown = Vec::new();
        for part in wanted {
            println!("\n=== {}: {} ===", part.name, part.title);
            let is_late = |within: &NonZeroU64| start.elapsed().as_secs() >= within.get();
            let late = self.within.filter(is_late).map(|within| format!("the {within} seconds of --within had passed"));
            shown.push(match bench.missing(part).or(late) {
                Some(why) => {
                    println!("not run: {why}");
                    Shown::not_run(part, why)
                }
                None => bench.measure(part)?,
            });
            bench.report(&shown, None)?;
        }
        let model = bench.model(&shown);
        let report = bench.report(&shown, Some(&model))?;
        println!("\n{}wrote {} after {:.0} s", page::verdicts(&shown), report.display(), start.elapsed().as_secs_f64());
        let failed: Vec<_> =
            shown.iter().filter(|shown| matches!(shown.ended, Ended::Failed(_))).map(|shown| shown.part.name).collect();
        if failed.is_empty() { Ok(()) } else { bail!("failed: {}", failed.join(", ")) }
    }

    /// Determines the launcher and the GPUs of this machine.
    fn prepare(&self) -> Result<Bench> {
        let program = env::current_exe().context("cannot find this program")?;
        fs::create_dir_all(&self.out).with_context(|| format!("cannot make {}", self.out.display()))?;
        let folder = fs::canonicalize(&self.out).with_context(|| format!("cannot find {}", self.out.display()))?;
        let gpus = gpus().map_err(|error| error.to_string());
        Ok(Bench { program, folder, mpirun: mpirun::find(), gpus, is_quick: self.quick })
    }
}

impl Bench {
    /// The requirement of a part that this machine does not meet, with the reason.
    fn missing(&self, part: &Part) -> Option<String> {
        match (part.needs, &self.mpirun, &self.gpus) {
            (Needs::Mpi, Err(why), _) | (Needs::Gpus(_), _, Err(why)) => Some(why.clone()),
            (Needs::Gpus(needed), _, Ok(found)) if *found < needed => {
                Some(format!("it needs {needed} GPUs, and there are {found}"))
            }
            _ => None,
        }
    }

    fn measure(&self, part: &'static Part) -> Result<Shown> {
        let file = |extension: &str| self.folder.join(part.name).with_extension(extension);
        let [json, svg, text] = ["json", "svg", "txt"].map(file);
        for file in [&json, &svg, &text] {
            if file.exists() {
                fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display()))?;
            }
        }
        let mut command = match part.needs {
            Needs::Mpi => mpirun::command(MPI_RANKS, DEADLINE, &self.program),
            _ => Command::new(&self.program),
        };
        command.arg("perf").args(part.arguments(self.is_quick)).arg("--json").arg(&json);
        if part.needs == Needs::Gpus(1) {
            // Kernels that an earlier run loaded would come from the driver's cache. Ranks as threads keep the cache, because otherwise
            // each would compile all kernels, one after the other.
            command.env(NO_CACHE, "1");
        }
        if part.has_plot {
            command.arg("--plot").arg(&svg);
        }
        let shown = self.shown(part, &command);
        println!("$ {shown}");
        let start = Instant::now();
        let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot start {command:?}"))?;
        let mut printed = String::new();
        for line in BufReader::new(child.stdout.take().context("no standard output")?).lines() {
            let line = line.context("the program printed something that is not UTF-8")?;
            println!("{line}");
            printed += &(line + "\n");
        }
        let status = child.wait().context("cannot wait for the program")?;
        let seconds = start.elapsed().as_secs_f64();
        fs::write(&text, &printed).with_context(|| format!("cannot write {}", text.display()))?;
        let read = |path: &Path| fs::read_to_string(path).ok();
        let document = read(&json).and_then(|text| serde_json::from_str(&text).ok());
        let ended = match &document {
            _ if !status.success() => {
                let why = document.as_ref().and_then(|json: &Value| json["failure"].as_str());
                Ended::Failed(why.map_or(format!("`perf` ended with {status}"), str::to_owned))
            }
            None => Ended::Failed(format!("no JSON at {}", json.display())),
            Some(_) => Ended::Measured,
        };
        println!("--- {}: {seconds:.1} s", part.name);
        Ok(Shown { part, ended, command: shown, seconds, text: printed, svg: read(&svg), json: document })
    }

    /// The command as a user would type it in the report's folder.
    fn shown(&self, part: &Part, command: &Command) -> String {
        let is_uncached = command.get_envs().any(|(name, _)| name == NO_CACHE);
        let variable = if is_uncached { format!("{NO_CACHE}=1 ") } else { String::new() };
        let processes = if part.needs == Needs::Mpi { format!(" --processes {MPI_RANKS}") } else { String::new() };
        let arguments = command.get_args().skip_while(|word| *word != "perf").skip(1).map(Path::new);
        let words = arguments.map(|word| word.strip_prefix(&self.folder).unwrap_or(word).display().to_string());
        format!("{variable}cargo xtask perf{processes} {}", words.collect::<Vec<_>>().join(" "))
    }

    /// The output of the cost model, fitted to the measurements on GPUs if there are any.
    fn model(&self, shown: &[Shown]) -> String {
        let arguments = ["perf", "--model", "-b", "1M", "-e", "1G", "-f", "32", "--layers", "398"];
        let mut command = Command::new(&self.program);
        command.args(arguments).stderr(Stdio::inherit());
        let is_known = |shown: &&Shown| shown.part.is_for_the_model && shown.ended == Ended::Measured;
        for part in shown.iter().filter(is_known).map(|shown| shown.part) {
            command.arg("--fit").arg(self.folder.join(part.name).with_extension("json"));
        }
        command.arg("--json").arg(self.folder.join("model.json"));
        match command.output() {
            Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).into_owned(),
            Ok(output) => format!("the model failed: it ended with {}", output.status),
            Err(error) => format!("the model failed: {error}"),
        }
    }

    /// Writes the report of the results so far.
    fn report(&self, shown: &[Shown], model: Option<&str>) -> Result<PathBuf> {
        let report = self.folder.join("report.html");
        let invoked = env::args().skip(1).collect::<Vec<_>>().join(" ");
        let page = page::page(shown, model, &format!("gradsync-bench {invoked}"));
        fs::write(&report, page).with_context(|| format!("cannot write {}", report.display()))?;
        Ok(report)
    }
}
