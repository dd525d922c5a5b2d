//! Ranks as the processes of an MPI job, started by `mpirun` or the like: every collective on host memory, over whatever network
//! the system's MPI knows.
//!
//! ```no_run
//! use gradsync::comm::mpi::MpiCommunicator;
//! use gradsync::comm::{Collectives, Ranks, ReduceOp};
//!
//! let comm = MpiCommunicator::world()?;
//! let mut gradients = vec![comm.rank() as f32; 1000];
//! comm.all_reduce(&mut gradients, ReduceOp::Mean)?;
//! # Ok::<(), gradsync::Error>(())
//! ```
//!
//! MPI carries bytes here, and nothing else: reductions run in the arithmetic of [`ReduceOp`], so that results have the same bits as
//! with [`local`](super::local) and do not depend on the MPI. Messages travel on a duplicate of the caller's communicator (MPI-4.1,
//! 7.4.2) and are never matched with the caller's own.
//!
//! Ranks compare their calls before data move, in two rounds, so that either all proceed or none does; collectives of few data within an exposure
//! epoch ([`SharedWindows`]) leave the second round to its end. The operands of small calls of all-reduce, reduce-scatter, all-gather and
//! all-to-all travel with the call (the eager protocol): up to 3 KiB for each rank and 64 KiB for all together in messages, and 256 KiB for all
//! together in the memory of one machine. Larger operands take two or three rounds of messages after the call; only reduce-scatter, and all-reduce
//! from three ranks on, go through the memory of one machine in chunks instead (pipelined), up to some hundred ranks.
//!
//! # Failures
//!
//! * Before data move, ranks compare their calls. Calls that differ are [`CommError::Mismatch`](crate::CommError::Mismatch), with the same two ranks everywhere if
//!   all are in collectives; a rank's own bad operands are [`CommError::InvalidCall`](crate::CommError::InvalidCall) on the other ranks.
//! * A rank that does not arrive is [`CommError::Timeout`](crate::CommError::Timeout); so is a rank that dropped its communicator, or whose process has ended, because
//!   MPI does not tell. A rank that panics while it holds its communicator is [`CommError::PeerGone`](crate::CommError::PeerGone).
//! * Data that do not move for the deadline are [`CommError::Timeout`](crate::CommError::Timeout) too, for example if a process is stopped. Messages are pieces in buffers of
//!   this module, which are left to MPI then. A process that dies usually ends the whole job, by MPI's launcher.
//! * Communicators are made within a deadline too. MPI goes on waiting for a rank that did not call [`MpiCommunicator::world`] in time, and the
//!   job makes no other communicator of all ranks.
//! * An error of MPI is [`CommError::Transport`](crate::CommError::Transport) with MPI's text. Failures of MPI itself while it starts end the process, by MPI's rules.
//!
//! The first failure is permanent, as with every communicator. A failed communicator of all ranks, or one with a failed group, is not freed before
//! the process ends, so make few of them; [`MpiCommunicator::abort`] ends a job that cannot go on.
//!
//! # Shared memory of one machine
//!
//! Where all ranks are processes of one machine and one user, they run their handshakes in shared memory, without messages
//! ([`shares_memory`](MpiCommunicator::shares_memory)). With `GRADSYNC_MPI_MESSAGES_ONLY=1` in the environment of any rank they send messages,
//! as ranks of several machines do.
//!
//! Vectors in memory that the other ranks can map ([`GradientBuffer::new_shared`](crate::GradientBuffer::new_shared)) stay where they
//! are: ranks open windows of them to each other ([`SharedWindows`]) instead of sending copies. A process that is stopped during such an exposure
//! epoch is a timeout to the others, which revoke its access: they go on with a copy at the same address, and the stopped process with the old file.
//! Access to only a part of a buffer cannot be revoked: a rank that still uses it a deadline after a failure ends the job.
//!
//! # Device memory
//!
//! With the feature `cuda` there is `device`: the same collectives on the memory of GPUs. [`MpiCommunicator::member`] gives the ranks of
//! a job the control channel by which NCCL starts, and `device::connect` chooses between the two.
//!
//! # Unfinished
//!
//! Overlap of the windows of a reduction on host memory; memory that only some of the ranks share, such as the ranks of one of several nodes; records
//! that go by a tree: on several machines each rank sends two records to every other rank in a collective, which is noticeable from hundreds of ranks
//! on.

