//! Several communicators: splits, groups of groups, lives of their own, and use from other threads.

use std::thread;
use std::time::Duration;

use gradsync::Result;
use gradsync::comm::{Collectives, Communicator, Ranks, ReduceOp, Split};

use super::failures::{assert_gone, assert_timeout, depart, departures_of};
use super::{DEADLINE, Suite, Transport, assert_mismatch, neighbours};

fn sum_of_ranks(comm: &dyn Communicator, rank: usize) -> f64 {
    let mut data = [rank as f64];
    comm.all_reduce(&mut data, ReduceOp::Sum).expect("a sum of one number");
    data[0]
}

/// The numbers of all ranks, ordered by rank in this communicator.
pub fn members(comm: &dyn Communicator, own: usize) -> Vec<usize> {
    let mut all = vec![0.0f64; comm.world_size()];
    comm.all_gather(&[own as f64], &mut all).expect("every rank's number");
    all.into_iter().map(|number| number as usize).collect()
}

/// Sends this rank's number to the next rank, and receives the number of the previous one.
fn pass_on(comm: &dyn Communicator, own: usize) -> usize {
    let (next, last) = neighbours(comm);
    let mut received = [0.0f64];
    comm.send_recv(&[own as f64], next, &mut received, last).expect("a number");
    received[0] as usize
}

/// All cases.
pub fn run<T: Transport + Sync>(suite: &mut Suite<T>) {
    splits(suite);
    fates(suite);
    threads(suite);
    suite.check_with("many communicators, one after the other", |suite| {
        for _ in 0..100 {
            assert_eq!(sum_of_ranks(&suite.transport.fresh(DEADLINE), 1), suite.comm.world_size() as f64);
        }
    });
    suite.done("groups");
}

fn splits<T: Transport>(suite: &mut Suite<T>) {
    let (rank, world_size) = (suite.rank(), suite.world_size());
    let all: Vec<usize> = (0..world_size).collect();
    suite.check("groups ordered by key and rank, and ranks without a group", |comm| {
        // Even ranks are in reverse order, odd ranks in rank order as their keys are equal, and every third rank is in no group.
        let color = (rank % 3 != 2).then_some(if rank % 2 == 0 { 0 } else { u64::MAX });
        let key = if rank % 2 == 0 { -(rank as i64) } else { i64::MAX };
        let mut group: Vec<usize> = (0..world_size).filter(|other| other % 3 != 2 && other % 2 == rank % 2).collect();
        if rank % 2 == 0 {
            group.reverse();
        }
        let Some(part) = comm.split(color, key).unwrap() else { return assert_eq!(color, None) };
        let own = group.iter().position(|&other| other == rank).unwrap();
        assert_eq!((part.rank(), part.world_size()), (own, group.len()));
        assert_eq!(members(&part, rank), group);
        assert_eq!(sum_of_ranks(&part, rank), group.iter().sum::<usize>() as f64);
    });
    suite.check("split without the last rank, and without any", |comm| {
        let part = comm.split((rank + 1 < world_size).then_some(0), i64::MIN).unwrap();
        assert_eq!(part.is_some(), rank + 1 < world_size);
        if let Some(part) = part {
            assert_eq!((part.rank(), part.world_size()), (rank, world_size - 1));
            assert_eq!(members(&part, rank), all[..world_size - 1]);
        }
        assert!(comm.split(None, 0).unwrap().is_none());
        comm.barrier().unwrap();
    });
    suite.check("groups of groups, which talk at the same time", |comm| {
        let halves = comm.split(Some(rank as u64 % 2), -(rank as i64)).unwrap().expect("a colour");
        let half: Vec<usize> = (0..world_size).rev().filter(|other| other % 2 == rank % 2).collect();
        assert_eq!(members(&halves, rank), half);
        let is_in = halves.rank() > 0;
        let rest = halves.split(is_in.then_some(7), 0).unwrap();
        assert_eq!(rest.is_some(), is_in);
        // The rank without a group goes on alone in its half, and in the communicator of all ranks.
        if let Some(rest) = rest {
            assert_eq!(members(&rest, rank), half[1..]);
            if rest.world_size() > 1 {
                let last = (rest.rank() + rest.world_size() - 1) % rest.world_size();
                assert_eq!(pass_on(&rest, rank), half[1..][last]);
            }
        }
        assert_eq!(members(comm, rank), all);
    });
    suite.check("many splits with the same colours", |comm| {
        for round in 0..40 {
            let shift = (rank + round) % 3;
            let group = comm.split(Some(shift as u64), 0).unwrap().expect("a colour");
            let expected: Vec<usize> = (0..world_size).filter(|other| (other + round) % 3 == shift).collect();
            assert_eq!(members(&group, rank), expected, "round {round}");
        }
    });
    suite.check_with("a group that outlives the communicator it was split from", |suite| {
        let parent = suite.transport.fresh(DEADLINE);
        let group = parent.split((rank > 0).then_some(1), 0).unwrap();
        drop(parent);
        let another = suite.transport.fresh(DEADLINE);
        if let Some(group) = group {
            assert_eq!(members(&group, rank), all[1..]);
        }
        assert_eq!(members(&another, rank), all);
    });
}

