//! `exchange` of ranks that share an address space: an empty transfer waits too, ranks that wait in a circle are found, the rank that all
//! wait for is named, and no memory is reused while it is read.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gradsync::comm::local::{LocalCommunicator, group_with_deadline};
use gradsync::comm::{Collectives, CommError, Ranks};
use gradsync::{Error, Result};
use gradsync_tests::ranks::{exchange_bytes, guarded, on_ranks};

fn send(comm: &LocalCommunicator, peer: usize, data: &[u8]) -> Result<()> {
    exchange_bytes(comm, &[(peer, data)], &mut [])
}

fn recv(comm: &LocalCommunicator, peer: usize, data: &mut [u8]) -> Result<()> {
    exchange_bytes(comm, &[], &mut [(peer, data)])
}

/// A call with an empty list completes at once; an empty transfer waits for its peer.
#[test]
fn exchange_of_nothing_returns_and_empty_transfers_meet() {
    guarded(20, || {
        let is_there = AtomicBool::new(false);
        on_ranks(2, |comm| {
            exchange_bytes(&comm, &[], &mut []).unwrap();
            if comm.rank() == 0 {
                send(&comm, 1, &[]).unwrap();
                assert!(is_there.load(Ordering::SeqCst), "the sender went on without the receiver");
            } else {
                exchange_bytes(&comm, &[], &mut []).unwrap();
                std::thread::sleep(Duration::from_millis(100));
                is_there.store(true, Ordering::SeqCst);
                recv(&comm, 0, &mut []).unwrap();
            }
        });
    });
}

type Call = fn(&LocalCommunicator) -> Result<()>;

/// Every rank's call fails with the mismatch of a pair, long before the deadline.
#[track_caller]
fn assert_clash(what: &str, calls: &[Call], pair: [usize; 2], words: [&str; 2]) {
    let errors = on_ranks(calls.len(), |comm| calls[comm.rank()](&comm).expect_err(what));
    for (rank, error) in errors.into_iter().enumerate() {
        let text = error.to_string();
        let Error::Comm(CommError::Mismatch { left_rank, right_rank, .. }) = error else {
            panic!("{what}, rank {rank}: {error:?}");
        };
        assert_eq!([left_rank, right_rank], pair, "{what}, rank {rank}: {text}");
        assert!(words.iter().all(|word| text.contains(word)), "{what}, rank {rank}: \"{text}\" lacks {words:?}");
    }
}

#[test]
fn exchange_with_transfers_left_over_is_a_mismatch() {
    guarded(20, || {
        assert_clash(
            "two sends for one receive, and nobody is done",
            &[
                |comm| exchange_bytes(comm, &[(1, &[1]), (1, &[2])], &mut []),
                |comm| {
                    recv(comm, 0, &mut [0])?;
                    comm.barrier()
                },
            ],
            [0, 1],
            ["send(to rank 1)", "barrier"],
        );
        assert_clash(
            "each has a send left, although both receive",
            &[
                |comm| exchange_bytes(comm, &[(1, &[1]), (1, &[2])], &mut [(1, &mut [0])]),
                |comm| exchange_bytes(comm, &[(0, &[1]), (0, &[2])], &mut [(0, &mut [0])]),
            ],
            [0, 1],
            ["send(to rank 1)", "send(to rank 0)"],
        );
        assert_clash(
            "both receive",
            &[|comm| recv(comm, 1, &mut [0]), |comm| comm.recv(&mut [0.0f32][..], 0)],
            [0, 1],
            ["recv(from rank 1)", "recv(from rank 0)"],
        );
    });
}

#[test]
fn exchange_of_ranks_in_a_circle_is_a_mismatch() {
    guarded(20, || {
        // The order in which the ranks call decides which two of them are named.
        for world_size in [3, 5] {
            let errors = on_ranks(world_size, |comm| {
                let error = send(&comm, (comm.rank() + 1) % world_size, &[1]).expect_err("nobody receives");
                assert!(matches!(error, Error::Comm(CommError::Mismatch { .. })), "{error:?}");
                error.to_string()
            });
            assert!(errors.iter().all(|text| *text == errors[0] && text.contains("send(to rank")), "{errors:?}");
        }
        // Rank 2 waits for rank 1, which waits for rank 0; rank 0 is in a collective, and waits for both.
        let errors = on_ranks(3, |comm| {
            let outcome = match comm.rank() {
                0 => comm.barrier(),
                1 => recv(&comm, 0, &mut [0]),
                _ => send(&comm, 1, &[1]),
            };
            outcome.expect_err("rank 0 does not send").to_string()
        });
        assert!(errors.iter().all(|text| text.contains("rank 0 called barrier")), "{errors:?}");
    });
}

/// Rank 0 waits for rank 1, which waits for rank 2: rank 2 is named as late, and rank 1 is not.
#[test]
fn exchange_names_the_rank_that_all_wait_for() {
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
fn exchange_leaves_memory_alone_while_it_is_copied() {
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
