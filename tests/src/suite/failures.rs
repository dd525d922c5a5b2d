//! Ranks that are late, leave or panic: all other ranks get an error in time that names them, and no rank moves data alone.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread::sleep;
use std::time::{Duration, Instant};

use gradsync::comm::{Collectives, CommError, Communicator, Departure, Ranks, ReduceOp};
use gradsync::{Error, Result};

use super::{Call, DEADLINE, Suite, Transport};
use crate::array::Array;
use crate::oracle::Format;
use crate::ranks::exchange_bytes;

/// The deadline of ranks that a rank keeps waiting.
const SHORT: Duration = Duration::from_millis(200);

/// Every call that waits for the other ranks, among them for the last one.
pub const WAITS: [(&str, Call); 8] = [
    ("barrier", |comm| comm.barrier()),
    ("all_reduce", |comm| comm.all_reduce(Array::unwritten(Format::F32, 100).slice_mut(), ReduceOp::Sum)),
    ("broadcast", |comm| comm.broadcast(Array::unwritten(Format::F16, 10).slice_mut(), 0)),
    ("all_gather", |comm| comm.all_gather_in_place(Array::unwritten(Format::F64, 840).slice_mut())),
    ("all_to_all", |comm| {
        comm.all_to_all(Array::unwritten(Format::F32, 840).slice(), Array::unwritten(Format::F32, 840).slice_mut())
    }),
    ("reduce_scatter", |comm| {
        let input = Array::unwritten(Format::F32, 3 * comm.world_size());
        comm.reduce_scatter(input.slice(), Array::unwritten(Format::F32, 3).slice_mut(), ReduceOp::Max)
    }),
    ("recv", |comm| comm.recv(Array::unwritten(Format::F32, 5).slice_mut(), comm.world_size() - 1)),
    ("send_recv", |comm| {
        let (mut data, last) = (Array::unwritten(Format::F32, 5), comm.world_size() - 1);
        comm.send_recv(Array::unwritten(Format::F32, 5).slice(), last, data.slice_mut(), last)
    }),
];

/// All cases, for at least two ranks.
pub fn run<T: Transport>(suite: &mut Suite<T>) {
    gone(suite);
    lateness(suite);
    suite.done("failures");
}

/// The ways in which a rank can end its part, of which the others hear at once.
pub(super) fn departures_of<T: Transport>() -> impl Iterator<Item = (&'static str, Departure)> {
    let left = T::TELLS_OF_LEAVING.then_some(("leaves", Departure::Left));
    left.into_iter().chain([("panics", Departure::Panicked)])
}

/// The last rank leaves or panics, before the call of the others or in the middle of an exchange.
fn gone<T: Transport>(suite: &mut Suite<T>) {
    let (rank, last) = (suite.rank(), suite.world_size() - 1);
    for (how, departure) in departures_of::<T>() {
        for (name, call) in WAITS {
            suite.check_fresh(&format!("a rank {how} before {name}"), |comm| {
                if rank == last {
                    return depart(comm, departure);
                }
                let start = Instant::now();
                assert_gone(call(&comm), last, departure);
                comm.barrier().expect_err("a communicator that has failed");
                assert!(start.elapsed() < DEADLINE / 2, "waited for the deadline");
            });
        }
        suite.check_fresh(&format!("a rank {how} after two calls"), |comm| {
            let mut data = [1.0f32; 9];
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            comm.all_reduce(&mut data, ReduceOp::Mean).unwrap();
            assert_eq!(data, [(last + 1) as f32; 9]);
            match rank == last {
                true => depart(comm, departure),
                false => assert_gone(comm.all_reduce(&mut data, ReduceOp::Sum), last, departure),
            }
        });
        if last > 1 {
            suite.check_fresh(&format!("a rank {how} in the middle of an exchange"), |comm| {
                if rank == last {
                    exchange_bytes(&comm, &[(0, &[2])], &mut []).unwrap();
                    return depart(comm, departure);
                }
                if rank > 1 {
                    return assert_gone(comm.barrier(), last, departure);
                }
                let (mut from_peer, mut from_last) = ([0], [0]);
                let sends: [(usize, &[u8]); 2] = [(1 - rank, &[rank as u8]), (last, &[9])];
                let receives = &mut [(1 - rank, &mut from_peer[..]), (last, &mut from_last[..])];
                assert_gone(exchange_bytes(&comm, &sends, receives), last, departure);
                assert_eq!(from_last[0], if rank == 0 { 2 } else { 0 });
            });
        }
    }
    // The ranks that return first must not fail the others.
    for _ in 0..50 {
        suite.check_fresh("ranks leave after the last call", |comm| {
            let mut data = [1.0f32; 3];
            comm.all_reduce(&mut data, ReduceOp::Sum).expect("all have called");
            assert_eq!(data, [(last + 1) as f32; 3]);
        });
    }
}

