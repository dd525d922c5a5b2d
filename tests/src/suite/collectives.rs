//! Reductions × dtypes × operations × lengths, in place and out of place, aligned and not, against the oracle; for host memory also
//! collectives of many windows and in direct succession.

use std::rc::Rc;
use std::thread::sleep;
use std::time::Duration;

use gradsync::comm::{Collectives, Communicator, Ranks, ReduceOp, Scaling};

use super::checks::{Checks, Expected};
use super::operands::{OnHost, Operands};
use super::{Report, Suite, Transport, data_movement};
use crate::array::Array;
use crate::inputs::{Random, edges, vector};
use crate::oracle::Format;
use crate::oracle::reduce::{self, Op};
use crate::tolerance::mean;

/// The reductions over ranks.
pub const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];

/// Factors of which no dtype represents 0.1 and 1/3; f16 represents 1.0009765625 and bf16 does not; f32 represents 1.0000152587890625, and
/// neither 16-bit dtype does.
pub const FACTORS: [Scaling; 7] = [
    Scaling { before: 0.1, after: 1.0 },
    Scaling { before: 1.0, after: 1.0 / 3.0 },
    Scaling { before: 0.1, after: -3.0 },
    Scaling { before: -0.5, after: 4.0 },
    Scaling { before: 1.5, after: 1.0009765625 },
    Scaling { before: 1.0009765625, after: 1.0000152587890625 },
    Scaling { before: 0.0, after: 2.0 },
];

/// The offsets of operands in elements after an aligned address.
pub const BEGINS: [usize; 2] = [0, 1];

/// The dtypes, operations and lengths of the cases.
#[derive(Clone, Copy)]
pub struct Grid<'g> {
    /// What distinguishes the communicator, in the names of cases.
    pub how: &'g str,
    /// The dtypes.
    pub formats: &'g [Format],
    /// The reductions.
    pub ops: &'g [ReduceOp],
    /// The lengths of whole vectors.
    pub lens: &'g [usize],
    /// The lengths of shards; a rank has one shard, or one for every rank.
    pub shards: &'g [usize],
}

/// The oracle's counterpart of a reduction.
fn oracle_op(op: ReduceOp) -> Op {
    match op {
        ReduceOp::Sum => Op::Sum,
        ReduceOp::Mean => Op::Mean,
        ReduceOp::Max => Op::Max,
        ReduceOp::Min => Op::Min,
        other => panic!("{other} is not tested here"),
    }
}

/// One vector of ordinary numbers per rank; all ranks compute the same vectors.
pub fn inputs(format: Format, world_size: usize, len: usize) -> Vec<Vec<f64>> {
    (0..world_size).map(|rank| vector(format, len, (rank * 31 + len) as u64)).collect()
}

/// One vector of arbitrary bits per rank, NaN with payloads among them; all ranks compute the same vectors.
pub fn patterns(format: Format, world_size: usize, len: usize) -> Vec<Array> {
    (0..world_size).map(|rank| pattern(format, rank, len)).collect()
}

/// The vector of one rank among [`patterns`].
pub fn pattern(format: Format, rank: usize, len: usize) -> Array {
    let mut random = Random::new((rank * 37 + len + 1) as u64);
    Array::from_patterns(format, (0..len).map(|_| random.bits()))
}

/// A reduction as transports of host memory compute it: in f64, in rank order, factors included, with one rounding. A mean without factors
/// has two further roundings in f64.
pub fn reduced_once(op: ReduceOp, format: Format, scaling: Scaling, inputs: &[Vec<f64>]) -> Expected {
    let column = |index: usize| inputs.iter().map(move |input| input[index]);
    let len = inputs[0].len();
    if scaling == Scaling::NONE && op == ReduceOp::Mean {
        let exact = (0..len).map(|index| reduce::reduce(Op::Mean, column(index))).collect();
        let bounds = (0..len).map(|index| mean(format, &column(index).collect::<Vec<f64>>())).collect();
        return Expected::Within { exact, bounds };
    }
    if scaling == Scaling::NONE {
        return Expected::Values(reduce::all_reduce(oracle_op(op), format, inputs));
    }
    let total = |index: usize| {
        let scaled = column(index).map(|value| value * scaling.before);
        let total = match op {
            ReduceOp::Max => scaled.reduce(f64::max),
            ReduceOp::Min => scaled.reduce(f64::min),
            ReduceOp::Mean => scaled.reduce(|sum, value| sum + value).map(|sum| sum / inputs.len() as f64),
            _ => scaled.reduce(|sum, value| sum + value),
        };
        format.round(total.expect("a rank") * scaling.after)
    };
    Expected::Values((0..len).map(total).collect())
}

