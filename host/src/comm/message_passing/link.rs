//! [`Link`]: the contract of a transport below the handshake: it sends records, which are small and wait in an inbox, and bulk data
//! between ranks.
//!
//! A link does not depend on collectives. All its methods are nonblocking, so the caller decides how long to wait.

use std::borrow::Cow;
use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
#[cfg(all(feature = "cuda", feature = "mpi"))]
use std::time::{Duration, Instant};

use super::record::{EagerBytes, Record};
use crate::error::{Call, CommError, Departure, Result};

/// Bytes to send to a rank.
#[derive(Clone, Copy, Debug)]
pub(in crate::comm) struct Outgoing {
    pub(in crate::comm) peer: usize,
    pub(in crate::comm) start: *const u8,
    pub(in crate::comm) bytes: usize,
}

/// Memory for bytes from a rank.
#[derive(Clone, Copy, Debug)]
pub(in crate::comm) struct Incoming {
    pub(in crate::comm) peer: usize,
    pub(in crate::comm) start: *mut u8,
    pub(in crate::comm) bytes: usize,
}

/// The reason why a transport cannot continue, as its own text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(in crate::comm) struct LinkError(pub(in crate::comm) String);

/// A group of ranks that includes this process, and the messages between them.
pub(in crate::comm) trait Link: fmt::Debug + Send {
    /// The name of the transport in traces.
    fn transport(&self) -> &'static str;

    /// This rank.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world_size(&self) -> usize;

    /// Sends a record; never waits for the receiver. A rank's records arrive in the order in which it sent them.
    fn post(&self, peer: usize, record: Record) -> Result<(), LinkError>;

    /// Receives all records that have arrived, and makes progress with records that were sent.
    fn pump(&self) -> Result<(), LinkError>;

    /// The received records, by sender.
    fn inbox(&self) -> RefMut<'_, Vec<VecDeque<Record>>>;

    /// Whether bulk data of a rank can be received.
    fn has_data(&self, peer: usize) -> Result<bool, LinkError>;

    /// Starts to send bulk data. Messages to one rank arrive in the order in which they were started.
    ///
    /// # Safety
    /// The memory stays valid and unchanged until the requests that this call adds are complete or cancelled.
    unsafe fn send(&self, outgoing: Outgoing, requests: &mut Requests);

    /// Starts to receive bulk data.
    ///
    /// # Safety
    /// The memory stays valid, and nothing else uses it, until the requests that this call adds are complete or cancelled.
    unsafe fn receive(&self, incoming: Incoming, requests: &mut Requests);

    /// The buffers of messages that cannot be cancelled: the memory of such a message belongs to the transport until it is complete, or for
    /// as long as the process lives, so up to a length the caller's memory is copied. `None` if messages can be cancelled.
    fn buffers(&self) -> Option<&Buffers>;

    /// How a rank has left, if this rank knows that it has left. To be called after [`pump`](Self::pump), which has received everything
    /// that the rank had sent.
    fn departure(&self, peer: usize) -> Option<Departure>;

    /// Whether all ranks may be processes of one machine, and reach each other's memory.
    fn is_one_machine(&self) -> bool;

    /// The longest message between this rank and another.
    fn longest_message(&self, peer: usize) -> usize;

    /// The lowest group number that this process has not used yet.
    fn free_group(&self) -> u64;

    /// Reserves a number for a group; returns false if this process has used it, or a higher one, before.
    fn take_group(&self, number: u64) -> Result<bool>;

    /// Makes the link of these ranks, in this order. This rank is one of them, and all of them have reserved the number.
    fn among(&self, members: &[usize], number: u64) -> Box<dyn Link>;

    /// Leaves the group. All ranks do so, at different times. A rank that has failed has reported its failure to all other ranks before.
    fn leave(&mut self, has_failed: bool);

    /// Ends this process, and if the transport can, all processes of the job.
    fn abort(&self, code: i32) -> !;
}

