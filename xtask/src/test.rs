//! `cargo xtask test`: the stages, their commands, and the table at the end. CI runs only this command.
//!
//! A stage passes, fails, or is not run for a reason that is printed; no stage is skipped without a reason.

mod downstream;
mod mpi;
mod nodes;
mod package;
mod systems;

use std::{
    io,
    io::Write,
    path::PathBuf,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum as _;

use crate::{
    bundle, demo,
    flags::{self, Stage},
    multi_gpu,
    process::Cmd,
    ptx::{self, Freshness},
    ptxas,
    toolchain::{self, Need, Toolchain, device_compiler::DeviceCompiler, python},
};

/// The outcome of a stage that did not fail.
#[derive(Debug)]
enum Outcome {
    Passed(String),
    NotRun(String),
}

/// One line of the closing table.
struct Row {
    stage: Stage,
    outcome: Result<Outcome>,
    time: Duration,
}

impl Stage {
    const ALL: &'static [Self] = &[
        Self::Fmt,
        Self::Tidy,
        Self::Ptx,
        Self::Ptxas,
        Self::Dialect,
        Self::Deny,
        Self::Tests,
        Self::Mpi,
        Self::Nodes,
        Self::MpiAbi,
        Self::Demo,
        Self::Clippy,
        Self::Docs,
        Self::Systems,
        Self::Downstream,
        Self::Gpu,
    ];

    fn needs(self) -> &'static [Need] {
        match self {
            Self::Fmt => &[Need::Rustfmt],
            Self::Dialect => &[Need::Clippy],
            Self::Deny => &[Need::CargoDeny],
            Self::Ptx | Self::Systems => &[Need::DeviceCompiler],
            Self::Ptxas => &[Need::Ptxas],
            Self::Clippy => &[Need::Clippy, Need::CCompiler, Need::Mpi],
            Self::Gpu if multi_gpu::gpus().is_ok() => &[Need::CCompiler, Need::Mpi],
            Self::Tests => &[Need::CCompiler, Need::PythonPackages, Need::NcclHeader],
            Self::Mpi => &[Need::CCompiler, Need::Mpi],
            Self::Nodes => &[Need::CCompiler, Need::Mpi, Need::Namespaces],
            Self::MpiAbi => &[Need::CCompiler, Need::Libclang, Need::Mpich, Need::Namespaces],
            Self::Demo => &[Need::CCompiler, Need::Images],
            Self::Tidy | Self::Docs | Self::Downstream | Self::Gpu => &[],
        }
    }

    /// The reason why the stage runs only if it is named.
    fn only_if_named(self) -> Option<&'static str> {
        match self {
            Self::Deny => Some("its installation takes four minutes; `cargo xtask test --only deny` runs it"),
            Self::MpiAbi => Some("it takes ten minutes; `cargo xtask test --only mpi-abi` runs it"),
            _ => None,
        }
    }

    /// The commands by which cargo compiles what the stage needs, if an earlier stage can run them while its tests wait.
    fn compilation(self) -> Vec<Cmd> {
        match self {
            Self::Demo if compiles_candle() => demo_programs().into(),
            Self::Clippy => lints(),
            Self::Docs => docs(),
            _ => Vec::new(),
        }
    }

    /// Runs the stage; `compiler` compiles what `later` stages need while tests wait.
    fn run(self, later: &[Self], compiler: &mut Compiler) -> Result<Outcome> {
        match self {
            Self::Fmt => passed(Cmd::cargo("fmt").args(["--all", "--check"]).run()),
            Self::Tidy => passed(Cmd::cargo("test").args(["--package", "xtask", "--quiet"]).run()),
            Self::Ptx => check_ptx(),
            Self::Ptxas => Ok(Outcome::Passed(ptxas::assemble_all()?)),
            Self::Clippy => clippy(),
            Self::Dialect => dialect(),
            Self::Deny => deny(),
            Self::Docs => passed(docs().iter().try_for_each(Cmd::run)),
            Self::Tests => tests(later, compiler),
            Self::Mpi => Ok(Outcome::Passed(mpi::run(compiler)?)),
            Self::Nodes => nodes::run(&mpi::launcher()?, &mpi::program()?),
            Self::MpiAbi => Ok(Outcome::Passed(mpi::run_abi(compiler)?)),
            Self::Demo => demo(),
            Self::Systems => Ok(Outcome::Passed(systems::check()?)),
            Self::Downstream => Ok(Outcome::Passed(downstream::build_and_run()?)),
            Self::Gpu => gpu(),
        }
    }
}

