//! Transfers of tensors from rank to rank: ONNX Runtime's Send and Recv, several at once, and whole schedules of them, in host memory and
//! in a GPU's.
//!
//! A transfer sends a [`Bundle`]: any number of tensors of any types, as one payload. If the receiver knows the shapes, only the payload is
//! sent. Otherwise a header precedes the payload: the receiver checks it against its [`Limits`], compares the sender's tag with its own,
//! answers, and only then allocates memory. A refusal is an error on both ranks, and the communicator stays usable.
//!
//! Sender and receiver must make the same choice. If only one of them describes the bundle, the transport refuses the two messages of
//! unequal lengths on both ranks; it also does so if known shapes have different sizes in bytes. Different shapes of the same size are not
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
//! Lengths of payloads are compared where the communicator compares calls, as NCCL's does by default (`NcclOptions::checks`): by the next
//! `synchronize` at the latest. NCCL alone does not detect transfers of unequal lengths; then only the deadline may end them.

mod bundle;
mod completion;
mod memory;
mod negotiation;
mod schedule;
mod tensor;

pub use bundle::{Bundle, Expected, Received, Shapes};
pub use completion::Completion;
pub use memory::BundleMemory;
pub use schedule::{StageWork, TransferHandler, run_schedule, run_stage};
pub use tensor::{WireTensor, WireTensorMut};

use self::bundle::{layout, no_tensors};
use self::negotiation::{HEAD_BYTES, Offer, PART_BYTES, Want, check_call, first_error, negotiate, withdrawal};
use crate::call::scope;
use crate::comm::Communicator;
#[cfg(feature = "cuda")]
use crate::driver::Queue;
use crate::error::{Operation, Result};
#[cfg(feature = "cuda")]
use crate::memory::Cuda;
use crate::memory::Host;
use crate::nvtx::{Phase, range, ranges};
use crate::plan::bundle::{Limits, encode};

