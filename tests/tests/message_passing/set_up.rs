//! A rank's process is stopped (SIGSTOP) while communicators are made: the others give up in time, and go on with existing communicators.

use std::thread::sleep;
use std::time::{Duration, Instant};

use gradsync::comm::{CommError, Ranks, Split};
use gradsync::{Error, Result};

use super::cases::{Cases, fresh};
use super::stopped::{AFTER, MOST_RANKS, SHORT, STOP, STOPPED, is_timeout, stop};
use crate::transport::Comm;

/// The moment at which a rank is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// Before it makes a communicator, while the others start to make one.
    Before,
    /// While all ranks make communicators, one after another.
    Amid,
}

/// Makes communicators until one fails or the time is over.
pub(crate) fn stopped_while_making(comm: &Comm, moment: Moment, make: &dyn Fn() -> Result<()>) -> Result<()> {
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

pub(crate) fn run(cases: &mut Cases) {
    if cases.world_size() > MOST_RANKS {
        return;
    }
    cases.check_fresh("a rank is stopped while groups are made", |comm| {
        let parent = fresh().with_deadline(SHORT);
        let outcome = stopped_while_making(&comm, Moment::Amid, &|| parent.split(Some(0), 0).map(drop));
        if comm.rank() == STOPPED {
            // The stopped rank's last group may succeed although the others have given it up; then the rank waits for them in vain.
            assert!(matches!(outcome, Err(Error::Comm(CommError::Timeout { .. }))), "{outcome:?}");
        } else {
            is_timeout(&outcome);
        }
        comm.barrier().expect("another communicator goes on");
    });
    cases.done("set-up");
}
