//! The two ends of a direct transfer of host memory.

use super::link::{Incoming, Link, Outgoing};
use super::point_to_point::{DataMover, Half, Stage};
use super::stream::Stream;
use crate::error::Call;

impl Half<'_> {
    /// The sending end of a transfer of this memory, which may be a device's if `is_host` is not set.
    ///
    /// # Safety
    /// The memory stays valid and unchanged until [`exchange`](super::point_to_point::exchange) has returned.
    pub(in crate::comm) unsafe fn outgoing(
        link: &dyn Link,
        call: Call,
        outgoing: Outgoing,
        is_host: bool,
    ) -> Half<'static> {
        // SAFETY: as the caller promises.
        let stream = unsafe { Stream::outward(link, outgoing) };
        let stream = if is_host { stream } else { stream.without_copies() };
        Half::new(outgoing.peer, call, outgoing.bytes, Direct { stream, is_here: true })
    }

    /// The receiving end of a transfer into this memory, which may be a device's if `is_host` is not set.
    ///
    /// # Safety
    /// The memory stays valid and is used by nothing else until [`exchange`](super::point_to_point::exchange) has returned.
    pub(in crate::comm) unsafe fn incoming(
        link: &dyn Link,
        call: Call,
        incoming: Incoming,
        is_host: bool,
    ) -> Half<'static> {
        // SAFETY: as the caller promises.
        let stream = unsafe { Stream::inward(link, incoming) };
        let stream = if is_host { stream } else { stream.without_copies() };
        Half::new(incoming.peer, call, incoming.bytes, Direct { stream, is_here: false })
    }
}

struct Direct {
    stream: Stream,
    /// Whether the first message has arrived. A receiver waits for it before it starts to receive, because until then the sender can
    /// still report a failure instead.
    is_here: bool,
}

impl DataMover for Direct {
    fn advance(&mut self, link: &dyn Link, peer: usize) -> Stage {
        if !self.is_here {
            match link.has_data(peer) {
                Ok(is_here) => self.is_here = is_here,
                Err(error) => {
                    self.stream.fail(error);
                    return Stage::Done;
                }
            }
        }
        let has_moved = self.is_here && self.stream.advance(link);
        match (self.is_here, self.stream.has_begun(), self.stream.is_done()) {
            (false, ..) => Stage::Idle,
            (_, _, true) => Stage::Done,
            (_, true, _) => Stage::Started { has_moved },
            (_, false, _) => Stage::Starting { has_moved },
        }
    }

    fn failure(&mut self) -> Option<String> {
        self.stream.take_error().map(|error| error.to_string())
    }

    fn is_confirmed(&self) -> bool {
        false
    }

    fn can_be_left(&self) -> bool {
        self.stream.can_be_left()
    }
}