mod channel;
#[cfg(feature = "cuda")]
pub mod device;
mod direct;
mod eager;
mod handshake;
mod library;
mod mailbox;
mod making;
mod member;
mod pipelined;
mod point_to_point;
mod stream;
mod transfer;
mod windows;

use std::borrow::Cow;
use std::time::Duration;

use ::mpi::{ffi, topology};

use self::channel::{Channel, Incoming, Outgoing, Tags};
use self::handshake::Handshake;
use self::point_to_point::Half;
use self::transfer::Transfer;
use self::windows::PeerMappings;
use super::collective::check_peer;
use super::reduction::Reduction;
use super::{Collective, Communicator, DEFAULT_DEADLINE, Operands, Ranks, ReduceOp, Scaling, Split, gather_words_by};
use crate::call::scope;
pub use crate::error::MpiError;
use crate::error::{Call, Operation, Result};
use crate::memory::{SharedWindows, WireSlice, WireSliceMut};
use crate::slice::{Slice, SliceMut};

/// One rank of an MPI job. It may move to another thread, but only one thread at a time can use it.
#[derive(Debug)]
pub struct MpiCommunicator {
    handshake: Handshake,
    mappings: PeerMappings,
}

impl MpiCommunicator {
    /// All processes of the job; each call gives another communicator, and all ranks have to make it.
    ///
    /// Initialises MPI (MPI-4.1, 11.2.1) unless the program has, and then finalises it when the process ends; that waits for all
    /// ranks, and must happen on the thread that made the first call. Without a launcher the job is this process alone.
    ///
    /// # Errors
    /// [`Error::Mpi`](crate::Error::Mpi) if MPI has been finalised, supports too few threads, or refuses; [`CommError::Timeout`](crate::CommError::Timeout) if a rank
    /// does not come. After a timeout MPI still waits for that rank, so that every later call is [`MpiError::GivenUp`]; communicators that there are
    /// go on, and can be split.
    pub fn world() -> Result<Self> {
        Self::world_within(DEFAULT_DEADLINE)
    }

    /// Like [`world`](Self::world), but this call waits for the other ranks at most `deadline`, and so do the calls of the communicator, as
    /// with [`with_deadline`](Self::with_deadline). Only MPI's own initialisation, if this is the first call, knows no deadline.
    ///
    /// # Errors
    /// As [`world`](Self::world).
    pub fn world_within(deadline: Duration) -> Result<Self> {
        library::Library::get()?;
        // SAFETY: MPI is initialised, so there is a world.
        let channel = unsafe { making::duplicate(ffi::RSMPI_COMM_WORLD, deadline) }?;
        Self::over(channel, deadline)
    }

    /// A duplicate of a communicator of rsmpi, which is version 0.8 of the crate `mpi`, for programs that use MPI themselves; all its ranks
    /// have to call it. The program keeps MPI initialised for as long as it uses this.
    ///
    /// # Errors
    /// As [`world`](Self::world); [`MpiError::Intercommunicator`] for a communicator between two groups.
    pub fn from_rsmpi(original: &impl topology::Communicator) -> Result<Self> {
        library::Library::get()?;
        // SAFETY: communicators of rsmpi are live for as long as they exist, and freed by `MPI_Comm_free`.
        let channel = unsafe { making::duplicate(original.as_raw(), DEFAULT_DEADLINE) }?;
        Self::over(channel, DEFAULT_DEADLINE)
    }

