//! Ranks that are late, fail, leave or panic: all ranks get the same error, once, and only ranks that need the failed rank fail.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use gradsync::CommError;
use gradsync::comm::{Departure, Operation};
use gradsync::internal::MemberCalls;
use gradsync_tests::ranks::{agree, guarded};

use crate::group::{Way, barrier, on_members, recv, reduce, send, sync};
use crate::{AT_ONCE, PLENTY};

const DEADLINE: Duration = Duration::from_secs(3);

fn timeout(missing: &[usize]) -> CommError {
    CommError::Timeout { operation: sync().operation, missing: missing.to_vec(), deadline: DEADLINE }
}

fn gone(operation: Operation, rank: usize, departure: Departure) -> CommError {
    CommError::PeerGone { operation, rank, departure }
}

/// Rank 2 has not made the third collective and rank 3 not the second; they make no further calls, and hear of the failure.
#[test]
fn wait_failure_names_ranks_behind_on_every_rank() {
    guarded(60, || {
        for way in Way::ALL {
            for asking in [&[0][..], &[1], &[0, 1, 4]] {
                let errors = on_members(way, 5, |member| {
                    let rank = member.rank();
                    for _ in 0..[3, 4, 2, 1, 3][rank] {
                        member.posted(sync());
                    }
                    barrier(&member);
                    if asking.contains(&rank) {
                        let error = member.late(3, sync().operation, DEADLINE);
                        assert_eq!(member.failure(), Some(error));
                        assert_eq!(
                            member.late(9, sync().operation, DEADLINE),
                            timeout(&[2, 3]),
                            "the first one sticks"
                        );
                    }
                    member.wait_failure(PLENTY).expect("it is for everybody")
                });
                assert_eq!(agree("late", errors), timeout(&[2, 3]), "{way:?}, asked by {asking:?}");
            }
        }
    });
}

#[test]
fn wait_failure_names_nobody_when_nobody_is_behind() {
    guarded(60, || {
        for way in Way::ALL {
            let errors = on_members(way, 3, |member| {
                member.posted(reduce(1));
                barrier(&member);
                if member.rank() == 1 {
                    member.late(1, sync().operation, DEADLINE);
                }
                member.wait_failure(PLENTY).expect("it is for everybody")
            });
            let error = agree("late", errors);
            assert_eq!(error, timeout(&[]), "{way:?}");
            assert_eq!(
                error.to_string(),
                "barrier: did not complete within 3s although every rank has started it",
                "{way:?}"
            );
        }
    });
}

#[test]
fn failure_stays_the_first_one_on_every_rank() {
    guarded(60, || {
        for way in Way::ALL {
            let errors = on_members(way, 4, |member| {
                assert_eq!(member.wait_failure(Duration::ZERO), None);
                barrier(&member);
                let (rank, operation, reason) = (member.rank(), sync().operation, "×".repeat(1 << 20));
                member.fail(CommError::InvalidCall { operation, rank, reason });
                let first = member.failure().expect("it has just failed");
                member.fail(gone(operation, 3, Departure::Lost));
                assert_eq!(member.failure().as_ref(), Some(&first));
                first
            });
            let error = agree("the first failure", errors);
            let CommError::InvalidCall { reason, .. } = error else { panic!("{way:?}: {error:?}") };
            // A long reason is shortened.
            assert!(reason.starts_with('×') && reason.len() <= 4096, "{} bytes", reason.len());
        }
    });
}

/// A rank in a call gets the failure with the name of its own call.
#[test]
fn failure_names_the_call_of_each_rank() {
    guarded(60, || {
        for way in Way::ALL {
            let errors = on_members(way, 3, |member| match member.rank() {
                0 => {
                    std::thread::sleep(Duration::from_millis(200));
                    member.fail(gone(Operation::Exchange, 7, Departure::Lost));
                    member.failure().expect("it has just failed")
                }
                1 => member.agree(&[recv(0, 3)], PLENTY).unwrap_err(),
                _ => member.all_gather(b"", PLENTY).unwrap_err(),
            });
            assert_eq!(errors[0], gone(Operation::Exchange, 7, Departure::Lost), "{way:?}");
            assert_eq!(errors[1], gone(recv(0, 3).operation, 7, Departure::Lost), "{way:?}");
            assert_eq!(errors[2], errors[0], "{way:?}");
        }
    });
}

