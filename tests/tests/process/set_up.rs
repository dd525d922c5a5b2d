//! Ranks that connect by one line, and ranks that cannot connect: an error on every rank that names the failing rank and the reason.

use gradsync::Error;
use gradsync::comm::process::ProcessCommunicator;
use gradsync::comm::{CommError, Ranks};
use gradsync_tests::suite::{DEADLINE, Transport};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::launch::{Launch, turn};
use crate::transport::Launched;

/// The rank without a free descriptor.
const POOR: usize = 1;

/// The body of each rank.
pub(crate) fn run() {
    let ranks = Launched::join();
    let (first, member) = (ranks.fresh(DEADLINE), ranks.member());
    let limit = getrlimit(Resource::Nofile);
    if first.rank() == POOR {
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).expect("a lower limit");
    }
    let outcome = ProcessCommunicator::new_within(member, DEADLINE);
    setrlimit(Resource::Nofile, limit).expect("the limit from before");
    let error = outcome.expect_err("a rank cannot connect");
    let Error::Comm(CommError::Transport { rank, ref reason, .. }) = error else { panic!("{error:?}") };
    assert_eq!(rank, POOR);
    assert!(reason.contains("cannot connect to other ranks") && reason.contains("open files"), "{error}");
    first.barrier().expect("a communicator from before goes on");
}

#[test]
fn process_communicator_without_a_descriptor_fails_everywhere() {
    let _turn = turn();
    Launch::start("no descriptor", 3, |_| Vec::new()).finish();
}

#[test]
fn process_communicator_joins_by_one_line() {
    let _turn = turn();
    Launch::start("join", 3, |_| Vec::new()).finish();
}
