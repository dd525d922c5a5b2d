//! `split`: groups within a group, with a life of their own.

use std::time::Duration;

use gradsync::comm::local::{LocalCommunicator, group_with_deadline};
use gradsync::comm::{Collectives, CommError, Departure, Ranks, ReduceOp, Split};
use gradsync::{Error, Result};
use gradsync_tests::ranks::{guarded, on_ranks};

use crate::{WORLD_SIZES, gathered};

#[test]
fn colours_make_groups_ordered_by_key_and_rank() {
    guarded(60, || {
        for world_size in WORLD_SIZES {
            on_ranks(world_size, |comm| {
                let rank = comm.rank();
                // Even ranks are in reverse order, odd ranks in rank order as their keys are equal, and every third rank is in no group.
                let color = (rank % 3 != 2).then_some(if rank % 2 == 0 { 0 } else { u64::MAX });
                let key = if rank % 2 == 0 { -(rank as i64) } else { i64::MAX };
                let mut group: Vec<usize> =
                    (0..world_size).filter(|other| other % 3 != 2 && other % 2 == rank % 2).collect();
                if rank % 2 == 0 {
                    group.reverse();
                }
                let Some(child) = comm.split(color, key).unwrap() else { return assert_eq!(color, None) };
                let own = group.iter().position(|&other| other == rank).unwrap();
                assert_eq!((child.rank(), child.world_size()), (own, group.len()), "rank {rank} of {world_size}");
                assert_eq!(gathered(&child, rank), group, "rank {rank} of {world_size}");
            });
        }
    });
}

/// Ranks with the colour 0 and ranks without a colour are not in one group.
#[test]
fn no_colour_is_no_group() {
    guarded(20, || {
        on_ranks(4, |comm| {
            let child = comm.split((comm.rank() == 3).then_some(0), 0).unwrap();
            assert_eq!(child.map(|child| child.world_size()), (comm.rank() == 3).then_some(1));
            assert!(comm.split(None, 0).unwrap().is_none());
            comm.barrier().unwrap();
        });
    });
}

/// Groups of groups, and many splits with the same colours one after another.
#[test]
fn groups_split_again() {
    guarded(60, || {
        on_ranks(8, |comm| {
            let rank = comm.rank();
            let half = comm.split(Some(rank as u64 / 4), 0).unwrap().unwrap();
            let pair = half.split(Some(half.rank() as u64 / 2), -(rank as i64)).unwrap().unwrap();
            assert_eq!((pair.rank(), pair.world_size()), (1 - rank % 2, 2));
            drop(half);
            assert_eq!(gathered(&pair, rank), [rank | 1, rank & !1]);
            for round in 0..200 {
                let shift = (rank + round) % 3;
                let group = comm.split(Some(shift as u64), 0).unwrap().unwrap();
                let members: Vec<usize> = (0..8).filter(|other| (other + round) % 3 == shift).collect();
                assert_eq!(gathered(&group, rank), members, "round {round}");
            }
            drop(comm);
            assert_eq!(gathered(&pair, rank), [rank | 1, rank & !1]);
        });
    });
}

#[test]
fn groups_fail_and_end_on_their_own() {
    guarded(20, || {
        on_ranks(4, |comm| {
            let rank = comm.rank();
            let child = comm.split(Some(rank as u64 / 2), 0).unwrap().unwrap();
            let mut data = vec![1.0f32; 1 + rank.min(1)];
            // Ranks 0 and 1 disagree; ranks 2 and 3 do not.
            let outcome = child.all_reduce(&mut data, ReduceOp::Sum);
            assert_eq!(outcome.is_err(), rank < 2, "{outcome:?}");
            comm.barrier().unwrap();
            assert_eq!(child.barrier().is_err(), rank < 2);
            assert!(comm.send(&[0.0f32], 9).is_err());
            comm.barrier().unwrap();
        });
    });
}

/// Rank 1 runs `lost` instead of a split; returns the errors of all ranks that have one.
fn errors(lost: impl Fn(LocalCommunicator) -> Result<()> + Sync) -> Vec<Error> {
    let deadline = Duration::from_millis(400);
    let lost = &lost;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = group_with_deadline(3, deadline)
            .unwrap()
            .into_iter()
            .map(|comm| {
                scope.spawn(move || match comm.rank() {
                    1 => lost(comm).err(),
                    rank => Some(comm.split(Some(rank as u64), 0).expect_err("rank 1 does not split")),
                })
            })
            .collect();
        ranks.into_iter().filter_map(|rank| rank.join().unwrap_or(None)).collect()
    })
}

#[test]
fn a_rank_that_does_not_split_is_an_error_on_the_others() {
    guarded(30, || {
        let mismatched = errors(|comm| comm.barrier());
        assert_eq!(mismatched.len(), 3, "rank 1 has it too");
        for error in mismatched {
            let text = error.to_string();
            assert!(matches!(error, Error::Comm(CommError::Mismatch { .. })), "{error:?}");
            assert!(text.contains("called split") && text.contains("rank 1 called barrier"), "\"{text}\"");
        }
        let gone = |errors: Vec<Error>, how| {
            assert_eq!(errors.len(), 2);
            for error in errors {
                let is_right = matches!(
                    &error,
                    Error::Comm(CommError::PeerGone { rank: 1, departure, .. }) if *departure == how
                );
                assert!(is_right, "{error:?}");
            }
        };
        gone(errors(|_comm| Ok(())), Departure::Left);
        gone(errors(|_comm| panic!("on purpose")), Departure::Panicked);
        let late = errors(|comm| {
            std::thread::sleep(Duration::from_millis(800));
            comm.split(None, 0).map(|_| ())
        });
        assert_eq!(late.len(), 3, "the late rank has it too");
        for error in late {
            let is_right = matches!(&error, Error::Comm(CommError::Timeout { missing, .. }) if *missing == [1]);
            assert!(is_right, "{error:?}");
        }
    });
}

/// The group inherits its parent's deadline: with the default deadline, this would take ten minutes.
#[test]
fn a_group_has_the_deadline_of_the_one_it_came_from() {
    guarded(30, || {
        let group = group_with_deadline(2, Duration::from_millis(300)).unwrap();
        std::thread::scope(|scope| {
            for comm in group {
                scope.spawn(move || {
                    let child = comm.split(Some(0), 0).unwrap().unwrap();
                    if child.rank() == 0 {
                        let error = child.barrier().expect_err("rank 1 sleeps");
                        assert!(matches!(error, Error::Comm(CommError::Timeout { .. })), "{error:?}");
                    } else {
                        std::thread::sleep(Duration::from_millis(700));
                    }
                });
            }
        });
    });
}
