//! Starts processes of an MPI job on this machine, however many there are, whoever asks.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// `mpirun`, or what the variable `MPIRUN` names.
fn launcher() -> String {
    std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_owned())
}

/// Looks for the launcher; why there is none, or nothing to start with it.
pub(crate) fn find() -> Result<(), String> {
    if !cfg!(feature = "mpi") {
        return Err("this program was built without the feature `mpi`".to_owned());
    }
    let launcher = launcher();
    match Command::new(&launcher).arg("--version").output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("`{launcher} --version` ended with {}", output.status)),
        Err(error) => Err(format!("`{launcher} --version` does not start: {error}")),
    }
}

/// The start of a command that runs `program` as so many ranks, and ends them all at the deadline.
pub(crate) fn command(ranks: usize, deadline: Duration, program: &Path) -> Command {
    let mut command = Command::new(launcher());
    // Open MPI wants to be asked for more ranks than cores, and by root; other MPIs do not read these.
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"] {
        command.env(name, "1");
    }
    command.env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
    // Both Open MPI and MPICH end a job by this on their own, ranks first.
    command.env("MPIEXEC_TIMEOUT", deadline.as_secs().max(1).to_string());
    command.args(["-n", &ranks.to_string()]).arg(program);
    command
}
