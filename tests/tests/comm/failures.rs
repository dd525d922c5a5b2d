//! A rank that panics, leaves, or sleeps: the others get an error that names it, in time, and again at every later call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use gradsync::Error;
use gradsync::comm::local::{LocalCommunicator, group_with_deadline};
use gradsync::comm::{Collectives, Communicator, Ranks};
use gradsync::comm::{CommError, ReduceOp};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::guarded;

const DEADLINE: Duration = Duration::from_secs(2);
/// The time that the machine may need on top of the deadline.
const SLACK: Duration = Duration::from_secs(2);

type Step = fn(&LocalCommunicator) -> gradsync::Result<()>;

/// Every call that waits for the other ranks.
const WAITS: [(&str, Step); 7] = [
    ("barrier", |comm| comm.barrier()),
    ("all_reduce", |comm| comm.all_reduce(Array::unwritten(Format::F32, 100).slice_mut(), ReduceOp::Sum)),
    ("broadcast", |comm| comm.broadcast(Array::unwritten(Format::F16, 10).slice_mut(), 0)),
    ("all_gather", |comm| comm.all_gather_in_place(Array::unwritten(Format::F64, 12).slice_mut())),
    ("all_to_all", |comm| {
        comm.all_to_all(Array::unwritten(Format::F32, 12).slice(), Array::unwritten(Format::F32, 12).slice_mut())
    }),
    ("reduce_scatter", |comm| {
        let input = Array::unwritten(Format::F32, 3 * comm.world_size());
        comm.reduce_scatter(input.slice(), Array::unwritten(Format::F32, 3).slice_mut(), ReduceOp::Max)
    }),
    ("with_windows", |comm| {
        let ranks = comm.sharing().expect("threads share one");
        ranks.with_windows(Array::unwritten(Format::F32, 12).slice_mut(), &mut |_| Ok(())).map(drop)
    }),
];

/// Runs `lost` on one rank and `step` on the others; returns the others' errors with the time that each took.
fn run(
    world_size: usize,
    gone: usize,
    lost: impl FnOnce(LocalCommunicator) + Send,
    step: impl Fn(&LocalCommunicator) -> gradsync::Result<()> + Sync,
) -> Vec<(usize, Error, Duration)> {
    let mut communicators: Vec<Option<LocalCommunicator>> =
        group_with_deadline(world_size, DEADLINE).unwrap().into_iter().map(Some).collect();
    let deviant = communicators[gone].take().unwrap();
    std::thread::scope(|scope| {
        let deviant = scope.spawn(move || lost(deviant));
        let others: Vec<_> = communicators
            .into_iter()
            .flatten()
            .map(|comm| {
                let step = &step;
                scope.spawn(move || {
                    let start = Instant::now();
                    let error = step(&comm).expect_err("a rank is missing");
                    let took = start.elapsed();
                    let again = Instant::now();
                    assert!(comm.barrier().is_err(), "a communicator that failed was usable again");
                    let outcome = comm.all_reduce(Array::unwritten(Format::F32, 1).slice_mut(), ReduceOp::Sum);
                    assert!(outcome.is_err(), "a communicator that failed was usable again");
                    assert!(again.elapsed() < SLACK, "after a failure, calls still wait: {:?}", again.elapsed());
                    (comm.rank(), error, took)
                })
            })
            .collect();
        let errors = others.into_iter().map(|other| other.join().unwrap()).collect();
        // The test may have asked for a panic of this rank.
        let _ = deviant.join();
        errors
    })
}

#[track_caller]
fn assert_named(
    what: &str,
    gone: usize,
    errors: Vec<(usize, Error, Duration)>,
    is_right: fn(&CommError, usize) -> bool,
) {
    for (rank, error, took) in errors {
        let what = format!("{what}, seen by rank {rank} after {took:?}");
        assert!(took < DEADLINE + SLACK, "{what}: too late");
        match &error {
            Error::Comm(inner) => assert!(is_right(inner, gone), "{what}: {error:?}"),
            _ => panic!("{what}: {error:?} is no CommError"),
        }
        assert!(error.to_string().contains(&gone.to_string()), "{what}: \"{error}\" does not name rank {gone}");
    }
}

fn is_gone(error: &CommError, gone: usize) -> bool {
    matches!(error, CommError::PeerGone { rank, .. } if *rank == gone)
}

#[test]
fn a_rank_that_panics_is_named() {
    guarded(120, || {
        for (name, step) in WAITS {
            for (world_size, gone) in [(2, 1), (3, 0), (4, 2)] {
                let errors = run(world_size, gone, |_comm| panic!("on purpose"), step);
                for (_, error, _) in &errors {
                    let text = error.to_string().to_lowercase();
                    assert!(text.contains("panic"), "{name}: \"{text}\" does not say that it panicked");
                }
                assert_named(&format!("panic during {name} of {world_size}"), gone, errors, is_gone);
            }
        }
    });
}