/// The transfers of a communicator; on a GPU, transfers of tensors of one queue.
///
/// ```
/// use gradsync::comm::{Ranks, local};
/// use gradsync::ops::send_recv::{Bundle, SendRecv, WireTensor};
/// use gradsync::plan::bundle::Limits;
///
/// local::run(2, |comm| -> gradsync::Result<()> {
///     let transfers = SendRecv::new(&comm);
///     let (ids, scale) = ([3i64, 1, 4, 1], [0.5f32]);
///     if comm.rank() == 0 {
///         let bundle = Bundle::new([WireTensor::of(&ids, [2, 2].to_vec())?, WireTensor::from(&scale[..])])?;
///         transfers.send(1, &bundle.described(7))?;
///     } else {
///         let (_, tensors) = transfers.recv_described(0, 7, &Limits::default())?;
///         assert_eq!((tensors.tensor(0).shape(), tensors.tensor(0).typed()), (&[2, 2][..], Some(&ids[..])));
///         assert_eq!(tensors.tensor(1).typed(), Some(&scale[..]));
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
        send(self, true, peer, bundle)
    }

    /// Receives tensors of known shapes from another rank.
    ///
    /// # Errors
    /// The errors of [`send`](Self::send), and [`Error::InvalidArgument`](crate::Error::InvalidArgument) for no tensors. The tensors are
    /// unchanged then, except that a single tensor may have been partly received.
    pub fn recv(&self, peer: usize, tensors: &mut [WireTensorMut<'_, M>]) -> Result<Completion<'c, M>> {
        recv(self, true, peer, tensors)
    }

    /// Receives tensors of unknown shapes, identified by a tag, into new memory. The host waits for the header.
    ///
    /// # Errors
    /// The errors of [`recv_described`], except those of the signal.
    pub fn recv_described(&self, peer: usize, tag: u64, limits: &Limits) -> Result<(Completion<'c, M>, Received<M>)> {
        recv_described(self, true, peer, tag, limits)
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
        for (peer, _) in sends {
            self.check("exchange", Operation::Send { peer: *peer }, true, *peer)?;
        }
        for &(peer, _) in receives {
            self.check("exchange", Operation::Recv { peer }, true, peer)?;
        }
        let sends: Vec<(usize, &Bundle<'_, M>)> = sends.iter().map(|(peer, bundle)| (*peer, bundle)).collect();
        let receives = receives.iter().map(|(peer, expected)| (*peer, Place::New(expected))).collect();
        self.transfer("exchange", &sends, receives)
    }

    fn check(&self, name: &'static str, operation: Operation, signal: bool, peer: usize) -> Result<()> {
        check_call(name, operation, signal, peer, (self.comm.rank(), self.comm.world_size()))
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

/// ONNX Runtime's Send: [`SendRecv::send`] with an input signal, which must be true. The output signal is the completion's.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the input signal is false; the errors of that method.
pub fn send<'c, M: BundleMemory>(
    transfers: &SendRecv<'c, M>,
    signal: bool,
    peer: usize,
    bundle: &Bundle<'_, M>,
) -> Result<Completion<'c, M>> {
    let operation = Operation::Send { peer };
    let _scope = scope::within(operation);
    transfers.check("send", operation, signal, peer)?;
    transfers.transfer("send", &[(peer, bundle)], Vec::new())?;
    transfers.completion()
}

/// ONNX Runtime's Recv: [`SendRecv::recv`] with an input signal, which must be true. The output signal is the completion's.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the input signal is false; the errors of that method.
pub fn recv<'c, M: BundleMemory>(
    transfers: &SendRecv<'c, M>,
    signal: bool,
    peer: usize,
    tensors: &mut [WireTensorMut<'_, M>],
) -> Result<Completion<'c, M>> {
    let operation = Operation::Recv { peer };
    let _scope = scope::within(operation);
    transfers.check("recv", operation, signal, peer)?;
    transfers.transfer("recv", &[], vec![(peer, Place::Given(tensors))])?;
    transfers.completion()
}

/// ONNX Runtime's Recv of tensors of unknown shapes: [`SendRecv::recv_described`] with an input signal, which must be true.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the input signal is false; if the message is no header, after which the two
/// ranks are out of step; if it exceeds the limits or has another tag, of which the sender is notified, as it is of missing memory
/// ([`Error::OutOfMemory`](crate::Error::OutOfMemory), or `Error::Cuda` with code 2); if the sender has no memory for the payload; the
/// errors of [`SendRecv::send`].
pub fn recv_described<'c, M: BundleMemory>(
    transfers: &SendRecv<'c, M>,
    signal: bool,
    peer: usize,
    tag: u64,
    limits: &Limits,
) -> Result<(Completion<'c, M>, Received<M>)> {
    let operation = Operation::Recv { peer };
    let _scope = scope::within(operation);
    transfers.check("recv", operation, signal, peer)?;
    let expected = Expected::Described { tag, limits: *limits };
    let received = transfers.transfer("recv", &[], vec![(peer, Place::New(&expected))])?.pop();
    Ok((transfers.completion()?, received.expect("one for each that is expected")))
}

/// The destination of a received bundle.
enum Place<'p, 't, M: BundleMemory> {
    Given(&'p mut [WireTensorMut<'t, M>]),
    New(&'p Expected),
}

