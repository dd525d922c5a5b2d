//! Ranks that do not belong to the group: they are told the reason, and the others go on.

use std::net::TcpListener;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use gradsync::bootstrap::{BootstrapError, Member, Rendezvous, Secret, Strangers};
use gradsync_tests::ranks::guarded;

use crate::AT_ONCE;
use crate::group::{Way, barrier, on_ranks, refused, secret};

const SHORT: Duration = Duration::from_millis(400);

/// Joins as ranks 0 and 1, and runs `then` once both are known to be present. To detect their presence, each of them joins twice, and the
/// second join is refused. Across processes only rank 1 joins twice: it cannot join before rank 0, and a second rank 0 would be refused for
/// its port or not at all. Returns the outcomes of the accepted joins.
fn with_two_ranks_present<T: Send>(
    way: Way,
    rendezvous: &Rendezvous,
    world_size: usize,
    then: impl FnOnce() -> T,
) -> (Vec<gradsync::Result<Member>>, T) {
    let twice: &[usize] = if way == Way::InProcess { &[0, 1] } else { &[1] };
    thread::scope(|scope| {
        let (done, outcomes) = channel();
        for &rank in [0, 1].iter().chain(twice) {
            let done = done.clone();
            scope.spawn(move || done.send((rank, rendezvous.join(rank, world_size))).unwrap());
        }
        let mut refusals: Vec<_> = outcomes.iter().take(twice.len()).collect();
        refusals.sort_by_key(|(rank, _)| *rank);
        for (rank, (refused_rank, outcome)) in twice.iter().zip(refusals) {
            assert_eq!((*rank, refused(outcome)), (refused_rank, BootstrapError::DuplicateRank { rank: *rank }));
        }
        let then = then();
        (outcomes.iter().take(2).map(|(_, outcome)| outcome).collect(), then)
    })
}

#[test]
fn the_second_of_two_equal_ranks_is_refused() {
    guarded(60, || {
        for way in Way::ALL {
            let meeting = way.meeting();
            let (members, third) =
                with_two_ranks_present(way, &meeting.rendezvous, 3, || meeting.rendezvous.join(2, 3).unwrap());
            thread::scope(|scope| {
                for member in members {
                    scope.spawn(move || barrier(&member.unwrap()));
                }
                barrier(&third);
            });
        }
    });
}

#[test]
fn different_world_sizes_are_named_on_everybody() {
    guarded(60, || {
        for way in Way::ALL {
            let meeting = way.meeting();
            let start = Instant::now();
            let (earlier, newcomer) =
                with_two_ranks_present(way, &meeting.rendezvous, 3, || meeting.rendezvous.join(2, 4));
            for outcome in earlier.into_iter().chain([newcomer]) {
                let error = refused(outcome);
                assert!(
                    matches!(error, BootstrapError::WorldSizeMismatch { left: 3, right_rank: 2, right: 4, .. }),
                    "{way:?}: {error:?}"
                );
            }
            assert!(start.elapsed() < AT_ONCE, "{way:?}: {:?}", start.elapsed());
        }
    });
}

#[test]
fn ranks_out_of_range_are_refused() {
    for way in Way::ALL {
        let meeting = way.meeting();
        for (rank, world_size) in [(3, 3), (7, 3), (0, 0)] {
            let error = refused(meeting.rendezvous.join(rank, world_size));
            assert_eq!(error, BootstrapError::RankOutOfRange { rank, world_size });
        }
    }
}

#[test]
fn too_many_ranks_are_refused_before_an_allocation() {
    for way in Way::ALL {
        let meeting = way.meeting();
        for world_size in [65_537, 100_000_000, usize::MAX] {
            let error = refused(meeting.rendezvous.join(0, world_size));
            assert_eq!(error, BootstrapError::WorldSizeOutOfRange { world_size, most: 65_536 });
        }
    }
}