#[test]
fn a_rank_that_leaves_is_named() {
    guarded(120, || {
        for (name, step) in WAITS {
            for (world_size, gone) in [(2, 0), (3, 2), (4, 1)] {
                let errors = run(world_size, gone, drop, step);
                assert_named(&format!("left before {name} of {world_size}"), gone, errors, is_gone);
            }
        }
    });
}

/// The rank takes part twice and then leaves: the completed calls stay right.
#[test]
fn a_rank_that_leaves_later_is_named() {
    guarded(60, || {
        let rounds = |comm: &LocalCommunicator, count: usize| -> gradsync::Result<()> {
            for _ in 0..count {
                let mut data = Array::new(Format::F32, &[1.0; 9]);
                comm.all_reduce(data.slice_mut(), ReduceOp::Sum)?;
                assert_eq!(data.values(), [3.0; 9]);
            }
            Ok(())
        };
        let errors = run(3, 1, |comm| rounds(&comm, 2).unwrap(), |comm| rounds(comm, 3));
        assert_named("left after two rounds", 1, errors, is_gone);
    });
}

#[test]
fn a_sender_or_receiver_that_is_gone_is_named() {
    guarded(60, || {
        let recv: Step = |comm| comm.recv(Array::unwritten(Format::F32, 5).slice_mut(), 1);
        assert_named("recv", 1, run(2, 1, drop, recv), is_gone);
        assert_named("recv", 1, run(2, 1, |_comm| panic!("on purpose"), recv), is_gone);
        let exchange: Step = |comm| {
            let mut data = Array::unwritten(Format::F32, 5);
            comm.send_recv(Array::unwritten(Format::F32, 5).slice(), 1, data.slice_mut(), 1)
        };
        assert_named("send_recv", 1, run(2, 1, drop, exchange), is_gone);
    });
}

fn timed_out(error: &CommError, gone: usize) -> bool {
    matches!(error, CommError::Timeout { missing, .. } if missing.contains(&gone))
}

#[test]
fn a_rank_that_sleeps_past_the_deadline_is_named_and_gets_an_error_itself() {
    guarded(120, || {
        for (name, step) in WAITS {
            let sleeper = move |comm: LocalCommunicator| {
                std::thread::sleep(DEADLINE + Duration::from_millis(700));
                let start = Instant::now();
                assert!(step(&comm).is_err(), "{name}: the sleeper joined a group that had given up");
                assert!(start.elapsed() < DEADLINE + SLACK, "{name}: the sleeper waits");
            };
            let start = Instant::now();
            let mut outcome = None;
            let errors = run(4, 2, |comm| outcome = Some(catch_unwind(AssertUnwindSafe(|| sleeper(comm)))), step);
            assert!(start.elapsed() >= DEADLINE, "{name}: gave up before the deadline");
            assert!(matches!(outcome, Some(Ok(()))), "{name}: the sleeper failed, see above");
            assert_named(&format!("asleep during {name}"), 2, errors, timed_out);
        }
    });
}

#[test]
fn a_receiver_times_out() {
    guarded(30, || {
        let sleeper = |comm: LocalCommunicator| {
            std::thread::sleep(DEADLINE + Duration::from_millis(500));
            drop(comm);
        };
        let errors = run(2, 0, sleeper, |comm| comm.recv(Array::unwritten(Format::F32, 5).slice_mut(), 0));
        assert_named("recv", 0, errors, timed_out);
    });
}

/// All ranks return from the same successful call and some leave at once: the slow ranks must not see a failure.
#[test]
fn leaving_after_the_last_call_is_no_failure() {
    guarded(60, || {
        for _ in 0..300 {
            for outcome in gradsync::comm::local::run_each(5, |comm| {
                let mut data = Array::new(Format::F32, &[1.0; 3]);
                comm.all_reduce(data.slice_mut(), ReduceOp::Sum).map(|()| data.values())
            })
            .unwrap()
            {
                assert_eq!(outcome.unwrap().unwrap(), [5.0; 3]);
            }
        }
    });
}

#[test]
fn run_reports_the_panic_of_the_rank_that_panicked() {
    guarded(30, || {
        let outcomes = gradsync::comm::local::run_each(3, |comm| {
            assert!(comm.rank() != 1, "on purpose");
            comm.barrier().is_err()
        })
        .unwrap();
        assert!(outcomes[1].is_err());
        assert!(matches!(outcomes[0], Ok(true)) && matches!(outcomes[2], Ok(true)));
    });
}
