//! Ranks as the processes of an MPI job, on host memory.
//!
//! The baseline of collectives is plain MPI, and of Adasum an MPI sum of as many bytes. `cargo xtask compare horovod` compares Adasum
//! with Horovod's Adasum.

#[allow(unsafe_code, reason = "MPI's own calls, the baseline")]
mod plain;

use std::time::Duration;

use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::Communicator;
use gradsync::comm::Ranks;
use gradsync::comm::mpi::MpiCommunicator;

use self::plain::Plain;
use super::PerfError;
use super::arguments::Counts;
use super::host::collectives::{self, HostBaseline, HostBaselines};
use super::machine::Processes;
use super::operation::{Operation, Row};
use super::output::Output;
use super::plan::Section;
use super::process::copy_together;
use super::record::BaselineName;

/// Measures sections; every process of the job must call it.
pub(crate) fn run(sections: &[Section], output: &Output) -> Result<(), PerfError> {
    let comm = MpiCommunicator::world()?;
    // If another launcher's variables contradicted MPI, rows would be labelled with the wrong number of ranks.
    if let Some(row) = sections.iter().flat_map(|section| &section.rows).find(|row| row.ranks != comm.world_size()) {
        let (ranks, world_size) = (row.ranks, comm.world_size());
        return Err(PerfError::Arguments(format!(
            "--transport mpi: the launcher's variables say {ranks} ranks, and MPI {world_size}: start it with mpirun"
        )));
    }
    collectives::run(&comm, sections, output, &Beside::new()?)
}

/// The time that other ranks give rank 0 to write its output, in case it has failed too.
const GRACE: Duration = Duration::from_secs(1);

/// Ends the job after a failure: otherwise the other ranks would wait for this rank, in a call or in MPI's finalisation.
pub(crate) fn abort(is_speaker: bool, error: &PerfError) -> Result<(), PerfError> {
    let comm = MpiCommunicator::world()?;
    gradsync_cli::messages::complain(error);
    if !is_speaker {
        std::thread::sleep(GRACE);
    }
    comm.abort(1)
}

/// The memory bandwidth of all ranks together. Every process of the job must call it.
pub(crate) fn look() -> Result<Processes, PerfError> {
    let comm = MpiCommunicator::world()?;
    copy_together(&comm, comm.shares_memory())
}

/// Plain MPI, as the baseline of collectives.
pub(crate) struct Beside {
    world: SimpleCommunicator,
}

impl Beside {
    /// The world of the job, in which MPI has been initialised.
    pub(crate) fn new() -> Result<Self, PerfError> {
        MpiCommunicator::world()?;
        Ok(Self { world: SimpleCommunicator::world() })
    }
}

impl HostBaselines for Beside {
    fn name(&self, operation: Operation) -> BaselineName {
        plain::name(operation)
    }

    fn make(&self, row: &Row, _: Counts) -> Result<Option<Box<dyn HostBaseline + '_>>, PerfError> {
        Ok(Plain::new(&self.world, row)?.map(|plain| Box::new(plain) as Box<dyn HostBaseline>))
    }
}

/// Bytes per message, because MPI counts in 32 bits.
const MESSAGE_BYTES: usize = 1 << 30;

/// Sends to one rank and receives as many bytes from another at the same time.
fn exchange(world: &SimpleCommunicator, (to, send): (i32, &[u8]), (from, receive): (i32, &mut [u8])) {
    let (to, from) = (world.process_at_rank(to), world.process_at_rank(from));
    for (send, receive) in send.chunks(MESSAGE_BYTES).zip(receive.chunks_mut(MESSAGE_BYTES)) {
        ::mpi::point_to_point::send_receive_into(send, &to, receive, &from);
    }
}