impl flags::Test {
    pub(crate) fn run(self) -> Result<()> {
        let stages: Vec<Stage> =
            Stage::ALL.iter().copied().filter(|stage| self.only.is_empty() || self.only.contains(stage)).collect();
        let left_out = |stage: Stage| stage.only_if_named().filter(|_| self.only.is_empty());
        let toolchain = Toolchain::new(&self.setup);
        let unavailable = set_up(&toolchain, stages.iter().copied().filter(|&stage| left_out(stage).is_none()))?;

        let (mut rows, mut compiler) = (Vec::new(), Compiler::default());
        for (index, &stage) in stages.iter().enumerate() {
            let later = &stages[index + 1..];
            println!("\n=== {} ===", name(stage));
            let start = Instant::now();
            if !stage.compilation().is_empty() {
                compiler.wait();
            }
            let outcome = match (stage, &unavailable) {
                // Even without a compiler for device code, the hash of its sources can be compared.
                (Stage::Ptx, Unavailable { device_compiler: Some(why), .. }) => {
                    Stage::Ptx.run(later, &mut compiler).map(|_| Outcome::NotRun(why.clone()))
                }
                (Stage::Systems, Unavailable { device_compiler: Some(why), .. }) => Ok(Outcome::NotRun(why.clone())),
                (Stage::Mpi | Stage::Nodes, Unavailable { mpi: Some(why), .. }) => Ok(Outcome::NotRun(why.clone())),
                _ => match left_out(stage) {
                    Some(why) => Ok(Outcome::NotRun(why.to_owned())),
                    None => stage.run(later, &mut compiler),
                },
            };
            if let Err(error) = &outcome {
                println!("FAILED: {error:#}");
            }
            rows.push(Row { stage, outcome, time: start.elapsed() });
            // Cargo writes to standard error; flushing keeps the two streams in order.
            io::stdout().flush().context("cannot write to standard output")?;
        }
        report(&rows)
    }
}

/// The tools that this machine cannot have, with the reasons; all other stages can run.
#[derive(Debug, Default)]
struct Unavailable {
    device_compiler: Option<String>,
    mpi: Option<String>,
}

/// Provides the stages' needs. A distribution may have no compiler for device code, and MPI may be impossible to install: these are
/// returned as reasons. Any other missing need is an error.
fn set_up(toolchain: &Toolchain, stages: impl Iterator<Item = Stage>) -> Result<Unavailable> {
    let mut needs: Vec<Need> = Vec::new();
    for need in stages.flat_map(Stage::needs) {
        if !needs.contains(need) {
            needs.push(*need);
        }
    }
    let mut unavailable = Unavailable::default();
    if needs.contains(&Need::DeviceCompiler) && !toolchain.can_have_device_compiler() {
        needs.retain(|&need| need != Need::DeviceCompiler);
        if let Err(error) = DeviceCompiler::find() {
            println!("{error:#}");
        }
        let why = "no compiler for device code here, and this distribution has no rustc-web >= 1.89 that installs beside its other packages";
        unavailable.device_compiler = Some(why.to_owned());
    }
    if toolchain.installs() && needs.contains(&Need::Mpi) {
        needs.retain(|&need| need != Need::Mpi);
        if let Err(error) = toolchain.provide(&[Need::Mpi]) {
            let why = format!("no MPI here, and it cannot be installed: {error:#}");
            println!("{why}");
            unavailable.mpi = Some(why.replace('\n', " "));
        }
    }
    toolchain.provide(&needs)?;
    Ok(unavailable)
}

