//! The transfer of bundles: packing, negotiating, one exchange of all payloads, unpacking.

use super::SendRecv;
use super::bundle::{Bundle, Expected, Received, layout, spec};
use super::memory::BundleMemory;
use super::negotiation::{Offer, Want, negotiate};
use crate::error::{CommError, Operation, Result};
use crate::memory::TensorViewMut;
use crate::nvtx::{Phase, range, ranges};
use crate::plan::bundle::encode;

/// The destination of a received bundle.
pub(super) enum Destination<'p, 't, M: BundleMemory> {
    Given(&'p mut [TensorViewMut<'t, M>]),
    New(&'p Expected),
}

/// A bundle to send.
struct Outgoing<'b, 't, M: BundleMemory> {
    peer: usize,
    bundle: &'b Bundle<'t, M>,
    /// The packed tensors, where they have to be.
    packed: Result<Option<M::Buffer>>,
    /// The negotiation of a described bundle.
    offer: Option<Offer>,
}

/// The memory for the payload of a bundle to receive.
enum Landing<'p, M: BundleMemory> {
    /// The given tensors' own memory, which has the layout of the payload.
    Given(M::SliceMut<'p>),
    /// A payload of its own, and the given tensors to which it is copied.
    Copied(Received<M>, Vec<M::SliceMut<'p>>),
    New(Received<M>),
    /// The negotiation of a described bundle.
    Described(Want<Received<M>>),
}

impl<M: BundleMemory> SendRecv<'_, M> {
    /// Transfers all bundles at once: negotiates where necessary, then moves every payload in one call. Returns the bundles that were
    /// received into new memory. If bundles are refused, all others are transferred, and the first refusal is the error.
    pub(super) fn transfer<'p, 't>(
        &self,
        name: &'static str,
        sends: &[(usize, &Bundle<'_, M>)],
        receives: Vec<(usize, Destination<'p, 't, M>)>,
    ) -> Result<Vec<Received<M>>> {
        let to: Vec<usize> = sends.iter().map(|(peer, _)| *peer).collect();
        let from: Vec<usize> = receives.iter().map(|(peer, _)| *peer).collect();
        to.iter().try_for_each(|&peer| self.check_peer(Operation::Send { peer }, peer))?;
        from.iter().try_for_each(|&peer| self.check_peer(Operation::Recv { peer }, peer))?;
        for (_, bundle) in sends {
            M::check_queue(name, self.queue, bundle.queue())?;
        }
        let outgoing = sends.iter().map(|&(peer, bundle)| pack(peer, bundle));
        let mut outgoing = outgoing.collect::<Result<Vec<Outgoing<'_, '_, M>>>>()?;
        // Packed payloads live until the exchange has read them; on a GPU the next owner of their memory is ordered behind it.
        let mut incoming = {
            let _sends = ranges(Phase::PreSend, to.iter().copied());
            let _receives = ranges(Phase::PreRecv, from.iter().copied());
            // An error in this rank's own arguments must not leave peers in the middle of a negotiation.
            let incoming = receives.into_iter().map(|(peer, destination)| Ok((peer, self.land(peer, destination)?)));
            let mut incoming = incoming.collect::<Result<Vec<(usize, Landing<'p, M>)>>>()?;
            self.negotiate(&mut outgoing, &mut incoming)?;
            incoming
        };
        {
            let _sends = ranges(Phase::Send, to.iter().copied());
            let _receives = ranges(Phase::Recv, from.iter().copied());
            let sends: Vec<_> = outgoing.iter().filter_map(|send| Some((send.peer, send.payload()?))).collect();
            let receives = incoming.iter_mut().filter_map(|(peer, landing)| Some((*peer, landing.payload_mut()?)));
            let mut receives: Vec<_> = receives.collect();
            if !(sends.is_empty() && receives.is_empty()) {
                self.comm.exchange(&sends, &mut receives)?;
            }
        }
        let mut received = Vec::new();
        for (peer, landing) in incoming {
            let _range = range(Phase::RecvMemcpy, peer);
            match landing {
                Landing::Given(_) => {}
                Landing::Copied(payload, tensors) => payload.unpack(tensors)?,
                Landing::New(tensors) => received.push(Ok(tensors)),
                Landing::Described(want) => received.push(want.into_outcome()),
            }
        }
        let _sends = ranges(Phase::PostSend, to.into_iter());
        let _receives = ranges(Phase::PostRecv, from.into_iter());
        outgoing.into_iter().try_for_each(Outgoing::into_outcome)?;
        received.into_iter().collect()
    }

    fn check_peer(&self, operation: Operation, peer: usize) -> Result<()> {
        let (rank, world_size) = (self.comm.rank(), self.comm.world_size());
        if peer < world_size && peer != rank {
            return Ok(());
        }
        Err(CommError::InvalidPeer { operation, peer, rank, world_size }.into())
    }

    fn negotiate(&self, outgoing: &mut [Outgoing<'_, '_, M>], incoming: &mut [(usize, Landing<'_, M>)]) -> Result<()> {
        let offers: Vec<&mut Offer> = outgoing.iter_mut().filter_map(|send| send.offer.as_mut()).collect();
        let wants = incoming.iter_mut().filter_map(|(_, landing)| match landing {
            Landing::Described(want) => Some(want),
            _ => None,
        });
        negotiate((self.comm, self.queue), offers, wants.collect(), |header| {
            Received::reserve("recv", self.queue, header.tensors, header.layout)
        })
    }

    /// Finds or allocates the memory for the payload of a bundle, unless it has to be negotiated first.
    fn land<'p, 't>(&self, peer: usize, destination: Destination<'p, 't, M>) -> Result<Landing<'p, M>> {
        match destination {
            Destination::New(Expected::Described { tag, limits }) => {
                Ok(Landing::Described(Want::new(peer, *tag, *limits)))
            }
            Destination::New(Expected::Known(tensors)) => {
                let specs: Vec<_> = tensors.iter().map(|(dtype, shape)| spec(*dtype, shape)).collect();
                let layout = layout(&specs)?;
                Ok(Landing::New(Received::reserve("recv", self.queue, specs, layout)?))
            }
            Destination::Given(tensors) => {
                let specs: Vec<_> = tensors.iter().map(|tensor| spec(tensor.dtype(), tensor.shape())).collect();
                let layout = layout(&specs)?;
                for tensor in &*tensors {
                    M::check_queue("recv", self.queue, M::queue(tensor.data()))?;
                }
                let tensors = tensors.iter_mut().map(TensorViewMut::elements_mut).collect();
                match M::contiguous_mut(tensors, &layout.ranges) {
                    Ok(payload) => Ok(Landing::Given(payload)),
                    Err(tensors) => Ok(Landing::Copied(Received::reserve("recv", self.queue, specs, layout)?, tensors)),
                }
            }
        }
    }
}

/// Packs a bundle. A described bundle for which packing fails, for example for lack of memory, is withdrawn; with known shapes, nothing of
/// the call is sent.
fn pack<'b, 't, M: BundleMemory>(peer: usize, bundle: &'b Bundle<'t, M>) -> Result<Outgoing<'b, 't, M>> {
    let _range = range(Phase::SendMemcpy, peer);
    let packed = bundle.packed();
    let offer = match (bundle.tag, &packed) {
        (None, _) => return Ok(Outgoing { peer, bundle, packed: Ok(packed?), offer: None }),
        (Some(tag), Ok(_)) => Offer::new(peer, &encode(bundle.specs(), tag)?),
        (Some(_), Err(error)) => Offer::withdrawn(peer, error),
    };
    Ok(Outgoing { peer, bundle, packed, offer: Some(offer) })
}

impl<M: BundleMemory> Outgoing<'_, '_, M> {
    /// The bytes to send, unless the bundle is withdrawn or refused.
    fn payload(&self) -> Option<M::Slice<'_>> {
        let is_refused = self.offer.as_ref().is_some_and(|offer| offer.outcome.is_err());
        let packed = self.packed.as_ref().ok().filter(|_| !is_refused)?;
        Some(self.bundle.payload(packed.as_ref()))
    }

    /// The reason why the bundle was not sent, if it was not.
    fn into_outcome(self) -> Result<()> {
        self.packed?;
        self.offer.map_or(Ok(()), |offer| offer.outcome)
    }
}

impl<M: BundleMemory> Landing<'_, M> {
    /// The bytes to receive into, unless the bundle is refused.
    fn payload_mut(&mut self) -> Option<M::SliceMut<'_>> {
        match self {
            Landing::Given(bytes) => Some(M::reborrow(bytes)),
            Landing::Copied(received, _) | Landing::New(received) => Some(received.payload_mut()),
            Landing::Described(want) => Some(want.memory_mut()?.payload_mut()),
        }
    }
}
