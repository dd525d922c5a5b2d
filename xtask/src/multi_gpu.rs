//! `cargo xtask test-multi-gpu`: the tests with one rank per GPU, with every number of ranks that the GPUs allow; or with several ranks per
//! GPU, and simulated nodes.
//!
//! The rank program, `tests/tests/multi_gpu`, knows the suites and checks each rank; this module starts the ranks, watches them, and
//! combines their results. With `--prebuilt`, neither cargo nor the sources are needed: no path of the repository is used.

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

/// The time that ranks may continue after another rank has failed.
const GRACE: Duration = Duration::from_secs(5);
/// The factor for deadlines under compute-sanitizer.
const SANITIZER_SLOWDOWN: u64 = 10;
/// The factors for deadlines if ranks share a GPU by MPS, and by time-slicing.
const MPS_SLOWDOWN: u64 = 2;
const TURNS_SLOWDOWN: u64 = 10;
/// The exit code if there is no GPU, as in the bundle's `run`.
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

    /// Runs the suites for which there are enough GPUs, and prints the report.
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
                    if let (Some(mps), true) = (mps, ran.may_have_killed(suite))
                        && let Err(why) = mps.settle(&program)
                    {
                        writeln!(out, "the server of CUDA MPS takes no clients any more: {why}")?;
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

/// The resources for tests.
struct Machine {
    /// The number of GPUs; if there are none, the places that were searched.
    gpus: Result<usize, String>,
    /// The launcher of MPI jobs; if there is none, the commands that were tried.
    mpirun: Result<Mpirun, String>,
    /// The daemon of CUDA MPS; if there is none, the places that were searched.
    mps: Result<PathBuf, String>,
}

impl Machine {
    fn find(gpus: Result<usize, String>) -> Self {
        Self { gpus, mpirun: Mpirun::find(), mps: mps::find() }
    }
}

/// The way in which ranks share one GPU.
struct Sharing {
    /// The daemon; `None` for time-slicing.
    mps: Option<Mps>,
    slowdown: u64,
    /// The description in the report.
    how: String,
}

impl Sharing {
    fn none() -> Self {
        Self { mps: None, slowdown: 1, how: String::new() }
    }

    /// Starts the daemon if there is one and a first process can use a GPU through it; otherwise the report says why not.
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

/// The outcome of all tests.
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

/// For `cargo xtask test`: runs everything on this many GPUs; returns a note on the passed tests, or an error if a test failed.
pub(crate) fn check(gpus: usize) -> Result<String> {
    let machine = Machine::find(Ok(gpus));
    let Tested::Rows(rows) = flags::TestMultiGpu::default().test(machine, GRACE, &mut io::stdout().lock())? else {
        return Ok(String::new());
    };
    let Counts { passed, failed, not_run } = report::total(&rows);
    ensure!(failed == 0, "{failed} of the multi-GPU cases failed, {passed} passed, {not_run} were not run");
    Ok(format!("{passed} multi-GPU cases, {not_run} not run"))
}

/// The number of GPUs that a program started here sees; if there are none, the command that was tried.
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

/// The number of devices that CUDA_VISIBLE_DEVICES names: all up to the first invalid one.
fn visible(list: &str) -> usize {
    list.split(',').map(str::trim).take_while(|name| !name.is_empty() && !name.starts_with('-')).count()
}

/// The beginning of a command that runs a program under compute-sanitizer.
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

/// One launch before its start.
struct Start<'a> {
    program: &'a Path,
    /// The command that wraps each rank.
    wrapper: Option<&'a [String]>,
    /// The launcher of the ranks, for suites that need one.
    mpirun: Option<&'a Mpirun>,
    suite: &'a suites::Suite,
    world: usize,
    layout: Layout,
    /// The daemon for ranks on one GPU.
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

    /// The prefix of a process's lines, equally wide for every rank of the launch.
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
            // xtask may itself be a rank of a job, and the launcher's own variables must take effect.
            for variable in OURS {
                command.env_remove(variable);
            }
            // Each rank is a process, as without mpirun; the filter leaves the rank number to mpirun.
            let variables = self.layout.variables(self.world, Who::Rank(0));
            command.envs(variables.into_iter().filter(|(name, _)| !OURS.contains(name)));
            return Ok(vec![Process { command, victim: false }]);
        }
        let (port, secret) = (free_port()?.to_string(), secret()?);
        let process = |&(who, victim): &(Who, bool)| {
            let mut command = self.program(None);
            command.env("WORLD_SIZE", self.world.to_string());
            // xtask may itself be a rank of a job.
            command.env_remove("RANK").env_remove("LOCAL_RANK").envs(self.layout.variables(self.world, who));
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).env("GRADSYNC_SECRET", &secret);
            if let Who::Rank(rank) = who {
                command.env("RANK", rank.to_string());
            }
            Process { command, victim }
        };
        Ok(processes.iter().map(process).collect())
    }

    /// The rank program with its suite, inside its wrapper, which `launcher` may start.
    fn program(&self, launcher: Option<Command>) -> Command {
        let words = self.wrapper.unwrap_or_default().iter().map(AsRef::as_ref);
        let mut words = words.chain([self.program.as_os_str(), "run".as_ref(), self.suite.name.as_ref()]);
        let mut command = launcher.or_else(|| words.next().map(Command::new)).expect("a program is a word");
        command.args(words);
        command.envs(self.mps.map(Mps::variables).into_iter().flatten());
        command
    }
}

/// The variables by which xtask assigns positions to ranks, if no launcher does.
const OURS: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];

/// A port that was free a moment ago; the launch's first rank takes it.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot find a free port")?;
    Ok(listener.local_addr().context("cannot ask for a free port")?.port())
}

/// A new secret for each launch, so that no other process on this machine can join it.
fn secret() -> Result<String> {
    let mut bytes = [0; 32];
    let source = "/dev/urandom";
    File::open(source)
        .and_then(|mut file| file.read_exact(&mut bytes))
        .with_context(|| format!("cannot read {source}"))?;
    Ok(secret_of(&bytes))
}

/// The secret in the format of `gradsync::bootstrap::Secret`, which ranks accept.
fn secret_of(bytes: &[u8; 32]) -> String {
    let text = format!("gradsync-secret-{}", hex(bytes));
    let check = hex(&Sha256::digest(&text)[..4]);
    text + &check
}

#[cfg(test)]
mod tests;
