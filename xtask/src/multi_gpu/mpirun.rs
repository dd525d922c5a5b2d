//! The launcher of an MPI, and how it is asked to start ranks: on this machine, however many there are, whoever asks.
//!
//! Starts nothing itself, but for the question what it is.

use std::{env, process::Command, time::Duration};

use crate::process::Cmd;

/// `mpirun`, or what the variable `MPIRUN` names.
#[derive(Clone, Debug)]
pub(crate) struct Mpirun {
    program: String,
    is_open_mpi: bool,
    is_open_mpi_4: bool,
}

impl Mpirun {
    /// How long after its own deadline a launch is killed by whoever started it: killed itself, a launcher may leave its
    /// ranks behind.
    pub(crate) const GRACE: Duration = Duration::from_secs(20);

    /// The launcher of this machine; if there is none, what was tried.
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
        Ok(Self { program, is_open_mpi, is_open_mpi_4 })
    }

    /// Whether it starts ranks on other machines by what Open MPI 4 takes for ssh.
    pub(crate) fn is_open_mpi_4(&self) -> bool {
        self.is_open_mpi_4
    }

    /// The start of a command that runs what is added to it as so many ranks, and ends them all at the deadline.
    pub(crate) fn command(&self, ranks: usize, deadline: Duration) -> Command {
        let mut command = Command::new(&self.program);
        // Other MPIs start more ranks than cores, and by root, without being asked twice.
        if self.is_open_mpi {
            command.args(["--oversubscribe", "--allow-run-as-root"]);
        }
        command.args(["-n", &ranks.to_string()]);
        // Both Open MPI and MPICH end a job by this on their own, ranks first.
        command.env("MPIEXEC_TIMEOUT", deadline.as_secs().max(1).to_string());
        command
    }
}
