//! The ends of a transfer whose memory MPI reads or writes as it is.

use super::channel::{Channel, Incoming, Outgoing, Requests};
use super::library::MpiError;
use super::point_to_point::{End, Half, Stage};
use crate::error::Call;

impl Half<'_> {
    /// Memory that MPI reads.
    ///
    /// # Safety
    /// It stays valid and unchanged until [`exchange`](super::point_to_point::exchange) has returned.
    pub(super) unsafe fn outgoing(call: Call, outgoing: Outgoing) -> Half<'static> {
        Half::new(outgoing.peer, call, outgoing.bytes, Sending { outgoing, requests: None, error: None })
    }

    /// Memory that MPI writes.
    ///
    /// # Safety
    /// It stays valid and is used by nobody else until [`exchange`](super::point_to_point::exchange) has returned.
    pub(super) unsafe fn incoming(call: Call, incoming: Incoming) -> Half<'static> {
        Half::new(incoming.peer, call, incoming.bytes, Receiving { incoming, requests: None, error: None })
    }
}

/// Memory that MPI reads as it is.
struct Sending {
    outgoing: Outgoing,
    requests: Option<Requests>,
    error: Option<MpiError>,
}

impl End for Sending {
    fn advance(&mut self, channel: &Channel, _peer: usize) -> Stage {
        let outgoing = self.outgoing;
        let requests = self.requests.get_or_insert_with(|| {
            let mut requests = Requests::default();
            // SAFETY: by the contract of `Half::outgoing`.
            unsafe { channel.start(&[], &[outgoing], &mut requests) };
            requests
        });
        finished(channel, requests, &mut self.error)
    }

    fn failure(&mut self) -> Option<String> {
        self.error.take().map(|error| error.to_string())
    }

    fn is_confirmed(&self) -> bool {
        false
    }
}

/// Memory that MPI writes as it is.
struct Receiving {
    incoming: Incoming,
    requests: Option<Requests>,
    error: Option<MpiError>,
}

impl End for Receiving {
    fn advance(&mut self, channel: &Channel, peer: usize) -> Stage {
        if self.requests.is_none() {
            match channel.has_data(peer) {
                Ok(true) => {}
                Ok(false) => return Stage::Idle,
                Err(error) => {
                    self.error = Some(error);
                    return Stage::Done;
                }
            }
        }
        let incoming = self.incoming;
        let requests = self.requests.get_or_insert_with(|| {
            let mut requests = Requests::default();
            // SAFETY: by the contract of `Half::incoming`.
            unsafe { channel.start(&[incoming], &[], &mut requests) };
            requests
        });
        finished(channel, requests, &mut self.error)
    }

    fn failure(&mut self) -> Option<String> {
        self.error.take().map(|error| error.to_string())
    }

    fn is_confirmed(&self) -> bool {
        false
    }
}

/// Looks whether messages are over, even if something has failed: their memory is in use until then.
fn finished(channel: &Channel, requests: &mut Requests, error: &mut Option<MpiError>) -> Stage {
    if !channel.progress(requests) {
        return Stage::Started;
    }
    *error = std::mem::take(requests).into_result().err();
    Stage::Done
}
