//! Ranks as processes without the MPI transport, on host memory. A launcher starts them; in an MPI job, the control channel uses MPI.
//!
//! In an MPI job, the baseline of collectives is plain MPI, otherwise a copy by rank 0.

use std::time::{Duration, Instant};

use gradsync::bootstrap::{Member, Rendezvous};
use gradsync::comm::process::ProcessCommunicator;
use gradsync::comm::{Collectives, Communicator, Ranks, ReduceOp};

use super::PerfError;
use super::host::collectives;
use super::host::local::Memory;
use super::machine::Processes;
use super::output::Output;
use super::places::Places;
use super::plan::Section;

/// The longest time that ranks wait for each other.
const DEADLINE: Duration = Duration::from_secs(120);

/// Measures sections; every process must call it.
pub(crate) fn run(places: &Places, sections: &[Section], output: &Output) -> Result<(), PerfError> {
    let comm = communicator(places)?;
    #[cfg(feature = "mpi")]
    if is_mpi_job() {
        return collectives::run(&comm, sections, output, &super::mpi::Beside::new()?);
    }
    collectives::run(&comm, sections, output, &Memory { is_first: comm.rank() == 0 })
}

/// Whether an MPI launcher started the processes, and no other launcher's variables are set.
#[cfg(feature = "mpi")]
fn is_mpi_job() -> bool {
    std::env::var_os("MASTER_ADDR").is_none()
}

fn communicator(places: &Places) -> Result<ProcessCommunicator, PerfError> {
    Ok(ProcessCommunicator::new_within(member(places)?, DEADLINE)?)
}

fn member(places: &Places) -> Result<Member, PerfError> {
    let Some(launch) = &places.launch else { return Ok(Rendezvous::in_process().join(0, 1)?) };
    #[cfg(feature = "mpi")]
    if is_mpi_job() {
        return Ok(gradsync::comm::mpi::MpiCommunicator::world()?.member(DEADLINE)?);
    }
    Ok(Rendezvous::from_env(launch)?.with_deadline(DEADLINE).join(launch.rank, launch.world_size)?)
}

/// The bandwidth of all ranks together while each copies its own memory, and their way of communication. Every process must call it.
pub(crate) fn look(places: &Places) -> Result<Processes, PerfError> {
    let comm = communicator(places)?;
    copy_together(&comm, comm.shares_memory())
}

/// Bytes per copy of a rank.
const COPY_BYTES: usize = 32 << 20;
const COPIES: usize = 5;

/// The best bandwidth of all ranks together while each copies its own memory. It limits messages between the processes of one machine.
/// Every process must call it.
pub(crate) fn copy_together(comm: &dyn Communicator, share_memory: bool) -> Result<Processes, PerfError> {
    let (from, mut to) = (vec![1u8; COPY_BYTES], vec![2u8; COPY_BYTES]);
    let mut best = f64::INFINITY;
    for _ in 0..COPIES {
        comm.barrier()?;
        let start = Instant::now();
        to.copy_from_slice(&from);
        std::hint::black_box(&mut to);
        // The time lasts until the slowest rank has finished: ranks that share a core copy one after the other, each at full speed.
        comm.barrier()?;
        let mut slowest = [start.elapsed().as_secs_f64()];
        comm.all_reduce(&mut slowest, ReduceOp::Max)?;
        best = best.min(slowest[0]);
    }
    let copied = 2.0 * (COPY_BYTES * comm.world_size()) as f64;
    Ok(Processes { copy_gbs: copied / best / 1e9, share_memory })
}