impl dyn Link + '_ {
    /// The other ranks, beginning with the next one, so that not all ranks begin with the same one.
    pub(in crate::comm) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, world_size) = (self.rank(), self.world_size());
        (1..world_size).map(move |step| (rank + step) % world_size)
    }

    /// Reports a failure to all other ranks. A rank that cannot be reached detects it by its deadline.
    pub(super) fn report(&self, failure: &Record) {
        for peer in self.others() {
            if let Err(error) = self.post(peer, failure.clone()) {
                tracing::warn!(peer, %error, "cannot tell a rank of a failure");
            }
        }
    }

    /// Whether the next record of a rank is its word in a round of all ranks.
    pub(super) fn has_word(&self, peer: usize) -> bool {
        !matches!(self.inbox()[peer].front(), None | Some(Record::Offer { .. } | Record::Failed { .. }))
    }

    /// Takes a rank's word in a round, with the eager bytes for this rank.
    pub(super) fn take_word(&self, peer: usize) -> (Record, Cow<'static, [u8]>) {
        match self.inbox()[peer].pop_front() {
            Some(Record::Call { call, eager }) => (Record::Call { call, eager: EagerBytes::default() }, eager.0.into()),
            record => (record.expect("it has come"), Cow::default()),
        }
    }

    /// Takes the first received record of a rank from which `find` returns something.
    pub(super) fn take<T>(&self, peer: usize, find: impl Fn(&Record) -> Option<T>) -> Option<T> {
        let mut inbox = self.inbox();
        let (index, found) = inbox[peer].iter().enumerate().find_map(|(index, record)| Some((index, find(record)?)))?;
        inbox[peer].remove(index);
        Some(found)
    }

    /// The first failure that these ranks have reported after at most `completed` collectives.
    pub(super) fn reported(&self, ranks: Range<usize>, completed: u64) -> Option<CommError> {
        self.inbox()[ranks].iter().flatten().find_map(|record| match record {
            Record::Failed { completed: after, error } if *after <= completed => Some(error.clone()),
            _ => None,
        })
    }

    /// The calls in which a rank waits by its records, for which this rank has made no call yet: collectives, and sends to this rank. A sender
    /// that also receives from this rank may wait for its receive alone, if this rank `sends` to it.
    pub(super) fn waiting_calls(&self, peer: usize, sends: bool) -> Vec<Call> {
        let call = |record: &Record| match record {
            Record::Call { call, .. } => Some(*call),
            Record::Offer { call, is_alone } => (*is_alone || !sends).then_some(*call),
            _ => None,
        };
        self.inbox()[peer].iter().filter_map(call).collect()
    }
}

/// Buffers of equal size for copies of messages, kept for the next messages: memory that is new to the process is slower by far.
#[derive(Debug, Default)]
pub(in crate::comm) struct Buffers(RefCell<Vec<Box<[u8]>>>);

impl Buffers {
    /// The size of a buffer in bytes.
    pub(super) const BYTES: usize = 1 << 20;
    /// The most buffers that are kept: two for each message to and from eight ranks, which exchange data at a time.
    const MOST_KEPT: usize = 32;

    pub(super) fn take(&self) -> Box<[u8]> {
        self.0.borrow_mut().pop().unwrap_or_else(|| vec![0; Self::BYTES].into_boxed_slice())
    }

    pub(super) fn give(&self, buffer: Box<[u8]>) {
        let mut kept = self.0.borrow_mut();
        if kept.len() < Self::MOST_KEPT {
            kept.push(buffer);
        }
    }
}

/// A message in flight.
pub(in crate::comm) trait Pending: fmt::Debug {
    /// Makes progress without waiting. Returns whether the message is complete. Not to be called again after that, or after an error.
    fn test(&mut self) -> Result<bool, LinkError>;

    /// Cancels the message: its memory is no longer in use. Called only if the link has no [`Link::buffers`].
    fn cancel(&mut self);
}

/// Messages in flight.
#[derive(Debug, Default)]
pub(in crate::comm) struct Requests {
    under_way: Vec<Box<dyn Pending>>,
    error: Option<LinkError>,
}

impl Requests {
    /// Adds a message that was started, or the error of starting it.
    pub(in crate::comm) fn add(&mut self, started: Result<Box<dyn Pending>, LinkError>) {
        match started {
            Ok(pending) => self.under_way.push(pending),
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
    }

    /// Makes progress. Returns whether all messages are complete.
    pub(in crate::comm) fn progress(&mut self) -> bool {
        self.under_way.retain_mut(|pending| match pending.test() {
            Ok(is_over) => !is_over,
            Err(error) => {
                self.error.get_or_insert(error);
                false
            }
        });
        self.under_way.is_empty()
    }

    pub(in crate::comm) fn cancel(&mut self) {
        self.under_way.drain(..).for_each(|mut pending| pending.cancel());
    }

    pub(in crate::comm) fn into_result(self) -> Result<(), LinkError> {
        debug_assert!(self.under_way.is_empty(), "messages are still under way");
        self.error.map_or(Ok(()), Err)
    }

    /// Waits until all messages are complete. If one has failed, the others get `deadline` to complete; if they do not, the job is
    /// aborted, because the transport would continue to use memory after the call that has borrowed it.
    #[cfg(all(feature = "cuda", feature = "mpi"))]
    pub(super) fn finish(mut self, link: &dyn Link, deadline: Duration) -> Result<(), LinkError> {
        let mut failed: Option<Instant> = None;
        while !self.progress() {
            if self.error.is_some() && failed.get_or_insert_with(Instant::now).elapsed() > deadline {
                tracing::error!(rank = link.rank(), error = ?self.error, "messages that cannot be ended: aborting the job");
                link.abort(1);
            }
            std::thread::yield_now();
        }
        self.into_result()
    }
}
