//! The join of a launch's ranks, with a remedy for everything that keeps ranks from joining.

use std::time::Duration;

use gradsync::Error;
use gradsync::bootstrap::{BootstrapError, Launch, Member, Rendezvous};

use super::diagnosis::Problem;

pub(super) fn join(deadline: Duration) -> Result<(Launch, Member), Problem> {
    let launch = Launch::from_env().map_err(explained)?;
    #[cfg(feature = "mpi")]
    if launch.master.is_none() && is_under_mpi() {
        return join_by_mpi(launch, deadline);
    }
    let rendezvous = Rendezvous::from_env(&launch).map_err(explained)?.with_deadline(deadline);
    let member = rendezvous.join(launch.rank, launch.world_size).map_err(explained)?;
    Ok((launch, member))
}

/// Whether a launcher of MPI has started this process.
#[cfg(feature = "mpi")]
fn is_under_mpi() -> bool {
    ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].iter().any(|name| std::env::var_os(name).is_some())
}

#[cfg(feature = "mpi")]
fn join_by_mpi(launch: Launch, deadline: Duration) -> Result<(Launch, Member), Problem> {
    use gradsync::comm::Ranks as _;
    let world = gradsync::comm::mpi::MpiCommunicator::world_within(deadline).map_err(explained)?;
    if (world.rank(), world.world_size()) != (launch.rank, launch.world_size) {
        return Err(Problem {
            problem: format!(
                "the launcher says rank {} of {}, and MPI says rank {} of {}",
                launch.rank,
                launch.world_size,
                world.rank(),
                world.world_size()
            ),
            remedy: "start the program with the mpirun of the MPI library that it was linked with; `gradsync info` names that library".into(),
        });
    }
    let member = world.member(deadline).map_err(explained)?;
    Ok((launch, member))
}

fn explained(error: Error) -> Problem {
    let remedy = match &error {
        Error::Bootstrap(error) => remedy(error),
        _ => "see the error; `gradsync info` tells what was found on this machine",
    };
    Problem { problem: error.to_string(), remedy: remedy.into() }
}

fn remedy(error: &BootstrapError) -> &'static str {
    match error {
        BootstrapError::NoLauncher { .. } => {
            "start the ranks by a launcher: `gradsync launch -n 4 -- ./program`, torchrun, srun or mpirun; to try one machine, `gradsync doctor -n 4`"
        }
        BootstrapError::MissingVariable { variable, .. } if variable == "GRADSYNC_SECRET" => {
            "export GRADSYNC_SECRET=$(gradsync secret) where the launcher is started, and have it passed on (mpirun -x GRADSYNC_SECRET); gradsync launch does both"
        }
        BootstrapError::MissingVariable { .. } => {
            "export MASTER_ADDR and MASTER_PORT, the name of rank 0's machine and a free port there, and have them passed on (mpirun -x); gradsync launch and torchrun set them"
        }
        BootstrapError::InvalidVariable { .. } | BootstrapError::ConflictingVariables { .. } => {
            "unset the variables of the launcher that did not start this process"
        }
        BootstrapError::WeakSecret { .. } => "make a secret with `gradsync secret`; no other text is one",
        BootstrapError::WrongSecret { .. } => {
            "give all ranks the same GRADSYNC_SECRET; a rank of another job may have the port of this one: choose another MASTER_PORT"
        }
        BootstrapError::VersionMismatch { .. } => "build the program of all ranks with the same version of gradsync",
        BootstrapError::WorldSizeMismatch { .. } => {
            "start all ranks with the same number of machines and of ranks on each; ranks of another job may use this MASTER_PORT"
        }
        BootstrapError::DuplicateRank { .. } => {
            "start each rank once: each machine needs a number of its own (--node-rank), and each job a MASTER_PORT of its own"
        }
        BootstrapError::GenerationMismatch { .. } => {
            "end the ranks that an earlier start has left, or choose another MASTER_PORT"
        }
        BootstrapError::PortBusy { .. } => {
            "choose another MASTER_PORT, or end the program that listens there (`ss -ltnp`); MASTER_ADDR must be the machine of rank 0"
        }
        BootstrapError::CannotListen { .. } => {
            "MASTER_ADDR must be an address of the machine of rank 0, with a port from 1024 on"
        }
        BootstrapError::Unreachable { .. } => {
            "MASTER_ADDR must be the machine of rank 0, by a name that this machine resolves (`getent hosts NAME`), and the firewall of that machine must \
             let TCP connections to MASTER_PORT pass; rank 0 must run"
        }
        BootstrapError::Missing { .. } => {
            "look at the output of the missing ranks: they have not started, have ended, or cannot reach MASTER_ADDR and MASTER_PORT from their machine"
        }
        _ => "see the error",
    }
}
