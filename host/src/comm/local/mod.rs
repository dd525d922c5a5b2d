//! Ranks as threads of one process: every collective without a copy in between, for tests, demos and CPU training.
//!
//! All ranks of a call meet in shared memory (`rendezvous`), compare what they asked for (`posts`), and only then move
//! data (`transfer`): each rank computes its share of the result straight from the others' buffers. They can also lend each
//! other their memory for work of their own (`loan`). A rank that panics, leaves or is late turns every other rank's call
//! into an error within the deadline; nothing hangs. Never spans processes.

mod loan;
mod posts;
mod rendezvous;
mod signal;
mod split;
mod transfer;

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use self::posts::{Memory, Post, Transfer};
use self::rendezvous::Rendezvous;
use super::operands::{self, Operand};
use super::{AddressSpace, Communicator, DEFAULT_DEADLINE, ReduceOp, Work};
use crate::dtype::DataType;
use crate::error::{Call, CommError, Error, Operation, Result};
use crate::slice::{Slice, SliceMut};

/// Makes a group of `world_size` ranks; move each communicator into its own thread.
///
/// Collectives block their thread until every rank has called them. So all ranks have to run at the same time: ranks that are called one
/// after another, or that are tasks of a thread pool with fewer threads than ranks (rayon's, for example), wait for ranks that cannot begin,
/// until the [deadline](super#deadlines) ends it with an error that names those. Even a pool with enough threads can do this, because a rank
/// that waits for its own parallel work may be given another rank's task to run meanwhile. [`run`] starts a thread for each rank.
///
/// # Errors
/// [`Error::InvalidArgument`] for 0 ranks.
pub fn group(world_size: usize) -> Result<Vec<LocalCommunicator>> {
    group_with_deadline(world_size, DEFAULT_DEADLINE)
}

/// As [`group`], where every call waits for the others at most `deadline`; [`DEFAULT_DEADLINE`] otherwise.
///
/// # Errors
/// [`Error::InvalidArgument`] for 0 ranks.
pub fn group_with_deadline(world_size: usize, deadline: Duration) -> Result<Vec<LocalCommunicator>> {
    if world_size == 0 {
        return Err(Error::InvalidArgument { operation: "local group", reason: "the world size is 0".into() });
    }
    let shared = Arc::new(Rendezvous::new(world_size, deadline));
    Ok((0..world_size).map(|rank| LocalCommunicator::new(rank, shared.clone())).collect())
}

/// Runs `body` once for each of `world_size` ranks, each on a thread of its own, and waits for all of them. Results are in rank
/// order; a rank that panicked has its panic's payload there.
///
/// The threads are new ones and belong to no pool, so that it may be called from anywhere, tasks of rayon included; `body` may use rayon.
///
/// ```
/// use gradsync::comm::{Communicator, ReduceOp, local};
///
/// let sums = local::run(3, |comm| {
///     let mut data = [comm.rank() as f32 + 1.0; 4];
///     comm.all_reduce((&mut data[..]).into(), ReduceOp::Sum).map(|()| data)
/// })?;
/// for sum in sums {
///     assert_eq!(sum.expect("no rank panicked")?, [6.0; 4]);
/// }
/// # Ok::<(), gradsync::Error>(())
/// ```
///
/// # Errors
/// [`Error::InvalidArgument`] for 0 ranks.
pub fn run<T: Send>(
    world_size: usize,
    body: impl Fn(LocalCommunicator) -> T + Sync,
) -> Result<Vec<std::thread::Result<T>>> {
    run_with_deadline(world_size, DEFAULT_DEADLINE, body)
}

/// As [`run`], where every call of a communicator waits for the others at most `deadline`; [`DEFAULT_DEADLINE`] otherwise. `body` itself may
/// take as long as it likes.
///
/// # Errors
/// [`Error::InvalidArgument`] for 0 ranks.
pub fn run_with_deadline<T: Send>(
    world_size: usize,
    deadline: Duration,
    body: impl Fn(LocalCommunicator) -> T + Sync,
) -> Result<Vec<std::thread::Result<T>>> {
    let group = group_with_deadline(world_size, deadline)?;
    let body = &body;
    Ok(std::thread::scope(|scope| {
        let ranks: Vec<_> = group.into_iter().map(|comm| scope.spawn(move || body(comm))).collect();
        ranks.into_iter().map(|rank| rank.join()).collect()
    }))
}

