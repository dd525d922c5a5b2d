//! Tensors from GPU to GPU: ONNX Runtime's Send and Recv, many of them at once, and whole schedules of them.
//!
//! The counterpart of [`ops::send_recv`](crate::ops::send_recv), which says what bundles, tags and refusals are. Everything is in the
//! order of one queue: packing, one group call for all payloads, unpacking. The host waits only where shapes are described, for the
//! headers and answers; in that case for all work that is in the queue. Memory of tensors may be reused or dropped as soon as a call
//! returns, by work that is ordered on the queue.
//!
//! Lengths of payloads are compared where the communicator compares calls, as it does by default
//! ([`NcclOptions::checks`](crate::comm::nccl::NcclOptions::checks)): by the next `synchronize` at the latest. NCCL alone does not tell
//! transfers of unequal lengths; there the deadline, or nothing, does.

mod bundle;
mod completion;
mod tensor;

pub use bundle::{DeviceBundle, DeviceReceived};
pub use completion::Completion;
pub use tensor::{DeviceTensorView, DeviceTensorViewMut};

use std::cell::RefCell;

use crate::call::scope;
use crate::comm::{DeviceCommunicator, RawSlice};
use crate::driver::{DeviceBuffer, Queue};
use crate::dtype::DType;
use crate::error::{Operation, Result};
use crate::nvtx::{Phase, range, ranges};
use crate::ops::send_recv::negotiation::{
    HEAD_BYTES, Messages, Offer, PART_BYTES, Want, check_call, first_error, in_room, negotiate, withdrawal,
};
use crate::ops::send_recv::{Carrier, Expected, Memory, Shapes, layout, no_tensors};
use crate::plan::bundle::{Limits, encode};
use crate::slice::{Slice, SliceMut};

/// Sends a bundle to another rank, which must receive it. The output signal is the completion's.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the input signal is false, or the receiver refuses what is described;
/// [`CommError::InvalidPeer`](crate::CommError::InvalidPeer) for this rank itself, or one that there is not; [`Error::Cuda`], code 2,
/// where memory for the copy is missing, before anything is sent: the receiver of what is described learns of it, and where shapes are known
/// the call can be made again; and those of [`DeviceCommunicator::exchange`].
///
/// [`Error::Cuda`]: crate::Error::Cuda
pub fn send<'c>(
    comm: &'c dyn DeviceCommunicator,
    signal: bool,
    peer: usize,
    bundle: &DeviceBundle<'_>,
) -> Result<Completion<'c>> {
    let operation = Operation::Send { peer };
    let _scope = scope::within(operation);
    check_call("send", operation, signal, peer, (comm.rank(), comm.world_size()))?;
    transfer(comm, bundle.queue(), &[(peer, bundle)], Vec::new())?;
    Completion::new(comm, bundle.queue())
}

/// Receives tensors of known shapes, all of one queue, from another rank.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the input signal is false, or for no tensors or tensors of different
/// queues, and as [`send`].
pub fn recv<'c>(
    comm: &'c dyn DeviceCommunicator,
    signal: bool,
    peer: usize,
    tensors: &mut [DeviceTensorViewMut<'_>],
) -> Result<Completion<'c>> {
    let operation = Operation::Recv { peer };
    let _scope = scope::within(operation);
    check_call("recv", operation, signal, peer, (comm.rank(), comm.world_size()))?;
    let Some(queue) = tensors.first().map(|tensor| tensor.as_tensor().queue().clone()) else {
        return Err(no_tensors("recv"));
    };
    tensors.iter().try_for_each(|tensor| queue.check_same("recv", tensor.as_tensor().queue()))?;
    transfer(comm, &queue, &[], vec![(peer, Place::Given(tensors))])?;
    Completion::new(comm, &queue)
}

/// Receives tensors of which nothing is known but the tag, into new memory of `queue`. The host waits for the header.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the input signal is false; if what comes is no header, which leaves the
/// two ranks out of step; if it exceeds the limits or has another tag, which the sender learns, as it does of missing memory
/// ([`Error::Cuda`](crate::Error::Cuda), code 2); if the sender has no memory to send it from; and as [`send`].
pub fn recv_described<'c>(
    comm: &'c dyn DeviceCommunicator,
    queue: &Queue,
    signal: bool,
    peer: usize,
    tag: u64,
    limits: &Limits,
) -> Result<(Completion<'c>, DeviceReceived)> {
    let operation = Operation::Recv { peer };
    let _scope = scope::within(operation);
    check_call("recv", operation, signal, peer, (comm.rank(), comm.world_size()))?;
    let expected = Expected::Described { tag, limits: *limits };
    let received = transfer(comm, queue, &[], vec![(peer, Place::New(&expected))])?.pop();
    Ok((Completion::new(comm, queue)?, received.expect("one for each that is expected")))
}

