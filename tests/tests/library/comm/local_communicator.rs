//! The cases of every transport, over threads.

use gradsync::comm::Communicator;
use gradsync_tests::ranks::guarded;
use gradsync_tests::suite::{
    Suite, Threads, collectives, error_texts, exchange, failures, groups, mismatches, mistakes, on_threads, operations,
    point_to_point, windows,
};

/// For cases with at least two ranks.
const SEVERAL: [usize; 5] = [2, 3, 4, 5, 8];

fn run(world_sizes: &'static [usize], cases: fn(&mut Suite<Threads>)) {
    guarded(240, move || on_threads(world_sizes, cases));
}

#[test]
fn collectives() {
    // Powers of two, odd counts, more ranks than this machine has cores.
    run(&[1, 2, 3, 5], |suite| collectives::run_up_to(suite, usize::MAX));
    run(&[4], collectives::run);
    // Each rank computes the vectors of all ranks.
    run(&[7, 8, 16], |suite| collectives::run_up_to(suite, 200 << 10));
}

#[test]
fn send_and_recv() {
    run(&SEVERAL, point_to_point::run);
}

#[test]
fn exchange() {
    run(&SEVERAL, exchange::run);
}

#[test]
fn collectives_that_differ() {
    run(&[2, 3, 8], mismatches::run);
}

#[test]
fn texts_of_mistakes() {
    run(&[2, 3, 4], mistakes::run);
}

#[test]
fn collectives_with_a_rank_that_fails() {
    run(&[2, 3, 4], failures::run);
}

#[test]
fn texts_of_errors() {
    run(&[2, 3, 5], error_texts::run);
}

#[test]
fn split() {
    run(&SEVERAL, groups::run);
    run(&[2, 3], groups::run_late);
}

#[test]
fn with_windows() {
    run(&[1], |suite| suite.check("each rank has its window", |comm| windows::each_rank_has_its_window(comm)));
    run(&SEVERAL, windows::run);
    run(&[2], |suite| {
        suite.check_fresh("vectors that do not divide", |comm| {
            let (mut vector, sharing) = ([0.0f32; 7], comm.sharing().expect("threads share memory"));
            let outcome = sharing.with_windows((&mut vector).into(), &mut |_| panic!("nothing was to be lent"));
            assert!(outcome.is_err(), "{outcome:?}");
        });
    });
}

/// Send and Recv, collectives of many tensors, reductions near the end of the range, reducers, and means over ranks.
#[test]
fn operations() {
    run(&[1, 2, 3, 4, 7], operations::run);
}
