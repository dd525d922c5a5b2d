//! Several communicators: splits, and use from another thread.

use crate::transport::Comm;
use gradsync::comm::{Collectives, Communicator, Ranks, ReduceOp, Split};

use super::cases::Cases;

fn sum_of_ranks(comm: &dyn Communicator, rank: usize) -> f64 {
    let mut data = [rank as f64];
    comm.all_reduce(&mut data, ReduceOp::Sum).expect("a sum of one number");
    data[0]
}

/// The job's rank numbers of all ranks, ordered by rank in this communicator.
fn members(comm: &Comm, rank: usize) -> Vec<usize> {
    let mut all = vec![0.0f64; comm.world_size()];
    comm.all_gather(&[rank as f64], &mut all).expect("every rank's number");
    all.into_iter().map(|number| number as usize).collect()
}

/// Sends this rank's number to the next rank, and receives the number of the previous one.
fn pass_on(comm: &Comm, rank: usize) -> usize {
    let (next, last) =
        ((comm.rank() + 1) % comm.world_size(), (comm.rank() + comm.world_size() - 1) % comm.world_size());
    let mut received = [0.0f64];
    comm.send_recv(&[rank as f64], next, &mut received, last).expect("a number");
    received[0] as usize
}

pub(crate) fn run(cases: &mut Cases) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    cases.check("split by parity, in reverse", |comm| {
        let color = u64::MAX - (rank % 2) as u64;
        let part = comm.split(Some(color), -(rank as i64)).unwrap().expect("a colour");
        let members: Vec<usize> = (0..world_size).rev().filter(|other| other % 2 == rank % 2).collect();
        assert_eq!(part.world_size(), members.len());
        assert_eq!(members[part.rank()], rank);
        assert_eq!(sum_of_ranks(&part, rank), members.iter().sum::<usize>() as f64);
        comm.barrier().unwrap();
    });
    cases.check("split without the last rank", |comm| {
        let part = comm.split((rank + 1 < world_size).then_some(7), i64::MIN).unwrap();
        assert_eq!(part.is_some(), rank + 1 < world_size);
        if let Some(part) = part {
            assert_eq!((part.rank(), part.world_size()), (rank, world_size - 1));
            assert_eq!(sum_of_ranks(&part, rank), (0..world_size - 1).sum::<usize>() as f64);
        }
    });
    cases.check("groups of groups, which talk at the same time", |comm| {
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
        assert_eq!(members(comm, rank), (0..world_size).collect::<Vec<_>>());
    });
    cases.check("a group that outlives the communicator it was split from", |comm| {
        let parent = super::cases::fresh();
        let group = parent.split((rank > 0).then_some(1), 0).unwrap();
        drop(parent);
        let another = super::cases::fresh();
        if let Some(group) = group {
            assert_eq!(members(&group, rank), (1..world_size).collect::<Vec<_>>());
        }
        assert_eq!(members(&another, rank), members(comm, rank));
    });
    cases.check_fresh("two threads that split two communicators at the same time", |comm| {
        let parts = [0, 1].map(|_| comm.split(Some(0), 0).unwrap().expect("a colour"));
        std::thread::scope(|scope| {
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
    cases.check_fresh("two threads that make communicators of all at the same time", |_| {
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..10 {
                        assert_eq!(members(&super::cases::fresh(), rank), (0..world_size).collect::<Vec<_>>());
                    }
                });
            }
        });
    });
    cases.check_fresh("on another thread, while this one goes on", |other| {
        let mine = super::cases::fresh();
        let total = (0..world_size).sum::<usize>() as f64;
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || (0..100).all(|_| sum_of_ranks(&other, rank) == total));
            assert!((0..100).all(|_| sum_of_ranks(&mine, rank) == total));
            assert!(thread.join().expect("no panic"));
        });
    });
    cases.check("many communicators, one after the other", |_| {
        for _ in 0..100 {
            assert_eq!(sum_of_ranks(&super::cases::fresh(), 1), world_size as f64);
        }
    });
    cases.done("groups");
}
