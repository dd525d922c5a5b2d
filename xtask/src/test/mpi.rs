//! The tests of the MPI transport: builds the program once, and has `mpirun` start it with every number of ranks. Then come the tests of
//! `cargo xtask perf` as an MPI job, which call `mpirun` themselves and let it enforce the deadline. The transport's unit tests run with those
//! of the whole library.
//!
//! Each launch has a deadline, after which all its processes are killed.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, bail};

use super::{Compiler, Outcome, nodes};
use crate::{
    bundle, demo,
    multi_gpu::{
        launch::{self, End, Limits, Process},
        mpirun::Mpirun,
    },
    process::{Cmd, target},
    toolchain::python,
};

const RANKS: [usize; 4] = [2, 3, 4, 8];
/// Makes ranks communicate by messages alone, like ranks of several machines.
const MESSAGES_ONLY: (&str, &str) = ("GRADSYNC_MPI_MESSAGES_ONLY", "1");
/// As [`MESSAGES_ONLY`], with an eager limit of 1 KiB in Open MPI, above which a send waits for the receiver, as in other MPIs; other MPIs
/// ignore these variables.
const SHORT_MESSAGES: [(&str, &str); 7] = [
    MESSAGES_ONLY,
    ("OMPI_MCA_btl_vader_eager_limit", "1024"),
    ("OMPI_MCA_btl_vader_rndv_eager_limit", "1024"),
    ("OMPI_MCA_btl_sm_eager_limit", "1024"),
    ("OMPI_MCA_btl_sm_rndv_eager_limit", "1024"),
    ("OMPI_MCA_btl_vader_single_copy_mechanism", "none"),
    ("OMPI_MCA_smsc", "^cma,xpmem,knem"),
];
/// The deadline of one launch; launches take a few seconds, and the one with the large messages half a minute.
const DEADLINE: Duration = Duration::from_secs(180);
/// The memory for the large messages of two ranks, with a margin for everything else.
const LARGE_KIB: u64 = 8 << 20;

/// Builds the test program and returns its path.
pub(super) fn program() -> Result<PathBuf> {
    bundle::executable(build(), "mpi")
}

/// The command that builds all tests of this stage.
pub(super) fn build() -> Cmd {
    super::workspace("build").args(["--test", "mpi", "--test", "perf_mpi"])
}

/// The command that builds these tests for MPI's standard ABI. They have a target folder of their own: in one folder, every change of the MPI
/// would compile all that depends on it again.
fn build_abi() -> Cmd {
    let features = "gradsync-tests/mpi,gradsync-bench/mpi";
    Cmd::cargo("build")
        .args(["--config", "host/mpi-abi.toml", "--target-dir"])
        .arg(target("mpi-abi"))
        .args(["--package", "gradsync-tests", "--package", "gradsync-bench", "--features", features])
        .args(["--test", "mpi", "--test", "perf_mpi"])
        .env("MPICC", python::mpicc_abi())
}

pub(super) fn launcher() -> Result<Mpirun> {
    Mpirun::find().map_err(|why| anyhow!("cannot start ranks: {why}"))
}

/// Runs the tests on the system's MPI, the largest when `compiler` has ended; returns a description for the table.
pub(super) fn run(compiler: &mut Compiler) -> Result<String> {
    suites(&launcher()?, &bundle::executables(build())?, compiler)
}

/// Runs the tests of MPI's standard ABI on MPICH.
pub(super) fn run_abi(compiler: &mut Compiler) -> Result<String> {
    let built = bundle::executables(build_abi())?;
    let mpirun = Mpirun::in_folder(&python::mpich()).map_err(|why| anyhow!("cannot start ranks: {why}"))?;
    let on_one = suites(&mpirun, &built, compiler)?;
    Ok(match nodes::run(&mpirun, &bundle::named(&built, "mpi")?.executable)? {
        Outcome::Passed(note) => format!("{on_one}; {note}"),
        Outcome::NotRun(why) => format!("{on_one}; not on several machines: {why}"),
    })
}