/// Sends to and receives from any number of peers at once, on one queue; what comes is in the order of `receives`.
///
/// Bundles between two ranks meet in order, and both ranks must have them in one call. No transfer waits for another, so that ranks
/// cannot deadlock that all call this.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a bundle of another queue, and as [`send`] and [`recv_described`]. If a
/// bundle is refused, all others are transferred.
pub fn exchange<'c>(
    comm: &'c dyn DeviceCommunicator,
    queue: &Queue,
    sends: &[(usize, DeviceBundle<'_>)],
    receives: &[(usize, Expected)],
) -> Result<(Completion<'c>, Vec<DeviceReceived>)> {
    let received = OnQueue { comm, queue }.exchange(sends, receives)?;
    Ok((Completion::new(comm, queue)?, received))
}

/// The memory of GPUs.
#[derive(Clone, Copy, Debug)]
pub enum Device {}

impl Memory for Device {
    type Bundle<'a> = DeviceBundle<'a>;
    type Received = DeviceReceived;
}

/// A communicator and the queue that bundles belong to: what [`run_stage`](crate::ops::send_recv::run_stage) and
/// [`run_schedule`](crate::ops::send_recv::run_schedule) need for the memory of GPUs. They return when everything is in the queue.
#[derive(Clone, Copy)]
pub struct OnQueue<'c> {
    /// The ranks.
    pub comm: &'c dyn DeviceCommunicator,
    /// What all work is ordered on.
    pub queue: &'c Queue,
}

impl std::fmt::Debug for OnQueue<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rank, world_size) = (self.comm.rank(), self.comm.world_size());
        f.debug_struct("OnQueue").field("rank", &rank).field("world_size", &world_size).finish_non_exhaustive()
    }
}

