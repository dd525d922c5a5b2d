//! `comm::local`: groups of threads, barriers, and the panics and deadlines of `run_each`.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::sleep;
use std::time::{Duration, Instant};

use gradsync::comm::local::group;
use gradsync::comm::{CommError, Communicator, Ranks};
use gradsync::internal::{run_each, run_each_with_deadline};
use gradsync::{Error, Result};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::{guarded, on_ranks};
use gradsync_tests::suite::failures::WAITS;

#[test]
fn barrier_is_left_after_all_have_come() {
    guarded(60, || {
        for world_size in [1, 2, 3, 4, 5, 7, 8, 16] {
            let arrived = AtomicUsize::new(0);
            let ranks = on_ranks(world_size, |comm| {
                assert_eq!(comm.world_size(), world_size);
                for round in 1..=20 {
                    arrived.fetch_add(1, SeqCst);
                    comm.barrier().unwrap();
                    let seen = arrived.load(SeqCst);
                    assert!(seen >= round * world_size, "left the barrier after {seen} arrivals, round {round}");
                    comm.barrier().unwrap();
                }
                comm.rank()
            });
            assert_eq!(ranks, (0..world_size).collect::<Vec<_>>());
        }
    });
}

#[test]
fn group_of_no_ranks_is_an_error() {
    for none in [0, 65_537, usize::MAX] {
        assert!(group(none).is_err(), "{none} ranks");
    }
    assert!(run_each(0, |_| ()).is_err());
}

#[test]
fn run_each_reports_the_panic_of_the_rank_that_panicked() {
    guarded(30, || {
        let outcomes = run_each(3, |comm| {
            assert!(comm.rank() != 1, "on purpose");
            comm.barrier().is_err()
        })
        .unwrap();
        assert!(outcomes[1].is_err());
        assert!(matches!(outcomes[0], Ok(true)) && matches!(outcomes[2], Ok(true)));
    });
}

/// The last rank is late in every call that waits: the others name it once the deadline has passed, and it gets an error at once.
#[test]
fn run_each_with_deadline_names_the_late_rank_in_every_call() {
    const DEADLINE: Duration = Duration::from_secs(1);
    /// The time that the machine may need on top of the deadline.
    const SLACK: Duration = Duration::from_secs(2);
    let windows: fn(&dyn Communicator) -> Result<()> = |comm| {
        let mut vector = Array::unwritten(Format::F32, 12);
        comm.sharing().expect("threads share memory").with_windows(vector.slice_mut(), &mut |_| Ok(())).map(drop)
    };
    guarded(120, move || {
        for (name, call) in WAITS.into_iter().chain([("with_windows", windows)]) {
            let outcomes = run_each_with_deadline(4, DEADLINE, |comm| {
                if comm.rank() == 3 {
                    sleep(DEADLINE + Duration::from_millis(700));
                }
                let start = Instant::now();
                let error = call(&comm).expect_err("a rank is late");
                assert!(start.elapsed() < DEADLINE + SLACK, "{name}: rank {} waits", comm.rank());
                assert!(comm.rank() == 3 || start.elapsed() >= DEADLINE / 2, "{name}: gave up before the deadline");
                let again = Instant::now();
                assert!(comm.barrier().is_err(), "{name}: a communicator that failed was usable again");
                assert!(again.elapsed() < SLACK, "{name}: calls still wait after a failure");
                error
            });
            for (rank, error) in outcomes.unwrap().into_iter().map(|error| error.expect("no panic")).enumerate().take(3)
            {
                let is_right =
                    matches!(&error, Error::Comm(CommError::Timeout { missing, .. }) if missing.contains(&3));
                assert!(is_right, "{name}, rank {rank}: {error:?}");
                assert!(error.to_string().contains('3'), "{name}: \"{error}\" does not name rank 3");
            }
        }
    });
}