/// The destination of a received bundle, with memory for its payload.
enum Landing<'p, 't, M: BundleMemory> {
    /// The tensors' own memory, which has the layout of the payload.
    There(M::WireMut<'p>),
    /// A payload, and the tensors to which it is copied.
    Aside(Received<M>, Vec<&'p mut M::WireMut<'t>>),
    New(Received<M>),
}

/// The packed payload of each send, or the reason why it is not sent; and the memory of each receive.
type Prepared<'p, 't, M> =
    (Vec<Result<Option<<M as BundleMemory>::Payload>>>, Vec<(usize, Result<Landing<'p, 't, M>>)>);

impl<M: BundleMemory> SendRecv<'_, M> {
    /// Transfers all bundles at once: negotiates where necessary, then moves every payload in one call. Returns the bundles that were
    /// received into new memory.
    fn transfer<'p, 't>(
        &self,
        name: &'static str,
        sends: &[(usize, &Bundle<'_, M>)],
        receives: Vec<(usize, Place<'p, 't, M>)>,
    ) -> Result<Vec<Received<M>>> {
        let (to, from): (Vec<usize>, Vec<usize>) =
            (sends.iter().map(|(peer, _)| *peer).collect(), receives.iter().map(|(peer, _)| *peer).collect());
        for (_, bundle) in sends {
            M::check_queue(name, self.queue, bundle.queue())?;
        }
        // Packing comes before the negotiation: it can fail, for example for lack of memory. The negotiation tells the receiver of a described
        // bundle; a bundle of known shapes is not negotiated, and its error ends the call before any payload moves.
        let packed = sends.iter().map(|(peer, bundle)| {
            let _range = range(Phase::SendMemcpy, *peer);
            match bundle.shapes {
                Shapes::Known => bundle.packed().map(Ok),
                Shapes::Described { .. } => Ok(bundle.packed()),
            }
        });
        let packed = packed.collect::<Result<_>>()?;
        let (accepted, landings) = {
            let _sends = ranges(Phase::PreSend, to.iter().copied());
            let _receives = ranges(Phase::PreRecv, from.iter().copied());
            self.prepare(sends, packed, receives)?
        };
        // Packed payloads live until the exchange has read them; on a GPU the next owner of their memory is ordered behind it.
        let mut payloads = Vec::with_capacity(sends.len());
        let mut refused = Vec::new();
        for ((peer, bundle), accepted) in sends.iter().zip(accepted) {
            match accepted {
                Ok(packed) => payloads.push((*peer, bundle, packed)),
                Err(error) => refused.push(error),
            }
        }
        let mut landed = Vec::with_capacity(landings.len());
        for (peer, landing) in landings {
            match landing {
                Ok(landing) => landed.push((peer, landing)),
                Err(error) => refused.push(error),
            }
        }
        {
            let mut outgoing = Vec::new();
            for (peer, bundle, packed) in &payloads {
                push_parts::<M>(&mut outgoing, *peer, bundle.payload(packed));
            }
            let mut incoming = Vec::new();
            for (peer, landing) in &mut landed {
                let payload = match landing {
                    Landing::There(bytes) => M::reborrow_wire(bytes),
                    Landing::Aside(received, _) | Landing::New(received) => received.payload_mut(),
                };
                push_parts_mut::<M>(&mut incoming, *peer, payload);
            }
            let _sends = ranges(Phase::Send, to.iter().copied());
            let _receives = ranges(Phase::Recv, from.iter().copied());
            if !(outgoing.is_empty() && incoming.is_empty()) {
                self.comm.exchange(&outgoing, &mut incoming)?;
            }
        }
        let mut received = Vec::new();
        for (peer, landing) in landed {
            let _range = range(Phase::RecvMemcpy, peer);
            match landing {
                Landing::There(_) => {}
                Landing::Aside(aside, tensors) => aside.unpack(tensors)?,
                Landing::New(new) => received.push(new),
            }
        }
        let _sends = ranges(Phase::PostSend, to.into_iter());
        let _receives = ranges(Phase::PostRecv, from.into_iter());
        drop(payloads);
        first_error(refused)?;
        Ok(received)
    }

    /// Negotiates with the receivers of bundles whose packing succeeded, and allocates memory for each bundle to receive.
    fn prepare<'p, 't>(
        &self,
        sends: &[(usize, &Bundle<'_, M>)],
        packed: Vec<Result<Option<M::Payload>>>,
        receives: Vec<(usize, Place<'p, 't, M>)>,
    ) -> Result<Prepared<'p, 't, M>> {
        let (mut offers, mut wants) = (Vec::new(), Vec::new());
        for ((peer, bundle), packed) in sends.iter().zip(&packed) {
            if let Shapes::Described { tag } = bundle.shapes {
                let described = |_: &Option<M::Payload>| encode(bundle.specs(), tag);
                let header = packed.as_ref().map_or_else(|error| Ok(withdrawal(error)), described)?;
                offers.push(Offer { peer: *peer, header });
            }
        }
        for (peer, place) in &receives {
            if let Place::New(Expected::Described { tag, limits }) = place {
                wants.push(Want { peer: *peer, tag: *tag, limits: *limits });
            }
        }
        // Receives without negotiation come first: an error in this rank's own arguments must not leave peers in the middle of a
        // negotiation.
        let mut landings = Vec::with_capacity(receives.len());
        for (peer, place) in receives {
            let landing = match place {
                Place::New(Expected::Described { .. }) => None,
                Place::New(Expected::Known(specs)) => {
                    let layout = layout("recv", specs)?;
                    Some(Landing::New(Received::reserve("recv", self.queue, specs.clone(), layout)?))
                }
                Place::Given(tensors) => Some(self.land(tensors)?),
            };
            landings.push((peer, landing));
        }
        let messages = M::messages(self.comm, self.queue);
        let outcome = negotiate(&*messages, &offers, &wants, |header| {
            Received::reserve("recv", self.queue, header.tensors, header.layout)
        })?;
        let mut answers = outcome.offers.into_iter();
        let mut described = outcome.wants.into_iter();
        let accepted = sends.iter().zip(packed).map(|((_, bundle), packed)| match bundle.shapes {
            Shapes::Known => packed,
            Shapes::Described { .. } => {
                let answer = answers.next().expect("one for each offer");
                packed.and_then(|packed| answer.map(|()| packed))
            }
        });
        let landings = landings.into_iter().map(|(peer, landing)| {
            let landing =
                landing.map_or_else(|| described.next().expect("one for each want").map(Landing::New), Result::Ok);
            (peer, landing)
        });
        Ok((accepted.collect(), landings.collect()))
    }

    /// Memory for the payload of given tensors: their own, if they have its layout.
    fn land<'p, 't>(&self, tensors: &'p mut [WireTensorMut<'t, M>]) -> Result<Landing<'p, 't, M>> {
        if tensors.is_empty() {
            return Err(no_tensors("recv"));
        }
        let specs: Vec<_> = tensors.iter().map(WireTensorMut::spec).collect();
        for tensor in &*tensors {
            M::check_queue("recv", self.queue, M::queue(tensor.data()))?;
        }
        let layout = layout("recv", &specs)?;
        match M::lying_mut(tensors.iter_mut().map(WireTensorMut::data_mut).collect(), &layout.places) {
            Ok(payload) => Ok(Landing::There(payload)),
            Err(tensors) => Ok(Landing::Aside(Received::reserve("recv", self.queue, specs, layout)?, tensors)),
        }
    }
}

/// Adds a payload to send, in two parts if it has the length of a head.
fn push_parts<'a, M: BundleMemory>(parts: &mut Vec<(usize, M::Wire<'a>)>, peer: usize, payload: M::Wire<'a>) {
    if M::wire_shape(payload).0 != HEAD_BYTES {
        return parts.push((peer, payload));
    }
    parts.push((peer, M::byte_range(payload, 0..PART_BYTES)));
    parts.push((peer, M::byte_range(payload, PART_BYTES..HEAD_BYTES)));
}

/// Like [`push_parts`], for a payload to receive.
fn push_parts_mut<'a, M: BundleMemory>(parts: &mut Vec<(usize, M::WireMut<'a>)>, peer: usize, payload: M::WireMut<'a>) {
    if M::wire_shape(M::as_wire(&payload)).0 != HEAD_BYTES {
        return parts.push((peer, payload));
    }
    let (first, second) = M::split_bytes(payload, PART_BYTES);
    parts.push((peer, first));
    parts.push((peer, second));
}
