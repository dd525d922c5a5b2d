//! `cargo xtask perf`: builds `gradsync-bench` with all features that this machine can build, and replaces itself by its `perf`.

use std::{os::unix::process::CommandExt, path::PathBuf, process::Command, time::Duration};

use anyhow::{Context, Result, anyhow};

use crate::{
    bundle, flags,
    multi_gpu::mpirun::Mpirun,
    process::Cmd,
    toolchain::{self, Need, Toolchain},
};

/// The package and its program.
pub(crate) const PROGRAM: &str = "gradsync-bench";
/// The deadline of an MPI job.
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
        // The program replaces this process, so that signals and the exit code are the program's.
        let error = command.arg("perf").args(self.arguments).exec();
        Err(error).with_context(|| format!("cannot start {command:?}"))
    }
}

/// Makes a release build and returns its path.
pub(crate) fn build(setup: &flags::Setup) -> Result<PathBuf> {
    Toolchain::new(setup).provide(&[Need::CCompiler])?;
    let features = if toolchain::mpi::is_here() { "cuda,mpi" } else { "cuda" };
    let package = ["--quiet", "--release", "--package", PROGRAM, "--features", features];
    bundle::executable(Cmd::cargo("build").args(package), PROGRAM)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::flags::{Command, Xtask};

    #[test]
    fn perf_hands_arguments_on_as_they_stand() {
        let parse = |arguments: &[&str]| {
            let parsed = Xtask::try_parse_from([&["xtask", "perf"], arguments].concat()).unwrap();
            let Command::Perf(perf) = parsed.command else { panic!("{arguments:?} is another command") };
            let words: Vec<String> = perf.arguments.iter().map(|word| word.to_string_lossy().into_owned()).collect();
            (perf.processes.map(usize::from), words.join(" "))
        };
        let own = ["cast", "-b", "1K", "--backend", "cpu", "--help"];
        assert_eq!(parse(&own), (None, own.join(" ")));
        assert_eq!(parse(&["--help"]), (None, "--help".into()));
        assert_eq!(parse(&["cast", "--processes", "2"]), (None, "cast --processes 2".into()));
        assert_eq!(parse(&["--processes", "4", "adasum", "-n", "2"]), (Some(4), "adasum -n 2".into()));
    }
}
