//! A rank's process is stopped (SIGSTOP), at every stage of a call. If it goes on in time, the stop has no effect. If not, every rank gets
//! in time a timeout that names it; the stopped rank gets a timeout too when it goes on.

use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use gradsync::comm::{Collectives, CommError, Communicator, Ranks, ReduceOp};
use gradsync::internal::memory::SharedWindows;
use gradsync::train::{Parameter, Reducer, Reduction};
use gradsync::{DType, Error, GradientBuffer, Result, SliceMut};

use super::Processes;
use crate::suite::{DEADLINE, Suite};

/// The rank that is stopped.
pub const STOPPED: usize = 1;
/// More ranks would wait like the third, most of the time of these cases.
pub const MOST_RANKS: usize = 3;
/// The delay before it is stopped.
pub const AFTER: Duration = Duration::from_millis(60);
/// A short deadline.
pub const SHORT: Duration = Duration::from_millis(500);
/// A stop that exceeds it.
pub const STOP: Duration = Duration::from_millis(2000);
/// A deadline that is long enough for a short stop.
const LONG: Duration = Duration::from_secs(20);
/// A short stop.
const BREAK: Duration = Duration::from_millis(400);
/// The number of elements of an eager call, and of a call with the longest messages that ranks do not wait for without a deadline.
const LENGTHS: [usize; 2] = [100, 1 << 19];

/// Stops this process after [`AFTER`], and continues it after `how_long`.
pub fn stop(how_long: Duration) -> Child {
    let (after, stop) = (AFTER.as_secs_f64(), how_long.as_secs_f64());
    let script = format!("sleep {after}; kill -STOP $PPID; sleep {stop}; kill -CONT $PPID");
    Command::new("sh").args(["-c", &script]).spawn().expect("a shell")
}

/// The call that a rank repeats.
type Step<'a> = &'a dyn Fn(&dyn Communicator) -> Result<()>;

/// Repeats a step on all ranks while one of them is stopped, for longer than the deadline if `is_late`.
fn stopped_in<T: Processes>(suite: &Suite<T>, is_late: bool, step: Step<'_>) {
    let (deadline, how_long) = if is_late { (SHORT, STOP) } else { (LONG, BREAK) };
    let comm = suite.transport.fresh(deadline);
    let is_stopped = comm.rank() == STOPPED;
    suite.comm.barrier().expect("all are here");
    let mut child = is_stopped.then(|| stop(how_long));
    let start = Instant::now();
    let until = AFTER + how_long + Duration::from_millis(300);
    let outcome = loop {
        let mut elapsed = [start.elapsed().as_secs_f64()];
        let outcome = step(&comm).and_then(|()| comm.all_reduce(&mut elapsed, ReduceOp::Max));
        if outcome.is_err() || elapsed[0] >= until.as_secs_f64() {
            break outcome;
        }
    };
    let elapsed = start.elapsed();
    if let Some(child) = &mut child {
        child.wait().expect("the shell's end");
    }
    if !is_late {
        return outcome.expect("it went on in time");
    }
    is_timeout(&outcome);
    assert!(is_stopped || elapsed < AFTER + STOP, "it went on before: {elapsed:?}");
    is_timeout(&comm.barrier());
}

/// Asserts a timeout that names the stopped rank. It may name others, if a rank that waited for several was the first to give up.
#[track_caller]
pub fn is_timeout(outcome: &Result<()>) {
    let Err(Error::Comm(CommError::Timeout { missing, .. })) = outcome else { panic!("{outcome:?}") };
    assert!(missing.contains(&STOPPED), "{missing:?}");
}

/// A rank is stopped inside its exposure epoch, and writes to its windows when it goes on; the owners have their memory back by then.
fn stopped_with_windows<T: Processes>(suite: &Suite<T>, is_behind_a_collective: bool) {
    let (comm, world_size) = (suite.transport.fresh(SHORT), suite.world_size());
    let mut buffer = GradientBuffer::new_shared(DType::F32, world_size, [("vector", [world_size * 1024])]).unwrap();
    suite.comm.barrier().expect("all are here");
    let (is_stopped, start) = (comm.rank() == STOPPED, Instant::now());
    let mut child = is_stopped.then(|| stop(STOP));
    let outcome = comm.with_windows(buffer.as_mut_slice(), &mut |windows: Vec<SliceMut<'_>>| {
        if is_stopped {
            sleep(AFTER * 2);
            windows.into_iter().for_each(|window| window.typed::<f32>().expect("f32").fill(7.0));
        }
        if is_behind_a_collective { Ok(()) } else { comm.barrier() }
    });
    let elapsed = start.elapsed();
    is_timeout(&outcome.map(drop));
    assert!(is_stopped || elapsed < AFTER + STOP, "it went on before: {elapsed:?}");
    let numbers: &mut [f32] = buffer.as_mut_slice().typed().expect("f32");
    numbers.fill(3.0);
    sleep((AFTER + STOP + Duration::from_millis(300)).saturating_sub(start.elapsed()));
    assert!(numbers.iter().all(|&number| number == 3.0), "somebody else wrote here");
    if let Some(child) = &mut child {
        child.wait().expect("the shell's end");
    }
    // The returned memory can be shared again, and so can the buffer of the stopped rank.
    drop(comm);
    let again = suite.transport.fresh(DEADLINE);
    let lent = again.with_windows(buffer.as_mut_slice(), &mut |windows: Vec<SliceMut<'_>>| {
        assert!(
            windows.into_iter().all(|window| window.typed::<f32>().expect("f32").iter().all(|&number| number == 3.0))
        );
        Ok(())
    });
    assert!(lent.expect("all lend theirs"));
}

