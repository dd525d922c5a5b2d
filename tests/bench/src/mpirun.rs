//! Starts the processes of an MPI job on this machine, for any number of processes and any user.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The launcher: `mpirun`, or the program that the variable `MPIRUN` names.
fn launcher() -> String {
    std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_owned())
}

/// Checks that the launcher exists; the error says why there is none, or why this program cannot run under it.
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

/// The beginning of a command that runs `program` as `ranks` ranks and ends all of them at the deadline.
pub(crate) fn command(ranks: usize, deadline: Duration, program: &Path) -> Command {
    let mut command = Command::new(launcher());
    // Open MPI runs more ranks than cores, or runs as root, only with these variables; other MPIs do not read them.
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"] {
        command.env(name, "1");
    }
    command.env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
    // With this variable, both Open MPI and MPICH end a job at the deadline, ranks first.
    command.env("MPIEXEC_TIMEOUT", deadline.as_secs().max(1).to_string());
    command.args(["-n", &ranks.to_string()]).arg(program);
    command
}
