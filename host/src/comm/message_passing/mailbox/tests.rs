//! Mailboxes of several ranks in one process.

use super::*;

const RANKS: usize = 3;

/// The mailboxes of several ranks, all in this process.
fn ranks() -> Vec<Mailboxes> {
    let files: Vec<MemoryFile> = (0..RANKS).map(|_| Mailboxes::make().unwrap()).collect();
    let handles: Vec<FileHandle> = files.iter().map(|file| FileHandle::of(file.bytes()).expect("a file")).collect();
    (0..RANKS).map(|rank| Mailboxes::find(&handles, rank).unwrap()).collect()
}

fn call(len: usize) -> Record {
    Record::Call { call: Call::of(Operation::Barrier, len, None), eager: Default::default() }
}

#[test]
fn mailboxes_outlive_their_makers_and_ranks_that_leave_first() {
    let mut ranks = ranks();
    for mailboxes in &ranks {
        mailboxes.publish(&call(7), Payload::EMPTY).unwrap();
    }
    let last = ranks.pop().unwrap();
    drop(ranks);
    assert!(last.have_all_arrived());
    assert_eq!((last.entry(0).record, last.entry(1).record), (call(7), call(7)));
}

#[test]
fn payload_stays_until_the_next_call_and_may_be_late() {
    let ranks = ranks();
    for round in 0..10u8 {
        let numbers: Vec<[u8; RANKS]> = (0..RANKS as u8).map(|rank| [round, rank, 100 + rank]).collect();
        // Each time, rank 0 is a round ahead of the others.
        for (mailboxes, number) in ranks.iter().zip(&numbers) {
            let are_shards = round % 2 == 1;
            mailboxes.publish(&call(round.into()), Payload { bytes: number, are_shards }).unwrap();
        }
        let entries: Vec<Vec<Entry>> =
            ranks.iter().map(|mailboxes| (0..RANKS).map(|peer| mailboxes.entry(peer)).collect()).collect();
        ranks[0].publish(&Record::Go, Payload::EMPTY).unwrap();
        assert!(ranks[1].has_arrived(0) && !ranks[0].has_arrived(1) && !ranks[0].have_all_arrived());
        for (rank, (mailboxes, entries)) in ranks.iter().zip(&entries).enumerate() {
            for (peer, entry) in entries.iter().enumerate() {
                assert_eq!(entry.record, call(round.into()));
                let number = &numbers[peer];
                let expected = if round % 2 == 1 { &number[rank..rank + 1] } else { &number[..] };
                assert_eq!(mailboxes.received(peer, entry), expected);
            }
        }
        ranks[1..].iter().for_each(|mailboxes| mailboxes.publish(&Record::Go, Payload::EMPTY).unwrap());
        assert!(ranks.iter().all(Mailboxes::have_all_arrived));
    }
}

#[test]
fn payload_of_the_greatest_length() {
    let ranks = ranks();
    let bytes: Vec<u8> = (0..MAX_TOTAL_BYTES).map(|index| (index % 251) as u8).collect();
    for _ in 0..3 {
        ranks.iter().for_each(|mailboxes| mailboxes.publish(&call(1), Payload::for_all(&bytes)).unwrap());
        assert!(ranks[1].received(2, &ranks[1].entry(2)) == bytes);
    }
}

#[test]
fn call_ahead_sees_a_call_and_no_other_record() {
    let ranks = ranks();
    assert_eq!(ranks[1].call_ahead(0), None);
    ranks[0].publish(&call(5), Payload::EMPTY).unwrap();
    let ahead = ranks[1].call_ahead(0).expect("rank 0 has come");
    assert_eq!(ahead.len, 5);
    ranks[1..].iter().for_each(|mailboxes| mailboxes.publish(&call(5), Payload::EMPTY).unwrap());
    assert_eq!(ranks[1].call_ahead(0), None, "it is here");
    ranks[0].publish(&Record::Go, Payload::EMPTY).unwrap();
    assert_eq!(ranks[1].call_ahead(0), None, "of the same collective");
}

#[test]
fn end_epoch_ends_it_for_each_rank_on_its_own() {
    let ranks = ranks();
    ranks.iter().for_each(|mailboxes| (0..2).for_each(|_| mailboxes.begin_epoch()));
    assert!(!ranks[0].has_ended_early(2));
    ranks[2].end_epoch(false).unwrap();
    assert!(ranks[0].has_ended_early(2) && !ranks[2].has_ended_early(0));
    ranks[0].end_epoch(true).unwrap();
    assert!(!ranks[1].has_ended_early(0), "it has failed, and says with what elsewhere");
    assert_eq!((ranks[0].has_ended(1), ranks[0].has_ended(2)), (None, Some(false)));
    assert!(!ranks[0].have_all_ended() && ranks[0].in_epoch());
    ranks[1].end_epoch(false).unwrap();
    assert!(ranks.iter().all(|mailboxes| mailboxes.have_all_ended()) && ranks[2].has_ended(0) == Some(true));
    ranks.iter().for_each(|mailboxes| mailboxes.end_epoch(false).unwrap());
    assert!(ranks.iter().all(|mailboxes| mailboxes.have_all_ended() && !mailboxes.in_epoch()));
    assert_eq!(ranks[1].has_ended(0), Some(true), "it stays so");
}

