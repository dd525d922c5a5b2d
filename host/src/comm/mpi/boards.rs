//! Boards: where ranks of one machine meet without messages. Every rank writes to its own, and all others read it.
//!
//! Ranks come to rounds, all to the same ones in the same order. Whoever comes to one writes its word, and what it brings to it, and then the
//! number of the round; the others look until that is there. A rank comes to the next round once it has read everybody's word of this one,
//! so nobody is more than one round ahead, and two places for words are enough; as many for data, used in turn by the rounds that bring some.
//!
//! Whoever waits in vain closes the round: it leaves its failure on its own board, and marks the [`Steps`] of the first rank that has not come,
//! which can come no more. So a round has all ranks or it never will, each rank finds the same of it, and a process that was stopped learns
//! what the others have decided when it goes on. The ends of loans are closed in the same way.
//!
//! Never waits. Other failures travel as records, and a rank that has failed comes to no more rounds.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::channel::{Record, shortened};
use crate::error::{Call, CommError};
use crate::memory::file::{Mapped, MemoryFile, Ticket};

/// What all ranks together bring to a call, at most; each has room for as much. Half and twice that were slower.
pub(super) const TOGETHER_BYTES: usize = 256 << 10;
/// Ranks that look at each other's boards, at most: everyone looks at everybody's.
pub(super) const MOST_RANKS: usize = 1024;

/// Where things stand on a board: what others wait for is on cache lines of its own.
const ROUND_AT: usize = 0;
const LOANS_AT: usize = 64;
const FAILED_LOAN_AT: usize = 72;
const WORDS_AT: usize = 128;
const WORD_BYTES: usize = 256;
/// What a rank has failed with that has closed a round, or a loan's end.
const FAILURE_AT: usize = 1024;
const FAILURE_BYTES: usize = 2048;
const DATA_AT: usize = 4096;
const BOARD_BYTES: usize = DATA_AT + 2 * TOGETHER_BYTES;
/// Looks at a board before its reader does something else.
const LOOKS: usize = 20;

/// What a rank brings to a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Brings<'a> {
    bytes: &'a [u8],
    /// A piece of them for every rank, in order; otherwise all of them for everyone.
    are_shards: bool,
}

impl<'a> Brings<'a> {
    pub(super) const NOTHING: Brings<'static> = Brings { bytes: &[], are_shards: false };

    pub(super) fn for_all(bytes: &'a [u8]) -> Self {
        Self { bytes, are_shards: false }
    }

    pub(super) fn shards(bytes: &'a [u8]) -> Self {
        Self { bytes, are_shards: true }
    }

    /// What it is for one of so many ranks.
    pub(super) fn piece(self, rank: usize, world_size: usize) -> &'a [u8] {
        if !self.are_shards {
            return self.bytes;
        }
        let bytes = self.bytes.len() / world_size;
        &self.bytes[rank * bytes..(rank + 1) * bytes]
    }
}

/// What stands on a board for a round.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Word {
    /// Without what a call encloses: that lies beside it.
    pub(super) record: Record,
    brought: usize,
    are_shards: bool,
}

/// A number on a rank's board that this rank raises, one by one, until another closes it. Both are one atomic operation on the same word,
/// so that a step was made or never will be, and all ranks see the same.
struct Steps<'a>(&'a AtomicU64);

impl Steps<'_> {
    /// In the bits above there is one more than the rank that has closed it, if one has.
    const NUMBER_BITS: u32 = 48;

    fn number(&self) -> u64 {
        Self::number_of(self.0.load(Ordering::Acquire))
    }

    fn number_of(word: u64) -> u64 {
        word & ((1 << Self::NUMBER_BITS) - 1)
    }

    fn closer_of(word: u64) -> Option<usize> {
        (word >> Self::NUMBER_BITS).checked_sub(1).map(|rank| rank as usize)
    }

    fn closer(&self) -> Option<usize> {
        Self::closer_of(self.0.load(Ordering::Acquire))
    }

    /// Makes the step to a number; what was written before is there for whoever sees it. Not if a rank has closed it, which is given back.
    fn raise(&self, to: u64) -> Result<(), usize> {
        let raised = self.0.compare_exchange(to - 1, to, Ordering::AcqRel, Ordering::Acquire);
        raised.map(drop).map_err(|word| Self::closer_of(word).expect("nobody else raises it"))
    }

    /// Closes it as this rank, unless the step to this number has been made. Gives back who has closed it.
    fn close(&self, before: u64, rank: usize) -> Option<usize> {
        let mark = (rank as u64 + 1) << Self::NUMBER_BITS;
        let is_open = |word| (Self::number_of(word) < before && Self::closer_of(word).is_none()).then_some(word | mark);
        match self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, is_open) {
            Ok(_) => Some(rank),
            Err(word) if Self::number_of(word) < before => Self::closer_of(word),
            Err(_) => None,
        }
    }
}