/// A rank is stopped in a reducer's step with shared buckets, and writes to them when it goes on. The others have left their buckets by
/// then, and the next reducer of all ranks is right.
fn stopped_in_reducer<T: Processes>(suite: &Suite<T>) {
    let comm = suite.transport.fresh(SHORT);
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let is_stopped = rank == STOPPED;
    let parameter = || [Parameter::new("weight", [LENGTHS[1]], DType::F32)];
    let gradient = vec![rank as f32 + 1.0; LENGTHS[1]];
    let mut reducer = Reducer::new(&comm, parameter(), Reduction::Sum).expect("a reducer");
    assert!(reducer.shares_memory());
    let is_sum = |reducer: &Reducer<'_>| {
        let sums = reducer.gradient(0).expect("reduced").to_vec::<f32>().expect("f32");
        sums.iter().all(|&sum| sum == (world_size * (world_size + 1) / 2) as f32)
    };
    let step = |reducer: &mut Reducer<'_>| {
        let mut step = reducer.step()?;
        step.ready(0, &gradient)?;
        step.finish().map(drop)
    };
    let mut child = is_stopped.then(|| stop(STOP));
    let start = Instant::now();
    let outcome = loop {
        let outcome = step(&mut reducer);
        if outcome.is_err() {
            break outcome;
        }
        assert!(is_sum(&reducer) && start.elapsed() < LONG, "nobody was stopped");
    };
    let elapsed = start.elapsed();
    is_timeout(&outcome);
    assert!(is_stopped || elapsed < AFTER + STOP, "it went on before: {elapsed:?}");
    is_timeout(&step(&mut reducer));
    if let Some(child) = &mut child {
        child.wait().expect("the shell's end");
    }
    drop(reducer);
    drop(comm);
    let again = suite.transport.fresh(DEADLINE);
    let mut reducer = Reducer::new(&again, parameter(), Reduction::Sum).expect("another reducer");
    step(&mut reducer).expect("all are here");
    assert!(reducer.shares_memory() && is_sum(&reducer));
}

/// Sends to the next rank, and receives from the previous one.
fn pass_on(comm: &dyn Communicator, len: usize) -> Result<()> {
    let (rank, world_size, mut data) = (comm.rank(), comm.world_size(), vec![0.0f32; len]);
    let (next, last) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    comm.send_recv(&vec![1.0f32; len], next, &mut data, last)
}

/// All cases.
pub fn run<T: Processes>(suite: &mut Suite<T>) {
    if suite.world_size() > MOST_RANKS {
        return;
    }
    check(suite, "its own work", true, &|_| {
        sleep(Duration::from_millis(20));
        Ok(())
    });
    for len in LENGTHS {
        check(suite, &format!("all_reduce of {len}"), true, &|comm| {
            comm.all_reduce(&mut vec![1.0f32; len], ReduceOp::Mean)
        });
        check(suite, &format!("send_recv of {len}"), true, &|comm| pass_on(comm, len));
    }
    check(suite, "broadcast", true, &|comm| comm.broadcast(&mut vec![1.0f32; LENGTHS[1]], 0));
    check(suite, "all_reduce", false, &|comm| comm.all_reduce(&mut vec![1.0f32; LENGTHS[1]], ReduceOp::Mean));
    check(suite, "send_recv", false, &|comm| pass_on(comm, LENGTHS[1]));
    if suite.comm.sharing().is_some() {
        suite.check_with("a rank is stopped with windows", |suite| stopped_with_windows(suite, false));
        suite.check_with("a rank is stopped with windows, and all others are done", |suite| {
            stopped_with_windows(suite, true);
        });
        suite.check_with("a rank is stopped in a reducer's step", stopped_in_reducer);
    }
    suite.done("stopped ranks");
}

fn check<T: Processes>(suite: &mut Suite<T>, what: &str, is_late: bool, step: Step<'_>) {
    let how = if is_late { "beyond the deadline" } else { "for a while" };
    suite.check_with(&format!("a rank is stopped {how} in {what}"), |suite| stopped_in(suite, is_late, step));
}
