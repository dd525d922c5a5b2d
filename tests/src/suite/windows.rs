//! Exposure epochs: each rank gets its window of every vector, no rank gets its memory back while another uses it, and all learn of a
//! failure.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread::sleep;
use std::time::{Duration, Instant};

use gradsync::comm::{Collectives, CommError, Communicator, Ranks, ReduceOp};
use gradsync::{DType, Error, GradientBuffer, Result, SliceMut};

use super::failures::{assert_gone, depart, departures_of};
use super::{Suite, Transport};

/// Well under the deadline of the communicators: a call that takes longer has waited for the deadline.
const AT_ONCE: Duration = Duration::from_secs(10);
/// The number of elements of a window for which the arena has no padding.
pub const WINDOW: usize = 1024;

/// A buffer with one tensor, of `world_size` windows, that other ranks can map.
pub fn shared(world_size: usize, window: usize) -> GradientBuffer {
    GradientBuffer::new_shared(DType::F32, world_size, [("vector", [world_size * window])]).expect("a shared buffer")
}

/// Lends a buffer, and gives `work` the windows of this rank.
///
/// # Errors
/// The errors of the epoch.
pub fn lend(
    comm: &dyn Communicator,
    buffer: &mut GradientBuffer,
    mut work: impl FnMut(Vec<&mut [f32]>) -> Result<()>,
) -> Result<bool> {
    let sharing = comm.sharing().expect("ranks that share memory");
    sharing.with_windows(buffer.as_mut_slice(), &mut |windows: Vec<SliceMut<'_>>| {
        work(windows.into_iter().map(|window| window.typed().expect("f32 was lent")).collect())
    })
}

/// The elements of a buffer.
pub fn numbers(buffer: &mut GradientBuffer) -> &mut [f32] {
    buffer.as_mut_slice().typed().expect("f32")
}

/// Every rank writes to its windows of two buffers in turn.
pub fn each_rank_has_its_window(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    for window in [0, 64, WINDOW, 300 * WINDOW] {
        // Two buffers in turn: the mappings of one buffer stay while the other is mapped.
        let mut buffers = [shared(world_size, window), shared(world_size, window)];
        // Shards begin at chunks of the tensor, so a short shard is longer than requested.
        let window = buffers[0].shard_len();
        for (number, buffer) in buffers.iter_mut().enumerate() {
            let values = numbers(buffer).iter_mut().enumerate();
            values.for_each(|(index, value)| *value = (number + 10 * rank + index) as f32);
        }
        for round in 0..3 {
            for (number, buffer) in buffers.iter_mut().enumerate() {
                let mut calls = 0;
                let lent = lend(comm, buffer, |windows| {
                    calls += 1;
                    assert_eq!(windows.len(), world_size);
                    for (owner, mine) in windows.into_iter().enumerate() {
                        assert_eq!(mine.len(), window);
                        for (index, value) in mine.iter_mut().enumerate() {
                            assert_eq!(*value, (number + 10 * owner + rank * window + index + round) as f32);
                            *value += 1.0;
                        }
                    }
                    Ok(())
                });
                assert!(lent.unwrap() && calls == 1);
            }
        }
        for (number, buffer) in buffers.iter_mut().enumerate() {
            let mut values = numbers(buffer).iter().enumerate();
            assert!(values.all(|(index, &value)| value == (number + 10 * rank + index + 3) as f32));
        }
    }
}

fn collectives_and_loans_run_inside(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let (mut outer, mut inner) = (shared(world_size, WINDOW), shared(world_size, WINDOW));
    numbers(&mut inner).fill(rank as f32);
    let mut sum = [0.0f32];
    let lent = lend(comm, &mut outer, |windows| {
        let mut owners = Vec::new();
        assert!(lend(comm, &mut inner, |others| {
            owners.extend(others.iter().map(|other| other[0]));
            Ok(())
        })?);
        windows.into_iter().zip(&owners).for_each(|(window, &owner)| window.fill(owner));
        sum[0] = owners.iter().sum();
        comm.all_reduce(&mut sum, ReduceOp::Sum)
    });
    assert!(lent.unwrap());
    let all = (world_size * (world_size - 1) / 2) as f32;
    assert_eq!(sum, [all * world_size as f32]);
    assert!(numbers(&mut outer).iter().all(|&value| value == rank as f32), "each wrote the owner's number");
}