/// A rank that leaves is no failure until another rank needs it.
#[test]
fn agree_fails_only_for_ranks_that_need_one_that_left() {
    guarded(60, || {
        for way in Way::ALL {
            // The test synchronises its steps by its own barrier, as each use of the group that needs rank 3 fails.
            let step = Barrier::new(3);
            on_members(way, 4, |member| {
                (0..5).for_each(|_| assert!(member.posted(sync()) > 0));
                barrier(&member);
                if member.rank() == 3 {
                    return drop(member);
                }
                let start = Instant::now();
                while member.gone_before(6).is_none() {
                    assert!(start.elapsed() < AT_ONCE, "nobody told rank {} of it", member.rank());
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert_eq!(member.gone_before(6), Some((3, Departure::Left)));
                assert_eq!(member.gone_before(5), None, "it left after its fifth collective");
                step.wait();
                match member.rank() {
                    0 => member.agree(&[send(1, 8)], PLENTY).unwrap(),
                    1 => member.agree(&[recv(0, 8)], PLENTY).unwrap(),
                    _ => {}
                }
                step.wait();
                assert_eq!(member.failure(), None);
                step.wait();
                let error = match member.rank() {
                    0 => member.agree(&[sync()], PLENTY).unwrap_err(),
                    1 => member.agree(&[recv(3, 1)], PLENTY).unwrap_err(),
                    _ => member.all_gather(b"", PLENTY).unwrap_err(),
                };
                assert!(
                    matches!(error, CommError::PeerGone { rank: 3, departure: Departure::Left, .. }),
                    "{way:?}: {error:?}"
                );
                assert!(start.elapsed() < AT_ONCE, "{way:?}: found only after {:?}", start.elapsed());
                step.wait();
            });
        }
    });
}

/// A rank that already waits for the leaving rank fails at that moment.
#[test]
fn agree_ends_when_the_awaited_rank_leaves_or_panics() {
    guarded(60, || {
        for way in Way::ALL {
            for departure in [Departure::Left, Departure::Panicked] {
                let errors = on_members(way, 3, |member| {
                    let error = match member.rank() {
                        0 => member.agree(&[recv(1, 1)], PLENTY).unwrap_err(),
                        2 => member.agree(&[send(1, 1)], PLENTY).unwrap_err(),
                        _ => {
                            std::thread::sleep(Duration::from_millis(200));
                            let outcome = catch_unwind(AssertUnwindSafe(move || {
                                let _dropped_in_here = member;
                                assert!(departure == Departure::Left, "on purpose");
                            }));
                            assert_eq!(outcome.is_err(), departure == Departure::Panicked);
                            return None;
                        }
                    };
                    Some(error)
                });
                assert_eq!(errors[0], Some(gone(recv(1, 1).operation, 1, departure)), "{way:?}");
                assert_eq!(errors[2], Some(gone(send(1, 1).operation, 1, departure)), "{way:?}");
            }
        }
    });
}

/// The coordinator of a group that spans processes ends with rank 0, which is a failure only for calls that need the coordinator.
#[test]
fn agree_goes_on_after_rank_0_has_left() {
    guarded(60, || {
        for way in Way::ALL {
            let step = Barrier::new(2);
            on_members(way, 3, |member| {
                barrier(&member);
                if member.rank() == 0 {
                    return;
                }
                while member.gone_before(1) != Some((0, Departure::Left)) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert_eq!((member.agree(&[], PLENTY), member.failure()), (Ok(()), None), "{way:?}");
                step.wait();
                let error = match member.rank() {
                    1 => member.agree(&[sync()], PLENTY).unwrap_err(),
                    _ if way == Way::InProcess => member.agree(&[recv(0, 1)], PLENTY).unwrap_err(),
                    // Without the coordinator, the failure stays local to this rank.
                    _ => {
                        member.fail(gone(sync().operation, 0, Departure::Panicked));
                        return assert_eq!(member.failure(), Some(gone(sync().operation, 0, Departure::Panicked)));
                    }
                };
                assert!(
                    matches!(error, CommError::PeerGone { rank: 0, departure: Departure::Left, .. }),
                    "{way:?}: {error:?}"
                );
            });
        }
    });
}

#[test]
fn join_refuses_a_rank_that_has_left() {
    guarded(60, || {
        for way in Way::ALL {
            on_members(way, 3, |member| {
                let rank = member.rank();
                barrier(&member);
                if rank != 2 {
                    return;
                }
                std::thread::scope(|scope| {
                    // Another thread has a call in progress when the rank leaves.
                    let call = scope.spawn(|| member.agree(&[recv(1, 1)], PLENTY));
                    std::thread::sleep(Duration::from_millis(100));
                    member.leave();
                    assert!(matches!(call.join().unwrap(), Err(CommError::PeerGone { .. })));
                });
                member.leave();
                let own = gone(sync().operation, rank, Departure::Left);
                assert_eq!(member.agree(&[sync()], PLENTY), Err(own.clone()));
                assert_eq!(member.late(1, sync().operation, DEADLINE), own);
            });
        }
    });
}

#[test]
fn recent_counts_collectives_and_remembers_calls() {
    on_members(Way::InProcess, 1, |member| {
        assert_eq!(member.recent(), []);
        assert_eq!(member.posted(send(0, 1)), 0, "a transfer has the number of the collective before it");
        assert_eq!((member.posted(reduce(1)), member.posted(recv(0, 1)), member.posted(sync())), (1, 1, 2));
        assert_eq!(member.recent(), [(0, send(0, 1)), (1, reduce(1)), (1, recv(0, 1)), (2, sync())]);
        (3..=100).for_each(|number| assert_eq!(member.posted(reduce(number)), number as u64));
        let expected: Vec<_> = (69..=100).map(|number| (number as u64, reduce(number))).collect();
        assert_eq!(member.recent(), expected);
    });
}
