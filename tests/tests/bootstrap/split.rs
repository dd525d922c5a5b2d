//! `split`: groups within a group, with a life of their own.

use std::time::Duration;

use gradsync::CommError;
use gradsync::comm::Departure;
use gradsync::internal::MemberCalls;
use gradsync_tests::ranks::guarded;

use crate::group::{Way, barrier, on_members, reduce, send_recv, sync};
use crate::{PLENTY, WORLD_SIZES};

#[test]
fn colours_make_groups_ordered_by_key() {
    guarded(120, || {
        for way in Way::ALL {
            for world_size in WORLD_SIZES {
                on_members(way, world_size, |member| {
                    let rank = member.rank();
                    // Even ranks are in reverse order, odd ranks in rank order as their keys are equal, and every third rank is in no
                    // group.
                    let color = (rank % 3 != 2).then_some((rank % 2) as u64);
                    let key = if rank % 2 == 0 { -(rank as i64) } else { 5 };
                    let child = member.split(color, key, PLENTY).unwrap();
                    let mut group: Vec<usize> =
                        (0..world_size).filter(|other| other % 3 != 2 && other % 2 == rank % 2).collect();
                    if rank % 2 == 0 {
                        group.reverse();
                    }
                    let Some(child) = child else { return assert_eq!(color, None) };
                    let own = group.iter().position(|&other| other == rank).unwrap();
                    assert_eq!((child.rank(), child.world_size()), (own, group.len()), "{way:?}, rank {rank}");
                    let ranks = child.all_gather(&[rank as u8], PLENTY).unwrap();
                    assert_eq!(ranks.concat(), group.iter().map(|&rank| rank as u8).collect::<Vec<_>>());
                    child.agree(&[reduce(rank % 2)], PLENTY).unwrap();
                    let (size, next) = (group.len(), (own + 1) % group.len());
                    child.agree(&[send_recv(next, (own + size - 1) % size)], PLENTY).unwrap();
                });
            }
        }
    });
}

/// Groups of groups, and several splits one after another.
#[test]
fn groups_split_again() {
    guarded(60, || {
        for way in Way::ALL {
            on_members(way, 8, |member| {
                let rank = member.rank();
                let half = member.split(Some(rank as u64 / 4), 0, PLENTY).unwrap().unwrap();
                let pair = half.split(Some(half.rank() as u64 / 2), -(rank as i64), PLENTY).unwrap().unwrap();
                assert_eq!((pair.rank(), pair.world_size()), (1 - rank % 2, 2));
                let again = member.split(Some(9), 0, PLENTY).unwrap().unwrap();
                assert_eq!((again.rank(), again.world_size()), (rank, 8));
                // The intermediate groups may be gone.
                drop(half);
                barrier(&pair);
                barrier(&again);
            });
        }
    });
}

#[test]
fn groups_fail_and_end_on_their_own() {
    guarded(60, || {
        for way in Way::ALL {
            on_members(way, 4, |member| {
                let rank = member.rank();
                let child = member.split(Some(rank as u64 / 2), 0, PLENTY).unwrap().unwrap();
                if rank < 2 {
                    child.agree(&[reduce(rank)], PLENTY).unwrap_err();
                }
                barrier(&member);
                assert_eq!(child.failure().is_some(), rank < 2, "{way:?}");
                assert_eq!(member.failure(), None, "{way:?}");
                // The end of the parent does not end the child; rank 0 leaves the parent first or last.
                drop(member);
                if rank >= 2 {
                    barrier(&child);
                }
            });
        }
    });
}

#[test]
fn a_rank_that_does_not_split_is_named() {
    guarded(60, || {
        let deadline = Duration::from_millis(300);
        for way in Way::ALL {
            on_members(way, 3, |member| {
                let error = match member.rank() {
                    1 => return drop(member.wait_failure(PLENTY)),
                    rank => member.split(Some(rank as u64), 0, deadline).unwrap_err(),
                };
                assert!(
                    matches!(&error, gradsync::Error::Comm(CommError::Timeout { missing, .. }) if missing == &[1]),
                    "{way:?}: {error:?}"
                );
                let text = error.to_string();
                assert!(text.starts_with("split: ranks [1] did not arrive within"), "{way:?}: {text}");
            });
            on_members(way, 2, |member| {
                let text = match member.rank() {
                    0 => member.split(None, 0, PLENTY).unwrap_err().to_string(),
                    _ => member.agree(&[reduce(7)], PLENTY).unwrap_err().to_string(),
                };
                let expected = format!("ranks disagree: rank 0 called split, rank 1 called {}", reduce(7));
                assert_eq!(text, expected, "{way:?}");
            });
            on_members(way, 2, |member| {
                if member.rank() == 1 {
                    return;
                }
                let error = member.split(None, 0, PLENTY).unwrap_err();
                assert!(
                    matches!(
                        error,
                        gradsync::Error::Comm(CommError::PeerGone { rank: 1, departure: Departure::Left, .. })
                    ),
                    "{way:?}: {error:?}"
                );
                assert_eq!(error.to_string(), "split: rank 1 left", "{way:?}");
                member.agree(&[sync()], PLENTY).unwrap_err();
            });
        }
    });
}
