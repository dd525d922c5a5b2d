//! Transfers of tensors from rank to rank: ONNX Runtime's Send and Recv, several at once, and whole schedules of them, in host memory and
//! in a GPU's.
//!
//! A transfer sends a [`Bundle`]: any number of tensors of any types, as one payload. If the receiver knows the shapes, only the payload is
//! sent. Otherwise a header precedes the payload: the receiver checks it against its [`Limits`], compares the sender's tag with its own,
//! answers, and only then allocates memory. A refusal is an error on both ranks, and the communicator stays usable.
//!
//! Sender and receiver must make the same choice. If only one of them describes the bundle, the transport refuses the two messages of
//! different types on both ranks; it also refuses known shapes of different sizes in bytes. Different shapes of the same size are not
//! detected, since known shapes are not sent.
//!
//! Only planned transfers can run in a schedule: [`run_schedule`] and [`run_stage`] ask the caller for the transfers of the plan, and for
//! no others.
//!
//! # On a GPU
//!
//! All work is in the order of one queue: packing, one group call for all payloads, unpacking. The host waits only where shapes are
//! described, for the headers and answers, and then for all work that is in the queue. As soon as a call returns, work that is ordered on
//! the queue may reuse or drop the memory of tensors.
//!
//! Lengths and types of messages are compared where the communicator compares calls, as NCCL's does by default (`NcclOptions::checks`): by
//! the next `synchronize` at the latest. NCCL alone does not detect transfers of unequal lengths; then only the deadline may end them.

mod bundle;
mod completion;
pub(crate) mod memory;
mod negotiation;
mod schedule;
mod transfer;

pub use bundle::{Bundle, Expected, Received};
pub use completion::Completion;
pub(crate) use memory::BundleMemory;
pub use schedule::{StageWork, TransferHandler, run_schedule, run_stage};

use self::transfer::Destination;
use crate::call::scope;
use crate::comm::Communicator;
#[cfg(feature = "cuda")]
use crate::driver::Queue;
use crate::error::{Operation, Result};
#[cfg(feature = "cuda")]
use crate::memory::Cuda;
use crate::memory::{Host, TensorViewMut};

pub use crate::plan::bundle::Limits;
pub use crate::plan::schedule::{Payload, PipelineStep, RankSchedule, Schedule, Stage};

/// The transfers of a communicator; on a GPU, transfers of tensors of one queue.
///
/// ```
/// use gradsync::comm::{Ranks, local};
/// use gradsync::TensorView;
/// use gradsync::ops::send_recv::{Bundle, Limits, SendRecv};
///
/// local::run(2, |comm| -> gradsync::Result<()> {
///     let transfers = SendRecv::new(&comm);
///     let (ids, scale) = ([3i64, 1, 4, 1], [0.5f32]);
///     if comm.rank() == 0 {
///         let bundle = Bundle::new([TensorView::new(&ids, [2, 2].to_vec())?, TensorView::from(&scale)])?;
///         transfers.send(1, &bundle.described(7))?;
///     } else {
///         let (_, tensors) = transfers.recv_described(0, 7, &Limits::default())?;
///         assert_eq!((tensors.tensor(0).shape(), tensors.tensor(0).as_slice()?), (&[2, 2][..], &ids[..]));
///         assert_eq!(tensors.tensor(1).as_slice::<f32>()?, scale);
///     }
///     Ok(())
/// })?;
/// # Ok::<(), gradsync::Error>(())
/// ```
pub struct SendRecv<'c, M: BundleMemory = Host> {
    comm: &'c dyn Communicator<M>,
    queue: &'c M::Queue,
}

impl<'c> SendRecv<'c> {
    /// Prepares to send and receive tensors in host memory over `comm`; sends nothing.
    pub fn new(comm: &'c dyn Communicator) -> Self {
        Self { comm, queue: &() }
    }
}

#[cfg(feature = "cuda")]
impl<'c> SendRecv<'c, Cuda> {
    /// Prepares to send and receive tensors in device memory of `queue` over `comm`, in the order of that queue; sends nothing.
    pub fn on_queue(comm: &'c dyn Communicator<Cuda>, queue: &'c Queue) -> Self {
        Self { comm, queue }
    }
}

