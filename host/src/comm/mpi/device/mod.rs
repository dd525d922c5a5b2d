//! The collectives of an MPI job on device memory: [`MpiDeviceCommunicator`].
//!
//! ```no_run
//! use gradsync::comm::mpi::MpiCommunicator;
//! use gradsync::comm::mpi::device::{MpiDeviceCommunicator, MpiDeviceOptions};
//! use gradsync::comm::{Collectives, ReduceOp};
//! use gradsync::driver::{DeviceBuffer, Queue};
//! use gradsync::DType;
//!
//! let queue = Queue::new(0)?;
//! let comm = MpiDeviceCommunicator::new(MpiCommunicator::world()?, &queue, MpiDeviceOptions::default())?;
//! let mut gradients = DeviceBuffer::zeroed(&queue, DType::BF16, 1 << 20)?;
//! comm.all_reduce(gradients.as_mut_slice(), ReduceOp::Mean)?;
//! # Ok::<(), gradsync::Error>(())
//! ```
//!
//! # How data move
//!
//! Data move through pinned memory of the host, piece by piece ([`MpiPath::Staged`]): while MPI moves one piece, and the processor
//! reduces it, the next is copied from the device, on a separate stream, and the last one is copied back, on the caller's stream. 32 MiB
//! of pinned memory serve a communicator for its whole life, whatever the length of the data.
//!
//! If MPI accepts device memory, data that are only moved are sent directly ([`MpiPath::Direct`]). `MPIX_Query_cuda_support` has to
//! confirm this, because another MPI would take the addresses for addresses of the host. Reductions are always staged.
//!
//! # Numerics
//!
//! The host's transport computes all reductions, so they give the same bits as there: sums run in `f64` in rank order and are rounded
//! once. Factors are applied to the `f64`s too, `before` to every element before it is added or compared and `after` to the total, before
//! its only rounding. So a factor costs no accuracy that the dtype could represent, except for data in `f64`, where each factor is one
//! more rounding.
//!
//! # Order
//!
//! The host blocks while data move. When a call returns, memory given as input may be reused, and results follow the order of the
//! operands' queue: the last copies to the device may still be in flight there.
//!
//! # Failures
//!
//! As [for host memory](super). In addition, a rank whose device fails half-way continues to exchange messages, since the other ranks
//! wait for them, and reports the failure at the end, which is [`CommError::Transport`](crate::CommError::Transport) on every rank. In a
//! transfer between two ranks, the sender's failure reaches the receiver at once, and the receiver's failure reaches the sender in its
//! next call.

mod aware;
mod collectives;
mod connect;
mod staged;
mod staged_pipeline;

use std::cell::RefCell;

pub use self::connect::connect;
use self::staged::Slots;
use super::MpiCommunicator;
use crate::call::{scope, setters};
use crate::comm::collective_call::one_queue;
use crate::comm::message_passing::{Half, Incoming, Outgoing, Scratch, SetUp, exchange};
use crate::comm::{Collective, Communicator, Ranks, Split};
use crate::driver::{CudaError, DeviceSlice, DeviceSliceMut, Pinned, Queue};
use crate::error::{Call, Error, Operation, Result};
use crate::memory::Cuda;

const OPERATION: &str = "mpi device communicator";
/// The bytes of a block, which holds a step of a collective or a piece of a transfer.
const BLOCK_BYTES: usize = 4 << 20;
const BLOCKS: usize = 8;

/// The path of data from a device to MPI, and back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MpiPath {
    /// [`Direct`](Self::Direct) if every rank's MPI accepts device memory, otherwise [`Staged`](Self::Staged).
    #[default]
    Auto,
    /// Through pinned memory of the host.
    Staged,
    /// MPI accesses device memory directly, except for reductions.
    Direct,
}

/// Choices of an MPI communicator for device memory; equal on all ranks.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct MpiDeviceOptions {
    /// The path of data; [`MpiPath::Auto`] by default.
    pub path: MpiPath,
}

impl MpiDeviceOptions {
    setters! { with_path(path: MpiPath) }
}

/// One rank of an MPI job, with a GPU. Ranks may share one. It may move to another thread, but only one thread at a time can use it.
///
/// Runs the calls of [`Communicator`] on slices of any queue of its device; the [module](self) says how they work.
#[derive(Debug)]
pub struct MpiDeviceCommunicator {
    comm: MpiCommunicator,
    /// The queue that it was made with.
    queue: Queue,
    /// The queue that copies data from the device.
    down: Queue,
    pinned: Pinned,
    /// Scratch memory for the other ranks' parts of a step.
    room: RefCell<Scratch>,
    options: MpiDeviceOptions,
    is_direct: bool,
}

