//! `cargo xtask test`: the stages, their commands, and the table at the end. CI runs only this command.
//!
//! A stage passes, fails, or is not run for a reason that is printed; no stage is skipped without a reason.

mod downstream;
mod mpi;
mod nodes;
mod package;

use std::{
    fs, io,
    io::Write,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::{
    bundle, demo,
    flags::{self, Stage},
    multi_gpu,
    process::{Cmd, target},
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
    const ALL: [Self; 13] = [
        Self::Fmt,
        Self::Tidy,
        Self::Ptx,
        Self::Ptxas,
        Self::Clippy,
        Self::Dialect,
        Self::Docs,
        Self::Tests,
        Self::Mpi,
        Self::Nodes,
        Self::Demo,
        Self::Downstream,
        Self::Gpu,
    ];

    fn needs(self) -> &'static [Need] {
        match self {
            Self::Fmt => &[Need::Rustfmt],
            Self::Dialect => &[Need::Clippy],
            Self::Ptx => &[Need::DeviceCompiler],
            Self::Ptxas => &[Need::Ptxas],
            Self::Clippy => &[Need::Clippy, Need::CCompiler, Need::Mpi],
            Self::Gpu if multi_gpu::gpus().is_ok() => &[Need::CCompiler, Need::Mpi],
            Self::Tests => &[Need::CCompiler, Need::PythonPackages, Need::NcclHeader],
            Self::Mpi => &[Need::CCompiler, Need::Mpi],
            Self::Nodes => &[Need::CCompiler, Need::Mpi, Need::Namespaces],
            Self::Demo => &[Need::CCompiler, Need::Images],
            Self::Tidy | Self::Docs | Self::Downstream | Self::Gpu => &[],
        }
    }

    /// Runs the stage, and builds programs of `later` stages while it waits.
    fn run(self, later: &[Self]) -> Result<Outcome> {
        match self {
            Self::Fmt => passed(Cmd::cargo("fmt").args(["--all", "--check"]).run()),
            Self::Tidy => passed(Cmd::cargo("test").args(["--package", "xtask", "--quiet"]).run()),
            Self::Ptx => check_ptx(),
            Self::Ptxas => Ok(Outcome::Passed(ptxas::assemble_all()?)),
            Self::Clippy => clippy(),
            Self::Dialect => dialect(),
            Self::Docs => docs(),
            Self::Tests => tests(later),
            Self::Mpi => Ok(Outcome::Passed(mpi::run(later)?)),
            Self::Nodes => nodes::run(),
            Self::Demo => demo(),
            Self::Downstream => Ok(Outcome::Passed(downstream::build_and_run()?)),
            Self::Gpu => gpu(),
        }
    }
}

