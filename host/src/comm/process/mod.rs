//! Ranks as processes without MPI: every collective on host memory, on one machine through shared memory, and between machines for small
//! data.
//!
//! ```
//! use gradsync::bootstrap::Launch;
//! use gradsync::comm::process::ProcessCommunicator;
//! use gradsync::comm::{Collectives, Ranks, ReduceOp};
//!
//! # fn main() -> Result<(), gradsync::Error> {
//! # let launched = || -> Result<_, gradsync::Error> {
//! // A process that a launcher has started: it sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GRADSYNC_SECRET.
//! let member = Launch::from_env()?.join()?;
//! # Ok(member)
//! # };
//! # let _ = launched;
//! # let member = gradsync::bootstrap::Rendezvous::in_process().join(0, 1)?;
//! let comm = ProcessCommunicator::new(member)?;
//! let mut gradients = vec![comm.rank() as f32; 1000];
//! comm.all_reduce(&mut gradients, ReduceOp::Mean)?;
//! # Ok(())
//! # }
//! ```
//!
//! Results have the same bits as with [`local`](super::local) and MPI; calls are compared, executed and refused by the same code as
//! MPI's.
//!
//! # One machine
//!
//! Processes of one machine, one user and one network namespace connect by Unix sockets, whose names disappear once all have connected;
//! other processes of the machine, and those between which the system refuses such a socket, connect by TCP, encrypted. Both ends prove
//! that they know the group's secret. Over the control channel they exchange handles of their memory, and open it by
//! `/proc`, as ranks of MPI do ([`shares_memory`](ProcessCommunicator::shares_memory)): handshakes run in mailboxes, records in lanes of
//! shared memory, all collectives in pieces through the mailboxes, sends and receives through the lanes, and
//! [shared buffers](crate::GradientBuffer::new_shared) are reduced in place. The receiver copies messages of 64 KiB and more straight
//! from the sender's memory (`process_vm_readv`) if the system permits it. If memory cannot be shared, for example for lack of
//! descriptors or between containers with PID namespaces of their own, everything goes through the sockets. Ranks try this when the
//! communicator is made, and all ranks make the same choice. With `GRADSYNC_PROCESS_MESSAGES_ONLY=1` in the environment of any rank, all
//! use only sockets.
//!
//! # Several machines
//!
//! Ranks of different machines connect by TCP, at the addresses from which they have connected to the control channel. All data are
//! encrypted and authenticated, as on the control channel. A call may have 1 MiB, for metrics, counts and settings. A longer call is
//! [`Error::InvalidArgument`](crate::Error::InvalidArgument) on every rank: use NCCL or MPI for gradients between machines.
//! Ranks with different values of `GRADSYNC_HOSTID` behave as if on different machines.
//!
//! # Systems
//!
//! Linux has all of it. Other Unix systems share no memory, and a call may have 1 MiB. On Windows, making a communicator is
//! [`Error::UnsupportedSystem`](crate::Error::UnsupportedSystem).
//!
//! # Failures
//!
//! * Calls that differ are [`CommError::Mismatch`](crate::CommError::Mismatch), and a rank's own bad operands are
//!   [`CommError::InvalidCall`](crate::CommError::InvalidCall) on the other ranks.
//! * A process that ends, is killed, or drops its communicator before a call that needs it is
//!   [`CommError::PeerGone`](crate::CommError::PeerGone), at once. It leaves nothing in a file system.
//! * A rank that is late or stopped is [`CommError::Timeout`](crate::CommError::Timeout), with its number. Messages in flight are
//!   cancelled, so that the caller has its memory again.
//!
//! The first failure is permanent, as with every communicator.

#[cfg(unix)]
mod connection;
#[cfg(unix)]
mod lane;
#[cfg(unix)]
mod link;
#[cfg(unix)]
mod mesh;
#[cfg(unix)]
mod mesh_setup;
#[cfg(unix)]
mod message;
#[cfg(not(unix))]
mod missing;
#[cfg(unix)]
mod single_copy;

use std::sync::Arc;
use std::time::Duration;

#[cfg(not(unix))]
use self::missing::{Mesh, connect, link_of_all};
#[cfg(unix)]
use self::{link::link_of_all, mesh::Mesh, mesh_setup::connect};
use super::message_passing::{MemoryUse, MessagePassing, communicator};
use crate::bootstrap::{Member, call_deadline};
use crate::error::Result;

