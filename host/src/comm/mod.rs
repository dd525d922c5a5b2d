//! Ranks and their collectives: the calls of MPI and NCCL, with operands that are checked, calls that are compared, and deadlines.
//!
//! | trait | contract |
//! |---|---|
//! | [`Ranks`] | the number of this rank, how many ranks there are, and exchanging a few numbers with all of them |
//! | [`Communicator<M>`] | implemented by a transport: runs one [`Collective`] on memory `M`, and exchanges messages |
//! | [`Collectives<M>`] | the named calls of every communicator: `all_reduce`, `all_gather`, `send` and so on |
//! | [`Split`] | ranks form groups (MPI_Comm_split, ncclCommSplit) |
//!
//! | transport | ranks | memory |
//! |---|---|---|
//! | [`local`] | threads of one process | [`Host`] |
//! | [`process`] (Unix; more than 1 MiB in a call on Linux alone) | processes of one machine, without MPI; small data between machines | [`Host`] |
//! | `mpi` (feature) | processes of an MPI job | [`Host`] |
//! | `mpi::device` (features `mpi` and `cuda`) | processes of an MPI job | `Cuda`, through the host's memory where MPI takes no other |
//! | `nccl` (feature `cuda`) | processes or threads, each with a GPU | `Cuda` |
//!
//! A process that a launcher has started need not name one: [`join`](crate::join()) and `Launch::join_gpu` take the transport that suits the
//! launcher.
//!
//! Each transport implements the traits itself; the two transports between processes, with and without MPI, share their handshake and
//! data movement. [`groups`](crate::groups) divides the ranks of any transport into data, tensor-parallel and pipeline groups.
//! [`docs::architecture`](crate::docs::architecture) describes the path of a call to each transport.
//!
//! # Deadlines
//!
//! Every transport has a deadline: a call that has waited this long for other ranks fails with a [`CommError::Timeout`] that names the
//! missing ranks. Over MPI, messages of more than 2 MiB have none once data move; where ranks share memory, reductions, `all_gather` and
//! `all_to_all` of host memory take no messages. The deadline is a [`Duration`](std::time::Duration): `GRADSYNC_DEADLINE` (in
//! seconds) or 10 minutes, unless another is given when the communicator is made. Groups that are split off keep it.
//!
//! | made by | with another deadline |
//! |---|---|
//! | [`local::run`], [`local::try_run`], [`local::group`] | [`local::group_with_deadline`] |
//! | [`join`](crate::join()), [`Launch::join_host`](crate::bootstrap::Launch::join_host) | [`HostCommunicator::with_deadline`] |
//! | `process::ProcessCommunicator::new` | `ProcessCommunicator::new_within`, `with_deadline` |
//! | `mpi::MpiCommunicator::world`, `from_rsmpi` | `MpiCommunicator::world_within`, `with_deadline` |
//! | `nccl::NcclCommunicator::new` | `NcclOptions::with_deadline` |
//! | [`Rendezvous::join`](crate::bootstrap::Rendezvous::join) | [`Rendezvous::with_deadline`](crate::bootstrap::Rendezvous::with_deadline) |

mod collective_call;
mod collective_methods;
pub(crate) mod join;
mod ledger;
pub mod local;
#[cfg_attr(
    not(any(unix, feature = "mpi")),
    expect(dead_code, unused_imports, reason = "no transport between processes is there")
)]
mod message_passing;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "cuda")]
pub mod nccl;
#[cfg(feature = "cuda")]
mod packet_connection;
pub mod process;
mod reduction;

use std::fmt;

pub use self::collective_call::{Collective, Operands, Scaling};
pub use self::collective_methods::Collectives;
pub use self::join::HostCommunicator;
#[cfg(any(feature = "cuda", test))]
pub(crate) use self::ledger::Agreements;
pub(crate) use self::ledger::Ledger;
#[cfg(feature = "cuda")]
pub(crate) use self::packet_connection::PacketConnection;
pub(crate) use self::reduction::reduce_windows;
pub use crate::call::ReduceOp;
pub use crate::error::{Call, CommError, Departure, Operation, Pass};
use crate::error::{Error, Result};
use crate::memory::{Host, Memory};

/// A group of ranks: this rank's number, the number of ranks, and exchanges of a few numbers between them.
pub trait Ranks {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world_size(&self) -> usize;

    /// [`world_size`](Self::world_size) by MPI's name (MPI_Comm_size, 7.4.1).
    fn size(&self) -> usize {
        self.world_size()
    }

    /// Gathers every rank's words, in rank order; all ranks pass the same number of words. The host waits for the other ranks.
    ///
    /// # Errors
    /// The errors of a collective.
    #[doc(hidden)]
    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>>;

