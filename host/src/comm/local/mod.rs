//! Ranks as threads of one process: every collective without intermediate copies, for tests, demos and CPU training.
//!
//! All ranks of a call synchronise in shared memory (`rendezvous`), compare their calls by the engine, and only then move data
//! (`transfer`): each rank computes its share of the result directly from the other ranks' buffers. Ranks can also expose windows of
//! their memory to each other (`windows`). A rank that panics, leaves or is late turns every other rank's call into an error within the
//! deadline, so no call hangs. Never spans processes.

mod operands;
mod output;
mod rendezvous;
pub(crate) mod run;
mod signal;
mod split;
mod transfer;
mod windows;

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use self::operands::{CollectiveCall, Region, TransferCall};
use self::rendezvous::Rendezvous;
pub use self::run::{run, try_run};
use super::collective_call::{check_peer, check_shards};
use super::reduction::Reduction;
use super::{Collective, Communicator, Operands, Ranks, gather_words_by};
use crate::bootstrap::{WORLD_SIZE_LIMIT, call_deadline};
use crate::error::{Call, CommError, Error, Operation, Result};
use crate::memory::{SharedWindows, Work};
use crate::slice::{Slice, SliceMut};
use crate::trace::Recorder;

/// Makes a group of `world_size` ranks; move each communicator into its own thread.
///
/// Collectives block their thread until every rank has called them, so all ranks have to run at the same time. Ranks that are called one
/// after another, or that are tasks of a thread pool with fewer threads than ranks (such as rayon's), wait for ranks that cannot begin,
/// until the [deadline](super#deadlines) ends the wait with an error that names these ranks. Even a pool with enough threads can cause
/// this, because a rank that waits for its own parallel work may be given another rank's task to run meanwhile. [`run`] starts a thread
/// for each rank.
///
/// # Errors
/// [`Error::InvalidArgument`] for 0 ranks, and for more than 65536.
pub fn group(world_size: usize) -> Result<Vec<LocalCommunicator>> {
    group_with_deadline(world_size, call_deadline()?)
}

/// Like [`group`], but every call waits for the other ranks at most `deadline` instead of `GRADSYNC_DEADLINE`
/// or 10 minutes.
///
/// # Errors
/// [`Error::InvalidArgument`] for 0 ranks, and for more than 65536.
pub fn group_with_deadline(world_size: usize, deadline: Duration) -> Result<Vec<LocalCommunicator>> {
    if world_size == 0 {
        return Err(Error::InvalidArgument { operation: "local group", reason: "the world size is 0".into() });
    }
    if world_size > WORLD_SIZE_LIMIT {
        let reason = format!("the world size is {world_size}, and a group has at most {WORLD_SIZE_LIMIT} ranks");
        return Err(Error::InvalidArgument { operation: "local group", reason });
    }
    let recorders = Recorder::of_threads("threads", world_size);
    let shared = Arc::new(Rendezvous::new(world_size, deadline, recorders));
    Ok((0..world_size).map(|rank| LocalCommunicator::new(rank, shared.clone())).collect())
}

/// One rank of a local group. It may move to another thread, but only one thread at a time can use it.
#[derive(Debug)]
pub struct LocalCommunicator {
    rank: usize,
    shared: Arc<Rendezvous>,
    membership: Arc<Membership>,
    one_thread: PhantomData<Cell<()>>,
}

/// A rank's membership in its group; dropping it tells the other ranks that the rank has left.
#[derive(Debug)]
struct Membership {
    rank: usize,
    shared: Arc<Rendezvous>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.shared.depart(self.rank);
    }
}

impl LocalCommunicator {
    fn new(rank: usize, shared: Arc<Rendezvous>) -> Self {
        let membership = Arc::new(Membership { rank, shared: Arc::clone(&shared) });
        LocalCommunicator { rank, shared, membership, one_thread: PhantomData }
    }

    /// Returns an error in this rank's own operands, after reporting it to the other ranks, which would wait in vain.
    fn refuse(&self, operation: Operation, error: Error) -> Error {
        self.shared.fail(CommError::InvalidCall { operation, rank: self.rank, reason: error.to_string() });
        error
    }

    /// Runs a collective that uses its whole operands.
    fn collective(&self, call: Call, operands: Operands<'_>, share: impl FnOnce(&[CollectiveCall])) -> Result<()> {
        let (input, output) = Region::of_operands(operands);
        self.shared.collective(self.rank, CollectiveCall { call, input, output }, share)
    }
}

impl Ranks for LocalCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.shared.world_size()
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>> {
        gather_words_by(self, words)
    }

    fn barrier(&self) -> Result<()> {
        let call = Call::without_data(Operation::Barrier);
        self.shared.collective(self.rank, CollectiveCall { call, input: Region::NONE, output: Region::NONE }, |_| ())
    }
}

