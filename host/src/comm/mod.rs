//! Ranks and what they do together: the [`Communicator`] trait and its transports.
//!
//! [`local`] runs ranks as threads of one process; with the feature `mpi` there is `mpi`, whose ranks are the processes of an MPI job.
//! With the feature `cuda` there is `DeviceCommunicator`, the counterpart for device memory, and `nccl`, which implements it, as
//! `mpi::device` does with both features.
//! Transports never meet: each implements its trait on its own. [`groups`] divides the ranks of any of them.
//!
//! # Deadlines
//!
//! Every transport has one: how long a call waits for the other ranks before it becomes a [`CommError::Timeout`] that names those that did
//! not come. It is a [`Duration`](std::time::Duration), [`DEFAULT_DEADLINE`] unless another is given when the communicator is made, and
//! groups that are split off keep it.
//!
//! | made by | with another deadline |
//! |---|---|
//! | [`local::run`], [`local::group`] | [`local::run_with_deadline`], [`local::group_with_deadline`] |
//! | `mpi::MpiCommunicator::world`, `from_rsmpi` | `MpiCommunicator::with_deadline` |
//! | `nccl::NcclCommunicator::new` | `NcclOptions::with_deadline` |
//! | [`Rendezvous::join`](crate::bootstrap::Rendezvous::join) | [`Rendezvous::with_deadline`](crate::bootstrap::Rendezvous::with_deadline) |

#[cfg(feature = "cuda")]
mod device;
pub mod groups;
pub mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "cuda")]
pub mod nccl;
mod operands;
mod reduction;

use std::fmt;

#[cfg(feature = "cuda")]
pub use self::device::{Agreements, DeviceCommunicator, RawSlice, Scaling, SharedMemory};
pub(crate) use self::reduction::reduce_windows;
pub use crate::bootstrap::DEFAULT_DEADLINE;
use crate::error::Result;
pub use crate::error::{Call, CommError, Departure, Factor, Operation, Pass};
use crate::slice::{Slice, SliceMut};

/// How a reduction joins the ranks' values of one element.
///
/// Sums run in `f64` in rank order and are rounded once, a mean divides that sum by the world size before the rounding, so that
/// results depend neither on shards nor on timing. `Max` and `Min` give NaN if any value is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs)] // the variants are what their names say
pub enum ReduceOp {
    Sum,
    Mean,
    Max,
    Min,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
        })
    }
}

/// The collectives of a group of ranks, after MPI-4.1 chapter 6 and NCCL's API of the same names.
///
/// Every rank must make the same calls in the same order with equal counts, dtypes, reductions and roots; a transport that can
/// tell compares them and fails on every rank otherwise. Calls block until this rank's part is done and its buffers may be
/// reused. Results of reductions are bitwise identical on all ranks.
///
/// Every call can fail with [`Error::Comm`](crate::Error::Comm) when ranks disagree, leave or are late, and with
/// [`Error::LengthMismatch`](crate::Error::LengthMismatch) or [`Error::DTypeMismatch`](crate::Error::DTypeMismatch) when its
/// own operands do not fit each other.
pub trait Communicator {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world_size(&self) -> usize;