/// Rank 1 ends its work at once by `leave`; the others work slowly, and use its memory to the end.
fn stays(comm: &dyn Communicator, leave: fn() -> Result<()>, is_right: fn(&Error) -> bool) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mut buffer = shared(world_size, WINDOW);
    let start = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        lend(comm, &mut buffer, |mut windows| {
            if rank == 1 {
                return leave();
            }
            for _ in 0..50 {
                sleep(Duration::from_millis(2));
                windows.iter_mut().for_each(|window| window.iter_mut().for_each(|value| *value += 1.0));
            }
            comm.barrier()
        })
    }));
    assert!(start.elapsed() < AT_ONCE, "waited for the deadline");
    let expected = |index: usize| if index / WINDOW == 1 { 0.0 } else { 50.0 };
    let values = numbers(&mut buffer).to_vec();
    assert!(values.iter().enumerate().all(|(index, &value)| value == expected(index)), "has its memory back too early");
    match outcome {
        Ok(outcome) => {
            let error = outcome.expect_err("a rank left");
            assert!(rank == 1 || is_right(&error), "{error}");
            assert!(comm.barrier().is_err(), "a communicator that failed was usable again");
        }
        Err(_) => assert_eq!(rank, 1, "who did not mean to panic"),
    }
}

fn what_has_no_windows(comm: &dyn Communicator, is_longer: bool) {
    let mut buffer = shared(comm.world_size(), WINDOW);
    let len = buffer.len();
    let len = if comm.rank() == 1 { len - if is_longer { comm.world_size() } else { 1 } } else { len };
    let start = Instant::now();
    let vector = buffer.as_mut_slice().range_mut(0..len);
    let outcome = comm.sharing().unwrap().with_windows(vector, &mut |_| panic!("nothing was to be lent"));
    assert!(outcome.is_err() && start.elapsed() < AT_ONCE, "{outcome:?}");
}

/// Rank 1 ends the inner of two nested epochs last, and fails right after it. The inner epoch succeeds on all ranks, and the others learn
/// of the failure in the outer epoch, at once.
fn fails_behind_an_inner_loan(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let (mut outer, mut inner) = (shared(world_size, WINDOW), shared(world_size, WINDOW));
    let start = Instant::now();
    let outcome = lend(comm, &mut outer, |_| {
        let lent = lend(comm, &mut inner, |_| {
            // The pause is long enough for the other ranks to sleep while they wait.
            sleep(Duration::from_millis(if rank == 1 { 50 } else { 0 }));
            Ok(())
        });
        assert!(lent.expect("the inner loan was good"));
        if rank == 1 {
            return Err(Error::InvalidArgument { operation: "work", reason: "it is wrong".into() });
        }
        comm.barrier()
    });
    assert!(start.elapsed() < AT_ONCE, "waited for the deadline");
    let error = outcome.expect_err("a rank failed");
    assert!(rank == 1 || matches!(error, Error::Comm(CommError::InvalidCall { rank: 1, .. })), "{error}");
}

/// All cases, for ranks that share memory, at least two.
pub fn run<T: Transport>(suite: &mut Suite<T>) {
    suite.check("each rank has its window of every vector", |comm| each_rank_has_its_window(comm));
    suite.check("collectives and further loans run inside", |comm| collectives_and_loans_run_inside(comm));
    suite.check_fresh("a rank panics with windows of others", |comm| {
        stays(
            &comm,
            || resume_unwind(Box::new("as it is meant to")),
            |error| matches!(error, Error::Comm(CommError::PeerGone { rank: 1, .. })),
        );
    });
    suite.check_fresh("a rank's work fails", |comm| {
        let refuse = || Err(Error::InvalidArgument { operation: "work", reason: "it is wrong".into() });
        stays(&comm, refuse, |error| {
            matches!(error, Error::Comm(CommError::InvalidCall { rank: 1, .. })) && error.to_string().contains("wrong")
        });
    });
    // Rank 1 considers its work done, while the others still have a collective to call.
    suite.check_fresh("a rank's work ends early", |comm| {
        stays(&comm, || Ok(()), |error| matches!(error, Error::Comm(CommError::Mismatch { .. })));
    });
    let (rank, last) = (suite.rank(), suite.world_size() - 1);
    for (how, departure) in departures_of::<T>() {
        suite.check_fresh(&format!("a rank {how} before an epoch"), |comm| {
            if rank == last {
                return depart(comm, departure);
            }
            let mut buffer = shared(comm.world_size(), WINDOW);
            let outcome = lend(&comm, &mut buffer, |_| panic!("nothing was to be lent"));
            assert_gone(outcome.map(drop), last, departure);
        });
    }
    for _ in 0..5 {
        suite.check_fresh("a rank fails behind an inner loan", |comm| fails_behind_an_inner_loan(&comm));
    }
    suite.check_fresh("a vector without windows", |comm| what_has_no_windows(&comm, false));
    suite.check_fresh("vectors of other lengths", |comm| what_has_no_windows(&comm, true));
    suite.check_fresh("vectors of other dtypes", |comm| {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let dtype = if rank == 1 { DType::F64 } else { DType::F32 };
        let mut buffer = GradientBuffer::new_shared(dtype, world_size, [("vector", [world_size * WINDOW])]).unwrap();
        let sharing = comm.sharing().expect("ranks that share memory");
        let outcome = sharing.with_windows(buffer.as_mut_slice(), &mut |_| panic!("nothing was to be lent"));
        assert!(outcome.is_err(), "{outcome:?}");
    });
    suite.done("windows");
}
