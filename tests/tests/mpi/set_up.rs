//! A rank whose process is stopped (SIGSTOP) while communicators are made: the others give up in time, and go on with those that they have.

use std::thread::sleep;
use std::time::{Duration, Instant};

use gradsync::comm::mpi::{MpiCommunicator, MpiError};
use gradsync::comm::{CommError, Ranks, Split};
use gradsync::{Error, Result};

use crate::cases::{Cases, fresh};
use crate::stopped::{AFTER, MOST_RANKS, SHORT, STOP, STOPPED, is_timeout, stop};

/// When a rank is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// Before it makes a communicator, which the others do at once.
    Before,
    /// While all ranks make one after the other.
    Amid,
}

/// Makes communicators until that fails.
fn stopped_while_making(comm: &MpiCommunicator, moment: Moment, make: &dyn Fn() -> Result<()>) -> Result<()> {
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

/// Sleeps a moment at a time until one has taken as long as only a stopped process takes.
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
            // Its last group may be made although the others have given that up; then it waits for them in vain.
            assert!(matches!(outcome, Err(Error::Comm(CommError::Timeout { .. }))), "{outcome:?}");
        } else {
            is_timeout(&outcome);
        }
        comm.barrier().expect("another communicator goes on");
    });
    cases.done("set-up");
}

/// The last case: the job makes no other communicator of all then.
pub(crate) fn run_last(cases: &mut Cases) {
    let world_size = cases.world_size();
    if world_size > MOST_RANKS {
        return;
    }
    let (moment, when) = if world_size == 3 { (Moment::Amid, "while") } else { (Moment::Before, "before") };
    cases.check(&format!("a rank is stopped {when} communicators of all are made"), |comm| {
        let outcome = stopped_while_making(comm, moment, &|| MpiCommunicator::world_within(SHORT).map(drop));
        let Err(Error::Comm(CommError::Timeout { missing, deadline, .. })) = outcome else { panic!("{outcome:?}") };
        assert_eq!(deadline, SHORT);
        if moment == Moment::Before {
            // The rank that was stopped comes when the others have gone, all of them.
            let expected: &[usize] = if comm.rank() == STOPPED { &[] } else { &[STOPPED] };
            assert_eq!(missing, expected);
            let again = MpiCommunicator::world();
            assert!(matches!(again, Err(Error::Mpi(MpiError::GivenUp))), "{again:?}");
        } else {
            // The one that was stopped may have its communicator although the others have given that up, and waits for them in vain.
            let is_right = missing.is_empty() || missing.contains(&STOPPED) || comm.rank() == STOPPED;
            assert!(is_right, "{missing:?}");
        }
        comm.barrier().expect("a communicator from before goes on");
        let group = comm.split(Some(0), 0).expect("a group of it").expect("this rank is in it");
        group.barrier().expect("it works");
    });
    cases.done("the making of a communicator of all");
}