impl Communicator for LocalCommunicator {
    fn run(&self, collective: Collective<'_>) -> Result<()> {
        let (rank, world_size) = (self.rank, self.shared.world_size());
        collective.check(rank, world_size).map_err(|error| self.refuse(collective.operation(), error))?;
        let call = collective.call(world_size);
        // Memory that is both read and written, such as a shard that is gathered in place, is its own source and destination.
        match collective {
            Collective::AllReduce { operands, op, scaling } => {
                let reduction = Reduction::scaled(operands.dtype(), op, scaling);
                self.collective(call, operands, |calls| transfer::all_reduce(calls, rank, reduction))
            }
            Collective::WeightedMean { operands, weights } => {
                let reduction = Reduction::weighted(operands.dtype(), weights);
                self.collective(call, operands, |calls| transfer::all_reduce(calls, rank, reduction))
            }
            Collective::ReduceScatter { operands, op } => {
                let is_in_place = matches!(operands, Operands::InPlace(_));
                let reduction = Reduction::new(operands.dtype(), op);
                let (input, output) = Region::of_operands(operands);
                let output = if is_in_place { input.shard(rank, input.bytes / world_size) } else { output };
                let collective = CollectiveCall { call, input, output };
                self.shared.collective(rank, collective, |calls| transfer::reduce_scatter(calls, rank, reduction))
            }
            Collective::AllGather { operands } => {
                let is_in_place = matches!(operands, Operands::InPlace(_));
                let (input, output) = Region::of_operands(operands);
                let input = if is_in_place { output.shard(rank, output.bytes / world_size) } else { input };
                self.shared
                    .collective(rank, CollectiveCall { call, input, output }, |calls| transfer::all_gather(calls, rank))
            }
            Collective::AllToAll { operands } => {
                self.collective(call, operands, |calls| transfer::all_to_all(calls, rank))
            }
            Collective::Broadcast { data, root } => {
                self.collective(call, Operands::InPlace(data), |calls| transfer::broadcast(calls, rank, root))
            }
        }
    }

    fn exchange(&self, sends: &[(usize, Slice<'_>)], receives: &mut [(usize, SliceMut<'_>)]) -> Result<()> {
        let transfer = |operation, peer, data: Slice<'_>, memory| {
            check_peer(operation, peer, self.rank, self.world_size())?;
            Ok(TransferCall { call: Call::new(operation, data.len(), data.dtype()), memory })
        };
        let send = |&(peer, data): &(usize, Slice<'_>)| {
            transfer(Operation::Send { peer }, peer, data, Region::of_bytes(data.as_bytes()))
        };
        let recv = |(peer, data): &mut (usize, SliceMut<'_>)| {
            let memory = Region::of_bytes_mut(data.reborrow().as_bytes_mut());
            transfer(Operation::Recv { peer: *peer }, *peer, data.as_slice(), memory)
        };
        let transfers = sends.iter().map(send).chain(receives.iter_mut().map(recv)).collect::<Result<Vec<_>>>()?;
        // Errors name the exchange by its first transfer.
        let Some(first) = transfers.first() else { return Ok(()) };
        self.shared.exchange(self.rank, first.call.operation, transfers)
    }

    fn sharing(&self) -> Option<&(dyn SharedWindows + 'static)> {
        Some(self)
    }
}

impl SharedWindows for LocalCommunicator {
    fn with_windows(&self, vector: SliceMut<'_>, work: &mut Work<'_>) -> Result<bool> {
        let (operation, world_size) = (Operation::SharedWindows, self.world_size());
        let (shard_len, dtype) = (vector.len() / world_size, vector.dtype());
        check_shards("with_windows", world_size, ("vector", vector.len(), dtype), ("windows", shard_len, dtype))
            .map_err(|error| self.refuse(operation, error))?;
        let call = Call::new(operation, vector.len(), dtype);
        let collective = CollectiveCall { call, input: Region::NONE, output: Region::of_mut(vector) };
        self.shared.expose(self.rank, collective, |calls| {
            let window = |peer: &CollectiveCall| peer.output.shard(self.rank, shard_len * dtype.size_bytes());
            // SAFETY: the vectors are of one length and dtype, by the compared calls; their owners stay in this call, which has borrowed
            // them, until no rank works any more; no other rank has the window of this one's number.
            let memory = |window: Region| unsafe { std::slice::from_raw_parts_mut(window.start, window.bytes) };
            work(calls.iter().map(window).map(memory).map(|bytes| SliceMut::of_bytes(dtype, bytes)).collect())
        })?;
        Ok(true)
    }

    fn needs_shared_buffers(&self) -> bool {
        false
    }
}