    /// Returns once every rank has called it (MPI_Barrier, 6.3).
    ///
    /// # Errors
    /// The errors of a collective.
    fn barrier(&self) -> Result<()> {
        self.gather_words(&[]).map(drop)
    }

    /// The record of calls that the ranks compare without waiting for each other. `None`, the default, if every call is compared before
    /// data move.
    #[doc(hidden)]
    fn ledger(&self) -> Option<&dyn Ledger> {
        None
    }

    /// The failure that has ended this communicator, if any, including failures of work that ran after its call had returned. Does not
    /// wait. `None` for transports on which every failure is returned by a call.
    fn failure(&self) -> Option<Error> {
        None
    }
}

/// The contract of a transport: runs collectives on one kind of memory. [`Collectives`] has the calls by name.
///
/// Every rank must make the same calls in the same order with equal counts, dtypes, reductions, factors and roots; a transport that can
/// detect a difference fails on every rank. Results of reductions are bitwise identical on all ranks.
///
/// On host memory, calls block until this rank's part is done and its buffers may be reused. On a GPU, calls enqueue work on the queue of
/// their operands and return; over MPI the host waits while data move. There are no races: work that was enqueued earlier runs before, work that is enqueued later runs after, and
/// memory may be reused or dropped at once. A later failure, while the queue runs, is permanent: every later call returns it, and so does
/// [`synchronize`](Self::synchronize), which has to be called before results are used; otherwise the operands of a failed collective have
/// unspecified contents.
///
/// # Errors
/// Every call can fail with [`Error::Comm`] when ranks disagree, leave or are late, and with [`Error::LengthMismatch`],
/// [`Error::DTypeMismatch`] or [`Error::InvalidArgument`] when its own operands do not fit each other, which the other ranks learn as
/// [`CommError::InvalidCall`].
pub trait Communicator<M: Memory = Host>: Ranks {
    /// Runs one collective.
    ///
    /// # Errors
    /// The errors of every call.
    fn run(&self, collective: Collective<'_, M>) -> Result<()>;

    /// Runs several collectives: at once if the transport can (a group of NCCL), otherwise in order. Either all ranks have a collective in
    /// place, or none.
    ///
    /// # Errors
    /// The errors of every call.
    fn run_all(&self, collectives: Vec<Collective<'_, M>>) -> Result<()> {
        collectives.into_iter().try_for_each(|collective| self.run(collective))
    }

    /// Sends to and receives from any number of peers at once (MPI_Isend, MPI_Irecv and MPI_Waitall, 3.7; a group of ncclSend and
    /// ncclRecv). Each transfer must match its counterpart, of equal count and type, in a call of the peer, in order for each pair of
    /// ranks. No transfer waits for another: ranks whose transfers all match never deadlock, whatever the order of peers in the lists.
    /// All operands belong to one queue.
    ///
    /// # Errors
    /// The errors of every call, and [`CommError::InvalidPeer`] for this rank itself or a rank that does not exist.
    fn exchange(&self, sends: &[(usize, M::Slice<'_>)], receives: &mut [(usize, M::SliceMut<'_>)]) -> Result<()>;

    /// The windows of shared or peer memory, if all ranks can reach each other's memory; `None`, on every rank, otherwise.
    fn sharing(&self) -> Option<&M::Sharing> {
        None
    }

    /// Waits for all work in the queue, or for the failure of a collective, whichever comes first; if ranks compare their calls, also
    /// until all calls of this rank so far have been compared. Does nothing on host memory.
    ///
    /// # Errors
    /// The errors of every call.
    fn synchronize(&self, queue: &M::Queue) -> Result<()> {
        let _ = queue;
        Ok(())
    }
}

impl<M: Memory> fmt::Debug for dyn Communicator<M> + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank(), self.world_size())
    }
}

/// A communicator whose ranks can form groups among themselves.
pub trait Split: Sized {
    /// Splits the group: ranks of one `color` form a group, ordered by `key`, and by their rank here where keys are equal. A rank without
    /// a colour takes part in the call and gets `None`. All ranks have to call it. The new group fails and ends independently of this
    /// one.
    ///
    /// # Errors
    /// The errors of a collective, and the errors of making a communicator.
    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Self>>;
}

/// [`Ranks::gather_words`] of a transport for host memory, by a collective. Words are sent as `f64` bit patterns, and no transport
/// computes with the numbers that it gathers.
pub(crate) fn gather_words_by<C: Communicator + ?Sized>(comm: &C, words: &[u64]) -> Result<Vec<u64>> {
    let own: Vec<f64> = words.iter().copied().map(f64::from_bits).collect();
    let mut all = vec![0.0f64; own.len() * comm.world_size()];
    let operands = Operands::Apart { input: (&own).into(), output: (&mut all).into() };
    comm.run(Collective::AllGather { operands })?;
    Ok(all.into_iter().map(f64::to_bits).collect())
}
