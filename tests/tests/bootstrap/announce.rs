//! `announce` and `confirm`: ranks run ahead of each other, and every rank learns of calls that do not match: soon after they are made, and
//! at the latest when it confirms.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gradsync::CommError;
use gradsync::bootstrap::Member;
use gradsync::comm::{Call, Departure, Operation, ReduceOp};
use gradsync::dtype::DType;
use gradsync::internal::MemberCalls;
use gradsync_tests::ranks::guarded;

use crate::group::{Way, barrier, mismatch, on_members, recv, reduce, send, send_recv, sync};
use crate::{AT_ONCE, PLENTY, WORLD_SIZES};

const DEADLINE: Duration = Duration::from_millis(500);
/// The number of calls that a rank may be ahead of the others.
const LIMIT: usize = 4096;

/// As many calls as a step of training has buckets.
fn step() -> Vec<Call> {
    (0..14).map(|bucket| reduce(1000 + bucket)).collect()
}

/// Announces calls one by one until one is refused; if none is, confirms them.
fn announce_all(member: &Member, calls: &[Call]) -> Result<(), CommError> {
    calls.iter().try_for_each(|call| member.announce(&[*call], PLENTY))?;
    member.confirm(PLENTY)
}

/// Each rank announces its calls one by one; all ranks hear of the same mismatch, however far they are.
#[track_caller]
fn assert_mismatch(lists: &[Vec<Call>], expected: &CommError) {
    for way in Way::ALL {
        let start = Instant::now();
        let errors = on_members(way, lists.len(), |member| {
            let calls = &lists[member.rank()];
            let error = match announce_all(&member, calls) {
                Err(error) => error,
                // The calls of this rank may have matched before another rank's did not.
                Ok(()) => member.wait_failure(PLENTY).expect("the others cannot fit"),
            };
            let again = [member.announce(&[sync()], PLENTY), member.agree(&[sync()], PLENTY)];
            assert_eq!(again, [Err(error.clone()), Err(error.clone())], "the first failure sticks");
            error
        });
        assert!(errors.iter().all(|error| error == expected), "{way:?}, {lists:?}: {errors:?}");
        assert!(start.elapsed() < AT_ONCE, "found only after {:?}", start.elapsed());
    }
}

#[test]
fn equal_calls_are_confirmed() {
    guarded(120, || {
        for way in Way::ALL {
            for world_size in WORLD_SIZES {
                on_members(way, world_size, |member| {
                    member.confirm(Duration::ZERO).unwrap();
                    for _ in 0..20 {
                        announce_all(&member, &step()).unwrap();
                        member.announce(&step(), PLENTY).unwrap();
                        member.announce(&[], PLENTY).unwrap();
                        // Calls that wait for the other ranks stand between the announced calls.
                        barrier(&member);
                        member.agree(&step(), PLENTY).unwrap();
                    }
                    member.ask_to_confirm();
                    member.confirm(PLENTY).unwrap();
                    assert_eq!(member.failure(), None);
                });
            }
        }
    });
}

/// The other ranks announce nothing before rank 0 has finished its step, so rank 0 can only go on if it waits for nobody.
#[test]
fn a_rank_runs_ahead_of_the_others() {
    guarded(60, || {
        for way in Way::ALL {
            let ahead = Barrier::new(4);
            on_members(way, 4, |member| {
                if member.rank() == 1 {
                    step().iter().for_each(|call| member.announce(&[*call], Duration::ZERO).unwrap());
                }
                ahead.wait();
                if member.rank() != 1 {
                    step().iter().for_each(|call| member.announce(&[*call], Duration::ZERO).unwrap());
                }
                member.confirm(PLENTY).unwrap();
            });
        }
    });
}

#[test]
fn one_call_that_differs_is_named_on_every_rank() {
    guarded(120, || {
        let sum = |len, dtype| Call::new(Operation::AllReduce(ReduceOp::Sum), len, dtype);
        let own = reduce(1007);
        for other in [
            Call::new(Operation::AllReduce(ReduceOp::Max), 1007, DType::BF16),
            Call::new(Operation::AllGather, 1007, DType::BF16),
            sum(1008, DType::BF16),
            sum(1007, DType::F16),
            sync(),
        ] {
            for odd in [0, 2] {
                let mut lists = vec![step(); 3];
                lists[odd][7] = other;
                // Either of the two other ranks may be the first to be compared with the odd one.
                let peers: Vec<usize> = (0..3).filter(|rank| *rank != odd).collect();
                for way in Way::ALL {
                    let errors = on_members(way, 3, |member| {
                        announce_all(&member, &lists[member.rank()]).expect_err("a call differs")
                    });
                    let expected = peers.iter().map(|&peer| match odd {
                        0 => mismatch(0, other, peer, own),
                        _ => mismatch(peer, own, odd, other),
                    });
                    assert!(expected.into_iter().any(|error| error == errors[0]), "{way:?}: {errors:?}");
                    assert!(errors.iter().all(|error| *error == errors[0]), "{way:?}: {errors:?}");
                }
            }
        }
    });
}

