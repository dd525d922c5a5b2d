//! Ranks as the processes of an MPI job, started by `mpirun` or a similar launcher: every collective on host memory, over any network
//! that the system's MPI supports.
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
//! MPI only transfers bytes here: reductions run in the arithmetic of [`ReduceOp`](crate::comm::ReduceOp), so results have the same bits
//! as with [`local`](super::local) and do not depend on the MPI. Messages are sent on a duplicate of the caller's communicator (MPI-4.1,
//! 7.4.2) and never match the caller's own.
//!
//! Ranks compare their calls before data move, in two rounds, so that either all proceed or none does; for collectives of few data within
//! an exposure epoch ([below](self#shared-memory-of-one-machine)), the end of the epoch replaces the second round. The operands of
//! small calls of all-reduce, reduce-scatter, all-gather and all-to-all are sent with the call (the eager protocol): up to 3 KiB for each
//! rank and 64 KiB for all together in messages, and 256 KiB for all together in shared memory of one machine. Larger operands take two
//! or three rounds of messages after the call. In shared memory they go through the mailboxes in pieces instead (pipelined), the reductions
//! for up to some hundred ranks.
//!
//! # Failures
//!
//! * Before data move, ranks compare their calls. Calls that differ are [`CommError::Mismatch`](crate::CommError::Mismatch), with the
//!   same two ranks everywhere if all are in collectives; a rank's own bad operands are
//!   [`CommError::InvalidCall`](crate::CommError::InvalidCall) on the other ranks.
//! * A rank that does not arrive is [`CommError::Timeout`](crate::CommError::Timeout); so is a rank that dropped its communicator, or
//!   whose process has ended, because MPI does not report it. A rank that panics while it holds its communicator is
//!   [`CommError::PeerGone`](crate::CommError::PeerGone).
//! * Messages of up to 2 MiB are sent in pieces through buffers of this module: data that do not move within the deadline, for example
//!   if a process is stopped, are [`CommError::Timeout`](crate::CommError::Timeout) too, and these buffers stay with MPI. For longer
//!   messages, and for GPU memory that is passed to it, MPI gets the caller's memory and cannot return it, so that the call has no deadline
//!   once data move. A process that dies usually ends the whole job, by MPI's launcher.
//! * Communicators are made within a deadline too. MPI continues to wait for a rank that did not call [`MpiCommunicator::world`] in time,
//!   and the job makes no other communicator of all ranks.
//! * An error of MPI is [`CommError::Transport`](crate::CommError::Transport) with MPI's text. Failures of MPI itself while it starts end
//!   the process, by MPI's rules.
//!
//! The first failure is permanent, as with every communicator. A failed communicator of all ranks, or one with a failed group, is not
//! freed before the process ends, so make few of them; [`MpiCommunicator::abort`] ends a job that cannot continue.
//!
//! # Shared memory of one machine
//!
//! If all ranks are processes of one machine and one user, they run their handshakes in shared memory, without messages
//! ([`shares_memory`](MpiCommunicator::shares_memory)). With `GRADSYNC_MPI_MESSAGES_ONLY=1` in the environment of any rank they send
//! messages, as ranks of several machines do. Long collectives go through the mailboxes in pieces; sends and receives are messages of MPI.
//!
//! Vectors in memory that the other ranks can map ([`GradientBuffer::new_shared`](crate::GradientBuffer::new_shared)) stay in place:
//! ranks expose windows of them to each other, for the time of an exposure epoch, instead of sending copies. If a process is stopped
//! during an epoch, the other ranks time out and revoke its access: they continue with a copy at the same address, and the stopped
//! process with the old file. Access to only a part of a buffer cannot be revoked: a rank that still uses it a deadline after a failure
//! ends the job.
//!
//! # Device memory
//!
//! With the feature `cuda`, the module `device` has the same collectives on the memory of GPUs. [`MpiCommunicator::member`] gives the
//! ranks of a job the control channel by which NCCL starts, and `device::connect` chooses between the two transports.
//!
//! # Not implemented
//!
//! The pieces of a reduction on host memory are processed one after another, and do not overlap. Memory is shared only if all ranks are on one
//! machine, not among the ranks of one of several nodes. On several machines, each rank sends two records to every other rank in a
//! collective, and not along a tree, which is noticeable from hundreds of ranks on.

