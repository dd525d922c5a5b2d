//! Ranks that fail in the middle of a step, and steps that differ between ranks: communicator errors on the other ranks, and no hang.

use gradsync::comm::Ranks;
use gradsync::internal::run_each;
use gradsync::train::{Parameter, Reducer, ReducerOptions};
use gradsync::{CommError, DType, Error};
use gradsync_tests::ranks::{guarded, on_ranks};

fn parameters() -> [Parameter; 3] {
    ["a", "b", "c"].map(|name| Parameter::new(name, [4], DType::F32))
}

/// Options that put each gradient into a bucket of its own.
fn options() -> ReducerOptions {
    ReducerOptions::default().with_first_bucket_bytes(0).with_bucket_bytes(0)
}

#[test]
fn a_rank_that_panics_in_a_step_ends_the_step_of_the_others() {
    guarded(60, || {
        for panics_in in 0..2 {
            let outcomes = run_each(3, |comm| {
                let mut reducer = Reducer::new(&comm, parameters(), options()).unwrap();
                for number in 0..3 {
                    let mut step = reducer.step().unwrap();
                    step.ready(0, &[1.0f32; 4]).unwrap();
                    if (comm.rank(), number) == (1, panics_in) {
                        panic!("in the middle of a step");
                    }
                    let rest = step.ready(1, &[1.0f32; 4]).and_then(|()| step.ready(2, &[1.0f32; 4]));
                    let Err(error) = rest.and_then(|()| step.finish()) else { continue };
                    // The reducer has failed, and returns the same error again.
                    let again = reducer.step().unwrap().finish().unwrap_err();
                    return [error, again];
                }
                unreachable!("the other rank is gone")
            });
            for (rank, outcome) in outcomes.unwrap().into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
                for error in outcome.unwrap_or_else(|_| panic!("rank {rank} panicked")) {
                    let Error::Comm(CommError::PeerGone { rank: gone, .. }) = error else {
                        panic!("rank {rank}: {error:?}")
                    };
                    assert_eq!(gone, 1);
                    assert!(error.to_string().starts_with("reducer"), "{error}");
                }
            }
        }
    });
}

#[test]
fn a_step_unlike_the_first_is_refused_on_every_rank() {
    guarded(60, || {
        on_ranks(3, |comm| {
            let mut reducer = Reducer::new(&comm, parameters(), options().with_static_graph(true)).unwrap();
            for number in 0..6 {
                let mut step = reducer.step().unwrap();
                let begin = usize::from((comm.rank(), number) == (2, 3));
                (begin..3).for_each(|index| step.ready(index, &[1.0f32; 4]).unwrap());
                let outcome = step.finish().map(drop).map_err(|error| error.to_string());
                let Err(error) = outcome else {
                    assert_ne!(number, 3);
                    continue;
                };
                assert_eq!(number, 3, "{error}");
                assert!(error.contains(r#"parameter 0, "a", has no gradient on this rank"#), "{error}");
                assert!(comm.rank() == 2 || error.contains("rank 2 refuses"), "{error}");
            }
        });
    });
}

/// A rank leaves out a step of the program, whose number is passed.
#[test]
fn steps_of_different_numbers_name_both_ranks_and_both_numbers() {
    guarded(60, || {
        for is_alike in [false, true] {
            let errors = on_ranks(3, |comm| {
                let options = options().with_static_graph(is_alike);
                let mut reducer = Reducer::new(&comm, parameters(), options).unwrap();
                for number in (0..6).filter(|number| (comm.rank(), *number) != (1, 3)) {
                    let mut step = reducer.at(100 + number).step().unwrap();
                    let handed_in = (0..3).try_for_each(|index| step.ready(index, &[1.0f32; 4]));
                    if let Err(error) = handed_in.and_then(|()| step.finish().map(drop)) {
                        assert_eq!(number, if comm.rank() == 1 { 4 } else { 3 });
                        return error.to_string();
                    }
                }
                unreachable!("the numbers differ")
            });
            for error in errors {
                // The other rank of the pair is the first that the comparison meets.
                let pairs = [
                    "rank 0 called reducer step 103, rank 1 called reducer step 104",
                    "rank 1 called reducer step 104, rank 2 called reducer step 103",
                ];
                assert!(pairs.iter().any(|pair| error.contains(pair)), "{error}");
            }
        }
    });
}

/// One rank ends its training while the others go on.
#[test]
fn a_rank_that_makes_fewer_steps_is_named() {
    guarded(60, || {
        on_ranks(2, |comm| {
            let mut reducer = Reducer::new(&comm, parameters(), options()).unwrap();
            for number in 0..3 {
                if comm.rank() == 1 && number == 2 {
                    return;
                }
                let mut step = reducer.step().unwrap();
                let handed_in = (0..3).try_for_each(|index| step.ready(index, &[1.0f32; 4]));
                let outcome = handed_in.and_then(|()| step.finish().map(drop));
                match outcome {
                    Ok(()) => assert!(number < 2),
                    Err(Error::Comm(CommError::PeerGone { rank: 1, .. })) => assert_eq!(number, 2),
                    Err(other) => panic!("{other:?}"),
                }
            }
        });
    });
}
