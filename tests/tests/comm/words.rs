//! The texts of errors, over threads.

use gradsync::comm::Ranks;
use gradsync::comm::Split;
use gradsync::comm::local::LocalCommunicator;
use gradsync_tests::ranks::{guarded, on_ranks};
use gradsync_tests::words;

fn same_ranks(comm: &LocalCommunicator) -> LocalCommunicator {
    comm.split(Some(0), 0).unwrap().expect("a colour")
}

#[test]
fn every_rank_is_told_the_first_difference() {
    guarded(60, || {
        for world_size in [2, 3, 5] {
            on_ranks(world_size, |comm| words::disagreements(&comm));
        }
    });
}

#[test]
fn another_call_is_told_by_what_was_called() {
    guarded(60, || on_ranks(2, |comm| words::another_call(comm.rank(), || same_ranks(&comm))));
}

#[test]
fn a_rank_that_left_is_missed_by_what_was_called() {
    guarded(60, || on_ranks(2, |comm| words::a_rank_left(comm.rank(), || same_ranks(&comm))));
}