#[test]
fn end_epoch_of_the_inner_one_succeeds_before_a_failure() {
    let ranks = ranks();
    ranks.iter().for_each(|mailboxes| (0..2).for_each(|_| mailboxes.begin_epoch()));
    ranks.iter().for_each(|mailboxes| mailboxes.end_epoch(false).unwrap());
    ranks[0].end_epoch(true).unwrap();
    // The other ranks check the end of the inner epoch only now.
    assert_eq!((ranks[1].has_ended(0), ranks[1].has_ended_early(0)), (Some(false), false));
    ranks[1].end_epoch(false).unwrap();
    assert_eq!(ranks[1].has_ended(0), Some(true));
}

fn late(rank: usize) -> CommError {
    let deadline = std::time::Duration::from_secs(1);
    CommError::Timeout { operation: Operation::Barrier, missing: vec![rank], deadline }
}

#[test]
fn close_ends_a_round_once_and_by_one_rank() {
    let ranks = ranks();
    ranks.iter().for_each(|mailboxes| mailboxes.publish(&call(5), Payload::EMPTY).unwrap());
    assert_eq!(ranks[0].close_round(&late(1)), Ok(()), "all have come");
    ranks[2].publish(&Record::Go, Payload::EMPTY).unwrap();
    assert_eq!(ranks[2].close_round(&late(0)), Err(late(0)));
    assert!(ranks[0].have_all_arrived() && ranks[1].check_round().is_ok(), "the round before is what it was");
    assert_eq!(ranks[0].publish(&Record::Go, Payload::EMPTY), Err(late(0)));
    ranks[1].publish(&Record::Go, Payload::EMPTY).unwrap();
    assert!(!ranks[1].have_all_arrived());
    assert_eq!((ranks[1].check_round(), ranks[1].close_round(&late(2))), (Err(late(0)), Err(late(0))));
}

#[test]
fn close_tells_ranks_that_give_up_and_that_come_the_same() {
    for _ in 0..200 {
        let ranks = ranks();
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let all = ranks.into_iter().enumerate();
            let threads: Vec<_> = all
                .map(|(rank, mailboxes)| {
                    scope.spawn(move || {
                        let published = mailboxes.publish(&call(5), Payload::EMPTY);
                        (published.and_then(|()| mailboxes.close_round(&late(rank))), mailboxes)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let (outcomes, _mailboxes): (Vec<_>, Vec<_>) = outcomes.into_iter().unzip();
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{outcomes:?}");
    }
}

#[test]
fn close_epochs_ends_an_epoch_as_a_failure() {
    let ranks = ranks();
    ranks.iter().for_each(|mailboxes| (0..2).for_each(|_| mailboxes.begin_epoch()));
    ranks.iter().for_each(|mailboxes| mailboxes.end_epoch(false).unwrap());
    ranks[0].end_epoch(false).unwrap();
    assert_eq!(ranks[0].close_epochs(&late(1)), Err(late(1)));
    assert_eq!(ranks[1].end_epoch(false), Err(late(1)));
    assert_eq!(ranks[2].has_ended(1), Some(false), "the one inside");
    ranks[2].end_epoch(false).unwrap();
    assert_eq!(ranks[2].has_ended(1), Some(true));
}

#[test]
fn mailboxes_blame_the_rank_of_an_entry_of_another_version() {
    let ranks = ranks();
    ranks[0].publish(&call(5), Payload::EMPTY).unwrap();
    // SAFETY: its own mailbox, which no other rank reads now.
    unsafe { ranks[0].own().0.write(entry_at(1), &[255; ENTRY_BYTES]) };
    ranks[1].publish(&call(5), Payload::EMPTY).unwrap();
    let Record::Failed { error, .. } = ranks[1].entry(0).record else { panic!("it was readable") };
    assert!(error.to_string().contains("rank 0 failed: its message cannot be read"), "{error}");
    assert!(ranks[1].call_ahead(0).is_none());
}

#[test]
fn mailboxes_turn_words_of_a_broken_rank_into_errors() {
    let is_broken = |error: &CommError, broken: usize, text: &str| matches!(error, CommError::Transport { rank, reason, .. } if *rank == broken && reason.contains(text));
    // A rank that does not exist has closed the round, or the counter has a number that this rank has not given it.
    for word in [999 << Closable::NUMBER_BITS, 7, u64::MAX] {
        let ranks = self::ranks();
        ranks[1].own().0.store(ROUND_AT, word, Ordering::Release);
        let error = ranks[1].publish(&call(5), Payload::EMPTY).unwrap_err();
        assert!(is_broken(&error, 1, "no rank of this version"), "{error}");
    }
    // A rank has closed the round without a failure.
    let ranks = self::ranks();
    ranks[1].own().0.store(ROUND_AT, 3 << Closable::NUMBER_BITS, Ordering::Release);
    let mut room = [0; FAILURE_BYTES];
    postcard::to_slice(&Record::Go, &mut room).unwrap();
    // SAFETY: its own mailbox, which no other rank reads now.
    unsafe { ranks[2].own().0.write(FAILURE_AT, &room) };
    let error = ranks[1].publish(&call(5), Payload::EMPTY).unwrap_err();
    assert!(is_broken(&error, 2, "given up with Go"), "{error}");
    // A payload that is longer than its slot.
    let ranks = self::ranks();
    let entry = Entry { record: call(5), payload_bytes: usize::MAX, are_shards: false };
    assert_eq!(ranks[0].received(1, &entry).len(), MAX_TOTAL_BYTES);
}