fn report(rows: &[Row]) -> Result<()> {
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    println!("\n{:<12} {:>8}  result", "stage", "seconds");
    for row in rows {
        let result = match &row.outcome {
            Ok(Outcome::Passed(note)) => {
                passed += 1;
                if note.is_empty() { "passed".to_owned() } else { format!("passed: {note}") }
            }
            Ok(Outcome::NotRun(why)) => {
                skipped += 1;
                format!("not run: {why}")
            }
            Err(error) => {
                failed += 1;
                let error = format!("{error:#}");
                format!("FAILED: {}", error.lines().next().unwrap_or_default())
            }
        };
        println!("{:<12} {:>8.1}  {result}", name(row.stage), row.time.as_secs_f64());
    }
    if failed > 0 {
        // The error is printed first, so that the counts are always the last line.
        eprintln!("xtask: {failed} of {} stages failed", rows.len());
    }
    println!("\n{passed} passed, {failed} failed, {skipped} skipped");
    io::stdout().flush().context("cannot write to standard output")?;
    if failed > 0 {
        std::process::exit(1);
    }
    Ok(())
}

fn name(stage: Stage) -> String {
    stage.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

fn passed(result: Result<()>) -> Result<Outcome> {
    result.map(|()| Outcome::Passed(String::new()))
}

fn check_ptx() -> Result<Outcome> {
    Ok(match ptx::check()? {
        Freshness::Identical { files } => Outcome::Passed(format!("{files} files rebuilt, all identical")),
        Freshness::OtherCompiler { note } => Outcome::Passed(note),
        Freshness::NotRebuilt { why } => Outcome::NotRun(why.lines().next().unwrap_or_default().to_owned()),
    })
}

/// Lints of all members with nothing optional, of the published crates with each native library alone, and of all members with as many of
/// these libraries as the machine can have.
fn lints() -> Vec<Cmd> {
    let lint = |packages: &[&str], features: &str| {
        let cmd = Cmd::cargo("clippy").args(["--quiet", "--all-targets"]).args(packages);
        cmd.args(["--features", features]).args(["--", "-Dwarnings"])
    };
    let published = ["--package", "gradsync", "--package", "gradsync-cli"];
    let mut lints = vec![lint(members(), ""), lint(&published, "gradsync-cli/cuda")];
    if toolchain::mpi::is_here() {
        lints.push(lint(&published, "gradsync-cli/mpi"));
    }
    lints.push(lint(members(), &format!("{},gradsync-tests/gpus", features())));
    lints
}

fn clippy() -> Result<Outcome> {
    let lints = lints();
    lints.iter().try_for_each(Cmd::run)?;
    let not_linted = if toolchain::mpi::is_here() { "" } else { "; none with `mpi`: there is no MPI here" };
    Ok(Outcome::Passed(format!("{} feature sets{not_linted}", lints.len())))
}

/// Checks the kernels, for each kind of GPU, with a CPU compiler and rust-cuda's own `cuda_std` in place of gradsync's: names, types and
/// safety. No code is generated.
fn dialect() -> Result<Outcome> {
    for features in ["cuda_std", "cuda_std,sm_80"] {
        let cmd =
            Cmd::cargo("clippy").args(["--quiet", "--package", "gradsync-device", "--lib", "--features", features]);
        cmd.args(["--", "-Dwarnings"]).run()?;
    }
    Ok(Outcome::Passed("every kernel, for both kinds of GPU, against the cuda_std of Cargo.lock".to_owned()))
}

/// The database of advisories is downloaded from no registry, so a registry alone does not suffice for them.
fn deny() -> Result<Outcome> {
    let cmd = Cmd::new(toolchain::cargo_deny()).args(["--workspace", "check", "--deny", "warnings"]);
    cmd.args(["licenses", "bans", "sources"]).run()?;
    Ok(Outcome::Passed(
        "licences, duplicates and sources; advisories are not checked, as their database is not here".to_owned(),
    ))
}

fn docs() -> Vec<Cmd> {
    let doc = |arguments: &[&str]| {
        Cmd::cargo("doc").args(["--quiet", "--no-deps"]).args(arguments).env("RUSTDOCFLAGS", "-Dwarnings")
    };
    let mut docs = vec![doc(&["--package", "gradsync", "--features", "cuda", "--lib"])];
    if toolchain::mpi::is_here() {
        docs.push(doc(&["--package", "gradsync", "--features", "cuda,mpi", "--lib"]));
    }
    if compiles_candle() {
        let packages = ["--package", "gradsync-candle", "--package", "gradsync-tests"];
        docs.push(doc(&packages).args(["--features", "gradsync-tests/demo,gradsync-tests/candle", "--lib"]));
    }
    docs.push(doc(&["--package", "gradsync-device", "--package", "gradsync-cli"]));
    docs
}

/// Whether this version of Rust compiles candle: the other members need an older one.
fn compiles_candle() -> bool {
    const LEAST_MINOR: u32 = 88;
    let (_, version) = Cmd::cargo("--version").probe();
    version.split('.').nth(1).and_then(|minor| minor.parse().ok()).is_some_and(|minor: u32| minor >= LEAST_MINOR)
}

/// All members that this version of Rust compiles.
fn members() -> &'static [&'static str] {
    if compiles_candle() { &["--workspace"] } else { &["--workspace", "--exclude", "gradsync-candle"] }
}

