//! `cargo xtask bench`: runs the standing set of `gradsync-bench` and writes a report, or compares Adasum with Horovod's, or the all-reduce
//! of processes with PyTorch's over Gloo.
//!
//! The program is built here or given by a flag, and Horovod is downloaded and compiled. With `--prebuilt`, neither cargo nor the sources
//! are needed: no path of the repository is used.

mod gloo;
mod horovod;

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};

use crate::{
    flags, perf,
    process::{Cmd, target},
    toolchain::{Need, Toolchain, python},
};

impl flags::Bench {
    pub(crate) fn run(self) -> Result<()> {
        let found =
            |program: PathBuf| fs::canonicalize(&program).with_context(|| format!("cannot find {}", program.display()));
        let (program, default) = match (&self.prebuilt, &self.program) {
            (Some(folder), _) => (found(folder.join(perf::PROGRAM))?, PathBuf::from("bench")),
            (None, Some(program)) => (found(program.clone())?, target("bench")),
            (None, None) => (perf::build(&self.setup)?, target("bench")),
        };
        if self.peer == Some(flags::Peer::Gloo) {
            return gloo::run(&program, self.quick, &self.out.unwrap_or(default));
        }
        let mut command = Cmd::new(program).folder(".");
        if let Some(flags::Peer::Horovod) = self.peer {
            Toolchain::new(&self.setup).provide(&[Need::CCompiler, Need::Mpi, Need::CppCompiler, Need::Horovod])?;
            let horovod::Program { path, compiler, flags } = horovod::program()?;
            command = command.arg("horovod").arg("--program").arg(path).args(["--compiler", &compiler]);
            command = command.args(["--flags", &flags, "--horovod-version", python::HOROVOD_VERSION]);
        } else {
            command = command.arg("standing");
        }
        if self.quick {
            command = command.arg("--quick");
        }
        for name in &self.only {
            command = command.args(["--only", name]);
        }
        if let Some(within) = self.within {
            command = command.args(["--within", &within.to_string()]);
        }
        command.arg("--out").arg(self.out.unwrap_or(default)).run()
    }
}