/// Groups fail on their own, and a split fails like any call.
fn fates<T: Transport>(suite: &mut Suite<T>) {
    let (rank, last) = (suite.rank(), suite.world_size() - 1);
    suite.check("a group that fails", |comm| {
        let part = comm.split(Some(u64::from(rank > 1)), 0).unwrap().expect("a colour");
        let mut data = vec![1.0f32; 1 + rank.min(1)];
        // Ranks 0 and 1 disagree; the others do not.
        let outcome = part.all_reduce(&mut data, ReduceOp::Sum);
        assert_eq!(outcome.is_err(), rank < 2, "{outcome:?}");
        comm.barrier().unwrap();
        assert_eq!(part.barrier().is_err(), rank < 2);
        comm.barrier().unwrap();
    });
    suite.check_fresh("a split meets another call", |comm| {
        let outcome = if rank == last { comm.barrier() } else { split(&comm) };
        assert_mismatch(outcome, &["called split", &format!("rank {last} called barrier")]);
    });
    for (how, departure) in departures_of::<T>() {
        suite.check_fresh(&format!("a rank {how} before a split"), |comm| match rank == last {
            true => depart(comm, departure),
            false => assert_gone(split(&comm), last, departure),
        });
    }
}

/// Splits and groups with a short deadline, for which these cases wait.
pub fn run_late<T: Transport>(suite: &mut Suite<T>) {
    let (rank, last) = (suite.rank(), suite.world_size() - 1);
    // With the default deadline, these would take ten minutes.
    suite.check_within(Duration::from_millis(300), "a rank is late for a split", |comm| {
        if rank == last {
            thread::sleep(Duration::from_millis(800));
        }
        assert_timeout(split(&comm), &[last]);
    });
    suite.check_within(Duration::from_millis(500), "a group has the deadline of the one it was split from", |comm| {
        let part = comm.split(Some(0), 0).unwrap().expect("a colour");
        if rank == last {
            thread::sleep(Duration::from_millis(1200));
        }
        assert_timeout(part.barrier(), &[last]);
    });
}

fn split<C: Split>(comm: &C) -> Result<()> {
    comm.split(Some(0), 0).map(drop)
}

fn threads<T: Transport + Sync>(suite: &mut Suite<T>) {
    let (rank, world_size) = (suite.rank(), suite.world_size());
    let all = || (0..world_size).collect::<Vec<_>>();
    suite.check_fresh("two threads that split two communicators at the same time", |comm| {
        let parts = [0, 1].map(|_| comm.split(Some(0), 0).unwrap().expect("a colour"));
        thread::scope(|scope| {
            for part in parts {
                scope.spawn(move || {
                    for _ in 0..60 {
                        let group = part.split(Some(0), 0).unwrap().expect("a colour");
                        assert_eq!(members(&group, rank), (0..world_size).collect::<Vec<_>>());
                    }
                });
            }
        });
    });
    suite.check_with("two threads that make communicators of all at the same time", |suite| {
        let transport = &suite.transport;
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    (0..10).for_each(|_| assert_eq!(members(&transport.fresh(DEADLINE), rank), all()));
                });
            }
        });
    });
    suite.check_with("on another thread, while this one goes on", |suite| {
        let (other, mine) = (suite.transport.fresh(DEADLINE), suite.transport.fresh(DEADLINE));
        let total = (0..world_size).sum::<usize>() as f64;
        thread::scope(|scope| {
            let thread = scope.spawn(move || (0..100).all(|_| sum_of_ranks(&other, rank) == total));
            assert!((0..100).all(|_| sum_of_ranks(&mine, rank) == total));
            assert!(thread.join().expect("no panic"));
        });
    });
}
