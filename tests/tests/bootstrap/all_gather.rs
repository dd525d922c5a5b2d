//! `all_gather`: byte strings of every rank, of any length up to the limit.

use std::time::Duration;

use gradsync::CommError;
use gradsync::comm::{Call, Operation};
use gradsync::internal::MemberCalls;
use gradsync_tests::ranks::guarded;

use crate::group::{Way, barrier, mismatch, on_members, sync};
use crate::{PLENTY, WORLD_SIZES};

const LIMIT: usize = 64 << 10;

/// The bytes that a rank gathers in a round; lengths differ.
fn bytes(rank: usize, round: usize) -> Vec<u8> {
    let len = [0, 1, 100 * rank, LIMIT - rank, LIMIT][(rank + round) % 5];
    (0..len).map(|index| (index * 7 + rank * 31 + round) as u8).collect()
}

#[test]
fn every_rank_gets_the_bytes_of_all() {
    guarded(120, || {
        for way in Way::ALL {
            for world_size in WORLD_SIZES {
                on_members(way, world_size, |member| {
                    for round in 0..10 {
                        let all = member.all_gather(&bytes(member.rank(), round), PLENTY).unwrap();
                        let expected: Vec<Vec<u8>> = (0..world_size).map(|rank| bytes(rank, round)).collect();
                        assert!(all == expected, "{way:?}, rank {} of {world_size}, round {round}", member.rank());
                    }
                });
            }
        }
    });
}

/// The gathered bytes exceed one frame and take several.
#[test]
fn twenty_ranks_at_the_limit() {
    guarded(120, || {
        on_members(Way::Tcp, 20, |member| {
            let all = member.all_gather(&vec![member.rank() as u8; LIMIT], PLENTY).unwrap();
            assert!(all.iter().enumerate().all(|(rank, bytes)| *bytes == vec![rank as u8; LIMIT]));
        });
    });
}

#[test]
fn too_many_bytes_fail_on_every_rank() {
    guarded(60, || {
        for way in Way::ALL {
            let errors = on_members(way, 3, |member| {
                let len = if member.rank() == 1 { LIMIT + 1 } else { 10 };
                let error = member.all_gather(&vec![0; len], PLENTY).expect_err("one rank brings too much");
                // The failure is permanent.
                assert_eq!(member.all_gather(b"", PLENTY), Err(error.clone()));
                error
            });
            for error in errors {
                let CommError::InvalidCall { operation: Operation::Exchange, rank: 1, reason } = &error else {
                    panic!("{way:?}: {error:?}");
                };
                assert!(reason.contains("65537") && reason.contains("65536"), "{reason}");
            }
        }
    });
}

/// An exchange matches only an exchange of the same kind.
#[test]
fn an_exchange_does_not_fit_a_collective() {
    guarded(60, || {
        for way in Way::ALL {
            let errors = on_members(way, 2, |member| match member.rank() {
                0 => member.all_gather(b"x", PLENTY).map(drop).unwrap_err(),
                _ => member.agree(&[sync()], PLENTY).unwrap_err(),
            });
            let exchange = Call::without_data(Operation::Exchange);
            assert_eq!(errors, vec![mismatch(0, exchange, 1, sync()); 2], "{way:?}");
            on_members(way, 2, |member| {
                let failed = match member.rank() {
                    0 => member.all_gather(b"x", PLENTY).is_err(),
                    _ => member.split(None, 0, PLENTY).is_err(),
                };
                assert!(failed);
            });
        }
    });
}

#[test]
fn missing_ranks_are_named_on_every_rank() {
    guarded(60, || {
        let deadline = Duration::from_millis(300);
        for way in Way::ALL {
            let errors = on_members(way, 4, |member| match member.rank() {
                1 | 2 => member.wait_failure(PLENTY).expect("the others give up"),
                _ => member.all_gather(b"here", deadline).unwrap_err(),
            });
            for error in errors {
                let operation = Operation::Exchange;
                assert_eq!(error, CommError::Timeout { operation, missing: vec![1, 2], deadline }, "{way:?}");
            }
        }
    });
}

/// Two threads of a rank may both gather: one waits for the other.
#[test]
fn threads_of_a_rank_take_turns() {
    guarded(60, || {
        for way in Way::ALL {
            on_members(way, 2, |member| {
                std::thread::scope(|scope| {
                    for _ in 0..4 {
                        scope.spawn(|| (0..20).for_each(|_| barrier(&member)));
                    }
                });
            });
        }
    });
}
