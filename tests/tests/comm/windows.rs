//! Ranks in an exposure epoch: each gets its window of every vector, and no rank gets its memory back while another uses it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::sleep;
use std::time::{Duration, Instant};

use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::{Collectives, CommError, Communicator, Ranks, ReduceOp};
use gradsync::{Error, Result, SliceMut};
use gradsync_tests::ranks::{guarded, on_ranks};

/// Well under the deadline of the group: a call that takes longer has waited for the deadline.
const AT_ONCE: Duration = Duration::from_secs(20);

fn lend(
    comm: &LocalCommunicator,
    vector: &mut [f32],
    mut work: impl FnMut(Vec<SliceMut<'_>>) -> Result<()>,
) -> Result<()> {
    assert!(comm.sharing().expect("threads share one").with_windows(vector.into(), &mut work)?);
    Ok(())
}

fn numbers<'a>(windows: Vec<SliceMut<'a>>) -> Vec<&'a mut [f32]> {
    windows.into_iter().map(|window| window.typed().expect("f32 was lent")).collect()
}

#[test]
fn each_rank_has_its_window_of_every_vector() {
    guarded(60, || {
        for (ranks, window) in [(1, 3), (2, 1), (3, 5), (8, 1000), (4, 0)] {
            let vectors = on_ranks(ranks, |comm| {
                let rank = comm.rank();
                let mut vector: Vec<f32> = (0..ranks * window).map(|index| (1000 * rank + index) as f32).collect();
                for round in 0..3 {
                    lend(&comm, &mut vector, |windows| {
                        let mut windows = numbers(windows);
                        assert_eq!(windows.len(), ranks);
                        for (owner, mine) in windows.iter_mut().enumerate() {
                            assert_eq!(mine.len(), window);
                            for (index, value) in mine.iter_mut().enumerate() {
                                assert_eq!(*value, (1000 * owner + rank * window + index + 10_000 * round) as f32);
                                *value += 10_000.0;
                            }
                        }
                        Ok(())
                    })
                    .unwrap();
                }
                vector
            });
            for (rank, vector) in vectors.into_iter().enumerate() {
                let expected: Vec<f32> =
                    (0..ranks * window).map(|index| (1000 * rank + index + 30_000) as f32).collect();
                assert_eq!(vector, expected, "rank {rank} of {ranks}");
            }
        }
    });
}

#[test]
fn collectives_and_further_loans_run_inside() {
    guarded(60, || {
        let sums = on_ranks(3, |comm| {
            let (mut outer, mut inner, mut sum) = ([1.0f32; 6], [2.0f32; 3], [0.0f32; 1]);
            lend(&comm, &mut outer, |windows| {
                let mut windows = numbers(windows);
                lend(&comm, &mut inner, |others| {
                    let others = numbers(others).into_iter().map(|other| other[0]);
                    windows.iter_mut().zip(others).for_each(|(window, other)| window.fill(other));
                    Ok(())
                })?;
                sum[0] = windows[0][0] + comm.rank() as f32;
                comm.all_reduce(&mut sum, ReduceOp::Sum)
            })
            .unwrap();
            comm.barrier().unwrap();
            (outer, sum)
        });
        assert_eq!(sums, [([2.0; 6], [9.0]); 3]);
    });
}

/// Rank 1 ends its work at once by `leave`; the others work slowly, and use its memory to the end.
fn assert_stays(what: &str, leave: fn() -> Result<()>, is_right: fn(&Error) -> bool) {
    let working = AtomicUsize::new(2);
    let outcomes = on_ranks(3, |comm| {
        let mut vector = vec![0.0f32; 3 * 1024];
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            lend(&comm, &mut vector, |windows| {
                if comm.rank() == 1 {
                    return leave();
                }
                let mut windows = numbers(windows);
                for _ in 0..50 {
                    sleep(Duration::from_millis(2));
                    windows.iter_mut().for_each(|window| window.iter_mut().for_each(|value| *value += 1.0));
                }
                working.fetch_sub(1, SeqCst);
                comm.barrier()
            })
        }));
        assert_eq!(working.load(SeqCst), 0, "{what}: rank {} has its memory back too early", comm.rank());
        assert!(start.elapsed() < AT_ONCE, "{what}: rank {} waited for the deadline", comm.rank());
        if let Ok(Err(error)) = &outcome {
            assert!(comm.rank() == 1 || is_right(error), "{what}, rank {}: {error}", comm.rank());
            assert!(comm.barrier().is_err(), "{what}: a communicator that failed was usable again");
        }
        (outcome.map(|outcome| outcome.is_err()).ok(), vector)
    });
    for (rank, (is_error, vector)) in outcomes.into_iter().enumerate() {
        assert!(is_error.unwrap_or(rank == 1), "{what}: rank {rank} noticed nothing");
        let left = if rank == 1 { "who left" } else { "who stayed" };
        let expected = |index: usize| if index / 1024 == 1 { 0.0 } else { 50.0 };
        assert!(vector.iter().enumerate().all(|(index, &value)| value == expected(index)), "{what}: of one {left}");
    }
}

#[test]
fn nobody_gets_memory_back_that_is_in_use() {
    guarded(120, || {
        assert_stays(
            "a panic",
            || panic!("on purpose"),
            |error| matches!(error, Error::Comm(CommError::PeerGone { rank: 1, .. })),
        );
        let refuse = || Err(Error::InvalidArgument { operation: "work", reason: "it is wrong".into() });
        assert_stays("an error", refuse, |error| {
            matches!(error, Error::Comm(CommError::InvalidCall { rank: 1, .. })) && error.to_string().contains("wrong")
        });
        // Rank 1 considers its work done, while the others still have a collective to call.
        assert_stays("an early end", || Ok(()), |error| matches!(error, Error::Comm(CommError::Mismatch { .. })));
    });
}

#[test]
fn what_has_no_windows_is_refused_on_every_rank() {
    guarded(60, || {
        for lens in [[7, 7], [8, 6], [8, 7]] {
            let outcomes = on_ranks(2, |comm| {
                let mut vector = vec![0.0f32; lens[comm.rank()]];
                let start = Instant::now();
                let outcome = lend(&comm, &mut vector, |_| panic!("nothing was to be lent"));
                (outcome.is_err(), start.elapsed() < AT_ONCE)
            });
            assert_eq!(outcomes, [(true, true); 2], "{lens:?}");
        }
        let outcomes = on_ranks(2, |comm| {
            let (mut wide, mut narrow) = ([0.0f64; 4], [0.0f32; 4]);
            let vector = if comm.rank() == 0 { SliceMut::from(&mut wide[..]) } else { SliceMut::from(&mut narrow[..]) };
            comm.sharing().unwrap().with_windows(vector, &mut |_| panic!("nothing was to be lent")).is_err()
        });
        assert_eq!(outcomes, [true; 2], "other dtypes");
    });
}
