//! One line to join: the communicator of a process that a launcher has started, by the transport that suits the launcher and the memory.

use std::time::Duration;

use super::local::{self, LocalCommunicator};
#[cfg(feature = "mpi")]
use super::mpi::MpiCommunicator;
#[cfg(feature = "cuda")]
use super::nccl::{NcclCommunicator, NcclOptions};
use super::process::ProcessCommunicator;
use super::{Collective, Communicator, Ranks, Split};
use crate::bootstrap::Launch;
#[cfg(feature = "cuda")]
use crate::bootstrap::{Member, Rendezvous};
#[cfg(feature = "cuda")]
use crate::call::scope;
#[cfg(feature = "cuda")]
use crate::driver::{CudaError, Device, Queue};
#[cfg(feature = "mpi")]
use crate::error::MpiError;
use crate::error::Result;
#[cfg(feature = "cuda")]
use crate::error::{CommError, Operation};
use crate::memory::SharedWindows;
use crate::slice::{Slice, SliceMut};

/// Joins the other ranks that the launcher of this process has started, for data in host memory: [`Launch::join_host`] of the environment.
///
/// # Errors
/// As [`Launch::from_env`] and [`Launch::join_host`]. Without a launcher it is
/// [`BootstrapError::NoLauncher`](crate::error::BootstrapError::NoLauncher), since an unknown launcher would otherwise start a job for each
/// rank; [`join_or_alone`] takes such a process for the only rank.
pub fn join() -> Result<HostCommunicator> {
    Launch::from_env()?.join_host()
}

/// Like [`join`], but a process that no launcher has started is the only rank of its group, so that `cargo run` runs a program.
///
/// ```
/// use gradsync::prelude::*;
///
/// let comm = gradsync::join_or_alone()?; // four ranks by `gradsync launch -n 4 -- PROGRAM`, one by `PROGRAM`
/// let mut gradients = vec![comm.rank() as f32; 1000];
/// comm.all_reduce(&mut gradients, ReduceOp::Mean)?;
/// # Ok::<(), Error>(())
/// ```
///
/// On GPUs: `Launch::from_env_or_alone()?.join_gpu(&NcclOptions::default())?`.
///
/// # Errors
/// As [`Launch::from_env_or_alone`] and [`Launch::join_host`]. Where no launcher has set both a rank and a world size, any variable of a
/// launcher is an error, and never one rank.
pub fn join_or_alone() -> Result<HostCommunicator> {
    Launch::from_env_or_alone()?.join_host()
}

/// How the ranks of a launch find each other, and move host memory.
enum Transport {
    /// There is one rank, and nothing says where it would listen.
    Alone,
    Processes,
    #[cfg(feature = "mpi")]
    Mpi,
}

impl Transport {
    fn of(launch: &Launch) -> Self {
        #[cfg(feature = "mpi")]
        if launch.is_mpi_job() {
            return Self::Mpi;
        }
        if launch.world_size == 1 && launch.master.is_none() { Self::Alone } else { Self::Processes }
    }
}

impl Launch {
    /// Joins the other ranks of this launch, for data in host memory.
    ///
    /// | launch | transport |
    /// |---|---|
    /// | by a launcher of MPI, or by a scheduler (Slurm, Flux, PMIx, jsrun) without `MASTER_ADDR`, with the feature `mpi` | `comm::mpi` |
    /// | of one rank without `MASTER_ADDR` | none |
    /// | every other | [`comm::process`](super::process), at the [rendezvous](crate::bootstrap::Rendezvous::from_env) of the variables |
    ///
    /// Deadlines are `GRADSYNC_JOIN_DEADLINE` and `GRADSYNC_DEADLINE`, or 10 minutes;
    /// [`HostCommunicator::with_deadline`] sets another one for calls.
    ///
    /// # Errors
    /// The errors of [`Launch::join`] and of making the communicator; `MpiError::OtherRanks` if MPI and the
    /// launcher count ranks differently; [`Error::UnsupportedSystem`](crate::Error::UnsupportedSystem) for several ranks where
    /// [`comm::process`](super::process) has no transport.
    pub fn join_host(&self) -> Result<HostCommunicator> {
        let ranks = match Transport::of(self) {
            Transport::Alone => HostRanks::Alone(local::group(1)?.pop().expect("one rank")),
            Transport::Processes => HostRanks::Processes(ProcessCommunicator::new(self.join()?)?),
            #[cfg(feature = "mpi")]
            Transport::Mpi => HostRanks::Mpi(self.join_mpi()?),
        };
        Ok(HostCommunicator { ranks })
    }

