//! Ranks as the processes of an MPI job, started by `mpirun` or the like: every collective on host memory, over whatever network
//! the system's MPI knows.
//!
//! ```no_run
//! use gradsync::comm::mpi::MpiCommunicator;
//! use gradsync::comm::{Communicator, ReduceOp};
//!
//! let comm = MpiCommunicator::world()?;
//! let mut gradients = vec![comm.rank() as f32; 1000];
//! comm.all_reduce((&mut gradients).into(), ReduceOp::Mean)?;
//! # Ok::<(), gradsync::Error>(())
//! ```
//!
//! MPI carries bytes here, and nothing else: reductions run in the arithmetic of [`ReduceOp`], so that results are the same bits as
//! those of [`local`](super::local) and do not depend on the MPI. Messages travel on a duplicate of the caller's communicator (MPI-4.1,
//! 7.4.2) and never meet the caller's own.
//!
//! # What fails how
//!
//! * Before data move, ranks compare their calls. Those that differ are [`CommError::Mismatch`], with the same two ranks everywhere if
//!   all are in collectives; a rank's own bad operands are [`CommError::InvalidCall`] on the others.
//! * A rank that does not come is [`CommError::Timeout`]; one that dropped its communicator, or whose process is gone, is no different:
//!   MPI does not tell. One that panics while it holds its communicator is [`CommError::PeerGone`].
//! * Once all ranks have come there is no deadline: MPI has no way to take memory back that it is still to fill. A process that dies
//!   then usually ends the whole job, by MPI's launcher.
//! * What MPI refuses is [`CommError::Transport`] with MPI's text. Failures of MPI itself while it starts end the process, by MPI's rules.
//!
//! The first failure sticks, as everywhere. A communicator that has failed is not given back to MPI before the process ends, so make few
//! of them; [`MpiCommunicator::abort`] ends a job that cannot go on.
//!
//! # Unfinished
//!
//! Device memory (CUDA-aware MPI); overlap of the windows of a reduction; shared memory between the ranks of a node.

mod channel;
mod library;
mod meeting;
mod point_to_point;
mod transfer;

use std::time::Duration;

pub use ::mpi as rsmpi;
use ::mpi::ffi;

use self::channel::{Channel, Incoming, Outgoing};
pub use self::library::MpiError;
use self::meeting::Meeting;
use self::transfer::Transfer;
use super::operands::{self, Operand};
use super::{Communicator, ReduceOp};
use crate::error::{Call, CommError, Operation, Result};
use crate::slice::{Slice, SliceMut};

/// How long a call waits for the other ranks unless [`MpiCommunicator::set_deadline`] says otherwise: 10 minutes.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(600);

/// One rank of an MPI job. It may move to another thread, but only one thread at a time can use it.
#[derive(Debug)]
pub struct MpiCommunicator {
    meeting: Meeting,
}

impl MpiCommunicator {
    /// All processes of the job; each call gives another communicator, and all ranks have to make it.
    ///
    /// Initialises MPI (MPI-4.1, 11.2.1) unless the program has, and then finalises it when the process ends; that waits for all
    /// ranks, and must happen on the thread that made the first call. Without a launcher the job is this process alone.
    ///
    /// # Errors
    /// [`Error::Mpi`](crate::Error::Mpi) if MPI has been finalised, supports too few threads, or refuses.
    pub fn world() -> Result<Self> {
        library::Library::get()?;
        // SAFETY: MPI is initialised, so there is a world.
        let channel = unsafe { Channel::duplicate(ffi::RSMPI_COMM_WORLD) }?;
        Ok(Self::over(channel, DEFAULT_DEADLINE))
    }

    /// A duplicate of a communicator of [rsmpi], for programs that use MPI themselves; all its ranks have to call it. The program keeps
    /// MPI initialised for as long as it uses this.
    ///
    /// # Errors
    /// As [`world`](Self::world); [`MpiError::Intercommunicator`] for a communicator between two groups.
    pub fn from_rsmpi(original: &impl rsmpi::topology::Communicator) -> Result<Self> {
        library::Library::get()?;
        // SAFETY: communicators of rsmpi are live for as long as they exist.
        let channel = unsafe { Channel::duplicate(rsmpi::raw::AsRaw::as_raw(original)) }?;
        Ok(Self::over(channel, DEFAULT_DEADLINE))
    }

