//! Ranks with different calls: an error on every rank that names both calls, and no data moved.

use gradsync::Error;
use gradsync::comm::{Collectives, CommError, Ranks, ReduceOp};

use super::{Call, Suite, Transport, assert_mismatch, assert_names};
use crate::array::Array;
use crate::oracle::Format;

fn f32s(len: usize) -> Array {
    Array::unwritten(Format::F32, len)
}

/// The call of most ranks, the different call of one rank, and a word of each that the error must hold.
const MISMATCHES: [(Call, Call, [&str; 2]); 14] = [
    (
        |comm| comm.all_reduce(f32s(5).slice_mut(), ReduceOp::Sum),
        |comm| comm.broadcast(f32s(5).slice_mut(), 0),
        ["all_reduce", "broadcast"],
    ),
    (|comm| comm.barrier(), |comm| comm.all_gather_in_place(f32s(840).slice_mut()), ["barrier", "all_gather"]),
    (
        |comm| comm.all_reduce(f32s(5).slice_mut(), ReduceOp::Sum),
        |comm| comm.all_reduce(f32s(5).slice_mut(), ReduceOp::Max),
        ["sum", "max"],
    ),
    (
        |comm| comm.all_reduce(f32s(1010).slice_mut(), ReduceOp::Sum),
        |comm| comm.all_reduce(f32s(1011).slice_mut(), ReduceOp::Sum),
        ["1010", "1011"],
    ),
    (
        |comm| comm.all_reduce_weighted(f32s(5).slice_mut(), &vec![2.0; comm.world_size()]),
        |comm| comm.all_reduce_weighted(f32s(5).slice_mut(), &vec![3.0; comm.world_size()]),
        ["weights with the hash", "weights with the hash"],
    ),
    (
        |comm| comm.all_reduce_weighted(f32s(1010).slice_mut(), &vec![2.0; comm.world_size()]),
        |comm| comm.all_reduce(f32s(1010).slice_mut(), ReduceOp::Mean),
        ["weights with the hash", "all_reduce(mean)"],
    ),
    (
        |comm| comm.all_gather(f32s(1010).slice(), f32s(1010 * comm.world_size()).slice_mut()),
        |comm| comm.all_gather(f32s(1011).slice(), f32s(1011 * comm.world_size()).slice_mut()),
        ["1010", "1011"],
    ),
    (
        |comm| comm.broadcast(Array::unwritten(Format::F16, 6).slice_mut(), 0),
        |comm| comm.broadcast(Array::unwritten(Format::BF16, 6).slice_mut(), 0),
        ["f16", "bf16"],
    ),
    (
        |comm| comm.all_reduce(f32s(5).slice_mut(), ReduceOp::Sum),
        |comm| comm.all_reduce(Array::unwritten(Format::BF16, 5).slice_mut(), ReduceOp::Sum),
        ["f32", "bf16"],
    ),
    (
        |comm| comm.broadcast(f32s(5).slice_mut(), 0),
        |comm| comm.broadcast(f32s(5).slice_mut(), 1),
        ["root 0", "root 1"],
    ),
    (
        |comm| comm.broadcast(f32s(1010).slice_mut(), 0),
        |comm| comm.broadcast(f32s(1011).slice_mut(), 0),
        ["1010", "1011"],
    ),
    (
        |comm| comm.all_reduce(f32s(0).slice_mut(), ReduceOp::Sum),
        |comm| comm.all_reduce(f32s(1011).slice_mut(), ReduceOp::Sum),
        ["0 ×", "1011 ×"],
    ),
    (
        |comm| {
            let len = comm.world_size();
            comm.all_to_all(f32s(len).slice(), f32s(len).slice_mut())
        },
        |comm| {
            let len = comm.world_size();
            comm.reduce_scatter(f32s(len).slice(), f32s(1).slice_mut(), ReduceOp::Sum)
        },
        ["all_to_all", "reduce_scatter"],
    ),
    // One rank makes a transfer while the others are in a collective.
    (
        |comm| comm.barrier(),
        |comm| comm.send(f32s(5).slice(), (comm.rank() + 1) % comm.world_size()),
        ["barrier", "send"],
    ),
];

