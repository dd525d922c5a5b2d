//! `cargo xtask test-multi-gpu`: the tests that take one rank per GPU, with every number of ranks that the GPUs allow; or several ranks per
//! GPU, and nodes that are made up.
//!
//! The rank program, `tests/tests/multi_gpu`, knows the suites and judges each rank; this starts the ranks, watches
//! them, and adds up. With `--prebuilt` nothing here needs cargo or the sources: no path of the repository is looked at.

pub(crate) mod launch;
mod layout;
pub(crate) mod mpirun;
mod mps;
mod report;
mod results;
mod suites;

use std::{
    env, fs,
    fs::File,
    io::{self, Read, Write},
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::{Command, exit},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::{
    bundle,
    flags::{self, Sanitizer},
    process::Cmd,
    toolchain::{Need, Toolchain, hex},
};
use launch::{Limits, Process, Stream};
use layout::Layout;
use mpirun::Mpirun;
use mps::Mps;
use report::{Counts, Ran, Row, ranks};
use results::{Ledger, Outcome, SANITIZER_CODE, Verdict};
use suites::{Here, Mode, Planned, Wanted, Who};

/// How long ranks may go on when another has failed.
const GRACE: Duration = Duration::from_secs(5);
/// How much slower everything may be under compute-sanitizer.
const SANITIZER_SLOWDOWN: u64 = 10;
/// How much slower where ranks are on one GPU at once, and where they are there by turns.
const MPS_SLOWDOWN: u64 = 2;
const TURNS_SLOWDOWN: u64 = 10;
/// The exit code where there is no GPU, as in the bundle's `run`.
const NO_GPU: i32 = 2;

impl flags::TestMultiGpu {
    pub(crate) fn run(self) -> Result<()> {
        if let Some(folder) = &self.bundle {
            return bundle::pack(folder, &self.setup, &[]);
        }
        let mut out = io::stdout().lock();
        let machine = Machine::find(gpus());
        let code = self.test(machine, GRACE, &mut out)?.exit_code();
        out.flush().context("cannot write to standard output")?;
        if code != 0 {
            exit(code);
        }
        Ok(())
    }

    /// Runs what there are GPUs for, and prints the report.
    fn test(&self, machine: Machine, grace: Duration, out: &mut impl Write) -> Result<Tested> {
        let gpus = match machine.gpus {
            Ok(gpus) => gpus,
            Err(why) => {
                writeln!(out, "everything: not run: no NVIDIA GPU here: {why}\n\n0 passed, 0 failed, 1 not run")?;
                return Ok(Tested::NoGpu);
            }
        };
        let layout = Layout {
            ranks_per_gpu: self.ranks_per_gpu.map_or(1, usize::from),
            nodes: self.nodes.map_or(1, usize::from),
        };
        if let Some(ranks) = self.ranks {
            if layout.shares_gpus() {
                let (each, places) = (layout.ranks_per_gpu, gpus.saturating_mul(layout.ranks_per_gpu));
                ensure!(ranks.get() <= places, "--ranks {ranks} is more than {gpus} GPUs take with {each} on each");
            } else {
                ensure!(ranks.get() <= gpus, "--ranks {ranks} needs as many GPUs, and there are {gpus} here");
            }
            ensure!(
                ranks.get() % layout.nodes == 0,
                "--ranks {ranks} are not as many on each of {} nodes",
                layout.nodes
            );
        }
        let sanitizer = self.sanitizer.map(compute_sanitizer).transpose()?;
        let program = match &self.prebuilt {
            Some(folder) => {
                let program = folder.join(bundle::MULTI_GPU);
                fs::canonicalize(&program).with_context(|| format!("cannot find {}", program.display()))?
            }
            None => {
                Toolchain::new(&self.setup).provide(&[Need::CCompiler, Need::Mpi])?;
                bundle::build_multi_gpu()?
            }
        };
        let list = Cmd::new(&program).arg("list").folder(".").read();
        let list = list.context("the rank program does not start; it needs the libmpi that it was built with")?;
        let suites = suites::parse(&list)?;
        let ranks = self.ranks.map(usize::from);
        let wanted = Wanted { ranks, suites: &self.suite, sanitizer: sanitizer.is_some(), layout };
        let mut rows = Vec::new();
        let mpirun = machine.mpirun.as_ref();
        let here = Here { gpus, no_mpirun: mpirun.err().map(String::as_str) };
        let planned = suites::plan(&suites, wanted, here)?;
        let sharing = if layout.shares_gpus() && planned.iter().any(|planned| planned.not_run.is_none()) {
            Sharing::start(if self.no_mps { Err("--no-mps".to_owned()) } else { machine.mps }, &program)
        } else {
            Sharing::none()
        };
        let headline = layout.headline(gpus, &sharing.how);
        if let Some(headline) = &headline {
            writeln!(out, "{headline}")?;
        }
        for Planned { suite, world, not_run } in planned {
            let ran = match not_run {
                Some(why) => Ran::Not(why),
                None => {
                    let slowdown = if sanitizer.is_some() { SANITIZER_SLOWDOWN } else { 1 };
                    let slowdown = slowdown * sharing.slowdown;
                    let deadline = self.deadline.map_or(suite.seconds.saturating_mul(slowdown), u64::from);
                    let limits = Limits { deadline: Duration::from_secs(deadline), grace };
                    let (wrapper, mpirun, mps) = (sanitizer.as_deref(), mpirun.ok(), sharing.mps.as_ref());
                    let start = Start { program: &program, wrapper, mpirun, suite, world, layout, mps };
                    let ran = start.run(limits, out)?;
                    if let (Some(mps), true) = (mps, ran.may_have_killed(suite)) {
                        if let Err(why) = mps.settle(&program) {
                            writeln!(out, "the server of CUDA MPS takes no clients any more: {why}")?;
                        }
                    }
                    ran
                }
            };
            rows.push(Row { suite: suite.name.clone(), world, ran });
        }
        write!(out, "{}", report::render(headline.as_deref(), &rows))?;
        Ok(Tested::Rows(rows))
    }
}

/// What tests run on.
struct Machine {
    /// How many GPUs there are; if none, what was looked for.
    gpus: Result<usize, String>,
    /// What starts the ranks of an MPI job; if nothing does, what was tried.
    mpirun: Result<Mpirun, String>,
    /// The daemon of CUDA MPS; if there is none, where it was looked for.
    mps: Result<PathBuf, String>,
}

impl Machine {
    fn find(gpus: Result<usize, String>) -> Self {
        Self { gpus, mpirun: Mpirun::find(), mps: mps::find() }
    }
}

/// How ranks get along on one GPU.
struct Sharing {
    /// By a daemon, or else by turns.
    mps: Option<Mps>,
    slowdown: u64,
    /// In the report's words.
    how: String,
}

impl Sharing {
    fn none() -> Self {
        Self { mps: None, slowdown: 1, how: String::new() }
    }

    /// With the daemon, if there is one and a first process can use a GPU by it; the report says if not.
    fn start(control: Result<PathBuf, String>, program: &Path) -> Self {
        let started = control.and_then(|control| {
            let mps = Mps::start(&control)?;
            mps.settle(program)?;
            Ok((format!("at once, by CUDA MPS ({})", control.display()), mps))
        });
        match started {
            Ok((how, mps)) => Self { mps: Some(mps), slowdown: MPS_SLOWDOWN, how },
            Err(why) => {
                let how = format!("by turns, in time slices, without CUDA MPS: {why}");
                Self { mps: None, slowdown: TURNS_SLOWDOWN, how }
            }
        }
    }
}

/// What became of it all.
#[derive(Debug)]
enum Tested {
    Rows(Vec<Row>),
    NoGpu,
}

impl Tested {
    fn exit_code(&self) -> i32 {
        match self {
            Self::Rows(rows) if report::total(rows).failed > 0 => 1,
            Self::Rows(_) => 0,
            Self::NoGpu => NO_GPU,
        }
    }
}

/// For `cargo xtask test`: everything, on this many GPUs; a note of what passed, or an error if something did not.
pub(crate) fn check(gpus: usize) -> Result<String> {
    let machine = Machine::find(Ok(gpus));
    let Tested::Rows(rows) = flags::TestMultiGpu::default().test(machine, GRACE, &mut io::stdout().lock())? else {
        return Ok(String::new());
    };
    let Counts { passed, failed, not_run } = report::total(&rows);
    ensure!(failed == 0, "{failed} of the multi-GPU cases failed, {passed} passed, {not_run} were not run");
    Ok(format!("{passed} multi-GPU cases, {not_run} not run"))
}

/// How many GPUs a program started here sees; if none, what was looked for.
pub(crate) fn gpus() -> Result<usize, String> {
    let (works, list) = Cmd::new("nvidia-smi").arg("-L").folder(".").probe();
    let listed = list.lines().filter(|line| line.starts_with("GPU ")).count();
    if !works || listed == 0 {
        return Err(format!("`nvidia-smi -L` lists none ({})", list.trim()));
    }
    match env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => match visible(&list).min(listed) {
            0 => Err(format!("CUDA_VISIBLE_DEVICES={list} hides all {listed}")),
            gpus => Ok(gpus),
        },
        Err(_) => Ok(listed),
    }
}