    /// Splits the group: ranks of one `color` become a group, ordered by `key`, and where keys are equal by their rank here. Without a
    /// colour a rank takes part and gets nothing. All ranks have to call it; keep what it gives, since making it takes several rounds.
    ///
    /// # Errors
    /// Those of a collective, and [`Error::Mpi`](crate::Error::Mpi) if MPI refuses.
    pub fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Self>> {
        let (rank, world_size) = (self.rank(), self.world_size());
        self.meeting.meet(Call::without_data(Operation::SetUp))?;
        let mut wishes = vec![[0u64; 3]; world_size];
        wishes[rank] = [u64::from(color.is_some()), color.unwrap_or(0), key as u64];
        let (start, bytes) = (wishes.as_mut_ptr().cast::<u8>(), size_of::<[u64; 3]>());
        // SAFETY: our own place, and room for everybody's.
        unsafe {
            let own = start.add(rank * bytes);
            Transfer { meeting: &self.meeting, operation: Operation::SetUp }.all_gather(own, start, bytes)?;
        }
        // MPI's colours and keys are small numbers: the first rank of a colour stands for it, and the place in order for the key.
        let small = color.map(|color| wishes.iter().position(|wish| wish[..2] == [1, color]).unwrap_or(rank) as i32);
        let mut order: Vec<usize> = (0..world_size).collect();
        order.sort_by_key(|&rank| wishes[rank][2] as i64);
        let place = order.iter().position(|&other| other == rank).unwrap_or(rank) as i32;
        let channel = self.meeting.channel().split(small, place)?;
        Ok(channel.map(|channel| Self::over(channel, self.meeting.deadline())))
    }

    /// Sets how long calls wait for the other ranks from now on; equal on all ranks, or the shortest wins.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.meeting.set_deadline(deadline);
    }

    /// Ends all processes of the job with this exit code (MPI-4.1, 9.7): for a rank that knows that the others wait in vain.
    pub fn abort(&self, code: i32) -> ! {
        self.meeting.channel().abort(code)
    }

    fn over(channel: Channel, deadline: Duration) -> Self {
        MpiCommunicator { meeting: Meeting::new(channel, deadline) }
    }

    /// Meets the other ranks, after which data may move.
    fn agree(&self, call: Call) -> Result<Transfer<'_>> {
        self.meeting.meet(call)?;
        Ok(Transfer { meeting: &self.meeting, operation: call.operation })
    }

    fn check_shards(&self, operation: Operation, whole: Operand<'_>, shard: Operand<'_>) -> Result<()> {
        let checked = operands::check_shards(operation, self.world_size(), whole, shard);
        checked.map_err(|error| self.meeting.refuse(operation, error))
    }

    fn check_peer(&self, operation: Operation, peer: usize) -> Result<()> {
        operands::check_peer(operation, peer, self.rank(), self.world_size())
    }
}

fn outgoing(operation: Operation, data: Slice<'_>, peer: usize) -> (Call, Outgoing) {
    let (call, bytes) = (Call::new(operation, data.len(), data.dtype()), data.as_bytes());
    (call, Outgoing { peer, start: bytes.as_ptr(), bytes: bytes.len() })
}

fn incoming(operation: Operation, data: SliceMut<'_>, peer: usize) -> (Call, Incoming) {
    let call = Call::new(operation, data.len(), data.dtype());
    let bytes = data.as_bytes_mut();
    (call, Incoming { peer, start: bytes.as_mut_ptr(), bytes: bytes.len() })
}

// In all blocks below memory is borrowed by the call, which returns when it is not in use any more; lengths were compared before.
impl Communicator for MpiCommunicator {
    fn rank(&self) -> usize {
        self.meeting.channel().rank()
    }

    fn world_size(&self) -> usize {
        self.meeting.channel().world_size()
    }

    fn all_reduce(&self, data: SliceMut<'_>, op: ReduceOp) -> Result<()> {
        let (len, dtype) = (data.len(), data.dtype());
        let transfer = self.agree(Call::new(Operation::AllReduce(op), len, dtype))?;
        if self.world_size() == 1 {
            return Ok(());
        }
        // SAFETY: the data have `len` elements.
        unsafe { transfer.all_reduce(dtype, data.as_bytes_mut().as_mut_ptr(), len, op) }
    }

