//! Boards: where ranks of one machine meet without messages. Every rank writes to its own, and all others read it.
//!
//! Ranks come to rounds, all to the same ones in the same order. Whoever comes to one writes its word, and what it brings to it, and then the
//! number of the round; the others look until that is there. A rank comes to the next round once it has read everybody's word of this one,
//! so nobody is more than one round ahead, and two places for words are enough; as many for data, used in turn by the rounds that bring some.
//!
//! Never waits, and never tells of failures: those travel as records, and a rank that has failed comes to no more rounds.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::channel::Record;
use crate::error::Call;
use crate::memory::{Mapped, MemoryFile, Ticket};

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

/// One rank's board, as this process has it mapped.
#[derive(Debug)]
struct Board(Mapped);

impl Board {
    fn number(&self, at: usize) -> &AtomicU64 {
        // SAFETY: within the board, aligned, and never anything else.
        unsafe { &*self.0.start().add(at).cast() }
    }

    /// Where the word of a round stands.
    fn word(&self, round: u64) -> *mut [u8; WORD_BYTES] {
        self.0.start().wrapping_add(WORDS_AT + (round % 2) as usize * WORD_BYTES).cast()
    }

    /// Where the data of a call lie.
    fn data(&self, call: u64) -> *mut u8 {
        self.0.start().wrapping_add(DATA_AT + (call % 2) as usize * TOGETHER_BYTES)
    }

    /// Whether it says that so many loans have ended, and if so, whether its rank had failed by the end of the last of these. It may have ended
    /// more since, and failed in those.
    fn has_ended(&self, loans: u64) -> Option<bool> {
        if self.number(LOANS_AT).load(Ordering::Acquire) < loans {
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
    pub(super) fn come(&self, record: &Record, brings: Brings<'_>) {
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
        // What was written is there for whoever sees this.
        self.own().number(ROUND_AT).store(round, Ordering::Release);
    }

    /// Whether a rank has come to this rank's last round.
    pub(super) fn is_here(&self, peer: usize) -> bool {
        self.has_come(&self.boards[peer], self.round.get())
    }

    fn has_come(&self, board: &Board, round: u64) -> bool {
        board.number(ROUND_AT).load(Ordering::Acquire) >= round
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
    pub(super) fn end_loan(&self, has_failed: bool) {
        self.open_loans.set(self.open_loans.get() - 1);
        self.ended_loans.set(self.ended_loans.get() + 1);
        let (ended, failed) = (self.ended_loans.get(), self.own().number(FAILED_LOAN_AT));
        if has_failed && failed.load(Ordering::Relaxed) == 0 {
            failed.store(ended, Ordering::Relaxed);
        }
        // What was written into the others' memory is there for whoever sees this.
        self.own().number(LOANS_AT).store(ended, Ordering::Release);
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
            boards.come(&call(7), Brings::NOTHING);
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
                boards.come(&call(round.into()), Brings { bytes: number, are_shards });
            }
            let words: Vec<Vec<Word>> =
                ranks.iter().map(|boards| (0..RANKS).map(|peer| boards.word(peer)).collect()).collect();
            ranks[0].come(&Record::Go, Brings::NOTHING);
            assert!(ranks[1].is_here(0) && !ranks[0].is_here(1) && !ranks[0].are_all_here());
            for (rank, (boards, words)) in ranks.iter().zip(&words).enumerate() {
                for (peer, word) in words.iter().enumerate() {
                    assert_eq!(word.record, call(round.into()));
                    let number = &numbers[peer];
                    let expected = if round % 2 == 1 { &number[rank..rank + 1] } else { &number[..] };
                    assert_eq!(boards.brought(peer, word), expected);
                }
            }
            ranks[1..].iter().for_each(|boards| boards.come(&Record::Go, Brings::NOTHING));
            assert!(ranks.iter().all(Boards::are_all_here));
        }
    }

    #[test]
    fn the_most_that_can_be_brought() {
        let ranks = ranks();
        let bytes: Vec<u8> = (0..TOGETHER_BYTES).map(|index| (index % 251) as u8).collect();
        for _ in 0..3 {
            ranks.iter().for_each(|boards| boards.come(&call(1), Brings::for_all(&bytes)));
            assert!(ranks[1].brought(2, &ranks[1].word(2)) == bytes);
        }
    }

    #[test]
    fn a_call_ahead_is_seen_and_a_word_that_is_none_is_not() {
        let ranks = ranks();
        assert_eq!(ranks[1].call_ahead(0), None);
        ranks[0].come(&call(5), Brings::NOTHING);
        let ahead = ranks[1].call_ahead(0).expect("rank 0 has come");
        assert_eq!(ahead.len, 5);
        ranks[1..].iter().for_each(|boards| boards.come(&call(5), Brings::NOTHING));
        assert_eq!(ranks[1].call_ahead(0), None, "it is here");
        ranks[0].come(&Record::Go, Brings::NOTHING);
        assert_eq!(ranks[1].call_ahead(0), None, "of the same collective");
    }

    #[test]
    fn loans_end_for_each_rank_on_its_own() {
        let ranks = ranks();
        ranks.iter().for_each(|boards| (0..2).for_each(|_| boards.begin_loan()));
        assert!(!ranks[0].has_ended_early(2));
        ranks[2].end_loan(false);
        assert!(ranks[0].has_ended_early(2) && !ranks[2].has_ended_early(0));
        ranks[0].end_loan(true);
        assert!(!ranks[1].has_ended_early(0), "it has failed, and says with what elsewhere");
        assert_eq!((ranks[0].has_ended(1), ranks[0].has_ended(2)), (None, Some(false)));
        assert!(!ranks[0].have_all_ended() && ranks[0].are_lent());
        ranks[1].end_loan(false);
        assert!(ranks.iter().all(|boards| boards.have_all_ended()) && ranks[2].has_ended(0) == Some(true));
        ranks.iter().for_each(|boards| boards.end_loan(false));
        assert!(ranks.iter().all(|boards| boards.have_all_ended() && !boards.are_lent()));
        assert_eq!(ranks[1].has_ended(0), Some(true), "it stays so");
    }

    #[test]
    fn who_fails_in_the_loan_around_has_ended_the_one_inside_well() {
        let ranks = ranks();
        ranks.iter().for_each(|boards| (0..2).for_each(|_| boards.begin_loan()));
        ranks.iter().for_each(|boards| boards.end_loan(false));
        ranks[0].end_loan(true);
        // The others look at the inner loan's end only now.
        assert_eq!((ranks[1].has_ended(0), ranks[1].has_ended_early(0)), (Some(false), false));
        ranks[1].end_loan(false);
        assert_eq!(ranks[1].has_ended(0), Some(true));
    }

    #[test]
    fn what_another_version_writes_is_a_failure_of_its_rank() {
        let ranks = ranks();
        ranks[0].come(&call(5), Brings::NOTHING);
        // SAFETY: its own board, which nobody reads now.
        unsafe { ranks[0].own().word(1).write([255; WORD_BYTES]) };
        ranks[1].come(&call(5), Brings::NOTHING);
        let Record::Failed { error, .. } = ranks[1].word(0).record else { panic!("it was readable") };
        assert!(error.to_string().contains("rank 0 failed: it speaks another language"), "{error}");
        assert!(ranks[1].call_ahead(0).is_none());
    }
}