impl<'c, M: BundleMemory> SendRecv<'c, M> {
    /// The communicator.
    pub fn comm(&self) -> &'c dyn Communicator<M> {
        self.comm
    }

    /// Sends a bundle to another rank, which must call [`recv`](Self::recv), or [`recv_described`](Self::recv_described) if the bundle is
    /// [`described`](Bundle::described). On the host the call returns once the receiver has the data. Two ranks that
    /// both send to each other first get [`CommError::Mismatch`](crate::CommError::Mismatch): use [`exchange`](Self::exchange).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the receiver refuses the described bundle, or for a bundle of another queue;
    /// [`CommError::InvalidPeer`](crate::CommError::InvalidPeer) for this rank itself, or a rank that does not exist;
    /// [`Error::OutOfMemory`], or [`Error::Cuda`] with code 2, for the copy, before anything is sent: the receiver of a described bundle is
    /// notified, and with known shapes the call can be repeated; the errors of [`Communicator::exchange`].
    ///
    /// [`Error::InvalidArgument`]: crate::Error::InvalidArgument
    /// [`Error::OutOfMemory`]: crate::Error::OutOfMemory
    /// [`Error::Cuda`]: crate::Error
    pub fn send(&self, peer: usize, bundle: &Bundle<'_, M>) -> Result<Completion<'c, M>> {
        let _scope = scope::within(Operation::Send { peer });
        self.transfer("send", &[(peer, bundle)], Vec::new())?;
        self.completion()
    }

    /// Receives tensors of known shapes from another rank.
    ///
    /// # Errors
    /// The errors of [`send`](Self::send), and [`Error::InvalidArgument`] for no tensors. The tensors are
    /// unchanged then, except that a single tensor may have been partly received.
    ///
    /// [`Error::InvalidArgument`]: crate::Error::InvalidArgument
    pub fn recv(&self, peer: usize, tensors: &mut [TensorViewMut<'_, M>]) -> Result<Completion<'c, M>> {
        let _scope = scope::within(Operation::Recv { peer });
        self.transfer("recv", &[], vec![(peer, Destination::Given(tensors))])?;
        self.completion()
    }

    /// Receives tensors of unknown shapes, identified by a tag, into new memory. The host waits for the header.
    ///
    /// # Errors
    /// The errors of [`send`](Self::send), and [`Error::InvalidArgument`] if the message is no header, after
    /// which the two ranks are out of step; if it exceeds the limits or has another tag, of which the sender is notified, as it is of
    /// missing memory ([`Error::OutOfMemory`], or `Error::Cuda` with code 2); or if the sender has no memory for the payload.
    ///
    /// [`Error::InvalidArgument`]: crate::Error::InvalidArgument
    /// [`Error::OutOfMemory`]: crate::Error::OutOfMemory
    pub fn recv_described(&self, peer: usize, tag: u64, limits: &Limits) -> Result<(Completion<'c, M>, Received<M>)> {
        let _scope = scope::within(Operation::Recv { peer });
        let expected = Expected::Described { tag, limits: *limits };
        let received = self.transfer("recv", &[], vec![(peer, Destination::New(&expected))])?.pop();
        Ok((self.completion()?, received.expect("one for each that is expected")))
    }

    /// Sends to and receives from any number of peers at once; the received tensors are in the order of `receives`.
    ///
    /// Bundles between two ranks match in order, and both ranks must pass them in one call. No transfer waits for another, so ranks that
    /// all call this cannot deadlock.
    ///
    /// # Errors
    /// The errors of [`send`](Self::send) and [`recv_described`](Self::recv_described). If a bundle is refused, all others have been
    /// transferred.
    pub fn exchange(
        &self,
        sends: &[(usize, Bundle<'_, M>)],
        receives: &[(usize, Expected)],
    ) -> Result<(Completion<'c, M>, Vec<Received<M>>)> {
        let received = self.exchange_without_completion(sends, receives)?;
        Ok((self.completion()?, received))
    }

    fn exchange_without_completion(
        &self,
        sends: &[(usize, Bundle<'_, M>)],
        receives: &[(usize, Expected)],
    ) -> Result<Vec<Received<M>>> {
        let _scope = scope::within(Operation::ExchangeBundles);
        let sends: Vec<(usize, &Bundle<'_, M>)> = sends.iter().map(|(peer, bundle)| (*peer, bundle)).collect();
        let receives = receives.iter().map(|(peer, expected)| (*peer, Destination::New(expected))).collect();
        self.transfer("exchange", &sends, receives)
    }

    fn completion(&self) -> Result<Completion<'c, M>> {
        Completion::new(self.comm, self.queue)
    }
}

impl<M: BundleMemory> Clone for SendRecv<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: BundleMemory> Copy for SendRecv<'_, M> {}

impl<M: BundleMemory> std::fmt::Debug for SendRecv<'_, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rank, world_size) = (self.comm.rank(), self.comm.world_size());
        f.debug_struct("SendRecv").field("rank", &rank).field("world_size", &world_size).finish_non_exhaustive()
    }
}