/// all_reduce, all_reduce_into, reduce_scatter and reduce_scatter_in_place.
pub fn reductions<O: Operands>(operands: &O, grid: Grid<'_>, report: &mut impl Report) {
    for (&format, &op) in grid.formats.iter().flat_map(|format| grid.ops.iter().map(move |op| (format, op))) {
        let name = format!("{}{}", format.name(), grid.how);
        report.case(&format!("all_reduce {op} {name}"), || all_reduce(operands, op, format, grid.lens));
        if !grid.shards.is_empty() {
            report.case(&format!("reduce_scatter {op} {name}"), || reduce_scatter(operands, op, format, grid.shards));
        }
    }
}

fn all_reduce<O: Operands>(operands: &O, op: ReduceOp, format: Format, lens: &[usize]) {
    let comm = operands.comm();
    let mut checks = Checks::new(comm);
    for &len in lens {
        let inputs = inputs(format, comm.world_size(), len);
        let expected = operands.reduced(op, format, Scaling::NONE, &inputs);
        let own = Array::new(format, &inputs[comm.rank()]);
        for begin in BEGINS {
            let mut data = operands.place(&own, begin);
            comm.all_reduce(O::slice_mut(&mut data), op).unwrap();
            checks.same(format!("{len} elements from {begin} on, in place"), operands.read(&data), &expected);

            let (input, mut output) = (operands.place(&own, begin), operands.room(format, len, 1 - begin));
            comm.all_reduce_into(O::slice(&input), O::slice_mut(&mut output), op, Scaling::NONE).unwrap();
            checks.same(format!("{len} elements from {begin} on"), operands.read(&output), &expected);
            let untouched = Expected::bits(own.clone());
            checks.own(format!("the input of {len} elements from {begin} on"), operands.read(&input), &untouched);
        }
    }
    checks.finish();
}

fn reduce_scatter<O: Operands>(operands: &O, op: ReduceOp, format: Format, shards: &[usize]) {
    let comm = operands.comm();
    let mut checks = Checks::new(comm);
    for &shard in shards {
        let inputs = inputs(format, comm.world_size(), shard * comm.world_size());
        let expected = operands.reduced(op, format, Scaling::NONE, &inputs).shard(comm.rank(), shard);
        let own = Array::new(format, &inputs[comm.rank()]);
        for begin in BEGINS {
            let (input, mut output) = (operands.place(&own, begin), operands.room(format, shard, 1 - begin));
            comm.reduce_scatter(O::slice(&input), O::slice_mut(&mut output), op).unwrap();
            checks.own(format!("shards of {shard} from {begin} on"), operands.read(&output), &expected);
            let untouched = Expected::bits(own.clone());
            checks.own(format!("the input with shards of {shard} from {begin} on"), operands.read(&input), &untouched);

            let mut data = operands.place(&own, begin);
            comm.reduce_scatter_in_place(O::slice_mut(&mut data), op).unwrap();
            // The contents of the other shards are unspecified.
            let result = operands.read(&data).range(comm.rank() * shard..(comm.rank() + 1) * shard);
            checks.own(format!("shards of {shard} from {begin} on, in place"), result, &expected);
        }
    }
    checks.finish();
}

/// all_reduce with factors before and after the reduction, in place and out of place. A negative factor before a maximum gives the maximum
/// of the products.
pub fn scaled<O: Operands>(operands: &O, grid: Grid<'_>, report: &mut impl Report) {
    for (&format, &op) in grid.formats.iter().flat_map(|format| grid.ops.iter().map(move |op| (format, op))) {
        let name = format!("scaled all_reduce {op} {}{}", format.name(), grid.how);
        report.case(&name, || scaled_all_reduce(operands, op, format, grid.lens));
    }
}

fn scaled_all_reduce<O: Operands>(operands: &O, op: ReduceOp, format: Format, lens: &[usize]) {
    let comm = operands.comm();
    let mut checks = Checks::new(comm);
    for &len in lens {
        let inputs = inputs(format, comm.world_size(), len);
        let own = Array::new(format, &inputs[comm.rank()]);
        for (index, scaling) in FACTORS.into_iter().enumerate() {
            let expected = operands.reduced(op, format, scaling, &inputs);
            let (begin, is_in_place) = (index / 2 % 2, (index + len) % 2 == 0);
            let mut input = operands.place(&own, begin);
            if is_in_place {
                comm.all_reduce_scaled(O::slice_mut(&mut input), op, scaling).unwrap();
                checks.same(format!("{len} elements, {scaling:?}, in place"), operands.read(&input), &expected);
                continue;
            }
            let mut output = operands.room(format, len, begin);
            comm.all_reduce_into(O::slice(&input), O::slice_mut(&mut output), op, scaling).unwrap();
            checks.same(format!("{len} elements, {scaling:?}"), operands.read(&output), &expected);
            let untouched = Expected::bits(own.clone());
            checks.own(format!("the input of {len} elements, {scaling:?}"), operands.read(&input), &untouched);
        }
    }
    checks.finish();
}