/// Invalid operands that only their own rank can detect, and a word of its error.
const INVALID: [(Call, Call, &str); 7] = [
    (|comm| comm.broadcast(f32s(5).slice_mut(), 0), |comm| comm.broadcast(f32s(5).slice_mut(), 77), "77"),
    (
        |comm| comm.reduce_scatter(f32s(3 * comm.world_size()).slice(), f32s(3).slice_mut(), ReduceOp::Sum),
        |comm| comm.reduce_scatter(f32s(1237).slice(), f32s(3).slice_mut(), ReduceOp::Sum),
        "1237",
    ),
    (
        |comm| comm.all_gather(f32s(3).slice(), f32s(3 * comm.world_size()).slice_mut()),
        |comm| comm.all_gather(f32s(3).slice(), f32s(1237).slice_mut()),
        "1237",
    ),
    (
        |comm| comm.all_gather_in_place(f32s(840).slice_mut()),
        |comm| comm.all_gather_in_place(f32s(1237).slice_mut()),
        "1237",
    ),
    (
        |comm| comm.all_to_all(f32s(840).slice(), f32s(840).slice_mut()),
        |comm| comm.all_to_all(f32s(840).slice(), Array::unwritten(Format::F16, 840).slice_mut()),
        "f16",
    ),
    (
        |comm| comm.all_reduce_weighted(f32s(3).slice_mut(), &vec![1.0; comm.world_size()]),
        |comm| comm.all_reduce_weighted(f32s(3).slice_mut(), &vec![-1.0; comm.world_size()]),
        "-1.0",
    ),
    (
        |comm| comm.all_reduce_weighted(f32s(3).slice_mut(), &vec![1.0; comm.world_size()]),
        |comm| comm.all_reduce_weighted(f32s(3).slice_mut(), &[1.0; 1237]),
        "1237",
    ),
];

/// Calls that are invalid in the same way on every rank, and a word of the error.
const IMPOSSIBLE: [(Call, &str); 6] = [
    (|comm| comm.broadcast(f32s(5).slice_mut(), comm.world_size()), "root"),
    (|comm| comm.reduce_scatter(f32s(1237).slice(), f32s(3).slice_mut(), ReduceOp::Sum), "1237"),
    (|comm| comm.all_gather(f32s(3).slice(), f32s(1237).slice_mut()), "1237"),
    (|comm| comm.all_gather_in_place(f32s(1237).slice_mut()), "1237"),
    (|comm| comm.all_to_all(f32s(1237).slice(), f32s(1237).slice_mut()), "1237"),
    (|comm| comm.all_to_all(f32s(840).slice(), Array::unwritten(Format::F16, 840).slice_mut()), "f16"),
];

/// All cases.
pub fn run<T: Transport>(suite: &mut Suite<T>) {
    let (rank, world_size) = (suite.rank(), suite.world_size());
    for (usual, odd, words) in MISMATCHES {
        for deviant in [0, world_size - 1] {
            suite.check_fresh(&format!("{words:?}, rank {deviant} deviates"), |comm| {
                let [left, right] = words;
                let outcome = if rank == deviant { odd } else { usual }(&comm);
                assert_mismatch(outcome, &[left, right, &format!("rank {deviant}")]);
                // The failure is permanent, and later calls fail without a wait.
                comm.barrier().expect_err("a communicator that has failed");
            });
        }
    }
    for (usual, odd, word) in INVALID {
        let deviant = world_size / 2;
        // 1237 is prime, so no world size divides it.
        suite.check_fresh(&format!("operands that do not fit on one rank, {word}"), |comm| {
            let error = if rank == deviant { odd } else { usual }(&comm).expect_err("operands do not fit");
            assert_names(&error, &[word]);
            if rank != deviant {
                let is_invalid = matches!(&error, Error::Comm(CommError::InvalidCall { rank, .. }) if *rank == deviant);
                assert!(is_invalid, "{error:?}");
            }
        });
    }
    for (call, word) in IMPOSSIBLE {
        suite.check_fresh(&format!("operands that do not fit on any rank, {word}"), |comm| {
            assert_names(&call(&comm).expect_err("no rank can make this call"), &[word]);
        });
    }
    suite.check_fresh("a mismatch moves no data", |comm| {
        let mut data = f32s(10 + usize::from(rank == 1));
        let before = data.clone();
        assert!(comm.all_reduce(data.slice_mut(), ReduceOp::Sum).is_err());
        assert_eq!(data, before);
    });
    for weights in [[1.0, -1.0], [0.0, 0.0], [1.0, f64::NAN], [f64::INFINITY, 1.0], [f64::MAX, f64::MAX]] {
        suite.check_fresh(&format!("the weights {weights:?}, of no mean"), |comm| {
            let weights: Vec<f64> = weights.into_iter().cycle().take(comm.world_size()).collect();
            let mut data = f32s(5);
            let error = comm.all_reduce_weighted(data.slice_mut(), &weights).expect_err("no mean");
            assert_names(&error, &[&format!("{weights:?}")]);
            assert_eq!(data, f32s(5));
        });
    }
    suite.done("mismatches");
}
