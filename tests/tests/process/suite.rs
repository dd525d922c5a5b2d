//! The cases of every transport between processes, with 2, 3 and 4 ranks: over shared memory, and over sockets alone.

use std::process::ExitCode;

use crate::launch::{Launched, turn};
use crate::message_passing::{self, cases::Cases};
use crate::transport::{self, MESSAGES_ONLY};

/// The body of each rank.
pub(crate) fn run() {
    let mut cases = Cases::start().expect("ranks that find each other");
    message_passing::run(&mut cases);
    let summary = transport::fresh();
    assert_eq!(cases.finish(&summary), ExitCode::SUCCESS);
}

fn launch(world_size: usize, messages_only: bool) {
    let _turn = turn();
    let variables = |_| vec![(MESSAGES_ONLY, u8::from(messages_only).to_string())];
    Launched::start("cases", world_size, variables).finish();
}

#[test]
fn two_ranks_pass_the_cases() {
    launch(2, false);
}

#[test]
fn three_ranks_pass_the_cases() {
    launch(3, false);
}

#[test]
fn four_ranks_pass_the_cases() {
    launch(4, false);
}

#[test]
fn three_ranks_pass_the_cases_by_sockets_alone() {
    launch(3, true);
}
