//! `cargo xtask perf`: builds the program that measures, `gradsync-bench`, with all that this machine can build, and becomes its `perf`.

use std::{os::unix::process::CommandExt, path::PathBuf, process::Command, time::Duration};

use anyhow::{Context, Result, anyhow};

use crate::{
    bundle, flags, libcuda,
    multi_gpu::mpirun::Mpirun,
    process::Cmd,
    toolchain::{self, Need, Toolchain},
};

/// The package and its program.
pub(crate) const PROGRAM: &str = "gradsync-bench";
/// For an MPI job.
const DEADLINE: Duration = Duration::from_secs(3600);

impl flags::Perf {
    pub(crate) fn run(self) -> Result<()> {
        let program = build(&self.setup)?;
        let mut command = match self.processes {
            Some(processes) => {
                let mpirun = Mpirun::find().map_err(|why| anyhow!("cannot start processes: {why}"))?;
                let mut command = mpirun.command(processes.get(), DEADLINE);
                command.arg(program);
                command
            }
            None => Command::new(program),
        };
        // Signals and the exit code are the program's.
        let error = command.arg("perf").args(self.arguments).exec();
        Err(error).with_context(|| format!("cannot start {command:?}"))
    }
}

/// A release build; gives back its path.
pub(crate) fn build(setup: &flags::Setup) -> Result<PathBuf> {
    Toolchain::new(setup).provide(&[Need::CCompiler])?;
    let features = if toolchain::mpi::is_here() { "cuda,mpi" } else { "cuda" };
    let package = ["--quiet", "--release", "--package", PROGRAM, "--features", features];
    bundle::executable(libcuda::linked(Cmd::cargo("build").args(package))?, PROGRAM)
}