/// The features of all tests: as many native libraries as the machine can have.
fn features() -> String {
    let mut features =
        vec!["gradsync-tests/prepared", "gradsync-tests/cuda", "gradsync-cli/cuda", "gradsync-bench/cuda"];
    if compiles_candle() {
        features.extend(["gradsync-tests/demo", "gradsync-tests/candle"]);
    }
    if toolchain::mpi::is_here() {
        features.extend(["gradsync-tests/mpi", "gradsync-cli/mpi", "gradsync-bench/mpi"]);
        if compiles_candle() {
            features.push("gradsync-candle/mpi");
        }
    }
    features.join(",")
}

/// The members with tests under a subcommand of cargo. All builds name the same members and features, so that each crate is compiled once, and no
/// program replaces one with other features.
fn workspace(subcommand: &str) -> Cmd {
    Cmd::cargo(subcommand).args(members()).args(["--exclude", "xtask", "--features", &features()])
}

/// The program, and the tests that wait for much of their time: for deadlines, and for ranks that are stopped.
const WAITING: [&str; 6] = ["--bin", "gradsync", "--test", "process", "--test", "launch_cli"];

/// The examples of the library that these tests run.
const EXAMPLES: [&str; 4] = ["adasum_of_files", "processes", "sequence_parallel", "tensor_parallel"];

fn tests(later: &[Stage], compiler: &mut Compiler) -> Result<Outcome> {
    let all = || workspace("build").args(["--lib", "--bins", "--tests"]);
    let examples = EXAMPLES.into_iter().flat_map(|name| ["--example", name]);
    let built = bundle::executables(workspace("build").args(WAITING).args(examples))?;
    let folder = programs(&built)?;
    let with_variables = |cmd: Cmd| {
        cmd.env("GRADSYNC_PYTHONPATH", python::packages_folder())
            .env(python::NCCL_VARIABLE, python::nccl_include())
            .env(PROGRAMS_VARIABLE, &folder)
    };
    let mut failed = Vec::new();
    let mut note = |name: &str, outcome: Result<()>| {
        if let Err(error) = outcome {
            println!("FAILED: {error:#}");
            failed.push(name.to_owned());
        }
    };
    let mut run = |tests: &[bundle::Built]| {
        for test in tests.iter().filter(|built| built.is_test && !OF_OTHER_STAGES.contains(&built.name.as_str())) {
            note(&test.name, with_variables(Cmd::new(&test.executable).folder(&test.folder)).run());
        }
    };
    compiler.start(vec![all()]);
    run(&built);
    compiler.wait();
    let mut others = bundle::executables(all())?;
    others.retain(|other| built.iter().all(|built| built.executable != other.executable));
    compiler.start(later.iter().flat_map(|stage| stage.compilation()).collect());
    run(&others);
    note("doc", with_variables(workspace("test").args(["--no-fail-fast", "--doc"])).run());
    ensure!(failed.is_empty(), "tests failed in {}", failed.join(", "));
    Ok(Outcome::Passed(String::new()))
}