/// NaN, infinities, subnormals and the limits, rotated on each rank; and NaN on one rank alone, which gives the same bits on all.
pub fn edge_values<O: Operands>(operands: &O, grid: Grid<'_>, report: &mut impl Report) {
    let (comm, rank, world_size) = (operands.comm(), operands.comm().rank(), operands.comm().world_size());
    for (&format, &op) in grid.formats.iter().flat_map(|format| grid.ops.iter().map(move |op| (format, op))) {
        report.case(&format!("{op} of {} edges{}", format.name(), grid.how), || {
            let mut inputs = vec![edges(format); world_size];
            let len = inputs[0].len();
            inputs.iter_mut().enumerate().for_each(|(rank, input)| input.rotate_left(rank * 5 % len));
            let expected = operands.reduced(op, format, Scaling::NONE, &inputs);
            let mut data = operands.place(&Array::new(format, &inputs[rank]), 1);
            comm.all_reduce(O::slice_mut(&mut data), op).unwrap();
            let mut checks = Checks::new(comm);
            checks.same("the edges", operands.read(&data), &expected);
            let own = if rank + 1 == world_size { f64::NAN } else { 1.0 };
            let mut data = operands.place(&Array::new(format, &[own, 2.0]), 0);
            comm.all_reduce(O::slice_mut(&mut data), op).unwrap();
            let got = operands.read(&data);
            let of_two = if op == ReduceOp::Sum { 2.0 * world_size as f64 } else { 2.0 };
            checks.same("NaN on the last rank", got, &Rc::new(Expected::Values(vec![f64::NAN, of_two])));
            checks.finish();
        });
    }
}

/// The lengths of every transport of host memory, around the boundaries at which transports change their algorithm: 1536 is the longest
/// payload of 16-bit numbers that travels with a call between processes.
const LENS: [usize; 7] = [0, 1, 33, 257, 1536, 1537, 4097];

/// All cases of host memory.
pub fn run<T: Transport>(suite: &mut Suite<T>) {
    run_up_to(suite, usize::MAX);
    let (formats, ops) = (&[Format::F32, Format::BF16], &[ReduceOp::Sum, ReduceOp::Max]);
    let grid = Grid { how: ", long", formats, ops, lens: &[150_001], shards: &[] };
    scaled(&OnHost(&suite.comm), grid, &mut suite.report);
    several_windows(suite);
    back_to_back(suite);
    suite.done("long collectives");
}

/// The cases in which no call has more than `most_bytes` bytes.
pub fn run_up_to<T: Transport>(suite: &mut Suite<T>, most_bytes: usize) {
    let longest = most_bytes / size_of::<f64>() / suite.world_size();
    let lens: Vec<usize> = LENS.into_iter().filter(|&len| len <= longest).collect();
    // Every rank computes the vectors of all ranks, so many ranks have short shards.
    let shards: Vec<usize> = lens.iter().copied().filter(|len| len * suite.world_size() <= 40_000).collect();
    let grid = Grid { how: "", formats: &Format::ALL, ops: &OPS, lens: &lens, shards: &shards };
    let (operands, report) = (OnHost(&suite.comm), &mut suite.report);
    reductions(&operands, grid, report);
    scaled(&operands, Grid { lens: &[0, 33, 4098.min(longest)], ..grid }, report);
    edge_values(&operands, grid, report);
    data_movement::run(&operands, grid, report);
    suite.check("barriers", |comm| (0..50).for_each(|_| comm.barrier().unwrap()));
    suite.done("collectives");
}