#[test]
fn another_order_is_named_on_every_rank() {
    guarded(60, || {
        let mut swapped = step();
        swapped.swap(5, 6);
        assert_mismatch(&[step(), swapped], &mismatch(0, reduce(1005), 1, reduce(1006)));
        let shorter = step()[..13].to_vec();
        // One rank is at its next exchange, while the other makes one more call.
        for way in Way::ALL {
            let errors = on_members(way, 2, |member| {
                let calls = if member.rank() == 0 { &step()[..] } else { &shorter[..] };
                calls.iter().for_each(|call| member.announce(&[*call], PLENTY).unwrap());
                member.all_gather(b"", PLENTY).expect_err("rank 0 has made one call more")
            });
            let expected = mismatch(0, reduce(1013), 1, Call::without_data(Operation::Exchange));
            assert_eq!(errors, [expected.clone(), expected], "{way:?}");
        }
    });
}

/// A call that is recorded into a CUDA graph is announced when it is recorded, and each launch is announced as a call of its own.
#[test]
fn recordings_and_launches_are_compared() {
    guarded(60, || {
        let begins = |recording| Call::without_data(Operation::Recording { recording });
        let launches = |recording| Call::without_data(Operation::Graph { recording });
        let launch = launches(1);
        let program = |launches: usize| [vec![begins(1)], step(), vec![launch; launches]].concat();
        for way in Way::ALL {
            on_members(way, 3, |member| announce_all(&member, &program(40)).unwrap());
        }
        let [mut more, mut fewer] = [program(3), program(2)];
        more.push(reduce(1));
        fewer.push(reduce(1));
        assert_mismatch(&[more, fewer], &mismatch(0, launch, 1, reduce(1)));
        // One rank launches another recording, or records a call that the other rank makes.
        let [one, other] = [1, 2].map(|recording| [program(0), vec![launches(recording)]].concat());
        assert_mismatch(&[one, other], &mismatch(0, launches(1), 1, launches(2)));
        assert_mismatch(&[program(0), step()], &mismatch(0, begins(1), 1, step()[0]));
        let text = mismatch(0, launches(1), 1, launches(2)).to_string();
        assert!(text.contains("graph (recording 1)") && text.contains("graph (recording 2)"), "{text}");
    });
}

#[test]
fn transfers_meet_pair_by_pair_in_order() {
    guarded(60, || {
        for way in Way::ALL {
            on_members(way, 4, |member| {
                let rank = member.rank();
                for round in 0..50 {
                    match rank {
                        0 => member.announce(&[send(1, round)], PLENTY).unwrap(),
                        1 => member.announce(&[recv(0, round)], PLENTY).unwrap(),
                        2 => member.announce(&[send_recv(3, 3)], PLENTY).unwrap(),
                        _ => member.announce(&[send(2, 3), recv(2, 3)], PLENTY).unwrap(),
                    }
                }
                let mut group = vec![reduce(1)];
                for offset in 0..4 {
                    let peer = (rank + offset) % 4;
                    group.extend([send(peer, rank + 1), recv(peer, peer + 1)]);
                }
                (0..5).for_each(|_| member.announce(&group, PLENTY).unwrap());
                member.confirm(PLENTY).unwrap();
            });
        }
        let (to, from) =
            (|lens: [usize; 3]| lens.map(|len| send(1, len)), |lens: [usize; 3]| lens.map(|len| recv(0, len)));
        assert_mismatch(&[to([1, 2, 3]).to_vec(), from([1, 3, 2]).to_vec()], &mismatch(0, send(1, 2), 1, recv(0, 3)));
        assert_mismatch(&[vec![send(1, 4)], vec![send(0, 4)]], &mismatch(0, send(1, 4), 1, send(0, 4)));
        assert_mismatch(&[vec![sync()], vec![recv(0, 4)]], &mismatch(0, sync(), 1, recv(0, 4)));
    });
}

/// Invalid calls either leave the group usable, or fail with an error that names the rank.
#[test]
fn calls_that_cannot_be_are_refused_at_once() {
    guarded(60, || {
        for way in Way::ALL {
            let errors = on_members(way, 2, |member| {
                let rank = member.rank();
                for calls in [&[send(2, 1)][..], &[send(rank, 1)], &[sync(), recv(rank, 1)]] {
                    let error = member.announce(calls, PLENTY).unwrap_err();
                    assert!(matches!(error, CommError::InvalidPeer { .. }), "{error:?}");
                }
                member.announce(&vec![sync(); 16_384], PLENTY).unwrap();
                announce_all(&member, &step()).unwrap();
                barrier(&member);
                if rank == 1 {
                    return member.announce(&vec![sync(); 16_385], PLENTY).unwrap_err();
                }
                member.wait_failure(PLENTY).expect("rank 1 makes too many calls")
            });
            assert!(errors.iter().all(|error| matches!(error, CommError::InvalidCall { rank: 1, .. })), "{errors:?}");
        }
    });
}

