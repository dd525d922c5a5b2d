//! Collectives of an MPI job on device memory, each compared with the corresponding call on host memory.
//!
//! The CPUs take part in every call, so the host's clock measures its time, from the ranks' common start to the end of the queue.

use gradsync::comm::mpi::MpiCommunicator;
use gradsync::comm::mpi::device::{MpiDeviceCommunicator, MpiDeviceOptions};
use gradsync::comm::{Communicator, Ranks};
use gradsync::driver::Queue;

use super::collectives::{Baseline, Collective};
use super::loads;
use super::vectors::Vectors;
use crate::perf::PerfError;
use crate::perf::arguments::TransportChoice;
use crate::perf::host::collectives::{self as host, gather};
use crate::perf::operation::Row;
use crate::perf::output::Output;
use crate::perf::places::Places;
use crate::perf::plan::{Place, Section};
use crate::perf::record::BaselineName;
use crate::perf::subject::{self, Found, Side, Subject};
use crate::perf::watch;

/// The corresponding call on host memory.
struct OnHost<'a>(host::Collective<'a>);

impl OnHost<'_> {
    const NAME: BaselineName = BaselineName { column: "host memory", full: "the same over MPI on host memory" };
}

impl Baseline for OnHost<'_> {
    fn call(&mut self, _: &Row, _: &mut Vectors, _: &mut Vectors, round: usize) -> Result<(), PerfError> {
        let side = if self.0.has(Side::InPlace) { Side::InPlace } else { Side::OutOfPlace };
        self.0.call(side, round)
    }
}

/// A collective whose calls return when their work on the device has finished.
struct Waiting<'a> {
    collective: Collective<'a>,
    comm: &'a MpiDeviceCommunicator,
    queue: &'a Queue,
}

impl Subject for Waiting<'_> {
    fn has(&self, side: Side) -> bool {
        self.collective.has(side)
    }

    fn call(&mut self, side: Side, round: usize) -> Result<(), PerfError> {
        self.collective.call(side, round)?;
        Ok(self.comm.synchronize(self.queue)?)
    }

    fn wrong(&mut self, side: Side) -> Result<u64, PerfError> {
        self.collective.wrong(side)
    }
}

/// Measures sections; every process of the job must call it.
pub(crate) fn run(places: &Places, sections: &[Section], output: &Output) -> Result<(), PerfError> {
    let job = MpiCommunicator::world()?;
    let device = places.launch.as_ref().map_or(0, |launch| launch.local_rank.unwrap_or(launch.rank));
    let queue = Queue::new(device as u32)?;
    let comm = MpiDeviceCommunicator::new(MpiCommunicator::world()?, &queue, MpiDeviceOptions::default())?;
    let is_first = job.rank() == 0;
    for section in sections {
        if is_first {
            output.begin(section, OnHost::NAME)?;
        }
        for row in &section.rows {
            let _watched = watch::row(row.described());
            let on_host = host::Collective::new(&job, Place::Ranks(TransportChoice::Mpi), row, output.counts, None)?;
            let collective = Collective::new(&comm, Box::new(OnHost(on_host)), &queue, row, output.counts)?;
            let mut waiting = Waiting { collective, comm: &comm, queue: &queue };
            queue.synchronize()?;
            let seconds = subject::time(&mut waiting, output.counts, || Ok(job.barrier()?))?;
            let wrong = subject::check(&mut waiting, output.counts)?;
            let found = gather(&job, Found { seconds, wrong })?;
            if is_first {
                output.row(section, row, &found, OnHost::NAME)?;
            }
        }
    }
    if is_first {
        output.loaded(loads(&queue));
    }
    Ok(comm.synchronize(&queue)?)
}