fn suites(mpirun: &Mpirun, built: &[bundle::Built], compiler: &mut Compiler) -> Result<String> {
    let (program, perf) = (&bundle::named(built, "mpi")?.executable, bundle::named(built, "perf_mpi")?);
    let [fewest, more @ ..] = RANKS;
    let launches = more.map(|ranks| (ranks, [].as_slice()));
    let by_messages: [(_, &[_]); 3] = [(2, &SHORT_MESSAGES), (3, &[MESSAGES_ONLY]), (8, &[MESSAGES_ONLY])];
    let mut failed = Vec::new();
    let mut launch = |(ranks, environment): (usize, &[(&str, &str)])| -> Result<()> {
        let start = Instant::now();
        let end = start_ranks(mpirun, program, ranks, &[], environment)?;
        let how = if environment.contains(&MESSAGES_ONLY) { ", by messages" } else { "" };
        println!("{ranks} ranks{how}: mpirun {end} after {:.1} s", start.elapsed().as_secs_f64());
        if end != End::Exited(0) {
            failed.push(format!("with {ranks} ranks{how} it {end}"));
        }
        Ok(())
    };
    launches.into_iter().chain(by_messages).try_for_each(&mut launch)?;
    // The large messages need memory that the compiler would take.
    compiler.wait();
    let has_room = available_kib().is_some_and(|available| available >= LARGE_KIB);
    launch((fewest, if has_room { &[("GRADSYNC_MPI_LARGE", "1")] } else { &[] }))?;
    let tiny = if !mpirun.is_open_mpi() {
        ", not in a /dev/shm of 64 KiB: MPICH and its descendants keep data of their own there, and end by SIGBUS without the room"
    } else {
        match in_tiny_shared_memory(mpirun, program)? {
            None => ", not in a /dev/shm of 64 KiB: no mounts can be made for a command",
            Some(end) => {
                if end != End::Exited(0) {
                    failed.push(format!("in a /dev/shm of 64 KiB it {end}"));
                }
                ", in a /dev/shm of 64 KiB"
            }
        }
    };
    if !failed.is_empty() {
        bail!("the MPI transport: {}", failed.join(", "));
    }
    let perf = Cmd::new(&perf.executable).folder(&perf.folder);
    mpirun.variables().fold(perf, |perf, (name, value)| perf.env(name, value)).run()?;
    let large = if has_room {
        "2.2 GB messages included"
    } else {
        "without the 2.2 GB messages: they need 8 GiB of free memory"
    };
    Ok(format!("on {RANKS:?} ranks, in memory of each other and by messages, {large}{tiny}; `perf`"))
}

/// Runs the cases of training with candle on ranks of an MPI job.
pub(super) fn candle(program: &Path) -> Result<String> {
    let mpirun = launcher()?;
    for ranks in [2, 4] {
        let case = [demo::RANK_OF_MPI, "--exact", "--test-threads=1"];
        match start_ranks(&mpirun, program, ranks, &case, &[])? {
            End::Exited(0) => {}
            end => bail!("candle on {ranks} ranks of MPI {end}"),
        }
    }
    Ok("candle on 2 and 4 ranks of MPI too".to_owned())
}

fn start_ranks(
    mpirun: &Mpirun,
    program: &Path,
    ranks: usize,
    arguments: &[&str],
    environment: &[(&str, &str)],
) -> Result<End> {
    let mut command = mpirun.command(ranks, DEADLINE);
    command.arg(program).args(arguments).envs(environment.iter().copied());
    watch(command, DEADLINE)
}

/// Runs the cases about limits with at most 64 KiB of named shared memory, if the system allows such a mount.
fn in_tiny_shared_memory(mpirun: &Mpirun, program: &Path) -> Result<Option<End>> {
    let mount = ["sh", "-c", "mount -t tmpfs -o size=64k none /dev/shm && exec \"$@\"", "sh"];
    let worlds: [&[&str]; 2] = [&["--mount"], &["--mount", "--map-root-user"]];
    let enter = |world: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(world).args(mount);
        command
    };
    let is_allowed = |world: &&&[&str]| enter(world).arg("true").output().is_ok_and(|output| output.status.success());
    let Some(world) = worlds.iter().find(is_allowed) else { return Ok(None) };
    let (launch, mut command) = (mpirun.command(2, DEADLINE), enter(world));
    command.arg(launch.get_program()).args(launch.get_args()).arg(program);
    command.envs(launch.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.env("GRADSYNC_MPI_LIMITS_ONLY", "1");
    watch(command, DEADLINE).map(Some)
}

/// Runs a launcher, which ends its ranks at this deadline, and kills it if it does not.
pub(super) fn watch(command: Command, deadline: Duration) -> Result<End> {
    println!("$ {command:?}");
    let limits = Limits { deadline: deadline + Mpirun::GRACE, grace: Duration::from_secs(5) };
    let ends = launch::run(vec![Process { command, victim: false }], limits, |_, _, line| {
        println!("{line}");
        Ok(())
    })?;
    Ok(ends.into_iter().next().unwrap_or(End::Stuck))
}

/// Available memory according to Linux; `None` on other systems.
fn available_kib() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}
