//! Tensors from rank to rank: ONNX Runtime's Send and Recv, many of them at once, and whole schedules of them.
//!
//! What is sent is a [`Bundle`]: any number of tensors of any types, as one payload. If the receiver knows the shapes, nothing else
//! travels. If it does not, a header goes before the payload: the receiver checks it against its [`Limits`], compares the sender's tag
//! with its own, answers, and only then makes memory. A refusal is an error on both ranks, and the communicator stays good.
//!
//! Sender and receiver must choose alike. Where one describes and the other does not, the transport refuses two messages of unequal
//! lengths on both ranks, as it does where known shapes add up to other bytes. Shapes that differ and add up to the same bytes are not
//! noticed: that is what "known" means.
//!
//! Nothing that is not planned can be transferred while a schedule runs: [`run_schedule`] and [`run_stage`] ask the caller for what
//! the plan has, and for nothing else. Counterparts for the memory of GPUs are in `ops::cuda`.

mod bundle;
pub(crate) mod negotiation;
mod schedule;
mod tensor;

pub use bundle::{Bundle, Expected, Received, Shapes};
pub use schedule::{Carrier, Host, Memory, Passing, StageWork, run_schedule, run_stage};
pub use tensor::{Carried, TensorBytes, TensorBytesMut};

#[cfg(feature = "cuda")]
pub(crate) use self::{
    bundle::{layout, no_tensors, usize_shapes},
    tensor::{check, spec},
};

use self::bundle::{Payload, Room};
use self::negotiation::{
    HEAD_BYTES, Messages, Offer, PART_BYTES, Want, check_call, first_error, negotiate, withdrawal,
};
use crate::call::scope;
use crate::comm::Communicator;
use crate::error::{Operation, Result};
use crate::nvtx::{Phase, range, ranges};
use crate::plan::bundle::{Limits, encode};

/// Sends a bundle to another rank (ONNX Runtime's Send), which must call [`recv`], or [`recv_described`] if the bundle is
/// [`described`](Bundle::described). Returns the output signal, true, once the data have been taken.
///
/// ```
/// use gradsync::comm::{Communicator, local};
/// use gradsync::ops::send_recv::{Bundle, TensorBytes, recv_described, send};
/// use gradsync::plan::bundle::Limits;
///
/// let outcomes = local::run(2, |comm| -> gradsync::Result<()> {
///     let (ids, scale) = ([3i64, 1, 4, 1], [0.5f32]);
///     if comm.rank() == 0 {
///         let bundle = Bundle::new([TensorBytes::of(&ids, [2, 2].to_vec())?, TensorBytes::from(&scale[..])])?;
///         assert!(send(&comm, true, 1, &bundle.described(7))?);
///     } else {
///         let (signal, tensors) = recv_described(&comm, true, 0, 7, &Limits::default())?;
///         assert!(signal);
///         assert_eq!((tensors.tensor(0).shape(), tensors.tensor(0).typed()), (&[2, 2][..], Some(&ids[..])));
///         assert_eq!(tensors.tensor(1).typed(), Some(&scale[..]));
///     }
///     Ok(())
/// })?;
/// # for outcome in outcomes { outcome.expect("no rank panicked")?; }
/// # Ok::<(), gradsync::Error>(())
/// ```
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the input signal is false, or the receiver refuses what is described;
/// [`CommError::InvalidPeer`](crate::CommError::InvalidPeer) for this rank itself, or one that there is not;
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory) for the copy, before anything is sent: the receiver of what is described learns of it, and
/// where shapes are known the call can be made again; and those of [`Communicator::exchange`].
pub fn send(comm: &dyn Communicator, signal: bool, peer: usize, bundle: &Bundle<'_>) -> Result<bool> {
    let operation = Operation::Send { peer };
    let _scope = scope::within(operation);
    check_call("send", operation, signal, peer, (comm.rank(), comm.world_size()))?;
    transfer(comm, &[(peer, bundle)], Vec::new())?;
    Ok(true)
}