#[test]
fn a_host_that_can_be_no_address_is_refused_at_once() {
    let start = Instant::now();
    for (host, words) in [("tcp://node", "scheme"), ("node:29500", "port"), ("a b", "white space"), ("", "name")] {
        for rank in [0, 1] {
            let error = refused(Rendezvous::tcp(host, 29_500, secret()).join(rank, 2));
            assert!(matches!(&error, BootstrapError::InvalidAddress { address, .. } if address == host), "{error:?}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
}

#[test]
fn a_wrong_secret_is_refused_and_the_others_go_on() {
    guarded(60, || {
        let meeting = Way::Tcp.meeting();
        let stranger = Rendezvous::tcp("127.0.0.1", meeting.port, Secret::generate().unwrap());
        thread::scope(|scope| {
            let rank_0 = scope.spawn(|| barrier(&meeting.rendezvous.join(0, 2).unwrap()));
            let start = Instant::now();
            let error = refused(stranger.join(1, 2));
            assert_eq!(error, BootstrapError::WrongSecret { address: format!("127.0.0.1:{}", meeting.port) });
            assert!(start.elapsed() < AT_ONCE, "it was tried again: {:?}", start.elapsed());
            barrier(&meeting.rendezvous.join(1, 2).unwrap());
            rank_0.join().unwrap();
        });
    });
}

#[test]
fn another_generation_is_refused_and_the_others_go_on() {
    guarded(60, || {
        let meeting = Way::Tcp.meeting();
        let [current, stale] = [7, 6].map(|generation| meeting.rendezvous.clone().with_generation(generation));
        thread::scope(|scope| {
            let rank_0 = scope.spawn(|| barrier(&current.join(0, 2).unwrap()));
            let error = refused(stale.join(1, 2));
            assert_eq!(error, BootstrapError::GenerationMismatch { rank: 1, generation: 6, expected: 7 });
            barrier(&current.join(1, 2).unwrap());
            rank_0.join().unwrap();
        });
    });
}

#[test]
fn a_rank_of_the_next_generation_waits_for_its_group() {
    guarded(60, || {
        let meeting = Way::Tcp.meeting();
        let [now, next] = [7, 8].map(|generation| meeting.rendezvous.clone().with_generation(generation));
        thread::scope(|scope| {
            let rank_0 = scope.spawn(|| {
                barrier(&now.join(0, 2).unwrap());
                barrier(&next.join(0, 2).unwrap());
            });
            let early = scope.spawn(|| barrier(&next.join(1, 2).unwrap()));
            // The early rank reaches the former generation's group, which does not count it as one of its ranks.
            thread::sleep(SHORT);
            barrier(&now.join(1, 2).unwrap());
            early.join().unwrap();
            rank_0.join().unwrap();
        });
    });
}

#[test]
fn a_busy_port_is_named() {
    guarded(60, || {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in ["127.0.0.1", "localhost", "some-other-name"] {
            let error = refused(Rendezvous::tcp(host, port, secret()).join(0, 2));
            assert!(matches!(error, BootstrapError::PortBusy { .. }), "{host}: {error:?}");
            assert!(error.to_string().contains(&port.to_string()), "{error}");
        }
        drop(listener);
        let rendezvous = Rendezvous::tcp("127.0.0.1", port, secret()).with_deadline(AT_ONCE);
        on_ranks(0..2, |rank| barrier(&rendezvous.join(rank, 2).unwrap()));
        let error = refused(Rendezvous::tcp("127.0.0.1", 0, secret()).join(0, 2));
        assert!(error.to_string().contains("port 0"), "{error}");
    });
}

/// A rank that gives up frees its rank number, so only ranks that never joined are named.
#[test]
fn a_rank_that_gives_up_ends_it_for_all() {
    guarded(60, || {
        let meeting = Way::Tcp.meeting();
        let (patient, hasty) = (meeting.rendezvous.clone(), meeting.rendezvous.clone().with_deadline(SHORT));
        let errors = on_ranks(0..2, |rank| refused([&patient, &hasty][rank].join(rank, 3)));
        for error in errors {
            assert_eq!(
                error,
                BootstrapError::Missing { missing: vec![2], deadline: SHORT, strangers: Strangers::default() }
            );
        }
    });
}