/// The test programs that other stages run.
const OF_OTHER_STAGES: [&str; 5] = ["mpi", "perf_mpi", "convergence", "linear_layers", "ranks"];

/// Has cargo compile, with the lowest priority, while tests run that wait for much of their time. Each build holds cargo's lock on the target
/// folder, so cargo must not run these tests. A command that fails is repeated where its result is needed, and reported there.
#[derive(Default)]
struct Compiler(Option<JoinHandle<()>>);

impl Compiler {
    fn start(&mut self, commands: Vec<Cmd>) {
        self.wait();
        let run = |command: Cmd| _ = command.nice().run();
        self.0 = Some(thread::spawn(move || commands.into_iter().for_each(run)));
    }

    fn wait(&mut self) {
        if let Some(thread) = self.0.take() {
            _ = thread.join();
        }
    }
}

/// The variable with the folder in which cargo has built the programs that tests start.
const PROGRAMS_VARIABLE: &str = "GRADSYNC_PROGRAMS";

/// The folder in which cargo has put the programs of the same build: tests lie in a folder below.
fn programs(built: &[bundle::Built]) -> Result<PathBuf> {
    // Cargo runs none of the tests, so nothing else would notice that its messages are no longer understood.
    let test = built.iter().find(|built| built.is_test).context("cargo named no test program that it has built")?;
    Ok(test.executable.ancestors().nth(2).context("a test program without a folder")?.to_owned())
}

/// The commands that build the programs of the demo's stage: the launcher, examples, the tests that use candle, and one example's own tests, which
/// have its name.
fn demo_programs() -> [Cmd; 2] {
    let programs = ["--bin", "gradsync", "--example", "first", "--example", "lora", "--example", "convergence"];
    let tests = ["--test", "linear_layers", "--test", "ranks"];
    [workspace("build").args(programs).args(tests), workspace("test").args(["--no-run", "--example", "convergence"])]
}

fn demo() -> Result<Outcome> {
    if !compiles_candle() {
        return Ok(Outcome::NotRun("candle needs a newer version of Rust".to_owned()));
    }
    let mut built = Vec::new();
    for build in demo_programs() {
        built.extend(bundle::executables(build)?);
    }
    demo::check(&built, (PROGRAMS_VARIABLE, &programs(&built)?))?;
    if !toolchain::mpi::is_here() {
        return Ok(Outcome::Passed("not candle on ranks of MPI: there is no MPI here".to_owned()));
    }
    Ok(Outcome::Passed(mpi::candle(&bundle::named(&built, "ranks")?.executable)?))
}

fn gpu() -> Result<Outcome> {
    let gpus = match multi_gpu::gpus() {
        Ok(gpus) => gpus,
        Err(_) => {
            let packed = "`cargo xtask bundle` packs the tests for one, and those of `cargo xtask test-multi-gpu`";
            return Ok(Outcome::NotRun(format!("no NVIDIA GPU here; {packed}")));
        }
    };
    let cmd = Cmd::cargo("test")
        .args(["--release", "--package", "gradsync-tests", "--features", "gpus", "--test", "gpu"])
        .args(["--", "--test-threads=1"]);
    cmd.run()?;
    if !toolchain::mpi::is_here() {
        return Ok(Outcome::Passed(format!("{gpus} GPUs; not the multi-GPU tests: there is no MPI here")));
    }
    let multi_gpu = multi_gpu::check(gpus)?;
    Ok(Outcome::Passed(format!("{gpus} GPUs; {multi_gpu}")))
}