/// One rank's board, as this process has it mapped.
#[derive(Debug)]
struct Board(Mapped);

impl Board {
    fn number(&self, at: usize) -> &AtomicU64 {
        // SAFETY: within the board, aligned, and never anything else.
        unsafe { &*self.0.start().add(at).cast() }
    }

    /// Rounds that its rank has come to.
    fn rounds(&self) -> Steps<'_> {
        Steps(self.number(ROUND_AT))
    }

    /// Loans that it has ended.
    fn loans(&self) -> Steps<'_> {
        Steps(self.number(LOANS_AT))
    }

    /// Where the word of a round stands.
    fn word(&self, round: u64) -> *mut [u8; WORD_BYTES] {
        self.0.start().wrapping_add(WORDS_AT + (round % 2) as usize * WORD_BYTES).cast()
    }

    fn failure(&self) -> *mut [u8; FAILURE_BYTES] {
        self.0.start().wrapping_add(FAILURE_AT).cast()
    }

    /// Where the data of a call lie.
    fn data(&self, call: u64) -> *mut u8 {
        self.0.start().wrapping_add(DATA_AT + (call % 2) as usize * TOGETHER_BYTES)
    }

    /// Whether it says that so many loans have ended, and if so, whether its rank had failed by the end of the last of these. It may have ended
    /// more since, and failed in those.
    fn has_ended(&self, loans: u64) -> Option<bool> {
        if self.loans().number() < loans {
            return None;
        }
        let failed = self.number(FAILED_LOAN_AT).load(Ordering::Relaxed);
        Some((1..=loans).contains(&failed))
    }
}

/// All ranks' boards, of which one is this rank's.
#[derive(Debug)]
pub(super) struct Boards {
    rank: usize,
    boards: Vec<Board>,
    /// Rounds that this rank has come to.
    round: Cell<u64>,
    /// Those of them to which it brought something: calls, and turns.
    calls: Cell<u64>,
    /// Loans of this communicator that this rank is in, and those that have ended here.
    open_loans: Cell<u64>,
    ended_loans: Cell<u64>,
}

impl Boards {
    /// The memory of a board, for this rank.
    pub(super) fn make() -> io::Result<MemoryFile> {
        MemoryFile::zeroed(BOARD_BYTES)
    }

    /// Finds everybody's, by rank. Its maker may drop a board once all have found it: it stays for as long as somebody has it mapped.
    pub(super) fn find(tickets: &[Ticket], rank: usize) -> io::Result<Self> {
        let boards = tickets.iter().map(|ticket| ticket.map(BOARD_BYTES).map(Board)).collect::<io::Result<_>>()?;
        let zero = || Cell::new(0);
        Ok(Self { rank, boards, round: zero(), calls: zero(), open_loans: zero(), ended_loans: zero() })
    }

    fn own(&self) -> &Board {
        &self.boards[self.rank]
    }

    fn others(&self) -> impl Iterator<Item = &Board> {
        self.boards.iter().enumerate().filter(|&(rank, _)| rank != self.rank).map(|(_, board)| board)
    }

