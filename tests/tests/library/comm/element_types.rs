//! Elements of every type are moved by collectives; reductions refuse other elements than floating-point numbers, on every rank.

use gradsync::comm::{Collectives, Ranks, ReduceOp};
use gradsync::{DType, Error, Result, SliceMut};
use gradsync_tests::ranks::{guarded, on_ranks};

#[test]
fn all_gather_and_broadcast_move_integers() {
    guarded(60, || {
        on_ranks(3, |comm| {
            let (own, mut all) = ([comm.rank() as i64 - 1; 2], [9i64; 6]);
            comm.all_gather(&own, &mut all).unwrap();
            assert_eq!(all, [-1, -1, 0, 0, 1, 1]);
            comm.broadcast(&mut all[comm.rank()..][..3], 2).unwrap();
            assert_eq!(all[comm.rank()..][..3], [0, 0, 1]);
        });
    });
}

#[test]
fn all_reduce_refuses_integers_and_unaligned_numbers() {
    guarded(60, || {
        on_ranks(2, |comm| {
            let refused = |outcome: Result<()>, word: &str| {
                let error = outcome.expect_err(word);
                assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(word), "{error}");
            };
            let mut integers = [3u16; 4];
            refused(comm.all_reduce(SliceMut::from(&mut integers), ReduceOp::Sum), "elements of u16");
            refused(comm.all_reduce_weighted(SliceMut::from(&mut integers), &[1.0, 1.0]), "elements of u16");
            refused(comm.reduce_scatter_in_place(SliceMut::from(&mut integers), ReduceOp::Max), "elements of u16");
            assert_eq!(integers, [3; 4]);
            let mut numbers = [0.5f64; 5];
            let bytes = &mut SliceMut::from(&mut numbers).as_bytes_mut()[4..36];
            refused(comm.all_reduce(SliceMut::of_bytes(DType::F64, bytes), ReduceOp::Sum), "not aligned to 8 bytes");
            assert_eq!(numbers, [0.5; 5]);
        });
        on_ranks(2, |comm| {
            let (mut integers, mut numbers) = ([3u16; 4], [0.5f64; 4]);
            let error = match comm.rank() {
                0 => comm.all_reduce(SliceMut::from(&mut integers), ReduceOp::Sum).expect_err("integers"),
                _ => comm.all_reduce(&mut numbers, ReduceOp::Sum).expect_err("the other rank has integers"),
            };
            assert!(error.to_string().contains("elements of u16"), "{error}");
            assert_eq!((integers, numbers), ([3; 4], [0.5; 4]));
        });
    });
}
