//! The mailboxes' protocol with loom's memory: every order of a few ranks' accesses, with each ordering of the atomic accesses.
//!
//! The programs make the calls of the handshake and of exposure epochs in their order. Each is explored as it is, and with each ordering
//! weakened: the table of [`mailboxes_fail_under_every_weaker_ordering`] says which of them a program depends on.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::*;
use crate::memory::shared_bytes::model::{Access, Model, Weakened, assert_is_missed, explore};

/// The payload bytes of a call here.
const BYTES: usize = 2;

type Rank = Mailboxes<Arc<Model>>;

/// The mailboxes of several ranks.
fn ranks(count: usize, weakened: Option<Weakened>) -> Vec<Rank> {
    let cell = |at: usize, len: usize| at..at + len;
    let mailbox = |_| {
        let entries = [0, 1].map(|round| cell(entry_at(round), ENTRY_BYTES));
        let slots = [0, 1].map(|call| cell(slot_at(call), BYTES));
        let cells = entries.into_iter().chain([cell(FAILURE_AT, FAILURE_BYTES)]).chain(slots);
        Model::new(&[ROUND_AT, EPOCHS_AT, FAILED_EPOCH_AT], cells, weakened)
    };
    let mailboxes: Vec<_> = (0..count).map(mailbox).collect();
    (0..count).map(|rank| Mailboxes::new(mailboxes.clone(), rank)).collect()
}

/// How a rank comes out of a program; `None` if its process ends in a wait. Each wait looks once: what a look in vain would see later, it
/// sees at once in another order.
type Outcome = Option<Result<(), CommError>>;

/// Runs a program on each rank. Returns the outcomes by rank.
fn run(ranks: Vec<Rank>, program: fn(&Rank) -> Outcome) -> Vec<Outcome> {
    let mut ranks = ranks.into_iter();
    let own = ranks.next().expect("a rank");
    let others: Vec<_> = ranks.map(|rank| loom::thread::spawn(move || program(&rank))).collect();
    let mut outcomes = vec![program(&own)];
    outcomes.extend(others.into_iter().map(|other| other.join().expect("no panic")));
    outcomes
}

fn peers(rank: &Rank) -> impl Iterator<Item = usize> {
    let own = rank.rank;
    (0..rank.mailboxes.len()).filter(move |&peer| peer != own)
}

/// Looks whether all other ranks have arrived.
fn arrivals(rank: &Rank) -> Option<()> {
    peers(rank).all(|peer| rank.has_arrived(peer)).then_some(())
}

fn call(len: usize) -> Record {
    Record::Call { call: Call::of(Operation::Barrier, len, None), eager: Default::default() }
}

fn late(rank: usize) -> CommError {
    let deadline = std::time::Duration::from_secs(1);
    CommError::Timeout { operation: Operation::Barrier, missing: vec![rank], deadline }
}

/// Three calls, as many as it takes to use an entry and a slot again.
fn make_calls(rank: &Rank) -> Outcome {
    for round in 0..3 {
        rank.publish(&call(round), Payload::for_all(&[round as u8, rank.rank as u8])).expect("nobody gives up");
        arrivals(rank)?;
        for peer in peers(rank) {
            let entry = rank.entry(peer);
            assert_eq!(entry.record, call(round));
            assert_eq!(rank.received(peer, &entry), [round as u8, peer as u8]);
        }
    }
    Some(Ok(()))
}

/// Three rounds whose payloads the ranks write to their slots and read in the slots of others.
fn use_slots(rank: &Rank) -> Outcome {
    for round in 0..3 {
        let next = slot_at(rank.calls.get() + 1);
        // SAFETY: the next slot of its own mailbox.
        unsafe { rank.own().0.write(next, &[round, rank.rank as u8]) };
        rank.advance();
        rank.publish(&Record::Go, Payload::EMPTY).expect("nobody gives up");
        arrivals(rank)?;
        for peer in peers(rank) {
            // SAFETY: the slot that the peer has published for this round.
            let bytes = unsafe { rank.mailboxes[peer].0.bytes(slot_at(rank.calls.get()), BYTES) };
            assert_eq!(bytes, [round, peer as u8]);
        }
    }
    Some(Ok(()))
}