    /// Comes to the next round with this word, and, if it is a call, with what it brings to that.
    ///
    /// # Errors
    /// What the others have failed with that waited in vain, and have closed the round.
    pub(super) fn come(&self, record: &Record, brings: Brings<'_>) -> Result<(), CommError> {
        let round = self.round.get() + 1;
        if let Record::Call { .. } = record {
            self.calls.set(self.calls.get() + 1);
            assert!(brings.bytes.len() <= TOGETHER_BYTES, "{} bytes", brings.bytes.len());
            // SAFETY: room for so many; nobody reads what lies there, of the call before the last.
            unsafe {
                let data = self.own().data(self.calls.get());
                std::ptr::copy_nonoverlapping(brings.bytes.as_ptr(), data, brings.bytes.len());
            }
        }
        let word = Word { record: record.clone(), brought: brings.bytes.len(), are_shards: brings.are_shards };
        let mut room = [0; WORD_BYTES];
        postcard::to_slice(&word, &mut room).expect("a word has room");
        // SAFETY: on this rank's board; nobody reads what stands there, of the round before the last.
        unsafe { self.own().word(round).write(room) };
        self.round.set(round);
        self.own().rounds().raise(round).map_err(|closer| self.failure_of(closer))
    }

    /// Closes this rank's last round to those that have not come, with this failure. Gives back the one that it was closed with, and by whom: another
    /// rank may have been faster. Nothing, if all have come after all.
    pub(super) fn close_round(&self, failure: &CommError) -> Option<(usize, CommError)> {
        self.close(failure, Board::rounds, self.round.get())
    }

    /// What this rank's last round was closed with, if it was; looks at those that have not come.
    pub(super) fn closed_round(&self) -> Option<CommError> {
        self.closed(Board::rounds, self.round.get())
    }

    /// Closes the end of the loans that this rank has ended, in the same way.
    pub(super) fn close_loans(&self, failure: &CommError) -> Option<(usize, CommError)> {
        self.close(failure, Board::loans, self.ended_loans.get())
    }

    pub(super) fn closed_loans(&self) -> Option<CommError> {
        self.closed(Board::loans, self.ended_loans.get())
    }

    /// All ranks that close something try the same boards in the same order, and one of these is closed once, by one of them: they agree.
    fn close(&self, failure: &CommError, of: fn(&Board) -> Steps<'_>, before: u64) -> Option<(usize, CommError)> {
        let record = shortened(Record::Failed { completed: 0, error: failure.clone() });
        let mut room = [0; FAILURE_BYTES];
        postcard::to_slice(&record, &mut room).expect("a failure has room");
        // SAFETY: on this rank's board; nobody reads it before this rank has closed something, which it does once.
        unsafe { self.own().failure().write(room) };
        let closer = self.boards.iter().find_map(|board| of(board).close(before, self.rank))?;
        Some((closer, self.failure_of(closer)))
    }

    fn closed(&self, of: fn(&Board) -> Steps<'_>, before: u64) -> Option<CommError> {
        let missing = self.others().map(of).filter(|steps| steps.number() < before);
        missing.filter_map(|steps| steps.closer()).next().map(|closer| self.failure_of(closer))
    }

    /// What a rank has failed with that has closed something.
    fn failure_of(&self, closer: usize) -> CommError {
        // SAFETY: written before it closed anything, and never again.
        let room = unsafe { self.boards[closer].failure().read() };
        match postcard::from_bytes(&room).unwrap_or_else(|error| Record::unreadable(closer, &error)) {
            Record::Failed { error, .. } => error,
            record => unreachable!("{record:?}"),
        }
    }

    /// Whether a rank has come to this rank's last round.
    pub(super) fn is_here(&self, peer: usize) -> bool {
        self.has_come(&self.boards[peer], self.round.get())
    }

    fn has_come(&self, board: &Board, round: u64) -> bool {
        board.rounds().number() >= round
    }

    /// Whether all others have; looks for a moment.
    pub(super) fn are_all_here(&self) -> bool {
        let round = self.round.get();
        self.look(|board| self.has_come(board, round))
    }

    fn look(&self, is_so: impl Fn(&Board) -> bool) -> bool {
        (0..LOOKS).any(|_| {
            let is_so = self.others().all(&is_so);
            if !is_so {
                std::hint::spin_loop();
            }
            is_so
        })
    }

    /// The word of a rank that [is here](Self::is_here), for this rank's last round.
    pub(super) fn word(&self, peer: usize) -> Word {
        self.read(peer, self.round.get())
    }

    /// The call of a rank that has come to one which this rank has not come to.
    pub(super) fn call_ahead(&self, peer: usize) -> Option<Call> {
        let round = self.round.get() + 1;
        if !self.has_come(&self.boards[peer], round) {
            return None;
        }
        match self.read(peer, round).record {
            Record::Call { call, .. } => Some(call),
            _ => None,
        }
    }