/// Receives tensors of known shapes from another rank (ONNX Runtime's Recv). Returns the output signal, true.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the input signal is false, or for no tensors, and as [`send`]. The
/// tensors are as before then, or, if there is only one, as the transport left it.
pub fn recv(comm: &dyn Communicator, signal: bool, peer: usize, tensors: &mut [TensorBytesMut<'_>]) -> Result<bool> {
    let operation = Operation::Recv { peer };
    let _scope = scope::within(operation);
    check_call("recv", operation, signal, peer, (comm.rank(), comm.world_size()))?;
    transfer(comm, &[], vec![(peer, Place::Given(tensors))])?;
    Ok(true)
}

/// Receives tensors of which nothing is known but the tag. Returns the output signal, true, and the tensors.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the input signal is false; if what comes is no header, which leaves the
/// two ranks out of step; if it exceeds the limits or has another tag, which the sender learns; if the sender has no memory to send it from.
/// [`Error::OutOfMemory`], which the sender learns too, and as [`send`].
///
/// [`Error::OutOfMemory`]: crate::Error::OutOfMemory
pub fn recv_described(
    comm: &dyn Communicator,
    signal: bool,
    peer: usize,
    tag: u64,
    limits: &Limits,
) -> Result<(bool, Received)> {
    let operation = Operation::Recv { peer };
    let _scope = scope::within(operation);
    check_call("recv", operation, signal, peer, (comm.rank(), comm.world_size()))?;
    let expected = Expected::Described { tag, limits: *limits };
    let received = exchange(comm, &[], &[(peer, expected)])?.pop();
    Ok((true, received.expect("one for each that is expected")))
}

/// Sends to and receives from any number of peers at once; what has come is in the order of `receives`.
///
/// Bundles between two ranks meet in order, and both ranks must have them in one call. No transfer waits for another, so that ranks
/// cannot deadlock that all call this.
///
/// # Errors
/// As [`send`] and [`recv_described`]. If a bundle is refused, all others have been transferred.
pub fn exchange(
    comm: &dyn Communicator,
    sends: &[(usize, Bundle<'_>)],
    receives: &[(usize, Expected)],
) -> Result<Vec<Received>> {
    let _scope = scope::within(Operation::ExchangeBundles);
    let ranks = (comm.rank(), comm.world_size());
    for &(peer, _) in sends {
        check_call("exchange", Operation::Send { peer }, true, peer, ranks)?;
    }
    for &(peer, _) in receives {
        check_call("exchange", Operation::Recv { peer }, true, peer, ranks)?;
    }
    let sends: Vec<(usize, &Bundle<'_>)> = sends.iter().map(|(peer, bundle)| (*peer, bundle)).collect();
    transfer(comm, &sends, receives.iter().map(|(peer, expected)| (*peer, Place::New(expected))).collect())
}

/// Where a bundle goes that is received.
enum Place<'p, 't> {
    Given(&'p mut [TensorBytesMut<'t>]),
    New(&'p Expected),
}

/// The same, with memory for the payload.
enum Landing<'p, 't> {
    /// The tensor itself.
    There(&'p mut [u8]),
    /// To be copied to the tensors.
    Aside(Received, &'p mut [TensorBytesMut<'t>]),
    New(Received),
}

impl Landing<'_, '_> {
    fn payload_mut(&mut self) -> &mut [u8] {
        match self {
            Landing::There(bytes) => bytes,
            Landing::Aside(received, _) | Landing::New(received) => received.payload_mut(),
        }
    }
}

struct Small<'c>(&'c dyn Communicator);

impl Messages for Small<'_> {
    fn exchange(&self, sends: &[(usize, &[u8])], receives: &mut [(usize, &mut [u8])]) -> Result<()> {
        self.0.exchange(sends, receives)
    }
}

/// All bundles at once: negotiates what must be, then moves every payload in one call. Gives back those that were not expected in given
/// tensors.
fn transfer<'p, 't>(
    comm: &dyn Communicator,
    sends: &[(usize, &Bundle<'_>)],
    receives: Vec<(usize, Place<'p, 't>)>,
) -> Result<Vec<Received>> {
    let (to, from): (Vec<usize>, Vec<usize>) =
        (sends.iter().map(|(peer, _)| *peer).collect(), receives.iter().map(|(peer, _)| *peer).collect());
    let (accepted, landings) = {
        let _sends = ranges(Phase::PreSend, to.iter().copied());
        let _receives = ranges(Phase::PreRecv, from.iter().copied());
        prepare(comm, sends, receives)?
    };
    let mut payloads: Vec<(usize, Payload<'_>)> = Vec::with_capacity(sends.len());
    let mut refused = Vec::new();
    for ((peer, bundle), accepted) in sends.iter().zip(accepted) {
        match accepted {
            Ok(room) => {
                let _range = range(Phase::SendMemcpy, *peer);
                payloads.push((*peer, bundle.payload(room)));
            }
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
        let outgoing = payloads.iter().flat_map(|(peer, payload)| parts(*peer, payload.bytes()));
        let incoming = landed.iter_mut().flat_map(|(peer, landing)| parts_mut(*peer, landing.payload_mut()));
        let (outgoing, mut incoming): (Vec<_>, Vec<_>) = (outgoing.collect(), incoming.collect());
        let _sends = ranges(Phase::Send, to.iter().copied());
        let _receives = ranges(Phase::Recv, from.iter().copied());
        if !(outgoing.is_empty() && incoming.is_empty()) {
            comm.exchange(&outgoing, &mut incoming)?;
        }
    }
    let mut received = Vec::new();
    for (peer, landing) in landed {
        let _range = range(Phase::RecvMemcpy, peer);
        match landing {
            Landing::There(_) => {}
            Landing::Aside(aside, tensors) => aside.unpack(tensors),
            Landing::New(new) => received.push(new),
        }
    }
    let _sends = ranges(Phase::PostSend, to.into_iter());
    let _receives = ranges(Phase::PostRecv, from.into_iter());
    drop(payloads);
    first_error(refused)?;
    Ok(received)
}

/// For each send that was accepted, and for what is received, memory.
type Prepared<'p, 't> = (Vec<Result<Room>>, Vec<(usize, Result<Landing<'p, 't>>)>);

fn prepare<'p, 't>(
    comm: &dyn Communicator,
    sends: &[(usize, &Bundle<'_>)],
    receives: Vec<(usize, Place<'p, 't>)>,
) -> Result<Prepared<'p, 't>> {
    let (mut offers, mut wants, mut rooms) = (Vec::new(), Vec::new(), Vec::new());
    for (peer, bundle) in sends {
        // Before the receiver accepts: nobody shall wait for what there is no memory for.
        let room = bundle.room("send");
        match bundle.shapes {
            Shapes::Known => rooms.push(Ok(room?)),
            Shapes::Described { tag } => {
                let header = room.as_ref().map_or_else(|error| Ok(withdrawal(error)), |_| encode(bundle.specs(), tag));
                offers.push(Offer { peer: *peer, header: header? });
                rooms.push(room);
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
                Some(Landing::New(Received::reserve("recv", specs.clone(), bundle::layout("recv", specs)?)?))
            }
            Place::Given([only]) => Some(Landing::There(only.bytes_mut())),
            Place::Given(tensors) => {
                let specs: Vec<_> = tensors.iter().map(TensorBytesMut::spec).collect();
                let layout = bundle::layout("recv", &specs)?;
                Some(Landing::Aside(Received::reserve("recv", specs, layout)?, tensors))
            }
        };
        landings.push((peer, landing));
    }
    let outcome = negotiate(&Small(comm), &offers, &wants, |header| Received::of_header("recv", header))?;
    let mut answers = outcome.offers.into_iter();
    let mut described = outcome.wants.into_iter();
    let accepted = sends.iter().zip(rooms).map(|((_, bundle), room)| match bundle.shapes {
        Shapes::Known => room,
        Shapes::Described { .. } => {
            let answer = answers.next().expect("one for each offer");
            room.and_then(|room| answer.map(|()| room))
        }
    });
    let landings = landings.into_iter().map(|(peer, landing)| {
        let landing =
            landing.map_or_else(|| described.next().expect("one for each want").map(Landing::New), Result::Ok);
        (peer, landing)
    });
    Ok((accepted.collect(), landings.collect()))
}

/// A payload as it travels: in two parts if it is as long as a head.
fn parts(peer: usize, payload: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let (first, second) = if payload.len() == HEAD_BYTES {
        let (first, second) = payload.split_at(PART_BYTES);
        (first, Some(second))
    } else {
        (payload, None)
    };
    [Some(first), second].into_iter().flatten().map(move |part| (peer, part))
}

fn parts_mut(peer: usize, payload: &mut [u8]) -> impl Iterator<Item = (usize, &mut [u8])> {
    let (first, second) = if payload.len() == HEAD_BYTES {
        let (first, second) = payload.split_at_mut(PART_BYTES);
        (first, Some(second))
    } else {
        (payload, None)
    };
    [Some(first), second].into_iter().flatten().map(move |part| (peer, part))
}