    /// The same, where every call waits for the other ranks at most `deadline` ([`DEFAULT_DEADLINE`] otherwise); equal on all ranks, or the
    /// shortest wins. Groups that are split off keep it.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.handshake.set_deadline(deadline);
        self
    }

    /// Ends all processes of the job with this exit code (MPI-4.1, 9.7): for a rank that knows that the others wait in vain.
    pub fn abort(&self, code: i32) -> ! {
        self.handshake.channel().abort(code)
    }

    /// Finds tags that no group of these ranks has. Another thread of a rank, which splits another communicator, may take them first.
    fn agree_on_tags(&self) -> Result<Tags> {
        let channel = self.handshake.channel();
        loop {
            let free = self.gather(SetUp::Tags.call(), &[channel.free_tags().word()])?;
            let tags = Tags::of_word(free.into_iter().max().unwrap_or_default());
            let is_taken = channel.take_tags(tags)?;
            if !self.gather(SetUp::Tags.call(), &[u64::from(is_taken)])?.contains(&0) {
                return Ok(tags);
            }
        }
    }

    fn over(channel: Channel, deadline: Duration) -> Result<Self> {
        let mut comm =
            MpiCommunicator { handshake: Handshake::new(channel, deadline), mappings: PeerMappings::default() };
        comm.open_mailboxes()?;
        Ok(comm)
    }

    /// Whether all ranks are processes of one machine that share memory: their handshakes run there, and
    /// [shared buffers](crate::GradientBuffer::new_shared) are reduced where they lie.
    pub fn shares_memory(&self) -> bool {
        self.handshake.mailboxes().is_some()
    }

    /// Agrees with the other ranks on this call, after which data may move.
    fn agree(&self, call: Call) -> Result<Transfer<'_>> {
        self.handshake.agree(call)?;
        Ok(Transfer { handshake: &self.handshake, operation: call.operation })
    }

    /// Gathers every rank's words, in rank order; all ranks give equally many. Either all ranks have the result, or none.
    fn gather(&self, call: Call, own: &[u64]) -> Result<Vec<u64>> {
        let mut all = vec![0u64; own.len() * self.world_size()];
        let (own, output): (&[u8], &mut [u8]) = (bytemuck::cast_slice(own), bytemuck::cast_slice_mut(&mut all));
        if self.handshake.is_eager(own.len()) {
            self.handshake.all_gather_confirmed(call, own, output)?;
        } else {
            self.gather_bytes(call, own, output)?;
        }
        Ok(all)
    }

    /// Gathers byte strings of equal length into `all`.
    fn gather_bytes(&self, call: Call, own: &[u8], all: &mut [u8]) -> Result<()> {
        if self.handshake.is_eager(own.len()) {
            return self.handshake.all_gather_eager(call, own, all);
        }
        let transfer = self.agree(call)?;
        // SAFETY: there is room for as many bytes of every rank.
        unsafe { transfer.all_gather(own.as_ptr(), all.as_mut_ptr(), own.len()) }
    }

    fn check_peer(&self, operation: Operation, peer: usize) -> Result<()> {
        check_peer(operation, peer, self.rank(), self.world_size())
    }

    fn run_all_reduce(&self, call: Call, operands: Operands<'_>, op: ReduceOp, scaling: Scaling) -> Result<()> {
        let Scaling { before, after } = scaling;
        let reduction = Reduction { dtype: operands.dtype(), op, before, after };
        let (input, output) = match operands {
            Operands::InPlace(data) => (None, data.as_bytes_mut()),
            Operands::Apart { input, output } => (Some(input.as_bytes()), output.as_bytes_mut()),
        };
        if self.world_size() > 1 && self.handshake.is_eager(output.len()) {
            return self.handshake.all_reduce_eager(call, reduction, input, output);
        }
        let transfer = self.agree(call)?;
        input.into_iter().for_each(|input| output.copy_from_slice(input));
        if self.world_size() == 1 && scaling == Scaling::NONE {
            return Ok(());
        }
        // SAFETY: the data have as many elements as the call says.
        unsafe { transfer.all_reduce(reduction, output.as_mut_ptr(), call.len) }
    }

    fn run_reduce_scatter(&self, call: Call, mut operands: Operands<'_>, op: ReduceOp) -> Result<()> {
        let (reduction, bytes) = (Reduction::new(operands.dtype(), op), call.bytes());
        let is_in_place = matches!(operands, Operands::InPlace(_));
        let (input, output) = operands.raw_bytes();
        let begin = if is_in_place { self.rank() * bytes } else { 0 };
        let shard = output.cast::<u8>().wrapping_add(begin);
        if self.handshake.is_eager(bytes) {
            // SAFETY: the memory of the input, borrowed by the operands, of which nobody has the shard yet.
            let input = unsafe { &*input };
            let input = if is_in_place { Cow::Owned(input.to_vec()) } else { Cow::Borrowed(input) };
            // SAFETY: the memory of the shard, borrowed mutably by the operands; what is read is a copy of it, or apart.
            let shard = unsafe { std::slice::from_raw_parts_mut(shard, bytes) };
            return self.handshake.reduce_scatter_eager(call, reduction, &input, shard);
        }
        let transfer = self.agree(call)?;
        // SAFETY: the input has a shard of the output's length for every rank, as was checked; the output is apart, or this rank's shard.
        unsafe { transfer.reduce_scatter(reduction, input.cast(), shard, call.len) }
    }

    fn run_all_gather(&self, call: Call, operands: Operands<'_>) -> Result<()> {
        let data = match operands {
            Operands::Apart { input, output } => {
                return self.gather_bytes(call, input.as_bytes(), output.as_bytes_mut());
            }
            Operands::InPlace(data) => data,
        };
        let (all, bytes) = (data.as_bytes_mut(), call.bytes());
        let begin = self.rank() * bytes;
        if self.handshake.is_eager(bytes) {
            let own = all[begin..begin + bytes].to_vec();
            return self.handshake.all_gather_eager(call, &own, all);
        }
        let (transfer, to) = (self.agree(call)?, all.as_mut_ptr());
        // SAFETY: the data are one shard for every rank, as was checked.
        unsafe { transfer.all_gather(to.add(begin), to, bytes) }
    }

    fn run_all_to_all(&self, call: Call, input: Slice<'_>, output: SliceMut<'_>) -> Result<()> {
        let (from, to, bytes) = (input.as_bytes(), output.as_bytes_mut(), call.bytes() / self.world_size());
        if self.handshake.is_eager(bytes) {
            return self.handshake.all_to_all_eager(call, from, to);
        }
        let transfer = self.agree(call)?;
        // SAFETY: both have one shard for every rank, as was checked.
        unsafe { transfer.all_to_all(from.as_ptr(), to.as_mut_ptr(), bytes) }
    }

    fn run_broadcast(&self, call: Call, data: SliceMut<'_>, root: usize) -> Result<()> {
        let transfer = self.agree(call)?;
        let bytes = data.as_bytes_mut();
        // SAFETY: the data of that many bytes.
        unsafe { transfer.broadcast(bytes.as_mut_ptr(), bytes.len(), root) }
    }
}