    /// `round` is this rank's last one or the next.
    fn read(&self, peer: usize, round: u64) -> Word {
        // SAFETY: its rank does not write there before this one comes to the next round.
        let room = unsafe { self.boards[peer].word(round).read() };
        postcard::from_bytes(&room).unwrap_or_else(|error| Word {
            record: Record::unreadable(peer, &error),
            brought: 0,
            are_shards: false,
        })
    }

    /// What a rank has brought to the last call for this rank, by its word of that; it stays until this rank comes to the next call.
    pub(super) fn brought(&self, peer: usize, word: &Word) -> &[u8] {
        let bytes = word.brought.min(TOGETHER_BYTES);
        // SAFETY: that much room; its rank does not write there before this one comes to the next call.
        let bytes = unsafe { std::slice::from_raw_parts(self.boards[peer].data(self.calls.get()), bytes) };
        Brings { bytes, are_shards: word.are_shards }.piece(self.rank, self.boards.len())
    }

    /// Where this rank puts what it brings to the round after the next [`turn`](Self::turn). [`TOGETHER_BYTES`], aligned for all dtypes; nobody
    /// reads there until this rank comes to that round.
    pub(super) fn next_place(&self) -> *mut u8 {
        self.own().data(self.calls.get() + 1)
    }

    /// What is in the next place is what this rank brings from now on: as much as in a call, but not said.
    pub(super) fn turn(&self) {
        self.calls.set(self.calls.get() + 1);
    }

    /// What a rank that is here has brought to this rank's last round, behind a turn of all ranks. It stays until this rank comes to the next.
    pub(super) fn place(&self, peer: usize) -> *const u8 {
        self.boards[peer].data(self.calls.get()).cast_const()
    }

    /// Begins a loan, which all ranks do after a call.
    pub(super) fn begin_loan(&self) {
        self.open_loans.set(self.open_loans.get() + 1);
    }

    /// Whether ranks use each other's memory, and will not return before all have said that they do not.
    pub(super) fn are_lent(&self) -> bool {
        self.open_loans.get() > 0
    }

    /// Says that this rank uses nothing of the last loan any more, and whether it has failed.
    ///
    /// # Errors
    /// What the others have failed with that waited for this in vain.
    pub(super) fn end_loan(&self, has_failed: bool) -> Result<(), CommError> {
        self.open_loans.set(self.open_loans.get() - 1);
        self.ended_loans.set(self.ended_loans.get() + 1);
        let (ended, failed) = (self.ended_loans.get(), self.own().number(FAILED_LOAN_AT));
        let has_failed_in = || {
            if failed.load(Ordering::Relaxed) == 0 {
                failed.store(ended, Ordering::Relaxed);
            }
        };
        if has_failed {
            has_failed_in();
        }
        // What was written into the others' memory is there for whoever sees this.
        self.own().loans().raise(ended).map_err(|closer| {
            has_failed_in();
            // Its mark stays: some may wait for this even so, and it is no success to any.
            self.own().number(LOANS_AT).fetch_add(1, Ordering::Release);
            self.failure_of(closer)
        })
    }

    /// Whether all others have ended every loan that this rank has; looks for a moment.
    pub(super) fn have_all_ended(&self) -> bool {
        let ended = self.ended_loans.get();
        self.look(|board| board.has_ended(ended).is_some())
    }

    /// Whether a rank has ended the loans that this rank has, and if so, whether it had failed.
    pub(super) fn has_ended(&self, peer: usize) -> Option<bool> {
        self.boards[peer].has_ended(self.ended_loans.get())
    }

