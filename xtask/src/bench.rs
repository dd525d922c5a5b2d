//! `cargo xtask bench`: the standing set of measurements, and a report of them, `target/bench/report.html`.
//!
//! `gradsync perf` measures, judges and draws; here it is built, started once for each part of the set, and put together. A part that
//! this machine cannot run is listed with the reason. With `--prebuilt` nothing here needs cargo or the sources: no path of the
//! repository is looked at. The report is written anew after each part: a run that is cut short leaves one.

mod goals;
mod horovod;
mod page;
mod parts;

use std::{
    env, fs,
    io::{BufRead, BufReader},
    num::NonZeroU64,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{
    bundle, flags, libcuda,
    multi_gpu::{self, mpirun::Mpirun},
    process::{Cmd, target},
    toolchain::{self, Need, Toolchain},
};
use parts::{Needs, PARTS, Part};

/// Ranks of the parts that run under mpirun.
const MPI_RANKS: usize = 8;
/// Has the driver compile everything anew.
const NO_CACHE: &str = "CUDA_CACHE_DISABLE";
/// For one part.
const DEADLINE: Duration = Duration::from_secs(3600);
/// The program in a folder of `--prebuilt`.
const PROGRAM: &str = "gradsync";

/// How a part ended.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    Measured,
    NotRun(String),
    Failed(String),
}

/// A part as the report shows it.
struct Shown {
    part: &'static Part,
    ended: Ended,
    /// As a shell would take it.
    command: String,
    seconds: f64,
    /// What the program printed.
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

/// What parts are run with.
struct Bench {
    program: PathBuf,
    folder: PathBuf,
    mpirun: Result<Mpirun, String>,
    gpus: Result<usize, String>,
    is_quick: bool,
}

impl flags::Bench {
    pub(crate) fn run(self) -> Result<()> {
        if let Some(flags::Peer::Horovod) = self.peer {
            return horovod::run(&self);
        }
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

    /// Builds or finds the program, and looks at what is here.
    fn prepare(&self) -> Result<Bench> {
        let found =
            |program: PathBuf| fs::canonicalize(&program).with_context(|| format!("cannot find {}", program.display()));
        let (program, default) = match (&self.prebuilt, &self.program) {
            (Some(folder), _) => (found(folder.join(PROGRAM))?, PathBuf::from("bench")),
            (None, Some(program)) => (found(program.clone())?, target("bench")),
            (None, None) => (build(&self.setup)?, target("bench")),
        };
        let folder = self.out.clone().unwrap_or(default);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let folder = fs::canonicalize(&folder).with_context(|| format!("cannot find {}", folder.display()))?;
        let mpirun = if has_mpi(&program)? { Mpirun::find() } else { Err("the program was built without MPI".into()) };
        Ok(Bench { program, folder, mpirun, gpus: multi_gpu::gpus(), is_quick: self.quick })
    }
}

/// The program, with all that this machine can build.
fn build(setup: &flags::Setup) -> Result<PathBuf> {
    Toolchain::new(setup).provide(&[Need::CCompiler])?;
    let features = if toolchain::mpi::is_here() { "cuda,mpi" } else { "cuda" };
    let package = ["--package", "gradsync-cli", "--bin", "gradsync", "--features", features];
    bundle::executable(libcuda::linked(Cmd::cargo("build").arg("--release").args(package))?, "gradsync")
}

/// Whether the program has a transport over MPI.
fn has_mpi(program: &Path) -> Result<bool> {
    let told = Cmd::new(program).args(["info", "--json"]).folder(".").quiet().read()?;
    let told: Value = serde_json::from_str(&told).context("`gradsync info --json` printed no JSON")?;
    Ok(told["features"].as_array().is_some_and(|features| features.iter().any(|feature| feature == "mpi")))
}

impl Bench {
    /// What this machine lacks for a part.
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
        let mut command = match self.mpirun.as_ref().ok().filter(|_| part.needs == Needs::Mpi) {
            Some(mpirun) => {
                let mut command = mpirun.command(MPI_RANKS, DEADLINE);
                command.arg(&self.program);
                command
            }
            None => Command::new(&self.program),
        };
        command.arg("perf").args(part.arguments(self.is_quick)).arg("--json").arg(&json);
        if part.needs == Needs::Gpus(1) {
            // Kernels that an earlier run has loaded would come out of the driver's cache. Of ranks that are threads, each would compile
            // for itself without it, one after the other.
            command.env(NO_CACHE, "1");
        }
        if part.has_plot {
            command.arg("--plot").arg(&svg);
        }
        let shown = self.shown(&command);
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
                Ended::Failed(why.map_or(format!("`gradsync perf` ended with {status}"), str::to_owned))
            }
            None => Ended::Failed(format!("no JSON at {}", json.display())),
            Some(_) => Ended::Measured,
        };
        println!("--- {}: {seconds:.1} s", part.name);
        Ok(Shown { part, ended, command: shown, seconds, text: printed, svg: read(&svg), json: document })
    }

    /// A command as somebody would type it who has the program on the path, in the folder of the report.
    fn shown(&self, command: &Command) -> String {
        let is_uncached = command.get_envs().any(|(name, _)| name == NO_CACHE);
        let variable = is_uncached.then(|| format!("{NO_CACHE}=1"));
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let word = |word: &std::ffi::OsStr| match Path::new(word) {
            program if program == self.program => "gradsync".to_owned(),
            path => path.strip_prefix(&self.folder).unwrap_or(path).display().to_string(),
        };
        variable.into_iter().chain(words.map(word)).collect::<Vec<_>>().join(" ")
    }

    /// The cost model, fitted to what GPUs were measured with where there are some.
    fn model(&self, shown: &[Shown]) -> String {
        let arguments = ["perf", "--model", "-b", "1M", "-e", "1G", "-f", "32", "--layers", "398"];
        let mut command = Cmd::new(&self.program).args(arguments).folder(".");
        let is_known = |shown: &&Shown| shown.part.is_for_the_model && shown.ended == Ended::Measured;
        for part in shown.iter().filter(is_known).map(|shown| shown.part) {
            command = command.arg("--fit").arg(self.folder.join(part.name).with_extension("json"));
        }
        command = command.arg("--json").arg(self.folder.join("model.json"));
        command.read().unwrap_or_else(|error| format!("the model failed: {error:#}"))
    }

    /// Writes the report of what there is so far.
    fn report(&self, shown: &[Shown], model: Option<&str>) -> Result<PathBuf> {
        let report = self.folder.join("report.html");
        let invoked = env::args().skip(1).collect::<Vec<_>>().join(" ");
        let page = page::page(shown, model, &format!("xtask {invoked}"));
        fs::write(&report, page).with_context(|| format!("cannot write {}", report.display()))?;
        Ok(report)
    }
}