    /// Replaces every rank's data by their reduction (MPI_Allreduce in place, 6.9.6).
    fn all_reduce(&self, data: SliceMut<'_>, op: ReduceOp) -> Result<()>;

    /// Reduces the ranks' inputs and leaves shard `rank` of the result in `output`; `input` holds `world_size` shards of
    /// `output`'s length (MPI_Reduce_scatter_block, 6.10.1).
    fn reduce_scatter(&self, input: Slice<'_>, output: SliceMut<'_>, op: ReduceOp) -> Result<()>;

    /// Concatenates the ranks' inputs, in rank order, on every rank (MPI_Allgather, 6.7).
    fn all_gather(&self, input: Slice<'_>, output: SliceMut<'_>) -> Result<()>;

    /// As [`all_gather`](Self::all_gather), where each rank's shard already lies at its place in `data`; `data`'s length must
    /// be a multiple of the world size.
    fn all_gather_in_place(&self, data: SliceMut<'_>) -> Result<()>;

    /// Sends shard `p` of `input` to rank `p`, and receives rank `p`'s shard for this rank into shard `p` of `output`
    /// (MPI_Alltoall, 6.8).
    fn all_to_all(&self, input: Slice<'_>, output: SliceMut<'_>) -> Result<()>;

    /// Copies the data of rank `root` to every rank (MPI_Bcast, 6.4).
    fn broadcast(&self, data: SliceMut<'_>, root: usize) -> Result<()>;

    /// Sends to another rank, which must call [`recv`](Self::recv); returns when the data have been taken (MPI_Ssend, 3.4).
    fn send(&self, data: Slice<'_>, peer: usize) -> Result<()>;

    /// Receives from another rank (MPI_Recv, 3.2.4); count and dtype must equal the sender's.
    fn recv(&self, data: SliceMut<'_>, peer: usize) -> Result<()>;

    /// Sends to one rank and receives from another, or the same, at once: two ranks may exchange with it (MPI_Sendrecv, 3.10).
    fn send_recv(&self, send: Slice<'_>, to: usize, recv: SliceMut<'_>, from: usize) -> Result<()>;

    /// Sends bytes to and receives bytes from any number of peers at once (MPI_Isend, MPI_Irecv and MPI_Waitall, 3.7). Each transfer
    /// must meet its counterpart in a call of the peer, in order for each pair of ranks, and no transfer waits for another: ranks
    /// whose transfers all meet never deadlock, whatever the order in which peers stand in the lists.
    fn exchange(&self, sends: &[(usize, &[u8])], receives: &mut [(usize, &mut [u8])]) -> Result<()>;

    /// Returns once every rank has called it (MPI_Barrier, 6.3).
    fn barrier(&self) -> Result<()>;

    /// What ranks that may reach each other's memory can do beside; `None`, and so on every rank, for all others.
    fn address_space(&self) -> Option<&dyn AddressSpace> {
        None
    }
}

/// Ranks that can reach each other's memory, as threads of one process can, and processes of one machine where it lies in files that they
/// can map: what others have to exchange they use where it lies.
pub trait AddressSpace {
    /// Cuts every rank's vector into as many windows of one length as there are ranks, and lends window `rank` of every rank's, in rank
    /// order, to `work`, which is called once and has them to itself. Collectives of this communicator may be called in there, by every
    /// rank alike. Returns on no rank before `work` has ended on all of them, whatever has failed.
    ///
    /// Of processes, every rank's vector is the arena of a [shared](crate::GradientBuffer::new_shared) buffer, or none is. If none is, or a rank
    /// cannot map another's, as that of another machine, this is `false` on every rank: `work` has not run.
    ///
    /// # Errors
    /// Those of a collective; [`Error::LengthMismatch`](crate::Error::LengthMismatch) for a vector that has no such windows. On a rank
    /// whose `work` fails its error; on the others one that names that rank. `work` has run on every rank, or on none.
    fn lend_windows(&self, vector: SliceMut<'_>, work: &mut Work<'_>) -> Result<bool>;
}

impl fmt::Debug for dyn Communicator + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank(), self.world_size())
    }
}

/// What a rank does with the windows that it is lent.
pub type Work<'a> = dyn FnMut(Vec<SliceMut<'_>>) -> Result<()> + 'a;

/// A communicator whose ranks can form groups among themselves.
pub trait Split: Sized {
    /// Splits the group: ranks of one `color` become a group, ordered by `key`, and where keys are equal by their rank here. Without a
    /// colour a rank takes part and gets nothing. All ranks have to call it. The new group fails, and ends, on its own.
    ///
    /// # Errors
    /// Those of a collective, and those of making a communicator.
    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Self>>;
}

/// Every rank's words, in rank order. They travel as numbers, and no transport computes with what it gathers.
pub(crate) fn gather_words(comm: &dyn Communicator, words: &[u64]) -> Result<Vec<u64>> {
    let own: Vec<f64> = words.iter().copied().map(f64::from_bits).collect();
    let mut all = vec![0.0f64; own.len() * comm.world_size()];
    comm.all_gather((&own).into(), (&mut all).into())?;
    Ok(all.into_iter().map(f64::to_bits).collect())
}
