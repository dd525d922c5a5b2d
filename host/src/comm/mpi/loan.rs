//! Windows of vectors that ranks lend each other, where all are processes of one machine and each can map the files that the others' vectors
//! lie in.
//!
//! A loan begins with a collective and ends once every rank has said that its work is over, however that went. A rank that does not say so
//! within the deadline, as one that is stopped, is a failure. After a failure the others get the deadline to end, unless they are the ones that
//! were waited for. Memory that a rank still has then is [taken back](file::take_back): what this process has at that address is a copy, and
//! the rank goes on with the old file, where nobody looks.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;

use super::boards::{self, Boards};
use super::channel::Record;
use super::meeting::{Failure, Meeting, Wait, end_of_loan, known, mismatch};
use super::{MpiCommunicator, SetUp};
use crate::call::scope;
use crate::comm::Ranks;
use crate::comm::collective::check_shards;
use crate::error::{Call, CommError, Departure, Operation, Result};
use crate::memory::file::{self, Mapped, MemoryFile, Ticket};
use crate::memory::{SharedWindows, Work};
use crate::slice::SliceMut;

/// Says, with any value but `0`, that ranks send each other messages even if they could reach each other's memory.
const MESSAGES_ONLY: &str = "GRADSYNC_MPI_MESSAGES_ONLY";