/// The collectives by which something new is made. Their numbers stand for the length, so that two of them are no match.
#[derive(Clone, Copy, Debug)]
enum SetUp {
    Split,
    Tags,
    Member,
    Map,
    Mailboxes,
    #[cfg(feature = "cuda")]
    Device,
    #[cfg(feature = "cuda")]
    Connect,
}

impl SetUp {
    fn call(self) -> Call {
        Call::of(Operation::SetUp, self as usize, None)
    }
}

/// # Safety
/// The transfer is over before the borrow of the data is.
unsafe fn outgoing(call: Call, data: &[u8], peer: usize) -> Half<'static> {
    // SAFETY: the caller's promise.
    unsafe { Half::outgoing(call, Outgoing { peer, start: data.as_ptr(), bytes: data.len() }) }
}

/// # Safety
/// As [`outgoing`].
unsafe fn incoming(call: Call, data: &mut [u8], peer: usize) -> Half<'static> {
    // SAFETY: the caller's promise.
    unsafe { Half::incoming(call, Incoming { peer, start: data.as_mut_ptr(), bytes: data.len() }) }
}

impl Split for MpiCommunicator {
    /// Keep the groups instead of making them again: that takes several rounds, and each uses up two of MPI's tags (in Open MPI there are 2³¹).
    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Self>> {
        let _scope = scope::within(Operation::Split);
        let world_size = self.world_size();
        let own = [u64::from(color.is_some()), color.unwrap_or(0), key as u64];
        let all = self.gather(SetUp::Split.call(), &own)?;
        let wishes: Vec<&[u64]> = all.chunks_exact(own.len()).collect();
        let mut members: Vec<usize> = (0..world_size).filter(|&other| wishes[other][..2] == own[..2]).collect();
        members.sort_by_key(|&member| wishes[member][2] as i64);
        let tags = self.agree_on_tags()?;
        color.map(|_| Self::over(self.handshake.channel().among(&members, tags), self.handshake.deadline())).transpose()
    }
}