/// The length exceeds the window that a reduction holds at a time, and is no multiple of it. Sums of small integers are exact.
fn several_windows<T: Transport>(suite: &mut Suite<T>) {
    let (rank, world_size) = (suite.rank(), suite.world_size());
    let value = |rank: usize, i: usize| ((i % 1013) * (rank + 1)) as f32;
    let sum = |i: usize| ((i % 1013) * (world_size * (world_size + 1) / 2)) as f32;
    suite.check("all_reduce of 5000011 f32", |comm| {
        let mut data: Vec<f32> = (0..5_000_011).map(|i| value(rank, i)).collect();
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_elements(&data, sum, "the sum");
    });
    suite.check("broadcast of 5000011 f32", |comm| {
        let mut data: Vec<f32> = (0..5_000_011).map(|i| value(rank, i)).collect();
        comm.broadcast(&mut data, world_size - 1).unwrap();
        assert_elements(&data, |i| value(world_size - 1, i), "the root's numbers");
    });
    suite.check("reduce_scatter of several windows", |comm| {
        let len = 4_500_007 / world_size;
        let input: Vec<f32> = (0..len * world_size).map(|i| value(rank, i)).collect();
        let mut output = vec![7.0f32; len];
        comm.reduce_scatter(&input, &mut output, ReduceOp::Sum).unwrap();
        assert_elements(&output, |i| sum(rank * len + i), "the shard");
    });
    suite.check("all_to_all and all_gather of several windows", |comm| {
        let len = 4_500_007 / world_size;
        let input: Vec<f32> = (0..len * world_size).map(|i| value(rank, i)).collect();
        let (mut apart, mut in_place, mut mixed) = (vec![7.0f32; len * world_size], input.clone(), input.clone());
        comm.all_to_all(&input, &mut apart).unwrap();
        comm.all_to_all_in_place(&mut in_place).unwrap();
        data_movement::all_to_all_mixed(comm as &dyn Communicator, &input, &mut mixed);
        for output in [&apart, &in_place, &mixed] {
            assert_elements(output, |i| value(i / len, rank * len + i % len), "the blocks");
        }
        comm.all_gather(&input[..len], &mut apart).unwrap();
        assert_elements(&apart, |i| value(i / len, i % len), "the shards");
    });
}

#[track_caller]
fn assert_elements<N: Copy + PartialEq + std::fmt::Debug>(got: &[N], expected: impl Fn(usize) -> N, what: &str) {
    let wrong = got.iter().enumerate().find(|&(i, &got)| got != expected(i));
    assert_eq!(wrong, None, "{what}, of {} elements", got.len());
}

/// Collectives in direct succession, with ranks that are late in turn. The lengths are around the largest payload that travels eagerly with
/// a call in shared memory, and around payloads of whole chunks. No call may touch data of the call before that a slower rank still reads.
fn back_to_back<T: Transport>(suite: &mut Suite<T>) {
    const ON_A_BOARD: usize = (256 << 10) / size_of::<f64>();
    let (rank, world_size) = (suite.rank(), suite.world_size());
    let with_a_call = ON_A_BOARD / world_size;
    let in_chunks = |parts: usize| ON_A_BOARD / parts / 64 * 64;
    let lens = [with_a_call, in_chunks(world_size + 1) * world_size, 2 * in_chunks(world_size), 7, 3 * with_a_call];
    suite.check("collectives back to back", |comm| {
        for round in 0..60 {
            let len = lens[round % lens.len()] + [0, 1, 0, 5][round % 4] - [0, 0, 1, 0][round % 4];
            let value = |rank: usize, i: usize| ((i % 1013 + round) * (rank + 1)) as f64;
            let total = |i: usize| value(0, i) * (world_size * (world_size + 1) / 2) as f64;
            if round % world_size == rank {
                sleep(Duration::from_micros(50 * (round as u64 % 7)));
            }
            let mut data: Vec<f64> = (0..len).map(|i| value(rank, i)).collect();
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_elements(&data, total, &format!("all_reduce in round {round}"));
            let (root, mut data) = (round % world_size, (0..len).map(|i| value(rank, i)).collect::<Vec<f64>>());
            comm.broadcast(&mut data, root).unwrap();
            assert_elements(&data, |i| value(root, i), &format!("broadcast in round {round}"));
            let input: Vec<f64> = (0..len * world_size).map(|i| value(rank, i)).collect();
            let mut output = vec![-1.0f64; len];
            comm.reduce_scatter(&input, &mut output, ReduceOp::Sum).unwrap();
            assert_elements(&output, |i| total(rank * len + i), &format!("reduce_scatter in round {round}"));
            let mut all = vec![-1.0f64; len * world_size];
            comm.all_gather(&output, &mut all).unwrap();
            assert_elements(&all, total, &format!("all_gather in round {round}"));
            let mut exchanged = vec![-1.0f64; len * world_size];
            comm.all_to_all(&input, &mut exchanged).unwrap();
            let block = |i: usize| value(i / len.max(1), rank * len + i % len.max(1));
            assert_elements(&exchanged, block, &format!("all_to_all in round {round}"));
            comm.all_to_all_in_place(&mut exchanged).unwrap();
            assert!(exchanged == input, "a second all_to_all of {len} in round {round} is the inverse");
        }
    });
}
