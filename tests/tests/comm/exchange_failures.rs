//! `exchange` when a rank leaves, panics or is late: the others get an error that names it, and no memory is reused while it is read.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use gradsync::Error;
use gradsync::comm::local::{LocalCommunicator, group_with_deadline};
use gradsync::comm::{CommError, Departure, Ranks};
use gradsync_tests::ranks::{exchange_bytes, guarded, on_ranks};

/// Ranks 0 and 1 exchange with each other and with rank 2, which ends by `go` once rank 0 has its part.
fn errors_without_rank_2(go: impl Fn(LocalCommunicator) + Sync) -> Vec<Option<Error>> {
    on_ranks(3, |comm| {
        let rank = comm.rank();
        if rank == 2 {
            exchange_bytes(&comm, &[(0, &[2])], &mut []).unwrap();
            go(comm);
            return None;
        }
        let (mut from_peer, mut from_2) = ([0], [0]);
        let sends: [(usize, &[u8]); 2] = [(1 - rank, &[rank as u8]), (2, &[9])];
        let outcome = exchange_bytes(&comm, &sends, &mut [(1 - rank, &mut from_peer), (2, &mut from_2)]);
        assert_eq!(from_2[0], if rank == 0 { 2 } else { 0 }, "rank {rank}");
        Some(outcome.expect_err("rank 2 receives nothing"))
    })
}

#[test]
fn a_rank_that_goes_in_the_middle_is_named() {
    guarded(30, || {
        let panics = |comm: LocalCommunicator| {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                let _comm = comm;
                panic!("on purpose");
            }));
            assert!(outcome.is_err());
        };
        for (errors, how) in
            [(errors_without_rank_2(drop), Departure::Left), (errors_without_rank_2(panics), Departure::Panicked)]
        {
            for error in errors.into_iter().flatten() {
                let is_right = matches!(
                    &error,
                    Error::Comm(CommError::PeerGone { rank: 2, departure, .. }) if *departure == how
                );
                assert!(is_right, "{error:?} is not rank 2 {how}");
            }
        }
    });
}

/// Rank 0 waits for rank 1, which waits for rank 2: rank 2 is named as late, and rank 1 is not.
#[test]
fn the_rank_that_all_wait_for_is_late() {
    guarded(30, || {
        let deadline = Duration::from_millis(500);
        let group = group_with_deadline(3, deadline).unwrap();
        let start = Instant::now();
        std::thread::scope(|scope| {
            for comm in group {
                scope.spawn(move || {
                    let rank = comm.rank();
                    if rank == 2 {
                        std::thread::sleep(deadline + Duration::from_millis(500));
                        return;
                    }
                    let error = exchange_bytes(&comm, &[], &mut [(rank + 1, &mut [0])]).expect_err("rank 2 sleeps");
                    let is_right = matches!(&error, Error::Comm(CommError::Timeout { missing, .. }) if *missing == [2]);
                    assert!(is_right, "rank {rank}: {error:?}");
                    assert!(start.elapsed() >= deadline, "rank {rank} gave up early");
                });
            }
        });
    });
}

/// The sender's call fails while its data are copied: the call returns, and its memory is reused, only after the copy.
#[test]
fn memory_stays_while_it_is_copied_whatever_fails() {
    guarded(60, || {
        let mut complete = 0;
        // The pause of the last round is far longer than the copy.
        for pause in (0..60).map(|round| 50 * round).chain([500_000]) {
            let outcomes = on_ranks(3, |comm| match comm.rank() {
                0 => {
                    let mut data = vec![1; 4 << 20];
                    let outcome = exchange_bytes(&comm, &[(1, &data)], &mut [(2, &mut [0])]);
                    data.fill(2);
                    assert!(outcome.is_err(), "rank 2 sends nothing");
                    std::hint::black_box(&data);
                    false
                }
                1 => {
                    let mut data = vec![0; 4 << 20];
                    let outcome = exchange_bytes(&comm, &[], &mut [(0, &mut data)]);
                    if outcome.is_ok() {
                        assert!(data.iter().all(|byte| *byte == 1), "after {pause} µs: reused while it was copied");
                    }
                    outcome.is_ok()
                }
                _ => {
                    std::thread::sleep(Duration::from_micros(pause));
                    false
                }
            });
            complete += usize::from(outcomes[1]);
        }
        assert!(complete > 0, "the copy never came before the failure: the test shows nothing");
    });
}
