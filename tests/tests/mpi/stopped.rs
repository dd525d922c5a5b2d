//! A rank whose process is stopped (SIGSTOP), at every stage that it can be in: one that goes on in time is as if it had not been stopped; one
//! that does not is a timeout which names it, on every rank and in time, itself included when it goes on.

use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use gradsync::comm::mpi::MpiCommunicator;
use gradsync::comm::{AddressSpace, CommError, Communicator, ReduceOp, Split};
use gradsync::ops::{AdasumOptions, adasum_all_reduce};
use gradsync::{DType, Error, GradientBuffer, Result, SliceMut};

use crate::cases::{Cases, fresh};

/// Who is stopped.
const STOPPED: usize = 1;
/// A deadline that the stop outlasts, and one that it does not.
const SHORT: Duration = Duration::from_millis(600);
const LONG: Duration = Duration::from_secs(20);
/// How long the process is stopped.
const STOP: Duration = Duration::from_millis(2500);
/// When the others have their error at the latest: cores are shared.
const IN_TIME: Duration = Duration::from_millis(2400);
/// When it is stopped.
const AFTER: Duration = Duration::from_millis(60);
/// Elements that travel with a call, and of a collective that moves data for milliseconds.
const LENGTHS: [usize; 2] = [100, 1 << 20];

/// Stops this process in a moment, and has it go on later.
fn stop() -> Child {
    let (after, stop) = (AFTER.as_secs_f64(), STOP.as_secs_f64());
    let script = format!("sleep {after}; kill -STOP $PPID; sleep {stop}; kill -CONT $PPID");
    Command::new("sh").args(["-c", &script]).spawn().expect("a shell")
}

/// What a rank does over and over.
type Step<'a> = &'a dyn Fn(&MpiCommunicator) -> Result<()>;

/// Has all ranks take steps, and one of them stopped on the way, for longer than the deadline or not.
fn stopped_in(comm: MpiCommunicator, deadline: Duration, step: Step<'_>) {
    let is_stopped = comm.rank() == STOPPED;
    comm.barrier().expect("all are here");
    let comm = comm.with_deadline(deadline);
    let mut child = is_stopped.then(stop);
    let start = Instant::now();
    let until = AFTER + STOP + Duration::from_millis(300);
    let outcome = loop {
        let mut elapsed = [start.elapsed().as_secs_f64()];
        let outcome = step(&comm).and_then(|()| comm.all_reduce((&mut elapsed[..]).into(), ReduceOp::Max));
        if outcome.is_err() || elapsed[0] >= until.as_secs_f64() {
            break outcome;
        }
    };
    let elapsed = start.elapsed();
    if let Some(child) = &mut child {
        child.wait().expect("the shell's end");
    }
    if deadline == LONG {
        return outcome.expect("it went on in time");
    }
    is_timeout(&outcome);
    assert!(is_stopped || elapsed < AFTER + SHORT + IN_TIME, "took {elapsed:?}");
    is_timeout(&comm.barrier());
}

#[track_caller]
fn is_timeout(outcome: &Result<()>) {
    let Err(Error::Comm(CommError::Timeout { missing, .. })) = outcome else { panic!("{outcome:?}") };
    assert_eq!(missing, &[STOPPED]);
}

/// A rank is stopped with what it was lent, and uses it when it goes on; its owners have theirs by then.
fn stopped_with_windows(comm: MpiCommunicator, is_behind_a_collective: bool) {
    let world_size = comm.world_size();
    let mut buffer = GradientBuffer::new_shared(DType::F32, world_size, [("vector", [world_size * 1024])]).unwrap();
    comm.barrier().expect("all are here");
    let comm = comm.with_deadline(SHORT);
    let (is_stopped, start) = (comm.rank() == STOPPED, Instant::now());
    let mut child = is_stopped.then(stop);
    let outcome = comm.lend_windows(buffer.as_mut_slice(), &mut |windows: Vec<SliceMut<'_>>| {
        if is_stopped {
            sleep(AFTER * 2);
            windows.into_iter().for_each(|window| window.typed::<f32>().expect("f32").fill(7.0));
        }
        if is_behind_a_collective { Ok(()) } else { comm.barrier() }
    });
    let elapsed = start.elapsed();
    is_timeout(&outcome.map(drop));
    assert!(is_stopped || elapsed < AFTER + SHORT + IN_TIME, "took {elapsed:?}");
    let numbers: &mut [f32] = buffer.as_mut_slice().typed().expect("f32");
    numbers.fill(3.0);
    sleep((AFTER + STOP + Duration::from_millis(300)).saturating_sub(start.elapsed()));
    assert!(numbers.iter().all(|&number| number == 3.0), "somebody else wrote here");
    if let Some(child) = &mut child {
        child.wait().expect("the shell's end");
    }
    // What was taken back is a buffer as any other, and so is that of the rank that was stopped.
    drop(comm);
    let again = fresh();
    let lent = again.lend_windows(buffer.as_mut_slice(), &mut |windows: Vec<SliceMut<'_>>| {
        assert!(
            windows.into_iter().all(|window| window.typed::<f32>().expect("f32").iter().all(|&number| number == 3.0))
        );
        Ok(())
    });
    assert!(lent.expect("all lend theirs"));
}

pub(crate) fn run(cases: &mut Cases) {
    let world_size = cases.world_size();
    let shares_memory = fresh().shares_memory();
    for deadline in [SHORT, LONG] {
        let mut check = |what: &str, step: Step<'_>| {
            let what = format!("a rank is stopped in {what}, deadline {deadline:?}");
            cases.check_fresh(&what, |comm| stopped_in(comm, deadline, step));
        };
        check("its own work", &|_| {
            sleep(Duration::from_millis(20));
            Ok(())
        });
        for len in LENGTHS {
            check(&format!("all_reduce of {len}"), &|comm| {
                comm.all_reduce((&mut vec![1.0f32; len]).into(), ReduceOp::Mean)
            });
        }
    }
    if shares_memory {
        cases.check_fresh("a rank is stopped with windows", |comm| stopped_with_windows(comm, false));
        cases.check_fresh("a rank is stopped with windows, and all others are done", |comm| {
            stopped_with_windows(comm, true)
        });
    }
    let _ = world_size;
    cases.done("stopped ranks");
}
