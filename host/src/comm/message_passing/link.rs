//! [`Link`]: the contract of a transport below the handshake: records, which are small and wait in an inbox, and bulk data between ranks.
//!
//! Knows nothing of collectives. Everything is nonblocking, so the waiting caller decides for how long.

use std::cell::RefMut;
use std::collections::VecDeque;
use std::fmt;
use std::io;
#[cfg(all(feature = "cuda", feature = "mpi"))]
use std::time::{Duration, Instant};

use super::record::Record;
use crate::error::{Departure, Result};

/// Bytes for a rank.
#[derive(Clone, Copy, Debug)]
pub(in crate::comm) struct Outgoing {
    pub(in crate::comm) peer: usize,
    pub(in crate::comm) start: *const u8,
    pub(in crate::comm) bytes: usize,
}

/// Room for bytes from a rank.
#[derive(Clone, Copy, Debug)]
pub(in crate::comm) struct Incoming {
    pub(in crate::comm) peer: usize,
    pub(in crate::comm) start: *mut u8,
    pub(in crate::comm) bytes: usize,
}

/// Why a transport cannot go on, in its own words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(in crate::comm) struct LinkError(pub(in crate::comm) String);

/// A group of ranks, of which this process is one, and the messages among them.
pub(in crate::comm) trait Link: fmt::Debug + Send {
    /// The name of the transport in records of calls.
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
    /// The memory stays valid and unchanged until the requests that this adds are over, or cancelled.
    unsafe fn send(&self, outgoing: Outgoing, requests: &mut Requests);

    /// Starts to receive bulk data.
    ///
    /// # Safety
    /// The memory stays valid, and nothing else uses it, until the requests that this adds are over, or cancelled.
    unsafe fn receive(&self, incoming: Incoming, requests: &mut Requests);

    /// Whether requests can be cancelled. Where they cannot, the memory of a request that is given up is the transport's for as long as the process
    /// lives.
    fn can_cancel(&self) -> bool;

    /// How a rank has left, if it has and this rank knows; asked after [`pump`](Self::pump), which has received everything that it had sent.
    fn departure(&self, peer: usize) -> Option<Departure>;

    /// Whether all ranks may be processes of one machine, and reach each other's memory.
    fn is_one_machine(&self) -> bool;

    /// What reads the memory of all other ranks' processes, where that is permitted; the same on all ranks.
    fn reader(&self) -> Option<&dyn MemoryReader>;

    /// The longest message between this rank and another.
    fn longest_message(&self, peer: usize) -> usize;

    /// The lowest number that this process has used for no group yet.
    fn free_group(&self) -> u64;

    /// Takes a number for a group, unless this process has used it, or a later one, before.
    fn take_group(&self, number: u64) -> Result<bool>;

    /// The link among these ranks, in this order. This rank is one of them, and all of them have taken the number for it.
    fn among(&self, members: &[usize], number: u64) -> Box<dyn Link>;

    /// Leaves in good order: all ranks do so, in their own time.
    fn leave(&mut self);

    /// Ends this process, and where the transport can, all processes of the job.
    fn abort(&self, code: i32) -> !;
}

impl dyn Link + '_ {
    /// The other ranks, beginning with the next one, so that not all ranks begin with the same.
    pub(in crate::comm) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, world_size) = (self.rank(), self.world_size());
        (1..world_size).map(move |step| (rank + step) % world_size)
    }
}

/// Reads the memory of other ranks' processes, from any thread.
pub(in crate::comm) trait MemoryReader: fmt::Debug + Send + Sync {
    /// Copies `bytes` bytes at an address of a rank.
    ///
    /// # Errors
    /// The system's: there is no such process any more, or no memory there that could be read.
    ///
    /// # Safety
    /// `to` has room for so many bytes, which nothing else uses.
    unsafe fn read(&self, rank: usize, address: u64, to: *mut u8, bytes: usize) -> io::Result<()>;
}

/// A message under way.
pub(in crate::comm) trait Pending: fmt::Debug {
    /// Goes on as far as is possible without waiting; whether it is over. Not called again once it is, or has failed.
    fn test(&mut self) -> Result<bool, LinkError>;

    /// Ends the message: its memory is in use no more. Called only where [`Link::can_cancel`] says so.
    fn cancel(&mut self);
}

/// Messages under way.
#[derive(Debug, Default)]
pub(in crate::comm) struct Requests {
    under_way: Vec<Box<dyn Pending>>,
    error: Option<LinkError>,
}

impl Requests {
    /// Adds a message that was started, or the reason why it was not.
    pub(in crate::comm) fn add(&mut self, started: Result<Box<dyn Pending>, LinkError>) {
        match started {
            Ok(pending) => self.under_way.push(pending),
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
    }

    /// Whether all messages are out and in.
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

    /// Waits until all messages are out and in. If one has failed, the others get `deadline` to end; if they do not, the job is
    /// aborted: the transport would go on to use memory after the call that has borrowed it.
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