/// One rank of a local group. It may move to another thread, but only one thread at a time can use it.
#[derive(Debug)]
pub struct LocalCommunicator {
    rank: usize,
    shared: Arc<Rendezvous>,
    one_thread: PhantomData<Cell<()>>,
}

impl LocalCommunicator {
    fn new(rank: usize, shared: Arc<Rendezvous>) -> Self {
        LocalCommunicator { rank, shared, one_thread: PhantomData }
    }

    /// Passes on an error in this rank's own operands, after telling the other ranks, who would wait for nothing.
    fn refuse(&self, operation: Operation, error: Error) -> Error {
        self.shared.fail(CommError::InvalidCall { operation, rank: self.rank, reason: error.to_string() });
        error
    }

    fn check_shards(&self, operation: Operation, whole: Operand<'_>, shard: Operand<'_>) -> Result<()> {
        operands::check_shards(operation, self.world_size(), whole, shard)
            .map_err(|error| self.refuse(operation, error))
    }

    fn check_peer(&self, operation: Operation, peer: usize) -> Result<()> {
        operands::check_peer(operation, peer, self.rank, self.world_size())
    }
}

impl Communicator for LocalCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.shared.world_size()
    }

    fn all_reduce(&self, data: SliceMut<'_>, op: ReduceOp) -> Result<()> {
        let call = Call::new(Operation::AllReduce(op), data.len(), data.dtype());
        let post = Post { call, input: Memory::NONE, output: Memory::of_mut(data) };
        self.shared.meet(self.rank, post, |posts| transfer::all_reduce(posts, self.rank, op))
    }

    fn reduce_scatter(&self, input: Slice<'_>, output: SliceMut<'_>, op: ReduceOp) -> Result<()> {
        let operation = Operation::ReduceScatter(op);
        let shard = ("output", output.len(), output.dtype());
        self.check_shards(operation, ("input", input.len(), input.dtype()), shard)?;
        let call = Call::new(operation, output.len(), output.dtype());
        let post = Post { call, input: Memory::of(input), output: Memory::of_mut(output) };
        self.shared.meet(self.rank, post, |posts| transfer::reduce_scatter(posts, self.rank, op))
    }

    fn all_gather(&self, input: Slice<'_>, output: SliceMut<'_>) -> Result<()> {
        let whole = ("output", output.len(), output.dtype());
        self.check_shards(Operation::AllGather, whole, ("input", input.len(), input.dtype()))?;
        let call = Call::new(Operation::AllGather, input.len(), input.dtype());
        let post = Post { call, input: Memory::of(input), output: Memory::of_mut(output) };
        self.shared.meet(self.rank, post, |posts| transfer::all_gather(posts, self.rank))
    }

    fn all_gather_in_place(&self, data: SliceMut<'_>) -> Result<()> {
        let (shard, dtype) = (data.len() / self.world_size(), data.dtype());
        self.check_shards(Operation::AllGather, ("data", data.len(), dtype), ("shards", shard, dtype))?;
        let call = Call::new(Operation::AllGather, shard, dtype);
        let output = Memory::of_mut(data);
        // The shard is read where it lies; nobody writes there, this rank included.
        let input = output.shard(self.rank, shard * dtype.size_bytes());
        self.shared.meet(self.rank, Post { call, input, output }, |posts| transfer::all_gather(posts, self.rank))
    }

    fn all_to_all(&self, input: Slice<'_>, output: SliceMut<'_>) -> Result<()> {
        let operation = Operation::AllToAll;
        let shard = output.len() / self.world_size();
        let shards = ("shards", shard, output.dtype());
        self.check_shards(operation, ("output", output.len(), output.dtype()), shards)?;
        self.check_shards(operation, ("input", input.len(), input.dtype()), shards)?;
        let call = Call::new(operation, input.len(), input.dtype());
        let post = Post { call, input: Memory::of(input), output: Memory::of_mut(output) };
        self.shared.meet(self.rank, post, |posts| transfer::all_to_all(posts, self.rank))
    }

    fn broadcast(&self, data: SliceMut<'_>, root: usize) -> Result<()> {
        let operation = Operation::Broadcast { root };
        if root >= self.world_size() {
            let (rank, world_size) = (self.rank, self.world_size());
            let error = CommError::InvalidPeer { operation, peer: root, rank, world_size };
            return Err(self.refuse(operation, error.into()));
        }
        let call = Call::new(operation, data.len(), data.dtype());
        let post = Post { call, input: Memory::NONE, output: Memory::of_mut(data) };
        self.shared.meet(self.rank, post, |posts| transfer::broadcast(posts, self.rank, root))
    }

    fn send(&self, data: Slice<'_>, peer: usize) -> Result<()> {
        let operation = Operation::Send { peer };
        self.check_peer(operation, peer)?;
        let call = Call::new(operation, data.len(), data.dtype());
        self.shared.exchange(self.rank, operation, [Transfer { peer, call, memory: Memory::of(data) }], [])
    }

    fn recv(&self, data: SliceMut<'_>, peer: usize) -> Result<()> {
        let operation = Operation::Recv { peer };
        self.check_peer(operation, peer)?;
        let call = Call::new(operation, data.len(), data.dtype());
        self.shared.exchange(self.rank, operation, [], [Transfer { peer, call, memory: Memory::of_mut(data) }])
    }

    fn send_recv(&self, send: Slice<'_>, to: usize, recv: SliceMut<'_>, from: usize) -> Result<()> {
        let operation = Operation::SendRecv { to, from };
        self.check_peer(operation, to)?;
        self.check_peer(operation, from)?;
        let send_call = Call::new(operation, send.len(), send.dtype());
        let recv_call = Call::new(operation, recv.len(), recv.dtype());
        let outgoing = Transfer { peer: to, call: send_call, memory: Memory::of(send) };
        let incoming = Transfer { peer: from, call: recv_call, memory: Memory::of_mut(recv) };
        self.shared.exchange(self.rank, operation, [outgoing], [incoming])
    }

    fn exchange(&self, sends: &[(usize, &[u8])], receives: &mut [(usize, &mut [u8])]) -> Result<()> {
        let transfer = |operation, peer, memory: Memory| {
            self.check_peer(operation, peer)?;
            Ok(Transfer { peer, call: Call::new(operation, memory.bytes, DataType::U8), memory })
        };
        let send = |&(peer, data): &(usize, &[u8])| transfer(Operation::Send { peer }, peer, Memory::of_bytes(data));
        let recv = |(peer, data): &mut (usize, &mut [u8])| {
            transfer(Operation::Recv { peer: *peer }, *peer, Memory::of_bytes_mut(data))
        };
        let outgoing = sends.iter().map(send).collect::<Result<Vec<_>>>()?;
        let incoming = receives.iter_mut().map(recv).collect::<Result<Vec<_>>>()?;
        // What errors call it.
        let Some(first) = outgoing.first().or(incoming.first()) else { return Ok(()) };
        let operation = first.call.operation;
        self.shared.exchange(self.rank, operation, outgoing, incoming)
    }

    fn barrier(&self) -> Result<()> {
        let call = Call::without_data(Operation::Barrier);
        self.shared.meet(self.rank, Post { call, input: Memory::NONE, output: Memory::NONE }, |_| ())
    }

    fn address_space(&self) -> Option<&dyn AddressSpace> {
        Some(self)
    }
}

impl AddressSpace for LocalCommunicator {
    fn lend_windows(&self, vector: SliceMut<'_>, work: &mut Work<'_>) -> Result<bool> {
        let operation = Operation::LendWindows;
        let (window, dtype) = (vector.len() / self.world_size(), vector.dtype());
        self.check_shards(operation, ("vector", vector.len(), dtype), ("windows", window, dtype))?;
        let call = Call::new(operation, vector.len(), dtype);
        let post = Post { call, input: Memory::NONE, output: Memory::of_mut(vector) };
        self.shared.lend(self.rank, post, |posts| {
            let window = |post: &Post| post.output.shard(self.rank, window * dtype.size_bytes());
            // SAFETY: the vectors are of one length and dtype, by the compared calls; their owners stay in this call, which has borrowed
            // them, until no rank works any more; no other rank has the window of this one's number.
            let memory = |window: Memory| unsafe { std::slice::from_raw_parts_mut(window.start, window.bytes) };
            work(posts.iter().map(window).map(memory).map(|bytes| SliceMut::of_bytes(dtype, bytes)).collect())
        })?;
        Ok(true)
    }
}

impl Drop for LocalCommunicator {
    fn drop(&mut self) {
        self.shared.depart(self.rank);
    }
}
