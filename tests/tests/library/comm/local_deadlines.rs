//! Deadlines of ranks as threads: deadlines given to `run`, and deadlines that pass because ranks cannot run at the same time.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use gradsync::comm::local::{self, LocalCommunicator};
use gradsync::comm::{Collectives, CommError, Ranks, ReduceOp};
use gradsync::{Error, Result};
use gradsync_tests::ranks::guarded;

const DEADLINE: Duration = Duration::from_millis(300);
/// The time that the machine may need on top of the deadline.
const SLACK: Duration = Duration::from_secs(2);

fn sum(comm: &LocalCommunicator) -> Result<f32> {
    let mut data = [1.0f32];
    comm.all_reduce(&mut data, ReduceOp::Sum).map(|()| data[0])
}

/// Every rank's error lists the missing ranks, and its text names them.
#[track_caller]
fn assert_names(missing: &[usize], outcomes: impl IntoIterator<Item = Result<f32>>) {
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let error = outcome.expect_err("no rank can have the sum");
        let Error::Comm(CommError::Timeout { missing: found, deadline, .. }) = &error else {
            panic!("rank {rank}: {error:?}");
        };
        assert_eq!((&found[..], *deadline), (missing, DEADLINE), "rank {rank}");
        let words = format!("ranks {missing:?} did not arrive within {DEADLINE:?}");
        assert!(error.to_string().contains(&words), "rank {rank}: {error}");
    }
}

#[test]
fn run_each_with_deadline_takes_a_deadline() {
    guarded(30, || {
        let start = Instant::now();
        let outcomes = gradsync::internal::run_each_with_deadline(3, DEADLINE, |comm| {
            if comm.rank() == 1 {
                std::thread::sleep(3 * DEADLINE);
            }
            let begun = Instant::now();
            (sum(&comm), begun.elapsed())
        });
        assert!(start.elapsed() < 3 * DEADLINE + SLACK, "took {:?}", start.elapsed());
        let (outcomes, times): (Vec<_>, Vec<_>) = outcomes.unwrap().into_iter().map(|rank| rank.unwrap()).unzip();
        assert!(times.iter().all(|time| *time < DEADLINE + SLACK), "{times:?}");
        assert_names(&[1], outcomes);
        assert!(gradsync::internal::run_each_with_deadline(0, DEADLINE, |comm| sum(&comm)).is_err());
    });
}

#[test]
fn group_with_deadline_of_ranks_called_one_after_another() {
    guarded(30, || {
        let start = Instant::now();
        let group = local::group_with_deadline(3, DEADLINE).unwrap();
        let outcomes: Vec<_> = group.into_iter().map(|comm| sum(&comm)).collect();
        assert!(start.elapsed() < DEADLINE + SLACK, "took {:?}", start.elapsed());
        assert_names(&[1, 2], outcomes);
    });
}

#[test]
fn group_with_deadline_of_tasks_of_too_small_a_pool() {
    guarded(30, || {
        let (world_size, threads) = (4, 2);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let outcomes = Mutex::new(Vec::new());
        let begun = Mutex::new(Vec::new());
        let start = Instant::now();
        pool.scope(|scope| {
            for comm in local::group_with_deadline(world_size, DEADLINE).unwrap() {
                let (outcomes, begun) = (&outcomes, &begun);
                scope.spawn(move |_| {
                    begun.lock().unwrap().push(comm.rank());
                    let outcome = sum(&comm);
                    outcomes.lock().unwrap().push(outcome);
                });
            }
        });
        assert!(start.elapsed() < DEADLINE + SLACK, "took {:?}", start.elapsed());
        let first: BTreeSet<usize> = begun.into_inner().unwrap().into_iter().take(threads).collect();
        let missing: Vec<usize> = (0..world_size).filter(|rank| !first.contains(rank)).collect();
        assert_names(&missing, outcomes.into_inner().unwrap());
    });
}

/// `run` needs no thread pool, so a task of a pool of any size may call it.
#[test]
fn run_each_with_deadline_inside_a_task_of_a_small_pool() {
    guarded(30, || {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let outcomes = pool
            .install(|| gradsync::internal::run_each_with_deadline(4, DEADLINE + SLACK, |comm| sum(&comm)))
            .unwrap();
        assert!(outcomes.into_iter().all(|sum| sum.unwrap().unwrap() == 4.0));
    });
}
