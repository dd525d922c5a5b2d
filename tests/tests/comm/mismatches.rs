//! Ranks with different calls: an error on every rank that names both calls, and no data moved.

use gradsync::Error;
use gradsync::comm::{Collectives, Communicator, Ranks};
use gradsync::comm::{CommError, ReduceOp};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::{guarded, on_ranks};

type Call = fn(&dyn Communicator) -> gradsync::Result<()>;

fn f32s(len: usize) -> Array {
    Array::unwritten(Format::F32, len)
}

/// One rank calls `odd`, all others call `common`; every rank gets an error with both words in its text.
#[track_caller]
fn assert_mismatch(common: Call, odd: Call, words: [&str; 2]) {
    for world_size in [2, 3, 8] {
        for deviant in [0, world_size - 1] {
            let errors = on_ranks(world_size, |comm| {
                let call = if comm.rank() == deviant { odd } else { common };
                call(&comm).expect_err("the calls differ")
            });
            for (rank, error) in errors.into_iter().enumerate() {
                let what = format!("{words:?}, rank {rank} of {world_size}, deviant {deviant}");
                assert!(matches!(error, Error::Comm(CommError::Mismatch { .. })), "{what}: {error:?}");
                let text = error.to_string().to_lowercase();
                for word in words {
                    assert!(text.contains(word), "{what}: \"{text}\" does not name {word}");
                }
                assert!(text.contains(&deviant.to_string()), "{what}: \"{text}\" does not name the rank");
            }
        }
    }
}

#[test]
fn operation() {
    guarded(60, || {
        assert_mismatch(
            |comm| comm.all_reduce(f32s(5).slice_mut(), ReduceOp::Sum),
            |comm| comm.broadcast(f32s(5).slice_mut(), 0),
            ["all_reduce", "broadcast"],
        );
        assert_mismatch(
            |comm| comm.barrier(),
            |comm| comm.all_gather_in_place(f32s(840).slice_mut()),
            ["barrier", "all_gather"],
        );
        assert_mismatch(
            |comm| {
                let len = comm.world_size();
                comm.all_to_all(f32s(len).slice(), f32s(len).slice_mut())
            },
            |comm| {
                let len = comm.world_size();
                comm.reduce_scatter(f32s(len).slice(), f32s(1).slice_mut(), ReduceOp::Sum)
            },
            ["all_to_all", "reduce_scatter"],
        );
    });
}

#[test]
fn reduction() {
    guarded(60, || {
        assert_mismatch(
            |comm| comm.all_reduce(f32s(5).slice_mut(), ReduceOp::Sum),
            |comm| comm.all_reduce(f32s(5).slice_mut(), ReduceOp::Max),
            ["sum", "max"],
        );
    });
}

#[test]
fn weights() {
    guarded(60, || {
        assert_mismatch(
            |comm| comm.all_reduce_weighted(f32s(5).slice_mut(), &vec![2.0; comm.world_size()]),
            |comm| comm.all_reduce_weighted(f32s(5).slice_mut(), &vec![3.0; comm.world_size()]),
            ["weights with the hash", "weights with the hash"],
        );
        assert_mismatch(
            |comm| comm.all_reduce_weighted(f32s(5).slice_mut(), &vec![2.0; comm.world_size()]),
            |comm| comm.all_reduce(f32s(5).slice_mut(), ReduceOp::Mean),
            ["weights with the hash", "all_reduce(mean)"],
        );
    });
}

#[test]
fn weights_of_no_mean_are_refused() {
    guarded(20, || {
        let refused: [&[f64]; 6] =
            [&[1.0], &[1.0, -1.0], &[0.0, 0.0], &[1.0, f64::NAN], &[f64::INFINITY, 1.0], &[f64::MAX, f64::MAX]];
        for weights in refused {
            on_ranks(2, |comm| {
                let mut data = f32s(5);
                let error = comm.all_reduce_weighted(data.slice_mut(), weights).expect_err("no mean").to_string();
                let names = error.contains(&format!("{weights:?}")) || weights.len() == 1 && error.contains("weights");
                assert!(names, "\"{error}\" does not name {weights:?}");
                assert_eq!(data, f32s(5));
            });
        }
    });
}