    /// Whether a rank that has not failed has ended a loan in which this rank still is.
    pub(super) fn has_ended_early(&self, peer: usize) -> bool {
        self.boards[peer].has_ended(self.ended_loans.get() + 1) == Some(false)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::error::Operation;

    const RANKS: usize = 3;

    /// What each of some ranks would have, all in this process.
    fn ranks() -> Vec<Boards> {
        let files: Vec<MemoryFile> = (0..RANKS).map(|_| Boards::make().unwrap()).collect();
        let tickets: Vec<Ticket> = files.iter().map(|file| Ticket::of(file.bytes()).expect("a file")).collect();
        (0..RANKS).map(|rank| Boards::find(&tickets, rank).unwrap()).collect()
    }

    fn call(len: usize) -> Record {
        Record::Call { call: Call::of(Operation::Barrier, len, None), enclosed: Default::default() }
    }

    #[test]
    fn boards_outlive_their_makers_and_whoever_leaves_first() {
        let mut ranks = ranks();
        for boards in &ranks {
            boards.come(&call(7), Brings::NOTHING).unwrap();
        }
        let last = ranks.pop().unwrap();
        drop(ranks);
        assert!(last.are_all_here());
        assert_eq!((last.word(0).record, last.word(1).record), (call(7), call(7)));
    }

    #[test]
    fn what_is_brought_stays_until_the_next_call_and_may_be_a_round_late() {
        let ranks = ranks();
        for round in 0..10u8 {
            let numbers: Vec<[u8; RANKS]> = (0..RANKS as u8).map(|rank| [round, rank, 100 + rank]).collect();
            // Rank 0 is a round ahead of the others, each time.
            for (boards, number) in ranks.iter().zip(&numbers) {
                let are_shards = round % 2 == 1;
                boards.come(&call(round.into()), Brings { bytes: number, are_shards }).unwrap();
            }
            let words: Vec<Vec<Word>> =
                ranks.iter().map(|boards| (0..RANKS).map(|peer| boards.word(peer)).collect()).collect();
            ranks[0].come(&Record::Go, Brings::NOTHING).unwrap();
            assert!(ranks[1].is_here(0) && !ranks[0].is_here(1) && !ranks[0].are_all_here());
            for (rank, (boards, words)) in ranks.iter().zip(&words).enumerate() {
                for (peer, word) in words.iter().enumerate() {
                    assert_eq!(word.record, call(round.into()));
                    let number = &numbers[peer];
                    let expected = if round % 2 == 1 { &number[rank..rank + 1] } else { &number[..] };
                    assert_eq!(boards.brought(peer, word), expected);
                }
            }
            ranks[1..].iter().for_each(|boards| boards.come(&Record::Go, Brings::NOTHING).unwrap());
            assert!(ranks.iter().all(Boards::are_all_here));
        }
    }

    #[test]
    fn the_most_that_can_be_brought() {
        let ranks = ranks();
        let bytes: Vec<u8> = (0..TOGETHER_BYTES).map(|index| (index % 251) as u8).collect();
        for _ in 0..3 {
            ranks.iter().for_each(|boards| boards.come(&call(1), Brings::for_all(&bytes)).unwrap());
            assert!(ranks[1].brought(2, &ranks[1].word(2)) == bytes);
        }
    }

    #[test]
    fn a_call_ahead_is_seen_and_a_word_that_is_none_is_not() {
        let ranks = ranks();
        assert_eq!(ranks[1].call_ahead(0), None);
        ranks[0].come(&call(5), Brings::NOTHING).unwrap();
        let ahead = ranks[1].call_ahead(0).expect("rank 0 has come");
        assert_eq!(ahead.len, 5);
        ranks[1..].iter().for_each(|boards| boards.come(&call(5), Brings::NOTHING).unwrap());
        assert_eq!(ranks[1].call_ahead(0), None, "it is here");
        ranks[0].come(&Record::Go, Brings::NOTHING).unwrap();
        assert_eq!(ranks[1].call_ahead(0), None, "of the same collective");
    }

    #[test]
    fn loans_end_for_each_rank_on_its_own() {
        let ranks = ranks();
        ranks.iter().for_each(|boards| (0..2).for_each(|_| boards.begin_loan()));
        assert!(!ranks[0].has_ended_early(2));
        ranks[2].end_loan(false).unwrap();
        assert!(ranks[0].has_ended_early(2) && !ranks[2].has_ended_early(0));
        ranks[0].end_loan(true).unwrap();
        assert!(!ranks[1].has_ended_early(0), "it has failed, and says with what elsewhere");
        assert_eq!((ranks[0].has_ended(1), ranks[0].has_ended(2)), (None, Some(false)));
        assert!(!ranks[0].have_all_ended() && ranks[0].are_lent());
        ranks[1].end_loan(false).unwrap();
        assert!(ranks.iter().all(|boards| boards.have_all_ended()) && ranks[2].has_ended(0) == Some(true));
        ranks.iter().for_each(|boards| boards.end_loan(false).unwrap());
        assert!(ranks.iter().all(|boards| boards.have_all_ended() && !boards.are_lent()));
        assert_eq!(ranks[1].has_ended(0), Some(true), "it stays so");
    }

    #[test]
    fn who_fails_in_the_loan_around_has_ended_the_one_inside_well() {
        let ranks = ranks();
        ranks.iter().for_each(|boards| (0..2).for_each(|_| boards.begin_loan()));
        ranks.iter().for_each(|boards| boards.end_loan(false).unwrap());
        ranks[0].end_loan(true).unwrap();
        // The others look at the inner loan's end only now.
        assert_eq!((ranks[1].has_ended(0), ranks[1].has_ended_early(0)), (Some(false), false));
        ranks[1].end_loan(false).unwrap();
        assert_eq!(ranks[1].has_ended(0), Some(true));
    }

    fn late(rank: usize) -> CommError {
        let deadline = std::time::Duration::from_secs(1);
        CommError::Timeout { operation: Operation::Barrier, missing: vec![rank], deadline }
    }

    #[test]
    fn a_round_is_closed_once_and_by_one_rank() {
        let ranks = ranks();
        ranks.iter().for_each(|boards| boards.come(&call(5), Brings::NOTHING).unwrap());
        assert_eq!(ranks[0].close_round(&late(1)), None, "all have come");
        ranks[2].come(&Record::Go, Brings::NOTHING).unwrap();
        assert_eq!(ranks[2].close_round(&late(0)), Some((2, late(0))));
        assert!(ranks[0].are_all_here() && ranks[1].closed_round().is_none(), "the round before is what it was");
        assert_eq!(ranks[0].come(&Record::Go, Brings::NOTHING), Err(late(0)));
        ranks[1].come(&Record::Go, Brings::NOTHING).unwrap();
        assert!(!ranks[1].are_all_here());
        assert_eq!((ranks[1].closed_round(), ranks[1].close_round(&late(2))), (Some(late(0)), Some((2, late(0)))));
    }

    #[test]
    fn ranks_that_give_up_and_one_that_comes_find_the_same() {
        for _ in 0..200 {
            let ranks = ranks();
            let outcomes: Vec<_> = std::thread::scope(|scope| {
                let all = ranks.into_iter().enumerate();
                let threads: Vec<_> = all
                    .map(|(rank, boards)| {
                        scope.spawn(move || {
                            let come = boards.come(&call(5), Brings::NOTHING).err();
                            let given_up = || boards.close_round(&late(rank)).map(|(_, error)| error);
                            (come.or_else(given_up), boards)
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let (outcomes, _boards): (Vec<_>, Vec<_>) = outcomes.into_iter().unzip();
            assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{outcomes:?}");
        }
    }

    #[test]
    fn a_loan_that_others_have_given_up_ends_as_a_failure() {
        let ranks = ranks();
        ranks.iter().for_each(|boards| (0..2).for_each(|_| boards.begin_loan()));
        ranks.iter().for_each(|boards| boards.end_loan(false).unwrap());
        ranks[0].end_loan(false).unwrap();
        assert_eq!(ranks[0].close_loans(&late(1)), Some((0, late(1))));
        assert_eq!(ranks[1].end_loan(false), Err(late(1)));
        assert_eq!(ranks[2].has_ended(1), Some(false), "the one inside");
        ranks[2].end_loan(false).unwrap();
        assert_eq!(ranks[2].has_ended(1), Some(true));
    }

    #[test]
    fn what_another_version_writes_is_a_failure_of_its_rank() {
        let ranks = ranks();
        ranks[0].come(&call(5), Brings::NOTHING).unwrap();
        // SAFETY: its own board, which nobody reads now.
        unsafe { ranks[0].own().word(1).write([255; WORD_BYTES]) };
        ranks[1].come(&call(5), Brings::NOTHING).unwrap();
        let Record::Failed { error, .. } = ranks[1].word(0).record else { panic!("it was readable") };
        assert!(error.to_string().contains("rank 0 failed: it speaks another language"), "{error}");
        assert!(ranks[1].call_ahead(0).is_none());
    }
}
