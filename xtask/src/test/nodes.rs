//! The tests of the MPI transport on several machines, which `nodes.sh` simulates on this one: the nodes share nothing but a network, and
//! know each other by address only.
//!
//! The stage needs Linux namespaces, as root or as a user with permission; if the system refuses them, the stage is not run, and the reason
//! is printed.

use std::{
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use anyhow::{Context, Result, bail};

use super::{Outcome, mpi};
use crate::{
    multi_gpu::{launch::End, mpirun::Mpirun},
    process::root,
};

/// The number of nodes, and of ranks on each.
const GRIDS: [(usize, usize); 2] = [(3, 1), (2, 2)];
/// The address at which nodes reach the launcher.
const LAUNCHER: &str = "10.77.0.254";
const DEADLINE: Duration = Duration::from_secs(180);
/// The deadline of a launch in which ranks only print their host names.
const START: Duration = Duration::from_secs(60);
/// The arguments that create the outer namespaces: as a user who is root inside, or as root.
const WORLDS: [&[&str]; 2] = [&["--user", "--map-root-user"], &[]];
/// The exit code of `nodes.sh` if the system refuses an operation.
const REFUSED: i32 = 77;

/// Runs a program of the tests under this launcher, which has to understand `nodes.sh`.
pub(super) fn run(mpirun: &Mpirun, program: &Path) -> Result<Outcome> {
    if mpirun.is_open_mpi() && !mpirun.is_open_mpi_4() {
        let why = "machines are made for the launchers of Open MPI 4 and MPICH; that of Open MPI 5 does not always start its ranks there";
        return Ok(Outcome::NotRun(why.into()));
    }
    let world = match find_world()? {
        Ok(world) => world,
        Err(why) => return Ok(Outcome::NotRun(format!("no namespaces to make machines of: {why}"))),
    };
    let mut failed = Vec::new();
    for (nodes, each) in GRIDS {
        let start = |program: &Path, deadline: Duration| {
            let mut start = mpirun.command(nodes * each, deadline);
            let hosts: Vec<String> = (1..=nodes).map(|node| format!("10.77.0.{node}:{each}")).collect();
            if mpirun.is_open_mpi() {
                start.args(["--host", &hosts.join(","), "--map-by", &format!("ppr:{each}:node")]);
            } else {
                start.args(["-hosts", &hosts.join(","), "-localhost", LAUNCHER]);
            }
            start.arg(program);
            on_nodes(world, nodes, &start)
        };
        let mut names = names(&mut start(Path::new("hostname"), START))?;
        names.sort();
        let expected: Vec<String> = (1..=nodes).flat_map(|node| vec![format!("node{node}"); each]).collect();
        if names != expected {
            bail!("the ranks are not on the machines that were made for them, but on {names:?}");
        }
        match mpi::watch(start(program, DEADLINE), DEADLINE)? {
            End::Exited(0) => println!("{nodes} machines of {each}: passed"),
            end => failed.push(format!("on {nodes} machines with {each} ranks each it {end}")),
        }
    }
    if !failed.is_empty() {
        bail!("the MPI transport: {}", failed.join(", "));
    }
    let grids = GRIDS.map(|(nodes, each)| format!("{nodes} × {each}")).join(", ");
    Ok(Outcome::Passed(format!("machines × ranks on each: {grids}")))
}

/// The output of each rank of a launch.
fn names(launch: &mut Command) -> Result<Vec<String>> {
    let Output { status, stdout, stderr } = launch.output().context("cannot start `unshare`")?;
    if !status.success() {
        bail!("no ranks on the machines: {status}: {}", String::from_utf8_lossy(&stderr).trim());
    }
    Ok(String::from_utf8_lossy(&stdout).split_whitespace().map(str::to_owned).collect())
}

/// The first kind of namespaces in which a node can be created, or the error of the last kind.
fn find_world() -> Result<std::result::Result<&'static [&'static str], String>> {
    let mut why = String::new();
    for world in WORLDS {
        let mut probe = on_nodes(world, 1, &Command::new("true"));
        let Output { status, stderr, .. } = probe.output().context("cannot start `unshare`")?;
        if status.success() {
            return Ok(Ok(world));
        }
        let text = String::from_utf8_lossy(&stderr).trim().replace('\n', "; ");
        // `unshare` itself fails if it is not permitted to create the namespaces.
        let is_refused = status.code() == Some(REFUSED) || text.starts_with("unshare:");
        if !is_refused {
            bail!("nodes.sh {status}: {text}");
        }
        why = text;
    }
    Ok(Err(why))
}

/// The command on this many nodes.
fn on_nodes(world: &[&str], nodes: usize, start: &Command) -> Command {
    let mut command = Command::new("unshare");
    command.args(world).args(["--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child", "bash"]);
    command.arg(root().join("xtask/src/test/nodes.sh")).arg(nodes.to_string());
    command.arg(start.get_program()).args(start.get_args());
    for (name, value) in start.get_envs() {
        if let Some(value) = value {
            command.env(name, value);
        }
    }
    command
}