/// Every rank enters a round and gives it up at once.
fn give_up(rank: &Rank) -> Outcome {
    let published = rank.publish(&call(1), Payload::EMPTY);
    Some(published.and_then(|()| rank.close_round(&late(rank.rank))))
}

/// The first rank gives a round up, and the others wait until all have come or one has given up.
fn wait_for_one_that_gives_up(rank: &Rank) -> Outcome {
    if rank.rank == 0 {
        return give_up(rank);
    }
    if let Err(error) = rank.publish(&call(1), Payload::EMPTY) {
        return Some(Err(error));
    }
    arrivals(rank).map(Ok).or_else(|| rank.check_round().err().map(Err))
}

/// Two epochs, in which each rank writes to a slot of the next rank, as it would to that rank's window.
fn use_windows(rank: &Rank) -> Outcome {
    let ranks = rank.mailboxes.len();
    for round in 0..2 {
        rank.publish(&call(1), Payload::EMPTY).expect("nobody gives up");
        arrivals(rank)?;
        rank.begin_epoch();
        // SAFETY: no other rank uses this slot in this epoch.
        unsafe { rank.mailboxes[(rank.rank + 1) % ranks].0.write(slot_at(0), &[round, rank.rank as u8]) };
        rank.end_epoch(false).expect("nobody gives up");
        peers(rank).all(|peer| rank.has_ended(peer) == Some(false)).then_some(())?;
        // SAFETY: the epoch has ended.
        let bytes = unsafe { rank.own().0.bytes(slot_at(0), BYTES) };
        assert_eq!(bytes, [round, ((rank.rank + ranks - 1) % ranks) as u8]);
    }
    Some(Ok(()))
}

/// An epoch that fails on the last rank: the others see this when they see that it has ended the epoch.
fn fail_in_an_epoch(rank: &Rank) -> Outcome {
    rank.begin_epoch();
    let last = rank.mailboxes.len() - 1;
    rank.end_epoch(rank.rank == last).expect("nobody gives up");
    for peer in peers(rank) {
        assert_eq!(rank.has_ended(peer)?, peer == last);
    }
    Some(Ok(()))
}

/// The end of an epoch that all ranks have ended. A rank whose end the others have given up says that it has failed.
fn end_of_epoch(rank: &Rank) -> Outcome {
    let ends: Option<Vec<bool>> = peers(rank).map(|peer| rank.has_ended(peer)).collect();
    ends.map(|failures| if failures.contains(&true) { Err(late(0)) } else { Ok(()) })
}

/// Every rank ends an epoch and gives it up at once.
fn end_and_give_up_an_epoch(rank: &Rank) -> Outcome {
    rank.begin_epoch();
    match rank.end_epoch(false) {
        Err(error) => Some(Err(error)),
        Ok(()) => rank.close_epochs(&late(0)).err().map(Err).or_else(|| end_of_epoch(rank)),
    }
}

/// The first rank gives up the end of an epoch; all others either have ended it before, or fail in it.
fn give_up_an_epoch(rank: &Rank) -> Outcome {
    if rank.rank == 0 {
        return end_and_give_up_an_epoch(rank);
    }
    rank.begin_epoch();
    if let Err(error) = rank.end_epoch(false) {
        return Some(Err(error));
    }
    rank.check_epochs().err().map(Err).or_else(|| end_of_epoch(rank))
}

/// A program, and the number of its ranks.
#[derive(Clone, Copy)]
struct Program {
    name: &'static str,
    ranks: usize,
    run: fn(&Rank) -> Outcome,
    /// Whether all ranks can end with a success, and whether all can end with a failure.
    ends: [bool; 2],
}

const fn program(name: &'static str, ranks: usize, run: fn(&Rank) -> Outcome, ends: [bool; 2]) -> Program {
    Program { name, ranks, run, ends }
}