/// What ranks know of each other's memory: the same on all of them.
#[derive(Debug, Default)]
pub(super) struct Neighbours {
    /// Whether one of them could not map another's vector, and none tries again.
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

impl SharedWindows for MpiCommunicator {
    fn with_windows(&self, vector: SliceMut<'_>, work: &mut Work<'_>) -> Result<bool> {
        let operation = Operation::LendWindows;
        let (rank, world_size, len, dtype) = (self.rank(), self.world_size(), vector.len(), vector.dtype());
        let window = len / world_size;
        check_shards("with_windows", world_size, ("vector", len, dtype), ("windows", window, dtype))
            .map_err(|error| self.meeting.refuse(operation, error))?;
        let Some(boards) = self.meeting.boards().filter(|_| !self.neighbours.are_apart.get()) else { return Ok(false) };
        let Some(ticket) = Ticket::of(vector.as_slice().as_bytes()) else { return Ok(false) };
        let scope = scope::within(operation);
        let tickets = self.tickets(Call::new(operation, len, dtype), ticket)?;
        // From here on another rank may use this one's memory, even if this one fails.
        let own = vector.as_bytes_mut();
        let loan = Loan::begin(&self.meeting, boards, own);
        let own = own.as_mut_ptr();
        let Some(set) = self.map(&tickets, len * dtype.size_bytes())? else {
            drop(loan);
            return self.meeting.check(operation).map(|()| false);
        };

        let bytes = window * dtype.size_bytes();
        let window = |file: &Option<Mapped>| {
            let start = file.as_ref().map_or(own, Mapped::start).wrapping_add(rank * bytes);
            // SAFETY: every rank's vector has this window, by the compared calls, and lies at the start of its file, or it would have no ticket;
            // their owners stay in this call, which has borrowed them, until no rank works any more, or have taken back what they use from then on;
            // no other rank has the window of this one's number.
            SliceMut::of_bytes(dtype, unsafe { std::slice::from_raw_parts_mut(start, bytes) })
        };
        let windows = set.files.iter().map(window).collect();
        drop(scope);
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
    /// Puts up boards, if all ranks are processes of one machine that can map each other's. All ranks have to call it, first of all.
    pub(super) fn put_up_boards(&mut self) -> Result<()> {
        if !(2..=boards::MOST_RANKS).contains(&self.world_size()) {
            return Ok(());
        }
        let messages_only = std::env::var_os(MESSAGES_ONLY).is_some_and(|value| value != "0");
        let board = (!messages_only).then(Boards::make).and_then(|made| self.or_log(made));
        let ticket = board.as_ref().and_then(|board| Ticket::of(board.bytes())).unwrap_or(Ticket::NONE);
        let tickets = self.tickets(SetUp::Boards.call(), ticket)?;
        let found =
            if tickets.contains(&Ticket::NONE) { None } else { self.or_log(Boards::find(&tickets, self.rank())) };
        if let Some(boards) = self.if_all_have(found)? {
            board.into_iter().for_each(MemoryFile::leave);
            self.meeting.set_boards(boards);
        }
        Ok(())
    }

    fn or_log<T>(&self, outcome: io::Result<T>) -> Option<T> {
        if let Err(error) = &outcome {
            tracing::info!(rank = self.rank(), %error, "ranks do not reach each other's memory, and send messages");
        }
        outcome.ok()
    }

    /// What this rank has mapped, if all others have mapped theirs too.
    fn if_all_have<T>(&self, own: Option<T>) -> Result<Option<T>> {
        let have = self.gather(SetUp::Map.call(), &[u64::from(own.is_some())])?;
        Ok(own.filter(|_| !have.contains(&0)))
    }

    /// All ranks' tickets, by rank.
    fn tickets(&self, call: Call, own: Ticket) -> Result<Vec<Ticket>> {
        let words = self.gather(call, &own.words())?;
        let ticket = |words: &[u64]| Ticket::of_words(words.try_into().expect("as many as it has"));
        Ok(words.chunks_exact(Ticket::WORDS).map(ticket).collect())
    }

    /// The files of these tickets, of at least so many bytes each; `None`, on every rank, if one of them cannot map another's.
    fn map(&self, tickets: &[Ticket], bytes: usize) -> Result<Option<Arc<FileSet>>> {
        let mut sets = self.neighbours.sets.borrow_mut();
        if let Some(set) = sets.iter().find(|set| set.tickets == tickets) {
            return Ok(Some(set.clone()));
        }
        let own = |set: &FileSet| set.tickets[self.rank()];
        sets.retain(|set| own(set).is_own() && set.files.iter().flatten().all(Mapped::has_owner));
        let Some(set) = self.if_all_have(self.or_log(FileSet::map(tickets, self.rank(), bytes)))? else {
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
    boards: &'a Boards,
    /// What this rank lends the others.
    own: *mut [u8],
}

impl<'a> Loan<'a> {
    fn begin(meeting: &'a Meeting, boards: &'a Boards, own: &mut [u8]) -> Self {
        boards.begin_loan();
        Self { meeting, boards, own }
    }

    /// Waits until all ranks have said that they use nothing of this one's any more, even those that have failed, or takes it from them.
    fn wait_for_all(&self) {
        let Self { meeting, boards, .. } = *self;
        let (mut wait, mut grace) = (Wait::new(Some(meeting.deadline())), None);
        while !boards.have_all_ended() {
            if wait.is_time_to_listen() {
                self.note(self.listen());
                let missing: Vec<usize> =
                    meeting.channel().others().filter(|&peer| boards.has_ended(peer).is_none()).collect();
                if missing.is_empty() {
                    continue;
                }
                if !meeting.has_failed() && wait.is_over() {
                    self.give_up(missing);
                } else if meeting.has_failed() {
                    let grace = grace.get_or_insert_with(|| Wait::new(Some(meeting.deadline())));
                    if grace.is_over() || missing.iter().all(|&peer| meeting.was_late(peer)) {
                        return self.take_back();
                    }
                }
            }
            wait.pause();
        }
    }

    fn give_up(&self, mut missing: Vec<usize>) {
        missing.sort_unstable();
        let (operation, deadline) = (Operation::LendWindows, self.meeting.deadline());
        let own = Failure { error: CommError::Timeout { operation, missing, deadline }, is_news: true };
        self.note(self.meeting.give_up(own, Boards::close_loans).map_or(Ok(()), Err));
    }

    fn take_back(&self) {
        // SAFETY: borrowed by the call that this loan is part of, where nothing uses it now.
        if let Err(error) = unsafe { file::take_back(self.own) } {
            let rank = self.meeting.channel().rank();
            tracing::error!(rank, %error, "a rank keeps what it was lent after a failure: aborting the MPI job");
            self.meeting.channel().abort(1);
        }
    }

    /// Hears why a rank has failed that says on its board that it has.
    fn hear_failure(&self) {
        let Self { meeting, boards, .. } = *self;
        let Some(peer) = meeting.channel().others().find(|&peer| boards.has_ended(peer) == Some(true)) else { return };
        let mut wait = Wait::new(Some(meeting.deadline()));
        while !meeting.has_failed() {
            self.note(self.listen());
            if wait.is_over() {
                let reason = "it says that it has failed, and not with what".into();
                let error = CommError::Transport { operation: Operation::LendWindows, rank: peer, reason };
                self.note(Err(Failure { error, is_news: true }));
            }
            wait.pause();
        }
    }

    /// What goes against this rank's having ended its work.
    fn listen(&self) -> Result<(), Failure> {
        let Self { meeting, boards, .. } = *self;
        let (channel, rank) = (meeting.channel(), meeting.channel().rank());
        meeting.pump(Operation::LendWindows)?;
        meeting.look_for_failure()?;
        if let Some(error) = boards.closed_loans() {
            return Err(known(&error));
        }
        for peer in channel.others() {
            let offered = channel.inbox()[peer].iter().find_map(|record| match record {
                Record::Offer { call, .. } => Some(*call),
                _ => None,
            });
            let call = boards.call_ahead(peer).or(offered);
            // Read in this order: a rank ends its loan before it goes on.
            if let (Some(call), None) = (call, boards.has_ended(peer)) {
                return Err(mismatch((rank, end_of_loan()), (peer, call)));
            }
        }
        Ok(())
    }

    /// Keeps the first failure.
    fn note(&self, outcome: Result<(), Failure>) {
        if let Err(failure) = outcome {
            if !self.meeting.has_failed() {
                self.meeting.fail(Operation::LendWindows, failure);
            }
        }
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let (operation, rank) = (Operation::LendWindows, self.meeting.channel().rank());
            let error = CommError::PeerGone { operation, rank, departure: Departure::Panicked };
            self.note(Err(Failure { error, is_news: true }));
        }
        let ended = self.boards.end_loan(self.meeting.has_failed());
        self.note(ended.map_err(|error| known(&error)));
        self.wait_for_all();
        self.hear_failure();
        if !self.meeting.has_failed() {
            self.meeting.count_completed();
        }
    }
}