#[test]
fn count() {
    guarded(60, || {
        assert_mismatch(
            |comm| comm.all_reduce(f32s(1010).slice_mut(), ReduceOp::Sum),
            |comm| comm.all_reduce(f32s(1011).slice_mut(), ReduceOp::Sum),
            ["1010", "1011"],
        );
        assert_mismatch(
            |comm| comm.broadcast(f32s(1010).slice_mut(), 0),
            |comm| comm.broadcast(f32s(1011).slice_mut(), 0),
            ["1010", "1011"],
        );
        assert_mismatch(
            |comm| comm.all_gather(f32s(1010).slice(), f32s(1010 * comm.world_size()).slice_mut()),
            |comm| comm.all_gather(f32s(1011).slice(), f32s(1011 * comm.world_size()).slice_mut()),
            ["1010", "1011"],
        );
        assert_mismatch(
            |comm| comm.all_reduce(f32s(0).slice_mut(), ReduceOp::Sum),
            |comm| comm.all_reduce(f32s(1011).slice_mut(), ReduceOp::Sum),
            ["0", "1011"],
        );
    });
}

#[test]
fn dtype() {
    guarded(60, || {
        assert_mismatch(
            |comm| comm.all_reduce(f32s(5).slice_mut(), ReduceOp::Sum),
            |comm| comm.all_reduce(Array::unwritten(Format::BF16, 5).slice_mut(), ReduceOp::Sum),
            ["f32", "bf16"],
        );
        // An equal number of bytes does not make the dtypes match.
        assert_mismatch(
            |comm| comm.broadcast(Array::unwritten(Format::F16, 6).slice_mut(), 0),
            |comm| comm.broadcast(Array::unwritten(Format::BF16, 6).slice_mut(), 0),
            ["f16", "bf16"],
        );
    });
}

#[test]
fn root() {
    guarded(60, || {
        assert_mismatch(
            |comm| comm.broadcast(f32s(5).slice_mut(), 0),
            |comm| comm.broadcast(f32s(5).slice_mut(), 1),
            ["root 0", "root 1"],
        );
    });
}

#[test]
fn a_mismatch_moves_no_data() {
    guarded(60, || {
        on_ranks(3, |comm| {
            let mut data = f32s(10 + usize::from(comm.rank() == 1));
            let before = data.clone();
            assert!(comm.all_reduce(data.slice_mut(), ReduceOp::Sum).is_err());
            assert_eq!(data, before, "rank {}", comm.rank());
        });
    });
}

/// A call that is invalid in the same way on every rank is an error too, and does not wait for the deadline.
#[test]
fn calls_that_no_rank_can_make() {
    guarded(20, || {
        for world_size in [2, 3] {
            on_ranks(world_size, |comm| {
                assert!(comm.broadcast(f32s(5).slice_mut(), world_size).is_err(), "a root that does not exist");
            });
            on_ranks(world_size, |comm| {
                let outcome = comm.reduce_scatter(f32s(7).slice(), f32s(3).slice_mut(), ReduceOp::Sum);
                let text = outcome.expect_err("7 is no multiple of the ranks times 3").to_string();
                assert!(text.contains('7'), "\"{text}\" does not name the length");
            });
            on_ranks(world_size, |comm| {
                assert!(comm.all_gather(f32s(3).slice(), f32s(7).slice_mut()).is_err());
            });
            on_ranks(world_size, |comm| {
                assert!(comm.all_gather_in_place(f32s(7).slice_mut()).is_err());
            });
            on_ranks(world_size, |comm| {
                assert!(comm.all_to_all(f32s(7).slice(), f32s(7).slice_mut()).is_err());
            });
            on_ranks(world_size, |comm| {
                let len = 3 * world_size;
                let mut output = Array::unwritten(Format::F16, len);
                assert!(comm.all_to_all(f32s(len).slice(), output.slice_mut()).is_err(), "two dtypes in one call");
            });
        }
    });
}

/// One rank alone names a root that does not exist: the others learn it at once.
#[test]
fn an_impossible_root_on_one_rank_is_an_error_on_all() {
    guarded(20, || {
        let texts = on_ranks(3, |comm| {
            let root = if comm.rank() == 1 { 7 } else { 0 };
            comm.broadcast(f32s(5).slice_mut(), root).expect_err("no rank 7").to_string()
        });
        for text in texts {
            assert!(text.contains('7') && text.contains("rank 1"), "\"{text}\" does not name the root and the rank");
        }
    });
}
