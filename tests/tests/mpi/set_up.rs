//! A rank's process is stopped (SIGSTOP) while communicators of all ranks are made: the others give up in time, and go on with existing
//! communicators.

use gradsync::Error;
use gradsync::comm::mpi::{MpiCommunicator, MpiError};
use gradsync::comm::{CommError, Ranks, Split};
use gradsync_tests::suite::Suite;
use gradsync_tests::suite::processes::set_up::{Moment, stopped_while_making};
use gradsync_tests::suite::processes::stopped::{MOST_RANKS, SHORT, STOPPED};

use crate::transport::Job;

/// The last case: afterwards the job can make no other communicator of all ranks.
pub(crate) fn run_last(suite: &mut Suite<Job>) {
    let world_size = suite.world_size();
    if world_size > MOST_RANKS {
        return;
    }
    let (moment, when) = if world_size == 3 { (Moment::Amid, "while") } else { (Moment::Before, "before") };
    suite.check(&format!("a rank is stopped {when} communicators of all are made"), |comm| {
        let outcome = stopped_while_making(comm, moment, &|| MpiCommunicator::world_within(SHORT).map(drop));
        let Err(Error::Comm(CommError::Timeout { missing, deadline, .. })) = outcome else { panic!("{outcome:?}") };
        assert_eq!(deadline, SHORT);
        if moment == Moment::Before {
            // The stopped rank arrives when all others have given up.
            let expected: &[usize] = if comm.rank() == STOPPED { &[] } else { &[STOPPED] };
            assert_eq!(missing, expected);
            let again = MpiCommunicator::world();
            assert!(matches!(again, Err(Error::Mpi(MpiError::GivenUp))), "{again:?}");
        } else {
            // The stopped rank may have its communicator although the others have given it up; then it waits for them in vain.
            let is_right = missing.is_empty() || missing.contains(&STOPPED) || comm.rank() == STOPPED;
            assert!(is_right, "{missing:?}");
        }
        comm.barrier().expect("a communicator from before goes on");
        let group = comm.split(Some(0), 0).expect("a group of it").expect("this rank is in it");
        group.barrier().expect("it works");
    });
    suite.done("the making of a communicator of all");
}
