//! The join of a launch's ranks, with a remedy for everything that keeps ranks from joining.

use std::time::Duration;

use gradsync::Error;
use gradsync::bootstrap::{BootstrapError, Launch, Member, Rendezvous};

use super::diagnosis::Problem;

/// A rank that has joined the others.
pub(super) struct Joined {
    pub(super) launch: Launch,
    pub(super) member: Member,
    /// Whether the ranks share memory, if MPI connects them.
    pub(super) mpi_shares_memory: Option<bool>,
}

/// Joins the other ranks in the way of [`gradsync::join`].
pub(super) fn join(deadline: Duration) -> Result<Joined, Problem> {
    let launch = Launch::from_env().map_err(explained)?;
    #[cfg(feature = "mpi")]
    if launch.is_mpi_job() {
        return join_by_mpi(launch, deadline);
    }
    let rendezvous = Rendezvous::from_env(&launch).map_err(explained)?.with_deadline(deadline);
    let member = rendezvous.join(launch.rank, launch.world_size).map_err(explained)?;
    Ok(Joined { launch, member, mpi_shares_memory: None })
}

#[cfg(feature = "mpi")]
fn join_by_mpi(launch: Launch, deadline: Duration) -> Result<Joined, Problem> {
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
    Ok(Joined { launch, member, mpi_shares_memory: Some(world.shares_memory()) })
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
        BootstrapError::MissingVariable { variable, .. } => missing(variable),
        BootstrapError::InvalidVariable { variable, .. } => invalid(variable),
        BootstrapError::ConflictingVariables { .. } => {
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
            "choose another MASTER_PORT, or set GRADSYNC_PORT to a free port of rank 0's machine on all ranks, or end the program that listens there \
             (`ss -ltnp`)"
        }
        BootstrapError::CannotListen { .. } => {
            "rank 0 needs a port from 1024 on: set MASTER_PORT or GRADSYNC_PORT on all ranks"
        }
        BootstrapError::Unreachable { .. } => {
            "MASTER_ADDR must be the machine of rank 0, by a name that this machine resolves (`getent hosts NAME`), and the firewall of that machine must \
             let TCP connections to MASTER_PORT pass (under torchrun, to the ports that the error names, or to GRADSYNC_PORT); rank 0 must run"
        }
        BootstrapError::Missing { .. } => {
            "look at the output of the missing ranks: they have not started, have ended, or cannot reach MASTER_ADDR and MASTER_PORT from their machine"
        }
        BootstrapError::OutOfResources { .. } => {
            "raise the limit that the error names, on the machine of the rank that it names"
        }
        _ => "see the error",
    }
}

fn missing(variable: &str) -> &'static str {
    match variable {
        "GRADSYNC_SECRET" => {
            "export GRADSYNC_SECRET=$(gradsync secret) where the launcher is started, and have it passed on (mpirun -x GRADSYNC_SECRET); gradsync launch does both"
        }
        "MASTER_ADDR" | "MASTER_PORT" => {
            "export MASTER_ADDR and MASTER_PORT, the name of rank 0's machine and a free port there, and have them passed on (mpirun -x); gradsync launch and torchrun set them; with the \
             feature `mpi`, mpirun and mpiexec need neither"
        }
        _ => {
            "a launcher sets a rank and a world size together: set both, as RANK and WORLD_SIZE, or unset the other one"
        }
    }
}

fn invalid(variable: &str) -> &'static str {
    match variable {
        "MASTER_ADDR" => {
            "set MASTER_ADDR to the name or the address of rank 0's machine and nothing else; the port belongs into MASTER_PORT"
        }
        "MASTER_PORT" | "GRADSYNC_PORT" => "set it to a free port of rank 0's machine, the same on all ranks",
        "GRADSYNC_GENERATION" | "TORCHELASTIC_RESTART_COUNT" => {
            "leave it to the launcher, which counts the starts of the job"
        }
        "GRADSYNC_DEADLINE" | "GRADSYNC_JOIN_DEADLINE" => "set it to a number of seconds, such as 600, or unset it",
        _ => "leave it to the launcher: unset what a script or an outer launcher has set, or correct the number",
    }
}
