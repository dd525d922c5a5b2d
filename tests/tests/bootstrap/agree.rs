//! `agree`: pending calls that match are released; calls that cannot match fail on all ranks at once.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread::sleep;
use std::time::{Duration, Instant};

use gradsync::CommError;
use gradsync::bootstrap::Member;
use gradsync::comm::{Call, Operation, ReduceOp};
use gradsync::dtype::DType;
use gradsync::internal::MemberCalls;
use gradsync_tests::ranks::guarded;
use gradsync_tests::suite::mistakes::{Deed, LATE, MISTAKES, SHORT};

use crate::group::{Way, barrier, mismatch, on_members, recv, reduce, send, send_recv, sync};
use crate::{AT_ONCE, PLENTY, WORLD_SIZES};

/// The calls that each rank makes; `None` for a rank that makes no call.
type Posts<'a> = &'a [Option<&'a [Call]>];

/// Makes each rank's calls and returns every rank's error; ranks without a call wait for the failure.
fn posts(way: Way, posts: Posts<'_>) -> Vec<CommError> {
    let start = Instant::now();
    let errors = on_members(way, posts.len(), |member| {
        let error = match posts[member.rank()] {
            Some(calls) => member.agree(calls, PLENTY).expect_err("it cannot fit"),
            None => member.wait_failure(PLENTY).expect("the others cannot fit"),
        };
        let again = member.agree(&[sync()], PLENTY);
        match &error {
            CommError::Mismatch { .. } => assert_eq!(again, Err(error.clone()), "the first failure sticks"),
            _ => assert!(again.is_err()),
        }
        error
    });
    assert!(start.elapsed() < AT_ONCE, "found only after {:?}", start.elapsed());
    errors
}

#[track_caller]
fn assert_mismatch(lists: Posts<'_>, expected: &CommError) {
    for way in Way::ALL {
        let errors = posts(way, lists);
        assert!(errors.iter().all(|error| error == expected), "{way:?}, {lists:?}: {errors:?}");
    }
}

#[test]
fn equal_posts_are_released() {
    guarded(120, || {
        let broadcast = Call::new(Operation::Broadcast { root: 0 }, 9, DType::U8);
        for way in Way::ALL {
            for world_size in WORLD_SIZES {
                on_members(way, world_size, |member| {
                    for round in 0..20 {
                        member.agree(&[reduce(round)], PLENTY).unwrap();
                        member.agree(&[broadcast, sync(), reduce(round)], PLENTY).unwrap();
                    }
                    member.agree(&[], PLENTY).unwrap();
                    assert_eq!(member.failure(), None);
                });
            }
        }
    });
}

#[test]
fn unequal_collectives_fail_on_every_rank() {
    guarded(120, || {
        let max = Call::new(Operation::AllReduce(ReduceOp::Max), 4, DType::BF16);
        let bytes = Call::new(Operation::AllReduce(ReduceOp::Sum), 4, DType::U8);
        for other in [sync(), reduce(5), max, bytes] {
            // Rank 2 makes no call and still hears of the mismatch, as rank 1's call is compared with rank 0's as soon as both are there.
            assert_mismatch(&[Some(&[reduce(4)]), Some(&[other]), None], &mismatch(0, reduce(4), 1, other));
        }
        let (left, right) = ([sync(), reduce(1)], [sync(), reduce(2)]);
        assert_mismatch(&[Some(&left), Some(&right)], &mismatch(0, reduce(1), 1, reduce(2)));
        assert_mismatch(&[Some(&left), Some(&left[..1])], &mismatch(0, reduce(1), 1, sync()));
    });
}

#[test]
fn transfers_are_released_pair_by_pair() {
    guarded(60, || {
        for way in Way::ALL {
            on_members(way, 4, |member| {
                let rank = member.rank();
                for round in 0..10 {
                    match rank {
                        0 => member.agree(&[send(1, round)], PLENTY).unwrap(),
                        1 => member.agree(&[recv(0, round)], PLENTY).unwrap(),
                        // Ranks 2 and 3 exchange: one by a single call, the other by a send and a receive.
                        2 => member.agree(&[send_recv(3, 3)], PLENTY).unwrap(),
                        _ => member.agree(&[send(2, 3), recv(2, 3)], PLENTY).unwrap(),
                    }
                }
                member.agree(&[send_recv((rank + 1) % 4, (rank + 3) % 4)], PLENTY).unwrap();
                member.agree(&[send_recv(rank, rank)], PLENTY).unwrap();
                member.agree(&[recv(rank, 5), send(rank, 5)], PLENTY).unwrap();
                barrier(&member);
            });
        }
    });
}

/// An all-to-all of transfers in one group, with collectives among them, in a different order on each rank.
#[test]
fn groups_of_everything_are_released() {
    guarded(60, || {
        for way in Way::ALL {
            for world_size in WORLD_SIZES {
                on_members(way, world_size, |member: Member| {
                    let rank = member.rank();
                    let mut calls = vec![reduce(1)];
                    for offset in 0..world_size {
                        let peer = (rank + offset) % world_size;
                        calls.extend([send(peer, rank + 1), recv(peer, peer + 1)]);
                    }
                    calls.push(sync());
                    (0..5).for_each(|_| member.agree(&calls, PLENTY).unwrap());
                });
            }
        }
    });
}

#[test]
fn transfers_that_do_not_fit_fail_on_every_rank() {
    guarded(120, || {
        let bytes = Call::new(Operation::Recv { peer: 0 }, 4, DType::U8);
        assert_mismatch(&[Some(&[send(1, 4)]), Some(&[recv(0, 5)]), None], &mismatch(0, send(1, 4), 1, recv(0, 5)));
        assert_mismatch(&[Some(&[send(1, 4)]), Some(&[bytes])], &mismatch(0, send(1, 4), 1, bytes));
        assert_mismatch(&[Some(&[send(1, 4)]), Some(&[send(0, 4)]), None], &mismatch(0, send(1, 4), 1, send(0, 4)));
        assert_mismatch(&[None, Some(&[recv(2, 4)]), Some(&[recv(1, 4)])], &mismatch(1, recv(2, 4), 2, recv(1, 4)));
    });
}

/// One rank waits in a collective for another rank, which waits for the first one in a transfer.
#[test]
fn a_collective_and_a_transfer_fail() {
    guarded(60, || {
        assert_mismatch(&[Some(&[sync()]), Some(&[recv(0, 4)]), None], &mismatch(0, sync(), 1, recv(0, 4)));
        assert_mismatch(&[Some(&[send(2, 1)]), None, Some(&[reduce(4)])], &mismatch(0, send(2, 1), 2, reduce(4)));
    });
}

#[test]
fn ranks_that_wait_in_a_ring_fail_at_once() {
    guarded(60, || {
        for way in Way::ALL {
            let errors = posts(way, &[Some(&[send(1, 1)]), Some(&[send(2, 1)]), Some(&[send(0, 1)])]);
            assert!(errors.iter().all(|error| error == &errors[0]), "{way:?}: {errors:?}");
            assert!(matches!(errors[0], CommError::Mismatch { .. }), "{way:?}: {errors:?}");
        }
    });
}

#[test]
fn peers_that_cannot_be_break_nothing() {
    guarded(60, || {
        for way in Way::ALL {
            on_members(way, 2, |member| {
                let rank = member.rank();
                for calls in [&[send(2, 1)][..], &[recv(9, 1)], &[send(rank, 1)], &[sync(), recv(rank, 1)]] {
                    let error = member.agree(calls, PLENTY).unwrap_err();
                    assert!(matches!(error, CommError::InvalidPeer { .. }), "{error:?}");
                }
                member.agree(&[sync()], PLENTY).unwrap();
            });
        }
    });
}

#[test]
fn too_many_calls_fail_on_every_rank() {
    guarded(60, || {
        for way in Way::ALL {
            let errors = on_members(way, 2, |member| {
                let calls = vec![reduce(1); if member.rank() == 1 { 16_385 } else { 16_384 }];
                member.agree(&calls, PLENTY).unwrap_err()
            });
            assert!(errors.iter().all(|error| matches!(error, CommError::InvalidCall { rank: 1, .. })), "{errors:?}");
            on_members(way, 2, |member| member.agree(&vec![reduce(1); 16_384], PLENTY).unwrap());
        }
    });
}

/// The timeout names the ranks that made no call, including ranks for which somebody else waits.
#[test]
fn whatever_else_does_not_complete_ends_by_the_deadline() {
    guarded(60, || {
        let deadline = Duration::from_millis(300);
        let [sum, exchange, to_1] = [[reduce(4)], [send_recv(1, 2)], [send(1, 1)]];
        let [from_0, longer_from_0, from_2] = [[recv(0, 3)], [recv(0, 4)], [recv(2, 1)]];
        let cases: [(Posts<'_>, &[usize]); 4] = [
            (&[Some(&sum), None, Some(&sum), None], &[1, 3]),
            (&[None, Some(&longer_from_0)], &[0]),
            (&[Some(&exchange), Some(&from_0), None], &[2]),
            (&[Some(&to_1), Some(&from_2), None, None], &[2]),
        ];
        for way in Way::ALL {
            for (lists, expected) in cases {
                let errors = on_members(way, lists.len(), |member| {
                    let Some(calls) = lists[member.rank()] else { return (None, member.wait_failure(PLENTY)) };
                    match member.agree(calls, deadline) {
                        Err(error) => (Some(calls[0].operation), Some(error)),
                        // The call of this rank is complete, as it matches half of another rank's exchange.
                        Ok(()) => (None, member.wait_failure(PLENTY)),
                    }
                });
                for (own, error) in errors {
                    let Some(CommError::Timeout { operation, missing, deadline: named }) = &error else {
                        panic!("{way:?}, {lists:?}: {error:?}");
                    };
                    assert_eq!((&missing[..], *named), (expected, deadline), "{way:?}, {lists:?}");
                    assert!(
                        own.is_none_or(|own| own == *operation),
                        "{way:?}, {lists:?}: {own:?} became {operation:?}"
                    );
                }
            }
        }
    });
}

/// The same texts as over every transport of host memory.
#[test]
fn texts_of_mistakes() {
    guarded(120, || {
        for (way, world_size) in Way::ALL.into_iter().flat_map(|way| [2, 3].map(|world_size| (way, world_size))) {
            for mistake in MISTAKES {
                on_members(way, world_size, |member| {
                    let last = world_size - 1;
                    let (deed, odd) = ((mistake.deed)(member.rank(), last), (mistake.deed)(last, last));
                    let deadline = if odd == Deed::Late { SHORT } else { PLENTY };
                    if deed == Deed::Late {
                        sleep(LATE);
                    }
                    match deed.call() {
                        Some(call) => mistake.assert_text(member.agree(&[call], deadline), last),
                        None if deed == Deed::Leave => drop(member),
                        None => {
                            let panicked = catch_unwind(AssertUnwindSafe(move || {
                                let _held = member;
                                resume_unwind(Box::new("as it is meant to"));
                            }));
                            assert!(panicked.is_err());
                        }
                    }
                });
            }
        }
    });
}
