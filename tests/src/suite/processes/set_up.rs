//! A rank's process is stopped (SIGSTOP) while communicators are made: the others give up in time, and go on with existing communicators.

use std::thread::sleep;
use std::time::{Duration, Instant};

use gradsync::comm::{CommError, Communicator, Ranks, Split};
use gradsync::{Error, Result};

use super::Processes;
use super::stopped::{AFTER, MOST_RANKS, SHORT, STOP, STOPPED, is_timeout, stop};
use crate::suite::{DEADLINE, Suite};

/// The moment at which a rank is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Before it makes a communicator, while the others start to make one.
    Before,
    /// While all ranks make communicators, one after another.
    Amid,
}

/// Makes communicators until one fails or the time is over, while one rank is stopped.
///
/// # Errors
/// The error of the communicator that could not be made.
///
/// # Panics
/// If a rank that is not stopped waits for the one that is.
pub fn stopped_while_making(comm: &dyn Communicator, moment: Moment, make: &dyn Fn() -> Result<()>) -> Result<()> {
    let is_stopped = comm.rank() == STOPPED;
    comm.barrier().expect("all are here");
    let (start, child) = (Instant::now(), is_stopped.then(|| stop(STOP)));
    if is_stopped && moment == Moment::Before {
        wait_for_the_stop();
    }
    let outcome = loop {
        let outcome = make();
        if outcome.is_err() || start.elapsed() > AFTER + STOP * 2 {
            break outcome;
        }
    };
    let elapsed = start.elapsed();
    if let Some(mut child) = child {
        child.wait().expect("the shell's end");
    }
    assert!(is_stopped || elapsed < AFTER + STOP, "it went on before: {elapsed:?}");
    outcome
}

/// Sleeps in short intervals until one interval has taken so long that the process must have been stopped.
fn wait_for_the_stop() {
    loop {
        let start = Instant::now();
        sleep(Duration::from_millis(10));
        if start.elapsed() > STOP / 2 {
            return;
        }
    }
}

/// The case of groups.
pub fn run<T: Processes>(suite: &mut Suite<T>) {
    if suite.world_size() > MOST_RANKS {
        return;
    }
    suite.check_with("a rank is stopped while groups are made", |suite| {
        let (comm, parent) = (suite.transport.fresh(DEADLINE), suite.transport.fresh(SHORT));
        let outcome = stopped_while_making(&comm, Moment::Amid, &|| parent.split(Some(0), 0).map(drop));
        if comm.rank() == STOPPED {
            // The stopped rank's last group may succeed although the others have given it up; then the rank waits for them in vain.
            assert!(matches!(outcome, Err(Error::Comm(CommError::Timeout { .. }))), "{outcome:?}");
        } else {
            is_timeout(&outcome);
        }
        comm.barrier().expect("another communicator goes on");
    });
    suite.done("set-up");
}