/// The environment variable that makes ranks use sockets even if they could share memory, with any value but `0`.
const MESSAGES_ONLY: &str = "GRADSYNC_PROCESS_MESSAGES_ONLY";

/// The most bytes of a call between machines: of its longer operand, or of one transfer.
pub(crate) const NETWORK_BYTES: usize = 1 << 20;

/// One rank, which is a process or a thread of one. It may move to another thread, but only one thread at a time can use it.
#[derive(Debug)]
pub struct ProcessCommunicator {
    ranks: MessagePassing,
    mesh: Arc<Mesh>,
}

impl ProcessCommunicator {
    /// Connects the ranks of a group that a [`Rendezvous`](crate::bootstrap::Rendezvous) has formed. All of them have to call it.
    /// The deadline of its calls is `GRADSYNC_DEADLINE` or 10 minutes, whatever the rendezvous had.
    ///
    /// # Errors
    /// [`CommError::Timeout`](crate::CommError::Timeout) and [`CommError::PeerGone`](crate::CommError::PeerGone) for ranks that do not
    /// connect; [`CommError::Transport`](crate::CommError::Transport), on every rank, with the system's error if a rank cannot connect:
    /// for example, it has no descriptors left, of which it needs one for each other rank.
    /// [`Error::UnsupportedSystem`](crate::Error::UnsupportedSystem) on systems that are no Unix.
    pub fn new(member: Member) -> Result<Self> {
        Self::new_within(member, call_deadline()?)
    }

    /// Like [`new`](Self::new), but this call waits for the other ranks at most `deadline`, and so do the calls of the communicator, as
    /// with [`with_deadline`](Self::with_deadline).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn new_within(member: Member, deadline: Duration) -> Result<Self> {
        let memory = MemoryUse::unless(MESSAGES_ONLY);
        let mesh = Arc::new(connect(member, deadline, memory)?);
        Ok(Self { ranks: MessagePassing::new(link_of_all(mesh.clone()), deadline, memory)?, mesh })
    }

    /// Sets the deadline of every call, in place of the deadline of [`new`](Self::new); equal on all ranks, or the shortest takes effect.
    /// Groups that are split off keep it.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.ranks.set_deadline(deadline);
        self
    }

    /// The control channel of all ranks, also in a group that was split off.
    pub fn member(&self) -> &Member {
        self.mesh.member()
    }

    /// Whether all ranks are processes of one machine that share memory: their handshakes run there, and
    /// [shared buffers](crate::GradientBuffer::new_shared) are reduced where they lie.
    pub fn shares_memory(&self) -> bool {
        self.ranks.shares_memory()
    }

    fn group(&self, ranks: MessagePassing) -> Self {
        Self { ranks, mesh: self.mesh.clone() }
    }
}

communicator! {
    ProcessCommunicator,
    /// Groups share the connections of all ranks. Keep groups instead of making them again, which takes several rounds.
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::bootstrap::Rendezvous;
    use crate::comm::Collectives;
    use crate::comm::message_passing::Record;
    use crate::error::{CommError, Error, Operation};

    /// Rank 0 finds a failure, and has told rank 2 but not rank 1. Rank 2 leaves; rank 1 learns of the failure, not only of a departure.
    #[test]
    fn process_communicator_passes_a_failure_on_when_it_leaves() {
        let (deadline, rendezvous) = (Duration::from_secs(20), Rendezvous::in_process());
        let join = |rank: usize| {
            let member = rendezvous.join(rank, 3).expect("all join");
            let mesh = Arc::new(connect(member, deadline, MemoryUse::MessagesOnly).expect("all connect"));
            MessagePassing::new(link_of_all(mesh), deadline, MemoryUse::MessagesOnly)
        };
        let ranks = std::thread::scope(|scope| {
            let (scope, join) = (&scope, &join);
            let threads = [0, 1, 2].map(|rank| scope.spawn(move || join(rank)));
            threads.map(|thread| thread.join().expect("no panic").expect("all are here"))
        });
        let [first, second, third] = ranks;
        let error = CommError::InvalidCall { operation: Operation::Barrier, rank: 0, reason: "a test".into() };
        first.link().post(2, Record::Failed { completed: 0, error }).expect("a message");
        let is_known =
            |outcome: &Result<()>| matches!(outcome, Err(Error::Comm(CommError::InvalidCall { rank: 0, .. })));
        assert!(is_known(&third.recv(&mut [0.0f32], 0)));
        drop(third);
        let outcome = second.recv(&mut [0.0f32], 2);
        assert!(is_known(&outcome), "{outcome:?}");
    }
}