/// How many devices CUDA_VISIBLE_DEVICES names: all up to the first that cannot be one.
fn visible(list: &str) -> usize {
    list.split(',').map(str::trim).take_while(|name| !name.is_empty() && !name.starts_with('-')).count()
}

/// The start of a command that runs a program under compute-sanitizer.
fn compute_sanitizer(tool: Sanitizer) -> Result<Vec<String>> {
    let program = env::var("COMPUTE_SANITIZER").unwrap_or_else(|_| "compute-sanitizer".to_owned());
    let (works, why) = Cmd::new(&program).arg("--version").folder(".").probe();
    let hint = "it is part of the CUDA toolkit; or set COMPUTE_SANITIZER";
    ensure!(works, "--sanitizer needs compute-sanitizer ({hint}): {}", why.trim());
    let tool = format!("{tool:?}").to_lowercase();
    let code = SANITIZER_CODE.to_string();
    let mut words = vec![program.as_str(), "--tool", &tool, "--error-exitcode", &code, "--target-processes", "all"];
    if tool == "memcheck" {
        // NCCL asks the driver about kernels that its library was not built with, and handles the refusal.
        words.extend(["--report-api-errors", "no"]);
    }
    Ok(words.into_iter().map(str::to_owned).collect())
}

/// One launch, about to start.
struct Start<'a> {
    program: &'a Path,
    /// What each rank runs under.
    wrapper: Option<&'a [String]>,
    /// What starts the ranks, where the suite wants that.
    mpirun: Option<&'a Mpirun>,
    suite: &'a suites::Suite,
    world: usize,
    layout: Layout,
    /// What ranks on one GPU are clients of.
    mps: Option<&'a Mps>,
}