impl flags::Test {
    pub(crate) fn run(self) -> Result<()> {
        let stages: Vec<Stage> =
            Stage::ALL.into_iter().filter(|stage| self.only.is_empty() || self.only.contains(stage)).collect();
        let toolchain = Toolchain::new(&self.setup);
        let unavailable = set_up(&toolchain, &stages)?;

        let mut rows = Vec::new();
        for (index, &stage) in stages.iter().enumerate() {
            let later = &stages[index + 1..];
            println!("\n=== {} ===", name(stage));
            let start = Instant::now();
            let outcome = match (stage, &unavailable) {
                // Even without a compiler for device code, the hash of its sources can be compared.
                (Stage::Ptx, Unavailable { device_compiler: Some(why), .. }) => {
                    Stage::Ptx.run(later).map(|_| Outcome::NotRun(why.clone()))
                }
                (Stage::Mpi | Stage::Nodes, Unavailable { mpi: Some(why), .. }) => Ok(Outcome::NotRun(why.clone())),
                _ => stage.run(later),
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
fn set_up(toolchain: &Toolchain, stages: &[Stage]) -> Result<Unavailable> {
    let mut needs: Vec<Need> = Vec::new();
    for need in stages.iter().flat_map(|stage| stage.needs()) {
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
    format!("{stage:?}").to_lowercase()
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

/// The machines on which a feature set is linted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Machines {
    All,
    WithMpi,
    WithoutMpi,
}

/// The sets of packages and features that are linted: the published crates with each native library alone, and all members with as many of
/// these libraries as the machine can have.
const FEATURE_SETS: [(&[&str], &[&str], Machines); 7] = [
    (&[], &["gradsync-tests/prepared"], Machines::All),
    (&["gradsync"], &[], Machines::All),
    (&["gradsync", "gradsync-cli"], &["gradsync-cli/cuda"], Machines::All),
    (&["gradsync-tests", "gradsync-candle"], &["gradsync-tests/demo"], Machines::All),
    (&["gradsync", "gradsync-cli"], &["gradsync-cli/mpi"], Machines::WithMpi),
    (&[], &["gradsync-tests/cuda", "gradsync-cli/cuda", "gradsync-bench/cuda"], Machines::WithoutMpi),
    (
        &[],
        &[
            "gradsync-tests/cuda",
            "gradsync-tests/mpi",
            "gradsync-cli/cuda",
            "gradsync-cli/mpi",
            "gradsync-bench/cuda",
            "gradsync-bench/mpi",
        ],
        Machines::WithMpi,
    ),
];

fn clippy() -> Result<Outcome> {
    let has_mpi = toolchain::mpi::is_here();
    let (mut linted, mut left_out) = (0, 0);
    for (packages, features, machines) in FEATURE_SETS {
        let cmd = Cmd::cargo("clippy").args(["--quiet", "--all-targets"]);
        // candle is compiled for one feature set only.
        let cmd = if packages.is_empty() { cmd.args(["--workspace", "--exclude", "gradsync-candle"]) } else { cmd };
        let cmd = packages.iter().fold(cmd, |cmd, package| cmd.args(["--package", package]));
        let cmd = cmd.args(["--features", &features.join(",")]).args(["--", "-Dwarnings"]);
        match machines {
            Machines::WithMpi if !has_mpi => left_out += 1,
            Machines::WithoutMpi if has_mpi => {}
            _ => {
                cmd.run()?;
                linted += 1;
            }
        }
    }
    let linted = format!("{linted} feature sets");
    Ok(Outcome::Passed(match left_out {
        0 => linted,
        _ => format!("{linted}; not the {left_out} with `mpi`: there is no MPI here"),
    }))
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

fn docs() -> Result<Outcome> {
    let doc = |arguments: &[&str]| {
        Cmd::cargo("doc").args(["--quiet", "--no-deps"]).args(arguments).env("RUSTDOCFLAGS", "-Dwarnings")
    };
    doc(&["--package", "gradsync", "--features", "cuda", "--lib"]).run()?;
    if toolchain::mpi::is_here() {
        doc(&["--package", "gradsync", "--features", "cuda,mpi", "--lib"]).run()?;
    }
    let candle =
        ["--package", "gradsync-candle", "--package", "gradsync-tests", "--features", "gradsync-tests/demo", "--lib"];
    doc(&candle).run()?;
    passed(doc(&["--package", "gradsync-device", "--package", "gradsync-cli"]).run())
}

/// The workspace under a subcommand of cargo, in the features of most tests. candle is compiled in the stage of the demo.
fn workspace(subcommand: &str) -> Cmd {
    let members = ["--workspace", "--exclude", "xtask", "--exclude", "gradsync-candle"];
    Cmd::cargo(subcommand).args(members).args(["--features", "gradsync-tests/prepared"])
}

fn tests(later: &[Stage]) -> Result<Outcome> {
    let cuda = cuda_program()?;
    let programs = programs()?;
    let with_variables = |cmd: Cmd| {
        cmd.env("GRADSYNC_PYTHONPATH", python::packages_folder())
            .env("GRADSYNC_CUDA_BINARY", &cuda)
            .env(PROGRAMS_VARIABLE, &programs)
    };
    let built = bundle::executables(workspace("test").args(["--tests", "--exclude", "gradsync", "--no-run"]))?;
    // Cargo runs none of them, so nothing else would notice that its messages are no longer understood.
    ensure!(built.iter().any(|built| built.is_test), "cargo named no test program that it has built");
    let mut failed = Vec::new();
    let mut note = |name: &str, outcome: Result<()>| {
        if let Err(error) = outcome {
            println!("FAILED: {error:#}");
            failed.push(name.to_owned());
        }
    };
    note("doc", with_variables(workspace("test").args(["--no-fail-fast", "--doc"])).run());
    let mut builds = vec![unit_tests().arg("--no-run")];
    if later.contains(&Stage::Mpi) && toolchain::mpi::is_here() {
        builds.push(mpi::build());
    }
    if later.contains(&Stage::Demo) {
        builds.push(demo::first());
    }
    let (first, rest): (Vec<_>, Vec<_>) =
        built.iter().filter(|built| built.is_test).partition(|test| FIRST.contains(&test.name.as_str()));
    let mut run = |tests: Vec<&bundle::Built>| {
        for test in tests {
            note(&test.name, with_variables(Cmd::new(&test.executable).folder(&test.folder)).run());
        }
    };
    run(first);
    while_building(builds, || run(rest));
    note("unit tests", unit_tests().run());
    // The loading of kernels, and NCCL's declarations and loading, have tests that need no GPU too.
    note("loading", with_cuda("test").args(LOADING).env(python::NCCL_VARIABLE, python::nccl_include()).run());
    ensure!(failed.is_empty(), "tests failed in {}", failed.join(", "));
    Ok(Outcome::Passed(String::new()))
}

/// The tests that start programs of the same build, at paths where a build with other features puts its own.
const FIRST: [&str; 2] = ["launch_cli", "perf"];

/// Runs tests that wait for much of their time, and meanwhile builds, with the lowest priority, the programs that are run later. Cargo must
/// not run the tests, since each build holds its lock on the target folder. A build that fails is repeated where it is needed, and reported
/// there.
fn while_building<T>(builds: Vec<Cmd>, tests: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        scope.spawn(|| builds.into_iter().try_for_each(|build| build.arg("--quiet").nice().run()));
        tests()
    })
}

/// The library's unit tests, which are compiled once, with all features: the launch side of the CUDA backend has tests that need no GPU, and
/// the transport over MPI has tests that need no `mpirun`.
fn unit_tests() -> Cmd {
    let features = if toolchain::mpi::is_here() { "cuda,nvtx,mpi" } else { "cuda,nvtx" };
    Cmd::cargo("test").args(["--package", "gradsync", "--features", features, "--lib"])
}

/// The program and the tests with the `cuda` feature under a subcommand of cargo.
fn with_cuda(subcommand: &str) -> Cmd {
    let features = "gradsync-cli/cuda,gradsync-tests/cuda,gradsync-tests/prepared";
    Cmd::cargo(subcommand).args(["--package", "gradsync-cli", "--package", "gradsync-tests", "--features", features])
}

/// The tests with the `cuda` feature that run on any machine.
const LOADING: [&str; 8] =
    ["--test", "kernel_loading", "--test", "nccl_header", "--test", "nccl_loading", "--test", "driver_rules"];

/// Builds the program with the `cuda` feature, for the test that starts it on a machine without a driver, and the tests with this feature,
/// so that the library is compiled once for both.
fn cuda_program() -> Result<PathBuf> {
    keep(with_cuda("build").args(["--bin", "gradsync"]).args(LOADING), "gradsync", "cuda")
}

/// The variable with the folder of the programs that tests start.
const PROGRAMS_VARIABLE: &str = "GRADSYNC_PROGRAMS";
const PROGRAMS: &str = "programs";

/// Builds the program, and returns its folder. Some test is built with it, so that cargo chooses the features of dependencies as for tests
/// and compiles no crate for the program alone.
fn programs() -> Result<PathBuf> {
    keep(workspace("build").args(["--bin", "gradsync", "--test", "plans"]), "gradsync", PROGRAMS)?;
    Ok(target(PROGRAMS))
}

/// Builds a program in the common target folder, to share all dependencies, and copies it to another one, because a build with other
/// features overwrites it. Returns the path of the copy.
fn keep(build: Cmd, name: &str, folder: &str) -> Result<PathBuf> {
    let (built, folder) = (bundle::executable(build, name)?, target(folder));
    let kept = folder.join(name);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    fs::copy(&built, &kept).with_context(|| format!("cannot copy {} to {}", built.display(), kept.display()))?;
    Ok(kept)
}

fn demo() -> Result<Outcome> {
    let programs = programs()?;
    keep(demo::first(), "first", PROGRAMS)?;
    demo::check((PROGRAMS_VARIABLE, &programs))?;
    if !toolchain::mpi::is_here() {
        return Ok(Outcome::Passed("not candle on ranks of MPI: there is no MPI here".to_owned()));
    }
    Ok(Outcome::Passed(mpi::candle()?))
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
        .args(["--release", "--package", "gradsync-tests", "--features", "cuda", "--test", "gpu"])
        .args(["--", "--test-threads=1"]);
    cmd.run()?;
    if !toolchain::mpi::is_here() {
        return Ok(Outcome::Passed(format!("{gpus} GPUs; not the multi-GPU tests: there is no MPI here")));
    }
    let multi_gpu = multi_gpu::check(gpus)?;
    Ok(Outcome::Passed(format!("{gpus} GPUs; {multi_gpu}")))
}
