//! Ranks with a GPU each: the processes of a launcher, or threads of this process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gradsync::bootstrap::Rendezvous;
use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::comm::{Communicator, Ranks, local};
use gradsync::driver::{Device, Graph, Queue};

use super::adasum::{self, Reduction};
use super::collectives::{Collective, Ordered};
use super::plain::Plain;
use super::{loads, timing};
use crate::perf::PerfError;
use crate::perf::arguments::TransportChoice;
use crate::perf::host::local::first_failure;
use crate::perf::operation::{Operation, Row};
use crate::perf::output::Output;
use crate::perf::places::Places;
use crate::perf::plan::{Place, Section};
use crate::perf::record::resolved;
use crate::perf::subject::{self, Found, Subject};
use crate::perf::watch;

/// The longest time that ranks wait for each other's results.
const DEADLINE: Duration = Duration::from_secs(600);

/// Measures sections on `ranks` ranks.
pub(crate) fn run(places: &Places, ranks: usize, sections: &[Section], output: &Output) -> Result<(), PerfError> {
    /// Distinguishes the groups of one launch.
    static GENERATION: AtomicU64 = AtomicU64::new(0);
    if let Some(launch) = &places.launch {
        let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
        let rendezvous = Rendezvous::from_env(launch)?.with_generation(generation);
        // With fewer GPUs than ranks of this machine, ranks share them.
        let gpus = (Device::count()? as usize).max(1);
        let device = launch.local_rank.unwrap_or(launch.rank) % gpus;
        let is_shared = launch.local_world_size.unwrap_or(ranks) > gpus;
        let host = host_transport(places)?;
        return rank(&rendezvous, (launch.rank, ranks), (device, is_shared), host.as_deref(), sections, output);
    }
    let rendezvous = &Rendezvous::in_process();
    let hosts = local::group(ranks)?;
    let outcomes = std::thread::scope(|scope| {
        let start = |(index, host): (usize, local::LocalCommunicator)| {
            scope.spawn(move || rank(rendezvous, (index, ranks), (index, false), Some(&host), sections, output))
        };
        let threads: Vec<_> = hosts.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    first_failure(outcomes)
}

/// A transport of host memory between the processes of a launcher, if available.
#[cfg(feature = "mpi")]
fn host_transport(places: &Places) -> Result<Option<Box<dyn Communicator>>, PerfError> {
    let comm = gradsync::comm::mpi::MpiCommunicator::world()?;
    // Each process that was not started by mpirun is an MPI world of its own.
    let is_whole = places.launch.as_ref().is_some_and(|launch| launch.world_size == comm.world_size());
    Ok(is_whole.then(|| Box::new(comm) as Box<dyn Communicator>))
}

#[cfg(not(feature = "mpi"))]
fn host_transport(_: &Places) -> Result<Option<Box<dyn Communicator>>, PerfError> {
    Ok(None)
}

fn rank(
    rendezvous: &Rendezvous,
    (rank, ranks): (usize, usize),
    (device, is_shared): (usize, bool),
    host: Option<&dyn Communicator>,
    sections: &[Section],
    output: &Output,
) -> Result<(), PerfError> {
    let queue = Queue::new(device as u32)?;
    let member = rendezvous.join(rank, ranks)?;
    let options = NcclOptions::default()
        .with_checks(false)
        .with_shared_gpu(is_shared)
        .with_low_latency_bytes(output.counts.low_latency)
        .with_one_shot_bytes(output.counts.one_shot);
    let comm = NcclCommunicator::new(member, &queue, &options)?;
    let plain = Plain::new(&comm)?;
    for section in sections {
        let is_adasum = section.operation == Operation::Adasum;
        let name = if is_adasum { adasum::baseline(host, output.counts) } else { Plain::NAME };
        if rank == 0 {
            output.begin(section, name)?;
        }
        let with_peers = section.place == Place::Ranks(TransportChoice::Peer);
        for row in &section.rows {
            let _watched = watch::row(row.described());
            let (row, found) = if is_adasum {
                let groups = adasum::groups(&comm, row)?;
                let over = (&comm, &queue, &plain);
                let mut reduction = Reduction::new(over, host, groups.as_ref(), with_peers, row, output.counts)?;
                let found = measure(&queue, &comm, &mut reduction, output)?;
                (Row { redop: resolved(row.redop, reduction.ran()?), ..*row }, found)
            } else if with_peers || row.operation == Operation::OrderedAllReduce {
                let mut ordered = Ordered::new(&comm, &plain, &queue, row, (output.counts, with_peers))?;
                (*row, measure(&queue, &comm, &mut ordered, output)?)
            } else {
                let mut collective = Collective::new(&comm, Box::new(&plain), &queue, row, output.counts)?;
                (*row, measure(&queue, &comm, &mut collective, output)?)
            };
            if rank == 0 {
                output.row(section, &row, &found, name)?;
            }
        }
    }
    if rank == 0 {
        output.loaded(loads(&queue));
    }
    Ok(comm.synchronize(&queue)?)
}

/// Times and checks a subject on this rank, and merges the results of all ranks. No rank returns before all have finished.
fn measure(
    queue: &Queue,
    comm: &NcclCommunicator,
    subject: &mut dyn Subject,
    output: &Output,
) -> Result<Found, PerfError> {
    // After the barrier, all ranks have their operands.
    queue.synchronize()?;
    comm.barrier()?;
    let mut launch = |graph: &Graph| Ok(comm.launch(graph)?);
    let seconds = timing::time(queue, subject, output.counts, &mut launch)?;
    comm.synchronize(queue)?;
    comm.barrier()?;
    let own = Found { seconds, wrong: subject::check(subject, output.counts)? };
    let bytes: Vec<u8> = own.to_numbers().into_iter().flat_map(f64::to_le_bytes).collect();
    let all = comm.member().all_gather(&bytes, DEADLINE).map_err(gradsync::Error::from)?;
    let others: Vec<Vec<f64>> = all
        .iter()
        .enumerate()
        .filter(|(other, _)| *other != comm.rank())
        .map(|(_, bytes)| {
            let number = |bytes: &[u8]| bytes.try_into().map_or(f64::NAN, f64::from_le_bytes);
            bytes.chunks(size_of::<f64>()).map(number).collect()
        })
        .collect();
    Ok(own.merge(others.iter().map(Vec::as_slice)))
}