    fn reduce_scatter(&self, input: Slice<'_>, output: SliceMut<'_>, op: ReduceOp) -> Result<()> {
        let (operation, len, dtype) = (Operation::ReduceScatter(op), output.len(), output.dtype());
        self.check_shards(operation, ("input", input.len(), input.dtype()), ("output", len, dtype))?;
        let transfer = self.agree(Call::new(operation, len, dtype))?;
        let (from, to) = (input.as_bytes().as_ptr(), output.as_bytes_mut().as_mut_ptr());
        // SAFETY: the input has a shard of the output's length for every rank, as was checked.
        unsafe { transfer.reduce_scatter(dtype, from, to, len, op) }
    }

    fn all_gather(&self, input: Slice<'_>, output: SliceMut<'_>) -> Result<()> {
        let (operation, shard) = (Operation::AllGather, ("input", input.len(), input.dtype()));
        self.check_shards(operation, ("output", output.len(), output.dtype()), shard)?;
        let transfer = self.agree(Call::new(operation, input.len(), input.dtype()))?;
        let (from, to) = (input.as_bytes(), output.as_bytes_mut().as_mut_ptr());
        // SAFETY: the output has room for every rank's input, as was checked.
        unsafe { transfer.all_gather(from.as_ptr(), to, from.len()) }
    }

    fn all_gather_in_place(&self, data: SliceMut<'_>) -> Result<()> {
        let (operation, shard, dtype) = (Operation::AllGather, data.len() / self.world_size(), data.dtype());
        self.check_shards(operation, ("data", data.len(), dtype), ("shards", shard, dtype))?;
        let transfer = self.agree(Call::new(operation, shard, dtype))?;
        let (to, bytes) = (data.as_bytes_mut().as_mut_ptr(), shard * dtype.size_bytes());
        // SAFETY: the data are one shard for every rank, as was checked.
        unsafe { transfer.all_gather(to.add(self.rank() * bytes), to, bytes) }
    }

    fn all_to_all(&self, input: Slice<'_>, output: SliceMut<'_>) -> Result<()> {
        let (operation, shard) = (Operation::AllToAll, output.len() / self.world_size());
        let (len, dtype, shards) = (output.len(), output.dtype(), ("shards", shard, output.dtype()));
        self.check_shards(operation, ("output", len, dtype), shards)?;
        self.check_shards(operation, ("input", input.len(), input.dtype()), shards)?;
        let transfer = self.agree(Call::new(operation, len, dtype))?;
        let (from, to) = (input.as_bytes().as_ptr(), output.as_bytes_mut().as_mut_ptr());
        // SAFETY: both have one shard for every rank, as was checked.
        unsafe { transfer.all_to_all(from, to, shard * dtype.size_bytes()) }
    }

    fn broadcast(&self, data: SliceMut<'_>, root: usize) -> Result<()> {
        let (operation, rank, world_size) = (Operation::Broadcast { root }, self.rank(), self.world_size());
        if root >= world_size {
            let error = CommError::InvalidPeer { operation, peer: root, rank, world_size };
            return Err(self.meeting.refuse(operation, error.into()));
        }
        let transfer = self.agree(Call::new(operation, data.len(), data.dtype()))?;
        let bytes = data.as_bytes_mut();
        // SAFETY: the data of that many bytes.
        unsafe { transfer.broadcast(bytes.as_mut_ptr(), bytes.len(), root) }
    }

    fn send(&self, data: Slice<'_>, peer: usize) -> Result<()> {
        let operation = Operation::Send { peer };
        self.check_peer(operation, peer)?;
        // SAFETY: the data as they are.
        unsafe { point_to_point::exchange(&self.meeting, operation, Some(outgoing(operation, data, peer)), None) }
    }

    fn recv(&self, data: SliceMut<'_>, peer: usize) -> Result<()> {
        let operation = Operation::Recv { peer };
        self.check_peer(operation, peer)?;
        // SAFETY: the data as they are.
        unsafe { point_to_point::exchange(&self.meeting, operation, None, Some(incoming(operation, data, peer))) }
    }

    fn send_recv(&self, send: Slice<'_>, to: usize, recv: SliceMut<'_>, from: usize) -> Result<()> {
        let operation = Operation::SendRecv { to, from };
        self.check_peer(operation, to)?;
        self.check_peer(operation, from)?;
        let (send, receive) = (outgoing(operation, send, to), incoming(operation, recv, from));
        // SAFETY: the data as they are.
        unsafe { point_to_point::exchange(&self.meeting, operation, Some(send), Some(receive)) }
    }

    fn barrier(&self) -> Result<()> {
        self.meeting.meet(Call::without_data(Operation::Barrier))
    }
}
