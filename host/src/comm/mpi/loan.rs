//! Windows of vectors that ranks lend each other, where all are processes of one machine and each can map the files that the others' vectors
//! lie in.
//!
//! A loan begins with a collective and ends once every rank has said that its work is over, however that went: that last wait knows no
//! deadline while nothing has failed, and ends because failures end the collectives that the others' work may be waiting in. After a failure
//! the others get the deadline to end; if they do not, the job is aborted, since they would go on to use memory that is no longer lent to them.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::meeting::{Failure, Meeting};
use super::{MpiCommunicator, SetUp};
use crate::comm::{AddressSpace, Communicator, Work};
use crate::error::{Call, CommError, Departure, Operation, Result};
use crate::memory::{Mapped, Ticket};
use crate::slice::SliceMut;

/// What ranks know of each other's memory: the same on all of them.
#[derive(Debug, Default)]
pub(super) struct Neighbours {
    /// Whether one of them could not map another's, and none tries again.
    are_apart: Cell<bool>,
    /// Those of buffers that are gone are forgotten when another is mapped, which need not be at once on all ranks: nobody asks for them again.
    sets: RefCell<Vec<Arc<FileSet>>>,
}

/// One file of every rank.
#[derive(Debug)]
struct FileSet {
    tickets: Vec<Ticket>,
    /// The other ranks', by rank.
    files: Vec<Option<Mapped>>,
}

impl FileSet {
    fn map(tickets: &[Ticket], own: usize, bytes: usize) -> io::Result<Self> {
        let map = |(rank, ticket): (usize, &Ticket)| (rank != own).then(|| ticket.map(bytes)).transpose();
        Ok(Self { tickets: tickets.to_vec(), files: tickets.iter().enumerate().map(map).collect::<io::Result<_>>()? })
    }
}

impl AddressSpace for MpiCommunicator {
    fn lend_windows(&self, vector: SliceMut<'_>, work: &mut Work<'_>) -> Result<bool> {
        let operation = Operation::LendWindows;
        let (rank, world_size, len, dtype) = (self.rank(), self.world_size(), vector.len(), vector.dtype());
        let window = len / world_size;
        self.check_shards(operation, ("vector", len, dtype), ("windows", window, dtype))?;
        let ticket = Ticket::of(vector.as_slice().as_bytes()).filter(|_| !self.neighbours.are_apart.get());
        let Some(ticket) = ticket else { return Ok(false) };
        // Behind the call nothing may fail before the loan has begun: tickets that do not travel with it, of thousands of ranks, do not travel.
        if !self.meeting.encloses(size_of_val(&ticket.words())) {
            return Ok(false);
        }
        let words = self.gather(Call::new(operation, len, dtype), &ticket.words())?;
        // From here on another rank may use this one's memory, even if this one fails.
        let loan = Loan { meeting: &self.meeting };
        let ticket = |words: &[u64]| Ticket::of_words(words.try_into().expect("as many as it has"));
        let tickets: Vec<Ticket> = words.chunks_exact(Ticket::WORDS).map(ticket).collect();
        let Some(set) = self.map(&tickets, len * dtype.size_bytes())? else { return Ok(false) };

        let (own, bytes) = (vector.as_bytes_mut().as_mut_ptr(), window * dtype.size_bytes());
        let window = |file: &Option<Mapped>| {
            let start = file.as_ref().map_or(own, Mapped::start).wrapping_add(rank * bytes);
            // SAFETY: every rank's vector has this window, by the compared calls, and lies at the start of its file, or it would have no ticket;
            // their owners stay in this call, which has borrowed them, until no rank works any more; no other rank has the window of this
            // one's number.
            SliceMut::of_bytes(dtype, unsafe { std::slice::from_raw_parts_mut(start, bytes) })
        };
        let windows = set.files.iter().map(window).collect();
        // What the others have written before they came is seen from here on.
        fence(Ordering::SeqCst);
        let outcome = work(windows).map_err(|error| match self.meeting.check(operation) {
            Ok(()) => self.meeting.refuse(operation, error),
            Err(_) => error,
        });
        drop(loan);
        outcome?;
        self.meeting.check(operation)?;
        Ok(true)
    }
}

impl MpiCommunicator {
    /// The files of these tickets, of at least so many bytes each; `None`, on every rank, if one of them cannot map another's.
    fn map(&self, tickets: &[Ticket], bytes: usize) -> Result<Option<Arc<FileSet>>> {
        let mut sets = self.neighbours.sets.borrow_mut();
        if let Some(set) = sets.iter().find(|set| set.tickets == tickets) {
            return Ok(Some(set.clone()));
        }
        let own = |set: &FileSet| set.tickets[self.rank()];
        sets.retain(|set| own(set).is_own() && set.files.iter().flatten().all(Mapped::has_owner));
        let set = FileSet::map(tickets, self.rank(), bytes);
        if let Err(error) = &set {
            tracing::info!(rank = self.rank(), %error, "ranks do not reach each other's memory, and send messages");
        }
        let can_map = self.gather(SetUp::Map.call(), &[u64::from(set.is_ok())])?;
        let Some(set) = set.ok().filter(|_| !can_map.contains(&0)) else {
            self.neighbours.are_apart.set(true);
            return Ok(None);
        };
        let set = Arc::new(set);
        sets.push(set.clone());
        Ok(Some(set))
    }
}

/// This rank's part in a loan: dropped when its work has ended, even if that panicked or never began.
struct Loan<'a> {
    meeting: &'a Meeting,
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let (operation, rank) = (Operation::LendWindows, self.meeting.channel().rank());
            let error = CommError::PeerGone { operation, rank, departure: Departure::Panicked };
            self.meeting.note(Failure { error, is_news: true });
        }
        // What this rank has written is seen by whoever hears that it has ended.
        fence(Ordering::SeqCst);
        self.meeting.end_loan();
        fence(Ordering::SeqCst);
    }
}
