//! The cases of every transport between processes, with 2, 3 and 4 ranks: over shared memory, and over sockets alone.

use gradsync_tests::suite::Suite;
use gradsync_tests::suite::processes::{self, Processes};

use crate::launch::{Launch, turn};
use crate::transport::Launched;

/// The body of each rank.
pub(crate) fn run() {
    let mut suite = Suite::new(Launched::join());
    processes::run(&mut suite);
    suite.finish();
}

fn launch(world_size: usize, messages_only: bool) {
    let _turn = turn();
    let variables = |_| vec![(Launched::MESSAGES_ONLY, u8::from(messages_only).to_string())];
    Launch::start("cases", world_size, variables).finish();
}

#[test]
fn process_communicator_of_two_ranks() {
    launch(2, false);
}

#[test]
fn process_communicator_of_three_ranks() {
    launch(3, false);
}

#[test]
fn process_communicator_of_four_ranks() {
    launch(4, false);
}

#[test]
fn process_communicator_of_three_ranks_by_sockets_alone() {
    launch(3, true);
}