/// Ends this rank's part in the group.
pub(super) fn depart(comm: impl Communicator, departure: Departure) {
    if departure == Departure::Panicked {
        let panicked = catch_unwind(AssertUnwindSafe(move || {
            let _held = comm;
            resume_unwind(Box::new("as it is meant to"));
        }));
        assert!(panicked.is_err());
    }
}

#[track_caller]
pub(super) fn assert_gone(outcome: Result<()>, rank: usize, departure: Departure) {
    let error = outcome.expect_err("a rank is gone");
    let Error::Comm(CommError::PeerGone { rank: gone, departure: how, .. }) = error else { panic!("{error:?}") };
    assert_eq!((gone, how), (rank, departure));
}

fn lateness<T: Transport>(suite: &mut Suite<T>) {
    let rank = suite.rank();
    suite.check_within(SHORT, "a late rank is named, and told", |comm| {
        if rank == 0 {
            sleep(Duration::from_millis(700));
        }
        assert_timeout(comm.barrier(), &[0]);
    });
    // The eager payloads of the others may have arrived only in part: an MPI that waits for the receiver needs the senders for the rest.
    suite.check_within(SHORT, "ranks that have given up and are silent", |comm| {
        let call = || comm.all_reduce(&mut vec![1.0f32; 700], ReduceOp::Sum);
        if rank > 0 {
            assert_timeout(call(), &[0]);
            sleep(Duration::from_millis(2500));
            return;
        }
        sleep(Duration::from_millis(600));
        let start = Instant::now();
        let error = call().expect_err("the others have given up");
        assert!(matches!(error, Error::Comm(CommError::Timeout { .. })), "{error:?}");
        assert!(start.elapsed() < Duration::from_millis(1500), "took {:?}", start.elapsed());
    });
    suite.check_within(SHORT, "nobody sends", |comm| {
        let mut data = [1.0f32];
        let outcome = if rank == 1 { comm.recv(&mut data, 0) } else { Ok(()) };
        // The ranks that do not receive learn of it in their next call.
        assert_timeout(outcome.and_then(|()| sleep_and_meet(&comm)), &[0]);
    });
}

/// Ranks with deadlines of their own, which not every transport has: the first rank to give up ends the call for all, although all others
/// would wait long enough for the late one, whichever rank hears of it first.
pub fn run_deadlines<T: Transport>(suite: &mut Suite<T>) {
    let rank = suite.rank();
    for impatient in [1, suite.world_size() - 1] {
        let deadline = if rank == impatient { SHORT } else { Duration::from_secs(20) };
        let name = format!("deadlines of different lengths, the shortest of rank {impatient}");
        suite.check_within(deadline, &name, |comm| {
            if rank == 0 {
                sleep(Duration::from_millis(600));
            }
            let (start, mut data) = (Instant::now(), vec![1.0f32; 1000]);
            assert_timeout(comm.all_reduce(&mut data, ReduceOp::Sum), &[0]);
            assert!(start.elapsed() < Duration::from_secs(10), "took {:?}", start.elapsed());
            assert_eq!(data, [1.0; 1000]);
        });
    }
    suite.done("deadlines");
}

fn sleep_and_meet(comm: &dyn Communicator) -> Result<()> {
    sleep(Duration::from_millis(500));
    comm.barrier()
}

/// Asserts a timeout that names exactly these ranks.
///
/// # Panics
/// If the outcome is another one.
#[track_caller]
pub fn assert_timeout(outcome: Result<()>, late: &[usize]) {
    let error = outcome.expect_err("a rank is late");
    let Error::Comm(CommError::Timeout { missing, .. }) = error else { panic!("{error:?}") };
    assert_eq!(missing, late);
}