const PROGRAMS: [Program; 12] = [
    program("calls", 2, make_calls, [true, false]),
    program("slots", 2, use_slots, [true, false]),
    program("a round that any may give up", 2, give_up, [true, true]),
    program("a round that any may give up", 3, give_up, [true, true]),
    program("a round that one gives up", 2, wait_for_one_that_gives_up, [true, true]),
    program("a round that one gives up", 3, wait_for_one_that_gives_up, [true, true]),
    program("windows", 2, use_windows, [true, false]),
    program("a failed epoch", 3, fail_in_an_epoch, [true, false]),
    program("an epoch that any may give up", 2, end_and_give_up_an_epoch, [true, true]),
    program("an epoch that any may give up", 3, end_and_give_up_an_epoch, [true, true]),
    program("an epoch that one gives up", 2, give_up_an_epoch, [true, true]),
    program("an epoch that one gives up", 3, give_up_an_epoch, [true, true]),
];

/// The most interruptions of threads in programs of three ranks, whose orders are too many.
const INTERRUPTIONS: usize = 3;

impl Program {
    /// Runs it in every order. Asserts that no two ranks come out of it differently.
    fn explore(self, weakened: Option<Weakened>) {
        let ends = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
        let seen = ends.clone();
        let name = format!("{}, {} ranks", self.name, self.ranks);
        explore(&name, (self.ranks > 2).then_some(INTERRUPTIONS), move || {
            let outcomes = run(ranks(self.ranks, weakened), self.run);
            let mut known = outcomes.iter().flatten();
            let first = known.next();
            assert!(known.all(|outcome| Some(outcome) == first), "{outcomes:?}");
            if let (Some(first), true) = (first, outcomes.iter().all(Option::is_some)) {
                seen[usize::from(first.is_err())].store(true, Ordering::Relaxed);
            }
        });
        let ends = ends.each_ref().map(|end| end.load(Ordering::Relaxed));
        assert_eq!(ends, self.ends, "{name}: the ends that all ranks reach");
    }
}

#[test]
fn mailboxes_hold_under_every_order_of_accesses() {
    PROGRAMS.iter().for_each(|program| program.explore(None));
}

/// The acquiring halves of a successful exchange and update are stronger than the protocol needs: a rank raises its own number, and learns
/// nothing from a counter that it closes.
#[test]
fn mailboxes_fail_under_every_weaker_ordering() {
    use Ordering::{Acquire, Relaxed};
    for (at, access, to, name) in [
        (ROUND_AT, Access::Load, Relaxed, "calls"),
        (ROUND_AT, Access::Load, Relaxed, "slots"),
        (ROUND_AT, Access::Load, Relaxed, "a round that one gives up"),
        (ROUND_AT, Access::Exchange, Acquire, "calls"),
        (ROUND_AT, Access::Exchange, Acquire, "slots"),
        (ROUND_AT, Access::FailedExchange, Relaxed, "a round that one gives up"),
        (ROUND_AT, Access::Update, Acquire, "a round that one gives up"),
        (ROUND_AT, Access::FailedUpdate, Relaxed, "a round that any may give up"),
        (EPOCHS_AT, Access::Load, Relaxed, "windows"),
        (EPOCHS_AT, Access::Load, Relaxed, "a failed epoch"),
        (EPOCHS_AT, Access::Load, Relaxed, "an epoch that one gives up"),
        (EPOCHS_AT, Access::Exchange, Acquire, "windows"),
        (EPOCHS_AT, Access::FailedExchange, Relaxed, "an epoch that one gives up"),
        (EPOCHS_AT, Access::Update, Acquire, "an epoch that one gives up"),
        (EPOCHS_AT, Access::FailedUpdate, Relaxed, "an epoch that any may give up"),
        (EPOCHS_AT, Access::FetchAdd, Relaxed, "an epoch that one gives up"),
    ] {
        let weakened = Weakened { at, access, to };
        // A program of three ranks depends on everything on which it depends with two.
        let program = PROGRAMS.iter().rfind(|program| program.name == name).expect("a program");
        assert_is_missed(&weakened, || program.explore(Some(weakened)));
    }
}
