//! Test cases for collectives on host memory: identical inputs and comparisons for every transport.

use gradsync::comm::{Collectives, ReduceOp};
use gradsync::memory::Memory;

use crate::inputs::vector;
use crate::oracle::Format;
use crate::oracle::reduce::{self, Op};
use crate::tolerance::{assert_equal, assert_within, mean};

/// Lengths around the boundaries at which transports change their algorithm.
pub const LENS: [usize; 5] = [0, 1, 33, 257, 4097];

/// The library's counterpart of the oracle's operation.
pub fn ours(op: Op) -> ReduceOp {
    match op {
        Op::Sum => ReduceOp::Sum,
        Op::Mean => ReduceOp::Mean,
        Op::Max => ReduceOp::Max,
        Op::Min => ReduceOp::Min,
    }
}

/// One vector per rank.
pub fn inputs(format: Format, world_size: usize, len: usize) -> Vec<Vec<f64>> {
    (0..world_size).map(|rank| vector(format, len, (rank * 31 + len) as u64)).collect()
}

/// An all-to-all in place on ranks of even numbers, from `input` to `data` on the others. `data` holds the input already.
pub fn all_to_all_mixed<'a, M: Memory>(
    comm: &(impl Collectives<M> + ?Sized),
    input: impl Into<M::Slice<'a>>,
    data: impl Into<M::SliceMut<'a>>,
) {
    let moved = match comm.rank() % 2 {
        0 => comm.all_to_all_in_place(data),
        _ => comm.all_to_all(input, data),
    };
    moved.unwrap();
}

/// Compares a reduction with the oracle: sum, max and min for equality (f64 in rank order, one rounding), mean within two further roundings
/// in f64.
pub fn assert_reduced(label: &str, op: Op, format: Format, got: &[f64], inputs: &[Vec<f64>]) {
    if op != Op::Mean {
        return assert_equal(label, got, &reduce::all_reduce(op, format, inputs));
    }
    let columns: Vec<Vec<f64>> = (0..got.len()).map(|i| inputs.iter().map(|input| input[i]).collect()).collect();
    let exact: Vec<f64> = columns.iter().map(|column| reduce::reduce(op, column.iter().copied())).collect();
    let bounds: Vec<f64> = columns.iter().map(|column| mean(format, column)).collect();
    assert_within(label, format, got, &exact, &bounds);
}