impl MpiDeviceCommunicator {
    /// Makes a communicator for `queue`'s device from `comm`, which it then uses exclusively; all ranks have to call it.
    ///
    /// # Errors
    /// [`Error::Cuda`] where memory or a stream cannot be had, which is
    /// [`CommError::InvalidCall`](crate::CommError::InvalidCall) on the other ranks;
    /// [`Error::InvalidArgument`], on every rank, for paths that differ, and for [`MpiPath::Direct`] where some rank's MPI does not take
    /// device memory; errors of a collective.
    pub fn new(comm: MpiCommunicator, queue: &Queue, options: MpiDeviceOptions) -> Result<Self> {
        let prepare =
            || -> Result<_, CudaError> { Ok((Queue::new(queue.ordinal())?, Pinned::new(queue, BLOCKS, BLOCK_BYTES)?)) };
        let (down, pinned) =
            prepare().map_err(|error| comm.ranks.handshake().refuse(Operation::SetUp, error.into()))?;
        let all = comm.ranks.gather(SetUp::Device.call(), &[options.path as u64, aware::ask().word()])?;
        let (paths, answers) = (all.iter().step_by(2), all.iter().skip(1).step_by(2));
        let refuse = |reason| Err(Error::InvalidArgument { operation: OPERATION, reason });
        if let Some((rank, other)) = paths.enumerate().find(|(_, path)| **path != all[0]) {
            let known = [MpiPath::Auto, MpiPath::Staged, MpiPath::Direct];
            let [first, other] = [all[0], *other].map(|word| known.into_iter().find(|path| *path as u64 == word));
            return refuse(match (first, other) {
                (Some(first), Some(other)) => format!("rank 0 has the path {first:?}, rank {rank} has {other:?}"),
                _ => format!("ranks 0 and {rank} have paths that this version does not know"),
            });
        }
        let unaware = answers.enumerate().find(|(_, answer)| **answer != aware::Answer::Yes.word());
        if let (MpiPath::Direct, Some((rank, answer))) = (options.path, unaware) {
            let answer = aware::Answer::from_word(*answer);
            return refuse(format!(
                "the direct path needs an MPI that takes device memory, and rank {rank}'s {answer}"
            ));
        }
        let is_direct = options.path != MpiPath::Staged && unaware.is_none();
        tracing::debug!(rank = comm.rank(), is_direct, "made a communicator for device memory over MPI");
        let room = RefCell::new(Scratch::new(BLOCK_BYTES));
        Ok(Self { comm, queue: queue.clone(), down, pinned, room, options, is_direct })
    }

    /// Whether MPI accesses device memory directly.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Ends all processes of the job, as [`MpiCommunicator::abort`].
    pub fn abort(&self, code: i32) -> ! {
        self.comm.abort(code)
    }

    /// Prepares `queue` for an operation: work that is in it now runs before data are fetched.
    fn admit(&self, queue: &Queue, operation: Operation) -> Result<()> {
        self.comm.ranks.handshake().check(operation)?;
        if queue.ordinal() != self.queue.ordinal() {
            let (memory, own) = (queue.ordinal(), self.queue.ordinal());
            let reason = format!("the operands are on device {memory}, this rank's communicator on device {own}");
            return Err(self.refuse(operation, Error::InvalidArgument { operation: OPERATION, reason }));
        }
        let _held = queue.hold();
        if queue.is_capturing().map_err(|error| self.broken(operation, &error))? {
            let reason = "MPI moves data while the host waits, which a queue cannot record".into();
            return Err(self.refuse(operation, Error::InvalidArgument { operation: OPERATION, reason }));
        }
        self.down.wait_for_all_of(queue).map_err(|error| self.broken(operation, &error))
    }

    /// Like [`admit`](Self::admit), for the direct path: copies the data that stay on this rank, and waits for the queue.
    ///
    /// # Safety
    /// As [`copy`], for `own`'s source and destination.
    unsafe fn admit_direct(
        &self,
        queue: &Queue,
        operation: Operation,
        own: Option<(DeviceSlice<'_>, DeviceSlice<'_>)>,
    ) -> Result<()> {
        self.admit(queue, operation)?;
        // SAFETY: the caller's promise.
        let copied = own.map_or(Ok(()), |(from, to)| unsafe { copy(from, to) });
        copied.map_err(|error| self.broken(operation, &error))?;
        let ready = queue.synchronize().and_then(|()| queue.make_current());
        ready.map_err(|error| self.broken(operation, &error))
    }

    /// Fails the group because of a failure of the device before an operation.
    fn broken(&self, operation: Operation, error: &dyn std::error::Error) -> Error {
        let failure = self.comm.ranks.handshake().broken(operation, error);
        self.comm.ranks.handshake().fail(operation, failure)
    }

    fn refuse(&self, operation: Operation, error: Error) -> Error {
        self.comm.ranks.handshake().refuse(operation, error)
    }

    /// Returns an error of this rank's own call, after reporting it to the other ranks.
    fn refused<T>(&self, operation: Operation, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| self.refuse(operation, error))
    }
}