impl Start<'_> {
    fn run(&self, mut limits: Limits, out: &mut impl Write) -> Result<Ran> {
        let title = format!("{}, {}", self.suite.name, ranks(self.world));
        writeln!(out, "\n=== {title} ===")?;
        let processes = self.suite.processes(self.world);
        let prefixes: Vec<String> = processes.iter().map(|(who, _)| self.prefix(*who)).collect();
        let mut ledger = Ledger::new(processes.iter().copied());
        let start = Instant::now();
        let commands = self.commands(&processes, limits.deadline)?;
        if self.suite.mode == Mode::Mpirun {
            limits.deadline += Mpirun::GRACE;
        }
        let ends = launch::run(commands, limits, |index, stream, line| {
            let shown = match stream {
                Stream::Out => ledger.line(index, line),
                Stream::Err => Some(line.to_owned()),
            };
            if let Some(shown) = shown {
                writeln!(out, "{} {shown}", prefixes[index])?;
            }
            Ok(())
        })?;
        let seconds = start.elapsed().as_secs_f64();
        let verdict = ledger.close(&ends);
        let count = |outcome| verdict.count(outcome);
        let (passed, failed, not_run) = (count(Outcome::Passed), count(Outcome::Failed), count(Outcome::NotRun));
        for case in verdict.cases.iter().filter(|case| case.name == Verdict::LAUNCH) {
            writeln!(out, "FAILED: {}", case.notes.join("\n        "))?;
        }
        writeln!(out, "--- {title}: {passed} passed, {failed} failed, {not_run} not run in {seconds:.1} s")?;
        Ok(Ran::Launched { verdict, seconds })
    }

    /// What stands before a line: as wide for every rank of the launch.
    fn prefix(&self, who: Who) -> String {
        match who {
            Who::Rank(rank) => format!("[{rank:>0$}]", (self.world - 1).to_string().len()),
            Who::AllRanks => "[all]".to_owned(),
        }
    }

    fn commands(&self, processes: &[(Who, bool)], deadline: Duration) -> Result<Vec<Process>> {
        if self.suite.mode == Mode::Mpirun {
            let mpirun = self.mpirun.context("without mpirun, a suite that needs it is not planned")?;
            let mut command = self.program(Some(mpirun.command(self.world, deadline)));
            // We may be a rank of something ourselves, and the launcher's own variables are to decide.
            for variable in OURS {
                command.env_remove(variable);
            }
            // Each rank is a process, as without mpirun; which one, the filter leaves to mpirun.
            let variables = self.layout.variables(self.world, Who::Rank(0));
            command.envs(variables.into_iter().filter(|(name, _)| !OURS.contains(name)));
            return Ok(vec![Process { command, victim: false }]);
        }
        let (port, secret) = (free_port()?.to_string(), secret()?);
        let process = |&(who, victim): &(Who, bool)| {
            let mut command = self.program(None);
            command.env("WORLD_SIZE", self.world.to_string());
            // We may be a rank of something ourselves.
            command.env_remove("RANK").env_remove("LOCAL_RANK").envs(self.layout.variables(self.world, who));
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).env("GRADSYNC_SECRET", &secret);
            if let Who::Rank(rank) = who {
                command.env("RANK", rank.to_string());
            }
            Process { command, victim }
        };
        Ok(processes.iter().map(process).collect())
    }

    /// The rank program with its suite, in what it runs under, which may itself be started by `launcher`.
    fn program(&self, launcher: Option<Command>) -> Command {
        let words = self.wrapper.unwrap_or_default().iter().map(AsRef::as_ref);
        let mut words = words.chain([self.program.as_os_str(), "run".as_ref(), self.suite.name.as_ref()]);
        let mut command = launcher.or_else(|| words.next().map(Command::new)).expect("a program is a word");
        command.args(words);
        command.envs(self.mps.map(Mps::variables).into_iter().flatten());
        command
    }
}

/// What we tell ranks of their places, where no launcher does.
const OURS: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];

/// A port that was free a moment ago; the launch's first rank takes it.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot find a free port")?;
    Ok(listener.local_addr().context("cannot ask for a free port")?.port())
}

/// Fresh for each launch, so that no other process on this machine can join it.
fn secret() -> Result<String> {
    let mut bytes = [0; 32];
    let source = "/dev/urandom";
    File::open(source)
        .and_then(|mut file| file.read_exact(&mut bytes))
        .with_context(|| format!("cannot read {source}"))?;
    Ok(secret_of(&bytes))
}

/// In the form that ranks accept: `gradsync::bootstrap::Secret`.
fn secret_of(bytes: &[u8; 32]) -> String {
    let text = format!("gradsync-secret-{}", hex(bytes));
    let check = hex(&Sha256::digest(&text)[..4]);
    text + &check
}

#[cfg(test)]
#[path = "multi_gpu/prebuilt_tests.rs"]
mod tests;