impl Ranks for MpiCommunicator {
    fn rank(&self) -> usize {
        self.handshake.channel().rank()
    }

    fn world_size(&self) -> usize {
        self.handshake.channel().world_size()
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>> {
        gather_words_by(self, words)
    }

    fn barrier(&self) -> Result<()> {
        self.handshake.agree(Call::without_data(Operation::Barrier))
    }
}

// In all blocks of these collectives memory is borrowed by the call, which returns when it is not in use any more; lengths were compared before.
impl Communicator for MpiCommunicator {
    fn run(&self, collective: Collective<'_>) -> Result<()> {
        let checked = collective.check(self.rank(), self.world_size());
        checked.map_err(|error| self.handshake.refuse(collective.operation(), error))?;
        let call = collective.call(self.world_size());
        match collective {
            Collective::AllReduce { operands, op, scaling } => self.run_all_reduce(call, operands, op, scaling),
            Collective::ReduceScatter { operands, op } => self.run_reduce_scatter(call, operands, op),
            Collective::AllGather { operands } => self.run_all_gather(call, operands),
            Collective::AllToAll { input, output } => self.run_all_to_all(call, input, output),
            Collective::Broadcast { data, root } => self.run_broadcast(call, data, root),
        }
    }

    fn exchange(&self, sends: &[(usize, WireSlice<'_>)], receives: &mut [(usize, WireSliceMut<'_>)]) -> Result<()> {
        sends.iter().try_for_each(|&(peer, _)| self.check_peer(Operation::Send { peer }, peer))?;
        receives.iter().try_for_each(|&(peer, _)| self.check_peer(Operation::Recv { peer }, peer))?;
        let call = |operation, data: WireSlice<'_>| Call::new(operation, data.len(), data.dtype());
        let sends = sends.iter().map(|&(peer, data)| {
            // SAFETY: over when the exchange is.
            unsafe { outgoing(call(Operation::Send { peer }, data), data.bytes(), peer) }
        });
        let receives = receives.iter_mut().map(|(peer, data)| {
            let call = call(Operation::Recv { peer: *peer }, data.as_wire());
            // SAFETY: over when the exchange is.
            unsafe { incoming(call, data.bytes_mut(), *peer) }
        });
        point_to_point::exchange(&self.handshake, sends.collect(), receives.collect())
    }

    fn sharing(&self) -> Option<&(dyn SharedWindows + 'static)> {
        self.shares_memory().then_some(self)
    }
}
