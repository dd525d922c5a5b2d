//! Ranks that join by every kind of rendezvous, and ranks that never join.

use std::thread;
use std::time::{Duration, Instant};

use gradsync::bootstrap::{BootstrapError, Rendezvous, Strangers};
use gradsync_tests::ranks::guarded;

use crate::group::{Way, barrier, free_port, on_members, on_ranks, refused, secret};
use crate::{PLENTY, WORLD_SIZES};

/// The deadline of joins that stay incomplete.
const SHORT: Duration = Duration::from_millis(400);
/// The additional time that such a join may take.
const SLACK: Duration = Duration::from_secs(1);

#[test]
fn every_way_and_size() {
    guarded(120, || {
        for way in Way::ALL {
            for world_size in WORLD_SIZES {
                let names = on_members(way, world_size, |member| {
                    assert_eq!(member.failure(), None);
                    member.all_gather(format!("rank {}", member.rank()).as_bytes(), PLENTY).unwrap()
                });
                let expected: Vec<Vec<u8>> = (0..world_size).map(|rank| format!("rank {rank}").into_bytes()).collect();
                assert!(names.iter().all(|names| *names == expected), "{way:?} {world_size}: {names:?}");
            }
        }
    });
}

/// Rank 0 may join last: the others look for it until it is there.
#[test]
fn ranks_come_in_any_order() {
    guarded(60, || {
        for way in Way::ALL {
            let meeting = way.meeting();
            on_ranks(0..3, |rank| {
                thread::sleep(Duration::from_millis(100 * (2 - rank as u64)));
                barrier(&meeting.rendezvous.join(rank, 3).unwrap());
            });
        }
    });
}

/// A group of one rank needs no others and no free port.
#[test]
fn a_group_of_one_needs_nothing() {
    let busy = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = busy.local_addr().unwrap().port();
    let member = Rendezvous::tcp("127.0.0.1", port, secret()).join(0, 1).unwrap();
    assert_eq!(member.all_gather(b"alone", PLENTY).unwrap(), [b"alone"]);
    assert_eq!(member.split(Some(4), 0, PLENTY).unwrap().unwrap().world_size(), 1);
}

/// The next group can use the same rendezvous, also with fewer ranks, as after a failure.
#[test]
fn a_place_can_be_used_again() {
    guarded(60, || {
        for way in Way::ALL {
            let meeting = way.meeting();
            for (generation, world_size) in [(0, 3), (1, 3), (2, 2)] {
                let rendezvous = meeting.rendezvous.clone().with_generation(generation);
                on_ranks(0..world_size, |rank| {
                    let member = rendezvous.join(rank, world_size).unwrap();
                    barrier(&member);
                });
            }
        }
    });
}

#[test]
fn two_groups_at_once_do_not_meet() {
    guarded(60, || {
        let meetings = [Way::Tcp.meeting(), Way::Tcp.meeting()];
        on_ranks(0..4, |index| {
            let member = meetings[index / 2].rendezvous.join(index % 2, 2).unwrap();
            let groups = member.all_gather(&[index as u8 / 2], PLENTY).unwrap();
            assert_eq!(groups, vec![vec![index as u8 / 2]; 2]);
        });
    });
}

fn missing<const N: usize>(ranks: [usize; N]) -> BootstrapError {
    BootstrapError::Missing { missing: ranks.into(), deadline: SHORT, strangers: Strangers::default() }
}

#[test]
fn missing_ranks_are_named_on_every_rank() {
    guarded(60, || {
        for way in Way::ALL {
            let meeting = way.meeting();
            let rendezvous = meeting.rendezvous.clone().with_deadline(SHORT);
            let start = Instant::now();
            let errors = on_ranks([0, 2, 3], |rank| (refused(rendezvous.join(rank, 5)), start.elapsed()));
            for (error, took) in errors {
                assert_eq!(error, missing([1, 4]), "{way:?}");
                assert!(took < SHORT + SLACK, "{way:?}: {took:?}");
                assert!(error.to_string().contains("[1, 4]"), "{error}");
            }
        }
    });
}

#[test]
fn without_rank_0_the_others_say_where_they_looked() {
    guarded(60, || {
        for way in Way::ALL {
            let meeting = way.meeting();
            let rendezvous = meeting.rendezvous.clone().with_deadline(SHORT);
            let start = Instant::now();
            for error in on_ranks([1, 2], |rank| refused(rendezvous.join(rank, 3))) {
                assert!(start.elapsed() < SHORT + SLACK, "{way:?}: {:?}", start.elapsed());
                let place = match way {
                    Way::InProcess => {
                        assert_eq!(error, missing([0]));
                        continue;
                    }
                    Way::Tcp => format!("127.0.0.1:{}", meeting.port),
                };
                let text = error.to_string();
                assert!(matches!(error, BootstrapError::Unreachable { .. }), "{error:?}");
                assert!(text.contains(&place) && text.contains(&format!("{SHORT:?}")), "{text}");
            }
        }
    });
}

/// A listener on loopback is unreachable at other addresses; a listener on all interfaces is reachable at each of them.
#[cfg(target_os = "linux")]
#[test]
fn rank_0_listens_on_all_interfaces_unless_told_loopback() {
    guarded(60, || {
        for (host, alias, is_reached) in [
            ("localhost", "127.0.0.1", true),
            ("127.0.0.1", "localhost", true),
            ("0.0.0.0", "127.0.0.2", true),
            ("some-other-name", "127.0.0.2", true),
            ("127.0.0.1", "127.0.0.2", false),
            ("LocalHost", "127.0.0.2", false),
        ] {
            let port = free_port();
            let deadline = if is_reached { PLENTY } else { SHORT };
            let outcomes = on_ranks(0..2, |rank| {
                Rendezvous::tcp([host, alias][rank], port, secret()).with_deadline(deadline).join(rank, 2).map(drop)
            });
            assert!(outcomes.iter().all(|outcome| outcome.is_ok() == is_reached), "{host} from {alias}: {outcomes:?}");
        }
    });
}
