//! Ranks that are late or panic: all other ranks get an error in time, and no rank moves data alone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use gradsync::Error;
use gradsync::comm::{Collectives, CommError, Communicator, Departure, Ranks, ReduceOp};

use super::cases::Cases;

pub(crate) fn run(cases: &mut Cases) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    cases.check_fresh("a late rank is named, and told", |comm| {
        let comm = comm.with_deadline(Duration::from_millis(200));
        if rank == 0 {
            std::thread::sleep(Duration::from_millis(700));
        }
        assert_timeout(comm.barrier(), &[0]);
    });
    // The first rank to give up ends the call for all, although all others would wait long enough for the late one, whichever rank hears of
    // it first.
    for impatient in [1, world_size - 1] {
        cases.check_fresh(&format!("deadlines of different lengths, the shortest of rank {impatient}"), |comm| {
            let comm = comm.with_deadline(Duration::from_millis(if rank == impatient { 200 } else { 20_000 }));
            if rank == 0 {
                std::thread::sleep(Duration::from_millis(600));
            }
            let (start, mut data) = (Instant::now(), vec![1.0f32; 1000]);
            assert_timeout(comm.all_reduce(&mut data, ReduceOp::Sum), &[0]);
            assert!(start.elapsed() < Duration::from_secs(10), "took {:?}", start.elapsed());
            assert_eq!(data, [1.0; 1000]);
        });
    }
    // The eager payloads of the others may have arrived only in part: an MPI that waits for the receiver needs the senders for the rest.
    cases.check_fresh("ranks that have given up and are silent", |comm| {
        let comm = comm.with_deadline(Duration::from_millis(200));
        let call = || comm.all_reduce(&mut vec![1.0f32; 700], ReduceOp::Sum);
        if rank > 0 {
            assert_timeout(call(), &[0]);
            std::thread::sleep(Duration::from_millis(2500));
            return;
        }
        std::thread::sleep(Duration::from_millis(600));
        let start = Instant::now();
        let error = call().expect_err("the others have given up");
        assert!(matches!(error, Error::Comm(CommError::Timeout { .. })), "{error:?}");
        assert!(start.elapsed() < Duration::from_millis(1500), "took {:?}", start.elapsed());
    });
    cases.check_fresh("nobody sends", |comm| {
        let comm = comm.with_deadline(Duration::from_millis(200));
        let mut data = [1.0f32];
        let outcome = if rank == 1 { comm.recv(&mut data, 0) } else { Ok(()) };
        // The ranks that do not receive learn of it in their next call.
        assert_timeout(outcome.and_then(|()| sleep_and_meet(&comm)), &[0]);
    });
    cases.check_fresh("a rank panics", |comm| {
        if rank + 1 == world_size {
            let panicked = catch_unwind(AssertUnwindSafe(move || {
                let _held = comm;
                panic!("as it is meant to");
            }));
            assert!(panicked.is_err());
            return;
        }
        let error = comm.barrier().expect_err("a rank is gone");
        let Error::Comm(CommError::PeerGone { rank: gone, departure, .. }) = error else { panic!("{error:?}") };
        assert_eq!((gone, departure), (world_size - 1, Departure::Panicked));
    });
    cases.done("failures");
}

fn sleep_and_meet(comm: &dyn Communicator) -> gradsync::Result<()> {
    std::thread::sleep(Duration::from_millis(500));
    comm.barrier()
}

#[track_caller]
pub(crate) fn assert_timeout(outcome: gradsync::Result<()>, late: &[usize]) {
    let error = outcome.expect_err("a rank is late");
    let Error::Comm(CommError::Timeout { missing, .. }) = error else { panic!("{error:?}") };
    assert_eq!(missing, late);
}