impl Carrier for OnQueue<'_> {
    type Memory = Device;

    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    fn exchange(
        &self,
        sends: &[(usize, DeviceBundle<'_>)],
        receives: &[(usize, Expected)],
    ) -> Result<Vec<DeviceReceived>> {
        let _scope = scope::within(Operation::ExchangeBundles);
        let ranks = (self.comm.rank(), self.comm.world_size());
        for (peer, bundle) in sends {
            check_call("exchange", Operation::Send { peer: *peer }, true, *peer, ranks)?;
            self.queue.check_same("exchange", bundle.queue())?;
        }
        for &(peer, _) in receives {
            check_call("exchange", Operation::Recv { peer }, true, peer, ranks)?;
        }
        let sends: Vec<(usize, &DeviceBundle<'_>)> = sends.iter().map(|(peer, bundle)| (*peer, bundle)).collect();
        let places = receives.iter().map(|(peer, expected)| (*peer, Place::New(expected)));
        transfer(self.comm, self.queue, &sends, places.collect())
    }
}

/// Where a bundle goes that is received.
enum Place<'p, 't> {
    Given(&'p mut [DeviceTensorViewMut<'t>]),
    New(&'p Expected),
}

/// The same, with memory for the payload.
enum Landing<'p, 't> {
    /// The tensors themselves.
    There(RawSlice),
    /// To be copied to the tensors.
    Aside(DeviceReceived, &'p mut [DeviceTensorViewMut<'t>]),
    New(DeviceReceived),
}

impl Landing<'_, '_> {
    fn payload(&self) -> RawSlice {
        match self {
            Landing::There(payload) => *payload,
            Landing::Aside(received, _) | Landing::New(received) => received.payload(),
        }
    }
}

/// All bundles at once: negotiates what must be, then puts packing, one group call and unpacking into the queue. Gives back those that
/// were not expected in given tensors.
fn transfer<'p, 't>(
    comm: &dyn DeviceCommunicator,
    queue: &Queue,
    sends: &[(usize, &DeviceBundle<'_>)],
    receives: Vec<(usize, Place<'p, 't>)>,
) -> Result<Vec<DeviceReceived>> {
    let (to, from): (Vec<usize>, Vec<usize>) =
        (sends.iter().map(|(peer, _)| *peer).collect(), receives.iter().map(|(peer, _)| *peer).collect());
    let (accepted, landings) = {
        let _sends = ranges(Phase::PreSend, to.iter().copied());
        let _receives = ranges(Phase::PreRecv, from.iter().copied());
        prepare(comm, queue, sends, receives)?
    };
    // Kept until the exchange is in the queue; what gets their memory next is ordered behind it.
    let mut packed: Vec<Option<DeviceBuffer>> = Vec::new();
    let mut outgoing = Vec::new();
    let mut refused = Vec::new();
    for (peer, accepted) in to.iter().zip(accepted) {
        match accepted {
            Ok((payload, memory)) => {
                outgoing.extend(parts(*peer, payload));
                packed.push(memory);
            }
            Err(error) => refused.push(error),
        }
    }
    let mut landed = Vec::with_capacity(landings.len());
    let mut incoming = Vec::new();
    for (peer, landing) in landings {
        match landing {
            Ok(landing) => {
                incoming.extend(parts(peer, landing.payload()));
                landed.push((peer, landing));
            }
            Err(error) => refused.push(error),
        }
    }
    {
        let _sends = ranges(Phase::Send, to.iter().copied());
        let _receives = ranges(Phase::Recv, from.iter().copied());
        if !(outgoing.is_empty() && incoming.is_empty()) {
            // SAFETY: memory of this queue, of bundles and tensors that are borrowed, or made above and given back in the queue's
            // order; what is received into is borrowed mutably, or new.
            unsafe { comm.exchange_raw(queue, &outgoing, &incoming) }?;
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
    drop(packed);
    first_error(refused)?;
    Ok(received)
}

/// A payload, and the memory that it has been copied to, if need be.
type Payload = (RawSlice, Option<DeviceBuffer>);

/// The payload of each send that was accepted, and memory for what is received.
type Prepared<'p, 't> = (Vec<Result<Payload>>, Vec<(usize, Result<Landing<'p, 't>>)>);

fn prepare<'p, 't>(
    comm: &dyn DeviceCommunicator,
    queue: &Queue,
    sends: &[(usize, &DeviceBundle<'_>)],
    receives: Vec<(usize, Place<'p, 't>)>,
) -> Result<Prepared<'p, 't>> {
    let (mut offers, mut wants, mut payloads) = (Vec::new(), Vec::new(), Vec::new());
    for (peer, bundle) in sends {
        // Before the receiver accepts: nobody shall wait for what there is no memory for.
        let payload = {
            let _range = range(Phase::SendMemcpy, *peer);
            bundle.payload()
        };
        match bundle.shapes {
            Shapes::Known => payloads.push(Ok(payload?)),
            Shapes::Described { tag } => {
                let described = |_: &Payload| encode(bundle.specs(), tag);
                let header = payload.as_ref().map_or_else(|error| Ok(withdrawal(error)), described);
                offers.push(Offer { peer: *peer, header: header? });
                payloads.push(payload);
            }
        }
    }
    for (peer, place) in &receives {
        if let Place::New(Expected::Described { tag, limits }) = place {
            wants.push(Want { peer: *peer, tag: *tag, limits: *limits });
        }
    }
    // What needs no negotiation first: this rank's own mistakes must not leave peers half way.
    let mut landings = Vec::with_capacity(receives.len());
    for (peer, place) in receives {
        let landing = match place {
            Place::New(Expected::Described { .. }) => None,
            Place::New(Expected::Known(specs)) => {
                Some(Landing::New(DeviceReceived::reserve(queue, specs.clone(), layout("recv", specs)?)?))
            }
            Place::Given(tensors) => Some(land(queue, tensors)?),
        };
        landings.push((peer, landing));
    }
    let small = Small { comm, queue, out: RefCell::default(), back: RefCell::default() };
    let outcome = negotiate(&small, &offers, &wants, |header| DeviceReceived::of_header(queue, header))?;
    let mut answers = outcome.offers.into_iter();
    let mut described = outcome.wants.into_iter();
    let accepted = sends.iter().zip(payloads).map(|((_, bundle), payload)| match bundle.shapes {
        Shapes::Known => payload,
        Shapes::Described { .. } => {
            let answer = answers.next().expect("one for each offer");
            payload.and_then(|payload| answer.map(|()| payload))
        }
    });
    let landings = landings.into_iter().map(|(peer, landing)| {
        let landing =
            landing.map_or_else(|| described.next().expect("one for each want").map(Landing::New), Result::Ok);
        (peer, landing)
    });
    Ok((accepted.collect(), landings.collect()))
}

fn land<'p, 't>(queue: &Queue, tensors: &'p mut [DeviceTensorViewMut<'t>]) -> Result<Landing<'p, 't>> {
    let specs: Vec<_> = tensors.iter().map(|tensor| tensor.as_tensor().spec()).collect();
    let layout = layout("recv", &specs)?;
    let bytes: Vec<RawSlice> = tensors.iter().map(|tensor| tensor.as_tensor().bytes()).collect();
    if let Some(address) = bundle::payload_of(&bytes, &layout) {
        return Ok(Landing::There(RawSlice { address, len: layout.len, dtype: crate::DataType::U8 }));
    }
    Ok(Landing::Aside(DeviceReceived::reserve(queue, specs, layout)?, tensors))
}

/// A payload as it travels: in two parts if it is as long as a head.
fn parts(peer: usize, payload: RawSlice) -> impl Iterator<Item = (usize, RawSlice)> {
    let (first, second) = if payload.len == HEAD_BYTES {
        (payload.range(0, PART_BYTES), Some(payload.range(PART_BYTES, HEAD_BYTES - PART_BYTES)))
    } else {
        (payload, None)
    };
    [Some(first), second].into_iter().flatten().map(move |part| (peer, part))
}

/// Messages of the host's memory, by way of the device's.
struct Small<'c> {
    comm: &'c dyn DeviceCommunicator,
    queue: &'c Queue,
    /// Room for messages one behind the other, each from a whole word on: for those that go, and for those that come.
    out: RefCell<Option<DeviceBuffer>>,
    back: RefCell<Option<DeviceBuffer>>,
}

const WORD: usize = size_of::<f64>();

impl Small<'_> {
    fn grow(&self, room: &RefCell<Option<DeviceBuffer>>, bytes: usize) -> Result<()> {
        let mut room = room.borrow_mut();
        let has = room.as_ref().map_or(0, |room| room.as_slice().len() * WORD);
        if bytes > has {
            *room = Some(DeviceBuffer::allocate(self.queue, DType::F64, bytes.div_ceil(WORD))?);
        }
        Ok(())
    }
}

/// The places of messages in a room, from its beginning on; there is room for them.
fn places(room: Option<&DeviceBuffer>, messages: impl Iterator<Item = (usize, usize)>) -> Vec<(usize, RawSlice)> {
    let mut address = room.map_or(0, |room| room.as_slice().address());
    let place = |(peer, len): (usize, usize)| {
        let data = RawSlice { address, len, dtype: crate::DataType::U8 };
        address += in_room(len) as u64;
        (peer, data)
    };
    messages.map(place).collect()
}

impl Messages for Small<'_> {
    fn make_room(&self, sends: usize, receives: usize) -> Result<()> {
        self.grow(&self.out, sends)?;
        self.grow(&self.back, receives)
    }

    fn exchange(&self, sends: &[(usize, &[u8])], receives: &mut [(usize, &mut [u8])]) -> Result<()> {
        if sends.is_empty() && receives.is_empty() {
            return Ok(());
        }
        let mut words: Vec<f64> = Vec::new();
        for (_, message) in sends {
            let begin = words.len();
            words.resize(begin + message.len().div_ceil(WORD), 0.0);
            bytemuck::cast_slice_mut(&mut words[begin..])[..message.len()].copy_from_slice(message);
        }
        let received: usize = receives.iter().map(|(_, message)| in_room(message.len())).sum();
        self.make_room(words.len() * WORD, received)?;
        let (mut out, back) = (self.out.borrow_mut(), self.back.borrow());
        if let Some(out) = out.as_mut().filter(|_| !words.is_empty()) {
            out.as_mut_slice().range_mut(0..words.len()).upload(Slice::F64(&words))?;
        }
        let outgoing = places(out.as_ref(), sends.iter().map(|(peer, message)| (*peer, message.len())));
        let incoming = places(back.as_ref(), receives.iter().map(|(peer, message)| (*peer, message.len())));
        // SAFETY: memory of this queue that goes back to it; messages lie apart.
        unsafe { self.comm.exchange_raw(self.queue, &outgoing, &incoming) }?;
        let Some(back) = back.as_ref().filter(|_| !receives.is_empty()) else { return Ok(()) };
        // Whether the exchange took place: after a failure, the memory holds anything.
        self.comm.synchronize(self.queue)?;
        let mut words = vec![0.0; received / WORD];
        back.as_slice().range(0..words.len()).copy_to_host(SliceMut::F64(&mut words))?;
        let mut rest: &[u8] = bytemuck::cast_slice(&words);
        for (_, message) in receives {
            let (own, behind) = rest.split_at(in_room(message.len()));
            message.copy_from_slice(&own[..message.len()]);
            rest = behind;
        }
        Ok(())
    }
}
