//! The launcher of an MPI, and its options for starting any number of ranks on this machine as any user.
//!
//! This module starts nothing except the launcher's version query.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::process::Cmd;

/// The launcher: `mpirun`, or the program that the variable `MPIRUN` names.
#[derive(Clone, Debug)]
pub(crate) struct Mpirun {
    program: String,
    is_open_mpi: bool,
    is_open_mpi_4: bool,
    /// The folder of the MPI library, if the system's loader does not find the library by itself.
    libraries: Option<PathBuf>,
}

impl Mpirun {
    /// The time after a launch's own deadline at which xtask kills the launcher: a killed launcher may leave its ranks behind.
    pub(crate) const GRACE: Duration = Duration::from_secs(20);

    /// The launcher of this machine; if there is none, the commands that were tried.
    pub(crate) fn find() -> Result<Self, String> {
        Self::named(env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_owned()))
    }

    pub(crate) fn named(program: String) -> Result<Self, String> {
        let (works, text) = Cmd::new(&program).arg("--version").folder(".").probe();
        if !works {
            return Err(format!("`{program} --version` does not work: {}", text.trim()));
        }
        let is_open_mpi = ["Open MPI", "OpenRTE", "PRRTE"].iter().any(|name| text.contains(name));
        let is_open_mpi_4 = text.contains("(Open MPI) 4.");
        Ok(Self { program, is_open_mpi, is_open_mpi_4, libraries: None })
    }

    /// The launcher of an MPI that lies in a folder of its own.
    pub(crate) fn in_folder(folder: &Path) -> Result<Self, String> {
        let launcher = Self::named(folder.join("bin/mpiexec").display().to_string())?;
        Ok(Self { libraries: Some(folder.join("lib")), ..launcher })
    }

    pub(crate) fn is_open_mpi(&self) -> bool {
        self.is_open_mpi
    }

    /// Whether it is Open MPI 4, which starts ranks on other machines by a replaceable ssh command.
    pub(crate) fn is_open_mpi_4(&self) -> bool {
        self.is_open_mpi_4
    }

    /// The variables of programs that start ranks by themselves.
    pub(crate) fn variables(&self) -> impl Iterator<Item = (&'static str, String)> {
        let libraries = self.libraries.iter().map(|folder| ("LD_LIBRARY_PATH", folder.display().to_string()));
        libraries.chain([("MPIRUN", self.program.clone())])
    }

    /// The beginning of a command that runs the appended program as `ranks` ranks, and ends all of them at the deadline.
    pub(crate) fn command(&self, ranks: usize, deadline: Duration) -> Command {
        let mut command = Command::new(&self.program);
        // Other MPIs start more ranks than cores, or start ranks as root, without these options.
        if self.is_open_mpi {
            command.args(["--oversubscribe", "--allow-run-as-root"]);
        }
        command.args(["-n", &ranks.to_string()]);
        // With this variable, both Open MPI and MPICH end a job at the deadline, ranks first.
        command.env("MPIEXEC_TIMEOUT", deadline.as_secs().max(1).to_string());
        command.envs(self.variables());
        command
    }
}