mod channel;
#[cfg(feature = "cuda")]
pub mod device;
mod duplicate;
mod library;
mod member;

use std::time::Duration;

use ::mpi::{ffi, topology};

use self::channel::Channel;
use super::message_passing::{MemoryUse, MessagePassing, communicator};
use crate::bootstrap::call_deadline;
pub use crate::error::MpiError;
use crate::error::Result;

/// The environment variable that makes ranks send messages even if they could share memory, with any value but `0`.
const MESSAGES_ONLY: &str = "GRADSYNC_MPI_MESSAGES_ONLY";

/// One rank of an MPI job. It may move to another thread, but only one thread at a time can use it.
#[derive(Debug)]
pub struct MpiCommunicator {
    ranks: MessagePassing,
}

impl MpiCommunicator {
    /// Makes a communicator of all processes of the job. Each call makes another communicator, and all ranks have to call it.
    ///
    /// Initialises MPI (MPI-4.1, 11.2.1) unless the program has done so, and then finalises it when the process ends. Finalising waits
    /// for all ranks, and must happen on the thread that made the first call. Without a launcher, the job is this process alone.
    ///
    /// # Errors
    /// [`Error::Mpi`](crate::Error::Mpi) if MPI has been finalised, supports too few threads, or refuses;
    /// [`CommError::Timeout`](crate::CommError::Timeout) if a rank does not arrive. After a timeout MPI still waits for that rank, so
    /// every later call is [`MpiError::GivenUp`]; existing communicators still work, and can be split.
    pub fn world() -> Result<Self> {
        Self::world_within(call_deadline()?)
    }

    /// Like [`world`](Self::world), but this call waits for the other ranks at most `deadline`, and so do the calls of the communicator, as
    /// with [`with_deadline`](Self::with_deadline). Only MPI's own initialisation, if this is the first call, knows no deadline.
    ///
    /// # Errors
    /// As [`world`](Self::world).
    pub fn world_within(deadline: Duration) -> Result<Self> {
        library::Library::get()?;
        // SAFETY: MPI is initialised, so there is a world.
        let channel = unsafe { duplicate::duplicate(ffi::RSMPI_COMM_WORLD, deadline) }?;
        Self::over(channel, deadline)
    }

    /// Makes a duplicate of a communicator of rsmpi, which is version 0.8 of the crate `mpi`, for programs that use MPI themselves; all
    /// its ranks have to call it. The program keeps MPI initialised for as long as it uses this communicator.
    ///
    /// # Errors
    /// As [`world`](Self::world); [`MpiError::Intercommunicator`] for a communicator between two groups.
    pub fn from_rsmpi(original: &impl topology::Communicator) -> Result<Self> {
        library::Library::get()?;
        let deadline = call_deadline()?;
        // SAFETY: communicators of rsmpi are live for as long as they exist, and freed by `MPI_Comm_free`.
        let channel = unsafe { duplicate::duplicate(original.as_raw(), deadline) }?;
        Self::over(channel, deadline)
    }

    /// Sets the deadline of every call, `GRADSYNC_DEADLINE` or 10 minutes otherwise; equal on all
    /// ranks, or the shortest takes effect. Groups that are split off keep it.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.ranks.set_deadline(deadline);
        self
    }

    /// Ends all processes of the job with this exit code (MPI-4.1, 9.7). It is for a rank that knows that the others wait in vain.
    pub fn abort(&self, code: i32) -> ! {
        self.ranks.link().abort(code)
    }

    fn over(channel: Channel, deadline: Duration) -> Result<Self> {
        let memory = MemoryUse::unless(MESSAGES_ONLY);
        Ok(MpiCommunicator { ranks: MessagePassing::new(Box::new(channel), deadline, memory)? })
    }

    fn group(&self, ranks: MessagePassing) -> Self {
        MpiCommunicator { ranks }
    }

    /// Whether all ranks are processes of one machine that share memory: their handshakes run there, and [shared
    /// buffers](crate::GradientBuffer::new_shared) are reduced in place.
    pub fn shares_memory(&self) -> bool {
        self.ranks.shares_memory()
    }
}

communicator! {
    MpiCommunicator,
    /// Keep groups instead of making them again, which takes several rounds and uses up two of MPI's tags for each group (Open MPI has
    /// 2³¹).
}