    /// Joins the other ranks of this launch, for data in the memory of this rank's GPU, by NCCL: [`device`](Self::device).
    /// Returns the communicator and a queue of the GPU. The control channel is found as in [`join_host`](Self::join_host).
    ///
    /// Where a machine has more ranks than GPUs, ranks take the GPUs in turn, with
    /// [`NcclOptions::shared_gpu`] and [its requirements](super::nccl#many-ranks-on-one-gpu).
    ///
    /// # Errors
    /// The errors of [`join_host`](Self::join_host) and of [`NcclCommunicator::new`]; [`Error::Cuda`](crate::Error::Cuda) if this rank has no
    /// driver or no such GPU, which is [`CommError::Transport`] on the other ranks.
    #[cfg(feature = "cuda")]
    pub fn join_gpu(&self, options: &NcclOptions) -> Result<(NcclCommunicator, Queue)> {
        let member = match Transport::of(self) {
            Transport::Alone => Rendezvous::in_process().join(0, 1)?,
            Transport::Processes => self.join()?,
            #[cfg(feature = "mpi")]
            Transport::Mpi => self.join_mpi()?.member(options.deadline)?,
        };
        let (queue, is_shared) = self.queue().map_err(|error| lacks_gpu(&member, error))?;
        // Ranks need equal options, and machines may have other numbers of GPUs.
        let is_shared = on_any_rank(&member, is_shared, options.deadline)?;
        let options = options.clone().with_shared_gpu(options.shared_gpu || is_shared);
        Ok((NcclCommunicator::new(member, &queue, &options)?, queue))
    }

    /// Creates a queue of this rank's GPU. Also returns whether there are fewer GPUs than ranks on this machine.
    #[cfg(feature = "cuda")]
    fn queue(&self) -> Result<(Queue, bool), CudaError> {
        let (gpus, ranks) = (Device::count()?, self.local_world_size.unwrap_or(self.world_size));
        let is_shared = ranks > gpus as usize;
        // Without a GPU, the driver's error for the ordinal says so.
        let gpu = if is_shared { self.device().checked_rem(gpus).unwrap_or(0) } else { self.device() };
        Ok((Queue::new(gpu)?, is_shared))
    }

    /// Joins the ranks of the MPI job.
    #[cfg(feature = "mpi")]
    fn join_mpi(&self) -> Result<MpiCommunicator> {
        let world = MpiCommunicator::world()?;
        let (launched, found) = ((self.rank, self.world_size), (world.rank(), world.world_size()));
        if launched != found {
            return Err(MpiError::OtherRanks { launched, found }.into());
        }
        Ok(world)
    }
}

/// Whether something holds on any rank. All ranks have to call it.
#[cfg(feature = "cuda")]
fn on_any_rank(member: &Member, is_here: bool, deadline: Duration) -> Result<bool, CommError> {
    let _scope = scope::within(Operation::SetUp);
    let all = member.all_gather(&[u8::from(is_here)], deadline)?;
    Ok(all.concat().contains(&1))
}

/// Tells the other ranks that this one has no GPU; they would wait for it.
#[cfg(feature = "cuda")]
fn lacks_gpu(member: &Member, error: CudaError) -> CudaError {
    member.fail(CommError::Transport { operation: Operation::SetUp, rank: member.rank(), reason: error.to_string() });
    error
}

/// One rank of a launch, for data in host memory: a process by itself, among processes, or of an MPI job. It may move to another thread, but
/// only one thread at a time can use it.
#[derive(Debug)]
pub struct HostCommunicator {
    ranks: HostRanks,
}

#[allow(clippy::large_enum_variant, reason = "a process has few communicators")]
#[derive(Debug)]
enum HostRanks {
    Alone(LocalCommunicator),
    Processes(ProcessCommunicator),
    #[cfg(feature = "mpi")]
    Mpi(MpiCommunicator),
}

impl HostCommunicator {
    /// Sets the deadline of every call; equal on all ranks, or the shortest takes effect. Groups that are split off keep it.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Self {
        let ranks = match self.ranks {
            HostRanks::Alone(ranks) => HostRanks::Alone(ranks), // waits for nobody
            HostRanks::Processes(ranks) => HostRanks::Processes(ranks.with_deadline(deadline)),
            #[cfg(feature = "mpi")]
            HostRanks::Mpi(ranks) => HostRanks::Mpi(ranks.with_deadline(deadline)),
        };
        Self { ranks }
    }

    fn transport(&self) -> &dyn Communicator {
        match &self.ranks {
            HostRanks::Alone(ranks) => ranks,
            HostRanks::Processes(ranks) => ranks,
            #[cfg(feature = "mpi")]
            HostRanks::Mpi(ranks) => ranks,
        }
    }
}

impl Ranks for HostCommunicator {
    fn rank(&self) -> usize {
        self.transport().rank()
    }

    fn world_size(&self) -> usize {
        self.transport().world_size()
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>> {
        self.transport().gather_words(words)
    }

    fn barrier(&self) -> Result<()> {
        self.transport().barrier()
    }
}

impl Communicator for HostCommunicator {
    fn run(&self, collective: Collective<'_>) -> Result<()> {
        self.transport().run(collective)
    }

    fn exchange(&self, sends: &[(usize, Slice<'_>)], receives: &mut [(usize, SliceMut<'_>)]) -> Result<()> {
        self.transport().exchange(sends, receives)
    }

    fn sharing(&self) -> Option<&(dyn SharedWindows + 'static)> {
        self.transport().sharing()
    }
}

impl Split for HostCommunicator {
    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Self>> {
        let ranks = match &self.ranks {
            HostRanks::Alone(ranks) => ranks.split(color, key)?.map(HostRanks::Alone),
            HostRanks::Processes(ranks) => ranks.split(color, key)?.map(HostRanks::Processes),
            #[cfg(feature = "mpi")]
            HostRanks::Mpi(ranks) => ranks.split(color, key)?.map(HostRanks::Mpi),
        };
        Ok(ranks.map(|ranks| Self { ranks }))
    }
}