/// Converts an address to a pointer for MPI.
fn pointer(address: u64) -> *mut u8 {
    address as usize as *mut u8
}

/// Enqueues a copy on the queue of both operands, unless they are the same memory.
///
/// # Safety
/// The caller has `to` borrowed mutably, and the two are the same memory or disjoint.
unsafe fn copy(from: DeviceSlice<'_>, to: DeviceSlice<'_>) -> Result<()> {
    if from.address() == to.address() {
        return Ok(());
    }
    // SAFETY: the caller's promise; the copy is in the queue's order.
    let mut to = unsafe { DeviceSliceMut::from_raw_parts(to.queue(), to.address(), to.dtype(), to.len()) };
    to.copy_from_device(from)
}

impl Split for MpiDeviceCommunicator {
    /// Makes a group with the queue and the options of this communicator. Keep groups: making one takes several rounds, and pinned
    /// memory.
    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Self>> {
        let _scope = scope::within(Operation::Split);
        let comm = self.comm.split(color, key)?;
        comm.map(|comm| Self::new(comm, &self.queue, self.options)).transpose()
    }
}

impl Ranks for MpiDeviceCommunicator {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>> {
        let _scope = scope::within(Operation::GatherWords);
        self.comm.ranks.gather(Call::of(Operation::Exchange, words.len(), None), words)
    }
}

// In all unsafe blocks below, operands are borrowed, later work on them is ordered after the operation, and lengths and queues were
// checked before.
impl Communicator<Cuda> for MpiDeviceCommunicator {
    fn run(&self, collective: Collective<'_, Cuda>) -> Result<()> {
        let (rank, world_size) = (self.rank(), self.world_size());
        self.refused(collective.operation(), collective.check(rank, world_size))?;
        self.run_checked(collective)
    }

    fn exchange(&self, sends: &[(usize, DeviceSlice<'_>)], receives: &mut [(usize, DeviceSliceMut<'_>)]) -> Result<()> {
        let Some(queue) = one_queue(sends, receives)? else { return Ok(()) };
        let receives: Vec<_> = receives.iter().map(|(peer, data)| (*peer, data.as_slice())).collect();
        let calls = |list: &[(usize, DeviceSlice<'_>)], operation: fn(usize) -> Operation| -> Result<Vec<Call>> {
            let call = |&(peer, data): &(usize, DeviceSlice<'_>)| {
                self.comm.ranks.check_peer(operation(peer), peer)?;
                Ok(Call::new(operation(peer), data.len(), data.dtype()))
            };
            list.iter().map(call).collect()
        };
        let sent = calls(sends, |peer| Operation::Send { peer })?;
        let received = calls(&receives, |peer| Operation::Recv { peer })?;
        let Some(operation) = sent.iter().chain(&received).map(|call| call.operation).next() else { return Ok(()) };
        let sends = sends.iter().zip(sent).map(|(&(peer, data), call)| (peer, data, call));
        let receives = receives.iter().zip(received).map(|(&(peer, data), call)| (peer, data, call));
        if self.is_direct {
            // SAFETY: nothing is copied.
            unsafe { self.admit_direct(queue, operation, None) }?;
            let sends = sends.map(|(peer, data, call)| {
                let outgoing = Outgoing { peer, start: pointer(data.address()), bytes: data.size_bytes() };
                // SAFETY: borrowed; the exchange returns when MPI is done with it.
                unsafe { Half::outgoing(self.comm.ranks.link(), call, outgoing, false) }
            });
            let receives = receives.map(|(peer, data, call)| {
                let incoming = Incoming { peer, start: pointer(data.address()), bytes: data.size_bytes() };
                // SAFETY: as above.
                unsafe { Half::incoming(self.comm.ranks.link(), call, incoming, false) }
            });
            return exchange(self.comm.ranks.handshake(), sends.collect(), receives.collect());
        }
        self.admit(queue, operation)?;
        let slots = Slots::new(&self.pinned, &self.down, queue);
        let sends = sends.map(|(peer, data, call)| {
            // SAFETY: borrowed; all data have been fetched when the exchange returns.
            let end = unsafe { slots.outgoing(data.address(), data.size_bytes()) };
            Half::new(peer, call, data.size_bytes(), end)
        });
        let receives = receives.map(|(peer, data, call)| {
            // SAFETY: borrowed; the copies to the device are in the queue's order.
            let end = unsafe { slots.incoming(data.address(), data.size_bytes()) };
            Half::new(peer, call, data.size_bytes(), end)
        });
        exchange(self.comm.ranks.handshake(), sends.collect(), receives.collect())
    }

    fn synchronize(&self, queue: &Queue) -> Result<()> {
        self.comm.ranks.listen(Operation::Exchange)?;
        Ok(queue.synchronize()?)
    }
}