/// A rank that stops announcing is named on every rank once the deadline of any rank has passed.
#[test]
fn a_rank_that_does_not_come_is_named_by_who_confirms() {
    guarded(60, || {
        for way in Way::ALL {
            let errors = on_members(way, 4, |member| {
                let calls = step();
                let made = if member.rank() == 2 { &calls[..9] } else { &calls[..] };
                made.iter().for_each(|call| member.announce(&[*call], PLENTY).unwrap());
                match member.rank() {
                    0 | 3 => member.confirm(DEADLINE).expect_err("rank 2 does not come"),
                    _ => member.wait_failure(PLENTY).expect("the others give up"),
                }
            });
            let operation = reduce(1).operation;
            let expected = CommError::Timeout { operation, missing: vec![2], deadline: DEADLINE };
            assert_eq!(errors, vec![expected; 4], "{way:?}");
        }
    });
}

/// A rank may leave after it has announced its calls: the other ranks' matching calls do not need it any more.
#[test]
fn what_was_announced_outlives_its_rank() {
    guarded(60, || {
        for way in Way::ALL {
            // The test synchronises its steps by its own barriers, as each use of the group that needs rank 2 fails.
            let (has_left, is_confirmed) = (Barrier::new(3), Barrier::new(2));
            on_members(way, 3, |member| {
                let rank = member.rank();
                if rank == 2 {
                    step().iter().for_each(|call| member.announce(&[*call], PLENTY).unwrap());
                    drop(member);
                    has_left.wait();
                    return;
                }
                has_left.wait();
                announce_all(&member, &step()).unwrap();
                assert_eq!(member.failure(), None);
                is_confirmed.wait();
                // One more call needs the rank that has left.
                let error = announce_all(&member, &[reduce(4)]).expect_err("rank 2 has left");
                let (operation, departure) = (reduce(4).operation, Departure::Left);
                assert_eq!(error, CommError::PeerGone { operation, rank: 2, departure }, "{way:?}");
            });
        }
    });
}

/// Rank 0 leaves once its own calls are confirmed; the others, which ask only afterwards, still get the confirmation.
#[test]
fn rank_0_may_leave_before_the_others_confirm() {
    guarded(60, || {
        for way in Way::ALL {
            for _ in 0..20 {
                on_members(way, 3, |member| {
                    step().iter().for_each(|call| member.announce(&[*call], PLENTY).unwrap());
                    if member.rank() != 0 {
                        while member.gone_before(1).is_none() {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                    member.confirm(PLENTY).unwrap();
                });
            }
        }
    });
}

/// A rank that is far ahead waits at the limit, where the others catch up with it: no rank keeps more than `LIMIT` calls.
#[test]
fn a_rank_is_ahead_by_no_more_than_the_limit() {
    guarded(60, || {
        for way in Way::ALL {
            let is_late = AtomicBool::new(false);
            on_members(way, 2, |member| {
                if member.rank() == 1 {
                    (0..LIMIT).for_each(|_| member.announce(&[sync()], Duration::ZERO).unwrap());
                    std::thread::scope(|scope| {
                        let next = scope.spawn(|| member.announce(&[sync()], PLENTY));
                        std::thread::sleep(Duration::from_millis(100));
                        assert!(!next.is_finished(), "{way:?}: call {} is not held back", LIMIT + 1);
                        is_late.store(true, Ordering::Release);
                        next.join().unwrap().unwrap();
                    });
                } else {
                    while !is_late.load(Ordering::Acquire) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    (0..=LIMIT).for_each(|_| member.announce(&[sync()], PLENTY).unwrap());
                }
                member.confirm(PLENTY).unwrap();
            });
            let error = on_members(way, 2, |member| match member.rank() {
                0 => member.wait_failure(PLENTY).expect("rank 1 gives up"),
                _ => (0..=LIMIT).find_map(|_| member.announce(&[sync()], DEADLINE).err()).expect("nobody comes"),
            });
            let expected = CommError::Timeout { operation: sync().operation, missing: vec![0], deadline: DEADLINE };
            assert_eq!(error, [expected.clone(), expected], "{way:?}");
        }
    });
}

/// The resident memory of this process, in KiB.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("a system that tells");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a number");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// A flood of calls, from ranks of unequal speed, arrives in order and leaves no memory in use.
#[test]
fn a_flood_keeps_its_order_and_takes_no_memory() {
    guarded(300, || {
        for way in Way::ALL {
            let before = resident();
            on_members(way, 3, |member| {
                for number in 0..100_000 {
                    member.announce(&[reduce(number)], PLENTY).unwrap();
                    if member.rank() == 2 && number % 10_000 == 0 {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    if number % 10_000 == 5000 && member.rank() == 0 {
                        // The allowance covers the other tests of this program; the records of all calls would need far more.
                        let grown = resident().saturating_sub(before);
                        assert!(grown < 24 << 10, "{way:?}: {grown} KiB after {number} calls");
                    }
                }
                member.confirm(PLENTY).unwrap();
            });
        }
    });
}
